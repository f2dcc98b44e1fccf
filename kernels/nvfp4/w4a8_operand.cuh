// From the tiles of w4a8_tiles.py to the A fragments of fp8 wgmma, in registers.
#ifndef NVFP4_W4A8_OPERAND_CUH
#define NVFP4_W4A8_OPERAND_CUH

#include "nvfp4/operand.cuh"

// One lane's codes and scales of 16 rows x 128 k: rows g (words 0, 1 of each uint4) and g + 8, 64 k in each uint4.
struct Packed8 {
    uint4 codes[2];
    unsigned scales;  // bytes: 2 * (which 64 k) + (which row)
    DEVICE void load(unsigned codes_at, unsigned scales_at) {
        codes[0] = lds128(codes_at);
        codes[1] = lds128(codes_at + 512);
        scales = lds32(scales_at);
    }
};

// Eight codes -> two words of four e4m3 bytes. Nibble i holds the magnitude of code i; the signs of codes 0 to 3 are
// the upper bits of the odd nibbles, those of codes 4 to 7 of the even ones.
DEVICE void decode8(unsigned w, unsigned low, unsigned high, unsigned& first, unsigned& second) {
    const unsigned selectors = w & 0x77777777u;
    first = select_bits(w, prmt(low, high, selectors), 0x80808080u);
    second = select_bits(w << 4, prmt(low, high, selectors >> 16), 0x80808080u);
}

// -> the A fragments of four products of 32 k.
//
// A scale group (16 weights) is code * S with S its block scale in units of the row (w4a8_tiles.py). Rounded to e4m3 the
// products are 0, S / 2, S, U, 2 S, 2 U, 4 S, 4 U with U = 1.5 S rounded. A power of two is 8 in the bytes, and U is
// S + 4 or S + 5, whichever is nearer: so a scale byte of seven bits of S and one of that choice gives all eight by
// additions, without a table in memory, as long as none is subnormal and none above 0x7E: w4a8_tiles.py sees to it.
DEVICE void decode_fragments8(const Packed8& packed, unsigned (&a)[4][4]) {
    const unsigned s = packed.scales & 0x7F7F7F7Fu, u = s + (packed.scales >> 7 & 0x01010101u);
#pragma unroll
    for (int part = 0; part < 2; part++) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const unsigned i = 2 * part + row;
            // Bytes 0, S - 8, S, U and S + 8, U + 8, S + 16, U + 16; u holds U - 4. 32-bit sums: no byte carries but the
            // third of `low`, which undoes the borrow of S - 8.
            const unsigned low = prmt(s, u, (4 + i) << 12 | i << 8 | i << 4 | (8 | i)) + 0x03FFF800u;
            const unsigned high = prmt(s, u, (4 + i) << 12 | i << 8 | (4 + i) << 4 | i) + 0x14100C08u;
            const uint4& c = packed.codes[part];
            decode8(row ? c.z : c.x, low, high, a[2 * part][row], a[2 * part][2 + row]);
            decode8(row ? c.w : c.y, low, high, a[2 * part + 1][row], a[2 * part + 1][2 + row]);
        }
    }
}

#endif
