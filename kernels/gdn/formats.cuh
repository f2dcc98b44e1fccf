// 16-bit formats by number, as kernel arguments and template parameters carry them.
#ifndef GDN_FORMATS_CUH
#define GDN_FORMATS_CUH

#include "sm90/ptx.cuh"

constexpr int BF16 = 0, FP16 = 1;  // codes of 16-bit types, in memory and as operands

template <int TYPE>
DEVICE u32 pack16(float low, float high) {
    return pack_pair<TYPE == BF16>(low, high);
}
template <int TYPE>
DEVICE float widen(u16 bits) {
    return to_float<TYPE == BF16>(bits);
}

#endif
