// The instructions of decode.cu that C++ has no word for, one function each, beyond those of ../ptx.cuh. Shared memory
// is addressed by 32-bit numbers, as PTX does, so that an address is one register plus a constant.
#pragma once

#include "ptx.cuh"

typedef unsigned long long u64;

static __device__ __forceinline__ unsigned shared_base(const void* p) {
    unsigned x;  // opaque: the compiler would work it out anew, from a special register, wherever it is used
    asm volatile("mov.u32 %0, %1;" : "=r"(x) : "r"((unsigned)__cvta_generic_to_shared(p)));
    return x;
}

static __device__ __forceinline__ void sts128(unsigned a, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
static __device__ __forceinline__ void sts64(unsigned a, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(x.x), "r"(x.y) : "memory");
}

// A cache's map is cuda_driver.line_map's.
static __device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The tile of tokens from `token` on: a line of 128 bytes a token and then the next, each swizzled by the line's number.
static __device__ __forceinline__ void tensor_copy(unsigned to, const TensorMap* map, int token, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %2}], [%4];"
                 ::"r"(to), "l"(map), "r"(0), "r"(token), "r"(barrier) : "memory");
}

static __device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
static __device__ __forceinline__ int load_i32(const int* p) {  // where it stands, not where it is used
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
// Conversions. A pair's first value is in the low half.
static __device__ __forceinline__ unsigned e4m3_to_half2(unsigned two_bytes) {
    unsigned x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((unsigned short)two_bytes));
    return x;
}
static __device__ __forceinline__ unsigned sub_half2(unsigned a, unsigned b) {
    unsigned x;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
static __device__ __forceinline__ unsigned mul_half2(unsigned a, unsigned b) {
    unsigned x;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
static __device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
static __device__ __forceinline__ float float_of(unsigned x) { return __uint_as_float(x); }
static __device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned selector) {
    return __byte_perm(a, b, selector);
}

// An 8 x 8 matrix of 16-bit values, row lane / 4 and columns 2 (lane % 4) and the next, transposed.
static __device__ __forceinline__ unsigned transpose8x8(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

static __device__ __forceinline__ float shuffle_from(float x, int lane) { return __shfl_sync(~0u, x, lane); }
static __device__ __forceinline__ int shuffle_up(int x, int by) { return __shfl_up_sync(~0u, x, by); }
static __device__ __forceinline__ int shuffle_int(int x, int lane) { return __shfl_sync(~0u, x, lane); }
static __device__ __forceinline__ bool any_lane(bool x) { return __any_sync(~0u, x); }
static __device__ __forceinline__ void sync_warp() { __syncwarp(); }
static __device__ __forceinline__ unsigned lanes_where(bool x) { return __ballot_sync(~0u, x); }
static __device__ __forceinline__ int bits_set(unsigned x) { return __popc(x); }
template <int THREADS> static __device__ __forceinline__ void sync_consumers() {
    asm volatile("barrier.sync 1, %0;" ::"n"(THREADS) : "memory");
}
template <int THREADS> static __device__ __forceinline__ void sync_producers() {
    asm volatile("barrier.sync 3, %0;" ::"n"(THREADS) : "memory");
}
// The consumers wait until the producers have come by; those do not wait.
template <int THREADS> static __device__ __forceinline__ void sync_at_start() {
    asm volatile("barrier.sync 2, %0;" ::"n"(THREADS) : "memory");
}
template <int THREADS> static __device__ __forceinline__ void arrive_at_start() {
    asm volatile("barrier.arrive 2, %0;" ::"n"(THREADS) : "memory");
}
// A counter: the value before. What this block wrote before it (and a barrier) is seen by who counts after it.
static __device__ __forceinline__ unsigned count_one(unsigned* p) {
    unsigned x;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
    return x;
}
