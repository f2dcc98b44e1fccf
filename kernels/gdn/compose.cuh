// A scan that composes its own S (segments_in_scan.cu): from the state behind its sequence's first segment,
// S <- A S + B once for each segment in between, transposed as the scan has it: T <- T A^T + B^T, T [64 columns of v, k]
// in a warpgroup's accumulators. Packed in pairs they are the next product's left operand, so a step exchanges nothing.
//
// A^T [in, out] is the right operand, as the maps leave it and bulk copies bring it: a piece, [in / 64][out / 64][64][64]
// of 16 bits, swizzled. A = c I + R, c the segment's decay in float32: T A^T = c T + T R^T, where the one product has R
// in fp16 and T in fp16, each row times a power of two. It loses 2^-12 of what the segment's tokens change; both operands
// in two bf16 parts, three products, lose 2^-17 of all and took longer (NOTES.md).
// B lies as a warpgroup's accumulators do, [D / 64][16][128 threads] of four floats, and is added to a product's sums.
// The ring of pieces lies where a stage has K and Q; the scan's first chunks follow it there.
#pragma once

#include "sm90/mma.cuh"
#include "sm90/pipeline.cuh"
#include "scan.cuh"

constexpr int SCAN_STAGES = 3;
constexpr int PIECE = 4 * TILE;   // of a head of 128
constexpr int DECAY = PIECE / 4;  // where c lies, in floats from R on

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
        if (uses > 0) mbarrier_wait(pieces.empty(state.stage), uses - 1 & 1);  // for good, once the last is released
        Loads::producer_acquire(state);
    }
};

// The producer warp: `count` pieces, those of the map at `from` and of the next ones, a segment's transitions apart.
template <int STAGE_BYTES, class Pieces>
DEVICE void load_pieces(const float* from, long segment, char* stages, const Pieces& pieces, int count) {
    typename Pieces::State place;
    wait_on_dependent_grids();  // the maps
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        pieces.producer_acquire(place);
        if ((threadIdx.x & 31) == 0) {
            pieces.producer_expect(place, PIECE);
            tma_load_1d(shared_address(stages + place.stage * STAGE_BYTES), from + i * segment, PIECE,
                        pieces.full(place.stage));
        }
        __syncwarp();
        place.advance();
    }
}

// What a warpgroup of `consume` does between its first state and its first chunk.
template <int STAGE_BYTES, class Pieces>
struct ComposeBefore {
    static constexpr bool LEAVES = false;  // a state, unless somebody asks for it
    char* stages;
    Pieces pieces;
    int count;           // of maps
    const float *a, *b;  // the first map's; B: this warpgroup's columns
    long segment;        // from one map to the next one

    DEVICE void operator()(float (&t)[64]) const {
        const int steps = warp_uniform(count);
        const float *own = b + 4 * (threadIdx.x & 127), *decay = a + DECAY;
        float c = steps > 0 ? ldg_float(decay) : 0.0f;
        typename Pieces::State place;
#pragma unroll 1
        for (int n = 0; n < steps; n++) {
            float up[2], down[2], sum[64];
            u32 left[32];
            uint4 next[16];
            const float own_c = c;
#pragma unroll
            for (int j = 0; j < 16; j++) next[j] = ldg128(own + 512 * j);
            own += segment, decay += segment;
            c = ldg_float(decay);  // the next map's, behind which the launch's own memory goes on
            scales(t, up, down);
#pragma unroll
            for (int i = 0; i < 64; i++) t[i] *= up[i / 2 & 1], sum[i] = own_c * t[i];
#pragma unroll
            for (int i = 0; i < 32; i++) left[i] = opaque(pack16<FP16>(t[2 * i], t[2 * i + 1]));
            pieces.consumer_wait(place);
            const u64 columns = columns_of(place.stage);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++) product(sum, left + 4 * i, columns, i);
            wgmma_commit();
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
    // By rows 16 i and on of a piece.
    DEVICE static void product(float (&sum)[64], const u32* of, u64 columns, int i) {
        wgmma_rs<128, false, true>(sum, of, columns + (u64)(i / 4 * 2 * TILE + i % 4 * 2048 >> 4), 1);
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
            for (int j = 0; j < 16; j++)
                most = fmaxf(most, fmaxf(fabsf(t[4 * j + 2 * i]), fabsf(t[4 * j + 2 * i + 1])));
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
DEVICE void leave_map(const float (&t)[64], float c, char* room, float* to, int row0, int barrier) {
    constexpr int BYTES = 2 * TILE;
    const int warp = threadIdx.x / 32 & 3, quad = (threadIdx.x & 31) >> 2, pair = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 32; i++) {  // columns 8 (i / 2) + 2 pair and the next, of row quad or of row quad + 8
        const int row = 16 * warp + quad + i % 2 * 8, column = i / 2 * 8 + 2 * pair;
        float low = t[2 * i], high = t[2 * i + 1];
        if (row0 + row == column) low -= c;
        if (row0 + row == column + 1) high -= c;
        ASYNC_SHARED(u32, room + i / 16 * TILE + swizzled(row, i / 2 % 8) + 4 * pair) = pack16<FP16>(low, high);
    }
    fence_proxy_async_shared();
    named_barrier_sync(barrier, 128);
    if ((threadIdx.x & 127) == 0) {
        if (row0 == 0) to[DECAY] = c;
        tma_store_1d(to + row0 / 64 * (BYTES / 4), shared_address(room), BYTES);
        tma_store_wait_all();
    }
}
