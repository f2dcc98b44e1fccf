// Activations to e4m3: one float32 scale per token, amax / 448, and K in the order that w4a8_gemm.cu wants.
//
// A block is a token. A thread makes 16 bytes of the output from four runs of four k, holds the row in registers, and
// so reads it once. Within each 64 k of the output, byte 32 j + 16 h + 4 t + i is k = 16 t + 8 j + 4 h + i: there lane
// 4 g + t of w4a8_gemm.cu has whole scale groups, one per row, and four lanes here read 32 bytes side by side.
//
// The block lets the GEMM start at once (it waits for the whole of this grid before it reads x). It does not start
// early itself: x may be what the kernel ahead of it writes.
//
// Macros: KERNEL (name), X_BF16 0/1, ITEMS (of 16 bytes per thread).
#include "sm90/mma.cuh"

constexpr float E4M3_MAX = 448.0f, SMALLEST = 0x1p-100f;  // below it a row is zeros: its scale stays a normal number

// x: [tokens, k] 16-bit. out: [tokens, padded] bytes, zeros from k on. scales: float32 [tokens]. k: a multiple of 16.
extern "C" __global__ void KERNEL(const unsigned short* x, unsigned char* out, float* scales, int k, int padded) {
    __shared__ unsigned of_warps[32];
    launch_dependent_grids();
    const size_t token = blockIdx.x;
    const unsigned short* const row = x + token * k;
    uint2 v[ITEMS][4];
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const int piece = item * blockDim.x + threadIdx.x, from = piece / 4 * 64 + piece % 4 * 4;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            v[item][t] = uint2{0, 0};
            if (from + 16 * t < k) v[item][t] = *reinterpret_cast<const uint2*>(row + from + 16 * t);
        }
    }
    unsigned most = 0;  // of the bits without their signs, which order as the values do, NaN last
#pragma unroll
    for (int i = 0; i < 4 * ITEMS; i++) {
        const uint2 pairs = v[i / 4][i % 4];
        most = max_u16x2(most, max_u16x2(pairs.x & 0x7FFF7FFFu, pairs.y & 0x7FFF7FFFu));
    }
    most = warp_max(max(most & 0xFFFFu, most >> 16));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    most = warp_max(lane < blockDim.x / 32 ? of_warps[lane] : 0);
    const float value = to_float<X_BF16>(most), amax = value < SMALLEST ? SMALLEST : value;
    const float to_e4m3 = __fdiv_rn(E4M3_MAX, amax);
    if (threadIdx.x == 0) scales[token] = __fdiv_rn(amax, E4M3_MAX);
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const int piece = item * blockDim.x + threadIdx.x;
        unsigned words[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const uint2 pairs = v[item][t];
            const float a = to_float<X_BF16>(pairs.x & 0xFFFFu) * to_e4m3,
                        b = to_float<X_BF16>(pairs.x >> 16) * to_e4m3;
            const float c = to_float<X_BF16>(pairs.y & 0xFFFFu) * to_e4m3,
                        d = to_float<X_BF16>(pairs.y >> 16) * to_e4m3;
            words[t] = pack_e4m3x2(a, b) | pack_e4m3x2(c, d) << 16;
        }
        if (16 * piece < padded) {
            *reinterpret_cast<uint4*>(out + token * padded + 16 * piece) =
                uint4{words[0], words[1], words[2], words[3]};
        }
    }
}
