// What a token's logits say: its experts and their weights, by a warp. Of both routers, and of experts.cu where it routes
// for itself, so that all choose and weigh alike to the bit.
//
// Macros: X_BF16 0/1 (type of x), EXPERTS.
#pragma once
#include "sm90/ptx.cuh"

constexpr int VALUES = (EXPERTS + 31) / 32;  // a lane's logits; and words of a token's mask
constexpr u32 ALL = 0xFFFFFFFFu;
constexpr float LOG2_E = 1.4426950408889634f;

// Numbers in the order of the floats; the same backwards.
DEVICE u32 in_order(u32 bits) { return bits ^ (bits >> 31 ? ALL : 0x80000000u); }
DEVICE u32 from_order(u32 key) { return key ^ (key >> 31 ? 0x80000000u : ALL); }
DEVICE float warp_sum(float x) {
    for (int by = 16; by; by /= 2) x += shuffle_xor(x, by);
    return x;
}

// The top_k largest of a token's logits, largest first, and their softmax, to its `pairs` (expert, weight). Returns in
// lane i < VALUES which of the experts 32 i .. 32 i + 31 were taken.
DEVICE u32 pick(const float* logits, uint2* pairs, int token, int chosen, int top_k, int lane) {
    u32 keys[VALUES], taken = 0, expert = 0;
    float logit = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const int e = 32 * i + lane;
        const float* at = logits + static_cast<size_t>(token) * EXPERTS + e;
        keys[i] = e < EXPERTS ? in_order(__float_as_uint(ldg_float(at))) : 0;
    }
    for (int j = 0; j < top_k; j++) {
        u32 best = 0;
        int which = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            if (keys[i] > best) best = keys[i], which = i;
        }
        const u32 most = warp_max(best);
        const int leader = __ffs(warp_ballot(best == most)) - 1;
        const int e = 32 * __shfl_sync(ALL, which, leader) + leader;
        if (lane == leader) taken |= 1u << which;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            if (lane == leader && i == which) keys[i] = 0;
        }
        if (lane == j) expert = e, logit = __uint_as_float(from_order(most));
    }
    const float largest = __shfl_sync(ALL, logit, 0);
    const float odds = lane < top_k ? exp2_fast((logit - largest) * LOG2_E) : 0.0f, all = warp_sum(odds);
    if (lane < top_k) pairs[token * chosen + lane] = make_uint2(expert, __float_as_uint(odds / all));
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const u32 word = warp_ballot(taken >> i & 1);
        if (lane == i) mask = word;
    }
    return mask;
}

// sigmoid(x . gate), both of `width`: the shared expert's weight of a token. x: of type X_BF16, gate: bf16.
DEVICE float shared_weight(const unsigned char* x, const unsigned char* gate, int token, int width, int lane) {
    float sum = 0.0f;
#pragma unroll 8  // so that its loads are under way together
    for (int k = 8 * lane; k < width; k += 256) {
        const uint4 a = ldg128(x + 2 * (static_cast<size_t>(token) * width + k)), b = ldg128(gate + 2 * k);
        const u32 of_x[4] = {a.x, a.y, a.z, a.w}, of_gate[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += to_float<X_BF16>(of_x[i] & 0xFFFFu) * to_float<true>(of_gate[i] & 0xFFFFu);
            sum += to_float<X_BF16>(of_x[i] >> 16) * to_float<true>(of_gate[i] >> 16);
        }
    }
    return 1.0f / (1.0f + exp2_fast(-warp_sum(sum) * LOG2_E));
}
