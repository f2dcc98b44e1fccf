// The router of a mixture for few tokens: the top_k largest of a token's logits, their softmax, the shared expert's gate,
// and the choice sorted by expert, for experts.cu. One launch, no atomic sum: the same bits on every run.
//
//   every block      a warp a token: top_k rounds of a maximum over the warp; which experts were taken, as a mask
//   the last block   turns the masks into each expert's tokens (a bit a token), counts, and lays rows out by expert and
//                    then by token; experts are cut into blocks of at most BLOCK_TOKENS rows
//
// MANY (for experts_many.cu): 32 tokens a block, and which of them an expert has is a word of the block's. The last block
// only counts; then every block places its own tokens' rows, and says where they lie. All blocks run at once.
//
// Macros: KERNEL (name), X_BF16 0/1 (type of x), EXPERTS, BLOCK_TOKENS, MANY 0/1 (0 where it is not given), WARPS (with
// MANY: 32, a token each, as long as all blocks then run at once).
#include "pick.cuh"

#ifndef MANY
#define MANY 0
#endif
constexpr int MOST_TOKENS = 128, WORDS = MOST_TOKENS / 32;
#ifndef WARPS
constexpr int WARPS = VALUES > 8 ? VALUES : 8;
#endif
constexpr int THREADS = 32 * WARPS;
static_assert(EXPERTS <= 1024, "an expert a thread");

// logits: [tokens, EXPERTS]. x: [tokens, width] and shared_gate: bf16 [width], or null without a shared expert, which is
// expert EXPERTS of every token. pairs: [tokens, top_k or one more] (expert, weight). masks: [tokens, VALUES].
// rows: (token, weight), sorted. blocks: (expert | rows << 16, first row). state: [2 + counters] the number of blocks, a
// ticket that is left at zero, and what experts.cu counts in, which is set to zero.
// MANY: masks: [blocks, 2, EXPERTS] which of a block's tokens an expert has, and how many rows those before it have; then
// [EXPERTS] its first row.
// state: [4] the number of blocks, and three words that are left at zero. back: [tokens, top_k or one more], rows' places.
extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL(const float* logits, const unsigned char* x, const unsigned char* shared_gate, uint2* pairs, u32* masks,
           uint2* rows, uint2* blocks, u32* state, int tokens, int width, int top_k, int counters
#if MANY
           ,
           u32* back
#endif
    ) {
    DYNAMIC_SHARED(shared);
    u32* of_warps = reinterpret_cast<u32*>(shared);  // [WARPS], then a flag
    u32* offsets = of_warps + WARPS + 1;             // [EXPERTS]
    u32* members = offsets + EXPERTS;                // [WORDS, EXPERTS]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * WARPS + warp;
    const int with_shared = shared_gate != nullptr, chosen = top_k + with_shared;
    launch_dependent_grids();
#if MANY
    const int first_token = 32 * blockIdx.x, behind_token = min(tokens, first_token + 32);
    u32* taken_by = members;  // [32, VALUES]
    for (int token = first_token + warp; token < behind_token; token += WARPS) {
#else
    if (token < tokens) {
#endif
        const u32 mask = pick(logits, pairs, token, chosen, top_k, lane);
#if MANY
        if (lane < VALUES) taken_by[(token - first_token) * VALUES + lane] = mask;
#else
        if (lane < VALUES) masks[token * VALUES + lane] = mask;
#endif
        if (with_shared) {
            const float share = shared_weight(x, shared_gate, token, width, lane);
            if (lane == 0) pairs[token * chosen + top_k] = make_uint2(EXPERTS, __float_as_uint(share));
        }
    }
#if MANY
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
#else
    __syncthreads();
    if (threadIdx.x == 0) of_warps[WARPS] = atomic_add_acq_rel(state + 1, 1) == gridDim.x - 1;
    __syncthreads();
    if (!of_warps[WARPS]) return;

    // A thread an expert: its tokens, where its rows begin, and its first block.
    const int e = threadIdx.x;
    u32 mine[WORDS] = {};
    int count = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        if (32 * w < tokens && warp < VALUES) {
            const u32 word = 32 * w + lane < tokens ? ldg32(masks + (32 * w + lane) * VALUES + warp) : 0;
#pragma unroll
            for (int bit = 0; bit < 32; bit++) {
                const u32 tokens_of_bit = warp_ballot(word >> bit & 1);
                if (lane == bit) mine[w] = tokens_of_bit;
            }
        }
        count += __popc(mine[w]);
        if (e < EXPERTS) members[w * EXPERTS + e] = mine[w];
    }
    const int cuts = (count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    int upto = count | cuts << 16;  // two sums in one scan
    for (int by = 1; by < 32; by *= 2) {
        const int before = __shfl_up_sync(ALL, upto, by);
        if (lane >= by) upto += before;
    }
    if (lane == 31) of_warps[warp] = upto;
    for (int i = threadIdx.x; i < counters; i += THREADS) state[2 + i] = 0;
    __syncthreads();
    u32 total = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) upto += total;
        total += of_warps[w];
    }
    const int first = (upto & 0xFFFF) - count, routed = total & 0xFFFF, cut = total >> 16;
    if (e < EXPERTS) offsets[e] = first;
    for (int b = 0; b < cuts; b++) {
        const int begin = b * BLOCK_TOKENS;
        blocks[(upto >> 16) - cuts + b] = make_uint2(e | min(BLOCK_TOKENS, count - begin) << 16, first + begin);
    }
    const int of_shared = with_shared ? (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS : 0;
    for (int b = threadIdx.x; b < of_shared; b += THREADS) {
        const int begin = b * BLOCK_TOKENS;
        blocks[cut + b] = make_uint2(EXPERTS | min(BLOCK_TOKENS, tokens - begin) << 16, routed + begin);
    }
    if (threadIdx.x == 0) state[0] = cut + of_shared, state[1] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * chosen; i += THREADS) {
        const int t = i / chosen;
        const u32 of = ldg32(pairs + i), weight = ldg32(reinterpret_cast<const u32*>(pairs + i) + 1);
        u32 at = routed + t;
        if (of < EXPERTS) {
            at = offsets[of];
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const u32 upto_t = 32 * w + 32 <= t ? ALL : 32 * w <= t ? (1u << (t & 31)) - 1 : 0;
                at += __popc(members[w * EXPERTS + of] & upto_t);
            }
        }
        rows[at] = make_uint2(t, weight);
    }
#endif
}
