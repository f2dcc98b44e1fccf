// What wgmma_stream.cu needs of hopper.cuh and wgmma.cuh beyond on_cpu/wgmma_on_cpu.cuh.
#pragma once
#include "wgmma_on_cpu.cuh"

static uint4 load_early(const void* p) { return read_x(p); }
static unsigned lds16(unsigned at) { return *(const unsigned short*)place(at, 2); }
static void sts32(unsigned at, unsigned v) { memcpy(place(at, 4), &v, 4); }
static float __uint_as_float(unsigned bits) { return float_of(bits); }
static int peeks_in_vain;
static std::map<const float4*, int> peeks_at;
static float4 peek(const float4* p) {
  if (++peeks_in_vain > 300000) stop("sums that never come");
  others();
  const float none = float_of(0xFFFFFFFFu);
  return peeks_at[p]++ ? *p : float4{none, none, none, none};  // a store may be seen late
}
static void store_for_gpu(float4* p, const float4& v) { *p = v, moved(), peeks_in_vain = peeks_at[p] = 0; }
static bool some_lane(bool v) {
  const Given all = exchange({v});
  bool some = false;
  for (int lane = 0; lane < 32; lane++) some |= all.from(lane) != 0;
  return some;
}
static void store_two_transposed(unsigned row, unsigned m0, unsigned m1) {
  const Given w = exchange({m0, m1});
  const int lane = own_lane();
  if (row % 16) stop("row not on 16 bytes", row);
  for (int c = 0; c < 8 && lane < 16; c++) {
    const unsigned short v = w.from(4 * c + lane % 8 / 2, lane / 8) >> 16 * (lane % 2);
    memcpy(place(row + 2 * c, 2), &v, 2);
  }
  __syncwarp();
}
