// The PTX of the GEMM kernel: wgmma with A in registers, tensor-map copies, barriers of a cluster, flags in global
// memory.
//
// B is x, in shared memory as the tensor map (128-byte swizzle) leaves it: rows of 64 k (128 bytes), the 16-byte piece
// p of row r at 128 r + 16 (p ^ r % 8), 8-row groups 1024 bytes apart, the tile on 1024 bytes. 16 k are 32 bytes.
#ifndef NVFP4_WGMMA_CUH
#define NVFP4_WGMMA_CUH

#include "hopper.cuh"

// The box at (k, row) of a two-dimensional map; zeros outside. MULTICAST: into the same place of both CTAs of a
// cluster, each one's barrier counting the bytes.
template <bool MULTICAST>
DEVICE void tensor_copy(unsigned to, const TensorMap* map, int k, int row, unsigned barrier) {
  if constexpr (MULTICAST) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>(3))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(k), "r"(row), "r"(barrier)
        : "memory");
  }
}

// Shared memory, laid out as tensor_copy leaves it, into the box at (column, row); what lies outside is not written.
// stores_read waits until this thread's stores have read what they write.
DEVICE void tensor_store(const TensorMap* map, int column, int row, unsigned from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\ncp.async.bulk.commit_group;" ::"l"(
          map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
DEVICE void stores_read() { bulk_wait_read<0>(); }

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// An arrival at a barrier of any CTA of the cluster (peer_address). It says that reads are done and publishes nothing:
// release at the scope of the cluster would cost a fence of the whole device.
DEVICE void barrier_arrive_cluster(unsigned remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

// A value that all lanes have, told to the compiler: what follows from it needs no test of every lane.
DEVICE int same_in_warp(int v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

DEVICE void pass_clocks(unsigned count) {
  const unsigned start = clock();
  while (static_cast<unsigned>(clock()) - start < count) continue;
}

// A value that the compiler shall hold in a register and not make again at each use.
DEVICE unsigned keep(unsigned v) {
  asm volatile("" : "+r"(v));
  return v;
}

DEVICE float4 shared_load_float4(unsigned at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

// cluster_sync in two halves: between them a thread may do what needs no other CTA.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// --- partial sums in global memory -------------------------------------------------------------------------------
DEVICE void flag_raise(unsigned* flag) { asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory"); }

// Waits for the flag and takes it down again: it has one reader, and the next launch finds it as this one did.
DEVICE void flag_take(unsigned* flag) {
  unsigned is_up;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_up) : "l"(flag) : "memory");
  } while (!is_up);
  asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(flag) : "memory");
}

// Words that another CTA of the launch writes, or is to read, without any order between them.
DEVICE float4 peek(const float4* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void store_for_gpu(float4* p, const float4& v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// --- the way out -------------------------------------------------------------------------------------------------
// store_transposed of two matrices: lanes 0 .. 15 name their rows.
DEVICE void store_two_transposed(unsigned row, unsigned m0, unsigned m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m0), "r"(m1)
               : "memory");
}

template <bool BF16>
DEVICE unsigned round_pair(float low, float high) {
  return BF16 ? pack_bf162(low, high) : pack_half2(low, high);
}

// --- operands ---------------------------------------------------------------------------------------------------
// (v & mask) | ones in one LOP3 (the compiler makes two of the C++ expression).
DEVICE unsigned mask_and_set(unsigned v, unsigned mask, unsigned ones) {
  unsigned out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(v), "r"(mask), "r"(ones));
  return out;
}

// --- wgmma -------------------------------------------------------------------------------------------------------
DEVICE unsigned long long tile_descriptor(unsigned address) {
  return static_cast<unsigned long long>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// pin for fragments.
DEVICE void pin(unsigned (&v)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}

// acc[64 rows, COLUMNS] += a[64, 16] b[16, COLUMNS], by a warpgroup; b K-major, as described above.
template <int COLUMNS, bool BF16>
struct Wgmma;

#define WGMMA_16(TYPE)                                                                                                \
  "{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE " {"            \
  "%0, %1, %2, %3, %4, %5, %6, %7"                                                                                    \
  "}, {%8, %9, %10, %11}, %12, add, 1, 1, 0;}"
#define WGMMA_16_OPERANDS                                                                                             \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])                    \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

template <bool BF16>
struct Wgmma<16, BF16> {
  DEVICE static void go(float (&d)[8], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (BF16) {
      asm volatile(WGMMA_16("bf16") WGMMA_16_OPERANDS);
    } else {
      asm volatile(WGMMA_16("f16") WGMMA_16_OPERANDS);
    }
  }
};

#define WGMMA_24(TYPE)                                                                                                \
  "{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n24k16.f32." TYPE "." TYPE " {"            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"                                                                  \
  "}, {%12, %13, %14, %15}, %16, add, 1, 1, 0;}"
#define WGMMA_24_OPERANDS                                                                                             \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                   \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])                                                                  \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

template <bool BF16>
struct Wgmma<24, BF16> {
  DEVICE static void go(float (&d)[12], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (BF16) {
      asm volatile(WGMMA_24("bf16") WGMMA_24_OPERANDS);
    } else {
      asm volatile(WGMMA_24("f16") WGMMA_24_OPERANDS);
    }
  }
};

#define WGMMA_32(TYPE)                                                                                                \
  "{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {"            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                                              \
  "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;}"
#define WGMMA_32_OPERANDS                                                                                             \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                   \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])              \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

template <bool BF16>
struct Wgmma<32, BF16> {
  DEVICE static void go(float (&d)[16], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (BF16) {
      asm volatile(WGMMA_32("bf16") WGMMA_32_OPERANDS);
    } else {
      asm volatile(WGMMA_32("f16") WGMMA_32_OPERANDS);
    }
  }
};

#define WGMMA_64(TYPE)                                                                                                \
  "{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "              \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                                                                  \
  "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
#define WGMMA_64_OPERANDS                                                                                             \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                   \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),             \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),           \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])            \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

template <bool BF16>
struct Wgmma<64, BF16> {
  DEVICE static void go(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (BF16) {
      asm volatile(WGMMA_64("bf16") WGMMA_64_OPERANDS);
    } else {
      asm volatile(WGMMA_64("f16") WGMMA_64_OPERANDS);
    }
  }
};

#define WGMMA_128(TYPE)                                                                                               \
  "{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "              \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "              \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "              \
  "%62, %63"                                                                                                          \
  "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0;}"
#define WGMMA_128_OPERANDS                                                                                            \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                   \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),             \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),           \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),           \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),           \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),           \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),           \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])            \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

template <bool BF16>
struct Wgmma<128, BF16> {
  DEVICE static void go(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (BF16) {
      asm volatile(WGMMA_128("bf16") WGMMA_128_OPERANDS);
    } else {
      asm volatile(WGMMA_128("f16") WGMMA_128_OPERANDS);
    }
  }
};

#define WGMMA_176(TYPE)                                                                                               \
  "{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n176k16.f32." TYPE "." TYPE " {"           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "                   \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "                   \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "                   \
  "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "                   \
  "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87"                                                                  \
  "}, {%88, %89, %90, %91}, %92, add, 1, 1, 0;}"
#define WGMMA_176_OPERANDS                                                                                            \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),       \
    "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),            \
    "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),           \
    "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),           \
    "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),           \
    "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),           \
    "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),           \
    "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),           \
    "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),           \
    "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),           \
    "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])                         \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

template <bool BF16>
struct Wgmma<176, BF16> {
  DEVICE static void go(float (&d)[88], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (BF16) {
      asm volatile(WGMMA_176("bf16") WGMMA_176_OPERANDS);
    } else {
      asm volatile(WGMMA_176("f16") WGMMA_176_OPERANDS);
    }
  }
};

#define WGMMA_256(TYPE)                                                                                               \
  "{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {"           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "              \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "              \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "              \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "              \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "                  \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "                  \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"                                                  \
  "}, {%128, %129, %130, %131}, %132, add, 1, 1, 0;}"
#define WGMMA_256_OPERANDS                                                                                            \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),                   \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),             \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),           \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),           \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),           \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),           \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),           \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),           \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),           \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),           \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),           \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),           \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]),                     \
    "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),                 \
    "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]),                 \
    "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]),                 \
    "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])                                                            \
  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

template <bool BF16>
struct Wgmma<256, BF16> {
  DEVICE static void go(float (&d)[128], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (BF16) {
      asm volatile(WGMMA_256("bf16") WGMMA_256_OPERANDS);
    } else {
      asm volatile(WGMMA_256("f16") WGMMA_256_OPERANDS);
    }
  }
};

#endif
