// From the tiles of gemm_tiles.py to the A fragments of wgmma, in registers.
#ifndef NVFP4_GEMM_OPERAND_CUH
#define NVFP4_GEMM_OPERAND_CUH

#include "nvfp4/operand.cuh"

// One lane's codes and scales of a tile of 16 rows x 64 k.
struct Packed {
    uint4 codes;
    uint2 scales;
    DEVICE void load(unsigned codes_at, unsigned scales_at) {
        codes = lds128(codes_at);
        scales = lds64(scales_at);
    }
};

// -> the A fragments of the tile's four wgmmas. A word of scales holds those of wgmmas 0, 2, 1, 3 in its bytes, rotated
// left to where the format wants them.
template <bool BF16>
DEVICE void decode_fragments(const Packed& packed, unsigned (&a)[4][4]) {
    constexpr unsigned MASK = BF16 ? 0x0FF00FF0u : 0x7F807F80u, ONES = BF16 ? 0x70007000u : 0;
    const uint4 codes = packed.codes;
    const uint2 scales = packed.scales;
    unsigned upper[8], lower[8];
    decode16<BF16>(codes.x, codes.y, upper);
    decode16<BF16>(codes.z, codes.w, lower);
    const unsigned above[2] = {mask_and_set(scales.x, MASK, ONES), mask_and_set(rotate_right(scales.x, 8), MASK, ONES)};
    const unsigned below[2] = {mask_and_set(scales.y, MASK, ONES), mask_and_set(rotate_right(scales.y, 8), MASK, ONES)};
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            a[j][2 * part] = mul2_by_half<BF16, 0>(upper[2 * j + part], above[j / 2]);
            a[j][2 * part + 1] = mul2_by_half<BF16, 0>(lower[2 * j + part], below[j / 2]);
            a[j + 1][2 * part] = mul2_by_half<BF16, 1>(upper[2 * j + 2 + part], above[j / 2]);
            a[j + 1][2 * part + 1] = mul2_by_half<BF16, 1>(lower[2 * j + 2 + part], below[j / 2]);
        }
    }
}

#endif
