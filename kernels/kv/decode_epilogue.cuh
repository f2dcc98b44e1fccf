// Members of Decode: merging the states of a block's warps, and the parts of an item that several blocks hold.
#ifndef KV_DECODE_EPILOGUE_CUH
#define KV_DECODE_EPILOGUE_CUH

#include "decode.cuh"

template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::store(int item, int q, int d, float4 x) {
    uint2 y = p.q_is_bf16 ? make_uint2(pack_bf162(x.x, x.y), pack_bf162(x.z, x.w))
                          : make_uint2(pack_half2(x.x, x.y), pack_half2(x.z, x.w));
    *(uint2*)(p.o + ((u64)(item * p.group + q) * D + d) * 2) = y;
}

// Merges the warps' states; writes the item's output, or the part of it in the range [first, last). Whether it was
// the whole item.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE bool Decode<KIND, D, WARPS, TILES, STAGES>::end_item(const Cursor& c, int first, int last) {
    const bool whole = c.begin >= first && c.begin + c.count <= last;
    const bool idle = c.begin + c.count >= last;  // nothing is behind this item: the merge may use the stages
    const int slot = 2 * block + (c.begin >= first ? 1 : 0);  // a part that begins its item is its range's last
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum[i] += shuffle_xor(sum[i], 4);
        sum[i] += shuffle_xor(sum[i], 8);
        sum[i] += shuffle_xor(sum[i], 16);
        float most = 0.0f;
        if (!whole) {
#pragma unroll
            for (int j = 0; j < M_TILES; ++j) most = fmaxf(most, fmaxf(fabsf(acc[j][i]), fabsf(acc[j][i + 2])));
            most = fmaxf(most, shuffle_xor(most, 4));
            most = fmaxf(most, shuffle_xor(most, 8));
            most = fmaxf(most, shuffle_xor(most, 16));
        }
        const uint4 stats = make_uint4(__float_as_uint(top[i]), __float_as_uint(sum[i]), __float_as_uint(most), 0);
        if (g == 0) sts128(shared + STATS + (warp * QUERIES + 2 * t + i) * 16, stats);
    }
    sync_consumers();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float highest = __uint_as_float(0xFF800000u), all = 0.0f, bound = 0.0f;
        uint4 stats[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            stats[w] = lds128(shared + STATS + (w * QUERIES + 2 * t + i) * 16);
            highest = fmaxf(highest, __uint_as_float(stats[w].x));
        }
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float x = exp2_fast(__uint_as_float(stats[w].x) - highest);
            all += __uint_as_float(stats[w].y) * x, bound += __uint_as_float(stats[w].z) * x;
        }
        weight[i] = exp2_fast(top[i] - highest);
        if (whole) weight[i] *= v_scale / all;
        else {  // in half, a power of two brings the row's bound into [2^13, 2^14)
            const u32 exponent = max((int)(__float_as_uint(bound) >> 23), 14);
            weight[i] *= __uint_as_float((267 - exponent) << 23);
            if (warp == 0 && g == 0 && 2 * t + i < p.group)
                *(float4*)(p.part_ml + (slot * QUERIES + 2 * t + i) * 4) =
                    make_float4(highest, all, __uint_as_float((exponent - 13) << 23), 0.0f);
        }
    }
    constexpr int CHUNKS = 8 * QUADS, PER_LANE = V_LANE / (4 * QUADS);  // float4 per row; rounds per V load
    constexpr int ROUNDS = D / (4 * CHUNKS);
    static_assert(ROUNDS * MERGE_BYTES <= MERGE, "the stages hold all rounds");
    const auto scatter = [&](int round, u32 merge) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < QUADS; ++j) {
                if (2 * t + i >= p.group) continue;
                const int tile = 2 * (round * QUADS + j);
                const float w = weight[i];
                uint4 x = make_uint4(__float_as_uint(acc[tile][i] * w), __float_as_uint(acc[tile][i + 2] * w),
                                     __float_as_uint(acc[tile + 1][i] * w), __float_as_uint(acc[tile + 1][i + 2] * w));
                int chunk = (g * QUADS + j) ^ ((t & 1) | (t & 2) << 1);
                sts128(merge + ((warp * QUERIES + 2 * t + i) * CHUNKS + chunk) * 16, x);
            }
    };
    const auto gather = [&](int round, u32 merge, int i) {  // element i of the round's group x CHUNKS
        const int q = i / CHUNKS, chunk = i % CHUNKS, from = q >> 1;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            uint4 y = lds128(merge + ((w * QUERIES + q) * CHUNKS + (chunk ^ ((from & 1) | (from & 2) << 1))) * 16);
            x.x += __uint_as_float(y.x), x.y += __uint_as_float(y.y), x.z += __uint_as_float(y.z),
                x.w += __uint_as_float(y.w);
        }
        const int d =
            round / PER_LANE * 8 * V_LANE + chunk / QUADS * V_LANE + round % PER_LANE * 4 * QUADS + chunk % QUADS * 4;
        if (whole) store(c.b * p.kv_heads + c.h, q, d, x);
        else
            *(uint2*)(p.part + (((u64)slot * p.group + q) * D + d) * 2) =
                make_uint2(pack_half2(x.x, x.y), pack_half2(x.z, x.w));
    };
    if (idle) {  // all rounds at once
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) scatter(round, shared + TILES_AT + round * MERGE_BYTES);
        sync_consumers();
        for (int i = tid; i < ROUNDS * p.group * CHUNKS; i += CONSUMERS) {
            const int round = i / (p.group * CHUNKS);
            gather(round, shared + TILES_AT + round * MERGE_BYTES, i - round * p.group * CHUNKS);
        }
    } else {
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (round) sync_consumers();
            scatter(round, shared + MERGE);
            sync_consumers();
            for (int i = tid; i < p.group * CHUNKS; i += CONSUMERS) gather(round, shared + MERGE, i);
        }
    }
    return whole;
}

// One thread, behind a barrier: this block's part of the item is written.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE Ticket Decode<KIND, D, WARPS, TILES, STAGES>::arrive(const Cursor& c) const {
    const uint4 a = lds128(shared + PARTITION_AT);
    const Partition partition = {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)lds32(shared + PARTITION_AT + 16)};
    Ticket x;
    x.before = atomic_add_acq_rel(p.arrived + c.b * p.kv_heads + c.h, 1);
    x.from = team_of(partition, c.begin), x.parts = team_of(partition, c.begin + c.count - 1) - x.from + 1;
    x.b = c.b, x.h = c.h;
    return x;
}

// One thread: tells the block whether it merges the item, and leaves the counter at zero.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::publish(const Ticket& x, u32 to) const {
    const bool merges = x.parts && x.before == (u32)x.parts - 1;
    if (merges) p.arrived[x.b * p.kv_heads + x.h] = 0;
    sts128(to, make_uint4(merges ? x.parts : 0, x.from, x.b, x.h));
}

// The range is done. Of its first item and its last, where other blocks hold parts too, the last to arrive merges.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::finish(const Cursor& c, bool whole, bool begun, const Ticket& early,
                                                          int own) {
    if (whole && !begun) return;
    fence_proxy_async_shared();  // the parts go where the warps' states were
    sync_consumers();
    if (tid == 0) {
        Ticket late = {0, 0, 0, 0, 0};
        if (!whole) late = arrive(c);
        publish(early, shared + FLAG);
        publish(late, shared + FLAG + 16);
    }
    sync_consumers();
    int rounds = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const uint4 x = lds128(shared + FLAG + 16 * i);
        if (x.x) merge_all(x.x, x.y, own, x.z * p.kv_heads + x.w, x.w, rounds);
    }
}

template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE int Decode<KIND, D, WARPS, TILES, STAGES>::slot_of(int from, int i, int own) const {
    return 2 * ((from + i) * p.width + own) + (i == 0);
}

// The parts come to the idle stages, all at once where they fit (48 of 8 rows of D = 256). The loops are short on
// purpose: this code runs once, and its instructions are fetched as it goes. `rounds`: of the stages so far.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::merge_all(int parts, int from, int own, int item, int h,
                                                             int& rounds) {
    constexpr int COLUMNS = QUERIES * (D / 4) / CONSUMERS;  // of four values, of a thread
    const u32 weights = shared + MERGE;                     // [group][parts]
    const int bytes = p.group * D * 2, room = MERGE / bytes;
    float4 x[COLUMNS];
    u32 column[COLUMNS], row[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {  // queries that are not there read the last one: no branch in the loop
        const int at = min(tid + i * CONSUMERS, p.group * (D / 4) - 1);
        column[i] = shared + TILES_AT + 8 * at, row[i] = weights + at / (D / 4) * parts * 4;
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll 1
    for (int done = 0; done < parts; done += room, ++rounds) {
        const int n = min(room, parts - done);
        if (done) sync_consumers();
        if (tid == 0) mbarrier_arrive_expect_tx(parts_full, n * bytes);
        if (lane * WARPS + warp < n) {   // a warp's copies leave one by one
            fence_proxy_async_global();  // other blocks wrote them by plain stores
#pragma unroll 1
            for (int i = lane * WARPS + warp; i < n; i += CONSUMERS)
                tma_load_1d(shared + TILES_AT + i * bytes, p.part + (u64)slot_of(from, done + i, own) * bytes, bytes,
                            parts_full);
        }
        if (done == 0) {
            if (warp < p.group) weigh(from, parts, own, weights + 4 * warp * parts);
            sync_consumers();
        }
        mbarrier_wait(parts_full, rounds & 1);
#pragma unroll 4
        for (int k = 0; k < n; ++k)
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                const uint2 y = lds64(column[i] + k * bytes);
                const float w = __uint_as_float(lds32(row[i] + 4 * (done + k)));
                x[i].x = fmaf(w, half_to_float(y.x), x[i].x), x[i].y = fmaf(w, half_to_float(y.x >> 16), x[i].y);
                x[i].z = fmaf(w, half_to_float(y.y), x[i].z), x[i].w = fmaf(w, half_to_float(y.y >> 16), x[i].w);
            }
    }
    float scale = 1.0f;
    if constexpr (KIND == FP8) scale = __uint_as_float(lds32(shared + HEAD_SCALES + 4 * (p.kv_heads + h)));
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const int at = tid + i * CONSUMERS, q = at / (D / 4);
        if (q >= p.group) continue;
        const float norm = scale / __uint_as_float(lds32(shared + TOTALS + 4 * q));
        store(item, q, 4 * at % D, make_float4(x[i].x * norm, x[i].y * norm, x[i].z * norm, x[i].w * norm));
    }
    sync_consumers();
}

// One warp: the weight of each part of its query to shared memory at `weights`, the weighted sum to TOTALS.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::weigh(int from, int parts, int own, u32 weights) {
    constexpr int FAR = MAX_PARTS / 32;
    const float none = __uint_as_float(0xFF800000u);
    float4 x[FAR];
    float highest = none, all = 0.0f;
#pragma unroll
    for (int i = 0; i < FAR; ++i) {
        x[i] = make_float4(none, 0.0f, 0.0f, 0.0f);
        const int at = lane + 32 * i;
        if (at < parts) x[i] = ldg_cg_float4(p.part_ml + (slot_of(from, at, own) * QUERIES + warp) * 4);
    }
#pragma unroll
    for (int i = 0; i < FAR; ++i) highest = fmaxf(highest, x[i].x);
    for (int by = 1; by < 32; by *= 2) highest = fmaxf(highest, shuffle_xor(highest, by));
#pragma unroll
    for (int i = 0; i < FAR; ++i) {
        const float w = exp2_fast(x[i].x - highest);
        all += x[i].y * w;
        if (lane + 32 * i < parts) sts32(weights + (lane + 32 * i) * 4, __float_as_uint(w * x[i].z));
    }
    for (int by = 1; by < 32; by *= 2) all += shuffle_xor(all, by);
    if (lane == 0) sts32(shared + TOTALS + 4 * warp, __float_as_uint(all));
}

#endif
