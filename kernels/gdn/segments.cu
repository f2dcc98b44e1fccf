// Gated delta rule over long sequences on few heads, split along time (segments.py; sm_90a), behind the preparation of
// scan.cu:
//   maps     a block carries 64 columns of B (from zero) and 64 of A (from the identity, no values) through a segment:
//            two warpgroups on the same k, X and vectors. A sequence's first segment scans with outputs instead
//   compose  S_{i+1} = A_i S_i + B_i, operands in two bf16 parts, float32 sums
//   scan     the scan of scan.cuh, each segment from its own S
// rows: two entries a segment, {first token, tokens, first chunk, sequence}, {its number, whether its sequence's first,
// whether the last, 0}. starts [segments, hv, D, D] float32: before each segment S, until it is composed B. transitions
// likewise: A transposed, [in, out]; once used up, room for the states behind segments that nobody reads.
// RECOMPUTE (_lean), for rows without norms: the preparation leaves X and the gates' sums, as for scan.cuh's; a warp of
// a map makes the vectors, a warpgroup of a scan those and the scores.

#include "segments.cuh"

// Grid (2, hv, segments that are not their sequence's last, and those that are all of it): halves of a head.
#define MAPS(D, NAME, TYPE, RECOMPUTE)                                                               \
    extern "C" __global__ void __launch_bounds__(384, 1) gdn_segment_maps_d##D##_##NAME(ARGUMENTS) { \
        GIVEN                                                                                        \
        const Segment x = segment_of(rows);                                                          \
        if (x.leads) scan_segment<D, TYPE, 1, true, RECOMPUTE>(s, joint, shared, rows);              \
        else map_segment<D, TYPE, RECOMPUTE>(s, joint, shared, x);                                   \
    }
// Grid (2 / GROUPS, hv, segments that are not their sequence's first).
#define SCANS(D, NAME, TYPE, GROUPS, RECOMPUTE)                                     \
    extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1 + RECOMPUTE), 1) \
        gdn_segment_scan_d##D##_##NAME(ARGUMENTS) {                                 \
        GIVEN                                                                       \
        scan_segment<D, TYPE, GROUPS, false, RECOMPUTE>(s, joint, shared, rows);    \
    }

MAPS(128, bf16, BF16, false)
MAPS(128, fp16, FP16, false)
MAPS(128, bf16_lean, BF16, true)
MAPS(128, fp16_lean, FP16, true)
SCANS(128, bf16_g1, BF16, 1, false)
SCANS(128, bf16_g2, BF16, 2, false)
SCANS(128, fp16_g1, FP16, 1, false)
SCANS(128, fp16_g2, FP16, 2, false)
SCANS(128, bf16_g1_lean, BF16, 1, true)
SCANS(128, bf16_g2_lean, BF16, 2, true)
SCANS(128, fp16_g1_lean, FP16, 1, true)
SCANS(128, fp16_g2_lean, FP16, 2, true)

// Two bf16 whose sum is x to 2^-17: of a pair, in the halves of two words.
DEVICE void split_pair(float low, float high, u32& upper, u32& rest) {
    upper = pack16<BF16>(low, high);
    rest = pack16<BF16>(low - widen<BF16>((u16)upper), high - widen<BF16>((u16)(upper >> 16)));
}

// Grid (D / 16, hv, sequences), 256 threads: 16 columns of S through the segments [firsts[z], firsts[z + 1]) of a
// sequence, S = A S + B. A warp has 16 rows of A and reads them a segment ahead. Products are of two bf16 parts of both
// operands, all but rest times rest, in float32: three of 16 bits cost less than one in float32 on CUDA cores, where
// shared memory returned S to each thread, and S loses 2^-17 a segment.
constexpr int COLUMNS = 16, COMPOSE_WARPS = 8, PART_STRIDE = 128 + 8;
extern "C" __global__ void __launch_bounds__(32 * COMPOSE_WARPS, 1)
    gdn_segment_compose_d128(float* starts, const float* transitions, const int* firsts, int hv) {
    constexpr int D = 128, STEPS = D / 16, PART = COLUMNS * PART_STRIDE;
    static_assert(16 * COMPOSE_WARPS == D, "a warp's product has 16 rows");
    DYNAMIC_SHARED(memory);
    u16* const parts = reinterpret_cast<u16*>(memory);  // of S, [2 buffers][upper, rest][COLUMNS][PART_STRIDE rows]
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;  // of an mma's fragments
    const int last = firsts[blockIdx.z + 1] - 1;
    const long of_head = (long)blockIdx.y * D * D, segment = (long)hv * D * D;
    float* const own = starts + of_head + (16 * warp + row) * D + blockIdx.x * COLUMNS + 2 * pair;
    const float* const from = transitions + of_head + 2 * pair * D + 16 * warp + row;  // [in][out]
    float next[STEPS][8];  // A of the segment to come, pairs of inputs by register of an mma's fragment
    float2 b[2][2];        // B of this one, then S behind it: 8 columns n, rows row and row + 8
    const auto load = [&](int i) {
#pragma unroll
        for (int j = 0; j < STEPS; j++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                next[j][e] = from[i * segment + (16 * j + 8 * (e / 4) + e % 2) * D + 8 * (e / 2 % 2)];
    };
    const auto load_b = [&](int i) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            b[e / 2][e % 2] = *reinterpret_cast<const float2*>(own + i * segment + e % 2 * 8 * D + e / 2 * 8);
    };
    const auto store = [&](int buffer) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            u32 of[2];
            split_pair(b[e / 2][e % 2].x, b[e / 2][e % 2].y, of[0], of[1]);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                u16* const to = parts + (2 * buffer + part) * PART + (e / 2 * 8 + 2 * pair) * PART_STRIDE + 16 * warp +
                                row + e % 2 * 8;
                to[0] = (u16)of[part], to[PART_STRIDE] = (u16)(of[part] >> 16);
            }
        }
    };
    int i = firsts[blockIdx.z] + 1, buffer = 0;
    wait_on_dependent_grids();
    if (i >= last) return;
    load(i);
    load_b(i);
    store(0);
    __syncthreads();
#pragma unroll 1
    for (; i < last; i++, buffer ^= 1) {
        load_b(i + 1);
        u32 upper[STEPS][4], rest[STEPS][4];
#pragma unroll
        for (int j = 0; j < STEPS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) split_pair(next[j][2 * e], next[j][2 * e + 1], upper[j][e], rest[j][e]);
        if (i + 1 < last) load(i + 1);
        float sum[2][3][4] = {};  // by columns and product: three chains of eight
#pragma unroll
        for (int j = 0; j < STEPS; j++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 of[2][2];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    of[e / 2][e % 2] =
                        *reinterpret_cast<const u32*>(parts + (2 * buffer + e / 2) * PART +
                                                      (8 * n + row) * PART_STRIDE + 16 * j + 2 * pair + e % 2 * 8);
                mma_16816<true>(sum[n][0], upper[j][0], upper[j][1], upper[j][2], upper[j][3], of[0][0], of[0][1]);
                mma_16816<true>(sum[n][1], upper[j][0], upper[j][1], upper[j][2], upper[j][3], of[1][0], of[1][1]);
                mma_16816<true>(sum[n][2], rest[j][0], rest[j][1], rest[j][2], rest[j][3], of[0][0], of[0][1]);
            }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float (&of)[3][4] = sum[e / 2];
            const int at = e % 2 * 2;
            b[e / 2][e % 2].x += of[0][at] + (of[1][at] + of[2][at]);
            b[e / 2][e % 2].y += of[0][at + 1] + (of[1][at + 1] + of[2][at + 1]);
            *reinterpret_cast<float2*>(own + (i + 1) * segment + e % 2 * 8 * D + e / 2 * 8) = b[e / 2][e % 2];
        }
        store(buffer ^ 1);
        __syncthreads();
    }
}
