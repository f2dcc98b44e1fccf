// A product of a mixture's experts for many tokens on wgmma: rows sorted by expert times each one's NVFP4 weights, as
// y^T = w x^T. GATED: h = SiLU(Wg x) * (Wu x), rows of gate and up alternating in eights, with the token rows gathered
// here; else what each row's expert gives, as fp16, for weighted_sum.cu.
//
//   four producer warps      a stage is 64 k: two bulk copies of weights, and the block's rows of x or h by 16 bytes
//                            (cp.async), for they lie anywhere; a stage is told of LAG stages later, when they are there
//   two consumer warpgroups  128 weight rows each, as two m64: decode one half into its fragments while the other's
//                            wgmmas are in flight
//
// 256 weight rows a CTA, so that rows of x come through L2 once for each 256 of them: with 128 they would be half of what
// L2 gives. A tile is a block (at most BLOCK_M rows of one expert, from the router) by 256 weight rows; its products
// have as many columns as its rows need, in steps of 32. Tiles stand in a line, a block's weight rows side by side, and
// their k in one line with them, which the CTAs share evenly (stream-K, sm90/scheduler.cuh): who has a tile's first k
// adds what the others left, in the order of k. So the same bits on every run.
//
// FP8: x and h are e4m3 with a scale a row (nvfp4's quantise_e4m3.cu), weights w4a8_tiles.py's with one a weight row, and
// a stage is 128 k. The tensor cores' sums keep about 14 bits and are not promoted.
//
// Weights that are not FP8 are row_tiles.py's, as experts.cu has them: a stage of them is a box of 16 row tiles by one of k,
// or two of 8. There a CTA of the second product asks for its first stages of weights while the first product ends, which
// lets it start when that is safe. In blocks of 32 rows products have 16, 24 or 32 columns, and while the router runs each
// CTA of the first product prefetches into L2 the stages of weights that its part is likely to begin with.
//
// Macros: KERNEL (name), X_BF16 0/1, GATED 0/1, FP8 0/1, ROWS (of weights: 2 INNER, or WIDTH), K, BLOCK_M 32/64/96,
// STAGES, EVEN 0/1 (0 where it is not given: blocks stand by their width, router_once.cu's BY_WIDTH, and CTAs share what
// they cost).
#include "nvfp4/gemm_operand.cuh"
#include "nvfp4/w4a8_operand.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/scheduler.cuh"

#ifndef EVEN
#define EVEN 0
#endif
#define PREFETCH (GATED && !FP8 && BLOCK_M == 32)
static_assert(!(EVEN && FP8), "costs are those of W4A16's stages");
static_assert(FP8 || (ROWS % 16 == 0 && K % 64 == 0), "whole tiles: a box has no expert's end in it along k");

constexpr int BLOCK_N = 256, HALF_N = 128, CONSUMERS = 2, PRODUCERS = 4, THREADS = 128 * (CONSUMERS + 1);
constexpr int K_BLOCKS = FP8 ? (K + 255) / 256 * 2 : K / 64;  // stages; w4a8_tiles.py pads so
constexpr int ROW_TILES = (ROWS + BLOCK_N - 1) / BLOCK_N, LAST_HALF = (ROWS + HALF_N - 1) / HALF_N - 1;
constexpr bool EARLY = !FP8;                  // with FP8 a quantiser is between the products
constexpr bool FINE = BLOCK_M == 32 && !FP8;  // of more columns ptxas serialises the wgmmas (C7512)
// Of 64 tokens, or of all; of a thread's sums of one.
constexpr int GROUPS = BLOCK_M > 64 && FP8 ? 2 : 1, ACC = !FP8 || BLOCK_M < 64 ? BLOCK_M / 2 : 32;
constexpr int SLICE = 32, FEATURES = GATED ? HALF_N / 2 : HALF_N, OUT_COLUMNS = GATED ? ROWS / 2 : ROWS;
// A stage is told of when LAG more are asked for, which takes as many empty ones: with STAGES - 2 the producers wait for
// the stage that the consumers have just left, and these for the producers.
constexpr int LAG = STAGES / 2;
constexpr unsigned ROW_TILE_BYTES = FP8 ? 1152 : TILE_BYTES, W_BYTES = 8 * ROW_TILE_BYTES, X_BYTES = BLOCK_M * 128,
                   OUT_STRIDE = 2 * FEATURES + 16;
constexpr unsigned X = 0, OUT = STAGES * X_BYTES, W = OUT + CONSUMERS * SLICE * OUT_STRIDE;
constexpr unsigned FULL = W + STAGES * 2 * W_BYTES, EMPTY = FULL + 8 * STAGES, SHARED_BYTES = EMPTY + 8 * STAGES;
using Pipe = Pipeline<STAGES, FULL, EMPTY>;
static_assert(SHARED_BYTES <= 227 * 1024, "too much shared memory");
static_assert(LAG >= 1 && (CONSUMERS * SLICE * OUT_STRIDE) % 128 == 0, "a stage is loaded while two are in use");
constexpr int EPILOGUE = 1;                              // named barriers, one for each warpgroup
constexpr int PART_FLOATS = 128 * 2 * GROUPS * ACC;      // of one warpgroup
constexpr int ROWS_OF_LANE = BLOCK_M / (4 * PRODUCERS);  // of a stage: a quarter of a warp copies a row

// Of a stage's weights that are not FP8: two where one would go on into the next expert.
constexpr int BOXES = LAST_HALF % 2 ? 1 : 2;
constexpr int OF_EXPERT = (ROWS + 15) / 16;  // row tiles of an expert

template <int N>
struct Count {
    static constexpr int value = N;
};
struct Block {
    int expert, count, start;
    DEVICE explicit Block(const uint2* at) {
        const u32 x = ldg32(at);
        expert = x & 0xFFFF, count = x >> 16, start = ldg32(reinterpret_cast<const u32*>(at) + 1);
    }
};

// The line of stages in parts of even cost, where blocks of up to 32 rows stand first in it, then those of up to 64.
struct EvenPartition {
    static constexpr int NARROW = 11, MIDDLE = 14, WIDEST = 17;  // of a stage, in 75 clocks (NOTES.md)
    int narrow, up_to_middle, iters;
    StreamKPartition costs;
    DEVICE EvenPartition(int narrow_, int up_to_middle_, int iters_, int workers)
        : narrow(narrow_),
          up_to_middle(up_to_middle_),
          iters(iters_),
          costs(stream_k_partition(
              NARROW * narrow_ + MIDDLE * (up_to_middle_ - narrow_) + WIDEST * (iters_ - up_to_middle_), workers)) {
        // Few stages are shared by their number: nobody between two that have some may have none.
        if (costs.each < WIDEST) costs = stream_k_partition(iters, workers), narrow = -1;
    }
    DEVICE int begin(int worker) const {
        int at = costs.begin(worker);
        if (narrow < 0) return at;
        if (at < NARROW * narrow) return at / NARROW;
        at -= NARROW * narrow;
        const int middle = up_to_middle - narrow;
        if (at < MIDDLE * middle) return narrow + at / MIDDLE;
        return up_to_middle + (at - MIDDLE * middle) / WIDEST;
    }
};

// One half of a stage's weights, of tile `row_tile` of an expert. Past ROWS: the last once more, whose sums are not written.
DEVICE const unsigned char* half_of(const unsigned char* w, int expert, int row_tile, int half) {
    const size_t at = static_cast<size_t>(expert) * (LAST_HALF + 1) + min(2 * row_tile + half, LAST_HALF);
    return w + at * (K_BLOCKS * W_BYTES);
}

// By a warp, while the router runs and memory has nothing to do: the weights of a CTA's first stages, a stage a lane, as
// if each expert had one of so many blocks, the shared one's behind theirs. blocks: 0 where that is no good guess.
DEVICE void prefetch_weights(const unsigned char* w, int experts, int blocks, int worker, int workers, int lane) {
    constexpr int OF_BLOCK = ROW_TILES * K_BLOCKS, STAGES_AHEAD = 24;
    const int first = stream_k_partition(blocks * OF_BLOCK, workers).begin(worker), from = first % K_BLOCKS;
    // A stage is 16 pieces of what lies side by side along k, so a lane has a row tile: of its k, what these stages take.
    const int of = first % OF_BLOCK / K_BLOCKS * 16 + lane, count = min(STAGES_AHEAD, K_BLOCKS - from);
    if (first >= blocks * OF_BLOCK || lane >= 16 || of >= OF_EXPERT) return;
    const size_t tile = (static_cast<size_t>(min(first / OF_BLOCK, experts)) * OF_EXPERT + of) * K_BLOCKS + from;
    tma_prefetch_1d(w + tile * TILE_BYTES, count * TILE_BYTES);
}

// By one thread: asks for a stage's weights.
DEVICE void load_weights(u32 to, const TensorMap* w_map, int expert, int row_tile, int k, u32 barrier) {
    if constexpr (BOXES == 1) {
        tma_load_words(to, w_map, k * (TILE_BYTES / 8), expert * OF_EXPERT + 16 * row_tile, barrier);
    } else {
        for (int half = 0; half < 2; half++) {
            const int of = expert * OF_EXPERT + 8 * min(2 * row_tile + half, LAST_HALF);
            tma_load_words(to + half * W_BYTES, w_map, k * (TILE_BYTES / 8), of, barrier);
        }
    }
}

// By one thread: asks for a CTA's first weights, one for each stage of the ring. Returns how many.
template <class Pipe, class Partition>
DEVICE int load_first(const Pipe& pipeline, const TensorMap* w_map, const uint2* blocks, const Partition& partition,
                      int worker, int workers, int tiles, u32 ring) {
    typename Pipe::State to;
    int asked = 0;
    for (StreamKScheduler work(partition, worker, workers, tiles, K_BLOCKS, 0); work.valid(); work.next()) {
        const int expert = ld_acquire(reinterpret_cast<const u32*>(blocks + work.tile / ROW_TILES)) & 0xFFFF;
        for (int k = work.iter_begin; k < work.iter_end; k++, asked++) {
            if (asked == STAGES) return asked;
            pipeline.producer_expect(to, 2 * W_BYTES);
            load_weights(ring + 2 * to.stage * W_BYTES, w_map, expert, work.tile % ROW_TILES, k,
                         pipeline.full(to.stage));
            to.advance();
        }
    }
    return asked;
}

// The first N / 2 of a thread's sums += a times N columns of b.
template <int N, int COUNT>
DEVICE void multiply_by(float (&sums)[COUNT], const u32* a, u64 b) {
    float (&d)[N / 2] = reinterpret_cast<float (&)[N / 2]>(sums);
    if constexpr (FP8) {
        wgmma_rs_e4m3<N>(d, a, b, 1);
    } else {
        wgmma_rs<N, X_BF16>(d, a, b);
    }
}

// x: GATED: [tokens, K], else h [rows, K], with x_scale and K padded where FP8; tensor_scale is float32 [experts,
// weight rows up to 128] then. w: [experts, OF_EXPERT, K_BLOCKS, 576] and w_map_ its boxes, or w4a8_tiles.py's [experts, rows
// by 128, K_BLOCKS, 8, 1152] where FP8. rows, blocks, state: the router's. out: [rows, OUT_COLUMNS], of
// x's type where GATED, else fp16. parts: [CTAs, 2, PART_FLOATS]. flags: zeros, [CTAs, 2]. experts, even_blocks: see
// prefetch_weights.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL(const unsigned char* x, const unsigned char* w, const float* tensor_scale, const uint2* rows,
           const uint2* blocks, const u32* state, u16* out, float* parts, u32* flags, const float* x_scale
#if PREFETCH
           ,
           int experts, int even_blocks
#endif
#if !FP8
           ,
           const __grid_constant__ TensorMap w_map_
#endif
    ) {
#if !FP8
    const TensorMap* const w_map = &w_map_;
#else
    const TensorMap* const w_map = nullptr;
#endif
    DYNAMIC_SHARED(shared);
    const u32 base = shared_address(shared);
    const int group = warp_uniform(threadIdx.x / 128), workers = gridDim.x, worker = workers - 1 - blockIdx.x;
    const Pipe pipeline{base};
    if (threadIdx.x == 128 * CONSUMERS) {
        pipeline.init(1 + PRODUCERS, 4 * CONSUMERS);
        mbarrier_init_fence();
        fence_proxy_async_shared();
    }
    __syncthreads();
#if PREFETCH
    if (threadIdx.x / 32 == 4 * CONSUMERS) {
        prefetch_weights(w, experts, even_blocks, worker, workers, threadIdx.x % 32);
    }
#endif
    const auto shares = [&](int tiles, auto read) {
#if EVEN
        constexpr int OF_BLOCK = ROW_TILES * K_BLOCKS;
        return EvenPartition(OF_BLOCK * read(state + 7), OF_BLOCK * read(state + 8), tiles * K_BLOCKS, workers);
#else
        return stream_k_partition(tiles * K_BLOCKS, workers);
#endif
    };
    // EARLY: one thread of a CTA of the second product reads the router's lists before it waits for the first one, out of
    // L2: all CTAs of that have waited for the router by the time that they let this one start.
    constexpr bool ASK = EARLY && !GATED;
    int asked = 0;  // stages whose weights are under way, of the thread that asks
    if (!(EARLY && GATED)) launch_dependent_grids();
    if (ASK && threadIdx.x == 128 * CONSUMERS) {
        const auto read = [](const u32* at) { return ld_acquire(at); };
        const int tiles = read(state) * ROW_TILES;
        asked = load_first(pipeline, w_map, blocks, shares(tiles, read), worker, workers, tiles, base + W);
    }
    wait_on_dependent_grids();
    if (EARLY && GATED) launch_dependent_grids();
    const int tiles = ldg32(state) * ROW_TILES;
    const auto partition = shares(tiles, [](const u32* at) { return ldg32(at); });

    if (group == CONSUMERS) {
        warpgroup_reg_dealloc<56>();
        const int warp = warp_uniform(threadIdx.x % 128 / 32), lane = threadIdx.x % 32, piece = lane % 8;
        const int first = 4 * warp + lane / 8;  // of this lane's rows of a stage, which are 16 apart
        const u32 to = base + X + 128 * first + 16 * (piece ^ first % 8);
        Pipe::State state_, behind;
        int issued = 0;
        // What was copied into the stage that is LAG behind is there: wgmma may read it.
        const auto told = [&] {
            fence_proxy_async_shared();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(pipeline.full(behind.stage));
            behind.advance();
        };
        int loaded = -1, count = 0;
        u32 from[ROWS_OF_LANE];  // sixteens of bytes from x on
        for (StreamKScheduler work(partition, worker, workers, tiles, K_BLOCKS, 0); work.valid(); work.next()) {
            const int index = work.tile / ROW_TILES, row_tile = work.tile % ROW_TILES;
            const Block block(blocks + index);
            if (index != loaded) {
                loaded = index, count = block.count;
#pragma unroll
                for (int i = 0; i < ROWS_OF_LANE; i++) {
                    const int row = block.start + min(first + 16 * i, count - 1);
                    const u32 at = GATED ? ldg32(rows + row) : row;
                    from[i] = at * 8 * K_BLOCKS + piece;
                }
            }
            const unsigned char* halves[2];
#pragma unroll
            for (int half = 0; half < 2; half++) halves[half] = half_of(w, block.expert, row_tile, half);
            for (int k = work.iter_begin; k < work.iter_end; k++) {
                pipeline.producer_acquire(state_);
                if (warp == 0 && lane == 0 && (!ASK || issued >= asked)) {
                    pipeline.producer_expect(state_, 2 * W_BYTES);
                    if constexpr (!FP8) {
                        load_weights(base + W + 2 * state_.stage * W_BYTES, w_map, block.expert, row_tile, k,
                                     pipeline.full(state_.stage));
                    } else {
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            tma_load_1d(base + W + (2 * state_.stage + half) * W_BYTES, halves[half] + k * W_BYTES,
                                        W_BYTES, pipeline.full(state_.stage));
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < ROWS_OF_LANE; i++) {
                    if (first + 16 * i < count) {
                        cp_async_16(to + state_.stage * X_BYTES + 2048 * i,
                                    x + 16 * (static_cast<size_t>(from[i]) + 8 * k), true);
                    }
                }
                cp_async_commit();
                state_.advance();
                if (++issued > LAG) {
                    cp_async_wait<LAG>();
                    told();
                }
            }
        }
        cp_async_wait<0>();
        for (int i = min(issued, LAG); i > 0; i--) told();
    } else {
        warpgroup_reg_alloc<224>();
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        u32 a[2][4][4];
        float acc[2][GROUPS][ACC];
        Pipe::State at;
        const u32 row_tile_at = base + W + group * W_BYTES + warp * ROW_TILE_BYTES;
        const u32 my_codes = opaque(row_tile_at + 16 * lane);
        const u32 my_scales = opaque(row_tile_at + (FP8 ? 1024 + 4 * lane : TILE_CODE_BYTES + 8 * (lane / 4)));
        // After the wgmmas of the stage, which have taken what was loaded from it: no need of once_loaded.
        const auto release = [&](int stage) {
            __syncwarp();
            if (lane == 0) pipeline.consumer_release(stage);
        };
        // The k of a tile, in products of LOW columns and of HIGH more.
        const auto multiply = [&](auto low, auto high, int count) {
            constexpr int LOW = decltype(low)::value, HIGH = decltype(high)::value;
            int before = -1;
#pragma unroll 1
            for (; count > 0; count--) {
                const int stage = at.stage;
                const u64 operand = x_descriptor(base + X + warp_uniform(stage) * X_BYTES);
                pipeline.consumer_wait(at);
                at.advance();
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 of_half = stage * 2 * W_BYTES + half * 4 * ROW_TILE_BYTES;
                    if constexpr (FP8) {
                        Packed8 packed;
                        packed.load(my_codes + of_half, my_scales + of_half);
                        decode_fragments8(packed, a[half]);
                    } else {
                        Packed packed;
                        packed.load(my_codes + of_half, my_scales + of_half);
                        decode_fragments<X_BF16>(packed, a[half]);
                    }
                    pin(a[half]);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        multiply_by<LOW>(acc[half][0], a[half][j], operand + 2 * j);
                        if constexpr (HIGH > 0) {
                            multiply_by<HIGH>(acc[half][GROUPS - 1], a[half][j], operand + 64 * 128 / 16 + 2 * j);
                        }
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (half == 0 && before >= 0) release(before);
                }
                before = stage;
            }
            wgmma_wait<0>();
            release(before);
        };

        for (StreamKScheduler work(partition, worker, workers, tiles, K_BLOCKS, 0); work.valid(); work.next()) {
            const int stages = work.iter_end - work.iter_begin, count = ldg32(blocks + work.tile / ROW_TILES) >> 16;
#pragma unroll
            for (int i = 0; i < 2 * GROUPS * ACC; i++) acc[i / (GROUPS * ACC)][i / ACC % GROUPS][i % ACC] = 0.0f;
            if (FINE && count <= 16) {
                multiply(Count<FINE ? 16 : 32>{}, Count<0>{}, stages);
            } else if (FINE && count <= 24) {
                multiply(Count<FINE ? 24 : 32>{}, Count<0>{}, stages);
            } else if (BLOCK_M == 32 || count <= 32) {
                multiply(Count<32>{}, Count<0>{}, stages);
            } else if constexpr (BLOCK_M > 32) {
                if (BLOCK_M == 64 || count <= 64) {
                    multiply(Count<64>{}, Count<0>{}, stages);
                } else if constexpr (BLOCK_M == 96) {
                    multiply(Count<FP8 ? 64 : 96>{}, Count<FP8 ? 32 : 0>{}, stages);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                pin(acc[half][0]);
                if constexpr (GROUPS > 1) pin(reinterpret_cast<float (&)[16]>(acc[half][1]));
            }

            // Read late: it would take registers from the products.
            const Block block(blocks + work.tile / ROW_TILES);
            // Of rows g and g + 8 of either half of the weight rows.
            float scale[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = min(work.tile % ROW_TILES * 2 + group, LAST_HALF) * HALF_N + 64 * (i / 2) + 16 * warp +
                                lane / 4 + 8 * (i % 2);
                scale[i / 2][i % 2] =
                    FP8 ? ldg_float(tensor_scale + static_cast<size_t>(block.expert) * (LAST_HALF + 1) * HALF_N + row)
                        : ldg_float(tensor_scale + block.expert) * OPERAND_TO_VALUE;
            }
            // Sums of 16 tokens' rows are eight of a thread's: n of them from 16 `i` tokens on.
            const auto partial = [&](int of) {
                return reinterpret_cast<float4*>(parts + static_cast<size_t>(of * 2 + group) * PART_FLOATS) + thread;
            };
            const auto each = [&](auto take) {
#pragma unroll
                for (int i = 0; i < 2 * GROUPS * ACC / 4; i++) {
                    const int half = i / (GROUPS * ACC / 4), g = i / (ACC / 4) % GROUPS, e = i % (ACC / 4);
                    if (64 * g + 8 * e < BLOCK_M && 64 * g + 8 * e < block.count) take(i, &acc[half][g][4 * e]);
                    if (i == GROUPS * ACC / 4 - 1) __syncwarp();  // not all loads at once
                }
            };
            if (!work.owns_tile()) {
                float4* const mine = partial(worker);
                each([&](int i, const float* v) { mine[128 * i] = float4{v[0], v[1], v[2], v[3]}; });
                named_barrier_sync(EPILOGUE + group, 128);
                if (thread == 0) flag_raise(flags + worker * 2 + group);
                continue;
            }
            // The other workers of the tile: a thread for each one's flag, then their sums without a stop.
            const int peers = work.peers(partition);
            for (int i = thread; i < peers; i += 128) flag_take(flags + (worker + 1 + i) * 2 + group);
            if (peers > 0) named_barrier_sync(EPILOGUE + group, 128);
#pragma unroll 1
            for (int peer = worker + 1; peer <= worker + peers; peer++) {
                const float4* const theirs = partial(peer);
                each([&](int i, float* v) {
                    const float4 more = ldg_cg_float4(theirs + 128 * i);
                    v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
                });
            }
            // Through shared memory: a lane has two rows' features of two tokens, out wants a row's features side by side.
            const u32 staged = base + OUT + group * SLICE * OUT_STRIDE;
            const int feature = (work.tile % ROW_TILES * 2 + group) * FEATURES;
#pragma unroll
            for (int s = 0; s < BLOCK_M; s += SLICE) {
                if (s >= block.count) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int i = 0; i < SLICE; i += 16) {
                        const float* v = GROUPS > 1 ? &acc[half][s / 64][(s % 64 + i) / 2] : &acc[half][0][(s + i) / 2];
                        float of[4] = {1.0f, 1.0f, 1.0f, 1.0f};  // of its four tokens
#pragma unroll
                        for (int e = 0; FP8 && e < 4; e++) {
                            const int token = s + i + 8 * (e / 2) + 2 * (lane % 4) + e % 2;
                            const int at_row = block.start + min(token, block.count - 1);
                            of[e] = ldg_float(x_scale + (GATED ? ldg32(rows + at_row) : at_row));
                        }
                        const u32 row = staged + (i + lane % 8) * OUT_STRIDE;
                        if constexpr (GATED) {
                            u32 pairs[2];
#pragma unroll
                            for (int p = 0; p < 2; p++) {
                                float value[2];
#pragma unroll
                                for (int e = 0; e < 2; e++) {
                                    const float gate = v[4 * p + e] * (scale[half][0] * of[2 * p + e]);
                                    const float up = v[4 * p + 2 + e] * (scale[half][1] * of[2 * p + e]);
                                    value[e] = __fdividef(gate, 1.0f + exp2_fast(-1.4426950408889634f * gate)) * up;
                                }
                                pairs[p] = pack_pair<X_BF16>(value[0], value[1]);
                            }
                            stmatrix_x2_trans(row + lane / 8 % 2 * 8 * OUT_STRIDE + 2 * (32 * half + 8 * warp),
                                              pairs[0], pairs[1]);
                        } else {
                            u32 pairs[4];
#pragma unroll
                            for (int p = 0; p < 4; p++) {
                                const float by = scale[half][p % 2];
                                pairs[p] = pack_half2(v[2 * p] * (by * of[p / 2 * 2]),
                                                      v[2 * p + 1] * (by * of[p / 2 * 2 + 1]));
                            }
                            stmatrix_x4_trans(
                                row + lane / 16 * 8 * OUT_STRIDE + 2 * (64 * half + 16 * warp + 8 * (lane / 8 % 2)),
                                pairs[0], pairs[1], pairs[2], pairs[3]);
                        }
                    }
                }
                named_barrier_sync(EPILOGUE + group, 128);
#pragma unroll
                for (int i = thread; i < SLICE * FEATURES / 8; i += 128) {
                    const int token = s + i / (FEATURES / 8), column = feature + i % (FEATURES / 8) * 8;
                    if (token < block.count && column < OUT_COLUMNS) {
                        stg128(out + static_cast<size_t>(block.start + token) * OUT_COLUMNS + column,
                               lds128(staged + (token - s) * OUT_STRIDE + 2 * (column - feature)));
                    }
                }
                named_barrier_sync(EPILOGUE + group, 128);
            }
        }
    }
}
