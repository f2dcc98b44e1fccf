// The PTX of the decode kernels beyond hopper.cuh. on_cpu/gdn_decode_on_cpu.cuh stands in for both on a CPU.
#pragma once

#include "hopper.cuh"

// HINT: 0 plain, 1 L2 evict-first
template <int HINT>
INLINE uint4 load_state(const char* from, u64 policy) {
    uint4 x;
    if (HINT)
        asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0,%1,%2,%3}, [%4], %5;"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from), "l"(policy) : "memory");
    else
        asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}

template <int HINT>
INLINE void store_state(char* to, uint4 x, u64 policy) {
    if (HINT)
        asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1,%2,%3,%4}, %5;"
                     ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "l"(policy) : "memory");
    else
        asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
                     ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

INLINE void store_fp16(u16* to, float x) {
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; st.global.b16 [%0], h;}" ::"l"(to), "f"(x) : "memory");
}

INLINE float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Adds 1 and returns what was there; no fence. Loads whose values went through a barrier ahead of it are over.
INLINE u32 take_ticket(u32* counter) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Starts a fetch of contiguous memory into L2; address and bytes are multiples of 16.
INLINE void prefetch_bulk(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Memory that other blocks of the launch write: not through the read-only cache.
INLINE u32 load_u16(const u16* from) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
    return x;
}
INLINE u32 load_u32(const u32* from) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
