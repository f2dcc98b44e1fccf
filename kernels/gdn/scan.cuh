// Gated delta rule over a sequence in chunks of 64 tokens: a parallel preparation, a sequential scan (sm_90a, wgmma).
// In two launches (scan.cu), or in one (fused.cu) whose scans look at a flag for each chunk.
//
// Per chunk and v head, with G the running sum of log decays, c = exp(G), C the chunk's last token, nk and nq the
// inverse norms of raw keys and queries (1 otherwise), T = S^T [v, k] the transposed state:
//   prepare:  A_ij = beta_i nk_i nk_j exp(G_i - G_j) k_i.k_j   i > j      X = (I + A)^-1 diag(beta)
//             P_ij = scale nq_i nk_j exp(G_i - G_j) q_i.k_j    i >= j
//             vectors a = c nk, r = scale c nq, e = c_C / c nk
//   scan:     Y = T K^T,  R = T Q^T                       [v, token]
//             Z = V^T - a Y,  U = Z X^T                   corrected values, transposed
//             O^T = r R + U P^T
//             T <- c_C T + (e U) K
// T stays in float32 accumulators of one warpgroup (64 rows of v); T, Z and U enter the tensor cores from registers,
// where an accumulator packed in pairs is the next product's left operand. K, Q, X and P come from shared memory.
// X and P are triangles: of step s of 16 columns only rows 16 s and on travel; the zeros above lie in shared memory.
// A chunk's X, P and vectors are one block of 11,264 bytes in the workspace, already swizzled: one bulk copy out, nine
// in. In a RECOMPUTE scan the block is X and G, 5,376 bytes, and a warpgroup of the scan makes P and the vectors
// (scores.cuh). K, Q and V of a whole chunk come by TMA; a short last chunk by 16-byte cp.async, so that what follows a
// sequence never enters it. One producer warp loads; another stores a finished chunk of O by TMA from shared memory, so
// that the warps of the chain only put it there.

#pragma once

#include "scores.cuh"
#include "sm90/pipeline.cuh"

template <int D, int GROUPS, bool RECOMPUTE>
struct Stage {
    static constexpr int Q = D / 64 * TILE, V = 2 * Q, X = V + GROUPS * TILE, P = X + TILE, VECTORS = P + TILE;
    static constexpr int SUMS = VECTORS + 1024, BYTES = RECOMPUTE ? SUMS + 1024 : SUMS, ROWS = V + GROUPS * TILE;
};

// A scan's shared memory: the stages, a tile of outputs for each warpgroup, and the barriers of what its warps hand on.
// Loads: a chunk, to all that read it. Scores: what a RECOMPUTE scan makes of one in the same stage; who reads them
// empties the stage, so that they need no empty barriers of their own. Outputs: a warpgroup's, to the warp that stores
// them; the next warpgroup's barriers lie 8 bytes on.
template <int D, int GROUPS, int STAGES, bool RECOMPUTE>
struct ScanMemory {
    static constexpr u32 OUT = STAGES * Stage<D, GROUPS, RECOMPUTE>::BYTES, FULL = OUT + GROUPS * TILE;
    static constexpr u32 EMPTY = FULL + 8 * STAGES, FILLED = EMPTY + 8 * STAGES, DRAINED = FILLED + 8 * GROUPS;
    static constexpr u32 MADE = DRAINED + 8 * GROUPS;
    using Loads = Pipeline<STAGES, FULL, EMPTY>;
    using Scores = Pipeline<STAGES, MADE, EMPTY>;
    using Outputs = Pipeline<1, FILLED, DRAINED>;
    // By one thread. Where several warps fill or read, each arrives once.
    DEVICE static void init(u32 base) {
        Loads{base}.init(1, 4 * GROUPS);
        for (int i = 0; i < GROUPS; i++) Outputs{base + 8 * i}.init(4, 1);
        for (int i = 0; i < STAGES && RECOMPUTE; i++) mbarrier_init(Scores{base}.full(i), 4);
    }
};

struct Scan {
    const TensorMap *k_map, *q_map, *v_map, *o_map;  // [tokens, heads * D]
    const u16 *q, *k, *v;
    const char* workspace;
    const void* initial_state;
    void* final_state;
    u16* o;                             // or float, where the scan is WIDE
    const int *bounds, *chunk_offsets;  // [sequences + 1] tokens; [sequences] first chunk
    int hk, hv, state_type;             // state_type: BF16, else float32
    // Of one launch, instead of bounds and chunk_offsets:
    const int4* blocks;  // [2 a block], as fused.cu has them
    u32* sync;           // epoch of the launch before, scans that are through; from [FLAGS] on flags [hk, chunks]
    u32 epoch;
    int chunks, scans;
    float scale;     // where the scan is RECOMPUTE
    int final_type;  // as state_type, of final_state
};
constexpr int FLAGS = 32;  // a line of its own for what is counted

// How many lanes from 0 on say yes, before the first that does not.
DEVICE int leading_lanes(bool yes) {
    const u32 no = ~warp_ballot(yes);
    return no ? __ffs(no) - 1 : 32;
}
DEVICE int4 entry(const Scan& s, int i) { return __ldg(s.blocks + 2 * blockIdx.x + i); }

// A short last chunk, 8 PIECES columns wide, by a warp; rows beyond are zero.
template <int PIECES>
DEVICE void copy_rows(char* tile, const u16* from, int start, int live, int stride) {
#pragma unroll 1
    for (int at = threadIdx.x & 31; at < C * PIECES; at += 32) {
        const int row = at / PIECES, piece = at % PIECES;
        const u16* own = from + (long)(start + min(row, live - 1)) * stride + piece * 8;
        cp_async_16(tile + swizzled_wide(row, piece), own, row < live);
    }
}

// The producer warp, chunk after chunk. In ONE launch it loads k, q and v first and then looks at the flags of the next
// 32 chunks at once, again only when it has used up those that it saw raised.
template <int D, int GROUPS, bool WIDE, bool ONE, bool RECOMPUTE, class Loads>
DEVICE void produce(const Scan& s, char* stages, const Loads& loads, int first, int tokens, int chunk0, int head,
                    int column0) {
    using At = Stage<D, GROUPS, RECOMPUTE>;
    const int lane = threadIdx.x & 31, head_k = head / (s.hv / s.hk);
    constexpr int PREPARED = RECOMPUTE ? RECOMPUTE_BLOCK : BLOCK;
    const char* block = s.workspace + ((long)chunk0 * s.hv + head) * PREPARED;
    typename Loads::State place;
    const u32* flags = ONE ? s.sync + FLAGS + (long)head_k * s.chunks + chunk0 : nullptr;
    int ready = 0;                        // chunks whose flag was seen
    if (WIDE) wait_on_dependent_grids();  // q and k in fp16 are the preparation's too
    for (int live = tokens; live > 0; live -= C) {
        char* stage = stages + place.stage * At::BYTES;
        const u32 full = loads.full(place.stage);
        const int start = first + tokens - live;
        loads.producer_acquire(place);
        if (live >= C) {
            if (lane == 0) {
                loads.producer_expect(place, At::ROWS + PREPARED);
#pragma unroll
                for (int i = 0; i < D / 64; i++)
                    tma_load_2d(shared_address(stage + i * TILE), s.k_map, head_k * D + i * 64, start, full);
#pragma unroll
                for (int i = 0; i < D / 64; i++)
                    tma_load_2d(shared_address(stage + At::Q + i * TILE), s.q_map, head_k * D + i * 64, start, full);
#pragma unroll
                for (int i = 0; i < GROUPS; i++)
                    tma_load_2d(shared_address(stage + At::V + i * TILE), s.v_map, head * D + column0 + i * 64, start,
                                full);
            }
        } else {
            copy_rows<D / 8>(stage, s.k + head_k * D, start, live, s.hk * D);
            copy_rows<D / 8>(stage + At::Q, s.q + head_k * D, start, live, s.hk * D);
            copy_rows<8 * GROUPS>(stage + At::V, s.v + head * D + column0, start, live, s.hv * D);
            cp_async_commit();
            cp_async_wait<0>();
            fence_proxy_async_shared();
            __syncwarp();
            if (lane == 0) loads.producer_expect(place, PREPARED);
        }
        const int n = (tokens - live) / C;
        if (ONE && n >= ready) {
            for (int tries = 0;; spin_pause(tries)) {
                const u32* flag = flags + n + lane;
                ready = n + leading_lanes(lane * C < live && ld_acquire(flag) == s.epoch);
                if (n < ready) break;
            }
            __syncwarp();
            fence_proxy_async_global();
        }
        if (lane == 0) {
            if (!ONE && !WIDE && live == tokens) wait_on_dependent_grids();  // the preparation
#pragma unroll
            for (int i = 0; i < (RECOMPUTE ? 4 : 8); i++) {
                const int m = i & 3;  // a step of X, then of P: its first 16 m rows are zero and stay so
                tma_load_1d(shared_address(stage + (i < 4 ? At::X : At::P) + 2560 * m),
                            block + i / 4 * TRIANGLE + triangle_step(m), 2048 - 512 * m, full);
            }
            if (RECOMPUTE)
                tma_load_1d(shared_address(stage + At::SUMS), block + TRIANGLE, RECOMPUTE_BLOCK - TRIANGLE, full);
            else tma_load_1d(shared_address(stage + At::VECTORS), block + 2 * TRIANGLE, 1024, full);
        }
        __syncwarp();
        block += (long)s.hv * PREPARED;
        place.advance();
    }
    if (ONE && lane == 0 &&
        atomic_add_acq_rel(s.sync + 1, 1) == s.scans - 1) {  // nobody looks at flags or epoch any more
        s.sync[1] = 0;
        s.sync[0] = s.epoch;
    }
}

// u [64, 64] (+)= left [64, 64] triangle^T
DEVICE void times_triangle(float (&u)[32], const u32 (&left)[16], u32 triangle, int add) {
    const u64 steps = smem_descriptor_32B(triangle);
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs<64, false>(u, left + 4 * i, steps + (u64)(i * 2048 >> 4), i ? 1 : add);
}

// One warp stores the finished chunks of a warpgroup: tile [64 tokens][64 columns], swizzled.
template <int D, class Outputs>
DEVICE void store_outputs(const Scan& s, const char* tile, const Outputs& outputs, int first, int tokens, int column) {
    const int lane = threadIdx.x & 31;
    for (int n = 0; n * C < tokens; n++) {
        const int start = first + n * C, live = tokens - n * C;
        outputs.consumer_wait(Outputs::State::of(n));
        if (live >= C) {
            if (lane == 0) {
                tma_store_2d(s.o_map, column, start, shared_address(tile));
                tma_store_wait_read<0>();
                outputs.consumer_release(0);
            }
            __syncwarp();
        } else {  // the last chunk, short: what follows in memory is another sequence's
#pragma unroll 1
            for (int at = lane; at < live * 8; at += 32)
                *reinterpret_cast<uint4*>(s.o + (long)(start + at / 8) * s.hv * D + column + at % 8 * 8) =
                    *reinterpret_cast<const uint4*>(tile + swizzled(at / 8, at & 7));
        }
    }
    if (lane == 0) tma_store_wait_all();
}

// What is done to a state ahead of its first chunk: nothing; and it is left in memory behind the last.
struct AsGiven {
    static constexpr bool LEAVES = true;
    template <int COUNT>
    DEVICE void operator()(float (&)[COUNT]) const {}
};

// One warpgroup's 64 columns of v. Accumulators: rows warp * 16 + quad (+ 8), columns 8 j + 2 pair (+ 1) at
// [4 j + ...].
// The tensor cores' queue: Y; half of R while Z is formed; U and the other half; T; O.
template <int D, int TYPE, int GROUPS, int VALUES, bool WIDE, bool RECOMPUTE, class Loads, class Scores, class Outputs,
          class Before = AsGiven>
DEVICE void consume(const Scan& s, char* stages, char* out, const Loads& loads, const Scores& scores,
                    const Outputs& outputs, int first, int tokens, int sequence, int head, int column0,
                    const Before& before = {}) {
    using At = Stage<D, GROUPS, RECOMPUTE>;
    constexpr int EARLY = D / 32;  // of the D / 16 steps of R
    const int warp = threadIdx.x / 32 & 3, lane = threadIdx.x & 31, quad = lane >> 2, pair = lane & 3;
    const int group = lane >> 3, in_group = lane & 7, count = (tokens + C - 1) / C;
    const int v_tile = At::V + (int)(threadIdx.x / 128) * TILE;
    const int transposed = swizzled(8 * (group >> 1) + in_group, 2 * warp + (group & 1));  // + 1024 for 8 tokens on
    const long at_state = ((long)sequence * s.hv + head) * D * D + column0 + warp * 16 + quad;
    float t[D / 2], y[32], r[32], u[32];
    u32 state[D / 4], left[16], right[16], packed_o[16];

#pragma unroll
    for (int i = 0; i < D / 2; i++) {
        const long at = at_state + (long)(i / 4 * 8 + 2 * pair + (i & 1)) * D + (i >> 1 & 1) * 8;
        t[i] = s.state_type == BF16 ? widen<BF16>(static_cast<const u16*>(s.initial_state)[at])
                                    : static_cast<const float*>(s.initial_state)[at];
    }
    before(t);

#pragma unroll
    for (int i = 0; i < D / 4; i++) state[i] = pack16<TYPE>(t[2 * i], t[2 * i + 1]);

    // Hands chunk n, in packed_o, to the warp that stores.
    const auto hand_over = [&](int n) {
        outputs.producer_acquire(Outputs::State::of(n));
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            stmatrix_x4_trans(shared_address(out + transposed + j * 1024), packed_o[2 * j], packed_o[2 * j + 1],
                              packed_o[2 * j + 2], packed_o[2 * j + 3]);
        fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(outputs.full(0));
    };
    const auto pack_outputs = [&] {
#pragma unroll
        for (int i = 0; i < 16; i++) packed_o[i] = pack16<TYPE>(r[2 * i], r[2 * i + 1]);
    };
    const auto store_wide = [&](int n) {  // eight lanes fill a sector of 32 bytes
        float* to = reinterpret_cast<float*>(s.o) + ((long)(first + n * C + 2 * pair) * s.hv + head) * D + column0 +
                    warp * 16 + quad;
        const int live = tokens - n * C - 2 * pair;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (8 * j + (i & 1) < live) to[(8 * j + (i & 1)) * s.hv * D + (i >> 1) * 8] = r[4 * j + i];
    };
    const auto load_factors = [&](float2(&x)[8], const float* from) {  // ahead of the wait for what they multiply
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = *reinterpret_cast<const float2*>(from + 8 * j);
    };

    const auto step = [](int i) { return (u64)(((i >> 2) * TILE + (i & 3) * 32) >> 4); };  // 16 columns on
    typename Loads::State place;
    for (int n = 0; n < count; n++) {
        char* stage = stages + place.stage * At::BYTES;
        loads.consumer_wait(place);
        const u32 base = warp_uniform(shared_address(stage));
        const u64 k_columns = smem_descriptor_128B(base);
        const u64 q_columns = smem_descriptor_128B(base + At::Q), k_rows = smem_descriptor_128B(base, TILE);
        const float* vectors = reinterpret_cast<const float*>(stage + At::VECTORS) + 2 * pair;
        float2 factors[8];

        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) wgmma_rs<64, TYPE == BF16>(y, state + 4 * i, k_columns + step(i), i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < EARLY; i++) wgmma_rs<64, TYPE == BF16>(r, state + 4 * i, q_columns + step(i), i > 0);
        wgmma_commit();
        if (!WIDE && n) hand_over(n - 1);
        u32 v[4][4];
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            ldmatrix_x4_trans(v[j / 2], shared_address(stage + v_tile + transposed + j * 1024));
        if (RECOMPUTE) scores.consumer_wait(place);
        load_factors(factors, vectors);

        wgmma_wait<1>(y);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 word = v[j / 2][j % 2 * 2 + i];
                const float low = widen<VALUES>((u16)word), high = widen<VALUES>((u16)(word >> 16));
                left[2 * j + i] =
                    pack16<FP16>(low - factors[j].x * y[4 * j + 2 * i], high - factors[j].y * y[4 * j + 2 * i + 1]);
            }
        wgmma_fence();
        times_triangle(u, left, base + At::X, 0);
        wgmma_commit();
#pragma unroll
        for (int i = EARLY; i < D / 16; i++) wgmma_rs<64, TYPE == BF16>(r, state + 4 * i, q_columns + step(i), 1);
        wgmma_commit();
        const float total = vectors[3 * C - 2 * pair];
        load_factors(factors, vectors + 2 * C);
#pragma unroll
        for (int i = 0; i < D / 2; i++) t[i] *= total;

        wgmma_wait<1>(u);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                left[2 * j + i] = pack16<TYPE>(factors[j].x * u[4 * j + 2 * i], factors[j].y * u[4 * j + 2 * i + 1]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (D == 128)
                wgmma_rs<128, TYPE == BF16, true>(t, left + 4 * i, k_rows + (u64)(i * 2048 >> 4), 1);
            else wgmma_rs<64, TYPE == BF16, true>(t, left + 4 * i, k_rows + (u64)(i * 2048 >> 4), 1);
        }
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 16; i++) right[i] = pack16<FP16>(u[2 * i], u[2 * i + 1]);
        load_factors(factors, vectors + C);
        wgmma_wait<1>(r);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            r[4 * j] *= factors[j].x, r[4 * j + 2] *= factors[j].x;
            r[4 * j + 1] *= factors[j].y, r[4 * j + 3] *= factors[j].y;
        }
        wgmma_fence();
        times_triangle(r, right, base + At::P, 1);
        wgmma_commit();
        wgmma_wait<1>(t);
#pragma unroll
        for (int i = 0; i < D / 4; i++) state[i] = pack16<TYPE>(t[2 * i], t[2 * i + 1]);
        wgmma_wait<0>(r);
        if constexpr (WIDE) store_wide(n);
        else pack_outputs();
        __syncwarp();
        if (lane == 0) loads.consumer_release(place.stage);
        place.advance();
    }
    if (!WIDE && count) hand_over(count - 1);
    if (!Before::LEAVES && !s.final_state) return;
#pragma unroll
    for (int i = 0; i < D / 2; i++) {
        const long at = at_state + (long)(i / 4 * 8 + 2 * pair + (i & 1)) * D + (i >> 1 & 1) * 8;
        if (s.final_type == BF16) static_cast<u16*>(s.final_state)[at] = (u16)pack16<BF16>(t[i], 0.0f);
        else static_cast<float*>(s.final_state)[at] = t[i];
    }
}

// GROUPS consumer warpgroups of 64 columns of v; one of which a warp loads and GROUPS warps store; RECOMPUTE, one that
// makes scores; in ONE launch others idle. A grid of two launches: (D / (64 GROUPS), hv, sequences) blocks of
// 128 (GROUPS + 1 + RECOMPUTE) threads.
template <int D, int TYPE, int GROUPS, int STAGES, int VALUES = TYPE, bool WIDE = false, bool ONE = false,
          bool RECOMPUTE = false>
DEVICE void scan(const Scan& s) {
    using At = Stage<D, GROUPS, RECOMPUTE>;
    using Memory = ScanMemory<D, GROUPS, STAGES, RECOMPUTE>;
    DYNAMIC_SHARED(memory);
    char* const shared = reinterpret_cast<char*>(memory);
    char* staging = shared + Memory::OUT;
    const u32 base = shared_address(shared);
    const typename Memory::Loads loads{base};
    const typename Memory::Scores scores{base};
    if (threadIdx.x == 0) Memory::init(base);
    for (int at = threadIdx.x; at < STAGES * 1024; at += blockDim.x)  // X and P of each stage, 16 bytes at a time
        ASYNC_SHARED(uint4, shared + at / 1024 * At::BYTES + At::X + at % 1024 * 16) = make_uint4(0, 0, 0, 0);
    fence_proxy_async_shared();
    mbarrier_init_fence();
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (RECOMPUTE && group > GROUPS) {
        warpgroup_reg_dealloc<64>();
        make_scores<D, TYPE, At>(shared, loads, scores, s.bounds[blockIdx.z + 1] - s.bounds[blockIdx.z], s.scale);
    } else if (ONE && group > GROUPS) {
        warpgroup_reg_dealloc<24>();
    } else if (group == GROUPS) {
        if (RECOMPUTE) warpgroup_reg_dealloc<32>();
        else if (ONE || GROUPS > 1) warpgroup_reg_dealloc<56>();
        const int head = ONE ? entry(s, 0).z : blockIdx.y, sequence = ONE ? entry(s, 0).y : blockIdx.z;
        const int column0 = ONE ? entry(s, 0).w : blockIdx.x * 64 * GROUPS;
        const int first = ONE ? entry(s, 1).x : s.bounds[sequence];
        const int tokens = ONE ? entry(s, 1).y : s.bounds[sequence + 1] - first;
        const int warp = (int)(threadIdx.x / 32) - 4 * GROUPS;
        if (warp == 0)
            produce<D, GROUPS, WIDE, ONE, RECOMPUTE>(s, shared, loads, first, tokens,
                                                     ONE ? entry(s, 1).z : s.chunk_offsets[sequence], head, column0);
        else if (!WIDE && warp <= GROUPS)
            store_outputs<D>(s, staging + (warp - 1) * TILE, typename Memory::Outputs{base + 8 * (warp - 1)}, first,
                             tokens, head * D + column0 + (warp - 1) * 64);
    } else {
        if (RECOMPUTE) warpgroup_reg_alloc<208>();
        else if (ONE) warpgroup_reg_alloc<240>();
        else if (GROUPS > 1) warpgroup_reg_alloc<224>();
        const int head = ONE ? entry(s, 0).z : blockIdx.y, sequence = ONE ? entry(s, 0).y : blockIdx.z;
        const int column0 = ONE ? entry(s, 0).w : blockIdx.x * 64 * GROUPS;
        const int first = ONE ? entry(s, 1).x : s.bounds[sequence];
        const int tokens = ONE ? entry(s, 1).y : s.bounds[sequence + 1] - first;
        consume<D, TYPE, GROUPS, VALUES, WIDE, RECOMPUTE>(s, shared, staging + group * TILE, loads, scores,
                                                          typename Memory::Outputs{base + 8 * group}, first, tokens,
                                                          sequence, head, column0 + 64 * group);
    }
}
