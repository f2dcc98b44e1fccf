// What a product costs beside other instructions: products alone, NVFP4 decode alone, and both in one warp.
//
// A trip decodes one tile of 16 weight rows by 64 k a warp (nvfp4/operand.cuh, the arithmetic of our kernels) and
// multiplies it by N tokens: four k steps of mma.sync m16n8k16 (N / 8 each) or of wgmma m64nNk16 with the weights in
// registers. Nothing is loaded: codes are counted up (four additions stand for the loads), tokens stay where they are.
//
//   alone    the products of fragments that never change
//   turn     a tile is decoded, then multiplied, and the next is decoded when its products are issued (mma.sync) or
//            done (wgmma): other warps fill the time
//   beside   a tile is multiplied while the next one is decoded
//   decode   no product; eight LOP3 a trip keep what was decoded alive
#include "nvfp4/operand.cuh"

enum Form { ALONE, TURN, BESIDE };
using Fragments = u32[4][4];

DEVICE void next_tile(uint4& codes, Fragments& a) {
    codes.x += 0x9E3779B9u, codes.y += 0x7F4A7C15u, codes.z += 0x85EBCA6Bu, codes.w += 0xC2B2AE35u;
    tile_fragments<true>(codes, codes.y, a);
}

DEVICE uint4 first_codes() {
    const u32 lane = threadIdx.x * 0x01000193u + blockIdx.x;
    return make_uint4(lane, lane ^ 0x811C9DC5u, lane + 0x27D4EB2Fu, ~lane);
}

template <int COUNT>
DEVICE void keep(float* out, float (&c)[COUNT]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += c[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

template <int N, Form FORM>
DEVICE void with_mma(float* out, int trips) {
    uint4 codes = first_codes();
    const u32 b0 = 0x3F803F80u + threadIdx.x, b1 = 0x3F003F80u + threadIdx.x;
    // At least four sums that do not wait for each other.
    constexpr int SUMS = N == 8 ? 4 : N / 8;
    float c[SUMS][4] = {};
    Fragments a[2];
    next_tile(codes, a[0]);
    next_tile(codes, a[1]);
#pragma unroll 1
    for (int trip = 0; trip < trips; trip += 2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (FORM == TURN) next_tile(codes, a[half]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int n = 0; n < N / 8; n++) {
                    u32(&own)[4] = a[half][j];
                    mma_16816<true>(c[N == 8 ? j : n], own[0], own[1], own[2], own[3], b0 + n, b1 + n);
                }
            }
            if (FORM == BESIDE) next_tile(codes, a[half]);
        }
    }
    float sums[4 * SUMS];
#pragma unroll
    for (int i = 0; i < 4 * SUMS; i++) sums[i] = c[i / 4][i % 4];
    keep(out, sums);
}

template <int N, Form FORM>
DEVICE void with_wgmma(float* out, int trips) {
    DYNAMIC_SHARED(tokens);  // [N][64] bf16, swizzled; which value stands where does not matter
    for (int i = threadIdx.x; i < N * 32; i += blockDim.x)
        ((u32*)tokens)[i] = 0x3F803F00u ^ (i * 0x00130007u & 0x807F807Fu);
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    const u64 b = x_descriptor(shared_address(tokens));
    uint4 codes = first_codes();
    float d[N / 2] = {};
    Fragments a[2];
    next_tile(codes, a[0]);
    next_tile(codes, a[1]);
#pragma unroll 1
    for (int trip = 0; trip < trips; trip += 2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (FORM == TURN) next_tile(codes, a[half]);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++) wgmma_rs<N, true>(d, a[half][j], b + 2 * j);
            wgmma_commit();
            if (FORM == BESIDE) {
                // The other half's products, one group behind, are done with what is now overwritten.
                wgmma_wait<1>(d);
                next_tile(codes, a[1 - half]);
            } else {
                wgmma_wait<FORM == TURN ? 0 : 1>(d);
            }
        }
    }
    wgmma_wait<0>(d);
    keep(out, d);
}

#define MMA(N)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2) mma_##N##_alone(float* out, int trips) {  \
        with_mma<N, ALONE>(out, trips);                                                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 2) mma_##N##_turn(float* out, int trips) {   \
        with_mma<N, TURN>(out, trips);                                                             \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 2) mma_##N##_beside(float* out, int trips) { \
        with_mma<N, BESIDE>(out, trips);                                                           \
    }
#define WGMMA_OF(N)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 1) wgmma_##N##_alone(float* out, int trips) {  \
        with_wgmma<N, ALONE>(out, trips);                                                            \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 1) wgmma_##N##_turn(float* out, int trips) {   \
        with_wgmma<N, TURN>(out, trips);                                                             \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 1) wgmma_##N##_beside(float* out, int trips) { \
        with_wgmma<N, BESIDE>(out, trips);                                                           \
    }
MMA(8)
MMA(32)
WGMMA_OF(64)
WGMMA_OF(128)
WGMMA_OF(256)

extern "C" __global__ void __launch_bounds__(256, 2) decode(float* out, int trips) {
    uint4 codes = first_codes();
    u32 kept = 0;
    Fragments a;
#pragma unroll 2
    for (int trip = 0; trip < trips; trip++) {
        next_tile(codes, a);
#pragma unroll
        for (int j = 0; j < 4; j++) kept ^= a[j][0] ^ a[j][1], kept ^= a[j][2] ^ a[j][3];
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = __uint_as_float(kept & 0x3FFFFFFFu);
}
