// Members of Decode: the two products and the softmax of one warp.
#ifndef KV_DECODE_MAINLOOP_CUH
#define KV_DECODE_MAINLOOP_CUH

#include "decode.cuh"

template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::begin_item(const Cursor& c, int item) {
    const u32 row = shared + QUERY + (item & 1) * QUERY_BYTES + g * QUERY_ROW;
    mbarrier_wait(query_full + 8 * (item & 1), (item >> 1) & 1);
    uint4 raw[K_LOADS * K_LANE / 8];
#pragma unroll
    for (int i = 0; i < K_LOADS * K_LANE / 8; ++i) {
        int d = i / (K_LANE / 8) * 4 * K_LANE + K_LANE * t + i % (K_LANE / 8) * 8;
        raw[i] = g < p.group ? lds128(row + 2 * d) : make_uint4(0, 0, 0, 0);
    }
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < K_LOADS * K_LANE / 8; ++i) any |= raw[i].w;
    const u32 read = once_loaded(query_empty + 8 * (item & 1), any, p.zero);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(read);
    float scale = 1.0f, back = 1.0f;
    if constexpr (!WIDE) {  // a power of two per row brings the largest element into [1, 2)
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < K_LOADS * K_LANE / 8; ++i)
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                u32 x = word_of(raw[i], w);
                most = fmaxf(most, fabsf(widen(x & 0xFFFF, p.q_is_bf16)));
                most = fmaxf(most, fabsf(widen(x >> 16, p.q_is_bf16)));
            }
        most = fmaxf(most, shuffle_xor(most, 1));
        most = fmaxf(most, shuffle_xor(most, 2));
        u32 exponent = (__float_as_uint(most) >> 23) & 0xFF;
        scale = __uint_as_float((254 - exponent) << 23);
        back = __uint_as_float(exponent << 23);
    }
#pragma unroll
    for (int i = 0; i < K_LOADS * K_LANE / 8; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            u32 x = word_of(raw[i], w);
            if constexpr (!WIDE)
                x = pack_half2(widen(x & 0xFFFF, p.q_is_bf16) * scale, widen(x >> 16, p.q_is_bf16) * scale);
            query[4 * i + w] = x;
        }
    float head_scale = p.logit_scale;
    v_scale = 1.0f;
    if constexpr (KIND == FP8) {
        head_scale *= __uint_as_float(lds32(shared + HEAD_SCALES + 4 * c.h));
        v_scale = __uint_as_float(lds32(shared + HEAD_SCALES + 4 * (p.kv_heads + c.h)));
    }
    if (tid == 0) prefetch_l2(p.arrived + c.b * p.kv_heads + c.h);
    back *= head_scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        row_scale[i] = __shfl_sync(~0u, back, 4 * (2 * t + i));
        top[i] = __uint_as_float(0xFF800000u);
        sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
}

// S^T of one unit; the last word loaded.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE u32 Decode<KIND, D, WARPS, TILES, STAGES>::keys(float (&s)[PRODUCTS][4]) {
    const int token = token_row(g);
    const u32 at = shared + TILES_AT + stage * STAGE_BYTES + placed(token, (KIND == Q8_0 ? 8 : 16) * t);
    u32 last = 0;
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m) {
        if constexpr (KIND == Q8_0) {
            const u32 scales = shared + SCALES_AT + stage * TILES * SCALES + token * SCALE_ROW;
            u32 k_scale[2][D / 64];
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                u32 from = scales + scale_step(m, f);
                if constexpr (D == 256) {
                    uint4 x = lds128(from);
                    k_scale[f][0] = x.x, k_scale[f][1] = x.y, k_scale[f][2] = x.z, k_scale[f][3] = x.w;
                } else {
                    uint2 x = lds64(from);
                    k_scale[f][0] = x.x, k_scale[f][1] = x.y;
                }
            }
            s[m][0] = s[m][1] = s[m][2] = s[m][3] = 0.0f;
#pragma unroll
            for (int j = 0; j < K_LOADS; ++j) {                      // one block of 32: its sum, then its scale
                const u32 from = (at ^ j % 4 * 32) + j / 4 * ASIDE;  // no carry: the stages begin on a line
                uint2 x0 = lds64(from + step(m, 0)), x1 = lds64(from + step(m, 1));
                last = x1.y;
                float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                u32 a0, a1, a2, a3;
                int8_to_half2(x0.x, a0, a2);
                int8_to_half2(x1.x, a1, a3);
                mma_16816<false>(c, a0, a1, a2, a3, query[4 * j], query[4 * j + 1]);
                int8_to_half2(x0.y, a0, a2);
                int8_to_half2(x1.y, a1, a3);
                mma_16816<false>(c, a0, a1, a2, a3, query[4 * j + 2], query[4 * j + 3]);
                float s0 = half_to_float(j & 1 ? k_scale[0][j / 2] >> 16 : k_scale[0][j / 2] & 0xFFFF);
                float s1 = half_to_float(j & 1 ? k_scale[1][j / 2] >> 16 : k_scale[1][j / 2] & 0xFFFF);
                s[m][0] += c[0] * s0, s[m][1] += c[1] * s0, s[m][2] += c[2] * s1, s[m][3] += c[3] * s1;
            }
        } else {
            float c[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};  // two chains
#pragma unroll
            for (int j = 0; j < K_LOADS; ++j) {
                const u32 from = (at ^ j % 2 * 64) + j / 2 * ASIDE;
                uint4 x0 = lds128(from + step(m, 0)), x1 = lds128(from + step(m, 1));
                last = x1.w;
#pragma unroll
                for (int w = 0; w < K_STEPS; ++w) {
                    u32 a0, a1, a2, a3;
                    if constexpr (WIDE) {
                        a0 = word_of(x0, 2 * w), a2 = word_of(x0, 2 * w + 1);
                        a1 = word_of(x1, 2 * w), a3 = word_of(x1, 2 * w + 1);
                    } else {
                        halves<KIND>(word_of(x0, w), a0, a2);
                        halves<KIND>(word_of(x1, w), a1, a3);
                    }
                    const int at = 2 * (j * K_STEPS + w);
                    mma<KIND>(c[w & 1], a0, a1, a2, a3, query[at], query[at + 1]);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][i] = c[0][i] + c[1][i];
        }
    }
    return last;
}

// Online softmax; P^T as operand B. `valid`: tokens of this unit that the sequence holds.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::softmax(float (&s)[PRODUCTS][4], u32 (&probability)[PRODUCTS][2],
                                                           int valid) {
    if (valid < UNIT) {
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (token_row(g) + 16 * m + 8 * (i >> 1) >= valid) s[m][i] = __uint_as_float(0xFF800000u);
    }
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        most[i] = fmaxf(s[0][i], s[0][i + 2]);
#pragma unroll
        for (int m = 1; m < PRODUCTS; ++m) most[i] = fmaxf(most[i], fmaxf(s[m][i], s[m][i + 2]));
        most[i] = fmaxf(most[i], shuffle_xor(most[i], 4));
        most[i] = fmaxf(most[i], shuffle_xor(most[i], 8));
        most[i] = fmaxf(most[i], shuffle_xor(most[i], 16)) * row_scale[i];
    }
    if (warp_any(most[0] > top[0] + RESCALE || most[1] > top[1] + RESCALE)) {
        float decay[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float higher = fmaxf(top[i], most[i]);
            decay[i] = exp2_fast(top[i] - higher);
            top[i] = higher;
            sum[i] *= decay[i];
        }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][j] *= decay[j & 1];
    }
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = exp2_fast(s[m][i] * row_scale[i & 1] - top[i & 1]);
            sum[i & 1] += x[i];
        }
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            const float low = x[2 * f], high = x[2 * f + 1];
            probability[m][f] = movmatrix_trans(KIND == BF16 ? pack_bf162(low, high) : pack_half2(low, high));
        }
    }
}

// Tokens past the sequence's end: whatever lies there, zero times it must be zero.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::clear_tail(int valid) {
    for (int token = valid; token < UNIT; ++token) {
        const int slot = stage * TILES + token / TOKENS, row = token % TOKENS;
        const u32 at = shared + TILES_AT + slot * TILE + row * LINE;
        for (int i = lane; i < ROW / 16; i += 32) sts128(at + i / 8 * ASIDE + i % 8 * 16, make_uint4(0, 0, 0, 0));
        if (KIND == Q8_0 && lane < SCALE_ROW / 8)
            sts64(shared + SCALES_AT + slot * SCALES + row * SCALE_ROW + 8 * lane, make_uint2(0, 0));
    }
    fence_proxy_async_shared();
    __syncwarp();
}

// O^T += V^T P^T; the last word loaded.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE u32 Decode<KIND, D, WARPS, TILES, STAGES>::values(const u32 (&probability)[PRODUCTS][2]) {
    u32 at[2], scales[2], last = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int token = token_row(2 * t + e);
        at[e] = shared + TILES_AT + stage * STAGE_BYTES + placed(token, 16 * g);
        scales[e] = shared + SCALES_AT + stage * TILES * SCALES + token * SCALE_ROW + 2 * (g >> 1);
    }
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
        for (int h = 0; h < V_LOADS; ++h) {
            uint4 x[2][2];  // [f][e]
            u32 scale[2];
#pragma unroll
            for (int f = 0; f < 2; ++f) {
#pragma unroll
                for (int e = 0; e < 2; ++e) x[f][e] = lds128(at[e] + step(m, f) + h * ASIDE);
                if constexpr (KIND == Q8_0) {
                    const int offset = scale_step(m, f) + 8 * h;
                    scale[f] = __byte_perm(lds16(scales[0] + offset), lds16(scales[1] + offset), 0x5410);
                }
            }
            if constexpr (KIND == Q8_0) last = scale[1];
            else last = x[1][1].w;
#pragma unroll
            for (int w = 0; w < 4; ++w)
                if constexpr (WIDE) {
                    u32 a[4];
#pragma unroll
                    for (int f = 0; f < 2; ++f) {
                        a[2 * f] = __byte_perm(word_of(x[f][0], w), word_of(x[f][1], w), 0x5410);
                        a[2 * f + 1] = __byte_perm(word_of(x[f][0], w), word_of(x[f][1], w), 0x7632);
                    }
                    mma<KIND>(acc[4 * h + w], a[0], a[1], a[2], a[3], probability[m][0], probability[m][1]);
                } else {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {  // d = 4 w + 2 i, and the next
                        u32 a[4];
#pragma unroll
                        for (int f = 0; f < 2; ++f) {
                            u32 both = __byte_perm(word_of(x[f][0], w), word_of(x[f][1], w), i ? 0x7362 : 0x5140);
                            halves<KIND>(both, a[2 * f], a[2 * f + 1]);
                            if constexpr (KIND == Q8_0) {
                                a[2 * f] = mul2<false>(a[2 * f], scale[f]);
                                a[2 * f + 1] = mul2<false>(a[2 * f + 1], scale[f]);
                            }
                        }
                        mma<KIND>(acc[8 * h + 2 * w + i], a[0], a[1], a[2], a[3], probability[m][0], probability[m][1]);
                    }
                }
        }
    return last;
}

template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::unit(int valid) {
    float s[PRODUCTS][4];
    u32 probability[PRODUCTS][2];
    mbarrier_wait(full + 8 * stage, phase);
    release(keys(s));
    softmax(s, probability, valid);
    mbarrier_wait(full + 8 * stage, phase);
    if (valid < UNIT) clear_tail(valid);
    release(values(probability));
}

// The warp has read its stage, `last` of all; loads of a warp return in order.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::release(u32 last) {
    const u32 barrier = once_loaded(empty + 8 * stage, last, p.zero);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
    if (++stage == (warp + 1) * STAGES) stage -= STAGES, phase ^= 1;
}

#endif
