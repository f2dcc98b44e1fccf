// The router of a mixture for many tokens: the top_k largest of a token's logits, their softmax, the shared expert's gate,
// and the choice sorted by expert, for experts_many.cu. One launch, no atomic sum: the same bits on every run.
//
//   every block      a warp a token: top_k rounds of a maximum over the warp; which of its 32 tokens each expert has, as a
//                    word of the block's
//   the last block   counts, and cuts experts into blocks of at most BLOCK_TOKENS rows
//   every block      places its own tokens' rows, by expert and then by token, and says where they lie
//
// All blocks run at once.
//
// Macros: KERNEL (name), X_BF16 0/1 (type of x), EXPERTS, BLOCK_TOKENS, WARPS (32, a token each, as long as all blocks then
// run at once).
#include "pick.cuh"

constexpr int THREADS = 32 * WARPS;
static_assert(EXPERTS <= 1024, "an expert a thread");

// logits: [tokens, EXPERTS]. x: [tokens, width] and shared_gate: bf16 [width], or null without a shared expert, which is
// expert EXPERTS of every token. pairs: [tokens, top_k or one more] (expert, weight). masks: [blocks, 2, EXPERTS] which of a
// block's tokens an expert has, and how many rows those before it have; then [EXPERTS] its first row. rows: (token,
// weight), sorted. blocks: (expert | rows << 16, first row). state: [4] the number of blocks, and three words that are left
// at zero. counters: none. back: [tokens, top_k or one more], rows' places.
extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL(const float* logits, const unsigned char* x, const unsigned char* shared_gate, uint2* pairs, u32* masks,
           uint2* rows, uint2* blocks, u32* state, int tokens, int width, int top_k, int counters, u32* back) {
    DYNAMIC_SHARED(shared);
    u32* of_warps = reinterpret_cast<u32*>(shared);  // [WARPS], then a flag
    u32* offsets = of_warps + WARPS + 1;             // [EXPERTS]
    u32* members = offsets + EXPERTS;                // [EXPERTS]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int with_shared = shared_gate != nullptr, chosen = top_k + with_shared;
    launch_dependent_grids();
    const int first_token = 32 * blockIdx.x, behind_token = min(tokens, first_token + 32);
    u32* taken_by = members;  // [32, VALUES]
    for (int token = first_token + warp; token < behind_token; token += WARPS) {
        const u32 mask = pick(logits, pairs, token, chosen, top_k, lane);
        if (lane < VALUES) taken_by[(token - first_token) * VALUES + lane] = mask;
        if (with_shared) {
            const float share = shared_weight(x, shared_gate, token, width, lane);
            if (lane == 0) pairs[token * chosen + top_k] = make_uint2(EXPERTS, __float_as_uint(share));
        }
    }
    __syncthreads();
    const int e = threadIdx.x, grid = gridDim.x;
    u32* const of_blocks = masks;
    u32 mine = 0;
    if (e < EXPERTS) {
        for (int t = 0; t < behind_token - first_token; t++)
            mine |= (taken_by[t * VALUES + e / 32] >> (e & 31) & 1) << t;
        of_blocks[2 * blockIdx.x * EXPERTS + e] = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0) of_warps[WARPS] = atomic_add_acq_rel(state + 1, 1) == grid - 1;
    __syncthreads();
    if (of_warps[WARPS]) {
        int count = 0;
        if (e < EXPERTS) {
            for (int b = 0; b < grid; b += 8) {
                u32 words[8];
#pragma unroll
                for (int i = 0; i < 8; i++) words[i] = b + i < grid ? ldg32(of_blocks + 2 * (b + i) * EXPERTS + e) : 0;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (b + i < grid) of_blocks[(2 * (b + i) + 1) * EXPERTS + e] = count;
                    count += __popc(words[i]);
                }
            }
        }
        // Two sums in two scans: rows, and blocks.
        const int cuts = (count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        int upto[2] = {count, cuts}, total[2] = {0, 0};
#pragma unroll
        for (int which = 0; which < 2; which++) {
            for (int by = 1; by < 32; by *= 2) {
                const int before = __shfl_up_sync(ALL, upto[which], by);
                if (lane >= by) upto[which] += before;
            }
            __syncthreads();
            if (lane == 31) of_warps[warp] = upto[which];
            __syncthreads();
            for (int w = 0; w < WARPS; w++) {
                if (w == warp) upto[which] += total[which];
                total[which] += of_warps[w];
            }
        }
        const int first = upto[0] - count, routed = total[0], cut = total[1];
        if (e < EXPERTS) of_blocks[2 * grid * EXPERTS + e] = first;
        for (int b = 0; b < cuts; b++) {
            const int begin = b * BLOCK_TOKENS;
            blocks[upto[1] - cuts + b] = make_uint2(e | min(BLOCK_TOKENS, count - begin) << 16, first + begin);
        }
        const int of_shared = with_shared ? (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS : 0;
        for (int b = threadIdx.x; b < of_shared; b += THREADS) {
            const int begin = b * BLOCK_TOKENS;
            blocks[cut + b] = make_uint2(EXPERTS | min(BLOCK_TOKENS, tokens - begin) << 16, routed + begin);
        }
        if (threadIdx.x == 0) state[0] = cut + of_shared;
        __syncthreads();
        if (threadIdx.x == 0) st_release(state + 2, 1);
    }
    if (threadIdx.x == 0) {
        while (!ld_acquire(state + 2)) continue;
    }
    __syncthreads();
    const int routed = tokens * top_k;
    if (e < EXPERTS) {
        const u32 before = ldg32(of_blocks + (2 * blockIdx.x + 1) * EXPERTS + e);
        offsets[e] = before + ldg32(of_blocks + 2 * grid * EXPERTS + e);
    }
    __syncthreads();  // nobody reads taken_by any more
    if (e < EXPERTS) members[e] = mine;
    __syncthreads();
    for (int i = first_token * chosen + threadIdx.x; i < behind_token * chosen; i += THREADS) {
        const int t = i / chosen;
        const u32 of = ldg32(pairs + i), weight = ldg32(reinterpret_cast<const u32*>(pairs + i) + 1);
        const u32 at = of < EXPERTS ? offsets[of] + __popc(members[of] & (1u << (t & 31)) - 1) : routed + t;
        rows[at] = make_uint2(t, weight);
        back[i] = at;
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomic_add_acq_rel(state + 3, 1) == grid - 1) state[1] = state[2] = state[3] = 0;
}
