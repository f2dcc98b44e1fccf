// One token on slices of states in registers: what decode.cu and decode_conv.cu share.
//
// Columns of a state never interact; rows meet in one block-wide sum. See decode.cu for the pass.
#pragma once

#include "formats.cuh"

constexpr float L2_EPS = 1e-6f;  // under the root of the key and query norms, as transformers' l2norm
// Formats of q, k, v and o: BF16, FP16, anything else is float32.

DEVICE float widen(u16 bits, int format) { return format == BF16 ? widen<BF16>(bits) : widen<FP16>(bits); }

// N consecutive elements as they lie in memory, and decoded later: a conversion would wait for its load.
template <int N>
DEVICE void load_raw(u32 (&raw)[N], const void* base, long at, bool half) {
    const u32* from =
        half ? reinterpret_cast<const u32*>(static_cast<const u16*>(base) + at) : static_cast<const u32*>(base) + at;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i < N / 2 || !half) raw[i] = __ldg(from + i);
}
template <int N>
DEVICE void decode_raw(float (&x)[N], const u32 (&raw)[N], int format) {
    const bool half = format == BF16 || format == FP16;
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = half ? widen((u16)(raw[i / 2] >> (16 * (i & 1))), format) : __uint_as_float(raw[i]);
}

// One element, as its bits, in a register; decoded later. `half`: 2 bytes, else 4.
DEVICE u32 load_element(const char* from, bool half) {
    return half ? __ldg(reinterpret_cast<const u16*>(from)) : __ldg(reinterpret_cast<const u32*>(from));
}
DEVICE float decoded(u32 raw, int format) {
    return format == BF16 || format == FP16 ? widen((u16)raw, format) : __uint_as_float(raw);
}

// 16 bytes of a state. HINT: 0 plain, 1 evict_first.
template <int HINT>
DEVICE uint4 load_state(const char* from, u64 policy) {
    return HINT ? ldg128(from, policy) : ldg128(from);
}
template <int HINT>
DEVICE void store_state(char* to, uint4 x, u64 policy) {
    if (HINT) stg128(to, x, policy);
    else stg128(to, x);
}

template <int N>
DEVICE void store_activations(void* base, long at, const float (&x)[N], int format) {
    if (format == BF16) {
        u32* to = reinterpret_cast<u32*>(static_cast<u16*>(base) + at);
#pragma unroll
        for (int i = 0; i < N / 2; i++) to[i] = pack_bf162(x[2 * i], x[2 * i + 1]);
    } else if (format == FP16) {
        u16* to = static_cast<u16*>(base) + at;
#pragma unroll
        for (int i = 0; i < N; i++) stg_half(to + i, x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) static_cast<float*>(base)[at + i] = x[i];
    }
}

// The 16 bytes of a state as 4 float32 or 8 bf16 values, and back. AGAIN: by instructions that ptxas
// does not take for the first ones: else it may keep the values of those, in twice the registers, and spill.
template <bool AGAIN = false>
DEVICE void unpack(float (&s)[4], uint4 x) {
    s[0] = __uint_as_float(x.x), s[1] = __uint_as_float(x.y), s[2] = __uint_as_float(x.z), s[3] = __uint_as_float(x.w);
}
template <bool AGAIN = false>
DEVICE void unpack(float (&s)[8], uint4 x) {
    const u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[2 * i] = __uint_as_float(AGAIN ? __byte_perm(word[i], 0, 0x1044) : word[i] << 16);
        s[2 * i + 1] = __uint_as_float(AGAIN ? __byte_perm(word[i], 0, 0x3244) : word[i] & 0xffff0000u);
    }
}
DEVICE uint4 pack(const float (&s)[4]) {
    return make_uint4(__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]), __float_as_uint(s[3]));
}
DEVICE uint4 pack(const float (&s)[8]) {
    return make_uint4(pack_bf162(s[0], s[1]), pack_bf162(s[2], s[3]), pack_bf162(s[4], s[5]), pack_bf162(s[6], s[7]));
}

// What a warp needs of one (sequence, head) beside the state, as loaded. A lane holds D / 32 elements of k and q.
template <int D, int VEC>
struct RawToken {
    u32 k[D / 32], q[D / 32], v[VEC];
    float g, rate;
};
template <int VEC>
struct Token {
    float v[VEC], decay, rate, dot;  // dot: k . q
};

template <int D, int VEC>
DEVICE void load_token(RawToken<D, VEC>& t, const void* q, const void* k, const void* v, const float* g,
                       const float* beta, int b, int head, int hk, int hv, int column, int format) {
    const long at_k = (long)(b * hk + head / (hv / hk)) * D + (threadIdx.x & 31) * (D / 32);
    const bool half = format == BF16 || format == FP16;
    load_raw(t.k, k, at_k, half);
    load_raw(t.q, q, at_k, half);
    load_raw(t.v, v, (long)(b * hv + head) * D + column, half);
    t.g = __ldg(g + b * hv + head);
    t.rate = __ldg(beta + b * hv + head);
}

// Decodes a token; k and q, normalised, go to the warp's own rows of shared memory, kq [2 * D].
template <int D, int VEC>
DEVICE void share_token(Token<VEC>& t, const RawToken<D, VEC>& raw, float* kq, bool normalise, int format) {
    float key[D / 32], query[D / 32], kk = 0, qq = 0, dot = 0;
    decode_raw(key, raw.k, format);
    decode_raw(query, raw.q, format);
    decode_raw(t.v, raw.v, format);
#pragma unroll
    for (int i = 0; i < D / 32; i++) kk += key[i] * key[i], qq += query[i] * query[i], dot += key[i] * query[i];
#pragma unroll
    for (int step = 16; step; step /= 2) {
        kk += __shfl_xor_sync(~0u, kk, step);
        qq += __shfl_xor_sync(~0u, qq, step);
        dot += __shfl_xor_sync(~0u, dot, step);
    }
    const float k_norm = normalise ? 1.0f / sqrtf(kk + L2_EPS) : 1.0f;
    const float q_norm = normalise ? 1.0f / sqrtf(qq + L2_EPS) : 1.0f;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        kq[lane * (D / 32) + i] = key[i] * k_norm;
        kq[D + lane * (D / 32) + i] = query[i] * q_norm;
    }
    __syncwarp();
    t.decay = expf(raw.g), t.rate = raw.rate, t.dot = dot * k_norm * q_norm;
}

// Partial sums of guess and read over this thread's R rows, STEP apart.
template <int D, int R, int VEC, int STEP = 1>
DEVICE void partial_sums(float (&guess)[VEC], float (&read)[VEC], const uint4 (&raw)[R], const float* kq, int row) {
#pragma unroll
    for (int j = 0; j < VEC; j++) guess[j] = read[j] = 0;
#pragma unroll
    for (int i = 0; i < R; i++) {
        float s[VEC];
        unpack(s, raw[i]);
        const float key = kq[row + i * STEP], query = kq[D + row + i * STEP];
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            guess[j] = fmaf(s[j], key, guess[j]);
            read[j] = fmaf(s[j], query, read[j]);
        }
    }
}

// Sum over the RL row groups of the warp (lanes LV apart), then over the warps through sums [WARPS][2][V_TILE].
template <int V_TILE, int WARPS, int LV, int VEC>
DEVICE void total_sums(float (&guess)[VEC], float (&read)[VEC], float* sums, int warp, int at, int threads) {
#pragma unroll
    for (int step = LV; step < 32; step *= 2)
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            guess[j] += __shfl_xor_sync(~0u, guess[j], step);
            read[j] += __shfl_xor_sync(~0u, read[j], step);
        }
    if (WARPS == 1) return;
    if ((threadIdx.x & 31) < LV)
#pragma unroll
        for (int j = 0; j < VEC; j += 4) {
            float* to = sums + warp * 2 * V_TILE + at + j;
            *reinterpret_cast<float4*>(to) = make_float4(guess[j], guess[j + 1], guess[j + 2], guess[j + 3]);
            *reinterpret_cast<float4*>(to + V_TILE) = make_float4(read[j], read[j + 1], read[j + 2], read[j + 3]);
        }
    named_barrier_sync(1, threads);
#pragma unroll
    for (int j = 0; j < VEC; j++) guess[j] = read[j] = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int j = 0; j < VEC; j += 4) {
            const float4 a = *reinterpret_cast<const float4*>(sums + w * 2 * V_TILE + at + j);
            const float4 b = *reinterpret_cast<const float4*>(sums + (w * 2 + 1) * V_TILE + at + j);
            guess[j] += a.x, guess[j + 1] += a.y, guess[j + 2] += a.z, guess[j + 3] += a.w;
            read[j] += b.x, read[j + 1] += b.y, read[j + 2] += b.z, read[j + 3] += b.w;
        }
}

// Without this the compiler keeps a bf16 state unpacked, in twice the registers, across the barrier.
template <int R>
DEVICE void forget_unpacked(uint4 (&raw)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) asm volatile("" : "+r"(raw[i].x), "+r"(raw[i].y), "+r"(raw[i].z), "+r"(raw[i].w));
}

template <bool AGAIN = false, int VEC>
DEVICE uint4 updated(uint4 raw, const float (&u)[VEC], float decay, float key) {
    float s[VEC];
    unpack<AGAIN>(s, raw);
#pragma unroll
    for (int j = 0; j < VEC; j++) s[j] = fmaf(key, u[j], decay * s[j]);
    return pack(s);
}
