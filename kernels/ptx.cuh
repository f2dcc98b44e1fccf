// The PTX that kernels of more than one family are made of, one instruction (or one idiom) a function. Addresses of
// shared memory are 32-bit numbers, as in PTX. A family's own header includes this one and adds what it alone needs;
// tests/*_on_cpu.cuh stand in for both. Nothing here depends on a CUDA header.
#pragma once

#define DEVICE __device__ __forceinline__

DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// ---- barriers in shared memory, bulk copies -------------------------------------------------------------------------
// A bulk copy counts its bytes on a barrier. A wait returns when the phase with this parity is complete and acquires
// what its arrivals released.
DEVICE void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last barrier_init: makes them visible to the cluster.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The barrier to arrive at when what was loaded from shared memory may be overwritten by a copy or from another block. An
// arrival waits for its address, not for loads ahead of it: ptxas leaves them under way, and the hardware does not keep
// the two in order. `word` is made of the loaded words; `zero` is 0, and the compiler must not know it.
DEVICE unsigned once_loaded(unsigned barrier, unsigned word, unsigned zero) { return barrier + (word & zero); }
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Contiguous memory into shared memory: 16-byte aligned, a multiple of 16 bytes.
DEVICE void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// A policy for loads, stores and copies: such lines leave L2 first.
DEVICE unsigned long long leave_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Until at most N groups of this thread's bulk stores have yet to read what they write.
template <int N>
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
// What this thread has stored in shared memory, for bulk copies and products behind the next barrier.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Between what bulk copies and what ordinary instructions do in global memory, either way. With fence_async_shared it also
// waits for all that this thread has stored (MEMBAR.GPU).
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// A description of a matrix in global memory, made by the driver (kernels/cuda_driver.py).
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

// ---- loads and stores -----------------------------------------------------------------------------------------------
DEVICE uint4 lds128(unsigned a) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(a) : "memory");
    return x;
}
DEVICE uint2 lds64(unsigned a) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(a) : "memory");
    return x;
}
DEVICE unsigned lds32(unsigned a) {
    unsigned x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
    return x;
}
DEVICE unsigned lds16(unsigned a) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(a) : "memory");
    return x;
}
DEVICE void sts32(unsigned a, unsigned x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
// Past L1: memory that other blocks of this launch write.
DEVICE float4 load_shared_by_gpu(const void* p) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p) : "memory");
    return x;
}
// Four 8 x 8 matrices, transposed: lane l names row l % 8 of matrix l / 8 (16 bytes), a column of its fragment.
DEVICE void store_transposed(unsigned row, unsigned m0, unsigned m1, unsigned m2, unsigned m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(row), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
// A pair's first value is in the low half.
DEVICE unsigned pack_half2(float low, float high) {
    unsigned x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
DEVICE unsigned pack_bf162(float low, float high) {
    unsigned x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
DEVICE float half_to_float(unsigned bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
}
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// c[16 x 8] += a[16 x 16] b[16 x 8]; fragments as the PTX manual lays them out for m16n8k16.
DEVICE void mma_f16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most PENDING committed groups are under way.
template <int PENDING>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// The compiler may neither sink nor hoist what makes or uses these registers past this point.
template <int COUNT>
DEVICE void pin(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// ---- warpgroups, blocks, launches -----------------------------------------------------------------------------------
DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Registers a thread of a warpgroup, all of whose warps say it: of one that takes some, of one that gives some up.
template <int COUNT>
DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// In a programmatic launch: the next kernel's blocks may take the room that is free now, and what this kernel reads
// after the wait is what the kernels ahead have written. Both do nothing in an ordinary launch.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_earlier_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
