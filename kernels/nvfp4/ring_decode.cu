// NVFP4 linear for few tokens (M <= 32): y[M, N] = x[M, K] w^T at the speed of reading w.
//
// Weights are the A operand of mma.sync.m16n8k16, 16 rows by 16 k; x is the B operand, 8 tokens wide, and stays in
// registers. The unit of output is a row tile: 16 weight rows by all of K and all tokens.
//
//   WARPS math warps       take a row tile together: tile c of a warp is tile c * WARPS + warp along its K; each leaves
//                          16 x BLOCK_M partial sums in a sum stage
//   producer warp          one bulk copy per stage, STAGE_TILES * WARPS tiles (contiguous in tiles.py's layout), STAGES
//                          - 1 of them in flight
//   REDUCERS reducer warps add the partial sums in a fixed order, each those of its columns; scale, round, write y
//
// Two pipelines: of weights, between the producer and the math warps, and of partial sums, between the math warps and
// the reducers.
//
// CLUSTER > 1: split-K over the CTAs of a cluster, so each holds only its part of x and takes small stages of many row
// tiles. They take turns in collecting the sums of a row tile, and collect one when their next turn comes, so that none
// waits for another. All of a CTA's share of x must fit (K_TILES tiles of K per warp). No atomics and no workspace in
// global memory: the same bits on every run, safe in a CUDA graph.
//
// Macros: KERNEL (name), X_BF16 0/1 (dtype of x and y), BLOCK_M 8/16/24/32 (tokens), K_TILES (of 64 k per warp), WARPS,
// REDUCERS, CLUSTER 1/2/4, STAGE_TILES (tiles per warp and stage), STAGES, SUM_STAGES (row tiles that wait for their
// sum), RAGGED_TILES (tiles that some warp's share lacks of K_TILES), REGISTERS (a thread's in the math warps, by
// setmaxnreg; 0: all warps have as many), EVICT_FIRST 0/1 (the weights' L2 policy), PDL 0/1 (a programmatic dependent
// launch: this kernel starts while the one ahead ends; it fetches weights, which no kernel writes, and reads x and
// writes y when that one has ended), NATURAL 0/1 (the one layout, row_tiles.py), GATED 0/1 (weight rows are eight of a
// gate and eight of an up projection in turn: y[M, N / 2] = SiLU(gate) * up).
#ifndef NATURAL
#define NATURAL 0
#endif
#ifndef GATED
#define GATED 0
#endif
#include "gemm_operand.cuh"
#include "sm90/pipeline.cuh"

constexpr int N_TILES = BLOCK_M / 8;
constexpr int CHAINS =
    N_TILES == 1 ? 2 : 1;                // independent accumulators, so that an mma need not wait for the one before
constexpr int OWN = N_TILES / REDUCERS;  // columns of a reducer warp, in eights
static_assert(OWN * REDUCERS == N_TILES, "reducer warps share the columns evenly");
constexpr int PRODUCER = WARPS, REDUCER = PRODUCER + 1;
// setmaxnreg is for whole warpgroups: the producer and the reducers are one.
constexpr bool UNEVEN = REGISTERS > 0;
static_assert(!UNEVEN || (WARPS % 4 == 0 && REDUCERS <= 3), "registers are given to warpgroups");
constexpr int THREADS = 32 * (UNEVEN ? WARPS + 4 : REDUCER + REDUCERS);
constexpr int SERVICE_REGISTERS = 56;
constexpr int EVERYONE = 1;                                             // a named barrier
constexpr int TILE_STAGES = (K_TILES + STAGE_TILES - 1) / STAGE_TILES;  // stages of a row tile
constexpr int ALL_STAGE_TILES = STAGE_TILES * WARPS;
// Bulk copies in flight. More would only queue, and later loads behind them.
constexpr int IN_FLIGHT = STAGES > 1 ? STAGES - 1 : 1;
// A stage starts on 128 bytes, as its source mostly does: a copy between places that differ modulo 128 asks L2 for
// more.
constexpr unsigned STAGE_BYTES = (ALL_STAGE_TILES * TILE_BYTES + 127) / 128 * 128;
constexpr unsigned SUMS_BYTES = N_TILES * 32 * 16;  // of one warp
constexpr unsigned SUM_STAGE_BYTES = WARPS * SUMS_BYTES;

// Shared memory: barriers, then places, then sum stages, then the stages.
// A place holds the sums of a row tile that this CTA collects, one per CTA of the cluster. Three places suffice: CTA r
// sends for row tile s + 3 CLUSTER, into the place of s, only after it has collected one of s + CLUSTER + 1 ..
// s + 2 CLUSTER - 1; the collector of s had sent its own sums of that one after collecting s.
constexpr int PLACES = 3;
constexpr unsigned PLACE_BYTES = CLUSTER > 1 ? CLUSTER * SUMS_BYTES : 0;
constexpr unsigned FULL = 0, EMPTY = FULL + 8 * STAGES, SUMMED = EMPTY + 8 * STAGES, FREE = SUMMED + 8 * SUM_STAGES;
constexpr unsigned ARRIVED = FREE + 8 * SUM_STAGES, PLACE = 1024;
constexpr unsigned PARTS = PLACE + PLACES * PLACE_BYTES, RING = PARTS + SUM_STAGES * SUM_STAGE_BYTES;
static_assert(ARRIVED + 8 * PLACES * REDUCERS <= PLACE, "too many barriers");

using Weights = Pipeline<STAGES, FULL, EMPTY>;
using Sums = Pipeline<SUM_STAGES, SUMMED, FREE>;

// x: [m, k] 16-bit. w: [row tiles of 16, k_tiles of 64 k] tiles. y: [m, n] 16-bit.
#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    KERNEL(const unsigned char* x, const unsigned char* w, const float* tensor_scale, unsigned short* y, int m, int n,
           int k, int k_tiles) {
    DYNAMIC_SHARED(shared);
    const unsigned base = shared_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
    const int row_tiles = ((n + 15) / 16 - worker + workers - 1) / workers;
    const unsigned zero = static_cast<unsigned>(m) >> 31;  // for once_loaded
    const Weights weights{base};
    const Sums partial_sums{base};
    const int share = (k_tiles + CLUSTER - 1) / CLUSTER, first = rank * share,
              mine = max(0, min(share, k_tiles - first));

    // The producer's place in the order of copies.
    int row_tile = 0, part = 0;
    Weights::State to;
    const auto fetch = [&](unsigned long long policy) {
        const int tiles = max(0, min(ALL_STAGE_TILES, mine - part * ALL_STAGE_TILES));
        const unsigned char* source =
            w + ((worker + static_cast<size_t>(row_tile) * workers) * k_tiles + first + part * ALL_STAGE_TILES) *
                    TILE_BYTES;
        const unsigned bytes = tiles * TILE_BYTES, barrier = weights.full(to.stage);
        mbarrier_arrive_expect_tx(barrier, bytes);
        if (tiles > 0) {
            if constexpr (EVICT_FIRST) {
                tma_load_1d(base + RING + to.stage * STAGE_BYTES, source, bytes, barrier, policy);
            } else {
                tma_load_1d(base + RING + to.stage * STAGE_BYTES, source, bytes, barrier);
            }
        }
        to.advance();
        if (++part == TILE_STAGES) part = 0, row_tile++;
    };

    if constexpr (PDL) launch_dependent_grids();
    unsigned long long policy = 0;
    float scale = 0.0f;
    // Issue this load before the weights, as x before all but the first of them: later loads queue behind what is in
    // flight.
    if (warp >= REDUCER) scale = ldg_float(tensor_scale);
    if (warp == PRODUCER && lane == 0) {
        if constexpr (EVICT_FIRST) policy = evict_first_policy();
        weights.init(1, WARPS);
        partial_sums.init(WARPS, REDUCERS);
        for (int i = 0; i < PLACES * REDUCERS; i++) mbarrier_init(base + ARRIVED + 8 * i, 1);
        mbarrier_init_fence();
        fence_proxy_async_shared();
        fetch(policy);
    }
    const auto sync_all = [&]() {
        __syncwarp();
        if constexpr (CLUSTER > 1) {
            cluster_sync();
        } else {
            named_barrier_sync_unaligned(EVERYONE, THREADS);
        }
    };

    if (warp < PRODUCER) {
        if constexpr (UNEVEN) warpgroup_reg_alloc<REGISTERS>();
        unsigned operand[N_TILES][K_TILES][8];
        // The reducers write y behind what these warps read: one wait is enough for both.
        if constexpr (PDL) sync_all(), wait_on_dependent_grids();
#pragma unroll
        for (int c = 0; c < K_TILES; c++) {
            const int tile = c * WARPS + warp, at = (first + tile) * 64 + 16 * t;
#pragma unroll
            for (int i = 0; i < N_TILES; i++) {
                // Columns past M repeat the last token; their sums are not written. k past K is zero.
                const unsigned char* source = x + 2 * (static_cast<size_t>(min(8 * i + g, m - 1)) * k + at);
                const bool inside = tile < mine && at < k;
                const uint4 low = inside ? ldg128(source) : uint4{0, 0, 0, 0};
                const uint4 high = inside ? ldg128(source + 16) : uint4{0, 0, 0, 0};
                unsigned (&o)[8] = operand[i][c];
                o[0] = low.x, o[1] = low.y, o[2] = low.z, o[3] = low.w;
                o[4] = high.x, o[5] = high.y, o[6] = high.z, o[7] = high.w;
                if constexpr (NATURAL) deal_to_quad(o, t);
            }
        }
        if constexpr (!PDL) sync_all();
        Weights::State at;
        int slot = 0, use = 0;  // of the slot
        for (int now = 0; now < row_tiles; now++) {
            float acc[CHAINS][N_TILES][4] = {};
#pragma unroll
            for (int p = 0; p < TILE_STAGES; p++) {
                const unsigned char* stage = shared + RING + at.stage * STAGE_BYTES + warp * TILE_BYTES;
                unsigned loaded = 0;
                weights.consumer_wait(at);
#pragma unroll
                for (int i = 0; i < STAGE_TILES; i++) {
                    const int c = p * STAGE_TILES + i;
                    if (c >= K_TILES || (c >= K_TILES - RAGGED_TILES && c * WARPS + warp >= mine)) break;
                    const unsigned char* tile = stage + i * WARPS * TILE_BYTES;
                    const uint4 codes = *reinterpret_cast<const uint4*>(tile + 16 * lane);
                    unsigned a[4][4];
#if NATURAL
                    const uint2 scales = *reinterpret_cast<const uint2*>(tile + TILE_CODE_BYTES + 8 * g);
                    decode_fragments<X_BF16>(Packed{codes, scales}, a);
#else
                    const unsigned scales = *reinterpret_cast<const unsigned short*>(tile + TILE_CODE_BYTES + 2 * lane);
                    tile_fragments<X_BF16>(codes, scales, a);
#endif
                    loaded = a[3][3];  // of codes and scales of the last tile: a warp's loads come back in order
#pragma unroll
                    for (int j = 0; j < 4; j++) {
#pragma unroll
                        for (int b = 0; b < N_TILES; b++) {
                            mma_16816<X_BF16>(acc[j % CHAINS][b], a[j][0], a[j][1], a[j][2], a[j][3],
                                              operand[b][c][2 * j], operand[b][c][2 * j + 1]);
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(once_loaded(weights.empty(at.stage), loaded, zero));
                at.advance();
            }
            if (use > 0) mbarrier_wait(partial_sums.empty(slot), (use - 1) & 1);
#pragma unroll
            for (int i = 0; i < N_TILES; i++) {
                float4 v{acc[0][i][0], acc[0][i][1], acc[0][i][2], acc[0][i][3]};
                if constexpr (CHAINS == 2) {
                    const float (&other)[4] = acc[CHAINS - 1][i];
                    v = v + float4{other[0], other[1], other[2], other[3]};
                }
                *reinterpret_cast<float4*>(shared + PARTS + slot * SUM_STAGE_BYTES + warp * SUMS_BYTES + 512 * i +
                                           16 * lane) = v;
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(partial_sums.full(slot));
            if (++slot == SUM_STAGES) slot = 0, use++;
        }
        return;
    }
    if constexpr (UNEVEN) warpgroup_reg_dealloc<SERVICE_REGISTERS>();
    sync_all();
    if (warp == PRODUCER) {
        if (lane == 0) {
            Weights::State landed, emptied;
            for (int copy = 1; row_tile < row_tiles; copy++) {
                if (copy >= IN_FLIGHT) {
                    weights.consumer_wait(landed);
                    landed.advance();
                }
                if (copy >= STAGES) {
                    mbarrier_wait(weights.empty(emptied.stage), emptied.phase);
                    emptied.advance();
                }
                fetch(policy);
            }
        }
        return;
    }

    // Reducer warp `own` takes columns 8 OWN own on of all row tiles, with barriers of its own.
    const int own = warp - REDUCER;
    if (own >= REDUCERS) return;
    scale *= OPERAND_TO_VALUE;
    const unsigned column = 512 * OWN * own + 16 * lane;
    const auto write = [&](int row_tile, const float4(&sum)[OWN]) {
        const int row = 16 * (worker + row_tile * workers) + g;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const float values[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
            for (int e = 0; e < (GATED ? 2 : 4); e++) {
                const int token = 8 * (OWN * own + i) + 2 * t + (e & 1);
                if constexpr (GATED) {
                    const int at = (row - g) / 2 + g;
                    const float value = silu_times(values[e] * scale, values[e + 2] * scale);
                    if (token < m && at < n / 2) y[static_cast<size_t>(token) * (n / 2) + at] = round16<X_BF16>(value);
                } else {
                    const int at = row + 8 * (e >> 1);
                    if (token < m && at < n)
                        y[static_cast<size_t>(token) * n + at] = round16<X_BF16>(values[e] * scale);
                }
            }
        }
    };
    const auto arrived = [&](int place) { return base + ARRIVED + 8 * (place * REDUCERS + own); };
    const auto collect = [&](int row_tile) {
        const int turn = row_tile / CLUSTER;
        mbarrier_wait_cluster(arrived(turn % PLACES), turn / PLACES & 1);
        float4 sum[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned char* at = shared + PLACE + turn % PLACES * PLACE_BYTES + 512 * i + column;
            sum[i] = *reinterpret_cast<const float4*>(at);
#pragma unroll
            for (int peer = 1; peer < CLUSTER; peer++) {
                sum[i] = sum[i] + *reinterpret_cast<const float4*>(at + peer * SUMS_BYTES);
            }
        }
        write(row_tile, sum);
    };
    for (int now = 0; now < row_tiles; now++) {
        const int slot = now % SUM_STAGES;
        mbarrier_wait(partial_sums.full(slot), (now / SUM_STAGES) & 1);
        float4 sum[OWN];
        unsigned loaded = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned char* part = shared + PARTS + slot * SUM_STAGE_BYTES + 512 * i + column;
            sum[i] = *reinterpret_cast<const float4*>(part);
#pragma unroll
            for (int w = 1; w < WARPS; w++) {
                sum[i] = sum[i] + *reinterpret_cast<const float4*>(part + w * SUMS_BYTES);
            }
            loaded |= __float_as_uint(sum[i].x);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(once_loaded(partial_sums.empty(slot), loaded, zero));
        if constexpr (CLUSTER == 1) {
            write(now, sum);
        } else {
            const int place = now / CLUSTER % PLACES, collector = now % CLUSTER;
            const unsigned to = PLACE + place * PLACE_BYTES + rank * SUMS_BYTES + column;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                if (collector == rank) {
                    *reinterpret_cast<float4*>(shared + to + 512 * i) = sum[i];
                } else {
                    st_async(map_to_rank(base + to + 512 * i, collector), sum[i],
                             map_to_rank(arrived(place), collector));
                }
            }
            if (collector == rank) {
                if (lane == 0) mbarrier_arrive_expect_tx(arrived(place), (CLUSTER - 1) * 512 * OWN);
                if (now >= CLUSTER) collect(now - CLUSTER);
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        if (rank < row_tiles) collect((row_tiles - 1 - rank) / CLUSTER * CLUSTER + rank);
    }
}
