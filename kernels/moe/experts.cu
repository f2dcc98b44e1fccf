// The experts of a mixture for few tokens, both products in one persistent launch: y = sum_e p_e Wd_e h_e with h_e =
// SiLU(Wg_e x) * (Wu_e x), at the speed of reading the weights of the experts that router.cu has chosen, once.
//
//   8 math warps       mma.sync with weights as A, decoded in registers from nvfp4's tiles, and tokens as B
//   weights producer   a stage of bulk copies an item, gate and up and then down, without a pause between the two
//   h producer         waits until a block's h is whole, and copies its rows in beside the weights of down
//   reducer warp       adds the math warps' partial sums in a fixed order; SiLU; what down gives into y's sums
//
// First product. Rows of gate and up alternate in eights, so a thread of the reducer holds both. An item is 16 such rows
// of one block (at most 8 N_TILES tokens of one expert) over all of K, which the 8 warps share, with x in registers. All
// items stand in one line; it is cut into rounds, and a round into equal runs, one a worker (CTA). A run rarely leaves an
// expert, so x is seldom loaded anew, and blocks end in their order, so the second product need not wait for all.
//
// Second product. A worker has ROW_TILES tiles of 16 rows of y and every PARTS-th block, so it adds up its rows' y in
// shared memory, block after block in their order. An item is four slots of a row tile and a block, a pair of warps each,
// which share K. ROW_TILES > 1 reads h fewer times; with PARTS > 1 workers of the same rows then exchange their sums
// through global memory and each adds up its share of them, part after part. No floating-point atomics: the same bits on
// every run. A worker waits only for h, which no worker leaves for later than its own share, and for parts: the grid is
// no larger than what runs at once.
//
// Macros: KERNEL (name), X_BF16 0/1 (type of x, h and y), WIDTH, INNER (of the model and of an expert), N_TILES 1/2
// (eights of tokens of a block), ROW_TILES 1/2/4, PARTS, STAGES (of weights), H_STAGES, ROUND_ITEMS (of a run, about).
#include "nvfp4/operand.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/scheduler.cuh"

constexpr int WARPS = 8, PRODUCER = WARPS, H_PRODUCER = WARPS + 1, REDUCER = WARPS + 2, THREADS = 32 * (WARPS + 3);
constexpr int EVERYONE = 1, SUM_STAGES = 2, SLOTS = 4, BLOCKS_AT_ONCE = SLOTS / ROW_TILES, BLOCK_TOKENS = 8 * N_TILES;
constexpr int UP_K = (WIDTH + 63) / 64, DOWN_K = (INNER + 63) / 64;  // tiles along K
constexpr int UP_TILES = (UP_K + WARPS - 1) / WARPS, DOWN_TILES = (DOWN_K + 1) / 2;
constexpr int UP_ROWS = INNER / 8, DOWN_ROWS = WIDTH / 16, GROUPS = (DOWN_ROWS + ROW_TILES - 1) / ROW_TILES;
static_assert(INNER % 16 == 0 && WIDTH % 16 == 0 && SLOTS % ROW_TILES == 0, "whole scale groups, whole slots");

constexpr unsigned UP_BYTES = UP_K * TILE_BYTES, SLOT_BYTES = DOWN_K * TILE_BYTES;
constexpr unsigned STAGE_BYTES = ((UP_BYTES > SLOTS * SLOT_BYTES ? UP_BYTES : SLOTS * SLOT_BYTES) + 127) / 128 * 128;
constexpr unsigned SUMS_BYTES = N_TILES * 512, SUM_STAGE_BYTES = WARPS * SUMS_BYTES;
// Rows of h 16 bytes apart modulo 128, so that eight lanes that read two rows meet no bank twice.
constexpr unsigned H_BYTES = 2 * INNER, H_ROW = H_BYTES + 16, H_BLOCK = BLOCK_TOKENS * H_ROW;
constexpr unsigned H_STAGE_BYTES = (BLOCKS_AT_ONCE * H_BLOCK + 127) / 128 * 128;
constexpr unsigned FULL = 0, EMPTY = FULL + 8 * STAGES, H_FULL = EMPTY + 8 * STAGES, H_EMPTY = H_FULL + 8 * H_STAGES;
constexpr unsigned SUMMED = H_EMPTY + 8 * H_STAGES, FREE = SUMMED + 8 * SUM_STAGES;
constexpr unsigned RING = 1024, SUMS = RING + STAGES * STAGE_BYTES, H_RING = SUMS + SUM_STAGES * SUM_STAGE_BYTES;
constexpr unsigned LISTS = H_RING + H_STAGES * H_STAGE_BYTES;  // y's sums, rows, blocks
static_assert(FREE + 8 * SUM_STAGES <= RING, "too many barriers");

using Weights = Pipeline<STAGES, FULL, EMPTY>;
using Hidden = Pipeline<H_STAGES, H_FULL, H_EMPTY>;
using Sums = Pipeline<SUM_STAGES, SUMMED, FREE>;

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
            const int first = static_cast<int>(static_cast<long long>(items) * round / rounds);
            const int behind = static_cast<int>(static_cast<long long>(items) * (round + 1) / rounds);
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

// Of router.cu: expert | rows << 16, first row.
struct Block {
    int expert, count, start;
    DEVICE explicit Block(const uint2* at) {
        const uint2 x = lds64(shared_address(at));
        expert = x.x & 0xFFFF, count = x.x >> 16, start = x.y;
    }
};

// c += a tile of weights times 64 k of tokens, which start at the fragments o; columns: eights of tokens.
DEVICE u32 multiply(float (&c)[N_TILES][4], const unsigned char* tile, const u32 (&o)[N_TILES][8], int columns,
                    int lane) {
    const uint4 codes = *reinterpret_cast<const uint4*>(tile + 16 * lane);
    const u32 scales = *reinterpret_cast<const u16*>(tile + TILE_CODE_BYTES + 2 * lane);
    u32 a[4][4];
    tile_fragments<X_BF16>(codes, scales, a);
#pragma unroll
    for (int b = 0; b < N_TILES; b++) {
        if (b > 0 && b >= columns) break;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            mma_16816<X_BF16>(c[b], a[j][0], a[j][1], a[j][2], a[j][3], o[b][2 * j], o[b][2 * j + 1]);
        }
    }
    return a[3][3];
}

DEVICE void put(u32 (&o)[8], const uint4& low, const uint4& high) {
    o[0] = low.x, o[1] = low.y, o[2] = low.z, o[3] = low.w;
    o[4] = high.x, o[5] = high.y, o[6] = high.z, o[7] = high.w;
}

// x: [tokens, WIDTH]. up: tiles [experts, UP_ROWS, UP_K], down: [experts, DOWN_ROWS, DOWN_K], with a tensor scale an
// expert. listed, blocks, state: router.cu's rows, blocks and state; state + 2 counts a block's items and then a group's
// parts. h: [n_rows, INNER]. parts: [GROUPS * PARTS, ROW_TILES, tokens, 16], where PARTS > 1. y: [tokens, WIDTH].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL(const unsigned char* x, const unsigned char* up, const unsigned char* down, const float* up_scale,
           const float* down_scale, const uint2* listed, const uint2* blocks, u32* state, u16* h, float* parts, u16* y,
           int tokens, int n_rows, int most_blocks) {
    DYNAMIC_SHARED(shared);
    const u32 base = shared_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int worker = blockIdx.x, workers = gridDim.x;
    const u32 zero = static_cast<u32>(tokens) >> 31;  // for once_loaded
    const Weights weights{base};
    const Hidden hidden{base};
    const Sums sums{base};
    if (warp == PRODUCER && lane == 0) {
        weights.init(1, WARPS), hidden.init(1, WARPS), sums.init(WARPS, 1);
        mbarrier_init_fence();
        fence_proxy_async_shared();
    }
    const int sums_of_y = ROW_TILES * tokens * 16;
    float* of_y = reinterpret_cast<float*>(shared + LISTS);  // [ROW_TILES, tokens, 16]
    uint2* rows = reinterpret_cast<uint2*>(of_y + sums_of_y);
    uint2* block_list = rows + n_rows;
    for (int i = threadIdx.x; i < sums_of_y; i += THREADS) of_y[i] = 0.0f;
    wait_on_dependent_grids();
    const int n_blocks = ldg32(state);
    for (int i = threadIdx.x; i < n_rows; i += THREADS) rows[i] = listed[i];
    for (int i = threadIdx.x; i < n_blocks; i += THREADS) block_list[i] = blocks[i];
    __syncthreads();

    const int group = worker / PARTS, part = worker % PARTS;
    const int mine = group < GROUPS ? (n_blocks - part + PARTS - 1) / PARTS : 0;  // blocks of the second product
    const int row_tiles = min(ROW_TILES, DOWN_ROWS - group * ROW_TILES);
    const int turns = (mine + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE;
    // Block i of the second product's turn; whether it is there.
    const auto there = [&](int turn, int i) { return turn * BLOCKS_AT_ONCE + i < mine; };
    const auto block_of = [&](int turn, int i) { return part + PARTS * (turn * BLOCKS_AT_ONCE + i); };
    u32* block_items = state + 2;
    u32* group_parts = block_items + most_blocks;

    if (warp < WARPS) {
        Weights::State at;
        int slot = 0, use = 0;  // of the sums
        const auto leave = [&](const float (&c)[N_TILES][4], int columns) {
            if (use > 0) mbarrier_wait(sums.empty(slot), (use - 1) & 1);
#pragma unroll
            for (int i = 0; i < N_TILES; i++) {
                if (i > 0 && i >= columns) break;
                *reinterpret_cast<float4*>(shared + SUMS + slot * SUM_STAGE_BYTES + warp * SUMS_BYTES + 512 * i +
                                           16 * lane) = float4{c[i][0], c[i][1], c[i][2], c[i][3]};
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(sums.full(slot));
            if (++slot == SUM_STAGES) slot = 0, use++;
        };
        u32 operand[UP_TILES][N_TILES][8];
        int loaded_block = -1, columns = 1;
        for (UpLine line(n_blocks, worker, workers); line.valid(); line.next()) {
            if (line.at / UP_ROWS != loaded_block) {
                loaded_block = line.at / UP_ROWS;
                const Block block(block_list + loaded_block);
                columns = warp_uniform((block.count + 7) / 8);
#pragma unroll
                for (int i = 0; i < N_TILES; i++) {
                    // Columns past the block's rows repeat the last one; their sums are not used. k past WIDTH is zero.
                    const u32 token = rows[block.start + min(8 * i + g, block.count - 1)].x;
#pragma unroll
                    for (int c = 0; c < UP_TILES; c++) {
                        const int k = (c * WARPS + warp) * 64 + 16 * t;
                        const unsigned char* from = x + 2 * (static_cast<size_t>(token) * WIDTH + k);
                        const bool inside = k < WIDTH;
                        const uint4 low = inside ? ldg128(from) : uint4{0, 0, 0, 0};
                        put(operand[c][i], low, inside ? ldg128(from + 16) : uint4{0, 0, 0, 0});
                    }
                }
            }
            float c[N_TILES][4] = {};
            u32 loaded = 0;
            weights.consumer_wait(at);
#pragma unroll
            for (int i = 0; i < UP_TILES; i++) {
                const int tile = i * WARPS + warp;
                if (tile >= UP_K) break;
                const unsigned char* from = shared + RING + at.stage * STAGE_BYTES + tile * TILE_BYTES;
                loaded = multiply(c, from, operand[i], columns, lane);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(once_loaded(weights.empty(at.stage), loaded, zero));
            at.advance();
            leave(c, columns);
        }
        const int which = warp / 2, half = warp % 2, of = which / ROW_TILES;
        Hidden::State h_at;
        for (int turn = 0; turn < turns; turn++) {
            float c[N_TILES][4] = {};
            u32 loaded = 0;
            weights.consumer_wait(at);
            hidden.consumer_wait(h_at);
            if (there(turn, of) && which % ROW_TILES < row_tiles) {
                const Block block(block_list + block_of(turn, of));
                columns = warp_uniform((block.count + 7) / 8);
                // Rows past the block's hold junk, in columns of sums that are not used.
                const unsigned char* of_h = shared + H_RING + h_at.stage * H_STAGE_BYTES + of * H_BLOCK;
                const unsigned char* tiles = shared + RING + at.stage * STAGE_BYTES + which * SLOT_BYTES;
#pragma unroll
                for (int i = 0; i < DOWN_TILES; i++) {
                    const int tile = 2 * i + half, k = tile * 64 + 16 * t;
                    if (tile >= DOWN_K) break;
                    u32 o[N_TILES][8] = {};
#pragma unroll
                    for (int b = 0; b < N_TILES; b++) {
                        if (b > 0 && b >= columns) break;
                        const unsigned char* from = of_h + (8 * b + g) * H_ROW + 2 * k;
                        const bool inside = INNER % 64 == 0 || k < INNER;
                        const uint4 low = inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
                        put(o[b], low, inside ? *reinterpret_cast<const uint4*>(from + 16) : uint4{0, 0, 0, 0});
                        loaded |= o[b][3] | o[b][7];
                    }
                    loaded |= multiply(c, tiles + tile * TILE_BYTES, o, columns, lane);
                }
            }
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(once_loaded(weights.empty(at.stage), loaded, zero));
                mbarrier_arrive(once_loaded(hidden.empty(h_at.stage), loaded, zero));
            }
            at.advance(), h_at.advance();
            leave(c, columns);
        }
    } else if (warp == PRODUCER) {
        if (lane == 0) {
            const u64 policy = evict_first_policy();
            Weights::State to;
            for (UpLine line(n_blocks, worker, workers); line.valid(); line.next()) {
                const size_t item = static_cast<size_t>(Block(block_list + line.at / UP_ROWS).expert) * UP_ROWS;
                weights.producer_acquire(to);
                weights.producer_expect(to, UP_BYTES);
                tma_load_1d(base + RING + to.stage * STAGE_BYTES, up + (item + line.at % UP_ROWS) * UP_BYTES, UP_BYTES,
                            weights.full(to.stage), policy);
                to.advance();
            }
            for (int turn = 0; turn < turns; turn++) {
                const int here = min(BLOCKS_AT_ONCE, mine - turn * BLOCKS_AT_ONCE);
                const u32 bytes = row_tiles * SLOT_BYTES;
                weights.producer_acquire(to);
                weights.producer_expect(to, here * bytes);
                for (int i = 0; i < here; i++) {
                    const size_t expert = Block(block_list + block_of(turn, i)).expert;
                    const unsigned char* from = down + (expert * DOWN_ROWS + group * ROW_TILES) * SLOT_BYTES;
                    tma_load_1d(base + RING + to.stage * STAGE_BYTES + i * ROW_TILES * SLOT_BYTES, from, bytes,
                                weights.full(to.stage), policy);
                }
                to.advance();
            }
        }
    } else if (warp == H_PRODUCER) {
        Hidden::State to;
        int whole = 0;  // so many of the worker's blocks are known to be: a look at 32 costs what one costs
        for (int turn = 0; turn < turns; turn++) {
            const int here = min(BLOCKS_AT_ONCE, mine - turn * BLOCKS_AT_ONCE);
            int count = 0;
            for (int i = 0; i < here; i++) count += Block(block_list + block_of(turn, i)).count;
            while (whole < turn * BLOCKS_AT_ONCE + here) {
                const int index = part + PARTS * (whole + lane);
                const bool done = whole + lane < mine && ld_acquire(block_items + index) >= UP_ROWS;
                const u32 others = ~warp_ballot(done);
                whole += others ? __ffs(others) - 1 : 32;
            }
            if (lane == 0) hidden.producer_acquire(to);
            if (lane == 0) hidden.producer_expect(to, count * H_BYTES);
            __syncwarp();
            fence_proxy_async_global();  // other workers wrote h by plain stores
            for (int i = 0; i < here; i++) {
                const Block block(block_list + block_of(turn, i));
                const u32 stage = base + H_RING + to.stage * H_STAGE_BYTES + i * H_BLOCK;
                if (lane < block.count) {
                    tma_load_1d(stage + lane * H_ROW, h + static_cast<size_t>(block.start + lane) * INNER, H_BYTES,
                                hidden.full(to.stage));
                }
            }
            to.advance();
        }
    } else {
        int slot = 0;
        u32 phase = 0;
        const auto sum_of = [&](int i, int first, int count) {
            const unsigned char* from =
                shared + SUMS + slot * SUM_STAGE_BYTES + first * SUMS_BYTES + 512 * i + 16 * lane;
            float4 sum = *reinterpret_cast<const float4*>(from);
            for (int w = 1; w < count; w++) sum = sum + *reinterpret_cast<const float4*>(from + w * SUMS_BYTES);
            return sum;
        };
        const auto release = [&](u32 loaded) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(once_loaded(sums.empty(slot), loaded, zero));
            if (++slot == SUM_STAGES) slot = 0, phase ^= 1;
        };
        int items = 0;  // of a block, not yet told of: telling waits for the stores of h
        for (UpLine line(n_blocks, worker, workers); line.valid();) {
            const int index = line.at / UP_ROWS;
            const Block block(block_list + index);
            const float scale = ldg_float(up_scale + block.expert) * OPERAND_TO_VALUE;
            float4 sum[N_TILES];
            u32 loaded = 0;
            mbarrier_wait(sums.full(slot), phase);
#pragma unroll
            for (int i = 0; i < N_TILES; i++) {
                if (8 * i >= block.count) break;
                sum[i] = sum_of(i, 0, WARPS);
                loaded |= __float_as_uint(sum[i].x);
            }
            release(loaded);
#pragma unroll
            for (int i = 0; i < N_TILES; i++) {
                const float gate[2] = {sum[i].x * scale, sum[i].y * scale},
                            up_[2] = {sum[i].z * scale, sum[i].w * scale};
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = 8 * i + 2 * t + e;
                    const float value = __fdiv_rn(gate[e], 1.0f + exp2_fast(-1.4426950408889634f * gate[e])) * up_[e];
                    u16* to = h + static_cast<size_t>(block.start + row) * INNER + line.at % UP_ROWS * 8 + g;
                    if (row < block.count) *to = round16<X_BF16>(value);
                }
            }
            items++, line.next();
            if (!line.valid() || line.at / UP_ROWS != index) {
                __syncwarp();
                if (lane == 0) atomic_add_acq_rel(block_items + index, items);
                items = 0;
            }
        }
        for (int turn = 0; turn < turns; turn++) {
            float4 sum[SLOTS][N_TILES];
            u32 loaded = 0;
            mbarrier_wait(sums.full(slot), phase);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
#pragma unroll
                for (int i = 0; i < N_TILES; i++) {
                    sum[s][i] = sum_of(i, 2 * s, 2);
                    loaded |= __float_as_uint(sum[s][i].x);
                }
            }
            release(loaded);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                if (!there(turn, s / ROW_TILES) || s % ROW_TILES >= row_tiles) continue;
                const Block block(block_list + block_of(turn, s / ROW_TILES));
                const float scale = ldg_float(down_scale + block.expert) * OPERAND_TO_VALUE;
#pragma unroll
                for (int i = 0; i < N_TILES; i++) {
                    const float values[4] = {sum[s][i].x, sum[s][i].y, sum[s][i].z, sum[s][i].w};
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = 8 * i + 2 * t + e;
                        if (column >= block.count) continue;
                        const uint2 row = lds64(shared_address(rows + block.start + column));
                        const float weight = __uint_as_float(row.y) * scale;
                        float* to = of_y + ((s % ROW_TILES) * tokens + static_cast<int>(row.x)) * 16 + g;
                        to[0] += values[e] * weight;
                        to[8] += values[e + 2] * weight;
                    }
                }
                __syncwarp();  // a token may be another lane's in the next slot
            }
        }
    }

    if (group >= GROUPS) return;
    __syncwarp();
    named_barrier_sync_unaligned(EVERYONE, THREADS);
    const int quads = row_tiles * tokens * 4;
    const auto write = [&](int i, const float4& sum) {
        const int at = i / 4, token = at % tokens, row = (group * ROW_TILES + at / tokens) * 16 + i % 4 * 4;
        *reinterpret_cast<uint2*>(y + static_cast<size_t>(token) * WIDTH + row) =
            make_uint2(pack_pair<X_BF16>(sum.x, sum.y), pack_pair<X_BF16>(sum.z, sum.w));
    };
    const float4* own = reinterpret_cast<const float4*>(of_y);
    if constexpr (PARTS == 1) {
        for (int i = threadIdx.x; i < quads; i += THREADS) write(i, own[i]);
    } else {
        float4* of_group = reinterpret_cast<float4*>(parts) + static_cast<size_t>(group) * PARTS * (sums_of_y / 4);
        for (int i = threadIdx.x; i < quads; i += THREADS) of_group[part * (sums_of_y / 4) + i] = own[i];
        named_barrier_sync_unaligned(EVERYONE, THREADS);
        if (threadIdx.x == 0) {
            atomic_add_acq_rel(group_parts + group, 1);
            while (ld_acquire(group_parts + group) < PARTS) continue;
        }
        named_barrier_sync_unaligned(EVERYONE, THREADS);
        for (int i = quads * part / PARTS + threadIdx.x; i < quads * (part + 1) / PARTS; i += THREADS) {
            float4 sum = ldg_cg_float4(of_group + i);
            for (int p = 1; p < PARTS; p++) sum = sum + ldg_cg_float4(of_group + p * (sums_of_y / 4) + i);
            write(i, sum);
        }
    }
}
