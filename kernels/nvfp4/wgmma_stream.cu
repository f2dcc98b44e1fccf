// NVFP4 linear for 9 to 24 tokens, NATURAL to 128: y[M, N] = x[M, K] w^T, as y^T = w x^T on wgmma, both streamed.
//
// A stream-K iteration is a block of BLOCK_N = 256 weight rows by 128 k. The iterations of all blocks stand in a line,
// which the CTAs share evenly (sm90/scheduler.cuh): every multiprocessor has as many of them, whatever the shape. A CTA
// walks its iterations once, so x need not stay: a stage is an iteration's weights and its x.
//
//   four consumer warpgroups  64 rows each: decode into registers, multiply by the stage's x. They load the x of the
//                             first iterations themselves
//   x warps                   one for every 8 tokens: x into the order in which tiles.py deals k to lanes; a thread of
//                             the first is the weights' producer: an iteration's are a box of a tensor map over the
//                             decode kernel's row tiles
//
// CTAs that share a block leave each other partial sums of it in global memory, warp to warp, by a flag-free reduction:
// a word that is not the NaN sentinel ABSENT has been written, so no flag has to be seen first. Those whose walk ends in
// the block own some of its 8-token tiles each, add what the others left of these to their own, in one order, and put
// ABSENT back. (A CTA that goes on to another block owns none: it would have to come back.) So the same bits on every
// run.
//
// NATURAL: weights are row tiles in wgmma's own order of k (row_tiles.py), so x comes as it is, both by tensor maps, a
// thread of one more warpgroup issues all copies, and tokens go up to 128. CLUSTER 2: two CTAs, which make blocks of
// their own at the same k, each load half of x for both (multicast).
//
// GATED: weight rows are eight of a gate and eight of an up projection in turn, so a lane has both of a feature, and y
// [m, n] is SiLU(gate) * up of n features, of 2 n rows.
//
// Macros: KERNEL (name), X_BF16 0/1, BLOCK_M 16/24 (tokens; NATURAL: multiples of 16 up to 128), STAGES (a power of
// two, at least 4); NATURAL 0/1, CONSUMERS (warpgroups) and CLUSTER 1/2 where it is 1; GATED 0/1 (0 where not given).
#ifndef GATED
#define GATED 0
#endif
#ifndef NATURAL
#define NATURAL 0
#define CONSUMERS 4
#define CLUSTER 1
#endif
#include "gemm_operand.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/scheduler.cuh"

constexpr int WARPS = 4 * CONSUMERS, BLOCK_N = 64 * CONSUMERS, X_WARPS = NATURAL ? 4 : BLOCK_M / 8;
constexpr int THREADS = 32 * (WARPS + X_WARPS);
constexpr int K_BLOCKS = 2;     // of 64 k, in an iteration
constexpr int W_BEFORE_X = 1;   // stages of weights that are loaded before x: later loads queue behind them
constexpr int FIRST_X = 4;      // iterations whose x the warpgroups load
constexpr int X_IN_FLIGHT = 3;  // iterations of x that an x warp has in flight
static_assert(STAGES >= 4 && (STAGES & (STAGES - 1)) == 0, "stages are counted modulo a power of two");
static_assert(FIRST_X <= STAGES && (NATURAL || FIRST_X * X_WARPS <= WARPS) && WARPS <= 32,
              "8 tokens of an iteration a warp");
static_assert(CLUSTER == 1 || (NATURAL && BLOCK_M % 16 == 0), "a half of x must keep the swizzle's phase");
constexpr unsigned W_BLOCK_BYTES = WARPS * TILE_BYTES, X_BLOCK_BYTES = BLOCK_M * 128;
constexpr unsigned X = K_BLOCKS * W_BLOCK_BYTES, STAGE_BYTES = X + K_BLOCKS * X_BLOCK_BYTES;
constexpr unsigned STAGED = STAGES * STAGE_BYTES, FULL = STAGED + 2 * BLOCK_N * BLOCK_M, EMPTY = FULL + 8 * STAGES;
using Pipe = Pipeline<STAGES, FULL, EMPTY>;
static_assert(EMPTY + 8 * STAGES <= 227 * 1024, "too much shared memory");
constexpr int INITIALISED = 1, X_READY = 2;  // named barriers
constexpr int N_TILES = BLOCK_M / 8;
constexpr int TILES = WARPS * N_TILES, TILE_LANES = 32 * WARPS, PART_LANES = TILE_LANES * N_TILES;
// Partial sums of others that a lane has in flight: as many as four warpgroups' registers hold.
constexpr int FEW_SHARERS = 3, AT_ONCE = N_TILES > 8 && CONSUMERS == 4 ? 4 : 8;
constexpr int BATCH = N_TILES % 4 ? N_TILES : 4;  // tiles of another, of so many tokens at once

// A lane's part of 8 tokens of an iteration's x: 8 k of each k block, of tokens r and r + 4. Tokens past M repeat the last one,
// and their sums are not written. k past K is zero.
struct XPart {
    uint4 v[K_BLOCKS][2];
};
struct XLane {
    const unsigned char* source[2];
    unsigned to[2][4];
    int at, k;
    // Row r of 8 at 128 r, piece p (16 bytes) of it at p ^ r; word t of piece p is k = 16 t + 2 p + {0, 1}.
    DEVICE XLane(const unsigned char* x, int first_token, int m, int k_) : at(threadIdx.x % 8 * 8), k(k_) {
        const int lane = threadIdx.x % 32, t = lane % 8 / 2, h = lane % 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = lane / 8 + 4 * half;
            source[half] = x + 2 * (static_cast<size_t>(min(first_token + row, m - 1)) * k + at);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                to[half][i] = opaque(128 * (first_token + row) + 4 * t + 16 * ((4 * h + i) ^ row));
            }
        }
    }
    DEVICE void load(XPart& part, int iter) const {
        const int first = K_BLOCKS * 64 * iter;
        const unsigned char* const there[2] = {source[0] + 2 * first, source[1] + 2 * first};
        if (first + K_BLOCKS * 64 <= k) {
#pragma unroll
            for (int c = 0; c < K_BLOCKS; c++) {
                part.v[c][0] = ldg128(there[0] + 128 * c), part.v[c][1] = ldg128(there[1] + 128 * c);
            }
            return;
        }
#pragma unroll
        for (int c = 0; c < K_BLOCKS; c++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                part.v[c][half] = uint4{0, 0, 0, 0};
                if (first + 64 * c + at < k) part.v[c][half] = ldg128(there[half] + 128 * c);
            }
        }
    }
    DEVICE void store(const XPart& part, unsigned stage) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned there = stage + to[half][i];
#pragma unroll
                for (int c = 0; c < K_BLOCKS; c++) {
                    const uint4& v = part.v[c][half];
                    sts32(there + X + c * X_BLOCK_BYTES, i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w);
                }
            }
        }
    }
};

struct Sharers : StreamKSharers {
    using StreamKSharers::StreamKSharers;
    // Where a CTA leaves its sums.
    DEVICE int slot(int of, int workers) const { return PART_LANES * place(of, workers); }
};

// x: [m, k] 16-bit. w_map: row tiles in tiles.py's order, as below. y: [m, n] 16-bit.
// parts: [2 CTAs, 256 * BLOCK_M], ABSENT between launches. iters: of a block. each, more: every CTA has
// `each` iterations, the first `more` of them one more.
//
// NATURAL: x_map: x, boxes of 64 k by BLOCK_M / CLUSTER tokens. w_map: row tiles [tiles of 16 rows, tiles of 64 k, 72
// words of 8 bytes], boxes of 2 tiles of k by WARPS row tiles. A worker is a cluster, a block CLUSTER * 256 rows; parts:
// [CLUSTER, 2 workers, 256 * BLOCK_M].
#if NATURAL
#if CLUSTER == 2
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    KERNEL(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* tensor_scale,
           unsigned short* y, float4* parts, int m, int n, int iters, int each, int more) {
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL(const unsigned char* x, const __grid_constant__ TensorMap w_map, const float* tensor_scale,
           unsigned short* y, float4* parts, int m, int n, int k, int iters, int each, int more) {
#endif
    DYNAMIC_SHARED(shared);
    const unsigned base = shared_address(shared);
    const Pipe pipeline{base};
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32, rank = CLUSTER == 2 ? cluster_rank() : 0;
    const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
    const StreamKPartition partition{each, more};
    const int line_begin = partition.begin(worker), first_iter = line_begin % iters;
    const unsigned count = partition.begin(worker + 1) - line_begin;

#if NATURAL
    if (threadIdx.x == 32 * WARPS) {
        pipeline.init(1, WARPS * CLUSTER);  // a stage is empty when the warps of both CTAs have read it
        mbarrier_init_fence();
        fence_proxy_async_shared();
    }
    __syncwarp();
    if constexpr (CLUSTER == 2) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    if (warp >= WARPS) {
        warpgroup_reg_dealloc<CONSUMERS == 4 ? 32 : 56>();
        if (threadIdx.x == 32 * WARPS) {
            launch_dependent_grids();
            const unsigned long long policy = evict_first_policy();
            int block = line_begin / iters, iter = first_iter;
            for (unsigned at = 0; at < count; at++) {
                const unsigned stage = at % STAGES, to = base + stage * STAGE_BYTES, full = pipeline.full(stage);
                pipeline.producer_acquire(Pipe::State::of(at));
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
                tma_load_words(to, &w_map, 72 * K_BLOCKS * iter, WARPS * (CLUSTER * block + rank), full, policy);
                // x: weights wait for nobody, no other kernel has written them.
                if (at == 0) wait_on_dependent_grids();
#pragma unroll
                for (int c = 0; c < K_BLOCKS; c++) {
                    const int column = 64 * (K_BLOCKS * iter + c);
                    const unsigned x_to = to + X + c * X_BLOCK_BYTES + rank * (X_BLOCK_BYTES / CLUSTER);
                    if constexpr (CLUSTER == 2) {
                        tma_load_2d_multicast(x_to, &x_map, column, rank * (BLOCK_M / 2), full);
                    } else {
                        tma_load_2d(x_to, &x_map, column, 0, full);
                    }
                }
                if (++iter == iters) iter = 0, block++;
            }
        }
        if constexpr (CLUSTER == 2) {
            __syncwarp();
            cluster_sync();  // the other CTA still sends here
        }
        return;
    }
    warpgroup_reg_alloc<CONSUMERS == 4 ? 112 : 224>();
    wait_on_dependent_grids();  // they may still read y's and the sums' old values
#else
    if (warp >= WARPS) {
        const int tokens_at = 8 * (warp - WARPS);
        const bool producer = warp == WARPS && lane == 0;
        unsigned long long policy = 0;
        unsigned copied = 0;
        int w_block = line_begin / iters, w_iter = first_iter;
        const auto load_weights = [&]() {
            const unsigned stage = copied % STAGES, full = pipeline.full(stage);
            mbarrier_arrive_expect_tx(full, X);
            tma_load_words(base + stage * STAGE_BYTES, &w_map, 72 * K_BLOCKS * w_iter, WARPS * w_block, full, policy);
            if (++w_iter == iters) w_iter = 0, w_block++;
            copied++;
        };
        if (producer) {
            pipeline.init(1 + X_WARPS, WARPS);
            mbarrier_init_fence();
            fence_proxy_async_shared();
            launch_dependent_grids();
            policy = evict_first_policy();  // the weights wait for nobody: no other kernel has written them
            while (copied < min(W_BEFORE_X, int(count))) load_weights();
        }
        __syncwarp();
        named_barrier_sync(INITIALISED, 32 * X_WARPS);
        if (warp == WARPS && lane < FIRST_X * X_WARPS) mbarrier_arrive(pipeline.full(lane / X_WARPS));
        wait_on_dependent_grids();
        const XLane mine(x, tokens_at, m, k);
        XPart parts_of_x[X_IN_FLIGHT];
        unsigned loaded = FIRST_X;
        int k_at = (first_iter + FIRST_X) % iters;
        const auto load_next = [&](XPart& into) {
            if (loaded < count) mine.load(into, k_at);
            loaded++;
            if (++k_at == iters) k_at = 0;
        };
#pragma unroll
        for (int i = 0; i < X_IN_FLIGHT; i++) load_next(parts_of_x[i]);
        if (warp == WARPS) {
            named_barrier_sync_unaligned(X_READY, 32 * (WARPS + 1));
            if (producer) {
                while (copied < min(STAGES, int(count))) load_weights();
            }
            __syncwarp();
        }
        if (count > STAGES) mbarrier_wait(pipeline.empty(STAGES - 1), 0);  // the release at iteration 0
        for (unsigned at = FIRST_X; at < count;) {
#pragma unroll
            for (int i = 0; i < X_IN_FLIGHT; i++) {
                if (at == count) break;
                const unsigned stage = at % STAGES;
                if (at >= STAGES) {
                    mbarrier_wait(pipeline.empty(stage), (at + 1) / STAGES + 1 & 1);
                    if (producer) load_weights();
                }
                mine.store(parts_of_x[i], base + stage * STAGE_BYTES);
                fence_proxy_async_shared();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(pipeline.full(stage));
                at++;
                load_next(parts_of_x[i]);
            }
        }
        return;
    }

    {
        XPart part;
        const int iter = warp / X_WARPS;
        const bool loads_x = iter < min(FIRST_X, int(count));
        wait_on_dependent_grids();
        if (loads_x) {
            const XLane lane_of_x(x, warp % X_WARPS * 8, m, k);
            lane_of_x.load(part, (first_iter + iter) % iters);
            lane_of_x.store(part, base + iter * STAGE_BYTES);
        }
        fence_proxy_async_shared();
        __syncwarp();
        named_barrier_sync_unaligned(X_READY, 32 * (WARPS + 1));
    }
#endif
    const Pipe ring{warp_uniform(base)};  // told to be uniform, it is not rematerialised at each use
    const unsigned row_tile = ring.base + warp * K_BLOCKS * TILE_BYTES;
#if NATURAL
    const unsigned my_codes = kept(row_tile + 16 * lane), my_scales = kept(row_tile + TILE_CODE_BYTES + 8 * (lane / 4));
    const unsigned my_empty = kept(ring.empty(0));
#define RELEASE(stage) mbarrier_arrive(my_empty + 8 * stage)
#else
#define RELEASE(stage) ring.consumer_release(stage)
    const unsigned my_codes = opaque(row_tile + 16 * lane), my_scales = opaque(row_tile + TILE_CODE_BYTES + 2 * lane);
#endif
    const float scale = *tensor_scale * OPERAND_TO_VALUE;  // early: at the end its latency would show
    const bool y_in_sixteens = n % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
    unsigned a[K_BLOCKS][4][4];
    float acc[BLOCK_M / 2];
    const unsigned long long operand_0 = x_descriptor(ring.base + X);
    const auto release = [&](unsigned stage) {
        __syncwarp();
        if constexpr (CLUSTER == 2) {
            if (lane < 2) mbarrier_arrive_cluster(map_to_rank(ring.empty(stage), lane));
        } else {
            if (lane == 0) RELEASE(stage);
        }
    };

#pragma unroll 1
    for (unsigned at = 0; at < count;) {
        const int block = (line_begin + at) / iters, block_begin = block * iters - line_begin;
        const unsigned end = min(static_cast<int>(count), block_begin + iters);
        const Sharers sharers(partition, worker, line_begin + block_begin, iters);
#pragma unroll
        for (int e = 0; e < BLOCK_M / 2; e++) acc[e] = 0;
        pin(acc);
#pragma unroll 1
        for (; at < end; at++) {
            const unsigned stage = at % STAGES, stage_at = stage * STAGE_BYTES;
            const unsigned long long operand = operand_0 + stage * (STAGE_BYTES / 16);
            ring.consumer_wait(Pipe::State::of(at));
#if NATURAL
            Packed packed[K_BLOCKS];
#pragma unroll
            for (int c = 0; c < K_BLOCKS; c++) {
                packed[c].load(my_codes + stage_at + c * TILE_BYTES, my_scales + stage_at + c * TILE_BYTES);
            }
#else
            uint4 codes[K_BLOCKS];
            unsigned scales[K_BLOCKS];
#pragma unroll
            for (int c = 0; c < K_BLOCKS; c++) {
                codes[c] = lds128(my_codes + stage_at + c * TILE_BYTES);
                scales[c] = lds16(my_scales + stage_at + c * TILE_BYTES);
            }
#endif
#pragma unroll
            for (int c = 0; c < K_BLOCKS; c++) {
#if NATURAL
                decode_fragments<X_BF16>(packed[c], a[c]);
#else
                tile_fragments_by_half<X_BF16>(codes[c], scales[c], a[c]);
#endif
                pin(a[c]);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    wgmma_rs<BLOCK_M, X_BF16>(acc, a[c][j], operand + c * (X_BLOCK_BYTES / 16) + 2 * j);
                }
                wgmma_commit();
                wgmma_wait<1>();
                // Whose wgmmas are done; at 0 of one that had none, which a producer that waits for each must not see.
                if (c == 0 && (!NATURAL || at > 0)) release((at - 1) % STAGES);
            }
        }
        wgmma_wait<0>();
        pin(acc);

        // Not before: what follows from the lane would take registers in the loop.
        const int late_lane = opaque(lane);
        // A lane has two tokens of rows g and g + 8, y wants a token's 16 rows side by side: through shared memory, half a
        // warp writes 16 bytes each.
        const unsigned staged = base + STAGED + 256 * N_TILES * warp;
        const auto stage_sums = [&](int e, const float4& v) {
            const unsigned to = staged + 256 * e + 32 * (late_lane % 8) + 16 * (late_lane / 8 % 2);
            if constexpr (GATED) {  // eight features, twice
                const unsigned both =
                    pack_pair<X_BF16>(silu_times(v.x * scale, v.z * scale), silu_times(v.y * scale, v.w * scale));
                stmatrix_x2_trans(to, both, both);
            } else {
                stmatrix_x2_trans(to, pack_pair<X_BF16>(v.x * scale, v.y * scale),
                                  pack_pair<X_BF16>(v.z * scale, v.w * scale));
            }
        };
        const auto write = [&](int e) {
            const int token = 8 * e + late_lane / 2, first_row = BLOCK_N * (CLUSTER * block + rank) + 16 * warp;
            const int row = GATED ? first_row / 2 + n * (late_lane % 2) : first_row + late_lane % 2 * 8;
            if (late_lane >= 16 || token >= m || row >= n) return;
            unsigned short* const to = y + static_cast<size_t>(token) * n + row;
            const unsigned source = staged + 256 * e + 16 * late_lane;
            if (y_in_sixteens) {
                *reinterpret_cast<uint4*>(to) = lds128(source);
            } else {
                for (int i = 0; i < min(8, n - row); i++) to[i] = static_cast<unsigned short>(lds16(source + 2 * i));
            }
        };
        float4* const slots = parts + (CLUSTER == 2 ? 2 * workers * PART_LANES * rank : 0) + 32 * warp + late_lane;
        float4* const own_slot = slots + sharers.slot(worker, workers);
        const int first = sharers.first, last = sharers.last;
        const float4 absent = absent_float4();
        bool owned[N_TILES];
        float4 sum[N_TILES];
#pragma unroll
        for (int e = 0; e < N_TILES; e++) {
            owned[e] = sharers.owner(WARPS * e + warp, TILES) == worker;  // 8 tokens of a warp's rows
            sum[e] = float4{acc[4 * e], acc[4 * e + 1], acc[4 * e + 2], acc[4 * e + 3]};
            if (!owned[e]) st_relaxed(own_slot + TILE_LANES * e, sum[e]);
        }
        if (worker >= sharers.owners) continue;
        if (last - first <= FEW_SHARERS) {  // a CTA has many tiles of few others: all of one's at once
#pragma unroll
            for (int from = 0; from < N_TILES; from += BATCH) {
#pragma unroll 1
                for (int of = first; of < last; of++) {
                    if (of == worker) continue;
                    const float4* const theirs = slots + sharers.slot(of, workers);
                    float4 v[BATCH] = {};
                    bool waiting;
                    do {
                        waiting = false;
#pragma unroll
                        for (int e = 0; e < BATCH; e++) {
                            if (owned[from + e]) v[e] = ld_relaxed(theirs + TILE_LANES * (from + e));
                        }
#pragma unroll
                        for (int e = 0; e < BATCH; e++) waiting |= is_absent(v[e]);
                    } while (warp_any(waiting));
#pragma unroll
                    for (int e = 0; e < BATCH; e++) sum[from + e] = sum[from + e] + v[e];
                }
            }
#pragma unroll
            for (int e = 0; e < N_TILES; e++) {
                if (owned[e]) stage_sums(e, sum[e]);
            }
            __syncwarp();
#pragma unroll
            for (int e = 0; e < N_TILES; e++) {
                if (owned[e]) write(e);
            }
            // Last, for nobody waits for it.
#pragma unroll 1
            for (int of = first; of < last; of++) {
                if (of == worker) continue;
                float4* const theirs = slots + sharers.slot(of, workers);
#pragma unroll
                for (int e = 0; e < N_TILES; e++) {
                    if (owned[e]) st_relaxed(theirs + TILE_LANES * e, absent);
                }
            }
            continue;
        }
#pragma unroll
        for (int e = 0; e < N_TILES; e++) {  // one or two tiles of many others: a tile of AT_ONCE at once
            if (!owned[e]) continue;
            float4* const others = slots + TILE_LANES * e;
#pragma unroll 1
            for (int of = first; of < last; of += AT_ONCE) {
                float4 v[AT_ONCE] = {};
                bool waiting;
                do {
                    waiting = false;
#pragma unroll
                    for (int i = 0; i < AT_ONCE; i++) {
                        if (of + i < last && of + i != worker)
                            v[i] = ld_relaxed(others + sharers.slot(of + i, workers));
                    }
#pragma unroll
                    for (int i = 0; i < AT_ONCE; i++) waiting |= is_absent(v[i]);
                } while (warp_any(waiting));
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) sum[e] = sum[e] + v[i];
            }
            stage_sums(e, sum[e]);
            __syncwarp();
            write(e);
#pragma unroll 1
            for (int of = first; of < last; of++) {
                if (of != worker) st_relaxed(others + sharers.slot(of, workers), absent);
            }
        }
    }
    if constexpr (CLUSTER == 2) {
        __syncwarp();
        cluster_sync();
    }
}
