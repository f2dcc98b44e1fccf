// NVFP4 GEMV for 1 to 8 rows of x, in CUDA C++: y[M, N] = x[M, K] @ dequant(w)[N, K]^T.
//
// The second implementation of the same arithmetic, from the file's own weight layout (low nibble = even k), so it
// shares neither the repacking nor the decoding with the Triton kernels.
//
//   - A warp owns ROWS weight rows and walks K together with x. A lane loads 16 bytes of each row at once (32 values,
//     two scale groups), or 8 bytes (one group) where K is an odd multiple of 16 and rows are only 8-byte aligned.
//   - Eight nibbles of a 32-bit word w become four half2 by two masks and two shifts each: bits 0-3 and 16-19 of
//     w >> 4i are k = i and k = i + 4. Placed as fp16 exponent and mantissa they are value * 2^-14 (subnormals included).
//   - One half2 multiply per pair applies the block scale, carried as scale * 2^7. e2m1 * e4m3 has six significant bits, so
//     the product value * scale * 2^-7 is exact; the epilogue gives 2^7 back with the tensor scale.
//   - Products and sums are float32. Lanes are reduced by shuffles once per output.
//
// No header is included: NVRTC then needs no include path. The few fp16 and bf16 operations are inline PTX.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Half {};
struct Bfloat {};

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u32 multiply_half2(u32 a, u32 b) {
    u32 product;  // mul.f16x2 keeps subnormals (no .ftz), which 0.5 * 2^-14 needs
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ float low_float(u32 pair, Half) { return half_to_float((u16)pair); }
__device__ __forceinline__ float high_float(u32 pair, Half) { return half_to_float((u16)(pair >> 16)); }
__device__ __forceinline__ float low_float(u32 pair, Bfloat) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair, Bfloat) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ u16 from_float(float value, Half) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 from_float(float value, Bfloat) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// e4m3 byte (sign clear) -> half2 with scale * 2^7 in both halves: byte << 7 is scale * 2^-8, times 2^15 (0x7800).
__device__ __forceinline__ u32 scale_pair(u32 byte) { return multiply_half2((byte << 7) * 0x00010001u, 0x78007800u); }

// Nibbles i and i + 4 of `word` -> half2 of value * scale * 2^-7.
template <int I>
__device__ __forceinline__ u32 decode_pair(u32 word, u32 scale) {
    u32 shifted = word >> (4 * I);
    u32 bits = ((shifted & 0x00070007u) << 9) | ((shifted & 0x00080008u) << 12);
    return multiply_half2(bits, scale);
}

__device__ __forceinline__ uint4 load_x(const u16* pointer) {
    return __ldg(
        reinterpret_cast<const uint4*>(pointer));  // eight values; x is reread by every warp, so it stays in L1
}

// Weights are read once: past L1, 16 or 8 bytes wide.
__device__ __forceinline__ void load_weights(u32 (&words)[4], const u8* pointer) {
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "l"(pointer));
}

__device__ __forceinline__ void load_weights(u32 (&words)[2], const u8* pointer) {
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(pointer));
}

// T: Half or Bfloat; M_MAX: rows of x held (m <= M_MAX at run time); ROWS: weight rows per warp; GROUPS: groups per lane.
template <typename T, int M_MAX, int ROWS, int GROUPS>
__device__ __forceinline__ void gemv(const u16* __restrict__ x,               // [m, k]
                                     const u8* __restrict__ w,                // [n, k / 2]
                                     const u8* __restrict__ w_scale,          // [n, k / 16]
                                     const float* __restrict__ tensor_scale,  // [1]
                                     u16* __restrict__ y,                     // [m, n]
                                     int m, int n, int k) {
    const int lane = threadIdx.x & 31;
    const int first = (blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) * ROWS;
    if (first >= n) return;  // whole warps leave, so the shuffles below stay complete

    float sum[ROWS][M_MAX] = {};
    for (int k0 = lane * 16 * GROUPS; k0 < k; k0 += 32 * 16 * GROUPS) {
        u32 words[ROWS][2 * GROUPS];
        u32 scales[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const long long row = min(first + r, n - 1);  // rows past the end repeat the last; they are not stored
            load_weights(words[r], w + (row * k + k0) / 2);
            const u8* scale = w_scale + (row * k + k0) / 16;
            scales[r] = GROUPS == 2 ? __ldg(reinterpret_cast<const u16*>(scale)) : __ldg(scale);
        }
#pragma unroll
        for (int word = 0; word < 2 * GROUPS; ++word) {
            float value[ROWS][8];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const u32 scale = scale_pair((scales[r] >> (8 * (word / 2))) & 0xFFu);
                const u32 pairs[4] = {decode_pair<0>(words[r][word], scale), decode_pair<1>(words[r][word], scale),
                                      decode_pair<2>(words[r][word], scale), decode_pair<3>(words[r][word], scale)};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    value[r][i] = low_float(pairs[i], Half());
                    value[r][i + 4] = high_float(pairs[i], Half());
                }
            }
#pragma unroll
            for (int i = 0; i < M_MAX; ++i) {
                const uint4 packed = load_x(x + (long long)min(i, m - 1) * k + k0 + 8 * word);
                const u32 part[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float even = low_float(part[j], T());
                    const float odd = high_float(part[j], T());
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sum[r][i] += value[r][2 * j] * even + value[r][2 * j + 1] * odd;
                }
            }
        }
    }

    const float scale = *tensor_scale * 128.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < M_MAX; ++i) {
            float total = sum[r][i];
#pragma unroll
            for (int offset = 16; offset; offset >>= 1) total += __shfl_xor_sync(0xFFFFFFFFu, total, offset);
            if (lane == 0 && i < m && first + r < n) y[(long long)i * n + first + r] = from_float(total * scale, T());
        }
    }
}

#define GEMV(NAME, TYPE, M_MAX, ROWS, GROUPS)                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                                                \
        NAME(const u16* x, const u8* w, const u8* w_scale, const float* tensor_scale, u16* y, int m, int n, int k) { \
        gemv<TYPE, M_MAX, ROWS, GROUPS>(x, w, w_scale, tensor_scale, y, m, n, k);                                    \
    }

// Four rows per warp for one row of x (64 bytes in flight a lane), two where eight rows of x need the registers.
#define GEMV_ALL(DTYPE, TYPE)                       \
    GEMV(nvfp4_gemv_##DTYPE##_m1_g1, TYPE, 1, 4, 1) \
    GEMV(nvfp4_gemv_##DTYPE##_m1_g2, TYPE, 1, 4, 2) \
    GEMV(nvfp4_gemv_##DTYPE##_m2_g1, TYPE, 2, 4, 1) \
    GEMV(nvfp4_gemv_##DTYPE##_m2_g2, TYPE, 2, 4, 2) \
    GEMV(nvfp4_gemv_##DTYPE##_m4_g1, TYPE, 4, 2, 1) \
    GEMV(nvfp4_gemv_##DTYPE##_m4_g2, TYPE, 4, 2, 2) \
    GEMV(nvfp4_gemv_##DTYPE##_m8_g1, TYPE, 8, 2, 1) \
    GEMV(nvfp4_gemv_##DTYPE##_m8_g2, TYPE, 8, 2, 2)

GEMV_ALL(bf16, Bfloat)
GEMV_ALL(fp16, Half)
