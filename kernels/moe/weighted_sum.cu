// y of a mixture for many tokens: a token's rows of what its experts gave, weighed and added in the order of its choice.
//
// Macros: KERNEL (name), X_BF16 0/1 (type of y), WIDTH.
#include "sm90/ptx.cuh"

constexpr int AT_ONCE = 5;  // rows that a thread has in flight

// given: fp16 [rows, WIDTH]. pairs: [tokens, chosen] (expert, weight). back: [tokens, chosen], where their rows lie.
// y: [tokens, WIDTH]. A block a token, eight columns a thread.
extern "C" __global__ void KERNEL(const u16* given, const uint2* pairs, const u32* back, u16* y, int chosen) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    for (int at = 8 * threadIdx.x; at < WIDTH; at += 8 * blockDim.x) {
        float sum[8] = {};
        for (int j = 0; j < chosen; j += AT_ONCE) {
            uint4 rows[AT_ONCE] = {};
            float weights[AT_ONCE] = {};
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (j + i >= chosen) break;
                const int pair = blockIdx.x * chosen + j + i;
                weights[i] = __uint_as_float(ldg32(reinterpret_cast<const u32*>(pairs + pair) + 1));
                rows[i] = ldg128(given + static_cast<size_t>(ldg32(back + pair)) * WIDTH + at);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const u32 words[4] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
#pragma unroll
                for (int e = 0; e < 8; e++) sum[e] += weights[i] * half_to_float(words[e / 2] >> 16 * (e % 2) & 0xFFFF);
            }
        }
        const uint4 rounded = {pack_pair<X_BF16>(sum[0], sum[1]), pack_pair<X_BF16>(sum[2], sum[3]),
                               pack_pair<X_BF16>(sum[4], sum[5]), pack_pair<X_BF16>(sum[6], sum[7])};
        stg128(y + static_cast<size_t>(blockIdx.x) * WIDTH + at, rounded);
    }
}
