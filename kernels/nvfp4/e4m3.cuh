// What W4A8 adds to the PTX of wgmma.cuh: the fp8 product, rounding to e4m3.
#ifndef NVFP4_E4M3_CUH
#define NVFP4_E4M3_CUH

#include "wgmma.cuh"

// PRMT itself: bytes of {b, a} by the four nibbles of the selector's low half; bit 3 of a nibble asks for the byte's
// sign, eight times. __byte_perm would mask the selector first.
DEVICE unsigned pick_bytes(unsigned a, unsigned b, unsigned selector) {
  unsigned out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

// d[64 rows, COLUMNS] (+)= a[64, 32] b[32, COLUMNS] of e4m3, by a warpgroup; b K-major in shared memory. add = 0: the old
// sums do not count. Sums keep about 14 bits between products (NOTES.md).
template <int COLUMNS>
struct Wgmma8;

#define E4M3_PRODUCT(COLUMNS, SUMS, A0, A1, A2, A3, B, ADD)                                                            \
  "{.reg .pred add; setp.ne.b32 add, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS                            \
  "k32.f32.e4m3.e4m3 {" SUMS "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", add, 1, 1;}"
#define SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64                                                                                                        \
  SUMS_32                                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "   \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128                                                                                                       \
  SUMS_64                                                                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "   \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "         \
  "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "       \
  "%124, %125, %126, %127"
#define FOUR_OF(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN_OF(i) FOUR_OF(i), FOUR_OF(i + 4), FOUR_OF(i + 8), FOUR_OF(i + 12)
#define SIXTY_FOUR_OF(i) SIXTEEN_OF(i), SIXTEEN_OF(i + 16), SIXTEEN_OF(i + 32), SIXTEEN_OF(i + 48)
#define INTO(...) : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)

template <>
struct Wgmma8<32> {
  DEVICE static void go(float (&d)[16], const unsigned (&a)[4], unsigned long long b, int add) {
    asm volatile(E4M3_PRODUCT("32", SUMS_16, "%16", "%17", "%18", "%19", "%20", "%21") INTO(SIXTEEN_OF(0)));
  }
};

template <>
struct Wgmma8<64> {
  DEVICE static void go(float (&d)[32], const unsigned (&a)[4], unsigned long long b, int add) {
    asm volatile(E4M3_PRODUCT("64", SUMS_32, "%32", "%33", "%34", "%35", "%36", "%37")
                     INTO(SIXTEEN_OF(0), SIXTEEN_OF(16)));
  }
};

template <>
struct Wgmma8<128> {
  DEVICE static void go(float (&d)[64], const unsigned (&a)[4], unsigned long long b, int add) {
    asm volatile(E4M3_PRODUCT("128", SUMS_64, "%64", "%65", "%66", "%67", "%68", "%69") INTO(SIXTY_FOUR_OF(0)));
  }
};

template <>
struct Wgmma8<256> {
  DEVICE static void go(float (&d)[128], const unsigned (&a)[4], unsigned long long b, int add) {
    asm volatile(E4M3_PRODUCT("256", SUMS_128, "%128", "%129", "%130", "%131", "%132", "%133")
                     INTO(SIXTY_FOUR_OF(0), SIXTY_FOUR_OF(64)));
  }
};

// --- rounding activations ----------------------------------------------------------------------------------------
// Two floats as e4m3 bytes, nearest even, saturating at 448; `low` in the lower byte.
DEVICE unsigned round_e4m3_pair(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// The larger of each half, as unsigned numbers.
DEVICE unsigned max_halves(unsigned a, unsigned b) {
  unsigned out;
  asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

template <bool BF16>
DEVICE float from_half(unsigned bits) {
  if constexpr (BF16) {
    return __uint_as_float(bits << 16);
  } else {
    return half_to_float(bits);
  }
}

DEVICE unsigned largest_in_warp(unsigned v) { return __reduce_max_sync(0xFFFFFFFFu, v); }

#endif
