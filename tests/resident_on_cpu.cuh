// What wgmma_resident.cu needs of hopper.cuh and wgmma.cuh beyond tests/wgmma_on_cpu.cuh: stores into any CTA of the
// cluster, which land late and in any order, and a few loads.
#pragma once
#include "wgmma_on_cpu.cuh"

#include <deque>

static std::deque<float4> sent;  // what stores into another CTA carry until they land
static void peer_store(unsigned remote, const float4& v, unsigned remote_barrier) {
  if (remote % 16) stop("store not on 16 bytes", remote);
  place(remote, 16), sent.push_back(v);
  cpu.copies.push_back({remote, remote_barrier, 16, (const unsigned char*)&sent.back(), nullptr, 0, 0}), cpu.moves++;
}
static void barrier_wait_cluster(unsigned address, unsigned parity) { barrier_wait(address, parity); }
static unsigned long long leave_first() { return 0; }
static void bulk_copy_by(unsigned to, const void* from, unsigned bytes, unsigned done, unsigned long long) {
  bulk_copy(to, from, bytes, done);
}
static uint4 load_once(const void* p) { return *(const uint4*)p; }
static unsigned shared_load2(unsigned at) { return *(const unsigned short*)place(at, 2); }
static float4 shared_load_float4(unsigned at) { return *(const float4*)place(at, 16); }
static void shared_store4(unsigned at, unsigned v) { memcpy(place(at, 4), &v, 4); }
static float shuffle_xor(float v, int mask) {
  Warp& w = my_warp();
  const int lane = cpu.now->thread % 32;
  memcpy(&w.row[lane], &v, 4);
  __syncwarp();
  memcpy(&v, &w.row[lane ^ mask], 4);
  __syncwarp();
  return v;
}
static void next_kernel_may_start() {}
static void wait_for_kernels_ahead() { others(); }
