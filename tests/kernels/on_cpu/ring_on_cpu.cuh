// What ring_decode.cu needs of hopper.cuh beyond on_cpu/wgmma_on_cpu.cuh: products of one warp and loads.
#pragma once
#include "wgmma_on_cpu.cuh"

static float load_early_float(const float* p) { return *p; }
static uint4 load_early(const void* p) { return read_x(p); }
template <bool BF16> static unsigned short round16(float v) { return bits16(v, BF16); }
template <bool BF16> static void mma16816(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  product([](unsigned bits) { return value16(bits, BF16); }, acc, a[0], a[1], a[2], a[3], b0, b1);
}
