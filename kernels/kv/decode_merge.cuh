// Members of Decode (decode.cu includes this in its body): merging the states of a block's warps, and the parts of an
// item that several blocks hold.

    __device__ __forceinline__ void store(const Cursor& c, int q, int d, float4 x) {
        uint2 y = p.q_is_bf16 ? make_uint2(pack_bf162(x.x, x.y), pack_bf162(x.z, x.w))
                              : make_uint2(pack_half2(x.x, x.y), pack_half2(x.z, x.w));
        *(uint2*)(p.o + ((u64)((c.b * p.kv_heads + c.h) * p.group + q) * D + d) * 2) = y;
    }

    // Merges the warps' states; writes the item's output, or this block's part of it. `idle`: the block's last item,
    // whose merge may use the ring.
    __device__ __forceinline__ void end_item(const Cursor& c, bool idle) {
        const bool whole = c.begin >= first && c.begin + c.count <= last;
        const int slot = 2 * block + (c.begin >= first ? 1 : 0);  // a part that begins its item is the block's last
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] += shuffle_xor(sum[i], 4);
            sum[i] += shuffle_xor(sum[i], 8);
            sum[i] += shuffle_xor(sum[i], 16);
            const uint2 both = make_uint2(bits_of(top[i]), bits_of(sum[i]));
            if (g == 0) sts64(shared + STATS + (warp * QUERIES + 2 * t + i) * 8, both);
        }
        sync_block();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = float_of(0xFF800000u), all = 0.0f;
            uint2 stats[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                stats[w] = lds64(shared + STATS + (w * QUERIES + 2 * t + i) * 8);
                highest = fmaxf(highest, float_of(stats[w].x));
            }
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all += float_of(stats[w].y) * exp2_fast(float_of(stats[w].x) - highest);
            weight[i] = exp2_fast(top[i] - highest);
            if (whole) weight[i] *= v_scale / all;
            else if (warp == 0 && g == 0 && 2 * t + i < p.group) {
                p.part_ml[(slot * QUERIES + 2 * t + i) * 2] = highest;
                p.part_ml[(slot * QUERIES + 2 * t + i) * 2 + 1] = all;
            }
        }
        constexpr int CHUNKS = 8 * QUADS, PER_LANE = V_LANE / (4 * QUADS);  // float4 per row; rounds per V load
        constexpr int ROUNDS = D / (4 * CHUNKS);
        static_assert(ROUNDS * MERGE_BYTES <= MERGE, "the ring holds all rounds");
        const auto give = [&](int round, unsigned merge) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < QUADS; ++j) {
                    const int tile = 2 * (round * QUADS + j);
                    const float w = weight[i];
                    uint4 x = make_uint4(bits_of(acc[tile][i] * w), bits_of(acc[tile][i + 2] * w),
                                         bits_of(acc[tile + 1][i] * w), bits_of(acc[tile + 1][i + 2] * w));
                    int chunk = (g * QUADS + j) ^ ((t & 1) | (t & 2) << 1);
                    sts128(merge + ((warp * QUERIES + 2 * t + i) * CHUNKS + chunk) * 16, x);
                }
        };
        const auto take = [&](int round, unsigned merge, int i) {  // element i of the round's group x CHUNKS
            const int q = i / CHUNKS, chunk = i % CHUNKS, from = q >> 1;
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                uint4 y = lds128(merge + ((w * QUERIES + q) * CHUNKS + (chunk ^ ((from & 1) | (from & 2) << 1))) * 16);
                x.x += float_of(y.x), x.y += float_of(y.y), x.z += float_of(y.z), x.w += float_of(y.w);
            }
            const int d = round / PER_LANE * 8 * V_LANE + chunk / QUADS * V_LANE + round % PER_LANE * 4 * QUADS +
                          chunk % QUADS * 4;
            if (whole) store(c, q, d, x);
            else *(float4*)(p.part + ((u64)slot * p.group + q) * D + d) = x;
        };
        if (idle) {  // all rounds at once
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) give(round, shared + RING + round * MERGE_BYTES);
            sync_block();
            for (int i = tid; i < ROUNDS * p.group * CHUNKS; i += THREADS) {
                const int round = i / (p.group * CHUNKS);
                take(round, shared + RING + round * MERGE_BYTES, i - round * p.group * CHUNKS);
            }
        } else {
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                if (round) sync_block();
                give(round, shared + MERGE);
                sync_block();
                for (int i = tid; i < p.group * CHUNKS; i += THREADS) take(round, shared + MERGE, i);
            }
        }
        if (!whole) end_part(c, idle);
    }

    __device__ __forceinline__ const float* maximum_and_sum(int from, int i, int q) const {
        return p.part_ml + ((2 * (from + i) + (i == 0)) * QUERIES + q) * 2;
    }

    // One warp: the weight of each part of query q to shared memory at `weights`; returns the factor of the whole sum.
    __device__ __forceinline__ float weigh(int from, int parts, int q, unsigned weights) {
        const float none = float_of(0xFF800000u);
        float2 near[2];  // up to 64 parts are read once
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            near[j] = float2{none, 0.0f};
            if (lane + 32 * j < parts) near[j] = load_shared_by_blocks2(maximum_and_sum(from, lane + 32 * j, q));
        }
        float highest = fmaxf(near[0].x, near[1].x), all = 0.0f;
        for (int i = lane + 64; i < parts; i += 32)
            highest = fmaxf(highest, load_shared_by_blocks2(maximum_and_sum(from, i, q)).x);
        for (int by = 1; by < 32; by *= 2) highest = fmaxf(highest, shuffle_xor(highest, by));
        for (int i = lane; i < parts; i += 32) {
            float2 ml = i < 32 ? near[0] : i < 64 ? near[1] : load_shared_by_blocks2(maximum_and_sum(from, i, q));
            float w = exp2_fast(ml.x - highest);
            all += ml.y * w;
            sts32(weights + i * 4, bits_of(w));
        }
        for (int by = 1; by < 32; by *= 2) all += shuffle_xor(all, by);
        return v_scale / all;
    }

    __device__ __forceinline__ const float* part_of(int from, int i) const {
        return p.part + (u64)(2 * (from + i) + (i == 0)) * p.group * D;
    }

    // 16 float4 of one query's output from `parts` <= HELP_MOST parts, by an idle block (the ring is room). The sums
    // are those of merge_all, in its order.
    __device__ __forceinline__ void merge_slice(const Cursor& c, int from, int parts, int slice) {
        constexpr int LOADS = (HELP_MOST * 16 + THREADS - 1) / THREADS;
        const int q = slice / (D / 64), column = slice * 16 + (tid & 15);
        const unsigned weights = shared + MERGE, staged = shared + RING;
        float4 y[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            const int i = (tid >> 4) + k * (THREADS / 16);
            if (i < parts) y[k] = load_shared_by_blocks4(part_of(from, i) + 4 * column);
        }
        float norm = 0.0f;
        if (warp == 0) norm = weigh(from, parts, q, weights);
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            const int i = (tid >> 4) + k * (THREADS / 16);
            if (i < parts)
                sts128(staged + (i * 16 + (tid & 15)) * 16,
                       make_uint4(bits_of(y[k].x), bits_of(y[k].y), bits_of(y[k].z), bits_of(y[k].w)));
        }
        sync_block();
        if (tid < 16) {
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
            for (int i = 0; i < parts; ++i) {
                const uint4 a = lds128(staged + (i * 16 + tid) * 16);
                const float w = float_of(lds32(weights + 4 * i));
                x.x = fmaf(w, float_of(a.x), x.x), x.y = fmaf(w, float_of(a.y), x.y);
                x.z = fmaf(w, float_of(a.z), x.z), x.w = fmaf(w, float_of(a.w), x.w);
            }
            store(c, q, 4 * column % D, make_float4(x.x * norm, x.y * norm, x.z * norm, x.w * norm));
        }
        sync_block();
    }

    __device__ __forceinline__ void merge_slices(const Cursor& c, int from, int parts, unsigned which) {
        for (int i = 0; i < 32; ++i)
            if (which >> i & 1) merge_slice(c, from, parts, i);
    }

    __device__ __forceinline__ void merge_all(const Cursor& c, int from, int parts) {
        const unsigned weights = shared + MERGE;  // [group][parts]
        for (int q = warp; q < p.group; q += WARPS) {
            const float norm = weigh(from, parts, q, weights + 4 * q * parts);
            if (lane == 0) sts32(shared + TOTALS + 4 * q, bits_of(norm));
        }
        // Each thread has up to COLUMNS float4 of the output; many loads are under way before the first is used.
        constexpr int COLUMNS = QUERIES * (D / 4) / THREADS, DEPTH = COLUMNS > 2 ? 4 : 24 / COLUMNS;
        float4 x[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int j = 0; j < parts; j += DEPTH) {
            float4 y[DEPTH][COLUMNS];
#pragma unroll
            for (int k = 0; k < DEPTH; ++k)
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
                    const int at = tid + i * THREADS;
                    y[k][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (j + k < parts && at < p.group * (D / 4))
                        y[k][i] = load_shared_by_blocks4(part_of(from, j + k) + 4 * at);
                }
            if (j == 0) sync_block();  // the weights
#pragma unroll
            for (int k = 0; k < DEPTH; ++k)
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
                    const int q = min((tid + i * THREADS) / (D / 4), p.group - 1);
                    if (j + k < parts) {
                        const float w = float_of(lds32(weights + (q * parts + j + k) * 4));
                        x[i].x = fmaf(w, y[k][i].x, x[i].x), x[i].y = fmaf(w, y[k][i].y, x[i].y);
                        x[i].z = fmaf(w, y[k][i].z, x[i].z), x[i].w = fmaf(w, y[k][i].w, x[i].w);
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const int at = tid + i * THREADS, q = at / (D / 4);
            if (at < p.group * (D / 4)) {
                const float norm = float_of(lds32(shared + TOTALS + 4 * q));
                store(c, q, 4 * at % D, make_float4(x[i].x * norm, x[i].y * norm, x[i].z * norm, x[i].w * norm));
            }
        }
        sync_block();
    }

    // One thread: this block, or for a second time the last to arrive, is through with the item. The last to leave puts
    // the counters back to zero.
    __device__ __forceinline__ void leave(unsigned* counter, unsigned* slices, unsigned before, int parts) {
        if (before >> 16 == (unsigned)parts) *counter = 0, *slices = 0;
    }

    // A part is written. Low half of the counter: parts that arrived; high half: those through with it, plus one for
    // the merge. The last to arrive merges. Where parts are many, idle blocks wait for a bounded time until all have
    // arrived and then take every `parts`-th slice from their number on, if still free; the last to arrive does its own
    // and what is left.
    __device__ __forceinline__ void end_part(const Cursor& c, bool idle) {
        const int from = block_of(c.begin), parts = block_of(c.begin + c.count - 1) - from + 1;
        unsigned* counter = p.arrived + c.b * p.kv_heads + c.h;
        unsigned* taken = counter + p.batch * p.kv_heads;
        const int slices = p.group * D / 64, mine = block - from;
        const bool shared_out = idle && parts >= HELP_PARTS && parts <= HELP_MOST;
        const bool helper = shared_out && mine < slices;
        unsigned own = 0;
        if (helper)
            for (int i = mine; i < slices; i += parts) own |= 1u << i;
        sync_block();
        if (tid == 0) {
            fence_device();
            const unsigned arrivals = add(counter, helper ? 1 : 0x10001) & 0xFFFF;
            unsigned work = arrivals == (unsigned)parts - 1 ? 2 : 0;  // 0 nothing, 1 a slice, 2 all that is left
            if (work == 0 && helper) {
                for (int i = 0; i < HELP_POLLS && work == 0; ++i) {
                    work = (load_fresh(counter) & 0xFFFF) == (unsigned)parts;
                    if (!work) let_others_run();
                }
            }
            fence_device();
            if (work && helper) own &= ~add_bit(taken, own);
            sts32(shared + FLAG, work);
            sts32(shared + FLAG + 8, own);
        }
        sync_block();
        const unsigned work = lds32(shared + FLAG);
        if (work && helper) merge_slices(c, from, parts, lds32(shared + FLAG + 8));
        if (work >= 2) {
            unsigned left = ~0u;
            if (shared_out) {
                if (tid == 0) sts32(shared + FLAG + 4, ~add_bit(taken, ~0u) & (~0u >> (32 - slices)));
                sync_block();
                left = lds32(shared + FLAG + 4);
            }
            if (shared_out && bits_set(left) <= 2) {
                merge_slices(c, from, parts, left);
            } else {
                merge_all(c, from, parts);
            }
            if (tid == 0) leave(counter, taken, add(counter, 0x10000) + 0x10000, parts + 1);
        }
        if (helper && tid == 0) leave(counter, taken, add(counter, 0x10000) + 0x10000, parts + 1);
    }
