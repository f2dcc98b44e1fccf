// router.cu with one wait of the whole grid instead of two, for up to 2,048 tokens: the same lists.
//
//   every block   a warp a token chooses; which of its 32 tokens each expert has goes to memory as a word; then the grid
//                 meets, and the shared expert's weights are made while it does
//   every block   counts the words of all blocks for itself, several threads an expert and all loads at once, and places
//                 its own tokens' rows; the first one writes the list of blocks besides
//
// router.cu lets the last block count, eight words of an expert a trip to L2, and the others wait for it a second time.
// Given up: the masks are read by every block, a kilobyte each of 256 experts: 4 MB at 2,048 tokens, 250 at 16,384.
//
// Macros: KERNEL (name), X_BF16 0/1 (type of x), EXPERTS, BLOCK_TOKENS, BY_WIDTH 0/1 (0 where it is not given): the list
// has blocks of up to 32 rows first, then of up to 64, then the others, and says how many, for experts_many.cu's EVEN.
// FEW 0/1 (0 where it is not given): for experts.cu, eight tokens a block or a warp for every 32 experts; what that counts in
// is set to zero, and nobody asks where a pair's row lies. Blocks from `routers` on choose nothing: they copy x in the order
// that experts.cu multiplies.
#include "pick.cuh"

#ifndef BY_WIDTH
#define BY_WIDTH 0
#endif
#ifndef FEW
#define FEW 0
#endif
#if FEW
#include "nvfp4/gemm_operand.cuh"
#endif
constexpr int WIDTHS = BY_WIDTH ? BLOCK_TOKENS / 32 : 1;  // kinds of blocks
static_assert(FEW ? !BY_WIDTH : BLOCK_TOKENS % 32 == 0, "a kind for every 32 rows");
// Of a block of so many rows; its kind.
DEVICE int kind_of(int rows) { return BY_WIDTH ? (rows - 1) / 32 : 0; }

constexpr int FEW_TOKENS = VALUES > 8 ? VALUES : 8;
constexpr int TOKENS = FEW ? FEW_TOKENS : 32, THREADS = 32 * TOKENS;  // of a block: a warp a token
constexpr int COLUMNS = 32 * VALUES, SLICES = THREADS / COLUMNS;      // threads of an expert
constexpr int AT_ONCE = 16;                                           // words that a thread has in flight
constexpr int TURN = FEW ? 0 : 4;                                     // whose turn it is, ahead of both counters
static_assert(EXPERTS <= THREADS, "an expert a thread");

// As router.cu's. masks: [blocks, EXPERTS]. state: [9] the number of blocks, three words of router.cu's, which of the two
// counters behind it this launch takes, and those; BY_WIDTH: how many blocks have up to 32 rows, and up to 64.
// FEW: state: [2 + counters] the number of blocks, a zero, and what experts.cu counts in; back: [3] which counter, and the
// two. dealt: [tokens, width].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL(const float* logits, const unsigned char* x, const unsigned char* shared_gate, uint2* pairs, u32* masks,
           uint2* rows, uint2* blocks, u32* state, int tokens, int width, int top_k, int counters, u32* back
#if FEW
           ,
           unsigned char* dealt, int routers
#endif
    ) {
    DYNAMIC_SHARED(shared);
    u32* const counted = reinterpret_cast<u32*>(shared);  // [SLICES, COLUMNS]
    u32* const places = counted + SLICES * COLUMNS;       // [EXPERTS] where this block's rows begin
    u32* const members = places + EXPERTS;                // [EXPERTS] which of its tokens they are
    u32* const taken_by = members + EXPERTS;              // [TOKENS, VALUES]
    u32* const of_warps = taken_by + TOKENS * VALUES;     // [1 + WIDTHS, VALUES]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, e = threadIdx.x;
#if FEW
    const int grid = routers;
#else
    const int grid = gridDim.x;
#endif
    const int with_shared = shared_gate != nullptr, chosen = top_k + with_shared;
    const int first_token = TOKENS * blockIdx.x, behind_token = min(tokens, first_token + TOKENS);
    const int token = first_token + warp;
    u32* const turns = FEW ? back : state;
    launch_dependent_grids();
#if FEW
    if (static_cast<int>(blockIdx.x) >= routers) {
        // Eight k a thread; words of eight threads lie side by side. `width` is whole tiles of 64 k, so rows are no matter.
        const int piece = (blockIdx.x - routers) * THREADS + threadIdx.x;
        if (piece >= tokens * (width / 8)) return;
        const uint4 words = ldg128(x + 16 * static_cast<size_t>(piece));
        u32* const to = reinterpret_cast<u32*>(dealt) + piece / 8 * 32 + dealt_place(8 * (piece % 8)) / 2;
        to[0] = words.x, to[8] = words.y, to[16] = words.z, to[24] = words.w;
        return;
    }
#endif
    const u32 turn = threadIdx.x == 0 ? ldg32(turns + TURN) : 0;  // beside the logits
    if (token < behind_token) {
        const u32 mask = pick(logits, pairs, token, chosen, top_k, lane);
        if (lane < VALUES) taken_by[warp * VALUES + lane] = mask;
    }
    __syncthreads();
    if (e < EXPERTS) {
        u32 mine = 0;
        for (int t = 0; t < behind_token - first_token; t++)
            mine |= (taken_by[t * VALUES + e / 32] >> (e & 31) & 1) << t;
        members[e] = mine;
        masks[blockIdx.x * EXPERTS + e] = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomic_add_acq_rel(turns + TURN + 1 + turn, 1) == grid - 1) {
        // All have read whose turn it is. The next launch has the other counter, so none waits until this one may fall.
        turns[TURN + 2 - turn] = 0;
        turns[TURN] = 1 - turn;
    }
    if (with_shared && token < behind_token) {
        const float share = shared_weight(x, shared_gate, token, width, lane);
        if (lane == 0) pairs[token * chosen + top_k] = make_uint2(EXPERTS, __float_as_uint(share));
    }
    if (threadIdx.x == 0) {
        while (ld_acquire(turns + TURN + 1 + turn) < grid) continue;
    }
    __syncthreads();
    if (FEW && blockIdx.x == grid - 1) {
        for (int c = threadIdx.x; c < counters; c += THREADS) state[2 + c] = 0;
    }
    // A row a thread: at most a warp's 32 experts a token.
    const int i = first_token * chosen + threadIdx.x;
    u32 of = 0, weight = 0;
    if (i < behind_token * chosen) {
        of = ldg32(pairs + i);
        weight = ldg32(reinterpret_cast<const u32*>(pairs + i) + 1);
    }
    // Rows of an expert in the upper half, those of the blocks ahead of this one in the lower.
    const int column = threadIdx.x % COLUMNS, slice = threadIdx.x / COLUMNS, ahead = blockIdx.x;
    if (slice < SLICES && column < EXPERTS) {
        u32 sum = 0;
        for (int b = slice; b < grid; b += AT_ONCE * SLICES) {
            u32 words[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int from = b + j * SLICES;
                words[j] = from < grid ? ldg32(masks + from * EXPERTS + column) : 0;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) sum += __popc(words[j]) * (b + j * SLICES < ahead ? 0x10001u : 0x10000u);
        }
        counted[slice * COLUMNS + column] = sum;
    }
    __syncthreads();
    u32 both = 0;
    for (int s = 0; s < SLICES && e < EXPERTS; s++) both += counted[s * COLUMNS + e];
    // An expert's blocks are full but for the last one.
    const int count = both >> 16, full = count / BLOCK_TOKENS, rest = count % BLOCK_TOKENS;
    int upto[1 + WIDTHS] = {count}, total[1 + WIDTHS] = {};  // sums in a scan each: rows, and blocks of each kind
    const auto of_kind = [](int rows, int kind) {
        return (kind == kind_of(BLOCK_TOKENS)) * (rows / BLOCK_TOKENS) +
               (rows % BLOCK_TOKENS > 0 && kind == kind_of(rows % BLOCK_TOKENS));
    };
#pragma unroll
    for (int kind = 0; kind < WIDTHS; kind++) upto[1 + kind] = of_kind(count, kind);
#pragma unroll
    for (int which = 0; which <= WIDTHS; which++) {
        for (int by = 1; by < 32; by *= 2) {
            const int before = __shfl_up_sync(ALL, upto[which], by);
            if (lane >= by) upto[which] += before;
        }
        if (lane == 31 && warp < VALUES) of_warps[which * VALUES + warp] = upto[which];
    }
    __syncthreads();
#pragma unroll
    for (int which = 0; which <= WIDTHS; which++) {
        for (int w = 0; w < VALUES; w++) {
            if (w == warp) upto[which] += total[which];
            total[which] += of_warps[which * VALUES + w];
        }
    }
    const int first = upto[0] - count, routed = total[0];
    if (e < EXPERTS) places[e] = first + (both & 0xFFFF);
    __syncthreads();
    if (i < behind_token * chosen) {
        const int t = i / chosen;
        const u32 at =
            of < EXPERTS ? places[of] + __popc(members[of] & (1u << static_cast<u32>(t) % TOKENS) - 1) : routed + t;
        rows[at] = make_uint2(t, weight);
        if (!FEW) back[i] = at;
    }
    if (blockIdx.x > 0) return;
    // Kinds stand behind each other, and in each the shared expert's blocks behind the others.
    const int of_shared = with_shared ? tokens : 0;
    int begins = 0;
#pragma unroll
    for (int kind = 0; kind < WIDTHS; kind++) {
        int at = begins + upto[1 + kind] - of_kind(count, kind);
        if (kind == kind_of(BLOCK_TOKENS)) {
            for (int b = 0; b < full; b++) blocks[at++] = make_uint2(e | BLOCK_TOKENS << 16, first + b * BLOCK_TOKENS);
        }
        if (rest > 0 && kind == kind_of(rest)) blocks[at] = make_uint2(e | rest << 16, first + full * BLOCK_TOKENS);
        begins += total[1 + kind];
        for (int b = threadIdx.x; b * BLOCK_TOKENS < of_shared; b += THREADS) {
            const int begin = b * BLOCK_TOKENS, count = min(BLOCK_TOKENS, of_shared - begin);
            if (kind == kind_of(count))
                blocks[begins + (kind == kind_of(BLOCK_TOKENS) ? b : 0)] =
                    make_uint2(EXPERTS | count << 16, routed + begin);
        }
        begins += of_kind(of_shared, kind);
        if (BY_WIDTH && threadIdx.x == 0 && kind < 2) state[7 + kind] = begins;
    }
    if (BY_WIDTH && WIDTHS == 1 && threadIdx.x == 0) state[8] = begins;
    if (threadIdx.x == 0) state[0] = begins;
}
