// Partial sums that CTAs of one launch leave each other in global memory (stream-K's reduction), told of by a flag, or
// by themselves where a word that no arithmetic makes says that they are not there yet.
#ifndef SM90_EPILOGUE_CUH
#define SM90_EPILOGUE_CUH

#include "sm90/ptx.cuh"

// A flag has one reader, which takes it down again: the next launch finds it as this one did.
DEVICE void flag_raise(u32* flag) { st_release(flag, 1); }
DEVICE void flag_take(u32* flag) {
    while (!ld_acquire(flag)) continue;
    st_relaxed(flag, 0);
}

// A NaN sentinel, flag-free: a word that holds it has not been written. The reader puts it back.
constexpr u32 ABSENT = 0xFFFFFFFFu;
DEVICE bool is_absent(const float4& x) {
    return __float_as_uint(x.x) == ABSENT || __float_as_uint(x.y) == ABSENT || __float_as_uint(x.z) == ABSENT ||
           __float_as_uint(x.w) == ABSENT;
}
DEVICE float4 absent_float4() {
    const float none = __uint_as_float(ABSENT);
    return {none, none, none, none};
}

#endif
