// The experts of a mixture for few tokens, both products in one persistent launch: y = sum_e p_e Wd_e h_e with h_e =
// SiLU(Wg_e x) * (Wu_e x), at the speed of reading the weights of the experts that are chosen, once.
//
//   TEAMS of 8 math warps  mma.sync with weights as A, decoded in registers from nvfp4's row tiles, and eight tokens as B;
//                          they take items in turn, so one decodes while the other waits for its stage, its sums or its x
//   weights producer       a stage of bulk copies an item, gate and up and then down, without a pause between the two
//   h producer             waits until a block's h is whole, and copies its rows in beside the weights of down
//   4 reducer warps        add the math warps' partial sums in a fixed order: an item of the first product each, in turn,
//                          and SiLU; of the second, four rows of each row tile, an element of a tile's 16 x 8 a lane, so
//                          that y's sums are added in one order by one thread
//
// First product. Rows of gate and up alternate in eights, so a thread of a reducer holds both. An item is 16 such rows of
// one block (at most eight tokens of one expert: a second eight that few experts have would cost them all) over all of K,
// which the warps of a team share, with x in registers. All items stand in one line; it is cut into rounds, and a round
// into equal runs, one a worker (CTA). A run rarely leaves an expert, so x is seldom loaded anew, and blocks end in their
// order, so the second product need not wait for all.
//
// Second product. A worker has ROW_TILES tiles of 16 rows of y and every PARTS-th block, so it adds up its rows' y in
// shared memory, block after block in their order. An item is four slots of a row tile and a block, a pair of warps each,
// which share K. ROW_TILES > 1 reads h fewer times; with PARTS > 1 workers of the same rows then exchange their sums
// through global memory and each adds up its share of them, part after part. No floating-point atomics: the same bits on
// every run. A worker waits only for h, which no worker leaves for later than its own share, and for parts: the grid is
// no larger than what runs at once.
//
// Weights are row_tiles.py's, of which experts_many.cu takes boxes: k is in wgmma's own order. h is dealt to a warp's quads
// in it when it is written. So is x by router_once.cu; where a CTA routes for itself ldmatrix deals as it reads.
//
// ROUTED, for at most MOST_TOKENS: no router runs ahead. Every CTA picks and sorts for itself, in shared memory that
// copies of weights have not filled yet; it reads a kilobyte of logits a token. x is copied to shared memory meanwhile.
// Counters lie in two banks: a launch counts in one and zeroes the other for the launch behind it.
//
// Macros: KERNEL (name), X_BF16 0/1 (type of x, h and y), WIDTH, INNER (of the model and of an expert; whole tiles of 64),
// TEAMS 1/2, ROW_TILES 1/2/4, PARTS, STAGES (of weights), H_STAGES, ROUND_ITEMS (of a run, about), H_ROWS (8 where it is
// not given; rows that a block has at most, in stages of h), ROUTED 0/1 (0), with it EXPERTS, MOST_TOKENS (up to 32) and
// X_ROWS (the tokens that a call has at most, whose x there is room for), else PREFETCH (0; with EXPERTS: items that each
// CTA prefetches into L2 while the router runs).
#ifndef PREFETCH
#define PREFETCH 0
#endif
#ifndef ROUTED
#define ROUTED 0
#endif
#ifndef H_ROWS
#define H_ROWS 8
#endif
#if !ROUTED
#define X_ROWS 0
#endif
#if ROUTED
#include "pick.cuh"
#endif
#include "nvfp4/gemm_operand.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/scheduler.cuh"

constexpr int TEAM = 8, WARPS = TEAM * TEAMS, PRODUCER = WARPS, H_PRODUCER = WARPS + 1, REDUCERS = 4;
constexpr int THREADS = 32 * (WARPS + 2 + REDUCERS), SUM_STAGES = 4;
constexpr int EVERYONE = 1, REDUCERS_MEET = 2, SLOTS = 4, BLOCKS_AT_ONCE = SLOTS / ROW_TILES, BLOCK_TOKENS = 8;
constexpr int UP_K = WIDTH / 64, DOWN_K = INNER / 64;  // tiles along K
constexpr int UP_ROWS = INNER / 8, DOWN_ROWS = WIDTH / 16, GROUPS = (DOWN_ROWS + ROW_TILES - 1) / ROW_TILES;
static_assert(INNER % 64 == 0 && WIDTH % 64 == 0 && SLOTS % ROW_TILES == 0, "whole tiles, whole slots");

constexpr unsigned UP_BYTES = UP_K * TILE_BYTES, SLOT_BYTES = DOWN_K * TILE_BYTES;
constexpr unsigned STAGE_BYTES = ((UP_BYTES > SLOTS * SLOT_BYTES ? UP_BYTES : SLOTS * SLOT_BYTES) + 127) / 128 * 128;
// Rows of h 16 bytes apart modulo 128, so that eight lanes that read two rows meet no bank twice.
constexpr unsigned H_BYTES = 2 * INNER, H_ROW = H_BYTES + 16, H_BLOCK = H_ROWS * H_ROW;
constexpr unsigned H_STAGE_BYTES = (BLOCKS_AT_ONCE * H_BLOCK + 127) / 128 * 128;

constexpr unsigned SUM_STAGE_BYTES = TEAM * 512;
constexpr unsigned FULL = 0, EMPTY = FULL + 8 * STAGES, H_FULL = EMPTY + 8 * STAGES, H_EMPTY = H_FULL + 8 * H_STAGES;
constexpr unsigned SUMMED = H_EMPTY + 8 * H_STAGES, FREE_UP = SUMMED + 8 * SUM_STAGES, FREE = FREE_UP + 8 * SUM_STAGES;
constexpr unsigned RING = 1024, SUMS = RING + STAGES * STAGE_BYTES, H_RING = SUMS + SUM_STAGES * SUM_STAGE_BYTES;
// Rows of x apart as those of h are, for ldmatrix reads 16 bytes of eight tokens at once.
constexpr unsigned X_BYTES = 2 * WIDTH, X_ROW = X_BYTES + 16, X = H_RING + H_STAGES * H_STAGE_BYTES;
constexpr unsigned LISTS = X + X_ROWS * X_ROW;  // y's sums, rows, blocks
constexpr unsigned COUNTERS = RING - 8, X_FULL = COUNTERS - 8;
static_assert(FREE + 8 * SUM_STAGES <= X_FULL, "too many barriers");
static_assert(STAGES % TEAMS == 0 && H_STAGES % TEAMS == 0, "who skips a round of a barrier mistakes its parity");
static_assert(SUM_STAGES % TEAMS == 0 && SUM_STAGES % REDUCERS == 0, "a place of sums has one team and one reducer");

using Weights = Pipeline<STAGES, FULL, EMPTY>;
using Hidden = Pipeline<H_STAGES, H_FULL, H_EMPTY>;
constexpr int UP_TILES = (UP_K + TEAM - 1) / TEAM, DOWN_TILES = (DOWN_K + 1) / 2;

// A worker's walk over the line of the first product. Odd rounds go backwards over the workers, so that it is not always
// the same ones that have one item more.
struct UpLine {
    int items, rounds, worker, workers, round = 0, at = 0, end = 0;
    DEVICE UpLine(int blocks, int worker_, int workers_)
        : items(blocks * UP_ROWS),
          rounds(max(1, items / (workers_ * ROUND_ITEMS))),
          worker(worker_),
          workers(workers_) {
        locate();
    }
    DEVICE void locate() {
        for (; round < rounds; round++) {
            int first = 0, behind = items;
            if (!ROUTED || rounds > 1) {  // one round is not divided by one
                first = static_cast<int>(static_cast<long long>(items) * round / rounds);
                behind = static_cast<int>(static_cast<long long>(items) * (round + 1) / rounds);
            }
            const StreamKPartition parts = stream_k_partition(behind - first, workers);
            const int turn = round % 2 ? workers - 1 - worker : worker;
            at = first + parts.begin(turn), end = first + parts.begin(turn + 1);
            if (at < end) return;
        }
    }
    DEVICE bool valid() const { return round < rounds; }
    DEVICE void next() {
        if (++at == end) round++, locate();
    }
};

// Of router_once.cu: expert | rows << 16, first row.
struct Block {
    int expert, count, start;
    DEVICE explicit Block(const uint2* at) {
        const uint2 x = lds64(shared_address(at));
        expert = x.x & 0xFFFF, count = x.x >> 16, start = x.y;
    }
};

// c += a tile of weights times 64 k of eight tokens, which start at the fragments o.
DEVICE u32 multiply(float (&c)[4], const unsigned char* tile, const u32 (&o)[8], int lane) {
    const uint4 codes = *reinterpret_cast<const uint4*>(tile + 16 * lane);
    const uint2 scales = *reinterpret_cast<const uint2*>(tile + TILE_CODE_BYTES + 8 * (lane / 4));
    u32 a[4][4];
    decode_fragments<X_BF16>(Packed{codes, scales}, a);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        mma_16816<X_BF16>(c, a[j][0], a[j][1], a[j][2], a[j][3], o[2 * j], o[2 * j + 1]);
    }
    return a[3][3];
}

DEVICE void put(u32 (&o)[8], const uint4& low, const uint4& high) {
    o[0] = low.x, o[1] = low.y, o[2] = low.z, o[3] = low.w;
    o[4] = high.x, o[5] = high.y, o[6] = high.z, o[7] = high.w;
}

// A worker's share of the second product: its group of row tiles of y, and `mine` blocks, every PARTS-th from `part`.
struct Own {
    int group, part, mine;
    DEVICE int row_tiles() const { return min(ROW_TILES, DOWN_ROWS - group * ROW_TILES); }
    DEVICE int turns() const { return turns_of(0); }
    // That have a block i.
    DEVICE int turns_of(int i) const { return (mine - i + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE; }
    // Block i of a turn; whether it is there.
    DEVICE bool there(int turn, int i) const { return turn * BLOCKS_AT_ONCE + i < mine; }
    DEVICE int block_of(int turn, int i) const { return part + PARTS * (turn * BLOCKS_AT_ONCE + i); }
};

// By one thread: the stages of both products, in order.
template <class Weights>
DEVICE void load_weights(const Weights& weights, const Own& own, const unsigned char* up, const unsigned char* down,
                         const uint2* block_list, int n_blocks, u32 ring) {
    const u64 policy = evict_first_policy();
    typename Weights::State to;
    for (UpLine line(n_blocks, blockIdx.x, gridDim.x); line.valid(); line.next()) {
        const size_t item = static_cast<size_t>(Block(block_list + line.at / UP_ROWS).expert) * UP_ROWS;
        weights.producer_acquire(to);
        weights.producer_expect(to, UP_BYTES);
        tma_load_1d(ring + to.stage * STAGE_BYTES, up + (item + line.at % UP_ROWS) * UP_BYTES, UP_BYTES,
                    weights.full(to.stage), policy);
        to.advance();
    }
    for (int turn = 0; turn < own.turns(); turn++) {
        const int here = min(BLOCKS_AT_ONCE, own.mine - turn * BLOCKS_AT_ONCE);
        const u32 bytes = own.row_tiles() * SLOT_BYTES;
        weights.producer_acquire(to);
        weights.producer_expect(to, here * bytes);
        for (int i = 0; i < here; i++) {
            const size_t expert = Block(block_list + own.block_of(turn, i)).expert;
            const unsigned char* from = down + (expert * DOWN_ROWS + own.group * ROW_TILES) * SLOT_BYTES;
            tma_load_1d(ring + to.stage * STAGE_BYTES + i * ROW_TILES * SLOT_BYTES, from, bytes, weights.full(to.stage),
                        policy);
        }
        to.advance();
    }
}

// By a warp: the rows of h of the second product's blocks, each when it is whole.
template <class Hidden>
DEVICE void load_hidden(const Hidden& hidden, const Own& own, const u16* h, const uint2* block_list,
                        const u32* block_items, u32 ring, int lane) {
    typename Hidden::State to;
    int whole = 0;  // so many of the worker's blocks are known to be: a look at 32 costs what one costs
    for (int turn = 0; turn < own.turns(); turn++) {
        const int here = min(BLOCKS_AT_ONCE, own.mine - turn * BLOCKS_AT_ONCE);
        int count = 0;
        for (int i = 0; i < here; i++) count += Block(block_list + own.block_of(turn, i)).count;
        while (whole < turn * BLOCKS_AT_ONCE + here) {
            const int index = own.part + PARTS * (whole + lane);
            const bool done = whole + lane < own.mine && ld_acquire(block_items + index) >= UP_ROWS;
            const u32 others = ~warp_ballot(done);
            whole += others ? __ffs(others) - 1 : 32;
        }
        if (lane == 0) hidden.producer_acquire(to);
        if (lane == 0) hidden.producer_expect(to, count * H_BYTES);
        __syncwarp();
        fence_proxy_async_global();  // other workers wrote h by plain stores
        for (int i = 0; i < here; i++) {
            const Block block(block_list + own.block_of(turn, i));
            const u32 stage = ring + to.stage * H_STAGE_BYTES + i * H_BLOCK;
            if (lane < block.count) {
                tma_load_1d(stage + lane * H_ROW, h + static_cast<size_t>(block.start + lane) * INNER, H_BYTES,
                            hidden.full(to.stage));
            }
        }
        to.advance();
    }
}

// By every thread: y from the sums of its rows in shared memory, [ROW_TILES, tokens, 16], and those of the other parts.
DEVICE void write_y(const float* of_y, float* parts, u32* group_parts, u16* y, int group, int part, int tokens,
                    int threads) {
    named_barrier_sync_unaligned(EVERYONE, threads);
    const int sums_of_y = ROW_TILES * tokens * 16, row_tiles = min(ROW_TILES, DOWN_ROWS - group * ROW_TILES);
    const int quads = row_tiles * tokens * 4;
    const auto write = [&](int i, const float4& sum) {
        const int at = i / 4, token = at % tokens, row = (group * ROW_TILES + at / tokens) * 16 + i % 4 * 4;
        *reinterpret_cast<uint2*>(y + static_cast<size_t>(token) * WIDTH + row) =
            make_uint2(pack_pair<X_BF16>(sum.x, sum.y), pack_pair<X_BF16>(sum.z, sum.w));
    };
    const float4* own = reinterpret_cast<const float4*>(of_y);
    if constexpr (PARTS == 1) {
        for (int i = threadIdx.x; i < quads; i += threads) write(i, own[i]);
    } else {
        float4* of_group = reinterpret_cast<float4*>(parts) + static_cast<size_t>(group) * PARTS * (sums_of_y / 4);
        for (int i = threadIdx.x; i < quads; i += threads) of_group[part * (sums_of_y / 4) + i] = own[i];
        named_barrier_sync_unaligned(EVERYONE, threads);
        if (threadIdx.x == 0) {
            atomic_add_acq_rel(group_parts + group, 1);
            while (ld_acquire(group_parts + group) < PARTS) continue;
        }
        named_barrier_sync_unaligned(EVERYONE, threads);
        for (int i = quads * part / PARTS + threadIdx.x; i < quads * (part + 1) / PARTS; i += threads) {
            float4 sum = ldg_cg_float4(of_group + i);
            for (int p = 1; p < PARTS; p++) sum = sum + ldg_cg_float4(of_group + p * (sums_of_y / 4) + i);
            write(i, sum);
        }
    }
}

#if PREFETCH
// By one thread, while the router runs and memory has nothing to do: the weights that this CTA's share of the line is
// likely to begin with. Which experts have tokens nobody knows yet: as if all had, and so many rounds as even routing of
// `pairs` gives. Loads are evict_first, so what was asked for stays in L2 until whoever has it comes to it.
DEVICE void prefetch_weights(const unsigned char* up, int pairs) {
    const float hit = EXPERTS * (1.0f - exp2_fast(-1.4426950408889634f * pairs / EXPERTS));
    const int workers = gridDim.x, rounds = max(1, static_cast<int>(hit * UP_ROWS) / (workers * ROUND_ITEMS));
    const int first = EXPERTS * UP_ROWS / rounds * blockIdx.x / workers;
    for (int i = first; i < min(first + PREFETCH, EXPERTS * UP_ROWS); i++) {
        tma_prefetch_1d(up + static_cast<size_t>(i) * UP_BYTES, UP_BYTES);
    }
}
#endif

#if ROUTED
constexpr int MOST_CHOSEN = 32;                          // a lane an expert of a token, and one for the shared one
constexpr bool ONE_BLOCK = MOST_TOKENS <= BLOCK_TOKENS;  // an expert, and a warp a token
static_assert(TEAMS == 2 && WARPS >= 2 * BLOCK_TOKENS && EXPERTS <= THREADS,
              "a warp a token twice, a thread an expert");
static_assert(MOST_TOKENS <= 32, "an expert's tokens are a word");

// By every thread: router_once.cu's lists of this call, in shared memory. Returns the number of blocks. room: [EXPERTS] twice,
// tokens' masks and pairs, sums of warps.
DEVICE int route(const float* logits, const unsigned char* x, const unsigned char* shared_gate, uint2* rows,
                 uint2* block_list, u32* room, int tokens, int top_k, int warp, int lane) {
    u32 *offsets = room, *members = offsets + EXPERTS, *masks = members + EXPERTS,
        *of_warps = masks + MOST_TOKENS * VALUES;
    uint2* pairs = reinterpret_cast<uint2*>(of_warps + 32);
    const int with_shared = shared_gate != nullptr, chosen = top_k + with_shared;
    constexpr int ALL_WARPS = THREADS / 32;
    const auto weigh = [&](int token) {
        const float share = shared_weight(x, shared_gate, token, WIDTH, lane);
        if (lane == 0) pairs[token * MOST_CHOSEN + top_k] = make_uint2(EXPERTS, __float_as_uint(share));
    };
    for (int token = warp; token < tokens; token += ALL_WARPS) {
        const u32 mask = pick(logits, pairs, token, MOST_CHOSEN, top_k, lane);
        if (lane < VALUES) masks[token * VALUES + lane] = mask;
        if (ONE_BLOCK) break;
    }
    if constexpr (ONE_BLOCK) {
        if (with_shared && warp >= MOST_TOKENS && warp < MOST_TOKENS + tokens) weigh(warp - MOST_TOKENS);
    } else {
        // From the first warp on that has chosen for a token less.
        for (int i = warp - tokens % ALL_WARPS; with_shared && i < tokens; i += ALL_WARPS) {
            if (i >= 0) weigh(i);
        }
    }
    __syncthreads();
    // Block b of an expert with so many rows from `first` on.
    const auto list = [&](int at, int expert, int b, int rows_of, int first) {
        const int begin = b * BLOCK_TOKENS;
        block_list[at] = make_uint2(expert | min(BLOCK_TOKENS, rows_of - begin) << 16, first + begin);
    };
    const int e = threadIdx.x;
    u32 mine = 0;
    if (e < EXPERTS) {
        for (int t = 0; t < tokens; t++) mine |= (masks[t * VALUES + e / 32] >> (e & 31) & 1) << t;
        members[e] = mine;
    }
    const int count = __popc(mine), cuts = ONE_BLOCK ? count > 0 : (count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int own = count | cuts << 16;  // two sums in one scan
    int upto = own;
    for (int by = 1; by < 32; by *= 2) {
        const int before = __shfl_up_sync(ALL, upto, by);
        if (lane >= by) upto += before;
    }
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < VALUES; w++) {
        if (w == warp) upto += total;
        total += of_warps[w];
    }
    if (e < EXPERTS) {
        const int first = (upto - own) & 0xFFFF;
        offsets[e] = first;
        if constexpr (ONE_BLOCK) {
            if (count) block_list[(upto - own) >> 16] = make_uint2(e | count << 16, first);
        } else {
            for (int b = 0; b < cuts; b++) list(((upto - own) >> 16) + b, e, b, count, first);
        }
    }
    const int routed = tokens * top_k, cut = total >> 16;
    const int of_shared = with_shared * (ONE_BLOCK ? 1 : (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
    if constexpr (ONE_BLOCK) {
        if (with_shared && threadIdx.x == 0) block_list[cut] = make_uint2(EXPERTS | tokens << 16, routed);
    } else {
        if (threadIdx.x < of_shared) list(cut + threadIdx.x, EXPERTS, threadIdx.x, tokens, routed);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * chosen; i += THREADS) {
        const int t = i / chosen;
        const uint2 pair = pairs[t * MOST_CHOSEN + i % chosen];
        const int at = pair.x < EXPERTS ? offsets[pair.x] + __popc(members[pair.x] & (1u << t) - 1) : routed + t;
        rows[at] = make_uint2(t, pair.y);
    }
    return cut + of_shared;
}

// Which words of state this launch counts in, zeroed by the one before, in two steps, by one warp: a look, whose answer the
// others have once they next meet; and what the next launch needs, for which nobody waits. state: how many CTAs have asked,
// which bank is next, then both banks of `bank` words. A CTA asks behind its own look, so whoever asks last knows that all
// have looked. The answer is kept in shared memory, for no register is to spare.
DEVICE void look_for_counters(const u32* state, int bank, u32* first, int lane) {
    if (lane == 0) *first = 2 + ld_acquire(state + 1) * bank;
}
DEVICE void hand_on_counters(u32* state, int bank, u32 first, int lane) {
    if (lane == 0 && atomic_add_acq_rel(state, 1) == gridDim.x - 1) {
        state[0] = 0;
        state[1] = first == 2;
    }
    const int other = 4 + bank - first;
    for (int i = lane; blockIdx.x == 0 && i < bank; i += 32) state[other + i] = 0;
}
#endif

// x: [tokens, WIDTH], dealt unless ROUTED. up: tiles [experts, UP_ROWS, UP_K], down: [experts, DOWN_ROWS, DOWN_K], with a
// tensor scale an expert. listed, blocks, state: router_once.cu's rows, blocks and state; state + 2 counts a block's items
// and then a group's parts. ROUTED: logits [tokens, EXPERTS], shared_gate bf16 [WIDTH] or null; state: look_for_counters.
// h: [n_rows, INNER], dealt. parts: [GROUPS * PARTS, ROW_TILES, tokens, 16], where PARTS > 1. y: [tokens, WIDTH].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL(const unsigned char* x, const unsigned char* up, const unsigned char* down, const float* up_scale,
           const float* down_scale,
#if ROUTED
           const float* logits, const unsigned char* shared_gate, u32* state, u16* h, float* parts, u16* y, int tokens,
           int n_rows, int most_blocks, int top_k, int bank) {
#else
           const uint2* listed, const uint2* blocks, u32* state, u16* h, float* parts, u16* y, int tokens, int n_rows,
           int most_blocks) {
#endif
    DYNAMIC_SHARED(shared);
    const u32 base = shared_address(shared);
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int worker = blockIdx.x, workers = gridDim.x;
    const u32 zero = static_cast<u32>(tokens) >> 31;  // for once_loaded
    const Weights weights{base};
    const Hidden hidden{base};
    const auto sums = [&](int n) { return base + SUMS + n % SUM_STAGES * SUM_STAGE_BYTES; };  // of item n
    const auto barrier = [&](u32 of, int n) { return base + of + 8 * (n % SUM_STAGES); };
    if (warp == PRODUCER && lane == 0) {
        weights.init(1, TEAM), hidden.init(1, TEAM);
        for (int i = 0; i < SUM_STAGES; i++) {
            mbarrier_init(barrier(SUMMED, i), TEAM);
            mbarrier_init(barrier(FREE_UP, i), 1), mbarrier_init(barrier(FREE, i), REDUCERS);
        }
        if (ROUTED) mbarrier_init(base + X_FULL, 1);
        mbarrier_init_fence();
        fence_proxy_async_shared();
    }
    const int sums_of_y = ROW_TILES * tokens * 16;
    float* of_y = reinterpret_cast<float*>(shared + LISTS);  // [ROW_TILES, tokens, 16]
    uint2* rows = reinterpret_cast<uint2*>(of_y + sums_of_y);
    uint2* block_list = rows + n_rows;
    for (int i = threadIdx.x; i < sums_of_y; i += THREADS) of_y[i] = 0.0f;
#if PREFETCH
    if (warp == PRODUCER && lane == 0) prefetch_weights(up, n_rows);
#endif
    wait_on_dependent_grids();
#if ROUTED
    if (warp == PRODUCER && lane == 0) {
        mbarrier_arrive_expect_tx(base + X_FULL, tokens * X_BYTES);
        for (int i = 0; i < tokens; i++) tma_load_1d(base + X + i * X_ROW, x + i * X_BYTES, X_BYTES, base + X_FULL);
    }
    __syncwarp();
    if (warp == H_PRODUCER) look_for_counters(state, bank, reinterpret_cast<u32*>(shared + COUNTERS), lane);
    const auto block_items = [&] { return state + lds32(base + COUNTERS); };
    const int made = route(logits, x, shared_gate, rows, block_list, reinterpret_cast<u32*>(shared + RING), tokens,
                           top_k, warp, lane);
    if (threadIdx.x == 0) sts32(base + COUNTERS + 4, made);
    fence_proxy_async_shared();  // copies of weights come where the lists were made
    __syncthreads();
    const int n_blocks = lds32(base + COUNTERS + 4);
#else
    const int n_blocks = ldg32(state);  // the lists beside it, not behind it: what is past it is not looked at
    for (int i = threadIdx.x; i < most_blocks; i += THREADS) block_list[i] = blocks[i];
    for (int i = threadIdx.x; i < n_rows; i += THREADS) rows[i] = listed[i];
    __syncthreads();
    const auto block_items = [&] { return state + 2; };
#endif

    const int group = worker / PARTS, part = worker % PARTS;
    const Own own{group, part, group < GROUPS ? (n_blocks - part + PARTS - 1) / PARTS : 0};
    const int row_tiles = own.row_tiles(), turns = own.turns();

    if (warp < WARPS) {
        const int team = warp / TEAM, member = warp % TEAM;
        Weights::State at;
        int n = 0;  // items so far, of both products
        const auto leave = [&](const float (&c)[4]) {
            sts128(sums(n) + 512 * member + 16 * lane,
                   uint4{__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]), __float_as_uint(c[3])});
            __syncwarp();
            if (lane == 0) mbarrier_arrive(barrier(SUMMED, n));
        };
        u32 operand[UP_TILES][8];
        int loaded_block = -1;
        for (UpLine line(n_blocks, worker, workers); line.valid(); line.next(), n++, at.advance()) {
            if (n % TEAMS != team) continue;
            if (line.at / UP_ROWS != loaded_block) {
                loaded_block = line.at / UP_ROWS;
                const Block block(block_list + loaded_block);
                // Columns past the block's rows repeat the last one; their sums are not used. k past WIDTH is zero.
#if ROUTED
                // A lane names 16 bytes of token lane % 8, and has of token g what wgmma's order gives it.
                const u32 token = rows[block.start + min(lane % 8, block.count - 1)].x;
                const u32 from = base + X + token * X_ROW + 16 * (lane / 8);
                mbarrier_wait(base + X_FULL, 0);
#pragma unroll
                for (int c = 0; c < UP_TILES; c++) {
                    const int tile = c * TEAM + member;
                    if (UP_K % TEAM != 0 && tile >= UP_K) break;
                    u32 low[4], high[4];
                    ldmatrix_x4(low, from + 128 * tile), ldmatrix_x4(high, from + 128 * tile + 64);
#pragma unroll
                    for (int i = 0; i < 4; i++) operand[c][i] = low[i], operand[c][4 + i] = high[i];
                }
#else
                const u32 token = rows[block.start + min(g, block.count - 1)].x;
#pragma unroll
                for (int c = 0; c < UP_TILES; c++) {
                    const int k = (c * TEAM + member) * 64 + 16 * t;
                    const unsigned char* from = x + 2 * (static_cast<size_t>(token) * WIDTH + k);
                    const bool inside = k < WIDTH;
                    const uint4 low = inside ? ldg128(from) : uint4{0, 0, 0, 0};
                    put(operand[c], low, inside ? ldg128(from + 16) : uint4{0, 0, 0, 0});
                }
#endif
            }
            float c[4] = {};
            u32 loaded = 0;
            weights.consumer_wait(at);
#pragma unroll
            for (int i = 0; i < UP_TILES; i++) {
                const int tile = i * TEAM + member;
                if (UP_K % TEAM != 0 && tile >= UP_K) break;
                loaded = multiply(c, shared + RING + at.stage * STAGE_BYTES + tile * TILE_BYTES, operand[i], lane);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(once_loaded(weights.empty(at.stage), loaded, zero));
            if (n >= SUM_STAGES) mbarrier_wait(barrier(FREE_UP, n), n / SUM_STAGES - 1 & 1);
            leave(c);
        }
        const int up_items = n, which = member / 2, half = member % 2, of = which / ROW_TILES;
        // Turns in which the warp's slot holds a tile; one number of what else are two that live through the loop.
        const int filled = which % ROW_TILES < row_tiles ? own.turns_of(of) : 0;
        const int h_row = H_ROWS < BLOCK_TOKENS ? min(g, H_ROWS - 1) : g;
        Hidden::State h_at;
        for (int turn = 0; turn < turns; turn++, n++, at.advance(), h_at.advance()) {
            if (n % TEAMS != team) continue;
            float c[4] = {};
            u32 loaded = 0;
            weights.consumer_wait(at);
            hidden.consumer_wait(h_at);
            if (turn < filled) {
                // Rows past the block's hold junk, or are the last one again, in columns of sums that are not used.
                const unsigned char* of_h = shared + H_RING + h_at.stage * H_STAGE_BYTES + of * H_BLOCK + h_row * H_ROW;
                const unsigned char* tiles = shared + RING + at.stage * STAGE_BYTES + which * SLOT_BYTES;
#pragma unroll
                for (int i = 0; i < DOWN_TILES; i++) {
                    const int tile = 2 * i + half, k = tile * 64 + 16 * t;
                    if (DOWN_K % 2 != 0 && tile >= DOWN_K) break;
                    const uint4* from = reinterpret_cast<const uint4*>(of_h + 2 * k);
                    const uint4 low = from[0], high = from[1];
                    u32 o[8];
                    put(o, low, high);
                    loaded |= multiply(c, tiles + tile * TILE_BYTES, o, lane) | low.w | high.w;
                }
            }
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(once_loaded(weights.empty(at.stage), loaded, zero));
                mbarrier_arrive(once_loaded(hidden.empty(h_at.stage), loaded, zero));
            }
            if (const int before = n - SUM_STAGES; before >= up_items) {
                mbarrier_wait(barrier(FREE, n), (before - up_items) / SUM_STAGES & 1);
            } else if (before >= 0) {
                mbarrier_wait(barrier(FREE_UP, n), before / SUM_STAGES & 1);
            }
            leave(c);
        }
    } else if (warp == PRODUCER) {
        if (lane == 0) load_weights(weights, own, up, down, block_list, n_blocks, base + RING);
    } else if (warp == H_PRODUCER) {
#if ROUTED
        hand_on_counters(state, bank, lds32(base + COUNTERS), lane);
#endif
        load_hidden(hidden, own, h, block_list, block_items(), base + H_RING, lane);
    } else {
        const int reducer = warp - H_PRODUCER - 1;
        int n = 0, told = 0, items = 0;  // items of block `told` that are not yet told of: telling waits for the stores
        const auto tell = [&] {
            if (items == 0) return;
            __syncwarp();
            if (lane == 0) atomic_add_acq_rel(block_items() + told, items);
            items = 0;
        };
        for (UpLine line(n_blocks, worker, workers); line.valid(); line.next(), n++) {
            if (line.at / UP_ROWS != told) tell(), told = line.at / UP_ROWS;
            if (n % REDUCERS != reducer) continue;
            const Block block(block_list + told);
            const float scale = ldg_float(up_scale + block.expert) * OPERAND_TO_VALUE;
            mbarrier_wait(barrier(SUMMED, n), n / SUM_STAGES & 1);
            float4 each[TEAM], sum;
#pragma unroll
            for (int w = 0; w < TEAM; w++) each[w] = lds_float4(sums(n) + 512 * w + 16 * lane);
            sum = each[0];
#pragma unroll
            for (int w = 1; w < TEAM; w++) sum = sum + each[w];
            __syncwarp();
            if (lane == 0) mbarrier_arrive(once_loaded(barrier(FREE_UP, n), __float_as_uint(sum.x), zero));
            const float gate[2] = {sum.x * scale, sum.y * scale}, up_[2] = {sum.z * scale, sum.w * scale};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = 2 * t + e;
                const float value = __fdividef(gate[e], 1.0f + exp2_fast(-1.4426950408889634f * gate[e])) * up_[e];
                const int feature = line.at % UP_ROWS * 8 + g;
                u16* to = h + static_cast<size_t>(block.start + row) * INNER + dealt_place(feature);
                if (row < block.count) *to = round16<X_BF16>(value);
            }
            items++;
        }
        tell();
        // From here on all four look at every place of sums, so none may be a round behind.
        named_barrier_sync_unaligned(REDUCERS_MEET, 32 * REDUCERS);
        // Of an item of the second product: four rows of a row tile, element `mine` of each of its 8 columns.
        const int up_items = n, column = 2 * (lane / 4 % 4) + lane % 2;
        const int row = 2 * reducer + lane / 16 + 8 * (lane / 2 % 2);
        for (int turn = 0; turn < turns; turn++, n++) {
            float weight[BLOCKS_AT_ONCE];
            float* to[BLOCKS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < BLOCKS_AT_ONCE; i++) {
                to[i] = nullptr;
                if (!own.there(turn, i)) continue;
                const Block block(block_list + own.block_of(turn, i));
                if (column >= block.count) continue;
                const uint2 of = lds64(shared_address(rows + block.start + column));
                weight[i] = __uint_as_float(of.y) * (ldg_float(down_scale + block.expert) * OPERAND_TO_VALUE);
                to[i] = of_y + 16 * of.x + row;
            }
            float sum[SLOTS];
            mbarrier_wait(barrier(SUMMED, n), n / SUM_STAGES & 1);
            u32 loaded = 0;
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                const u32 at = sums(n) + 1024 * s + 128 * reducer + 4 * lane;
                sum[s] = __uint_as_float(lds32(at)) + __uint_as_float(lds32(at + 512));
                loaded |= __float_as_uint(sum[s]);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(once_loaded(barrier(FREE, n), loaded, zero));
#pragma unroll
            for (int i = 0; i < BLOCKS_AT_ONCE; i++) {
                if (to[i]) {
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) {
                        if (r < row_tiles) to[i][16 * r * tokens] += sum[i * ROW_TILES + r] * weight[i];
                    }
                }
                if (BLOCKS_AT_ONCE > 1) __syncwarp();  // a token may be another lane's in the next block
            }
            __syncwarp();
        }
    }

    if (group >= GROUPS) return;
    __syncwarp();
    write_y(of_y, parts, block_items() + most_blocks, y, group, part, tokens, THREADS);
}
