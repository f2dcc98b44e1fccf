// Members of Decode: how the line of units is cut, and the producer warps, which load it.
#ifndef KV_DECODE_SCHEDULER_CUH
#define KV_DECODE_SCHEDULER_CUH

#include "decode.cuh"

// A producer, first thing: prefix[b] = units of one head in the sequences before b; beside it the lengths. Its
// barriers are made while the first loads are in flight. All producers add up, one writes.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE Lengths Decode<KIND, D, WARPS, TILES, STAGES>::scan() {
    const bool writes = warp == WARPS;
    constexpr int DEEP = 4;  // loads of one lane in flight
    const int each = (p.batch + 31) / 32, from = lane * each, to = min(from + each, p.batch);
    int low = 0x7FFFFFFF, high = 0, mine = 0;
    for (int j = 0; j < each; j += DEEP) {
        int length[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; ++i) length[i] = from + j + i < to ? ldg_nc_int(p.lengths + from + j + i) : 0;
        if (j == 0) init_barriers();
#pragma unroll
        for (int i = 0; i < DEEP; ++i)
            if (from + j + i < to) {
                const int n = (length[i] + UNIT - 1) / UNIT;
                low = min(low, n), high = max(high, n), mine += n;
                if (writes) sts32(lengths + 4 * (from + j + i), length[i]);
            }
    }
    Lengths all;
    all.before = mine;
    for (int by = 1; by < 32; by *= 2) {
        const int below = __shfl_up_sync(~0u, all.before, by);
        if (lane >= by) all.before += below;
    }
    all.units = __shfl_sync(~0u, all.before, 31);
    all.before -= mine, all.each = each;
    all.first = __shfl_sync(~0u, low, 0);
    all.alike = !warp_any(from < to && (low != all.first || high != all.first));
    if (writes) {
        for (int b = from, at = all.before; b < to; ++b) {
            sts32(prefix + 4 * b, at);
            at += ((int)lds32(lengths + 4 * b) + UNIT - 1) / UNIT;
        }
        if (lane == 0) sts32(prefix + 4 * p.batch, all.units);
    }
    named_barrier_sync_unaligned(PRODUCERS_READY, 32 * PRODUCERS);
    return all;
}

// One span of the whole line, or, where that ends no later, a span for each item with teams of its own: a second
// item in a range costs about as much as `second` units.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE Partition Decode<KIND, D, WARPS, TILES, STAGES>::partition(const Lengths& all) const {
    const int total = p.rows * all.units, even = total / p.teams;
    Partition c;
    c.span = total, c.spans = 1, c.teams = p.teams, c.share = even;
    if (even < WARPS) {
        c.teams = min(p.teams, (total + WARPS - 1) / WARPS);
        c.share = total / max(c.teams, 1);
    }
    if (all.alike && p.per_item) {
        const int own = all.first / p.per_item;
        const bool sooner = own + (own * p.per_item < all.first) <= even + (even * p.teams < total) + p.second;
        if (own >= WARPS && sooner) c.span = all.first, c.spans = p.batch * p.rows, c.teams = p.per_item, c.share = own;
    }
    c.longer = c.span - c.share * c.teams;
    return c;
}

// A team's range.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::range(const Partition& c, int team, int& first, int& last) {
    const int s = c.spans == 1 ? team >= c.teams : team / c.teams, i = team - s * c.teams;
    first = s * c.span + i * c.share + min(i, c.longer);
    last = s < c.spans ? first + c.share + (i < c.longer) : first;
}

// The team in whose range a unit lies.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE int Decode<KIND, D, WARPS, TILES, STAGES>::team_of(const Partition& c, int unit) {
    const int s = unit / c.span, in = unit - s * c.span, at = in - c.longer * (c.share + 1);  // past longer ranges
    return s * c.teams + (at < 0 ? in / (c.share + 1) : c.longer + at / c.share);
}

// Starts the loads of the page ids of this producer's next BATCH units of the range; how many there are.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE int Decode<KIND, D, WARPS, TILES, STAGES>::fetch(Producer& f) {
    const int mine = f.at + lane / TILES * PRODUCERS;
    const int n = min(BATCH, max(f.until - f.at + PRODUCERS - 1, 0) / PRODUCERS);
    f.state = 0;
    if (mine < f.until) {
        while (mine >= f.c.begin + f.c.count) next_item(f.c);
        f.c.unit = mine;
        const int tile = (mine - f.c.begin) * TILES + lane % TILES;
        f.state = 1;
        if (tile * TOKENS < f.c.length) {
            f.state = 2;
            f.page = ldg_nc_int(p.table + (long long)f.c.b * p.max_pages + (tile >> page_tiles));
        }
    }
    f.at += n * PRODUCERS;
    return n;
}

// This lane's tile number from the load that fetch() started.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE u32 Decode<KIND, D, WARPS, TILES, STAGES>::fetched(const Producer& f) const {
    if (f.state < 2) return NO_TILE;
    const int tile = (f.c.unit - f.c.begin) * TILES + lane % TILES;
    return ((u32)(f.page * p.kv_heads + f.c.h) << page_tiles) + (tile & ((1 << page_tiles) - 1));
}

// A tile to place `slot` of the tiles of all stages.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::load_tile(u32 tile, bool is_v, int slot, u32 barrier) {
    mbarrier_arrive_expect_tx(barrier, tile == NO_TILE ? 0 : TILE + SCALES);
    if (tile == NO_TILE) return;
    tma_load_rows(shared + TILES_AT + slot * TILE, is_v ? p.v_map : p.k_map, tile * TOKENS, barrier);
    if constexpr (KIND == Q8_0)
        tma_load_1d(shared + SCALES_AT + slot * SCALES, (is_v ? p.v_scale : p.k_scale) + (u64)tile * SCALES, SCALES,
                    barrier);
}

// No lane acts before all have seen the phase: what follows may end the next one, and a late lane would miss both.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::wait_together(u32 barrier, u32 phase) {
    mbarrier_wait(barrier, phase);
    __syncwarp();
}

// Until this producer's load number `i` has landed; the one after it in its stage must not have been issued.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::wait_for_copy(int i) const {
    const int at = i / 2 / SERVED * 2 + i % 2;  // of those of its warp
    const int whose = warp - WARPS + i / 2 % SERVED * PRODUCERS;
    wait_together(full + 8 * (whose * STAGES + at % STAGES), at / STAGES & 1);
}

// The queries of the range's item number `item`, a row a lane.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::load_queries(const Cursor& c, int item) {
    const int which = item & 1;
    wait_together(query_empty + 8 * which, ((item >> 1) & 1) ^ 1);
    if (lane < p.group) {
        mbarrier_arrive_expect_tx(query_full + 8 * which, 2 * D);
        tma_load_1d(shared + QUERY + which * QUERY_BYTES + lane * QUERY_ROW,
                    p.q + (u64)((c.b * p.kv_heads + c.h) * p.group + lane) * D * 2, 2 * D, query_full + 8 * which);
    }
}

// A producer loads every PRODUCERS-th unit. The first loads are issued behind two dependent ones, lengths and page
// ids; nobody else is waited for. The last producer loads the queries too.
template <int KIND, int D, int WARPS, int TILES, int STAGES>
DEVICE void Decode<KIND, D, WARPS, TILES, STAGES>::produce() {
    const int own_warp = warp - WARPS;
    const bool loads_queries = own_warp == PRODUCERS - 1;
    if (lane == 0) prefetch_tensor_map(own_warp & 1 ? p.v_map : p.k_map);
    const Lengths all = scan();
    const Partition c = partition(all);
    const int team = block / p.width, own = block - team * p.width;
    int first, last;
    range(c, team, first, last);
    if (team >= p.teams) last = first;  // a block left over
    Producer f;
    Cursor asked;  // the item whose queries were loaded last; how many before it
    int items = 0, n = 0;
    f.page = 0, f.at = first + own_warp, f.until = last;
    if (first < last) {
        const int low = (__popc(warp_ballot(p.rows * all.before <= first)) - 1) * all.each;
        f.c = asked = locate(own, first, low, min(low + all.each, p.batch) - 1);
        n = fetch(f);
    }
    if (own_warp == 0 && lane == 0) {
        sts128(shared + PARTITION_AT, make_uint4(c.span, c.spans, c.teams, c.share));
        sts128(shared + PARTITION_AT + 16, make_uint4(c.longer, first, last, own));
    }
    named_barrier_arrive_unaligned(STARTED, THREADS);
    if (first == last) return;
    bool waited = !PDL;
    const auto wait_once = [&]() {
        if (!waited) wait_on_dependent_grids(), __syncwarp();
        waited = true;
    };
    if (loads_queries) wait_once(), load_queries(asked, 0);
    int to = own_warp, stage = 0, phase = 0;                        // whose unit is next; its stage for K
    int late = last - first < p.capped_below ? -CAP : -0x7FFFFFFF;  // the load that must land before the next
    for (int unit = first + own_warp; n;) {
        const u32 tile = fetched(f);
        const bool newest = f.state > 0 && f.c.unit == f.c.begin + f.c.count - 1;  // holds the last token of its item
        const int count = n;
        for (int j = 0; j < count; ++j, unit += PRODUCERS) {
            if (PDL && !waited && warp_any(newest && lane / TILES == j)) wait_once();
            if (loads_queries)
                while (unit >= asked.begin + asked.count) next_item(asked), load_queries(asked, ++items);
            int at = to * STAGES + stage, turn = phase;
#pragma unroll
            for (int is_v = 0; is_v < 2; ++is_v) {
                if (++late > 0) wait_for_copy(late - 1);
                wait_together(empty + 8 * at, turn ^ 1);
                if (lane / TILES == j) load_tile(tile, is_v, at * TILES + lane % TILES, full + 8 * at);
                if (++at == (to + 1) * STAGES) at -= STAGES, turn ^= 1;
            }
            if (to + PRODUCERS < WARPS) to += PRODUCERS;
            else stage = at - to * STAGES, phase = turn, to = own_warp;
            if (j == 0) n = fetch(f);  // the next ids, behind the first copies
        }
    }
    if (loads_queries)  // items too short for a unit of this producer's
        while (asked.begin + asked.count < last) next_item(asked), load_queries(asked, ++items);
}

#endif
