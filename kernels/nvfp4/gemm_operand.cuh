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

// SiLU(gate) * up.
DEVICE float silu_times(float gate, float up) {
    return __fdividef(gate, 1.0f + exp2_fast(-1.4426950408889634f * gate)) * up;
}

// A quad's lane t has words 8 t .. 8 t + 7 of 64 k of x; -> words 8 j + t and 8 j + 4 + t at 2 j and 2 j + 1: what it
// multiplies where k is in wgmma's own order.
DEVICE void deal_to_quad(unsigned (&o)[8], int t) {
    unsigned v[2][4] = {{o[0], o[1], o[2], o[3]}, {o[4], o[5], o[6], o[7]}};
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int mask = 1; mask <= 2; mask++) {  // two halves of a transposition of 4 x 4 words
            const bool upper = t & mask;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i & mask) continue;
                const unsigned got = shuffle_xor(upper ? v[h][i] : v[h][i + mask], mask);
                upper ? v[h][i] = got : v[h][i + mask] = got;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) o[2 * j + h] = v[h][j];
    }
}

// Where row words that need no shuffle have feature k: a quad's lane t has its 16 of 64 side by side, k = 16 j + 2 t +
// {0, 1, 8, 9}, as deal_to_quad leaves them.
DEVICE int dealt_place(int k) {
    const int j = k / 16 % 4, upper = k / 8 % 2, t = k / 2 % 4;
    return k / 64 * 64 + 16 * t + 4 * j + 2 * upper + k % 2;
}

#endif
