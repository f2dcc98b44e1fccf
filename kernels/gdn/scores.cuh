// The scores P and the vectors of a chunk, made in the SM that scans it (the RECOMPUTE scan of scan.cuh): to the
// bit what prepare.cuh makes, for rows of q and k that need no norm. What travels then is X and the running sums of the
// gates, 5,376 bytes a chunk and v head instead of 11,264 in both directions, and the preparation does not read q.
#pragma once

#include "prepare.cuh"

// A warp's 16 rows of P, 16 (WARP + 1) columns; the rest stays zero. All loads stand ahead of the stores, which the
// compiler takes for stores to the same memory.
template <int WARP>
DEVICE void write_scores(const float (&qk)[32], char* to, const float* sum, const float (&row_sum)[2], float scale,
                         int quad, int pair) {
    constexpr int N = 2 * (WARP + 1);
    u32 scores[N][2];
    float2 column_sum[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            scores[j][i] = pack16<FP16>(scale * qk[4 * j + 2 * i], scale * qk[4 * j + 2 * i + 1]);
        column_sum[j] = *reinterpret_cast<const float2*>(sum + 8 * j + 2 * pair);
    }
    to += WARP * 512 + quad * 32 + 4 * pair;
    const int flip = (quad & 4) << 2;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (j == N - 1 && i == 0) continue;
            float low = exp2_fast(row_sum[i] - column_sum[j].x), high = exp2_fast(row_sum[i] - column_sum[j].y);
            if (j == N - 2 + i && quad < 2 * pair) low = 0.0f;  // above the diagonal, where the exponent may be large
            if (j == N - 2 + i && quad < 2 * pair + 1) high = 0.0f;
            ASYNC_SHARED(u32, to + (j >> 1) * 2048 + 256 * i + (((j & 1) << 4) ^ flip)) =
                pack16<FP16>(low * widen<FP16>((u16)scores[j][i]), high * widen<FP16>((u16)(scores[j][i] >> 16)));
        }
}

// One warpgroup, chunk after chunk; At: where a stage has its parts. The latency of this chain shows in the scan's time
// although it runs ahead: hence a form for each warp, with no branch among its columns.
template <int D, int TYPE, class At, class Loads, class Scores>
DEVICE void make_scores(char* stages, const Loads& loads, const Scores& scores, int tokens, float scale) {
    const int thread = threadIdx.x & 127, warp = warp_uniform(thread / 32), quad = (thread & 31) >> 2,
              pair = thread & 3;
    const int row0 = warp * 16 + quad;
    typename Loads::State place;
#pragma unroll 1
    for (int n = 0; n * C < tokens; n++) {
        char* stage = stages + place.stage * At::BYTES;
        loads.consumer_wait(place);
        const u32 base = warp_uniform(shared_address(stage));
        const u64 k_columns = smem_descriptor_128B(base), q_columns = smem_descriptor_128B(base + At::Q);
        float qk[32];  // rows row0, row0 + 8, columns 8 j + 2 pair, + 1 at [4 j + ...]
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const u64 step = ((i >> 2) * TILE + (i & 3) * 32) >> 4;  // 16 columns on
            wgmma_ss_n64<TYPE == BF16>(qk, q_columns + step, k_columns + step, i > 0);
        }
        wgmma_commit();
        const float* sum = reinterpret_cast<const float*>(stage + At::SUMS);
        float* vector = reinterpret_cast<float*>(stage + At::VECTORS);
        const float row_sum[2] = {sum[row0], sum[row0 + 8]};
        if (thread < C) {  // the warps with least of P
            const float own = sum[thread], last = sum[C - 1], decay = exp2_fast(own);
            vector[thread] = decay;
            vector[C + thread] = scale * decay;
            vector[2 * C + thread] = exp2_fast(last - own);
            if (thread == 0) vector[3 * C] = exp2_fast(last);
        }
        wgmma_wait<0>(qk);
        char* to = stage + At::P;
        if (warp == 0) write_scores<0>(qk, to, sum, row_sum, scale, quad, pair);
        else if (warp == 1) write_scores<1>(qk, to, sum, row_sum, scale, quad, pair);
        else if (warp == 2) write_scores<2>(qk, to, sum, row_sum, scale, quad, pair);
        else write_scores<3>(qk, to, sum, row_sum, scale, quad, pair);
        fence_proxy_async_shared();
        __syncwarp();
        if ((thread & 31) == 0) mbarrier_arrive(scores.full(place.stage));
        place.advance();
    }
}
