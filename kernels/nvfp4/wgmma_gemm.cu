// NVFP4 linear for many tokens: y[M, N] = x[M, K] w^T on wgmma with swapped operands, y^T = w x^T.
//
// Weights are the A operand, made in registers from row_tiles.py's tiles; x is B, in shared memory. A CTA makes
// BLOCK_N = 128 weight rows by BLOCK_M tokens:
//
//   two producer threads     per stage (64 k): eight row tiles, and x, each by a tensor map (TMA). In a cluster of two,
//                            which make 256 rows by the same tokens, each CTA loads half of x for both (multicast)
//   two consumer warpgroups  64 rows each: decode 64 k into one of two sets of fragments while the wgmmas of the other
//                            set are in flight
//   two more warps           raise the flag of a warpgroup's partial sums: the device-wide fence that this takes would
//                            hold up a warpgroup
//
// The warpgroups meet only in the barriers of stages. The epilogue of a tile is a TMA store from shared memory of its
// own, in flight with the next tile's products.
//
// A worker (a CTA or a cluster) makes `waves` whole tiles, all workers side by side at the same k, so that what they
// read stays in L2. The tiles left are stream-K (sm90/scheduler.cuh) in iterations of 128 k. A worker that does not own
// the tile leaves float32 sums in `parts` (a place for each worker, which has at most one such k slice and does it
// first) and raises a flag; the owner adds them in the order of k. So the same bits on every run, one launch, flags back
// down at the end. Worker w runs on the grid's CTAs from the end: an owner waits only for CTAs of lower index.
//
// SPLIT_K: few tiles, one for each cluster of two CTAs, which have half of its k each (stream-K with two workers a
// tile). A CTA owns the rows of one of its warpgroups; the other warpgroup's sums go into the other CTA's shared memory,
// where results go later. x is not shared then.
//
// GATED: weight rows are eight of a gate and eight of an up projection in turn, so a thread has both of a feature, and
// y[M, N] = SiLU(gate) * up of 2 N weight rows.
//
// Macros: KERNEL (name), X_BF16 0/1, BLOCK_M 64/128/176/256, CLUSTER 1/2 (CTAs that share x; 1 where SPLIT_K), SPLIT_K
// 0/1, STAGES (of BLOCK_K = 64), GATED 0/1 (0 where it is not given).
#ifndef GATED
#define GATED 0
#endif
#include "gemm_operand.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/scheduler.cuh"

constexpr int BLOCK_N = 128, BLOCK_K = 64;
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int K_BLOCKS = 2;       // of a stream-K iteration: one for each set of fragments
constexpr int ACC = BLOCK_M / 2;  // accumulators of a thread
constexpr unsigned X_BYTES = BLOCK_M * 128, W_BYTES = 8 * TILE_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
// Results of a warpgroup: OUT_ROWS of each token, in rows of 128 bytes with the 128-byte swizzle, or of 64 bytes with
// the 64-byte one, which leave half of the room.
constexpr int OUT_ROWS = GATED ? 32 : 64;
constexpr unsigned OUT_BYTES = BLOCK_M * 128;

// Shared memory: x of all stages, results, weights of all stages, barriers.
constexpr unsigned X = 0, OUT = STAGES * X_BYTES, W = OUT + CONSUMERS * OUT_BYTES;
constexpr unsigned FULL = W + STAGES * W_BYTES, EMPTY = FULL + 8 * STAGES, PEER_SUMS = EMPTY + 8 * STAGES;
constexpr unsigned SHARED_BYTES = PEER_SUMS + 8 * SPLIT_K, PEER_SUMS_BYTES = 512 * ACC;  // of the other CTA
static_assert(!SPLIT_K || CLUSTER == 1, "the CTAs of a split tile have different k of x");
static_assert(PEER_SUMS_BYTES <= CONSUMERS * OUT_BYTES, "sums come to where results go later");
using Pipe = Pipeline<STAGES, FULL, EMPTY>;
static_assert(SHARED_BYTES <= 227 * 1024, "too much shared memory");
static_assert(STAGES >= 3, "a stage is loaded while the two before it are in use");
static_assert(X_BYTES / CLUSTER % 1024 == 0, "a half of x must keep the swizzle's phase");

constexpr int PARTIAL_STORED = 1, EPILOGUE = 3;  // named barriers, one for each warpgroup

constexpr int PART_FLOATS = 128 * ACC;  // of one warpgroup

// x_map: x [m, k], boxes of 64 k by BLOCK_M / CLUSTER tokens. y_map: y, boxes of OUT_ROWS by BLOCK_M tokens; not looked
// at where y has no such map (N no multiple of 8, or not on 16 bytes). w: row tiles [tiles of 16 rows, tiles of 64 k, 72
// words of 8 bytes], boxes of a tile of k by 8 row tiles; zeros past N and K. y: [m, n] 16-bit. parts: float32
// [workers * CLUSTER, 2, PART_FLOATS]. flags: zeros, [workers * CLUSTER, 2]. iters: of a tile, K_BLOCKS * 64 k each.
// n_tiles of CLUSTER * BLOCK_N weight rows, m_tiles of BLOCK_M tokens. waves: whole tiles per worker. SPLIT_K: waves 0,
// iters even, two workers for each tile.
#if CLUSTER == 2 || SPLIT_K
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    KERNEL(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
           const __grid_constant__ TensorMap w, const float* tensor_scale, unsigned short* y, float* parts,
           unsigned* flags, int m, int n, int iters, int n_tiles, int m_tiles, int waves) {
    DYNAMIC_SHARED(shared);
    const unsigned base = shared_address(shared);
    const int group = warp_uniform(threadIdx.x / 128);
    const int rank = CLUSTER == 2 ? cluster_rank() : 0;
    const int workers = gridDim.x / CLUSTER, worker = workers - 1 - blockIdx.x / CLUSTER;
    const int tiles = n_tiles * m_tiles, shared_iters = max(0, tiles - waves * workers) * iters;
    const auto row_of = [&](int tile) { return (tile / m_tiles * CLUSTER + rank) * BLOCK_N; };  // the CTA's first
    const auto token_of = [&](int tile) { return tile % m_tiles * BLOCK_M; };
    const StreamKPartition partition = stream_k_partition(shared_iters, workers);
    const Pipe pipeline{base};
    if (threadIdx.x == 128 * CONSUMERS) {
        pipeline.init(1, 8 * CLUSTER);  // the warps of two warpgroups of each CTA release a stage
        if constexpr (SPLIT_K) mbarrier_init(base + PEER_SUMS, 1);
        mbarrier_init_fence();
        fence_proxy_async_shared();
        if constexpr (SPLIT_K) mbarrier_arrive_expect_tx(base + PEER_SUMS, PEER_SUMS_BYTES);
    }
    __syncwarp();
    if constexpr (CLUSTER == 2 || SPLIT_K) cluster_arrive();
    if constexpr (CLUSTER == 1) __syncthreads();

    if (group == CONSUMERS) {
        warpgroup_reg_dealloc<56>();
        const int warp = warp_uniform(threadIdx.x % 128 / 32), flag = warp - 1;
        const bool first_lane = threadIdx.x % 32 == 0;
        if (warp == 0 && first_lane) {  // weights wait for nobody: no other kernel has written them
            launch_dependent_grids();
            const bool read_once = m_tiles == 1;
            Pipe::State state;
            for (StreamKScheduler work(partition, worker, workers, tiles, iters, waves); work.valid(); work.next()) {
                const int row_tile = row_of(work.tile) / 16;
                for (int k = work.iter_begin * K_BLOCKS; k < work.iter_end * K_BLOCKS; k++, state.advance()) {
                    const unsigned full = pipeline.full(state.stage), to = base + W + state.stage * W_BYTES;
                    pipeline.producer_acquire(state);
                    pipeline.producer_expect(state, STAGE_BYTES);
                    if (read_once) {
                        tma_load_words(to, &w, TILE_BYTES / 8 * k, row_tile, full, evict_first_policy());
                    } else {
                        tma_load_words(to, &w, TILE_BYTES / 8 * k, row_tile, full);
                    }
                }
            }
        }
        __syncwarp();
        if constexpr (CLUSTER == 2) cluster_wait();  // x goes into the other CTA
        if (warp == 3 && first_lane) {
            wait_on_dependent_grids();
            Pipe::State state;
            for (StreamKScheduler work(partition, worker, workers, tiles, iters, waves); work.valid(); work.next()) {
                const int token = token_of(work.tile) + rank * (BLOCK_M / CLUSTER);
                for (int k = work.iter_begin * K_BLOCKS; k < work.iter_end * K_BLOCKS; k++, state.advance()) {
                    pipeline.producer_acquire(state);
                    const unsigned to = base + X + state.stage * X_BYTES + rank * (X_BYTES / CLUSTER);
                    if constexpr (CLUSTER == 2) {
                        tma_load_2d_multicast(to, &x_map, BLOCK_K * k, token, pipeline.full(state.stage));
                    } else {
                        tma_load_2d(to, &x_map, BLOCK_K * k, token, pipeline.full(state.stage));
                    }
                }
            }
        } else if (!SPLIT_K && (flag == 0 || flag == 1) && partition.begin(worker) % iters != 0 &&
                   partition.begin(worker) < partition.begin(worker + 1)) {
            named_barrier_sync(PARTIAL_STORED + flag, 128 + 32);
            if (first_lane) flag_raise(flags + (worker * CLUSTER + rank) * 2 + flag);
        }
        if constexpr (SPLIT_K) {
            __syncwarp();
            cluster_wait();
        }
    } else {
        if constexpr (CLUSTER == 2) cluster_wait();
        warpgroup_reg_alloc<224>();
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        unsigned a[2][4][4];
        float acc[ACC];
        Pipe::State state;
        const float scale = *tensor_scale * OPERAND_TO_VALUE;  // early: at the end its latency would show
        wait_on_dependent_grids();                             // they may still read y's and the sums' old values
        // This lane's codes and scales in stage 0.
        const unsigned row_tile = base + W + (4 * group + warp) * TILE_BYTES;
        const unsigned my_codes = opaque(row_tile + 16 * lane);
        const unsigned my_scales = opaque(row_tile + TILE_CODE_BYTES + 8 * (lane / 4));

        // Where this lane's 16 bytes of results go: token 8 (lane / 16) + lane % 8, rows 16 warp + 8 (lane / 8 % 2) and
        // on; where GATED token `lane`, rows 8 warp and on.
        const unsigned plain_place = 128 * (8 * (lane / 16) + lane % 8) + 16 * ((2 * warp + lane / 8 % 2) ^ lane % 8);
        const unsigned gated_place = 64 * lane + 16 * (warp ^ lane / 2 % 4);
        const unsigned corner = base + OUT + group * OUT_BYTES + (GATED ? gated_place : plain_place);
        const bool y_has_map = n % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;

        // After the wgmmas of the stage, which have taken what was loaded from it: no need of once_loaded.
        const auto release = [&](int stage) {
            __syncwarp();
            if (lane < CLUSTER) {
                if constexpr (CLUSTER == 2) {
                    mbarrier_arrive_cluster(map_to_rank(pipeline.empty(stage), lane));
                } else {
                    pipeline.consumer_release(stage);
                }
            }
        };

        for (StreamKScheduler work(partition, worker, workers, tiles, iters, waves); work.valid(); work.next()) {
#pragma unroll
            for (int i = 0; i < ACC; i++) acc[i] = 0;
            pin(acc);
            int before = -1;
#pragma unroll 1
            for (int iter = work.iter_begin; iter < work.iter_end; iter++) {
#pragma unroll
                for (int c = 0; c < K_BLOCKS; c++) {
                    const int stage = state.stage;
                    const unsigned long long x = x_descriptor(base + X + warp_uniform(stage) * X_BYTES);
                    Packed packed;
                    pipeline.consumer_wait(state);
                    packed.load(my_codes + stage * W_BYTES, my_scales + stage * W_BYTES);
                    state.advance();
                    decode_fragments<X_BF16>(packed, a[c]);
                    pin(a[c]);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; j++) wgmma_rs<BLOCK_M, X_BF16>(acc, a[c][j], x + 2 * j);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (before >= 0) release(before);
                    before = stage;
                }
            }
            wgmma_wait<0>();
            pin(acc);
            release(before);

            if constexpr (SPLIT_K) {
                const int own = cluster_rank();
                const unsigned at = base + OUT + 16 * thread;
                cluster_wait();  // the other CTA's barrier is made
                if (group != own) {
                    const unsigned there = map_to_rank(at, 1 - own), barrier = map_to_rank(base + PEER_SUMS, 1 - own);
#pragma unroll
                    for (int i = 0; i < ACC; i += 4) {
                        st_async(there + 512 * i, float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]}, barrier);
                    }
                    break;
                }
                mbarrier_wait_cluster(base + PEER_SUMS, 0);
#pragma unroll
                for (int i = 0; i < ACC; i += 4) {
                    const float4 v = *reinterpret_cast<const float4*>(shared + (at - base) + 512 * i);
                    acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
                }
            }

            if (!SPLIT_K && !work.owns_tile()) {
                const size_t place = (worker * CLUSTER + rank) * 2 + group;
                float4* const partial = reinterpret_cast<float4*>(parts + place * PART_FLOATS) + thread;
#pragma unroll
                for (int i = 0; i < ACC; i += 4) partial[32 * i] = float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
                named_barrier_arrive(PARTIAL_STORED + group, 128 + 32);
            } else {
                // The other workers of the tile: a thread for each one's flag, then their sums without a stop.
                const int peers = SPLIT_K ? 0 : work.peers(partition);
                for (int i = thread; i < peers; i += 128)
                    flag_take(flags + ((worker + 1 + i) * CLUSTER + rank) * 2 + group);
                if (peers > 0) named_barrier_sync(EPILOGUE + group, 128);
#pragma unroll 1
                for (int peer = worker + 1; peer <= worker + peers; peer++) {
                    const size_t place = (peer * CLUSTER + rank) * 2 + group;
                    const float4* const partial = reinterpret_cast<const float4*>(parts + place * PART_FLOATS) + thread;
#pragma unroll
                    for (int i = 0; i < ACC; i += 4) {
                        const float4 v = ldg_cg_float4(partial + 32 * i);
                        acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
                    }
                }
                // Through shared memory: a lane has two tokens of two weight rows, y wants a token's rows side by side.
                const int row = row_of(work.tile) / (1 + GATED) + group * OUT_ROWS, token = token_of(work.tile);
                if (thread == 0) tma_store_wait_read<0>();  // the tile before
                named_barrier_sync(EPILOGUE + group, 128);
                constexpr int TOKENS = GATED ? 32 : 16;  // of four matrices
#pragma unroll
                for (int at = 0; at < BLOCK_M; at += TOKENS) {
                    const int i = min(at, BLOCK_M - TOKENS);  // of 176 tokens the last 32 have 16 once more
                    const float* v = &acc[i / 2];
                    unsigned pairs[4];
#pragma unroll
                    for (int p = 0; p < 4; p++) {
                        if constexpr (GATED) {
                            pairs[p] = pack_pair<X_BF16>(silu_times(v[4 * p] * scale, v[4 * p + 2] * scale),
                                                         silu_times(v[4 * p + 1] * scale, v[4 * p + 3] * scale));
                        } else {
                            pairs[p] = pack_pair<X_BF16>(v[2 * p] * scale, v[2 * p + 1] * scale);
                        }
                    }
                    stmatrix_x4_trans(corner + i * 2 * OUT_ROWS, pairs[0], pairs[1], pairs[2], pairs[3]);
                }
                fence_proxy_async_shared();
                named_barrier_sync(EPILOGUE + group, 128);
                if (y_has_map) {
                    if (thread == 0) tma_store_2d(&y_map, row, token, base + OUT + group * OUT_BYTES);
                } else {
                    for (int i = thread; i < min(BLOCK_M, m - token) * OUT_ROWS; i += 128) {
                        const int t = i / OUT_ROWS, at = i % OUT_ROWS;
                        const unsigned staged =
                            OUT + group * OUT_BYTES + 2 * OUT_ROWS * t + (2 * at ^ 16 * (GATED ? t / 2 % 4 : t % 8));
                        if (row + at < n) {
                            y[static_cast<size_t>(token + t) * n + row + at] =
                                *reinterpret_cast<const unsigned short*>(shared + staged);
                        }
                    }
                }
            }
        }
        if (thread == 0) tma_store_wait_read<0>();
    }
    if constexpr (CLUSTER == 2) {
        __syncwarp();
        cluster_sync();  // the other CTA still sends here
    }
}
