// The tensor cores: mma.sync for a warp, wgmma for a warpgroup, and the descriptors of its operands in shared memory.
//
// Operands in shared memory are tiles of rows of 128 bytes with the 128-byte swizzle, as a tensor map leaves them: the
// 16-byte piece p of row r lies at r * 128 + ((p ^ (r & 7)) << 4), and tiles start on 1024 bytes. The same bytes serve
// two ways:
//   K-major (rows are N):    16 k are 32 bytes of a row, 8-row groups 1024 bytes apart
//   MN-major (rows are K):   64-column tiles `leading_bytes` apart, 8-row groups 1024 bytes apart
// With the 32-byte swizzle rows have 32 bytes, piece p of row r at r * 32 + ((p ^ (r >> 2 & 1)) << 4), 8-row groups 256
// bytes apart, tiles on 256 bytes: one step of 16 columns of a K-major operand.
#ifndef SM90_MMA_CUH
#define SM90_MMA_CUH

#include "sm90/ptx.cuh"

// From a tile's address in shared memory, as wgmma takes it.
DEVICE u64 smem_descriptor_128B(u32 tile, u32 leading_bytes = 16) {
    return (u64)(1024 >> 4 | 1u << 30) << 32 | (tile >> 4 | (leading_bytes >> 4) << 16);
}
DEVICE u64 smem_descriptor_32B(u32 tile) { return (u64)(256 >> 4 | 3u << 30) << 32 | (tile >> 4 | 1u << 16); }

#ifndef SM90_ON_CPU
// c[16 x 8] += a[16 x 16] b[16 x 8]; fragments as the PTX manual lays them out for m16n8k16.
template <bool BF16>
DEVICE void mma_16816(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most PENDING committed groups are in flight.
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The accumulators d[0 ..] are operands %0 and on; OPERANDS are the texts of a and b, SCALE_D of the operand that is 0
// where sums start anew, FLAGS the scales and majors of a and b.
#define WGMMA_ACC_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_ACC_12 WGMMA_ACC_8 ", %8, %9, %10, %11"
#define WGMMA_ACC_16 WGMMA_ACC_12 ", %12, %13, %14, %15"
#define WGMMA_ACC_24 WGMMA_ACC_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_ACC_32 WGMMA_ACC_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_ACC_40 WGMMA_ACC_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_ACC_48 WGMMA_ACC_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_ACC_56 WGMMA_ACC_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_ACC_64 WGMMA_ACC_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_ACC_88                                                                                    \
    WGMMA_ACC_64                                                                                        \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
    "%83, %84, %85, %86, %87"
#define WGMMA_ACC_128                                                                                    \
    WGMMA_ACC_88                                                                                         \
    ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, " \
    "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "   \
    "%122, %123, %124, %125, %126, %127"
#define WGMMA_D_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D_8(i) WGMMA_D_4(i), WGMMA_D_4(i + 4)
#define WGMMA_D_12(i) WGMMA_D_8(i), WGMMA_D_4(i + 8)
#define WGMMA_D_16(i) WGMMA_D_8(i), WGMMA_D_8(i + 8)
#define WGMMA_D_24(i) WGMMA_D_16(i), WGMMA_D_8(i + 16)
#define WGMMA_D_32(i) WGMMA_D_16(i), WGMMA_D_16(i + 16)
#define WGMMA_D_40(i) WGMMA_D_32(i), WGMMA_D_8(i + 32)
#define WGMMA_D_48(i) WGMMA_D_32(i), WGMMA_D_16(i + 32)
#define WGMMA_D_56(i) WGMMA_D_48(i), WGMMA_D_8(i + 48)
#define WGMMA_D_64(i) WGMMA_D_32(i), WGMMA_D_32(i + 32)
#define WGMMA_D_88(i) WGMMA_D_64(i), WGMMA_D_16(i + 64), WGMMA_D_8(i + 80)
#define WGMMA_D_128(i) WGMMA_D_64(i), WGMMA_D_64(i + 64)
#define WGMMA(SHAPE, FORMAT, COUNT, OPERANDS, SCALE_D, FLAGS, ...)                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " SCALE_D ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." FORMAT \
                 "." FORMAT " {" WGMMA_ACC_##COUNT "}, " OPERANDS ", p, " FLAGS ";}"                                \
                 : WGMMA_D_##COUNT(0)                                                                               \
                 : __VA_ARGS__)
#define WGMMA_RS(SHAPE, FORMAT, COUNT, OPERANDS, SCALE_D, FLAGS)                                              \
    WGMMA(SHAPE, FORMAT, COUNT, OPERANDS, SCALE_D, FLAGS, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
          "r"(scale_d))
#define WGMMA_RS_16BIT(N_, COUNT, A, B, SCALE_D)                                      \
    if constexpr (N == N_ && BF16 && !MN_MAJOR) {                                     \
        WGMMA_RS("m64n" #N_ "k16", "bf16", COUNT, "{" A "}, " B, SCALE_D, "1, 1, 0"); \
    } else if constexpr (N == N_ && BF16) {                                           \
        WGMMA_RS("m64n" #N_ "k16", "bf16", COUNT, "{" A "}, " B, SCALE_D, "1, 1, 1"); \
    } else if constexpr (N == N_ && !MN_MAJOR) {                                      \
        WGMMA_RS("m64n" #N_ "k16", "f16", COUNT, "{" A "}, " B, SCALE_D, "1, 1, 0");  \
    } else if constexpr (N == N_) {                                                   \
        WGMMA_RS("m64n" #N_ "k16", "f16", COUNT, "{" A "}, " B, SCALE_D, "1, 1, 1");  \
    }
#define WGMMA_RS_E4M3(N_, COUNT, A, B, SCALE_D) \
    if constexpr (N == N_) WGMMA_RS("m64n" #N_ "k32", "e4m3", COUNT, "{" A "}, " B, SCALE_D, "1, 1")

// d[64 x N] = (scale_d ? d : 0) + a[64 x 16] b[16 x N] by a warpgroup, bf16 or fp16; a in registers, b in shared memory,
// K-major or MN-major.
template <int N, bool BF16, bool MN_MAJOR = false>
DEVICE void wgmma_rs(float (&d)[N / 2], const u32* a, u64 b, int scale_d = 1) {
    static_assert(N == 24 || (N % 16 == 0 && N <= 128) || N == 176 || N == 256, "no such wgmma here");
    WGMMA_RS_16BIT(16, 8, "%8, %9, %10, %11", "%12", "%13")
    WGMMA_RS_16BIT(24, 12, "%12, %13, %14, %15", "%16", "%17")
    WGMMA_RS_16BIT(32, 16, "%16, %17, %18, %19", "%20", "%21")
    WGMMA_RS_16BIT(48, 24, "%24, %25, %26, %27", "%28", "%29")
    WGMMA_RS_16BIT(64, 32, "%32, %33, %34, %35", "%36", "%37")
    WGMMA_RS_16BIT(80, 40, "%40, %41, %42, %43", "%44", "%45")
    WGMMA_RS_16BIT(96, 48, "%48, %49, %50, %51", "%52", "%53")
    WGMMA_RS_16BIT(112, 56, "%56, %57, %58, %59", "%60", "%61")
    WGMMA_RS_16BIT(128, 64, "%64, %65, %66, %67", "%68", "%69")
    WGMMA_RS_16BIT(176, 88, "%88, %89, %90, %91", "%92", "%93")
    WGMMA_RS_16BIT(256, 128, "%128, %129, %130, %131", "%132", "%133")
}
// d[64 x 64] likewise, a K-major in shared memory too.
template <bool BF16>
DEVICE void wgmma_ss_n64(float (&d)[32], u64 a, u64 b, int scale_d) {
    if constexpr (BF16) {
        WGMMA("m64n64k16", "bf16", 32, "%32, %33", "%34", "1, 1, 0, 0", "l"(a), "l"(b), "r"(scale_d));
    } else {
        WGMMA("m64n64k16", "f16", 32, "%32, %33", "%34", "1, 1, 0, 0", "l"(a), "l"(b), "r"(scale_d));
    }
}
// d[64 x N] likewise, with a[64 x 32] and b[32 x N] of e4m3. Sums keep about 14 bits between products.
template <int N>
DEVICE void wgmma_rs_e4m3(float (&d)[N / 2], const u32* a, u64 b, int scale_d) {
    static_assert(N == 32 || N == 48 || N == 64 || N == 128 || N == 256, "no such wgmma here");
    WGMMA_RS_E4M3(32, 16, "%16, %17, %18, %19", "%20", "%21");
    WGMMA_RS_E4M3(48, 24, "%24, %25, %26, %27", "%28", "%29");
    WGMMA_RS_E4M3(64, 32, "%32, %33, %34, %35", "%36", "%37");
    WGMMA_RS_E4M3(128, 64, "%64, %65, %66, %67", "%68", "%69");
    WGMMA_RS_E4M3(256, 128, "%128, %129, %130, %131", "%132", "%133");
}
#endif  // SM90_ON_CPU

// x, sums that are complete after the wait, may not be read earlier.
template <int PENDING, int COUNT>
DEVICE void wgmma_wait(float (&x)[COUNT]) {
    wgmma_wait<PENDING>();
    pin(x);
}

#endif
