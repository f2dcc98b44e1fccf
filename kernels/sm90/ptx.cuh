// The PTX that Hopper kernels are made of, one instruction (or one idiom) a function. Addresses of shared memory are
// 32-bit numbers, as in PTX (shared_address). Nothing here depends on a CUDA header.
//
// tests/kernels/on_cpu/sm90.cuh stands in for every instruction of this file and of mma.cuh on a CPU; it is included
// first there and defines SM90_ON_CPU. What is plain C++ runs on either.
#ifndef SM90_PTX_CUH
#define SM90_PTX_CUH

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef SM90_ON_CPU
#define DEVICE __device__ __forceinline__
// The block's dynamic shared memory, which starts on 1024 bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// A description of a matrix in global memory, made by the driver (kernels/cuda_driver.py).
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarriers ------------------------------------------------------------------------------------------------------
// A wait returns when the phase with this parity is complete and acquires what its arrivals released.
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last mbarrier_init: makes them visible to the cluster.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// An arrival that also says how many bytes of bulk copies the phase waits for.
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At a barrier of any CTA of the cluster (map_to_rank). It says that reads are done and publishes nothing: release at
// the scope of the cluster would cost a fence of the whole device.
DEVICE void mbarrier_arrive_cluster(u32 remote) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// For a barrier that a CTA of the cluster other than this one completes.
DEVICE void mbarrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// The barrier to arrive at when what was loaded from shared memory may be overwritten by a copy or from another block. An
// arrival waits for its address, not for loads ahead of it: ptxas leaves them in flight, and the hardware does not keep
// the two in order. `word` is made of the loaded words; `zero` is 0, and the compiler must not know it.
DEVICE u32 once_loaded(u32 barrier, u32 word, u32 zero) { return barrier + (word & zero); }

// ---- proxies --------------------------------------------------------------------------------------------------------
// What this thread has stored in shared memory becomes visible to bulk copies and wgmma behind the next barrier.
DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Between what bulk copies and what ordinary instructions do in global memory, either way. With
// fence_proxy_async_shared it also waits for all that this thread has stored (MEMBAR.GPU).
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Where a plain store, ASYNC_SHARED(T, p) = x, goes into shared memory that the async proxy will read or overwrite: a
// fence_proxy_async_shared of this thread must follow. (On a CPU it is what shows that one is missing. A macro: as an
// inlined function it would change the code around it.)
#define ASYNC_SHARED(T, p) *reinterpret_cast<T*>(p)

// ---- bulk copies (TMA) ----------------------------------------------------------------------------------------------
// A load counts its bytes on a barrier. Contiguous memory is 16-byte aligned and a multiple of 16 bytes.
DEVICE void tma_load_1d(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// With an L2 policy for the lines it reads.
DEVICE void tma_load_1d(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// With the evict_first policy, made on the spot: it takes no registers across a loop.
DEVICE void tma_load_1d_evict_first(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "policy;\n}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// The evict_first L2 policy for loads, stores and copies.
DEVICE u64 evict_first_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// The box at (column, row) of a two-dimensional map, as its swizzle leaves it; zeros outside the matrix.
DEVICE void tma_load_2d(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// The same into the same place of both CTAs of a cluster, each one's barrier counting the bytes.
DEVICE void tma_load_2d_multicast(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<u16>(3))
        : "memory");
}
// The box at (word of 8 bytes, row) of a map without a swizzle (kernels/cuda_driver.py's word_map), with an L2 policy.
DEVICE void tma_load_words(u32 to, const TensorMap* map, int word, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(word), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}
DEVICE void tma_load_words(u32 to, const TensorMap* map, int word, int row, u32 barrier) {
    tma_load_2d(to, map, word, row, barrier);
}
// The box at (0, row, 0) of a three-dimensional map (kernels/cuda_driver.py's line_map).
DEVICE void tma_load_rows(u32 to, const TensorMap* map, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %2}], [%4];" ::"r"(to),
        "l"(map), "r"(0), "r"(row), "r"(barrier)
        : "memory");
}
// Stores are one bulk group a call; they read shared memory until tma_store_wait_read says otherwise.
DEVICE void tma_store_1d(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}
// Shared memory, laid out as tma_load_2d leaves it, into the box at (column, row); what lies outside is not written.
DEVICE void tma_store_2d(const TensorMap* map, int column, int row, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\n"
        "cp.async.bulk.commit_group;" ::"l"(map),
        "r"(column), "r"(row), "r"(from)
        : "memory");
}
// Until at most N of this thread's bulk groups have yet to read shared memory.
template <int N>
DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Until all of them are complete.
DEVICE void tma_store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Starts a fetch of contiguous memory into L2; address and bytes are multiples of 16.
DEVICE void tma_prefetch_1d(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// cp.async, of the generic proxy: 16 bytes, or 16 bytes of zero.
DEVICE void cp_async_16(u32 to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- shared memory --------------------------------------------------------------------------------------------------
DEVICE uint4 lds128(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
DEVICE float4 lds_float4(u32 at) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
DEVICE uint2 lds64(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
    return x;
}
DEVICE u32 lds32(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
DEVICE u32 lds16(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
    return x;
}
DEVICE void sts128(u32 at, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEVICE void sts64(u32 at, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(x.x), "r"(x.y) : "memory");
}
DEVICE void sts32(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
// Four 8 x 8 matrices of 16-bit elements: lane l names row l % 8 of matrix l / 8 (16 bytes). _trans: a column of its
// fragment.
DEVICE void ldmatrix_x4(u32 (&x)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&x)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void stmatrix_x4_trans(u32 row, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}
// Two of them: lanes 0 .. 15 name the rows.
DEVICE void stmatrix_x2_trans(u32 row, u32 m0, u32 m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m0), "r"(m1)
                 : "memory");
}
// An 8 x 8 fragment (row lane / 4, columns 2 (lane % 4) and the next), transposed.
DEVICE u32 movmatrix_trans(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// ---- global memory --------------------------------------------------------------------------------------------------
// Loads that stay where they stand in the program (ptxas moves .nc loads below a barrier) ...
DEVICE uint4 ldg128(const void* p) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
DEVICE u32 ldg32(const void* p) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
DEVICE u32 ldg16(const void* p) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
    return x;
}
DEVICE float ldg_float(const float* p) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}
// ... through the read-only path ...
DEVICE int ldg_nc_int(const int* p) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
DEVICE uint4 ldg128_nc(const void* p) {
    uint4 x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}
// ... and past L1, for memory that other blocks of this launch write behind a barrier or a flag.
DEVICE float4 ldg_cg_float4(const void* p) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
// 16 bytes with an L2 policy, and without a place in L1.
DEVICE uint4 ldg128(const void* p, u64 policy) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p), "l"(policy)
                 : "memory");
    return x;
}
DEVICE void stg128(void* p, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEVICE void stg128(void* p, uint4 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w), "l"(policy)
                 : "memory");
}
DEVICE void stg_half(u16* p, float x) {
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; st.global.b16 [%0], h;}" ::"l"(p), "f"(x) : "memory");
}
// Between CTAs of one launch. acquire and release order what stands around them, relaxed nothing.
DEVICE u32 ld_acquire(const u32* p) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
DEVICE void st_release(u32* p, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE void st_relaxed(u32* p, u32 x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
DEVICE float4 ld_relaxed(const float4* p) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
DEVICE void st_relaxed(float4* p, const float4& x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
// -> the value before.
DEVICE u32 atomic_add_acq_rel(u32* p, u32 x) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
    return before;
}
DEVICE u32 atomic_add_relaxed(u32* p, u32 x) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
    return before;
}
// Between two looks at a flag. One that is not raised within seconds was lost: an error beats a hang.
DEVICE void spin_pause(int& tries) {
    __nanosleep(50);
    if (++tries > 1 << 21) __trap();
}

// ---- named barriers -------------------------------------------------------------------------------------------------
DEVICE void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Of warps that come from different places in the code: bar.sync, the aligned form, promises that all of them execute
// one and the same instruction.
DEVICE void named_barrier_sync_unaligned(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive_unaligned(int id, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------------------
DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Every thread of the cluster, in two halves: between them a thread may do what needs no other CTA. Relaxed: what must
// be seen is released by mbarrier_init_fence, not by a fence of every thread.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of our `local` shared memory in CTA `rank` of the cluster.
DEVICE u32 map_to_rank(u32 local, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    return remote;
}
// 16 bytes into another CTA's shared memory, counted by a barrier of that CTA.
DEVICE void st_async(u32 remote, const float4& x, u32 remote_barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
        "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)), "r"(__float_as_uint(x.w)),
        "r"(remote_barrier)
        : "memory");
}

// ---- warps, warpgroups, launches ------------------------------------------------------------------------------------
// A value that all lanes have, told to the compiler: what follows from it needs no test of every lane.
DEVICE int warp_uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }
DEVICE u32 warp_uniform(u32 x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }
// A lane's own value, from an instruction that ptxas does not repeat at each use (it does what `opaque` hides).
DEVICE u32 kept(u32 x) { return __shfl_sync(0xFFFFFFFFu, x, threadIdx.x % 32); }
DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE bool warp_any(bool x) { return __any_sync(0xFFFFFFFFu, x); }
DEVICE u32 warp_ballot(bool x) { return __ballot_sync(0xFFFFFFFFu, x); }
DEVICE u32 warp_max(u32 x) { return __reduce_max_sync(0xFFFFFFFFu, x); }
// The registers of a thread of a warpgroup, all of whose warps call it (setmaxnreg).
template <int COUNT>
DEVICE void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// In a programmatic launch: the next kernel's blocks may take the room that is free now, and what this kernel reads
// after the wait is what the kernels ahead have written. Both do nothing in an ordinary launch.
DEVICE void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_on_dependent_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void spin_clocks(u32 count) {
    const u32 start = clock();
    while (static_cast<u32>(clock()) - start < count) continue;
}

// ---- for the compiler -----------------------------------------------------------------------------------------------
// The same value from an unknown source: the compiler neither rematerialises it from what made it nor keeps what it has
// already computed from it.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// The compiler may neither sink nor hoist what makes or uses these registers past this point.
template <int COUNT>
DEVICE void pin(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i])::"memory");
}
DEVICE void pin(u32 (&x)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// ---- conversions and packed arithmetic ------------------------------------------------------------------------------
// A pair's first value is in the low half; conversions round to nearest even.
DEVICE u32 pack_half2(float low, float high) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
DEVICE u32 pack_bf162(float low, float high) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
DEVICE float half_to_float(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}
template <bool BF16>
DEVICE u16 round16(float x) {
    u16 bits;
    if constexpr (BF16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    }
    return bits;
}
// Two products of 16-bit values, subnormals kept.
template <bool BF16>
DEVICE u32 mul2(u32 a, u32 b) {
    u32 x;
    if constexpr (BF16) {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    } else {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    }
    return x;
}
DEVICE u32 sub_half2(u32 a, u32 b) {
    u32 x;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
// The low (HALF 0) or the high (1) half of x in both: an instruction that takes either half takes it for nothing.
template <int HALF>
DEVICE u32 broadcast_half(u32 x) {
    u32 both;
    if constexpr (HALF == 0) {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(both) : "r"(x));
    } else {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(both) : "r"(x));
    }
    return both;
}
// Two e4m3 bytes to halves; two floats to e4m3 bytes, saturating at 448.
DEVICE u32 e4m3_to_half2(u32 two_bytes) {
    u32 x;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((u16)two_bytes));
    return x;
}
DEVICE u32 pack_e4m3x2(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
// The larger of each half, as unsigned numbers.
DEVICE u32 max_u16x2(u32 a, u32 b) {
    u32 x;
    asm("max.u16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float rsqrt_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// PRMT itself: bytes of {b, a} by the four nibbles of the selector's low half; bit 3 of a nibble asks for the byte's
// sign, eight times. __byte_perm masks the selector first.
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selector));
    return x;
}
// Bits of a where the mask is set, else of b; (x & mask) | ones. One LOP3 each (the compiler makes two of the C++).
DEVICE u32 select_bits(u32 a, u32 b, u32 mask) {
    u32 x;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(x) : "r"(a), "r"(b), "r"(mask));
    return x;
}
DEVICE u32 mask_and_set(u32 x, u32 mask, u32 ones) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(ones));
    return y;
}
DEVICE u32 rotate_right(u32 x, u32 by) { return __funnelshift_r(x, x, by); }
#endif  // SM90_ON_CPU

DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
template <bool BF16>
DEVICE u32 pack_pair(float low, float high) {
    return BF16 ? pack_bf162(low, high) : pack_half2(low, high);
}
template <bool BF16>
DEVICE float to_float(u32 bits) {
    return BF16 ? __uint_as_float(bits << 16) : half_to_float(bits);
}
// mul2 by one half of b.
template <bool BF16, int HALF>
DEVICE u32 mul2_by_half(u32 a, u32 b) {
    return mul2<BF16>(a, broadcast_half<HALF>(b));
}
DEVICE float4 operator+(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

#endif
