// The instructions of decode.cu that C++ has no word for, one function each. Shared memory is addressed by 32-bit
// numbers, as PTX does, so that an address is one register plus a constant.
#pragma once

typedef unsigned long long u64;

static __device__ __forceinline__ unsigned shared_base(const void* p) {
    unsigned x;  // opaque: the compiler would work it out anew, from a special register, wherever it is used
    asm volatile("mov.u32 %0, %1;" : "=r"(x) : "r"((unsigned)__cvta_generic_to_shared(p)));
    return x;
}

static __device__ __forceinline__ uint4 lds128(unsigned a) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(a) : "memory");
    return x;
}
static __device__ __forceinline__ uint2 lds64(unsigned a) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(a) : "memory");
    return x;
}
static __device__ __forceinline__ unsigned lds32(unsigned a) {
    unsigned x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
    return x;
}
static __device__ __forceinline__ unsigned lds16(unsigned a) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(a) : "memory");
    return x;
}
static __device__ __forceinline__ void sts128(unsigned a, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
static __device__ __forceinline__ void sts64(unsigned a, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(x.x), "r"(x.y) : "memory");
}
static __device__ __forceinline__ void sts32(unsigned a, unsigned x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}

// Global loads past L1 (written by other blocks of this launch), and read-only loads.
static __device__ __forceinline__ float4 load_shared_by_blocks4(const float* p) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p) : "memory");
    return x;
}
static __device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
static __device__ __forceinline__ int load_i32(const int* p) {  // where it stands, not where it is used
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
// A word to shared memory without a register in between; the wait is for all of this thread's.
static __device__ __forceinline__ void word_copy(unsigned to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
static __device__ __forceinline__ void word_copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A bulk copy counts its bytes on a barrier in shared memory; a wait returns when the phase with this parity is over.
static __device__ __forceinline__ void barrier_init(unsigned a, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(a), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ __forceinline__ void barrier_expect(unsigned a, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(a), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void barrier_arrive(unsigned a) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(a) : "memory");
}
static __device__ __forceinline__ void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
static __device__ __forceinline__ void barrier_wait(unsigned a, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(a),
        "r"(parity)
        : "memory");
}
// Between plain accesses and those of bulk copies, to shared or to global memory; a fence of both also waits for all
// that this thread has stored (MEMBAR.GPU).
static __device__ __forceinline__ void async_proxy_fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ __forceinline__ void async_proxy_fence_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Conversions. A pair's first value is in the low half.
static __device__ __forceinline__ unsigned e4m3_to_half2(unsigned two_bytes) {
    unsigned x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((unsigned short)two_bytes));
    return x;
}
static __device__ __forceinline__ unsigned pack_half2(float low, float high) {
    unsigned x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
static __device__ __forceinline__ unsigned pack_bf162(float low, float high) {
    unsigned x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
static __device__ __forceinline__ float half_to_float(unsigned bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
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
static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
static __device__ __forceinline__ float float_of(unsigned x) { return __uint_as_float(x); }
static __device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned selector) {
    return __byte_perm(a, b, selector);
}

// c[16 x 8] += a[16 x 16] b[16 x 8]; fragments as the PTX manual lays them out for m16n8k16.
static __device__ __forceinline__ void mma_f16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                               unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ void mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// An 8 x 8 matrix of 16-bit values, row lane / 4 and columns 2 (lane % 4) and the next, transposed.
static __device__ __forceinline__ unsigned transpose8x8(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

static __device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
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
template <int COUNT> static __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// A counter: the value before. What this block wrote before it (and a barrier) is seen by who counts after it.
static __device__ __forceinline__ unsigned count_one(unsigned* p) {
    unsigned x;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
    return x;
}
