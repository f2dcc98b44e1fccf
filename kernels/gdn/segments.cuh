// What the launches of a split scan are made of (segments.cu, segments_in_scan.cu): a segment's row, its scan with
// outputs, its map.
#pragma once

#include "compose.cuh"

struct Segment {
    int first, tokens, chunk0, sequence, number, leads, ends, place;
};
DEVICE Segment segment_of(const int4* rows) {
    const int4 a = __ldg(rows + 2 * blockIdx.z), b = __ldg(rows + 2 * blockIdx.z + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
struct Joint {
    float *starts, *transitions;
};
template <int D>
DEVICE long state_row(const Scan& s, int row) {
    return (long)row * s.hv * D * D;
}

constexpr int FLOAT32 = 2;  // of a state, as the host says it
constexpr int MAP_STAGES = 4;
template <int D, bool RECOMPUTE>
struct MapStage {
    static constexpr int V = D / 64 * TILE, X = V + TILE, VECTORS = X + TILE, SUMS = VECTORS + 1024;
    static constexpr int BYTES = RECOMPUTE ? SUMS + 1024 : SUMS;
    static constexpr u32 FULL = MAP_STAGES * BYTES, EMPTY = FULL + 8 * MAP_STAGES, MADE = EMPTY + 8 * MAP_STAGES;
    using Loads = Pipeline<MAP_STAGES, FULL, EMPTY>;
    static constexpr int ROOM = MAP_STAGES * BYTES + 128;  // for a piece, where maps leave one
    using Vectors = Pipeline<MAP_STAGES, MADE, EMPTY>;     // made where a chunk was loaded, read when that is emptied
};

// Zeros above the triangles of each stage, and barriers that all threads see.
template <int STAGES, int BYTES, int TRIANGLES>
DEVICE void clear_triangles(char* triangles) {
    constexpr int PIECES = TRIANGLES * TILE / 16;
    for (int at = threadIdx.x; at < STAGES * PIECES; at += blockDim.x)
        ASYNC_SHARED(uint4, triangles + at / PIECES * BYTES + at % PIECES * 16) = make_uint4(0, 0, 0, 0);
    fence_proxy_async_shared();
    mbarrier_init_fence();
    __syncthreads();
}

// A segment with its outputs, by GROUPS warpgroups, one that loads and stores, and one that makes scores or is idle.
// LEADS: from the sequence's initial state, else from its own S, which it composes itself (COMPOSES, compose.cuh) or
// finds.
template <int D, int TYPE, int GROUPS, bool LEADS, bool RECOMPUTE, bool COMPOSES = false>
DEVICE void scan_segment(Scan& s, const Joint& joint, char* shared, const int4* rows) {
    using At = Stage<D, GROUPS, RECOMPUTE>;
    using Memory = ScanMemory<D, GROUPS, SCAN_STAGES, RECOMPUTE>;
    constexpr bool TWO = GROUPS == 1 && !LEADS && !RECOMPUTE && !COMPOSES;  // warpgroups, which have registers enough
    char* staging = shared + Memory::OUT;
    const u32 base = shared_address(shared);
    const typename Memory::Loads loads{base};
    const typename Memory::Scores scores{base};
    const typename PieceMemory<Memory>::Pieces pieces{base};
    if (threadIdx.x == 0) {
        Memory::init(base);
        if (COMPOSES) pieces.init(1, 4 * GROUPS);
    }
    clear_triangles<SCAN_STAGES, At::BYTES, 2>(shared + At::X);
    const int group = threadIdx.x / 128, head = blockIdx.y, column0 = GROUPS == D / 64 ? 0 : blockIdx.x * 64 * GROUPS;
    if (RECOMPUTE && group > GROUPS) {
        warpgroup_reg_dealloc<64>();
        make_scores<D, TYPE, At>(shared, loads, scores, segment_of(rows).tokens, s.scale);
    } else if (group > GROUPS) {
        warpgroup_reg_dealloc<24>();
    } else if (group == GROUPS) {
        if (!TWO) warpgroup_reg_dealloc<RECOMPUTE && !(COMPOSES && GROUPS == 1) ? 32 : 56>();
        const Segment x = segment_of(rows);  // by each role, since these have few registers
        const int warp = (int)(threadIdx.x / 32) - 4 * GROUPS;
        if (warp == 0 && COMPOSES) {
            const int count = x.place - 1;
            load_pieces<At::BYTES>(joint.transitions + state_row<D>(s, x.number - x.place + 1) + (long)head * D * D,
                                   state_row<D>(s, 1), shared, pieces, count);
            const LoadsBehind<typename Memory::Loads, typename PieceMemory<Memory>::Pieces> behind{loads, pieces,
                                                                                                   count};
            produce<D, GROUPS, false, false, RECOMPUTE>(s, shared, behind, x.first, x.tokens, x.chunk0, head, column0);
        } else if (warp == 0)
            produce<D, GROUPS, false, false, RECOMPUTE>(s, shared, loads, x.first, x.tokens, x.chunk0, head, column0);
        else if (warp <= GROUPS)
            store_outputs<D>(s, staging + (warp - 1) * TILE, typename Memory::Outputs{base + 8 * (warp - 1)}, x.first,
                             x.tokens, head * D + column0 + (warp - 1) * 64);
    } else {
        if (!TWO) warpgroup_reg_alloc<RECOMPUTE && GROUPS == 2 ? 208 : 224>();
        const Segment x = segment_of(rows);
        const long of_sequence = state_row<D>(s, x.sequence) * (s.state_type == BF16 ? 2 : 4);
        s.final_type = s.state_type;
        if (COMPOSES && !x.ends) {
            s.final_state = nullptr;  // later segments need what lies there
        } else if (x.ends) {
            s.final_state = static_cast<char*>(s.final_state) + of_sequence;
        } else {
            s.final_state =
                (LEADS ? joint.starts + state_row<D>(s, x.number + 1) : joint.transitions + state_row<D>(s, x.number));
            s.final_type = FLOAT32;
        }
        if (LEADS) {
            s.initial_state = static_cast<const char*>(s.initial_state) + of_sequence;
        } else {
            s.initial_state = joint.starts + state_row<D>(s, COMPOSES ? x.number - x.place + 1 : x.number);
            s.state_type = FLOAT32;
            wait_on_dependent_grids();  // composed, or the maps
        }
        const typename Memory::Outputs outputs{base + 8 * group};
        if constexpr (COMPOSES) {
            using Pieces = typename PieceMemory<Memory>::Pieces;
            const long of_first = state_row<D>(s, x.number - x.place + 1) + (long)head * D * D;
            const float* values = joint.starts + of_first + state_row<D>(s, 1) + (column0 + 64 * group) * D;
            const ComposeBefore<At::BYTES, Pieces> before{
                shared, pieces, x.place - 1, joint.transitions + of_first, values, state_row<D>(s, 1)};
            consume<D, TYPE, GROUPS, TYPE, false, RECOMPUTE>(s, shared, staging + group * TILE, loads, scores, outputs,
                                                             x.first, x.tokens, 0, head, column0 + 64 * group, before);
        } else {
            consume<D, TYPE, GROUPS, TYPE, false, RECOMPUTE>(s, shared, staging + group * TILE, loads, scores, outputs,
                                                             x.first, x.tokens, 0, head, column0 + 64 * group);
        }
    }
}

// The producer warp of a map: k, 64 columns of v, X and vectors of whole chunks, which are all that a segment has
// unless it ends its sequence.
template <int D, bool RECOMPUTE>
DEVICE void produce_map(const Scan& s, char* stages, const Segment& x, int head, int column0) {
    using At = MapStage<D, RECOMPUTE>;
    const typename At::Loads loads{shared_address(stages)};
    typename At::Loads::State place;
    const int head_k = head / (s.hv / s.hk);
    constexpr int PREPARED = RECOMPUTE ? RECOMPUTE_BLOCK : BLOCK, MORE = RECOMPUTE ? C * 4 : 1024;
    const char* block = s.workspace + ((long)x.chunk0 * s.hv + head) * PREPARED;
#pragma unroll 1
    for (int at = 0; at < x.tokens; at += C) {
        char* stage = stages + place.stage * At::BYTES;
        const u32 full = loads.full(place.stage);
        loads.producer_acquire(place);
        loads.producer_expect(place, At::X + TRIANGLE + MORE);
#pragma unroll
        for (int i = 0; i < D / 64; i++)
            tma_load_2d(shared_address(stage + i * TILE), s.k_map, head_k * D + i * 64, x.first + at, full);
        tma_load_2d(shared_address(stage + At::V), s.v_map, head * D + column0, x.first + at, full);
        if (at == 0) wait_on_dependent_grids();  // the preparation
#pragma unroll
        for (int m = 0; m < 4; m++)
            tma_load_1d(shared_address(stage + At::X + 2560 * m), block + triangle_step(m), 2048 - 512 * m, full);
        tma_load_1d(shared_address(stage + (RECOMPUTE ? At::SUMS : At::VECTORS)),
                    block + (RECOMPUTE ? 1 : 2) * TRIANGLE, MORE, full);
        block += (long)s.hv * PREPARED;
        place.advance();
    }
}

// A warp that makes the vectors a, e and c_C of each chunk from the gates' sums.
template <int D>
DEVICE void make_vectors(char* stages, int count) {
    using At = MapStage<D, true>;
    const typename At::Loads loads{shared_address(stages)};
    const typename At::Vectors made{shared_address(stages)};
    typename At::Loads::State place;
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int n = 0; n < count; n++) {
        loads.consumer_wait(place);
        char* stage = stages + place.stage * At::BYTES;
        const float* sum = reinterpret_cast<const float*>(stage + At::SUMS);
        float* vector = reinterpret_cast<float*>(stage + At::VECTORS);
        const float last = sum[C - 1];
#pragma unroll
        for (int token = lane; token < C; token += 32) {
            const float own = sum[token];
            vector[token] = exp2_fast(own);
            vector[2 * C + token] = exp2_fast(last - own);
        }
        if (lane == 0) vector[3 * C] = exp2_fast(last);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(made.full(place.stage));
        place.advance();
    }
}

// One warpgroup's 64 columns of B (VALUES) or A, as `consume` carries a state: the same products in the same order
// without what outputs need. Writes B [k, v] or A transposed [in, out], float32; or
// both as compose.cuh takes them (COMPOSED).
template <int D, int TYPE, bool VALUES, bool RECOMPUTE, bool COMPOSED>
DEVICE void carry_map(char* stages, int count, float* to, int column0) {
    using At = MapStage<D, RECOMPUTE>;
    const typename At::Loads loads{shared_address(stages)};
    const typename At::Vectors made{shared_address(stages)};
    typename At::Loads::State place;
    const int warp = threadIdx.x / 32 & 3, lane = threadIdx.x & 31, quad = lane >> 2, pair = lane & 3;
    const int group = lane >> 3, in_group = lane & 7, row = column0 + warp * 16 + quad;
    const int transposed = swizzled(8 * (group >> 1) + in_group, 2 * warp + (group & 1));
    float t[D / 2], y[32], u[32];
    float decay = 1.0f;  // of the segment, where it goes along
    u32 state[D / 4], left[16];
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        t[i] = !VALUES && row + (i >> 1 & 1) * 8 == i / 4 * 8 + 2 * pair + (i & 1) ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < D / 4; i++) state[i] = pack16<TYPE>(t[2 * i], t[2 * i + 1]);
    const auto load_factors = [&](float2(&x)[8], const float* from) {
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = *reinterpret_cast<const float2*>(from + 8 * j);
    };
    const auto step = [](int i) { return (u64)(((i >> 2) * TILE + (i & 3) * 32) >> 4); };  // 16 columns on
#pragma unroll 1
    for (int n = 0; n < count; n++) {
        char* stage = stages + place.stage * At::BYTES;
        loads.consumer_wait(place);
        const u32 base = warp_uniform(shared_address(stage));
        const u64 k_columns = smem_descriptor_128B(base), k_rows = smem_descriptor_128B(base, TILE);
        const float* vectors = reinterpret_cast<const float*>(stage + At::VECTORS) + 2 * pair;
        float2 factors[8];

        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) wgmma_rs<64, TYPE == BF16>(y, state + 4 * i, k_columns + step(i), i > 0);
        wgmma_commit();
        u32 v[4][4] = {};
        if (VALUES)
#pragma unroll
            for (int j = 0; j < 8; j += 2)
                ldmatrix_x4_trans(v[j / 2], shared_address(stage + At::V + transposed + j * 1024));
        if (RECOMPUTE) made.consumer_wait(place);
        load_factors(factors, vectors);
        wgmma_wait<0>(y);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 word = v[j / 2][j % 2 * 2 + i];
                const float low = widen<TYPE>((u16)word), high = widen<TYPE>((u16)(word >> 16));
                left[2 * j + i] =
                    pack16<FP16>(low - factors[j].x * y[4 * j + 2 * i], high - factors[j].y * y[4 * j + 2 * i + 1]);
            }
        wgmma_fence();
        times_triangle(u, left, base + At::X, 0);
        wgmma_commit();
        const float total = vectors[3 * C - 2 * pair];
        load_factors(factors, vectors + 2 * C);
#pragma unroll
        for (int i = 0; i < D / 2; i++) t[i] *= total;
        if (COMPOSED && !VALUES) decay *= total;
        wgmma_wait<0>(u);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                left[2 * j + i] = pack16<TYPE>(factors[j].x * u[4 * j + 2 * i], factors[j].y * u[4 * j + 2 * i + 1]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_rs<D, TYPE == BF16, true>(t, left + 4 * i, k_rows + (u64)(i * 2048 >> 4), 1);
        wgmma_commit();
        wgmma_wait<0>(t);
#pragma unroll
        for (int i = 0; i < D / 4; i++) state[i] = pack16<TYPE>(t[2 * i], t[2 * i + 1]);
        __syncwarp();
        if (lane == 0) loads.consumer_release(place.stage);
        place.advance();
    }
    if constexpr (COMPOSED && VALUES) {
        leave_values(t, to + column0 * D);
    } else if constexpr (COMPOSED) {
        leave_map(t, decay, stages + At::ROOM, to, column0, 1);
    } else {
#pragma unroll
        for (int i = 0; i < D / 2; i += 2) {
            const int k = i / 4 * 8 + 2 * pair, column = row + (i >> 1 & 1) * 8;
            if (VALUES) to[(long)k * D + column] = t[i], to[(long)(k + 1) * D + column] = t[i + 1];
            else *reinterpret_cast<float2*>(to + (long)column * D + k) = float2{t[i], t[i + 1]};
        }
    }
}

template <int D, int TYPE, bool RECOMPUTE, bool COMPOSED = false>
DEVICE void map_segment(const Scan& s, const Joint& joint, char* shared, const Segment& x) {
    using At = MapStage<D, RECOMPUTE>;
    if (threadIdx.x == 0) {
        const u32 base = shared_address(shared);
        typename At::Loads{base}.init(1, 8);
        for (int i = 0; i < MAP_STAGES; i++) mbarrier_init(typename At::Vectors{base}.full(i), 1);
    }
    clear_triangles<MAP_STAGES, At::BYTES, 1>(shared + At::X);
    const int group = threadIdx.x / 128, head = blockIdx.y, column0 = blockIdx.x * 64, count = x.tokens / C;
    if (group == 2) {
        warpgroup_reg_dealloc<RECOMPUTE ? 64 : 56>();  // tests/kernels/gdn/test_gdn_race.py knows makers by their 64
        if (threadIdx.x == 2 * 128) produce_map<D, RECOMPUTE>(s, shared, x, head, column0);
        else if (RECOMPUTE && threadIdx.x / 32 == 9) make_vectors<D>(shared, count);
    } else {
        warpgroup_reg_alloc<RECOMPUTE ? 216 : 224>();  // 3 x 168 are there
        const long of_head = (long)head * D * D;
        if (group == 0)
            carry_map<D, TYPE, true, RECOMPUTE, COMPOSED>(
                shared, count, joint.starts + state_row<D>(s, x.number + 1) + of_head, column0);
        else
            carry_map<D, TYPE, false, RECOMPUTE, COMPOSED>(
                shared, count, joint.transitions + state_row<D>(s, x.number) + of_head, column0);
    }
}

#define ARGUMENTS                                                                                                     \
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap q_map,                                 \
        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map, const u16 *q, const u16 *k, \
        const u16 *v, const char *workspace, const void *initial_state, void *final_state, u16 *o, const int4 *rows,  \
        float *starts, float *transitions, int hk, int hv, int state_type, float scale
#define GIVEN                                                                                  \
    DYNAMIC_SHARED(memory);                                                                    \
    char* const shared = reinterpret_cast<char*>(memory);                                      \
    const Joint joint{starts, transitions};                                                    \
    Scan s{&k_map, &q_map, &v_map, &o_map, q, k, v, workspace, initial_state, final_state, o}; \
    s.hk = hk, s.hv = hv, s.state_type = state_type, s.scale = scale;
