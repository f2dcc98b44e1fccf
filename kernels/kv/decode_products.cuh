// Members of Decode (decode.cu includes this in its body): the two products and the softmax of one warp.

    __device__ __forceinline__ void begin_item(const Cursor& c, int item) {
        const unsigned row = shared + QUERY + (item & 1) * QUERY_BYTES + g * QUERY_ROW;
        barrier_wait(query_full + 8 * (item & 1), (item >> 1) & 1);
        uint4 raw[K_LOADS * K_LANE / 8];
#pragma unroll
        for (int i = 0; i < K_LOADS * K_LANE / 8; ++i) {
            int d = i / (K_LANE / 8) * 4 * K_LANE + K_LANE * t + i % (K_LANE / 8) * 8;
            raw[i] = g < p.group ? lds128(row + 2 * d) : make_uint4(0, 0, 0, 0);
        }
        unsigned any = 0;
#pragma unroll
        for (int i = 0; i < K_LOADS * K_LANE / 8; ++i) any |= raw[i].w;
        const unsigned read = once_loaded(query_empty + 8 * (item & 1), any, p.zero);
        sync_warp();
        if (lane == 0) barrier_arrive(read);
        float scale = 1.0f, back = 1.0f;
        if constexpr (!WIDE) {  // a power of two per row brings the largest element into [1, 2)
            float most = 0.0f;
#pragma unroll
            for (int i = 0; i < K_LOADS * K_LANE / 8; ++i)
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    unsigned x = word_of(raw[i], w);
                    most = fmaxf(most, fabsf(widen(x & 0xFFFF, p.q_is_bf16)));
                    most = fmaxf(most, fabsf(widen(x >> 16, p.q_is_bf16)));
                }
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            unsigned exponent = (bits_of(most) >> 23) & 0xFF;
            scale = float_of((254 - exponent) << 23);
            back = float_of(exponent << 23);
        }
#pragma unroll
        for (int i = 0; i < K_LOADS * K_LANE / 8; ++i)
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                unsigned x = word_of(raw[i], w);
                if constexpr (!WIDE)
                    x = pack_half2(widen(x & 0xFFFF, p.q_is_bf16) * scale, widen(x >> 16, p.q_is_bf16) * scale);
                query[4 * i + w] = x;
            }
        float head_scale = p.logit_scale;
        v_scale = 1.0f;
        if constexpr (KIND == FP8) {
            head_scale *= float_of(lds32(shared + HEAD_SCALES + 4 * c.h));
            v_scale = float_of(lds32(shared + HEAD_SCALES + 4 * (p.kv_heads + c.h)));
        }
        if (tid == 0) prefetch(p.arrived + c.b * p.kv_heads + c.h);
        back *= head_scale;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row_scale[i] = shuffle_from(back, 4 * (2 * t + i));
            top[i] = float_of(0xFF800000u);
            sum[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
    }

    // S^T of one unit; the last word loaded.
    __device__ __forceinline__ unsigned keys(float (&s)[PRODUCTS][4]) {
        const int token = token_row(g);
        const unsigned at = shared + RING + buffer * PAIR + placed(token, (KIND == Q8_0 ? 8 : 16) * t);
        unsigned last = 0;
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m) {
            if constexpr (KIND == Q8_0) {
                const unsigned scales = shared + SCALE_RING + buffer * TILES * SCALES + token * SCALE_ROW;
                unsigned k_scale[2][D / 64];
#pragma unroll
                for (int f = 0; f < 2; ++f) {
                    unsigned from = scales + scale_step(m, f);
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
                for (int j = 0; j < K_LOADS; ++j) {  // one block of 32: its sum, then its scale
                    const unsigned from = (at ^ j % 4 * 32) + j / 4 * ASIDE;  // no carry: the ring begins on a line
                    uint2 x0 = lds64(from + step(m, 0)), x1 = lds64(from + step(m, 1));
                    last = x1.y;
                    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    unsigned a0, a1, a2, a3;
                    int8_to_half2(x0.x, a0, a2);
                    int8_to_half2(x1.x, a1, a3);
                    mma_f16(c, a0, a1, a2, a3, query[4 * j], query[4 * j + 1]);
                    int8_to_half2(x0.y, a0, a2);
                    int8_to_half2(x1.y, a1, a3);
                    mma_f16(c, a0, a1, a2, a3, query[4 * j + 2], query[4 * j + 3]);
                    float s0 = half_to_float(j & 1 ? k_scale[0][j / 2] >> 16 : k_scale[0][j / 2] & 0xFFFF);
                    float s1 = half_to_float(j & 1 ? k_scale[1][j / 2] >> 16 : k_scale[1][j / 2] & 0xFFFF);
                    s[m][0] += c[0] * s0, s[m][1] += c[1] * s0, s[m][2] += c[2] * s1, s[m][3] += c[3] * s1;
                }
            } else {
                float c[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};  // two chains
#pragma unroll
                for (int j = 0; j < K_LOADS; ++j) {
                    const unsigned from = (at ^ j % 2 * 64) + j / 2 * ASIDE;
                    uint4 x0 = lds128(from + step(m, 0)), x1 = lds128(from + step(m, 1));
                    last = x1.w;
#pragma unroll
                    for (int w = 0; w < K_STEPS; ++w) {
                        unsigned a0, a1, a2, a3;
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
    __device__ __forceinline__ void softmax(float (&s)[PRODUCTS][4], unsigned (&probability)[PRODUCTS][2], int valid) {
        if (valid < UNIT) {
#pragma unroll
            for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (token_row(g) + 16 * m + 8 * (i >> 1) >= valid) s[m][i] = float_of(0xFF800000u);
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
        if (any_lane(most[0] > top[0] + RESCALE || most[1] > top[1] + RESCALE)) {
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
                probability[m][f] = transpose8x8(KIND == BF16 ? pack_bf162(low, high) : pack_half2(low, high));
            }
        }
    }

    // Tokens past the sequence's end: whatever lies there, zero times it must be zero.
    __device__ __forceinline__ void clear_tail(int valid) {
        for (int token = valid; token < UNIT; ++token) {
            const int slot = buffer * TILES + token / TOKENS, row = token % TOKENS;
            const unsigned at = shared + RING + slot * TILE + row * LINE;
            for (int i = lane; i < ROW / 16; i += 32) sts128(at + i / 8 * ASIDE + i % 8 * 16, make_uint4(0, 0, 0, 0));
            if (KIND == Q8_0 && lane < SCALE_ROW / 8)
                sts64(shared + SCALE_RING + slot * SCALES + row * SCALE_ROW + 8 * lane, make_uint2(0, 0));
        }
        fence_async_shared();
        sync_warp();
    }

    // O^T += V^T P^T; the last word loaded.
    __device__ __forceinline__ unsigned values(const unsigned (&probability)[PRODUCTS][2]) {
        unsigned at[2], scales[2], last = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int token = token_row(2 * t + e);
            at[e] = shared + RING + buffer * PAIR + placed(token, 16 * g);
            scales[e] = shared + SCALE_RING + buffer * TILES * SCALES + token * SCALE_ROW + 2 * (g >> 1);
        }
#pragma unroll
        for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
            for (int h = 0; h < V_LOADS; ++h) {
                uint4 x[2][2];  // [f][e]
                unsigned scale[2];
#pragma unroll
                for (int f = 0; f < 2; ++f) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) x[f][e] = lds128(at[e] + step(m, f) + h * ASIDE);
                    if constexpr (KIND == Q8_0) {
                        const int offset = scale_step(m, f) + 8 * h;
                        scale[f] = permute(lds16(scales[0] + offset), lds16(scales[1] + offset), 0x5410);
                    }
                }
                if constexpr (KIND == Q8_0) last = scale[1];
                else last = x[1][1].w;
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    if constexpr (WIDE) {
                        unsigned a[4];
#pragma unroll
                        for (int f = 0; f < 2; ++f) {
                            a[2 * f] = permute(word_of(x[f][0], w), word_of(x[f][1], w), 0x5410);
                            a[2 * f + 1] = permute(word_of(x[f][0], w), word_of(x[f][1], w), 0x7632);
                        }
                        mma<KIND>(acc[4 * h + w], a[0], a[1], a[2], a[3], probability[m][0], probability[m][1]);
                    } else {
#pragma unroll
                        for (int i = 0; i < 2; ++i) {  // d = 4 w + 2 i, and the next
                            unsigned a[4];
#pragma unroll
                            for (int f = 0; f < 2; ++f) {
                                unsigned both = permute(word_of(x[f][0], w), word_of(x[f][1], w), i ? 0x7362 : 0x5140);
                                halves<KIND>(both, a[2 * f], a[2 * f + 1]);
                                if constexpr (KIND == Q8_0) {
                                    a[2 * f] = mul_half2(a[2 * f], scale[f]);
                                    a[2 * f + 1] = mul_half2(a[2 * f + 1], scale[f]);
                                }
                            }
                            mma<KIND>(acc[8 * h + 2 * w + i], a[0], a[1], a[2], a[3], probability[m][0],
                                      probability[m][1]);
                        }
                    }
            }
        return last;
    }

    __device__ __forceinline__ void unit(int valid) {
        float s[PRODUCTS][4];
        unsigned probability[PRODUCTS][2];
        barrier_wait(full + 8 * buffer, parity);
        release(keys(s));
        softmax(s, probability, valid);
        barrier_wait(full + 8 * buffer, parity);
        if (valid < UNIT) clear_tail(valid);
        release(values(probability));
    }

    // The warp has read its buffer, `last` of all; loads of a warp return in order.
    __device__ __forceinline__ void release(unsigned last) {
        const unsigned barrier = once_loaded(empty + 8 * buffer, last, p.zero);
        sync_warp();
        if (lane == 0) barrier_arrive(barrier);
        if (++buffer == (warp + 1) * PAIRS) buffer -= PAIRS, parity ^= 1;
    }
