// The PTX that the Hopper kernels of this family are made of, one instruction (or one idiom) per function, beyond that
// of ../ptx.cuh. Addresses of shared memory are 32-bit (`shared_address`). Nothing here depends on a CUDA header.
#ifndef NVFP4_HOPPER_CUH
#define NVFP4_HOPPER_CUH

#include "ptx.cuh"

// --- mbarriers --------------------------------------------------------------------------------------------------
// barrier_init_done, and visible to the copy engine.
DEVICE void barrier_init_fence() {
  barrier_init_done();
  fence_async_shared();
}

// barrier_wait for a barrier that a CTA of the cluster other than this one completes.
DEVICE void barrier_wait_cluster(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// named_sync of warps that come from different places in the code: bar.sync, the aligned form, promises that all of
// them execute one and the same instruction.
DEVICE void named_meet(int id, int threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// --- copies -----------------------------------------------------------------------------------------------------
// bulk_copy of bytes that nobody will read again: they leave L2 first.
DEVICE void bulk_copy_once(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "policy;\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

DEVICE void bulk_copy_by(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// --- clusters ---------------------------------------------------------------------------------------------------
DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of the cluster is here. Relaxed: what must be seen is released by barrier_init_fence, not by a fence of
// every thread.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of our `local` shared memory in CTA `rank` of the cluster.
DEVICE unsigned peer_address(unsigned local, unsigned rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}

// 16 bytes into another CTA's shared memory, counted by a barrier of that CTA.
DEVICE void peer_store(unsigned remote, const float4& v, unsigned remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
      "r"(remote_barrier)
      : "memory");
}

// --- arithmetic -------------------------------------------------------------------------------------------------
// Two 16-bit products, nearest even, subnormals kept.
template <bool BF16>
DEVICE unsigned mul2(unsigned a, unsigned b) {
  unsigned out;
  if constexpr (BF16) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  }
  return out;
}

// mul2 by the low (HALF 0) or the high (1) half of b: the multiplication takes either one as it is.
template <bool BF16, int HALF>
DEVICE unsigned mul2_by_half(unsigned a, unsigned b) {
  unsigned both;
  if constexpr (HALF == 0) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(both) : "r"(b));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(both) : "r"(b));
  }
  return mul2<BF16>(a, both);
}

template <bool BF16>
DEVICE unsigned short round16(float v) {
  unsigned short out;
  if constexpr (BF16) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(v));
  }
  return out;
}

// Whether any lane says so.
DEVICE bool some_lane(bool v) { return __any_sync(0xFFFFFFFFu, v); }

DEVICE float4 add(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

DEVICE unsigned rotate_right(unsigned w, unsigned by) { return __funnelshift_r(w, w, by); }

// Bits of a where the mask is set, else of b, in one LOP3 (the compiler makes two of the C++ expression).
DEVICE unsigned select_bits(unsigned a, unsigned b, unsigned mask) {
  unsigned out;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
  return out;
}

DEVICE unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) { return __byte_perm(a, b, selector); }

// acc[16 rows, 8 columns] += a[16 rows, 16] b[16, 8 columns], m16n8k16 of one warp.
template <bool BF16>
DEVICE void mma16816(float (&acc)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (BF16) {
    mma_bf16(acc, a[0], a[1], a[2], a[3], b0, b1);
  } else {
    mma_f16(acc, a[0], a[1], a[2], a[3], b0, b1);
  }
}

// Not .nc: ptxas moves those below a barrier that they should travel across.
DEVICE uint4 load_early(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

DEVICE float load_early_float(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

DEVICE uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

#endif
