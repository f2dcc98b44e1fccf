// NVFP4 linear on fp8 tensor cores: y[M, N] = x[M, K] w^T with x rounded to e4m3 (quantise_e4m3.cu), y^T = w x^T.
//
// As wgmma_gemm.cu: weights stay four bits in memory and become the A operand in registers, x is B in shared memory,
// and a CTA makes BLOCK_N = 128 weight rows by BLOCK_M tokens:
//
//   producer thread          per stage of 128 k: one bulk copy of weights, and x by its tensor map. Weights of the first
//                            stages come before the quantiser has ended, x after
//   two consumer warpgroups  64 rows each: decode 128 k into one of two sets of fragments while the wgmmas of the other
//                            set are in flight
//
// The tensor core's own sums keep about 14 bits. They are promoted (added to float32 sums) every PROMOTE stages; with
// 256 tokens both do not fit in registers (PROMOTE 0: never).
//
// Scheduled as wgmma_gemm.cu: `waves` whole tiles per worker (a CTA), the rest stream-K; the owner of a tile adds the
// others' float32 sums in the order of k. A worker waits only for CTAs of lower index.
//
// Macros: KERNEL (name), OUT_BF16 0/1, BLOCK_M 32/48/64/128/256, STAGES (of BLOCK_K = 128), PROMOTE (a power of two),
// CONSUMERS 2/3 (warpgroups of 64 rows).
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#include "w4a8_operand.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/scheduler.cuh"

constexpr int BLOCK_N = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int K_BLOCKS = 2;       // stages of a stream-K iteration
constexpr int ACC = BLOCK_M / 2;  // accumulators of a thread
constexpr int SLICE = BLOCK_M < 64 ? BLOCK_M : 64;
constexpr unsigned ROW_TILE_BYTES = 1152, W_BYTES = 4 * CONSUMERS * ROW_TILE_BYTES, X_BYTES = BLOCK_M * 128;
constexpr unsigned STAGE_BYTES = X_BYTES + W_BYTES;
constexpr unsigned OUT_STRIDE = 128 + 16;  // bytes of a token's results of a warpgroup, and a shift of banks
constexpr unsigned OUT_BYTES = SLICE * OUT_STRIDE;

// Shared memory, from a multiple of 1024 bytes: x of all stages, weights of all stages, results, barriers.
constexpr unsigned X = 0, W = STAGES * X_BYTES, OUT = W + STAGES * W_BYTES;
constexpr unsigned FULL = OUT + CONSUMERS * OUT_BYTES, EMPTY = FULL + 8 * STAGES, SHARED_BYTES = EMPTY + 8 * STAGES;
using Pipe = Pipeline<STAGES, FULL, EMPTY>;
static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "too much shared memory");

constexpr int EPILOGUE = 1;             // named barriers, one for each warpgroup
constexpr int PART_FLOATS = 128 * ACC;  // of one warpgroup

// x_map: e4m3 x [m, 128 * chunks], boxes of 128 bytes by BLOCK_M tokens. x_scale: float32 [m up to a multiple
// of 256]. w: [tiles of 128 rows, chunks of 128 k, 8, 1152]; row_scale: float32 [rows of w]. y: [m, n] 16-bit. parts:
// float32 [workers, 2, PART_FLOATS]. flags: zeros, [workers, 2]. iters: of a tile, K_BLOCKS * 128 k each. n_tiles: of BLOCK_N rows;
// m_tiles likewise. waves: whole tiles per worker.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL(const __grid_constant__ TensorMap x_map, const float* x_scale, const unsigned char* w,
           const float* row_scale, unsigned short* y, float* parts, unsigned* flags, int m, int n, int iters,
           int n_tiles, int m_tiles, int waves) {
    DYNAMIC_SHARED(shared_start);
    unsigned char* const shared = shared_start + (-shared_address(shared_start) & 1023u);
    const unsigned base = opaque(shared_address(shared));
    const int group = warp_uniform(threadIdx.x / 128);
    const int workers = gridDim.x, worker = workers - 1 - blockIdx.x;
    const int tiles = n_tiles * m_tiles, shared_iters = max(0, tiles - waves * workers) * iters;
    const auto row_of = [&](int tile) { return tile / m_tiles * BLOCK_N; };
    const auto token_of = [&](int tile) { return tile % m_tiles * BLOCK_M; };

    const Pipe pipeline{base};

    if (threadIdx.x == 128 * CONSUMERS) prefetch_tensor_map(&x_map);
    if (threadIdx.x == 0) {
        pipeline.init(1, 4 * CONSUMERS);
        mbarrier_init_fence();
        fence_proxy_async_shared();
    }
    __syncthreads();

    if (group == CONSUMERS) {
        warpgroup_reg_dealloc<CONSUMERS == 2 ? 56 : 32>();
        if (threadIdx.x % 128 == 0) {
            const int k_blocks = iters * K_BLOCKS;
            const StreamKPartition partition = stream_k_partition(shared_iters, workers);
            const auto fetch_weights = [&](int tile, int k, int stage) {
                const unsigned full = pipeline.full(stage), to = base + W + stage * W_BYTES;
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
#if CONSUMERS == 2
                const unsigned char* source = w + (static_cast<size_t>(tile / m_tiles) * k_blocks + k) * W_BYTES;
                if (m_tiles == 1) {
                    tma_load_1d_evict_first(to, source, W_BYTES, full);
                } else {
                    tma_load_1d(to, source, W_BYTES, full);
                }
#else
#pragma unroll
                for (int i = 0; i < CONSUMERS; i++) {  // 64 rows each, half of a block of the layout
                    constexpr unsigned HALF = W_BYTES / CONSUMERS;
                    // Rows past N: the last block once more; its sums are not written.
                    const int half = min(CONSUMERS * (tile / m_tiles) + i, (n - 1) / 64);
                    const size_t block = static_cast<size_t>(half / 2) * k_blocks + k;
                    tma_load_1d_evict_first(to + i * HALF, w + (2 * block + half % 2) * HALF, HALF, full);
                }
#endif
            };
            int early = 0;
            for (StreamKScheduler work(partition, worker, workers, tiles, iters, waves); work.valid() && early < STAGES;
                 work.next()) {
                for (int k = work.iter_begin * K_BLOCKS; k < work.iter_end * K_BLOCKS && early < STAGES; k++) {
                    fetch_weights(work.tile, k, early++);
                }
            }
            wait_on_dependent_grids();
            Pipe::State state;
            for (StreamKScheduler work(partition, worker, workers, tiles, iters, waves); work.valid(); work.next()) {
                for (int k = work.iter_begin * K_BLOCKS; k < work.iter_end * K_BLOCKS; k++, state.advance()) {
                    if (early > 0) {
                        early--;
                    } else {
                        pipeline.producer_acquire(state);
                        fetch_weights(work.tile, k, state.stage);
                    }
                    tma_load_2d(base + X + state.stage * X_BYTES, &x_map, 64 * k, token_of(work.tile),
                                pipeline.full(state.stage));
                }
            }
        }
    } else {
        warpgroup_reg_alloc<CONSUMERS == 2 ? 224 : 160>();
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        unsigned char* const out = shared + OUT + group * OUT_BYTES;
        unsigned a[2][4][4];
        float acc[ACC], temp[ACC];
        const StreamKPartition partition = stream_k_partition(shared_iters, workers);
        Pipe::State state;
        // This lane's codes and scales in stage 0.
        const unsigned row_tile = base + W + (4 * group + warp) * ROW_TILE_BYTES;
        const unsigned my_codes = opaque(row_tile + 16 * lane), my_scales = opaque(row_tile + 1024 + 4 * lane);

        // After the products of the stage, which have taken what was loaded from it: no need of once_loaded.
        const auto release = [&](int stage) {
            __syncwarp();
            if (lane == 0) pipeline.consumer_release(stage);
        };
        // The 128 k of a stage: one group.
        const auto multiply = [&](float (&sums)[ACC], unsigned (&set)[4][4], int stage, int scale_d) {
            wgmma_fence();
            const unsigned long long x = x_descriptor(base + X + stage * X_BYTES);
#pragma unroll
            for (int j = 0; j < 4; j++) wgmma_rs_e4m3<BLOCK_M>(sums, set[j], x + 2 * j, j == 0 ? scale_d : 1);
            wgmma_commit();
        };
        const auto promote = [&] {
            pin(temp);
#pragma unroll
            for (int i = 0; i < ACC; i++) acc[i] += temp[i];
        };

        wait_on_dependent_grids();  // x_scale is the quantiser's, and y may be read by a kernel ahead of it
        for (StreamKScheduler work(partition, worker, workers, tiles, iters, waves); work.valid(); work.next()) {
#pragma unroll
            for (int i = 0; i < ACC; i++) acc[i] = 0;
            pin(acc);
#pragma unroll
            for (int i = 0; i < ACC; i++) temp[i] = 0;
            int before = -1;
#pragma unroll 1
            for (int iter = work.iter_begin; iter < work.iter_end; iter++) {
#pragma unroll
                for (int s = 0; s < K_BLOCKS; s++, state.advance()) {
                    pipeline.consumer_wait(state);
                    Packed8 packed;
                    packed.load(my_codes + state.stage * W_BYTES, my_scales + state.stage * W_BYTES);
                    decode_fragments8(packed, a[s]);
                    pin(a[s]);
                    if constexpr (PROMOTE == 0) {
                        multiply(acc, a[s], state.stage, 1);
                        wgmma_wait<1>();
                    } else {
                        const bool fresh = ((K_BLOCKS * iter + s) & (PROMOTE - 1)) == 0;
                        if (fresh) {
                            wgmma_wait<0>();
                            promote();
                        }
                        multiply(temp, a[s], state.stage, !fresh);
                        if (!fresh) wgmma_wait<1>();
                    }
                    if (before >= 0) release(before);
                    before = state.stage;
                }
            }
            wgmma_wait<0>();
            if constexpr (PROMOTE > 0) promote();
            pin(acc);
            release(before);

            if (!work.owns_tile()) {
                const size_t place = worker * CONSUMERS + group;
                float4* const partial = reinterpret_cast<float4*>(parts + place * PART_FLOATS) + thread;
#pragma unroll
                for (int i = 0; i < ACC; i += 4) partial[32 * i] = float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
                named_barrier_sync(EPILOGUE + group, 128);
                if (thread == 0) flag_raise(flags + place);
                continue;
            }
            // The other workers of the tile: a thread for each one's flag, then their sums without a stop.
            const int peers = work.peers(partition);
            for (int i = thread; i < peers; i += 128) flag_take(flags + (worker + 1 + i) * CONSUMERS + group);
            if (peers > 0) named_barrier_sync(EPILOGUE + group, 128);
#pragma unroll 1
            for (int peer = worker + 1; peer <= worker + peers; peer++) {
                const size_t place = peer * CONSUMERS + group;
                const float4* const partial = reinterpret_cast<const float4*>(parts + place * PART_FLOATS) + thread;
#pragma unroll
                for (int i = 0; i < ACC; i += 4) {
                    const float4 v = ldg_cg_float4(partial + 32 * i);
                    acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
                }
            }
            // Through shared memory: a lane has two tokens of two weight rows, y wants a token's rows side by side.
            const bool y_in_sixteens = n % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
            const int row = row_of(work.tile) + group * 64, token = token_of(work.tile);
            const int my_row = row + 16 * warp + lane / 4;
            const float scale[2] = {my_row < n ? row_scale[my_row] : 0.0f,
                                    my_row + 8 < n ? row_scale[my_row + 8] : 0.0f};
            const float* const token_scales = x_scale + token + 2 * (lane % 4);
            const unsigned corner =
                shared_address(out) + (8 * (lane / 16) + lane % 8) * OUT_STRIDE + 2 * (16 * warp + 8 * (lane / 8 % 2));
#pragma unroll
            for (int first = 0; first < BLOCK_M; first += SLICE) {
                if (token + first >= m) break;
#pragma unroll
                for (int i = 0; i < SLICE; i += 16) {
                    const float* v = &acc[(first + i) / 2];
                    unsigned pairs[4];
#pragma unroll
                    for (int p = 0; p < 4; p++) {
                        const float2 s = *reinterpret_cast<const float2*>(token_scales + first + i + 8 * (p / 2));
                        pairs[p] =
                            pack_pair<OUT_BF16>(v[2 * p] * scale[p % 2] * s.x, v[2 * p + 1] * scale[p % 2] * s.y);
                    }
                    stmatrix_x4_trans(corner + i * OUT_STRIDE, pairs[0], pairs[1], pairs[2], pairs[3]);
                }
                named_barrier_sync(EPILOGUE + group, 128);
#pragma unroll 4
                for (int i = thread; i < SLICE * 8; i += 128) {
                    const int t = i / 8, at = i % 8 * 8;
                    if (token + first + t >= m || row + at >= n) continue;
                    const uint4 v = *reinterpret_cast<const uint4*>(out + t * OUT_STRIDE + 2 * at);
                    unsigned short* const to = y + static_cast<size_t>(token + first + t) * n + row + at;
                    if (y_in_sixteens) {
                        *reinterpret_cast<uint4*>(to) = v;
                    } else {
                        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                        for (int e = 0; e < 8; e++) {
                            if (row + at + e < n) to[e] = static_cast<unsigned short>(words[e / 2] >> (16 * (e % 2)));
                        }
                    }
                }
                named_barrier_sync(EPILOGUE + group, 128);
            }
        }
    }
}
