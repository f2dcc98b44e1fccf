// decode.cu's step from what stands before it in the layer: the causal convolution of width 4 with SiLU, and the gates.
//
//     x_c = silu(sum_j weight[c, j] window[c, j])      window: the 3 columns of the convolution's state, then mixed_qkv
//     g = -exp(A_log) softplus(a + dt_bias)            beta = sigmoid(b)
// The step and both states in one launch: q, k and v never see memory. Every block computes the 2 D channels of its
// q and k itself, one to four a thread; its V_TILE channels of v are its own. Its slice of the state is in flight
// meanwhile, to registers (LATE 0) or to L2 (1), which leaves registers to the convolution and the SM one block more.
// The state of the convolution moves by one column where it stands. The channels of q and k are read by all blocks of a
// k head (its v heads, their column tiles), so the last of them to have read, by a ticket, moves them.

// PDL 0/1/2 (0 where it is not given): a programmatic dependent launch. With 2 a block asks L2 for its states before it
// waits. Nothing is read into registers there: the kernel ahead may be the last step's, which writes them.
#include "decode_token.cuh"

#ifndef PDL
#define PDL 0
#endif
constexpr int WIDTH = 4;  // of the convolution; its state holds WIDTH - 1 columns

// As load_element, for memory that this launch also writes: no read-only path.
DEVICE u32 reload_element(const char* from, bool half) {
    return half ? ldg16(reinterpret_cast<const u16*>(from)) : ldg32(reinterpret_cast<const u32*>(from));
}
DEVICE void store_element(char* to, u32 raw, bool half) {
    if (half) *reinterpret_cast<u16*>(to) = (u16)raw;
    else *reinterpret_cast<u32*>(to) = raw;
}
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }  // the bound is torch's

// A channel's window, oldest first, and its weights, as loaded.
struct RawWindow {
    u32 column[WIDTH];
    uint4 weight;
};
// Byte addresses of a channel: in its row of mixed, among the weights, in the oldest column of conv_state [rows,
// WIDTH - 1, channels], whose columns lie `pitch` bytes apart.
struct Channel {
    const char *mixed, *weight;
    char* columns;
    int pitch;
};
DEVICE Channel channel_at(const char* mixed, const void* weight, void* conv_state, int slot, int channels, int channel,
                          bool half) {
    const int bytes = half ? 2 : 4, pitch = channels * bytes, at = channel * bytes;
    return {mixed + at, static_cast<const char*>(weight) + at * WIDTH,
            static_cast<char*>(conv_state) + (long)slot * (WIDTH - 1) * pitch + at, pitch};
}
DEVICE void load_window(RawWindow& w, const Channel& c, bool half) {
#pragma unroll
    for (int j = 0; j < WIDTH - 1; j++) w.column[j] = reload_element(c.columns + j * c.pitch, half);
    w.column[WIDTH - 1] = load_element(c.mixed, half);
    if (half) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(c.weight));
        w.weight.x = two.x, w.weight.y = two.y;
    } else w.weight = __ldg(reinterpret_cast<const uint4*>(c.weight));
}
DEVICE float convolved(const RawWindow& w, int format) {
    const u32 raw[WIDTH] = {w.weight.x, w.weight.y, w.weight.z, w.weight.w};
    float weight[WIDTH], sum = 0;
    decode_raw(weight, raw, format);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) sum = fmaf(weight[j], decoded(w.column[j], format), sum);
    return sum * sigmoid(sum);
}
// Drops the oldest column; `newer` are the others.
DEVICE void move_window(const u32* newer, const Channel& c, bool half) {
#pragma unroll
    for (int j = 0; j < WIDTH - 1; j++) store_element(c.columns + j * c.pitch, newer[j], half);
}

#define ARGUMENTS                                                                                                      \
    const char *mixed, const void *a, const void *b_raw, const void *weight, const float *a_log, const float *dt_bias, \
        void *conv_state, char *state, const int *state_rows, u32 *arrived, void *o, float scale, int mixed_pitch,     \
        int batch, int hk, int hv, int normalise, int format
#define PASSED                                                                                                         \
    mixed, a, b_raw, weight, a_log, dt_bias, conv_state, state, state_rows, arrived, o, scale, mixed_pitch, batch, hk, \
        hv, normalise, format

// Grid (D / V_TILE, hv, batch). mixed [batch, channels], rows mixed_pitch elements apart, channels in the order q
// [hk, D], k [hk, D], v [hv, D]; weight [channels, WIDTH]; arrived [batch, hk], zero before and after. BYTES, HINT: of
// the state, as in decode.cu.
template <int D, int V_TILE, int WARPS, int BYTES, int HINT, int LATE>
DEVICE void decode_conv(ARGUMENTS) {
    constexpr int VEC = 16 / BYTES, LV = V_TILE / VEC, RL = 32 / LV, R = D / (WARPS * RL), STEP = WARPS * RL;
    constexpr int THREADS = WARPS * 32, PER = 2 * D / THREADS;  // channels of k and q per thread
    static_assert(LV <= 32 && R >= 1 && R * WARPS * RL == D, "tile");
    static_assert(PER >= 1 && PER * THREADS == 2 * D && V_TILE <= THREADS && WARPS > 1, "channels");
    __shared__ __align__(16) float kq[2 * D];
    __shared__ __align__(16) float values[V_TILE];
    __shared__ __align__(16) float sums[WARPS * 2 * V_TILE];
    __shared__ u32 newer[2 * D][WIDTH - 1];  // a thread's own columns, out of its registers
    __shared__ float gates[2];
    __shared__ int last;
    if constexpr (PDL == 1) launch_dependent_grids(), wait_on_dependent_grids();
    const int head = blockIdx.y, b = blockIdx.z, me = threadIdx.x, warp = me / 32, lane = me & 31;
    const int at = (lane % LV) * VEC, column = blockIdx.x * V_TILE + at, row = warp * RL + lane / LV;
    const int k_head = head / (hv / hk), channels = (2 * hk + hv) * D;
    const bool half = format == BF16 || format == FP16, writer = warp == 0 && lane < LV;
    const int slot = __ldg(state_rows + b);
    mixed += (long)b * mixed_pitch * (half ? 2 : 4);
    const long at_o = (long)(b * hv + head) * D + column;
    float read[VEC], guess[VEC];
    if constexpr (PDL == 2) launch_dependent_grids();
    if (slot < 0) {
        if constexpr (PDL == 2) wait_on_dependent_grids();
#pragma unroll
        for (int j = 0; j < VEC; j++) read[j] = 0;
        if (writer) store_activations(o, at_o, read, format);
        return;
    }
    state += ((long)slot * hv + head) * D * D * BYTES;
    constexpr u32 SHARE = D * V_TILE * BYTES;  // of the head, contiguous: the blocks of its columns fetch it together
    if ((LATE || PDL == 2) && me == THREADS - 1) tma_prefetch_1d(state + blockIdx.x * SHARE, SHARE);
    const auto channel_of = [&](int i) {  // k, then q
        const int c = me + i * THREADS;
        const int channel = (c < D ? hk * D + c : c - D) + k_head * D;
        return channel_at(mixed, weight, conv_state, slot, channels, channel, half);
    };
    const Channel v_channel =
        channel_at(mixed, weight, conv_state, slot, channels, (2 * hk + head) * D + blockIdx.x * V_TILE + me, half);
    if constexpr (PDL == 2) {
        const auto ask_for = [&](const Channel& c) {
            for (int j = 0; j < WIDTH - 1; j++) prefetch_l2(c.columns + j * c.pitch);
            prefetch_l2(c.weight);
        };
#pragma unroll
        for (int i = 0; i < PER; i++) ask_for(channel_of(i));
        if (me < V_TILE) ask_for(v_channel);
        wait_on_dependent_grids();
    }
    RawWindow window[PER], v_window;
#pragma unroll
    for (int i = 0; i < PER; i++) load_window(window[i], channel_of(i), half);
    if (me < V_TILE) load_window(v_window, v_channel, half);
    const bool gate_warp = warp == WARPS - 1;
    u32 raw_a, raw_b;
    float log_rate, bias;
    if (gate_warp) {
        const int of = (b * hv + head) * (half ? 2 : 4);
        raw_a = load_element(static_cast<const char*>(a) + of, half);
        raw_b = load_element(static_cast<const char*>(b_raw) + of, half);
        log_rate = __ldg(a_log + head), bias = __ldg(dt_bias + head);
    }
    state += ((long)row * D + column) * BYTES;
    const u64 policy = HINT ? evict_first_policy() : 0;
    uint4 raw[R];
    if (!LATE)
#pragma unroll
        for (int i = 0; i < R; i++) raw[i] = load_state<HINT>(state + (long)i * STEP * D * BYTES, policy);

    if (gate_warp) {
        const float decay = expf(-expf(log_rate) * softplus(decoded(raw_a, format) + bias));
        const float rate = sigmoid(decoded(raw_b, format));
        if (lane == 0) gates[0] = decay, gates[1] = rate;
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        kq[me + i * THREADS] = convolved(window[i], format);
#pragma unroll
        for (int j = 0; j < WIDTH - 1; j++) newer[me + i * THREADS][j] = window[i].column[j + 1];
    }
    if (me < V_TILE) {
        values[me] = convolved(v_window, format);
        move_window(v_window.column + 1, v_channel, half);
    }
    named_barrier_sync(2, THREADS);
    u32 ticket = 0;
    if (me == 0) ticket = atomic_add_relaxed(arrived + b * hk + k_head, 1);
    if (LATE)
#pragma unroll
        for (int i = 0; i < R; i++) raw[i] = load_state<HINT>(state + (long)i * STEP * D * BYTES, policy);

    float kk = 0, qq = 0, dot = 0;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        const float key = kq[lane + 32 * i], query = kq[D + lane + 32 * i];
        kk += key * key, qq += query * query, dot += key * query;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        kk += __shfl_xor_sync(~0u, kk, step);
        qq += __shfl_xor_sync(~0u, qq, step);
        dot += __shfl_xor_sync(~0u, dot, step);
    }
    const float k_norm = normalise ? 1.0f / sqrtf(kk + L2_EPS) : 1.0f;
    const float q_norm = normalise ? 1.0f / sqrtf(qq + L2_EPS) : 1.0f;
    partial_sums<D, R, VEC, STEP>(guess, read, raw, kq, row);
    if (me == 0) last = ticket == gridDim.x * (hv / hk) - 1;
    total_sums<V_TILE, WARPS, LV, VEC>(guess, read, sums, warp, at, THREADS);
    forget_unpacked(raw);
    const float decay = gates[0], rate = gates[1];
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const float u = rate * (values[at + j] - decay * k_norm * guess[j]);
        read[j] = scale * q_norm * (decay * read[j] + dot * k_norm * u);
        guess[j] = k_norm * u;  // kq holds keys that are not normalised
    }
#pragma unroll
    for (int i = 0; i < R; i++)
        store_state<HINT>(state + (long)i * STEP * D * BYTES, updated(raw[i], guess, decay, kq[row + i * STEP]),
                          policy);
    if (writer) store_activations(o, at_o, read, format);

    // The last block of the k head moves the columns of its q and k, and clears the ticket.
    if (!last) return;
#pragma unroll
    for (int i = 0; i < PER; i++) move_window(newer[me + i * THREADS], channel_of(i), half);
    if (me == 0) arrived[b * hk + k_head] = 0;
}

// BLOCKS: per SM, which the register count must allow.
#define DECODE_CONV(D, V, W, NAME, BYTES, HINT, BLOCKS, LATE)              \
    extern "C" __global__ void __launch_bounds__(W * 32, BLOCKS)           \
        gdn_decode_conv_d##D##_v##V##_w##W##_##NAME##_h##HINT(ARGUMENTS) { \
        decode_conv<D, V, W, BYTES, HINT, LATE>(PASSED);                   \
    }

DECODE_CONV(128, 16, 2, f32, 4, 1, 6, 0)
DECODE_CONV(128, 64, 4, f32, 4, 1, 3, 0)
DECODE_CONV(128, 64, 8, f32, 4, 0, 4, 1)
DECODE_CONV(128, 32, 2, bf16, 2, 1, 8, 1)
DECODE_CONV(128, 128, 4, bf16, 2, 1, 3, 0)
DECODE_CONV(128, 128, 4, bf16, 2, 0, 4, 1)
DECODE_CONV(64, 64, 4, f32, 4, 0, 4, 0)
DECODE_CONV(64, 64, 2, bf16, 2, 0, 4, 0)
