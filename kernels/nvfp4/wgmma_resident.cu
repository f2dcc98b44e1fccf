// NVFP4 linear for up to 32 tokens: y[M, N] = x[M, K] w^T, as y^T = w x^T on wgmma with x resident.
//
// Split-K over the CLUSTER CTAs of a cluster. A CTA keeps x of its k slice in shared memory for good, in the order in
// which tiles.py deals k to lanes, so that weights are all that streams. Clusters share the tiles of 64 rows; the
// CONSUMERS warpgroups of a CTA make a tile each, all of its k slice. Tiles that do not fill a round are cut in k among
// the warpgroups. Such a piece of work is an item:
//
//   consumer warpgroups  a pipeline of stages (two k blocks of 64) each: decode into registers, multiply, then send the
//                        sums to their owners: each CTA owns 32 / CLUSTER tokens
//   producers            a thread for each pipeline copies its weights: one for all waits for the slowest of them. A
//                        stage is a box of a tensor map over the decode kernel's row tiles: 4 of them by 2 tiles of k
//   reducer              two warps wait for the sums of all CTAs, add them in order of k, write the owned tokens of y
//
// Warpgroups start one after the other (STAGGER_CLOCKS), which staggers their epilogues: ones that end together leave the
// tensor cores idle together.
//
// So every sum is formed in one order: the same bits on every run, and no sums in global memory.
//
// Macros: KERNEL (name), X_BF16 0/1, CLUSTER 2/4/8, CONSUMERS, STAGES (of a pipeline).
#include "operand.cuh"
#include "sm90/pipeline.cuh"

constexpr int THREADS = 128 * CONSUMERS + 32 * (CONSUMERS + 2);
constexpr int W_BEFORE_X = 2;  // stages of a pipeline that are loaded before x: later loads queue behind them
constexpr unsigned STAGGER_CLOCKS = 1000;  // from the start of a warpgroup to that of the next
static_assert(W_BEFORE_X <= STAGES, "nothing empties a stage before x is there");
constexpr int BLOCK_M = 32, QUADS = BLOCK_M / (4 * CLUSTER);  // of four tokens, that a CTA owns
constexpr unsigned STAGE_BYTES = 2 * 4 * TILE_BYTES, X_BLOCK_BYTES = BLOCK_M * 128;
constexpr unsigned QUAD_BYTES = 64 * 16;  // sums of 64 rows x 4 tokens
constexpr unsigned SOURCE_BYTES = QUADS * QUAD_BYTES, SLOT_BYTES = CLUSTER * SOURCE_BYTES;

// Shared memory: stages, a slot for the sums of each warpgroup, barriers, and x of as many k blocks as the slice has.
constexpr unsigned SLOT = CONSUMERS * STAGES * STAGE_BYTES, FULL = SLOT + CONSUMERS * SLOT_BYTES;
constexpr unsigned EMPTY = FULL + 8 * CONSUMERS * STAGES, SUMS_FULL = EMPTY + 8 * CONSUMERS * STAGES;
constexpr unsigned SUMS_EMPTY = SUMS_FULL + 8 * CONSUMERS, X = (SUMS_EMPTY + 8 * CONSUMERS + 1023) / 1024 * 1024;

constexpr int X_BATCH = 4;  // 8 tokens of a k block each, that a warp has in flight
using Pipe = Pipeline<STAGES, FULL, EMPTY>;
constexpr int X_READY = 1, SLOT_READ = 2;  // named barriers

// The items of a cluster with `count` tiles, for a CTA with `depth` stages of k. Item i is done by group i % CONSUMERS.
struct Items {
    int depth, whole, parts, all;
    DEVICE Items(int count, int depth_) : depth(depth_), whole(count / CONSUMERS * CONSUMERS) {
        const int left = count - whole;
        parts = left ? CONSUMERS / left : 1, all = whole + left * parts;
    }
};
struct Item {
    int tile, part, begin, end;  // stages begin .. end - 1
    bool last;                   // part of its tile
    DEVICE Item(const Items& items, int item) : tile(item), part(0), begin(0), end(items.depth), last(true) {
        if (item >= items.whole) {
            const int left = (item - items.whole) / items.parts;
            tile = items.whole + left, part = item - items.whole - left * items.parts, last = part == items.parts - 1;
            begin = part * items.depth / items.parts, end = (part + 1) * items.depth / items.parts;
        }
    }
};

// x [rows of m, k] -> k_blocks of 64 k, each the B operand of four products: row r at 128 r, piece p of it at p ^ r % 8.
// Piece p, word t is what lane t of a row takes from it: k = 16 t + 2 p + {0, 1}. A warp moves 8 rows of a chunk.
DEVICE void load_x(const unsigned char* x, unsigned to, int first_block, int k_blocks, int m, int k) {
    const int lane = threadIdx.x % 32, t = lane % 4, r = lane / 4, pieces = k_blocks * (BLOCK_M / 8);
    for (int at = threadIdx.x / 32; at < pieces; at += 4 * CONSUMERS * X_BATCH) {
        uint4 v[X_BATCH][2];
#pragma unroll
        for (int b = 0; b < X_BATCH; b++) {
            const int piece = at + b * 4 * CONSUMERS;
            const int row = piece % (BLOCK_M / 8) * 8 + r, from = 64 * (first_block + piece / (BLOCK_M / 8)) + 16 * t;
            v[b][0] = v[b][1] = uint4{0, 0, 0, 0};
            if (piece < pieces && row < m && from < k) {
                const unsigned char* p = x + 2 * (static_cast<size_t>(row) * k + from);
                v[b][0] = ldg128_nc(p), v[b][1] = ldg128_nc(p + 16);
            }
        }
#pragma unroll
        for (int b = 0; b < X_BATCH; b++) {
            const int piece = at + b * 4 * CONSUMERS;
            if (piece >= pieces) break;
            const unsigned row = to + piece * 1024 + 128 * r + 4 * t;
            const unsigned words[8] = {v[b][0].x, v[b][0].y, v[b][0].z, v[b][0].w,
                                       v[b][1].x, v[b][1].y, v[b][1].z, v[b][1].w};
#pragma unroll
            for (int p = 0; p < 8; p++) sts32(row + 16 * (p ^ r), words[p]);
        }
    }
}

// x: [m, k] 16-bit. w_map: row tiles in tiles.py's order [tiles of 16 rows, tiles of 64 k, 72 words of 8 bytes]. y: [m, n]
// 16-bit. depth: stages (pairs of tiles of k) of a tile.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    KERNEL(const unsigned char* x, const __grid_constant__ TensorMap w_map, const float* tensor_scale,
           unsigned short* y, int m, int n, int k, int depth) {
    DYNAMIC_SHARED(shared);
    const unsigned base = shared_address(shared);
    const int group = warp_uniform(int(threadIdx.x / 128)), warp = warp_uniform(int(threadIdx.x / 32)) % 4,
              lane = threadIdx.x % 32;
    const int service =
        warp_uniform(int(threadIdx.x / 32)) - 4 * CONSUMERS;  // producers of the rings, then two that reduce
    const int rank = cluster_rank(), cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const int slice = rank * depth / CLUSTER, mine = (rank + 1) * depth / CLUSTER - slice;  // stages of this CTA
    const Items items(((n + 63) / 64 - cluster + clusters - 1) / clusters,
                      mine);  // tiles cluster, cluster + clusters ..

    if (service >= 0 && service < CONSUMERS) {
        const unsigned stages_at = base + service * STAGES * STAGE_BYTES, barriers = base + 8 * service * STAGES;
        const Pipe pipeline{barriers};
        unsigned long long policy = 0;
        int i = service, at = 0, to = 0, row_tile = 0, stage = 0;
        unsigned phase = 1;
        const auto load_stage = [&]() {  // whether there was one left
            for (; at == to; i += CONSUMERS) {
                if (i >= items.all) return false;
                const Item item(items, i);
                row_tile = 4 * (cluster + item.tile * clusters), at = item.begin, to = item.end;
            }
            mbarrier_wait(pipeline.empty(stage), phase);
            mbarrier_arrive_expect_tx(pipeline.full(stage), STAGE_BYTES);
            tma_load_words(stages_at + stage * STAGE_BYTES, &w_map, 2 * 72 * (slice + at), row_tile,
                           pipeline.full(stage), policy);
            at++;
            if (++stage == STAGES) stage = 0, phase ^= 1;
            return true;
        };
        if (lane == 0) {
            pipeline.init(1, 4);
            mbarrier_init(base + SUMS_FULL + 8 * service, 1);
            mbarrier_init(base + SUMS_EMPTY + 8 * service, CLUSTER);
            mbarrier_init_fence();
            fence_proxy_async_shared();
            if (service < items.all) mbarrier_arrive_expect_tx(base + SUMS_FULL + 8 * service, SLOT_BYTES);
        }
        __syncwarp();
        cluster_arrive();
        if (lane == 0) {  // the weights wait for nobody: no other kernel has written them
            launch_dependent_grids();
            policy = evict_first_policy();
            for (int s = 0; s < W_BEFORE_X && load_stage(); s++) continue;
        }
        __syncwarp();
        cluster_wait();
        named_barrier_sync_unaligned(X_READY, 160 * CONSUMERS);
        while (lane == 0 && load_stage()) continue;
    } else if (service >= CONSUMERS) {
        cluster_arrive();
        cluster_wait();
        const int thread = threadIdx.x - 160 * CONSUMERS, row_tile = thread / 16, g = thread / 2 % 8, t = thread % 2;
        const float scale = *tensor_scale * OPERAND_TO_VALUE;
        const unsigned zero = static_cast<unsigned>(m) >> 31;  // for once_loaded
        float4 sums[QUADS];
        wait_on_dependent_grids();  // they may still read what y was
#pragma unroll 1
        for (int i = 0; i < items.all; i++) {
            const Item item(items, i);
            const int row = 64 * (cluster + item.tile * clusters) + 16 * row_tile + (g & ~1), slot = i % CONSUMERS;
            const unsigned at = base + SLOT + slot * SLOT_BYTES + 16 * thread;
            unsigned loaded = 0;
            mbarrier_wait_cluster(base + SUMS_FULL + 8 * slot, i / CONSUMERS & 1);
#pragma unroll
            for (int u = 0; u < QUADS; u++) {
                float4 v[CLUSTER], &sum = sums[u];
#pragma unroll
                for (int s = 0; s < CLUSTER; s++) v[s] = lds_float4(at + s * SOURCE_BYTES + u * QUAD_BYTES);
                if (item.part == 0) sum = float4{0, 0, 0, 0};
#pragma unroll
                for (int s = 0; s < CLUSTER; s++) sum.x += v[s].x, sum.y += v[s].y, sum.z += v[s].z, sum.w += v[s].w;
                loaded |= __float_as_uint(sum.x);
            }
            named_barrier_sync(once_loaded(SLOT_READ, loaded, zero), 64);  // neither warp reads the slot any more
            if (service == CONSUMERS && i + CONSUMERS < items.all) {
                if (lane == 0) mbarrier_arrive_expect_tx(base + SUMS_FULL + 8 * slot, SLOT_BYTES);
                if (lane < CLUSTER) mbarrier_arrive_cluster(map_to_rank(base + SUMS_EMPTY + 8 * slot, lane));
            }
            if (!item.last) continue;
            // A thread has rows g and g + 8 of two tokens; with its neighbour's it has pairs of rows of one token.
#pragma unroll
            for (int u = 0; u < QUADS; u++) {
                const float4 v = sums[u];
                const bool odd = g & 1;
                const float upper = shuffle_xor(odd ? v.x : v.y, 2), lower = shuffle_xor(odd ? v.z : v.w, 2);
                const unsigned pairs[2] = {pack_pair<X_BF16>((odd ? upper : v.x) * scale, (odd ? v.y : upper) * scale),
                                           pack_pair<X_BF16>((odd ? lower : v.z) * scale, (odd ? v.w : lower) * scale)};
                const int token = 4 * (rank * QUADS + u) + 2 * t + odd;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int at_row = row + 8 * half;
                    unsigned short* const to = y + static_cast<size_t>(token) * n + at_row;
                    if (token >= m || at_row >= n) continue;
                    if (n % 2 == 0 && reinterpret_cast<unsigned long long>(y) % 4 == 0) {
                        *reinterpret_cast<unsigned*>(to) = pairs[half];
                    } else {
                        to[0] = static_cast<unsigned short>(pairs[half]);
                        if (at_row + 1 < n) to[1] = static_cast<unsigned short>(pairs[half] >> 16);
                    }
                }
            }
        }
    } else {
        cluster_arrive();
        wait_on_dependent_grids();
        load_x(x, base + X, 2 * slice, 2 * mine, m, k);
        fence_proxy_async_shared();
        named_barrier_sync_unaligned(X_READY, 160 * CONSUMERS);
        cluster_wait();
        const unsigned my_codes = base + group * STAGES * STAGE_BYTES + 2 * warp * TILE_BYTES + 16 * lane;
        const unsigned my_scales = my_codes + TILE_CODE_BYTES - 14 * lane;
        const unsigned full = base + FULL + 8 * group * STAGES, empty = base + EMPTY + 8 * group * STAGES;
        const unsigned mine_at =
            SLOT + group * SLOT_BYTES + rank * SOURCE_BYTES + warp * 256 + lane / 4 * 32 + lane % 2 * 16;
        unsigned a[2][4][4];
        float acc[BLOCK_M / 2];
        int stage = 0;
        unsigned phase = 0;
        if (items.whole > 0) spin_clocks(group * STAGGER_CLOCKS);  // a part of a tile each would only end later
#pragma unroll 1
        for (int i = group; i < items.all; i += CONSUMERS) {
            const Item item(items, i);
#pragma unroll
            for (int e = 0; e < BLOCK_M / 2; e++) acc[e] = 0;
            pin(acc);
#pragma unroll 1
            for (int at = item.begin; at < item.end; at++) {
                const unsigned stage_at = stage * STAGE_BYTES;
                const unsigned long long operand = x_descriptor(base + X + at * 2 * X_BLOCK_BYTES);
                uint4 codes[2];
                unsigned scales[2];
                mbarrier_wait(full + 8 * stage, phase);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    codes[c] = lds128(my_codes + stage_at + c * TILE_BYTES);
                    scales[c] = lds16(my_scales + stage_at + c * TILE_BYTES);
                }
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    tile_fragments_by_half<X_BF16>(codes[c], scales[c], a[c]);
                    pin(a[c]);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        wgmma_rs<BLOCK_M, X_BF16>(acc, a[c][j], operand + c * (X_BLOCK_BYTES / 16) + 2 * j);
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(empty + 8 * stage);  // the products have taken what was loaded from it
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            const int use = i / CONSUMERS;
            if (use > 0) mbarrier_wait_cluster(base + SUMS_EMPTY + 8 * group, (use - 1) & 1);
            wgmma_wait<0>();
            pin(acc);
#pragma unroll
            for (int e = 0; e < BLOCK_M / 8; e++) {  // of eight tokens this lane's are in quad 2 e + lane % 4 / 2
                const int quad = 2 * e + lane % 4 / 2;
                const float* const v = &acc[4 * e];
                const unsigned there = map_to_rank(base, quad / QUADS);
                st_async(there + mine_at + quad % QUADS * QUAD_BYTES, float4{v[0], v[1], v[2], v[3]},
                         there + SUMS_FULL + 8 * group);
            }
        }
    }
    __syncwarp();
    cluster_sync();  // the others still send here
}
