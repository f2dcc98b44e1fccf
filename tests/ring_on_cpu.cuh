// What ring_decode.cu needs of hopper.cuh beyond tests/wgmma_on_cpu.cuh: products of one warp (layouts of the PTX
// manual for mma.m16n8k16), stores into another CTA, which land late and in any order, and a few loads.
#pragma once
#include "wgmma_on_cpu.cuh"

#include <deque>

static std::deque<float4> sent;  // what stores into another CTA carry until they land
static void barrier_wait_cluster(unsigned address, unsigned parity) { barrier_wait(address, parity); }
static unsigned long long leave_first() { return 0; }
static void bulk_copy_by(unsigned to, const void* from, unsigned bytes, unsigned done, unsigned long long) {
  bulk_copy(to, from, bytes, done);
}
static void peer_store(unsigned remote, const float4& v, unsigned remote_barrier) {
  if (remote % 16 || remote >> 24 == (unsigned)cpu.now->cta || remote >> 24 >= (unsigned)cpu.ctas) stop("peer", remote);
  sent.push_back(v);
  cpu.copies.push_back({remote, remote_barrier, 16, (const unsigned char*)&sent.back(), nullptr, 0, 0}), cpu.moves++;
}
static void next_kernel_may_start() {}
static void wait_for_kernels_ahead() {}
static float load_early_float(const float* p) { return *p; }
static uint4 load_early(const void* p) { return *(const uint4*)p; }
template <bool BF16> static unsigned short round16(float v) { return bits16(v, BF16); }
static struct { unsigned a[32][4], b[32][2]; } fragments[MOST_CTAS][32];
template <bool BF16> static void mma16816(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  auto& f = fragments[cpu.now->cta][cpu.now->thread / 32];
  const int lane = cpu.now->thread % 32, g = lane / 4, t = lane % 4;
  memcpy(f.a[lane], a, 16), f.b[lane][0] = b0, f.b[lane][1] = b1;
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const unsigned pair = f.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      acc[i] += value16(pair >> 16 * (k % 2), BF16) * value16(f.b[column * 4 + k % 8 / 2][k / 8] >> 16 * (k % 2), BF16);
    }
  }
  __syncwarp();
}
