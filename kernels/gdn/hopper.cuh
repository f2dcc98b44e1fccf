// Hopper instructions as functions, beyond those of ../ptx.cuh: mbarriers and bulk copies by pointer, 16-byte
// asynchronous copies, ldmatrix, mma, wgmma (sm_90a).
//
// Shared-memory operands of wgmma are tiles of rows of 128 bytes with the 128-byte swizzle: the 16-byte piece p of row
// r lies at r * 128 + ((p ^ (r & 7)) << 4), and tiles start on 1024 bytes. The same bytes serve two ways:
//   columns are the sum's dimension (K-major): N = rows, 8-row groups 1024 bytes apart
//   rows are the sum's dimension (MN-major):   N = columns, 64-column tiles `lead` bytes apart, 8-row groups 1024 apart
#pragma once

#include "ptx.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define INLINE DEVICE

constexpr int BF16 = 0, FP16 = 1;  // codes of 16-bit types, in memory and as operands

INLINE void barrier_init(u64* bar, int count) { barrier_init(shared_address(bar), count); }
INLINE void barrier_arrive(u64* bar) { barrier_arrive(shared_address(bar)); }
INLINE void barrier_expect(u64* bar, u32 bytes) { barrier_expect(shared_address(bar), bytes); }
INLINE void barrier_wait(u64* bar, u32 parity) { barrier_wait(shared_address(bar), parity); }

INLINE void bulk_load(void* to, const void* from, u32 bytes, u64* bar) {
    bulk_copy(shared_address(to), from, bytes, shared_address(bar));
}
// One bulk group a call.
INLINE void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
INLINE void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// 16 bytes, or 16 bytes of zero.
INLINE void copy_16(void* to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to)), "l"(from), "r"(live ? 16 : 0) : "memory");
}
INLINE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
INLINE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

INLINE void ldmatrix(u32* x, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
INLINE void ldmatrix_t(u32* x, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
INLINE void stmatrix_t(void* row, const u32* x) { store_transposed(shared_address(row), x[0], x[1], x[2], x[3]); }

template <int TYPE>
INLINE u32 pack_half(float low, float high) { return TYPE == BF16 ? pack_bf162(low, high) : pack_half2(low, high); }
template <int TYPE>
INLINE float widen(u16 bits) { return TYPE == BF16 ? __uint_as_float((u32)bits << 16) : half_to_float(bits); }

// d [16 x 8] += a [16 x 16] b [16 x 8], in fp16.
INLINE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(d, a[0], a[1], a[2], a[3], b0, b1); }

// x, results that are complete after the wait, may not be read earlier.
template <int N, int R>
INLINE void wgmma_wait(float (&x)[R]) {
    wgmma_wait<N>();
    pin(x);
}

// Products on the matrix unit, bf16 or fp16 by TYPE. Sums d[0..31] or d[0..63] are operands %0 and on; OPERANDS are the
// texts of a and b, ADD the operand that is 0 where sums start anew, FLAGS what the order of a and b in memory is.
#define SUMS32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63"
#define OUT8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define OUT32(i) OUT8(i), OUT8(i + 8), OUT8(i + 16), OUT8(i + 24)
#define OUT64(i) OUT32(i), OUT32(i + 32)
#define A_IN_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)
#define WGMMA(SHAPE, FORMAT, SUMS, OUT, OPERANDS, ADD, FLAGS, ...)                                           \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." FORMAT \
                 "." FORMAT " {" SUMS "}, " OPERANDS ", p, " FLAGS ";}"                                       \
                 : OUT(0)                                                                                     \
                 : __VA_ARGS__)
#define WGMMA_OF_TYPE(SHAPE, ...)                                 \
    if (TYPE == BF16)                                             \
        WGMMA(SHAPE, "bf16", __VA_ARGS__);                        \
    else                                                          \
        WGMMA(SHAPE, "f16", __VA_ARGS__)

// d [64 x 64] (+)= a [64 x 16] b [16 x 64], b K-major
template <int TYPE>
INLINE void wgmma_n64(float (&d)[32], const u32* a, u64 b, int add) {
    WGMMA_OF_TYPE("m64n64k16", SUMS32, OUT32, "{%32, %33, %34, %35}, %36", "%37", "1, 1, 0", A_IN_REGISTERS);
}
// d [64 x 64] (+)= a [64 x 16] b [16 x 64], both K-major in shared memory
template <int TYPE>
INLINE void wgmma_n64_shared(float (&d)[32], u64 a, u64 b, int add) {
    WGMMA_OF_TYPE("m64n64k16", SUMS32, OUT32, "%32, %33", "%34", "1, 1, 0, 0", "l"(a), "l"(b), "r"(add));
}
// d [64 x 64] (+)= a [64 x 16] b [16 x 64], b MN-major
template <int TYPE>
INLINE void wgmma_n64_rows(float (&d)[32], const u32* a, u64 b, int add) {
    WGMMA_OF_TYPE("m64n64k16", SUMS32, OUT32, "{%32, %33, %34, %35}, %36", "%37", "1, 1, 1", A_IN_REGISTERS);
}
// d [64 x 128] (+)= a [64 x 16] b [16 x 128], b MN-major
template <int TYPE>
INLINE void wgmma_n128_rows(float (&d)[64], const u32* a, u64 b, int add) {
    WGMMA_OF_TYPE("m64n128k16", SUMS64, OUT64, "{%64, %65, %66, %67}, %68", "%69", "1, 1, 1", A_IN_REGISTERS);
}

// ---- operands in tiles of 32-byte rows, and tensor copies ------------------------------------------------------------
// With the 32-byte swizzle the 16-byte piece p of row r lies at r * 32 + ((p ^ (r >> 2 & 1)) << 4); groups of 8 rows
// are 256 bytes apart, tiles start on 256 bytes. Such a tile is 16 columns wide: one step of a K-major sum.
INLINE u64 narrow_descriptor(u32 tile) { return (u64)(256 >> 4 | 3u << 30) << 32 | (tile >> 4 | 1u << 16); }
// Descriptors from a tile's address in shared memory; lead_bytes as above.
INLINE u64 wide_descriptor(u32 tile, u32 lead_bytes) {
    return (u64)(1024 >> 4 | 1u << 30) << 32 | (tile >> 4 | (lead_bytes >> 4) << 16);
}
// The same value in every lane, and known to be by the compiler.
INLINE u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }

// The box at (column, row): 64 rows of 128 bytes with the 128-byte swizzle, rows past the matrix are zero.
INLINE void tensor_load(void* to, const TensorMap* map, int column, int row, u64* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(bar)) : "memory");
}
// A tile that lies as tensor_load's, to the box at (column, row). One bulk group a call.
INLINE void tensor_store(const TensorMap* map, const void* tile, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(shared_address(tile)), "r"(column), "r"(row) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// ---- flags between blocks of one launch -----------------------------------------------------------------------------
INLINE u32 load_acquire(const u32* p) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
INLINE void store_release(u32* p, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
INLINE u32 add_acq_rel(u32* p, u32 x) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(x) : "memory");
    return before;
}
// How many lanes from 0 on say yes, before the first that does not.
INLINE int leading_lanes(bool yes) {
    const u32 no = ~__ballot_sync(~0u, yes);
    return no ? __ffs(no) - 1 : 32;
}
// Between two looks at a flag. One that is not raised within seconds was lost: an error beats a hang.
INLINE void pause(int& tries) {
    __nanosleep(50);
    if (++tries > 1 << 21) __trap();
}

// ---- for the compiler -----------------------------------------------------------------------------------------------
INLINE int4 table_entry(const int4* p) { return __ldg(p); }
// The same number, from which the compiler computes again what hangs on it: kept, that would spill.
INLINE int again(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
