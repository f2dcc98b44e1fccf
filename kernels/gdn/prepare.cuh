// The preparation of scan.cuh, whose head has the mathematics: what a chunk needs that does not depend on the state.
// A unit, one chunk and k head, is a block's (scan.cu) or a team's, one of three warpgroups of a block that go through
// a list (fused.cu): the same code, but that a team loads k, q and gates of the next unit while it works on this one.
//
// The v heads of a k head share K K^T and Q K^T, products of wgmma over the whole square, which stay in registers. Per
// v head, each of the four warps owns 16 rows: it inverts its diagonal block by substitution in float32, then works
// leftwards, X_rs = -(sum of X_rm A_ms) X_ss, with products of 16 x 16 blocks in fp16: X_rm is the left operand and
// never leaves the registers.
// X and P are lower triangular: only ten of sixteen 16 x 16 blocks are computed, stored and read.
#pragma once

#include "formats.cuh"
#include "sm90/mma.cuh"

constexpr int C = 64;
constexpr float L2_EPS = 1e-6f, LOG2_E = 1.4426950408889634f;
constexpr int TILE = C * 128;                                    // bytes of 64 rows of 64 16-bit columns
constexpr int TRIANGLE = 10 * 512;                               // ten blocks of 16 rows of 32 bytes
constexpr int BLOCK = 2 * TRIANGLE + 1024;                       // X, P, then a, r, e [64] and c_C, float32
constexpr int RECOMPUTE_BLOCK = TRIANGLE + C * 4;                // X, then G log2(e) [64]
constexpr int HEADS = 8;                                         // most v heads per k head
constexpr int PREPARE_BLOCKS = 4, RECOMPUTE_PREPARE_BLOCKS = 5;  // blocks of the preparation an SM

// By pointer: the address is worked out last.
DEVICE void cp_async_16(void* to, const void* from, bool live) { cp_async_16(shared_address(to), from, live); }
DEVICE int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
DEVICE int swizzled_wide(int row, int piece) { return (piece >> 3) * TILE + swizzled(row, piece & 7); }
// Where the blocks (s, s), (s + 1, s), ... of a triangle begin: one K-major step of 16 columns.
DEVICE constexpr int triangle_step(int s) { return 2048 * s - 256 * s * (s - 1); }

constexpr int A_STRIDE = 72;         // halves per row of A: 144 bytes, so that ldmatrix meets no bank conflict
constexpr int DIAGONAL_STRIDE = 20;  // floats per column of a diagonal block
constexpr int TEAMS = 3;             // that fit a block
template <int D, bool TEAM = false, bool RECOMPUTE = false>
struct Preparation {
    static constexpr int SLOTS = TEAM ? 2 : 3;  // results of as many v heads in flight
    static constexpr int RESULT = RECOMPUTE ? RECOMPUTE_BLOCK : BLOCK;
    static constexpr int TILES = D / 64, OUT = SLOTS * RESULT, KQ = (RECOMPUTE ? 1 : 2) * TILES * TILE;
    static constexpr int RESULTS = TEAM ? KQ : 0;  // else k and q give way to the results
    static constexpr int A = TEAM ? KQ + OUT : OUT > KQ ? OUT : KQ;
    static constexpr int DIAGONAL = A + C * A_STRIDE * 2;
    static constexpr int VECTORS = DIAGONAL + 4 * 16 * DIAGONAL_STRIDE * 4;
    static constexpr int BYTES = VECTORS + (2 + 2 * HEADS) * C * 4;
};
template <int D>
constexpr int TEAM_BYTES = (Preparation<D, true>::BYTES + 1023) / 1024 * 1024;

// Eight bf16 values of a row whose other pieces are with the 16 lanes beside this one, as fp16, times the power of two
// that brings the row's largest into [1, 2). Returns the inverse of that power.
DEVICE float bf16_to_fp16(uint4& x) {
    u32 word[4] = {x.x, x.y, x.z, x.w}, largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = max(largest, max(word[i] & 0x7FFF, word[i] >> 16 & 0x7FFF));
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
    const u32 exponent = min(max(largest >> 7, 1u), 253u);
    const float factor = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = pack16<FP16>(widen<BF16>((u16)word[i]) * factor, widen<BF16>((u16)(word[i] >> 16)) * factor);
    x = make_uint4(word[0], word[1], word[2], word[3]);
    return __uint_as_float(exponent << 23);
}

struct Work {
    const u16 *q, *k;       // [tokens, hk, D]
    const float *g, *beta;  // [tokens, hv]
    char* workspace;        // [chunks, hv, BLOCK]
    float scale;
    int hk, hv, normalise;
    u16 *q_fp16, *k_fp16;  // CONVERT: q and k in fp16, rows scaled by powers of two
};
struct Unit {
    int first, live;  // token, tokens
    u32 chunk;        // of all sequences
    int head_k;
};
struct Gates {
    float x[2], rate[2];  // g log2(e) and beta of rows 2 lane, 2 lane + 1
};
// What a team takes from one unit to the next.
struct Ahead {
    const int4* units;
    int at, count, team;  // the next unit of `count`
    Unit next;            // live = 0: none
    Gates gates;          // of v head `warp` of the next unit
    u32 *flags, *done;    // [hk, chunks]; the flag of the unit before
    int chunks;
    u32 epoch;
};

template <int D, bool QUERIES = true>
DEVICE void fetch_rows(const Work& w, const Unit& unit, char* k_tile, char* q_tile, int thread) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int at = i * 128 + thread, row = at / (D / 8), piece = at % (D / 8);
        const long from = ((long)(unit.first + min(row, unit.live - 1)) * w.hk + unit.head_k) * D + piece * 8;
        cp_async_16(k_tile + swizzled_wide(row, piece), w.k + from, row < unit.live);
        if (QUERIES) cp_async_16(q_tile + swizzled_wide(row, piece), w.q + from, row < unit.live);
    }
    cp_async_commit();
}
DEVICE void fetch_gates(Gates& to, const Work& w, const Unit& unit, int h, int lane) {
    const long at = (long)unit.first * w.hv + unit.head_k * (w.hv / w.hk) + h;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 2 * lane + i;
        to.x[i] = row < unit.live ? w.g[at + (long)row * w.hv] * LOG2_E : 0.0f;
        to.rate[i] = row < unit.live ? w.beta[at + (long)row * w.hv] : 0.0f;
    }
}
template <int D>
DEVICE void fetch_next(Ahead& ahead, const Work& w, char* shared, int thread) {
    ahead.next = {};
    if (ahead.at < ahead.count) {
        const int4 x = __ldg(ahead.units + ahead.at);
        ahead.next = {x.x, x.y, (u32)x.z, x.w}, ahead.at += TEAMS;
    }
    if (ahead.next.live == 0) return;
    fetch_rows<D>(w, ahead.next, shared, shared + D / 64 * TILE, thread);
    if (thread / 32 < w.hv / w.hk) fetch_gates(ahead.gates, w, ahead.next, thread / 32, thread & 31);
}
// By the thread that stored a unit's results: once they have arrived, for bulk copies of whoever sees the flag.
DEVICE void publish(u32* flag, u32 epoch) {
    tma_store_wait_all();
    fence_proxy_async_global();
    st_release(flag, epoch);
}

template <bool TEAM>
DEVICE void meet_all(int team) {
    if constexpr (TEAM) named_barrier_sync(1 + team, 128);
    else __syncthreads();
}

// One unit, by 128 threads; a team has issued the loads of its rows of k and q before. CONVERT, for bf16 and D = 128:
// the norms take the inverse powers of q_fp16 and k_fp16, so that nothing else need know. RECOMPUTE, for rows without
// norms: X and the running sums alone, for a scan that recomputes the scores (scores.cuh); q is not read.
template <int D, int IN_TYPE, bool CONVERT, bool TEAM, bool RECOMPUTE = false>
DEVICE void prepare_unit(const Work& w, char* shared, const Unit& unit, Ahead& ahead) {
    static_assert(!CONVERT || (D == 128 && IN_TYPE == BF16));
    static_assert(!RECOMPUTE || !(CONVERT || TEAM));
    constexpr int TYPE = CONVERT ? FP16 : IN_TYPE;
    using At = Preparation<D, TEAM, RECOMPUTE>;
    char *k_tile = shared, *q_tile = shared + At::TILES * TILE;
    u16* a_tile = reinterpret_cast<u16*>(shared + At::A);
    float* norms = reinterpret_cast<float*>(shared + At::VECTORS);  // nk [64], nq [64]
    float *sums = norms + 2 * C, *rates = sums + HEADS * C;         // G log2(e), beta: [HEADS][64]
    const int thread = TEAM ? opaque(threadIdx.x & 127) : threadIdx.x;
    const int warp = thread / 32, lane = thread & 31, quad = lane >> 2, pair = lane & 3;
    const int first = unit.first, live = unit.live, head_k = unit.head_k;
    const int hk = w.hk, hv = w.hv, ratio = hv / hk;
    const float scale = w.scale;

    if (!TEAM) fetch_rows<D, !RECOMPUTE>(w, unit, k_tile, q_tile, thread);
    if (TEAM && ahead.done && thread == 0) tma_store_wait_read<0>();  // the results of the unit before
    for (int h = warp; h < ratio; h += 4) {
        Gates gates;
        if (TEAM && h == warp) gates = ahead.gates;
        else fetch_gates(gates, w, unit, h, lane);
        float sum = gates.x[0] + gates.x[1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float below = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += below;
        }
        sums[h * C + 2 * lane] = sum - gates.x[1], sums[h * C + 2 * lane + 1] = sum;
        rates[h * C + 2 * lane] = gates.rate[0], rates[h * C + 2 * lane + 1] = gates.rate[1];
    }
    cp_async_wait<0>();
    if constexpr (CONVERT) {  // each thread what it copied itself
#pragma unroll 1
        for (int i = 0; i < 2 * (D / 16); i++) {
            const int at = (i >> 1) * 128 + thread, row = at / (D / 8), piece = at % (D / 8);
            uint4* tile = reinterpret_cast<uint4*>((i & 1 ? q_tile : k_tile) + swizzled_wide(row, piece));
            uint4 x = *tile;
            const float power = bf16_to_fp16(x);
            ASYNC_SHARED(uint4, tile) = x;
            u16* to = (i & 1 ? w.q_fp16 : w.k_fp16) + ((long)(first + row) * hk + head_k) * D + piece * 8;
            if (row < live) *reinterpret_cast<uint4*>(to) = x;
            if (piece == 0) norms[(i & 1) * C + row] = power;
        }
    }
    fence_proxy_async_shared();
    meet_all<TEAM>(ahead.team);

    const int block = warp_uniform((u32)warp);  // the 16 rows of this warp
    const float power = CONVERT ? norms[thread] : 1.0f;
    if (!RECOMPUTE && w.normalise) {
        const char* tile = thread < C ? k_tile : q_tile;
        const int row = thread & (C - 1);
        float total = 0;
#pragma unroll
        for (int p = 0; p < D / 8; p++) {
            const uint4 x = *reinterpret_cast<const uint4*>(tile + swizzled_wide(row, p));
            const u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float low = widen<TYPE>((u16)word[i]), high = widen<TYPE>((u16)(word[i] >> 16));
                total += low * low + high * high;
            }
        }
        norms[thread] = 1.0f / sqrtf(total + L2_EPS / (power * power));
    } else if (!RECOMPUTE) {
        norms[thread] = power;
    }
    float kk[8][4], qk[8][4];  // rows quad and quad + 8 of the block, columns 8 j + 2 pair, + 1
    {
        auto& kk_all = reinterpret_cast<float (&)[32]>(kk);
        auto& qk_all = reinterpret_cast<float (&)[32]>(qk);
        const u32 base = warp_uniform(shared_address(k_tile));
        const u64 k_columns = smem_descriptor_128B(base), q_columns = smem_descriptor_128B(base + At::TILES * TILE);
        const auto step = [](int i) { return (u64)(((i >> 2) * TILE + (i & 3) * 32) >> 4); };  // 16 columns on
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            wgmma_ss_n64<TYPE == BF16>(kk_all, k_columns + step(i), k_columns + step(i), i > 0);
            if (!RECOMPUTE) wgmma_ss_n64<TYPE == BF16>(qk_all, q_columns + step(i), k_columns + step(i), i > 0);
        }
        wgmma_commit();
        wgmma_wait<0>(kk_all);
        if (!RECOMPUTE) wgmma_wait<0>(qk_all);
    }
    meet_all<TEAM>(ahead.team);  // k and q are dead, norms are there
    if constexpr (TEAM) fetch_next<D>(ahead, w, shared, thread);
    u32 scores[8][2];  // q.k with its norms and the scale, in the format of P
#pragma unroll
    for (int j = 0; j < 8 && !RECOMPUTE; j++) {
        const float2 column = *reinterpret_cast<const float2*>(norms + 8 * j + 2 * pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = block * 16 + quad + 8 * i;
            const float of_k = norms[row], of_q = scale * norms[C + row];
            kk[j][2 * i] *= of_k * column.x, kk[j][2 * i + 1] *= of_k * column.y;
            scores[j][i] = pack16<FP16>(of_q * column.x * qk[j][2 * i], of_q * column.y * qk[j][2 * i + 1]);
        }
    }

    float* diagonal = reinterpret_cast<float*>(shared + At::DIAGONAL) + warp * 16 * DIAGONAL_STRIDE;
    for (int h = 0; h < ratio; h++) {
        const int lane = opaque(thread & 31);  // addresses are computed again for each head: kept, they would spill
        const int pair = lane & 3, row0 = block * 16 + (lane >> 2);
        char* result = shared + At::RESULTS + h % At::SLOTS * At::RESULT;
        const float *sum = sums + h * C, *rate = rates + h * C;
        if (RECOMPUTE && thread < C) reinterpret_cast<float*>(result + TRIANGLE)[thread] = sum[thread];
        if (!RECOMPUTE && thread < C) {
            float* vector = reinterpret_cast<float*>(result + 2 * TRIANGLE);
            const float decay = exp2_fast(sum[thread]), norm = norms[thread];
            vector[thread] = decay * norm;
            vector[C + thread] = scale * decay * norms[C + thread];
            vector[2 * C + thread] = exp2_fast(sum[C - 1] - sum[thread]) * norm;
            if (thread == 0) vector[3 * C] = exp2_fast(sum[C - 1]);
        }
        const float row_sum[2] = {sum[row0], sum[row0 + 8]}, row_rate[2] = {rate[row0], rate[row0 + 8]};
        // Within a 16 x 16 block of a triangle: row quad of the column half at `piece`, + 256 for row quad + 8.
        const int in_block = (lane >> 2) * 32 + 4 * pair, flip = lane & 16;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j >> 1 > block) break;
            const int column = 8 * j + 2 * pair;
            const bool on_diagonal = j >> 1 == block;
            const float2 column_sum = *reinterpret_cast<const float2*>(sum + column);
            float a[4], p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = row0 + (i >> 1) * 8, col = column + (i & 1);
                float decay = exp2_fast(row_sum[i >> 1] - (i & 1 ? column_sum.y : column_sum.x));
                if (on_diagonal && row < col) decay = 0.0f;  // above it the exponent may be large: never multiplied
                a[i] = row_rate[i >> 1] * decay * kk[j][i];
                if (!RECOMPUTE) p[i] = decay * widen<FP16>((u16)(scores[j][i >> 1] >> (16 * (i & 1))));
            }
            char* to_p = result + TRIANGLE + triangle_step(j >> 1) + (block - (j >> 1)) * 512 + in_block +
                         (((j & 1) << 4) ^ flip);
#pragma unroll
            for (int i = 0; i < 2 && !RECOMPUTE; i++)
                ASYNC_SHARED(u32, to_p + 256 * i) = pack16<FP16>(p[2 * i], p[2 * i + 1]);
            if (on_diagonal) {  // transposed, for the substitution, which reads below the diagonal only
                float* to = diagonal + ((j & 1) * 8 + 2 * pair) * DIAGONAL_STRIDE + (lane >> 2);
#pragma unroll
                for (int i = 0; i < 2; i++) to[8 * i] = a[2 * i], to[DIAGONAL_STRIDE + 8 * i] = a[2 * i + 1];
            } else {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    *reinterpret_cast<u32*>(a_tile + (row0 + i * 8) * A_STRIDE + column) =
                        pack16<FP16>(a[2 * i], a[2 * i + 1]);
            }
        }
        __syncwarp();
        // Column lane & 15 of the inverse of the diagonal block: as soon as x_j is final it leaves the rows below.
        float x[16];
        const int mine = lane & 15;
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = i == mine ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < 15; j++)
#pragma unroll
            for (int i4 = (j + 1) / 4 * 4; i4 < 16; i4 += 4) {
                const float4 a = *reinterpret_cast<const float4*>(diagonal + j * DIAGONAL_STRIDE + i4);
                if (i4 > j) x[i4] = fmaf(-a.x, x[j], x[i4]);
                if (i4 + 1 > j) x[i4 + 1] = fmaf(-a.y, x[j], x[i4 + 1]);
                if (i4 + 2 > j) x[i4 + 2] = fmaf(-a.z, x[j], x[i4 + 2]);
                if (i4 + 3 > j) x[i4 + 3] = fmaf(-a.w, x[j], x[i4 + 3]);
            }
        if (lane < 16) {  // a column is a row of the transposed block, which is what is kept
            uint4* to = reinterpret_cast<uint4*>(a_tile + (block * 16 + mine) * A_STRIDE + block * 16);
            to[0] = make_uint4(pack16<FP16>(x[0], x[1]), pack16<FP16>(x[2], x[3]), pack16<FP16>(x[4], x[5]),
                               pack16<FP16>(x[6], x[7]));
            to[1] = make_uint4(pack16<FP16>(x[8], x[9]), pack16<FP16>(x[10], x[11]), pack16<FP16>(x[12], x[13]),
                               pack16<FP16>(x[14], x[15]));
        }
        meet_all<TEAM>(ahead.team);
        // Row block r of the inverse, leftwards: X_rs = -(sum over s < m <= r of X_rm A_ms) X_ss.
        const int from_row = ((lane >> 3) & 1) * 8 + (lane & 7), from_column = (lane >> 4) * 8;
        const int inverse_row = from_column + (lane & 7), inverse_column = ((lane >> 3) & 1) * 8;  // of its transpose
        u32 inverse[4][4];
        ldmatrix_x4_trans(inverse[3],
                          shared_address(a_tile + (block * 16 + inverse_row) * A_STRIDE + block * 16 + inverse_column));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 factor = *reinterpret_cast<const float2*>(rate + block * 16 + half * 8 + 2 * pair);
            char* to =
                result + triangle_step(0) + in_block + ((half << 4) ^ flip) + 2048 * block - 256 * block * (block - 1);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 word = inverse[3][2 * half + i];
                ASYNC_SHARED(u32, to + 256 * i) =
                    pack16<FP16>(widen<FP16>((u16)word) * factor.x, widen<FP16>((u16)(word >> 16)) * factor.y);
            }
        }
#pragma unroll
        for (int m = 0; m < 3; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) inverse[m][i] = 0;
        // The warp's own block is kept in inverse[3], block - 1 in inverse[2] and so on: indices known at compile time.
#pragma unroll
        for (int left = 1; left < 4; left++) {
            const int s = block - left;
            if (s < 0) break;
            float product[2][4] = {}, merged[2][4] = {};
            u32 b[4], packed[4];
#pragma unroll
            for (int m = 0; m < left; m++) {
                ldmatrix_x4_trans(
                    b, shared_address(a_tile + ((block - m) * 16 + from_row) * A_STRIDE + s * 16 + from_column));
                mma_16816<false>(product[0], inverse[3 - m][0], inverse[3 - m][1], inverse[3 - m][2], inverse[3 - m][3],
                                 b[0], b[1]);
                mma_16816<false>(product[1], inverse[3 - m][0], inverse[3 - m][1], inverse[3 - m][2], inverse[3 - m][3],
                                 b[2], b[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                packed[i] = pack16<FP16>(-product[i >> 1][2 * (i & 1)], -product[i >> 1][2 * (i & 1) + 1]);
            ldmatrix_x4(b, shared_address(a_tile + (s * 16 + inverse_row) * A_STRIDE + s * 16 + inverse_column));
            mma_16816<false>(merged[0], packed[0], packed[1], packed[2], packed[3], b[0], b[1]);
            mma_16816<false>(merged[1], packed[0], packed[1], packed[2], packed[3], b[2], b[3]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 factor = *reinterpret_cast<const float2*>(rate + s * 16 + half * 8 + 2 * pair);
                char* to = result + 2048 * s - 256 * s * (s - 1) + left * 512 + in_block + ((half << 4) ^ flip);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float low = merged[half][2 * i], high = merged[half][2 * i + 1];
                    inverse[3 - left][2 * half + i] = pack16<FP16>(low, high);
                    ASYNC_SHARED(u32, to + 256 * i) = pack16<FP16>(low * factor.x, high * factor.y);
                }
            }
        }
        if (TEAM && h == 0 && ahead.done && thread == 0) publish(ahead.done, ahead.epoch);  // warp 0 has least to do
        fence_proxy_async_shared();
        if (thread == 0) tma_store_wait_read<At::SLOTS - 2>();  // the copy that reads the slot of the next head
        meet_all<TEAM>(ahead.team);
        if (thread == 0)
            tma_store_1d(w.workspace + ((long)unit.chunk * hv + head_k * ratio + h) * At::RESULT,
                         shared_address(result), At::RESULT);
    }
    if constexpr (TEAM) ahead.done = ahead.flags + (long)head_k * ahead.chunks + unit.chunk;
}

// Grid (chunks, hk), 128 threads. chunks [NT, 2]: first token and the end of its sequence.
template <int D, int IN_TYPE, bool CONVERT, bool RECOMPUTE = false>
DEVICE void prepare(const Work& w, const int* chunks) {
    DYNAMIC_SHARED(memory);
    char* const shared = reinterpret_cast<char*>(memory);
    const int first = chunks[2 * blockIdx.x], live = min(C, chunks[2 * blockIdx.x + 1] - first);
    const Unit unit{first, live, blockIdx.x, (int)blockIdx.y};
    Ahead none;
    prepare_unit<D, IN_TYPE, CONVERT, false, RECOMPUTE>(w, shared, unit, none);
    launch_dependent_grids();  // late: the scan's blocks only hide their own start behind the last of these
    if (threadIdx.x == 0) tma_store_wait_all();
}

// A block of TEAMS warpgroups: of `count` entries of `units`, first token, tokens, chunk and k head each, a team takes
// every TEAMS-th, up to one without tokens, which only fills a row. The flag of a unit, told in the unit after it, is
// `epoch` once its part of the workspace has arrived.
template <int D, int TYPE>
DEVICE void prepare_units(const Work& w, const int4* units, int count, u32* flags, int chunks, u32 epoch) {
    DYNAMIC_SHARED(memory);
    char* const shared = reinterpret_cast<char*>(memory);
    const int team = threadIdx.x / 128;
    char* own = shared + team * TEAM_BYTES<D>;
    Ahead ahead{units, team, count, team, {}, {}, flags, nullptr, chunks, epoch};
    fetch_next<D>(ahead, w, own, threadIdx.x & 127);
#pragma unroll 1
    while (ahead.next.live) {
        const Unit unit = ahead.next;
        prepare_unit<D, TYPE, false, true>(w, own, unit, ahead);
    }
    if (ahead.done && (threadIdx.x & 127) == 0) publish(ahead.done, epoch);
}
