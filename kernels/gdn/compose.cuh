// A scan that composes its own S (segments_in_scan.cu): from the state behind its sequence's first segment,
// S <- A S + B once for each segment in between, transposed as the scan has it: T <- T A^T + B^T, T [64 columns of v, k]
// in a warpgroup's accumulators. Packed in pairs they are the next product's left operand, so a step exchanges nothing.
//
// A^T [in, out] is the right operand, as the maps leave it and bulk copies bring it: by halves of `in`, of each half
// [PARTS][D / 64][64][64] of 16 bits, swizzled; a copy of PIECE bytes is all of A or, of two parts, a half.
//   PARTS 1   A = c I + R, c the segment's decay in float32: T A^T = c T + T R^T, where the one product has R in fp16
//             and T in fp16, each row times a power of two. It loses 2^-12 of what the segment's tokens change
//   PARTS 2   A and T in two bf16 parts each: three products, all but rest times rest. It loses 2^-17
// B lies as a warpgroup's accumulators do, [D / 64][16][128 threads] of four floats, and is added to a product's sums.
// The ring of pieces lies where a stage has K and Q; the scan's first chunks follow it there.
#pragma once

#include "sm90/mma.cuh"
#include "sm90/pipeline.cuh"
#include "scan.cuh"

constexpr int SCAN_STAGES = 3;
constexpr int PIECE = 4 * TILE;   // of a head of 128
constexpr int DECAY = PIECE / 4;  // where c lies, in floats from PARTS 1 of A on
template <int PARTS>
constexpr int PIECE_FORMAT = PARTS == 1 ? FP16 : BF16;

// The barriers of the pieces, behind those of the scan.
template <class Memory>
struct PieceMemory {
    static constexpr u32 FULL = Memory::MADE + 8 * SCAN_STAGES, EMPTY = FULL + 8 * SCAN_STAGES;
    using Pieces = Pipeline<SCAN_STAGES, FULL, EMPTY>;
};

// The scan's loads, whose stages hold `count` pieces first.
template <class Loads, class Pieces>
struct LoadsBehind : Loads {
    Pieces pieces;
    int count;
    using State = typename Loads::State;
    DEVICE void producer_acquire(const State& state) const {
        const int uses = (count - state.stage + SCAN_STAGES - 1) / SCAN_STAGES;
        if (uses > 0) mbarrier_wait(pieces.empty(state.stage), uses - 1 & 1);  // for good, from the last one's release on
        Loads::producer_acquire(state);
    }
};

// The producer warp: `count` pieces, those of the map at `from` and of the next ones, a segment's transitions apart.
template <int PARTS, int STAGE_BYTES, class Pieces>
DEVICE void load_pieces(const float* from, long segment, char* stages, const Pieces& pieces, int count) {
    typename Pieces::State place;
    wait_on_dependent_grids();  // the maps
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        pieces.producer_acquire(place);
        if ((threadIdx.x & 31) == 0) {
            pieces.producer_expect(place, PIECE);
            tma_load_1d(shared_address(stages + place.stage * STAGE_BYTES),
                        from + i / PARTS * segment + i % PARTS * (PIECE / 4), PIECE, pieces.full(place.stage));
        }
        __syncwarp();
        place.advance();
    }
}

// What a warpgroup of `consume` does between its first state and its first chunk.
template <int PARTS, int STAGE_BYTES, class Pieces>
struct ComposeBefore {
    static constexpr bool LEAVES = false;  // a state, unless somebody asks for it
    static constexpr int FORMAT = PIECE_FORMAT<PARTS>;
    char* stages;
    Pieces pieces;
    int count;           // of maps
    const float *a, *b;  // the first map's; B: this warpgroup's columns
    long segment;        // from one map to the next one

    DEVICE void operator()(float (&t)[64]) const {
        const int steps = warp_uniform(count);
        const float *own = b + 4 * (threadIdx.x & 127), *decay = a + DECAY;
        float c = PARTS == 1 && steps > 0 ? ldg_float(decay) : 0.0f;
        typename Pieces::State place;
#pragma unroll 1
        for (int n = 0; n < steps; n++) {
            float up[2] = {1.0f, 1.0f}, down[2] = {1.0f, 1.0f}, sum[64];
            u32 upper[32];
            uint4 next[16];
            const auto load = [&] {  // B, and the next map's c, behind which the launch's own memory goes on
#pragma unroll
                for (int j = 0; j < 16; j++) next[j] = ldg128(own + 512 * j);
                own += segment, decay += segment;
                if (PARTS == 1) c = ldg_float(decay);
            };
            if constexpr (PARTS == 1) {
                const float own_c = c;
                load();
                scales(t, up, down);
#pragma unroll
                for (int i = 0; i < 64; i++) t[i] *= up[i / 2 & 1], sum[i] = own_c * t[i];
            }
#pragma unroll
            for (int i = 0; i < 32; i++) upper[i] = opaque(pack16<FORMAT>(t[2 * i], t[2 * i + 1]));
            pieces.consumer_wait(place);
            const u64 columns = columns_of(place.stage);
            wgmma_fence();
            if constexpr (PARTS == 1) {
#pragma unroll
                for (int i = 0; i < 8; i++) product(sum, upper + 4 * i, columns, i / 4 * 2 * TILE, i, 1);
                wgmma_commit();
            } else {
                const int first = place.stage;
                u32 rest[32];
                of_upper(sum, upper, columns, false);
#pragma unroll
                for (int i = 0; i < 32; i++)
                    rest[i] = opaque(pack16<FORMAT>(t[2 * i] - widen<FORMAT>((u16)upper[i]),
                                                    t[2 * i + 1] - widen<FORMAT>((u16)(upper[i] >> 16))));
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++) product(sum, rest + 4 * i, columns, 0, i, 1);
                wgmma_commit();
                place.advance();
                pieces.consumer_wait(place);
                const u64 more = columns_of(place.stage);
                wgmma_fence();
                of_upper(sum, upper + 16, more, true);
#pragma unroll
                for (int i = 0; i < 4; i++) product(sum, rest + 16 + 4 * i, more, 0, i, 1);
                wgmma_commit();
                load();
                wgmma_wait<1>();
                release(first);
            }
            wgmma_wait<0>(sum);
            release(place.stage);
            place.advance();
#pragma unroll
            for (int j = 0; j < 16; j++) {
                t[4 * j] = sum[4 * j] * down[0] + __uint_as_float(next[j].x);
                t[4 * j + 1] = sum[4 * j + 1] * down[0] + __uint_as_float(next[j].y);
                t[4 * j + 2] = sum[4 * j + 2] * down[1] + __uint_as_float(next[j].z);
                t[4 * j + 3] = sum[4 * j + 3] * down[1] + __uint_as_float(next[j].w);
            }
        }
    }

    DEVICE u64 columns_of(int stage) const {
        return smem_descriptor_128B(warp_uniform(shared_address(stages + stage * STAGE_BYTES)), TILE);
    }
    // By rows 16 i and on, of a half, `in` bytes into a piece.
    DEVICE static void product(float (&sum)[64], const u32* of, u64 columns, int in, int i, int add) {
        wgmma_rs<128, FORMAT == BF16, true>(sum, of, columns + (u64)(in + i % 4 * 2048 >> 4), add);
    }
    // A half of upper by both parts of A.
    DEVICE static void of_upper(float (&sum)[64], const u32* upper, u64 columns, bool add) {
#pragma unroll
        for (int i = 0; i < 8; i++) product(sum, upper + i % 4 * 4, columns, i / 4 * 2 * TILE, i, add || i);
    }
    DEVICE void release(int stage) const {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) pieces.consumer_release(stage);
    }

    // Powers of two that bring the largest of each of a thread's two rows to 2^11 .. 2^12, and back.
    DEVICE static void scales(const float (&t)[64], float (&up)[2], float (&down)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < 16; j++) most = fmaxf(most, fmaxf(fabsf(t[4 * j + 2 * i]), fabsf(t[4 * j + 2 * i + 1])));
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            const u32 exponent = max(__float_as_uint(most) & 0x7F800000, 32u << 23);
            up[i] = __uint_as_float((2 * 127u + 11 << 23) - exponent), down[i] = __uint_as_float(exponent - (11 << 23));
        }
    }
};

// A map's end: B as accumulators lie; A^T, rows `in` from row0 on, through `room` to its place, by a warpgroup.
DEVICE void leave_values(const float (&t)[64], float* to) {
#pragma unroll
    for (int j = 0; j < 16; j++)
        *reinterpret_cast<float4*>(to + 512 * j + 4 * (threadIdx.x & 127)) =
            float4{t[4 * j], t[4 * j + 1], t[4 * j + 2], t[4 * j + 3]};
}
template <int PARTS>
DEVICE void leave_map(const float (&t)[64], float c, char* room, float* to, int row0, int barrier) {
    constexpr int FORMAT = PIECE_FORMAT<PARTS>, BYTES = PARTS * 2 * TILE;
    const int warp = threadIdx.x / 32 & 3, quad = (threadIdx.x & 31) >> 2, pair = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 32; i++) {  // columns 8 (i / 2) + 2 pair and the next, of row quad or of row quad + 8
        const int row = 16 * warp + quad + i % 2 * 8, column = i / 2 * 8 + 2 * pair;
        float low = t[2 * i], high = t[2 * i + 1];
        if (PARTS == 1 && row0 + row == column) low -= c;
        if (PARTS == 1 && row0 + row == column + 1) high -= c;
        const u32 upper = pack16<FORMAT>(low, high);
        char* at = room + i / 16 * TILE + swizzled(row, i / 2 % 8) + 4 * pair;
        ASYNC_SHARED(u32, at) = upper;
        if (PARTS == 2)
            ASYNC_SHARED(u32, at + 2 * TILE) =
                pack16<FORMAT>(low - widen<FORMAT>((u16)upper), high - widen<FORMAT>((u16)(upper >> 16)));
    }
    fence_proxy_async_shared();
    named_barrier_sync(barrier, 128);
    if ((threadIdx.x & 127) == 0) {
        if (PARTS == 1 && row0 == 0) to[DECAY] = c;
        tma_store_1d(to + row0 / 64 * (BYTES / 4), shared_address(room), BYTES);
        tma_store_wait_all();
    }
}
