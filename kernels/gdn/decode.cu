// Gated delta rule, one token per sequence, states updated where they stand (sm_90a; inline PTX, no headers).
//
// A state is [D, D] (k dimension, v dimension), contiguous: 64 KB in float32 at D = 128. One pass:
//     guess = S^T k, read = S^T q      sums over the k dimension of the state as loaded
//     u = beta (v - exp(g) guess)      S <- exp(g) S + k u^T      o = scale (exp(g) read + (k . q) u)
// A block owns all rows of a V_TILE of columns; every 16-byte load of the state is issued before the first multiply and
// stays in registers until it is stored.
// Columns never interact, rows meet in one block-wide sum. Each warp keeps a private copy of k and q, or of its own
// rows of them, so the only block barrier is that of the sum; ORDERED adds one.

#include "decode_token.cuh"

#define ARGUMENTS                                                                                \
    const void *q, const void *k, const void *v, const float *g, const float *beta, char *state, \
        const int *state_rows, void *o, float scale, int batch, int hk, int hv, int normalise, int format
#define PASSED_AS(FORMAT) q, k, v, g, beta, state, state_rows, o, scale, batch, hk, hv, normalise, FORMAT
#define PASSED PASSED_AS(format)

// One warp: the sequence whose slot is the nth smallest; those without a slot come last. At most 256 ids, below 1,024.
// Blocks that run together then work on neighbouring memory. No result depends on which block has which sequence.
constexpr int ORDERED_IDS = 256, ORDERED_ROWS = 1024;
DEVICE void in_order(const int* rows, int batch, int nth, int& b, int& slot) {
    constexpr int N = ORDERED_IDS / 32;
    __shared__ __align__(16) unsigned char taken[2 * ORDERED_ROWS];  // 1 where a row is in use; then whose it is
    const int lane = threadIdx.x & 31;
    const u32 before = (1u << lane) - 1;
    uint4* const taken_16 = reinterpret_cast<uint4*>(taken);
    int id[N];
#pragma unroll
    for (int i = 0; i < N; i++) id[i] = lane + 32 * i < batch ? __ldg(rows + lane + 32 * i) : -1;
#pragma unroll
    for (int i = 0; i < ORDERED_ROWS / 512; i++) taken_16[lane + 32 * i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++)
        if (id[i] >= 0) taken[id[i]] = 1, taken[ORDERED_ROWS + id[i]] = (unsigned char)(lane + 32 * i);
    __syncwarp();
    const uint4 x = taken_16[2 * lane], y = taken_16[2 * lane + 1];  // a lane counts 32 rows, in bytes first
    const int count = (x.x + x.y + x.z + x.w + y.x + y.y + y.z + y.w) * 0x01010101u >> 24;
    int below = 0;
#pragma unroll
    for (int bit = 0; bit < 6; bit++) below += __popc(__ballot_sync(~0u, count >> bit & 1) & before) << bit;
    const u32 reach = __ballot_sync(~0u, below + count > nth);
    if (reach) {
        const int first = __ffs(reach) - 1, left = nth - __shfl_sync(~0u, below, first);
        const bool here = taken[32 * first + lane];
        const u32 all = __ballot_sync(~0u, here);
        slot = 32 * first + __ffs(__ballot_sync(~0u, here && __popc(all & before) == left)) - 1;
        b = taken[ORDERED_ROWS + slot];
        return;
    }
    int left = nth - __shfl_sync(~0u, below + count, 31);
    slot = -1, b = nth;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const bool here = lane + 32 * i < batch && id[i] < 0;
        const u32 all = __ballot_sync(~0u, here), it = __ballot_sync(~0u, here && __popc(all & before) == left);
        if (it) b = 32 * i + __ffs(it) - 1;
        left -= __popc(all);
    }
}
// The same for the block: its last warp looks, and starts the fetch of the block's share of the head, if there is one.
template <int THREADS, u32 SHARE, u32 HEAD, bool PREFETCH>
DEVICE void next_in_order(const int* rows, int batch, const char* state, int head, int hv, int& b, int& slot) {
    __shared__ int found[2];
    if (threadIdx.x >= THREADS - 32) {
        in_order(rows, batch, blockIdx.z, b, slot);
        if (threadIdx.x == THREADS - 1) {
            state += ((long)slot * hv + head) * HEAD + blockIdx.x * SHARE;
            if (PREFETCH && slot >= 0) tma_prefetch_1d(state, SHARE);
            found[0] = b, found[1] = slot;
        }
    }
    named_barrier_sync(1, THREADS);
    b = found[0], slot = found[1];
}

// The nth head's place among those of the pool: negative where its sequence has none, and past the last head.
DEVICE int place_of(int n, int batch, int hv, const int* rows) {
    return (n < batch * hv ? __ldg(rows + n / hv) : -1) * hv + n % hv;
}

constexpr int WAVE = 4 * 132;  // heads that an H100 or H200 works on at once, four blocks an SM

// Grid (D / V_TILE, hv, batch). BYTES: 4 for a float32 state, 2 for bf16. TURNS: a thread's rows are consecutive
// (false) or all threads' rows take turns, so that the block's loads advance through memory. PREFETCH 1: the blocks of
// a head first prefetch it into L2, a share each: one request for what the loads then request line by line. More:
// the first WAVE heads do so, each a block, and the others are fetched by the block PREFETCH heads before them, once
// its token is decoded. ORDERED: sequences in the order of their slots.
template <int D, int V_TILE, int WARPS, int BYTES, int HINT, bool TURNS, int PREFETCH, bool ORDERED>
DEVICE void decode(ARGUMENTS) {
    constexpr int VEC = 16 / BYTES, LV = V_TILE / VEC, RL = 32 / LV, R = D / (WARPS * RL);
    static_assert(LV <= 32 && R >= 1 && R * WARPS * RL == D, "tile");
    __shared__ __align__(16) float kq[WARPS][2 * D];
    __shared__ __align__(16) float sums[WARPS * 2 * V_TILE];
    const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    constexpr int STEP = TURNS ? WARPS * RL : 1;
    constexpr bool AHEAD = PREFETCH > 1;
    static_assert(!AHEAD || (V_TILE == D && PREFETCH <= WAVE && !ORDERED), "a block is a head, its row found by an id");
    const int part = AHEAD ? 0 : blockIdx.x, at = (lane % LV) * VEC, column = part * V_TILE + at;
    const int row = (warp * RL + lane / LV) * (TURNS ? 1 : R);
    constexpr u32 SHARE = D * V_TILE * BYTES;  // contiguous, so not the columns of one block
    int b = blockIdx.z, slot;
    if (ORDERED)
        next_in_order<WARPS * 32, SHARE, D * D * BYTES, PREFETCH == 1>(state_rows, batch, state, head, hv, b, slot);
    else  // consecutive rows are the form for few states, where waiting for an id shows: there none need be given
        slot = TURNS || state_rows ? __ldg(state_rows + b) : b;
    const bool fetcher = threadIdx.x == WARPS * 32 - 1;
    const int nth = b * hv + head, ahead = nth + PREFETCH;
    const int later = AHEAD && fetcher && ahead >= WAVE ? place_of(ahead, batch, hv, state_rows) : -1;
    const char* const pool = state;
    const auto fetch_later = [&] {
        if (later >= 0) tma_prefetch_1d(pool + (long)later * SHARE, SHARE);
    };
    RawToken<D, VEC> raw_token;
    Token<VEC> t;
    load_token(raw_token, q, k, v, g, beta, b, head, hk, hv, column, format);
    const bool writer = warp == 0 && lane < LV;
    const long at_o = (long)(b * hv + head) * D + column;
    float read[VEC], guess[VEC];
    if (slot < 0) {
#pragma unroll
        for (int j = 0; j < VEC; j++) read[j] = 0;
        if (writer) store_activations(o, at_o, read, format);
        fetch_later();
        return;
    }
    state += ((long)slot * hv + head) * D * D * BYTES;
    if (PREFETCH && !ORDERED && fetcher && (!AHEAD || nth < WAVE)) tma_prefetch_1d(state + part * SHARE, SHARE);
    if (PREFETCH) __syncwarp();  // ptxas would move the fetch behind the loads
    state += ((long)row * D + column) * BYTES;
    const u64 policy = HINT ? evict_first_policy() : 0;
    uint4 raw[R];
#pragma unroll
    for (int i = 0; i < R; i++) raw[i] = load_state<HINT>(state + (long)i * STEP * D * BYTES, policy);
    share_token(t, raw_token, kq[warp], normalise, format);
    fetch_later();
    partial_sums<D, R, VEC, STEP>(guess, read, raw, kq[warp], row);
    total_sums<V_TILE, WARPS, LV, VEC>(guess, read, sums, warp, at, WARPS * 32);
    forget_unpacked(raw);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        guess[j] = t.rate * (t.v[j] - t.decay * guess[j]);  // u
        read[j] = scale * (t.decay * read[j] + t.dot * guess[j]);
    }
#pragma unroll
    for (int i = 0; i < R; i++)
        store_state<HINT>(state + (long)i * STEP * D * BYTES,
                          updated<AHEAD>(raw[i], guess, t.decay, kq[warp][row + i * STEP]), policy);
    if (writer) store_activations(o, at_o, read, format);
}

// The same for a float32 state in fewer registers, so that a fifth block fits the SM: rows in turns, a lane holds one
// row of k and q, its warp's own; their norms meet with the sums, v and the gates come through shared memory.
template <int D, int V_TILE, int WARPS, int HINT, bool PREFETCH, bool ORDERED>
DEVICE void decode_slim(ARGUMENTS) {
    constexpr int BYTES = 4, VEC = 4, LV = V_TILE / VEC, RL = 32 / LV, STEP = WARPS * RL, R = D / STEP;
    static_assert(R * RL == 32 && R * STEP == D && V_TILE <= WARPS * 32, "tile");
    __shared__ __align__(16) float kq[WARPS][64];
    __shared__ __align__(16) float sums[WARPS * 2 * V_TILE];
    __shared__ float values[V_TILE], norms[WARPS][3], gates[2];
    const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int at = (lane % LV) * VEC, column = blockIdx.x * V_TILE + at, row = lane / LV;
    constexpr u32 SHARE = D * V_TILE * BYTES;
    int b = blockIdx.z, slot;
    if (ORDERED) next_in_order<WARPS * 32, SHARE, D * D * BYTES, PREFETCH>(state_rows, batch, state, head, hv, b, slot);
    else slot = __ldg(state_rows + b);
    const bool writer = warp == 0 && lane < LV, half = format == BF16 || format == FP16;
    float read[VEC], guess[VEC];
    if (slot < 0) {
#pragma unroll
        for (int j = 0; j < VEC; j++) read[j] = 0;
        if (writer) store_activations(o, (long)(b * hv + head) * D + column, read, format);
        return;
    }
    state += ((long)slot * hv + head) * D * D * BYTES;
    if (PREFETCH && !ORDERED && threadIdx.x == WARPS * 32 - 1) tma_prefetch_1d(state + blockIdx.x * SHARE, SHARE);
    if (PREFETCH) __syncwarp();  // ptxas would move the fetch behind the loads
    const int bytes = half ? 2 : 4, own = lane / RL * STEP + warp * RL + lane % RL;  // rows in the order of raw
    const long at_k = ((long)(b * hk + head / (hv / hk)) * D + own) * bytes;
    const long at_v = ((long)(b * hv + head) * D + blockIdx.x * V_TILE + threadIdx.x % V_TILE) * bytes;
    const u32 raw_k = load_element(static_cast<const char*>(k) + at_k, half);
    const u32 raw_q = load_element(static_cast<const char*>(q) + at_k, half);
    const u32 raw_v = load_element(static_cast<const char*>(v) + at_v, half);
    const float raw_g = __ldg(g + b * hv + head), raw_rate = __ldg(beta + b * hv + head);
    state += ((long)(warp * RL + row) * D + column) * BYTES;
    const u64 policy = HINT ? evict_first_policy() : 0;
    uint4 raw[R];
#pragma unroll
    for (int i = 0; i < R; i++) raw[i] = load_state<HINT>(state + (long)i * STEP * D * BYTES, policy);
    const float key = decoded(raw_k, format), query = decoded(raw_q, format);
    float kk = key * key, qq = query * query, dot = key * query;
    kq[warp][lane] = key, kq[warp][32 + lane] = query;
#pragma unroll
    for (int step = 16; step; step /= 2) {
        kk += __shfl_xor_sync(~0u, kk, step);
        qq += __shfl_xor_sync(~0u, qq, step);
        dot += __shfl_xor_sync(~0u, dot, step);
    }
    if (lane == 0) norms[warp][0] = kk, norms[warp][1] = qq, norms[warp][2] = dot;
    if (threadIdx.x == 0) gates[0] = expf(raw_g), gates[1] = raw_rate;
    if (threadIdx.x < V_TILE) values[threadIdx.x] = decoded(raw_v, format);
    __syncwarp();
    partial_sums<32, R, VEC, RL>(guess, read, raw, kq[warp], row);
    total_sums<V_TILE, WARPS, LV, VEC>(guess, read, sums, warp, at, WARPS * 32);
    forget_unpacked(raw);
    kk = qq = dot = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) kk += norms[w][0], qq += norms[w][1], dot += norms[w][2];
    // The choice inside: a branch around the roots makes ptxas spill.
    const float k_norm = rsqrt_fast(normalise ? kk + L2_EPS : 1.0f);
    const float q_norm = rsqrt_fast(normalise ? qq + L2_EPS : 1.0f);
    const float decay = gates[0], rate = gates[1], for_read = scale * decay * q_norm, for_u = scale * dot * q_norm;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        guess[j] = rate * (values[at + j] - decay * (guess[j] * k_norm)) * k_norm;  // u times the norm that k lacks
        read[j] = for_read * read[j] + for_u * guess[j];
    }
    if (writer) store_activations(o, (long)(b * hv + head) * D + column, read, format);
#pragma unroll
    for (int i = 0; i < R; i++)
        store_state<HINT>(state + (long)i * STEP * D * BYTES, updated(raw[i], guess, decay, kq[warp][i * RL + row]),
                          policy);
}

// FORM: r consecutive rows, t rows in turns, b so for bf16 activations alone, their format a constant, s the slim form.
// BLOCKS: per SM, which the register count must allow.
#define RUN_r(D, V, W, BYTES, HINT, PREFETCH, ORDERED) decode<D, V, W, BYTES, HINT, false, PREFETCH, ORDERED>(PASSED)
#define RUN_t(D, V, W, BYTES, HINT, PREFETCH, ORDERED) decode<D, V, W, BYTES, HINT, true, PREFETCH, ORDERED>(PASSED)
#define RUN_b(D, V, W, BYTES, HINT, PREFETCH, ORDERED) \
    decode<D, V, W, BYTES, HINT, true, PREFETCH, ORDERED>(PASSED_AS(BF16))
#define RUN_s(D, V, W, BYTES, HINT, PREFETCH, ORDERED) decode_slim<D, V, W, HINT, PREFETCH, ORDERED>(PASSED)
#define DECODE(FORM, D, V, W, NAME, BYTES, HINT, BLOCKS, PREFETCH, ORDERED)                               \
    extern "C" __global__ void __launch_bounds__(W * 32, BLOCKS)                                          \
        gdn_decode_##FORM##_d##D##_v##V##_w##W##_##NAME##_h##HINT##_p##PREFETCH##_o##ORDERED(ARGUMENTS) { \
        RUN_##FORM(D, V, W, BYTES, HINT, PREFETCH, ORDERED);                                              \
    }

DECODE(r, 128, 16, 2, f32, 4, 1, 12, 0, 0)
DECODE(s, 128, 64, 4, f32, 4, 1, 5, 0, 0)
DECODE(s, 128, 64, 4, f32, 4, 0, 5, 1, 0)
DECODE(s, 128, 64, 4, f32, 4, 0, 5, 1, 1)
DECODE(r, 128, 32, 2, bf16, 2, 1, 8, 0, 0)
DECODE(t, 128, 128, 4, bf16, 2, 1, 4, 0, 0)
DECODE(t, 128, 128, 4, bf16, 2, 0, 4, 1, 0)
DECODE(t, 128, 128, 4, bf16, 2, 0, 4, 1, 1)
DECODE(b, 128, 128, 4, bf16, 2, 0, 4, 198, 0)
DECODE(r, 64, 64, 4, f32, 4, 0, 4, 0, 0)
DECODE(r, 64, 64, 2, bf16, 2, 0, 4, 0, 0)
