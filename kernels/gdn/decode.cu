// Gated delta rule, one token per sequence, states updated where they stand (sm_90a; inline PTX, no headers).
//
// A state is [D, D] (k dimension, v dimension), contiguous: 64 KB in float32 at D = 128. One pass:
//     guess = S^T k, read = S^T q      sums over the k dimension of the state as loaded
//     u = beta (v - exp(g) guess)      S <- exp(g) S + k u^T      o = scale (exp(g) read + (k . q) u)
// A block owns all rows of a V_TILE of columns; every 16-byte load of the state is issued before the first multiply and
// stays in registers until it is stored.
// Columns never interact, rows meet in one block-wide sum. Each warp keeps a private copy of k and q, so the only block
// barrier is that of the sum.

#include "decode_token.cuh"

#define ARGUMENTS                                                                                                \
    const void *q, const void *k, const void *v, const float *g, const float *beta, char *state,                \
        const int *state_rows, void *o, float scale, int batch, int hk, int hv, int normalise, int format
#define PASSED q, k, v, g, beta, state, state_rows, o, scale, batch, hk, hv, normalise, format

// Grid (D / V_TILE, hv, batch). BYTES: 4 for a float32 state, 2 for bf16. TURNS: a thread's rows are consecutive
// (false) or all threads' rows take turns, so that the block's loads advance through memory. PREFETCH: the blocks of a
// head first start its fetch into L2, a share each: one request for what the loads then ask for line by line.
template <int D, int V_TILE, int WARPS, int BYTES, int HINT, bool TURNS, bool PREFETCH>
INLINE void decode(ARGUMENTS) {
    constexpr int VEC = 16 / BYTES, LV = V_TILE / VEC, RL = 32 / LV, R = D / (WARPS * RL);
    static_assert(LV <= 32 && R >= 1 && R * WARPS * RL == D, "tile");
    __shared__ __align__(16) float kq[WARPS][2 * D];
    __shared__ __align__(16) float sums[WARPS * 2 * V_TILE];
    const int head = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    constexpr int STEP = TURNS ? WARPS * RL : 1;
    const int at = (lane % LV) * VEC, column = blockIdx.x * V_TILE + at;
    const int row = (warp * RL + lane / LV) * (TURNS ? 1 : R);
    // Consecutive rows are the form for few states, where waiting for an id shows: there none need be given.
    const int slot = TURNS || state_rows ? __ldg(state_rows + b) : b;
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
        return;
    }
    state += ((long)slot * hv + head) * D * D * BYTES;
    constexpr u32 SHARE = D * V_TILE * BYTES;  // contiguous, so not the columns of one block
    if (PREFETCH && threadIdx.x == WARPS * 32 - 1) prefetch_bulk(state + blockIdx.x * SHARE, SHARE);
    if (PREFETCH) __syncwarp();  // ptxas would move the fetch behind the loads
    state += ((long)row * D + column) * BYTES;
    const u64 policy = HINT ? evict_first() : 0;
    uint4 raw[R];
#pragma unroll
    for (int i = 0; i < R; i++) raw[i] = load_state<HINT>(state + (long)i * STEP * D * BYTES, policy);
    share_token(t, raw_token, kq[warp], normalise, format);
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
                          updated(raw[i], guess, t.decay, kq[warp][row + i * STEP]), policy);
    if (writer) store_activations(o, at_o, read, format);
}

// FORM: r consecutive rows, t rows in turns. BLOCKS: per SM, which the register count must allow.
#define TURNS_r false
#define TURNS_t true
#define DECODE(FORM, D, V, W, NAME, BYTES, HINT, BLOCKS, PREFETCH)                                            \
    extern "C" __global__ void __launch_bounds__(W * 32, BLOCKS)                                            \
        gdn_decode_##FORM##_d##D##_v##V##_w##W##_##NAME##_h##HINT##_p##PREFETCH(ARGUMENTS) {                \
        decode<D, V, W, BYTES, HINT, TURNS_##FORM, PREFETCH>(PASSED);                                       \
    }

DECODE(r, 128, 16, 2, f32, 4, 1, 12, 0)
DECODE(t, 128, 64, 4, f32, 4, 1, 4, 0)
DECODE(t, 128, 64, 8, f32, 4, 0, 4, 1)
DECODE(r, 128, 32, 2, bf16, 2, 1, 8, 0)
DECODE(t, 128, 128, 4, bf16, 2, 1, 4, 0)
DECODE(t, 128, 128, 4, bf16, 2, 0, 4, 0)
DECODE(r, 64, 64, 4, f32, 4, 0, 4, 0)
DECODE(r, 64, 64, 2, bf16, 2, 0, 4, 0)
