// From the tiles of tiles.py to fragments of mma.m16n8k16, in registers.
//
// A tile is 16 weight rows by 64 k: 32 x 16 bytes of codes, then 32 x 2 bytes of scales. Lane 4 g + t of a warp owns
// k = 16 t .. 16 t + 15 of rows g and g + 8: one whole scale group of each, so it converts two scales per 32 codes and
// shares none. The four products of a tile take k = 16 t + 4 j + {0, 1 | 2, 3}, j = 0 .. 3, as columns {2t, 2t + 1 |
// 2t + 8, 2t + 9} of the fragment: any order of k will do as long as x has the same, and this one makes the other
// operand 32 contiguous bytes of a row of x.
#ifndef NVFP4_OPERAND_CUH
#define NVFP4_OPERAND_CUH

#include "sm90/mma.cuh"

constexpr int TILE_CODE_BYTES = 512;
constexpr int TILE_BYTES = 576;
constexpr float OPERAND_TO_VALUE = 128.0f;  // an operand is value * 2^-7 in both formats

// The descriptor of x, a K-major operand. The mask clears no bit (shared memory ends below 256 KB): without it ptxas
// makes other code than the one that was measured.
DEVICE u64 x_descriptor(u32 tile) { return smem_descriptor_128B(tile & 0x3FFFFu); }

// 16 codes in two words -> eight pairs of operands without their scale: bf16 of value * 2^-126 or fp16 of value *
// 2^-14. pair[i] holds codes 2 i (low half) and 2 i + 1.
//
// bf16: sign at bit 15, exponent and mantissa at bits 8:6 of each half. Three codes per half of a word are a rotation
// and a mask away; the four bits left in either word combine into one more word, which gives the last two: 16
// operations for 16 codes (7 shifts, 9 LOP3). No layout of one word does it with one rotation per code. tiles.py
// derives the order of the bits from the same list of operations.
template <bool BF16>
DEVICE void decode16(unsigned w0, unsigned w1, unsigned (&pair)[8]) {
    if constexpr (BF16) {
        const unsigned mask = 0x81C081C0u;
        pair[0] = w0 & mask;
        pair[1] = rotate_right(w0, 4) & mask;
        pair[2] = (w0 << 6) & mask;
        pair[3] = w1 & mask;
        pair[4] = rotate_right(w1, 4) & mask;
        pair[5] = (w1 << 6) & mask;
        const unsigned left = select_bits(w0, w1 >> 2, 0x60306030u);
        pair[6] = rotate_right(left, 6) & mask;
        pair[7] = (left << 4) & mask;
    } else {
        // fp16 wants bits 15 and 11:9: a nibble at the top of its half, its three low bits moved down by three.
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const unsigned top = (i < 4 ? w0 : w1) << (12 - 4 * (i & 3));
            pair[i] = (top & 0x80008000u) | ((top >> 3) & 0x0E000E00u);
        }
    }
}

// Scale bytes are 2^(e - 22) (1 + m / 8) with e in the upper five bits: e4m3's values with its subnormals normalised,
// so that bits can be placed without a special case. -> the scale in both halves: bf16 of scale * 2^119, fp16 of * 2^7.
template <bool BF16>
DEVICE unsigned scale_pair(unsigned scales, unsigned which) {
    const unsigned both = prmt(scales, 0u, which ? 0x4141u : 0x4040u);
    return BF16 ? both * 16u + 0x70007000u : both << 7;
}

// One lane's codes and scales of a tile -> the A fragments of its four products.
template <bool BF16>
DEVICE void tile_fragments(const uint4& codes, unsigned scales, unsigned (&a)[4][4]) {
    unsigned upper[8], lower[8];
    decode16<BF16>(codes.x, codes.y, upper);
    decode16<BF16>(codes.z, codes.w, lower);
    const unsigned upper_scale = scale_pair<BF16>(scales, 0), lower_scale = scale_pair<BF16>(scales, 1);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[j][0] = mul2<BF16>(upper[2 * j], upper_scale);
        a[j][1] = mul2<BF16>(lower[2 * j], lower_scale);
        a[j][2] = mul2<BF16>(upper[2 * j + 1], upper_scale);
        a[j][3] = mul2<BF16>(lower[2 * j + 1], lower_scale);
    }
}

// tile_fragments in two operations less: one word has both scales, and a multiplication takes either half as it is.
template <bool BF16>
DEVICE void tile_fragments_by_half(const uint4& codes, unsigned scales, unsigned (&a)[4][4]) {
    unsigned upper[8], lower[8];
    decode16<BF16>(codes.x, codes.y, upper);
    decode16<BF16>(codes.z, codes.w, lower);
    const unsigned apart = prmt(scales, 0u, 0x4140u), both = BF16 ? apart * 16u + 0x70007000u : apart << 7;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[j][0] = mul2_by_half<BF16, 0>(upper[2 * j], both);
        a[j][1] = mul2_by_half<BF16, 1>(lower[2 * j], both);
        a[j][2] = mul2_by_half<BF16, 0>(upper[2 * j + 1], both);
        a[j][3] = mul2_by_half<BF16, 1>(lower[2 * j + 1], both);
    }
}

#endif
