// Paged decode attention with the operands swapped: tokens are the rows of the matrix product, the query heads of one
// kv head its 8 columns (mma.sync m16n8k16), so that 6 queries are padded to 8 and not to 16 or 64.
//
//   S^T[token, query] = K Q^T          A = K from shared memory, converted in registers; B = Q^T, kept in registers
//   O^T[d, query]    += V^T P^T        A = V^T: bytes of two tokens interleaved, then converted; B = P^T, transposed
//
// Which token is which row, and which d is which column, is free as long as both products agree, so the fragments are
// chosen for wide loads (lane (g, t) = (lane / 4, lane % 4) reads 16 bytes of one token) and no converted value is ever
// written to shared memory again.
//
// Work: all sequences x kv heads x units of 16 TILES tokens in one line, cut into one range per block, all of one
// length up to a unit; a block's warps take its units in turn.
// A warp owns a ring of PAIRS buffers that hold the K or the V of one unit; it fills them itself by one bulk copy per
// 16-token tile, so no warp waits for another until a (sequence, head) ends. There the warps' (m, l, O) are merged in
// shared memory; a range that ends inside a sequence leaves its part in a workspace, and the last block to arrive
// merges the parts; where there are many, blocks that have nothing left to do wait a moment and merge a slice each.
// All counters are left at zero.
//
// Tile buffers are skewed by 32 or 64 bytes and a fragment's rows taken from different tiles, which keeps the loads
// free of bank conflicts (V with TILES = 2: two-way). token_tile and token_row say which.
#include "decode_ptx.cuh"

enum { FP8 = 0, Q8_0 = 1, BF16 = 2, F16 = 3 };
constexpr int QUERIES = 8;        // columns of the product
constexpr int MAX_BATCH = 512;    // prefix sums in shared memory
constexpr unsigned NO_UNIT = 0xFFFFFFFFu, NO_TILE = 0xFFFFFFFEu;
constexpr int HELP_PARTS = 6, HELP_MOST = 64;  // fewer parts, or more, are merged by one block
constexpr int HELP_POLLS = 64;                 // of about 0.7 us
constexpr float RESCALE = 8.0f;   // the running maximum may lag by this many powers of two before O is rescaled

struct Problem {
    const unsigned char *q, *k, *v, *k_scale, *v_scale;  // q [batch, Hkv G, D] 16-bit; caches [pages, Hkv, page, D]
    const int *table, *lengths;                          // [batch, max_pages], [batch]
    unsigned char* o;                                    // like q
    float *part, *part_ml;                               // [2 blocks, G, D]; [2 blocks, 8, 2] maximum and sum
    unsigned* arrived;                                   // zeros: [batch Hkv] arrivals, the same of slices
    int batch, kv_heads, group, page_shift, max_pages;   // page_shift: log2(page / 16)
    float logit_scale;                                   // D^-1/2 log2(e)
    int q_is_bf16;
};

// Row r = 2 t + e + 8 f of the product number `m` of a unit is token `token_row` of tile `token_tile`.
template <int TILES> static __device__ __forceinline__ int token_tile(int t, int e) {
    return TILES == 1 ? 0 : TILES == 2 ? (t ^ e) & 1 : t ^ (2 * e);
}
template <int TILES> static __device__ __forceinline__ int lane_row(int t, int e) {
    return TILES == 1 ? 2 * t + e : TILES == 2 ? 2 * (t >> 1) + e : e;
}
template <int TILES> static __device__ __forceinline__ constexpr int step_row(int m, int f) {
    return TILES == 1 ? 8 * f : TILES == 2 ? 8 * m + 4 * f : 4 * m + 2 * f;
}

// A position in the line of units: unit `unit` lies in the item (sequence b, head h) that spans [begin, begin + count).
struct Cursor {
    int unit, begin, count, b, h, length;
};

static __device__ __forceinline__ int prefix_at(unsigned prefix, int b) { return (int)lds32(prefix + 4 * b); }

static __device__ __forceinline__ Cursor locate(const Problem& p, unsigned prefix, int unit) {
    int low = 0, high = p.batch - 1;  // the last b whose units begin at or before `unit`; empty sequences are skipped
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (p.kv_heads * prefix_at(prefix, middle) <= unit) low = middle;
        else high = middle - 1;
    }
    Cursor c;
    c.unit = unit;
    c.b = low;
    int first = prefix_at(prefix, low);
    c.count = prefix_at(prefix, low + 1) - first;
    c.h = c.count ? (unit - p.kv_heads * first) / c.count : 0;
    c.begin = p.kv_heads * first + c.h * c.count;
    c.length = load_i32(p.lengths + low);
    return c;
}

// The item behind this one; there must be one.
static __device__ __forceinline__ void next_item(const Problem& p, unsigned prefix, Cursor& c) {
    c.begin += c.count;
    if (++c.h == p.kv_heads) {
        c.h = 0;
        do {
            ++c.b;
            c.count = prefix_at(prefix, c.b + 1) - prefix_at(prefix, c.b);
        } while (c.count == 0);
        c.length = load_i32(p.lengths + c.b);
    }
}

// Four int8 as two pairs of halves: byte + 128 into the mantissa of 1024, then 1152 off; exact.
static __device__ __forceinline__ void int8_to_half2(unsigned word, unsigned& low, unsigned& high) {
    word ^= 0x80808080u;
    low = sub_half2(permute(word, 0x64646464u, 0x4140), 0x64806480u);
    high = sub_half2(permute(word, 0x64646464u, 0x4342), 0x64806480u);
}

template <int KIND> static __device__ __forceinline__ void halves(unsigned word, unsigned& low, unsigned& high) {
    if constexpr (KIND == Q8_0) {
        int8_to_half2(word, low, high);
    } else {
        low = e4m3_to_half2(word & 0xFFFF);
        high = e4m3_to_half2(word >> 16);
    }
}

template <int KIND>
static __device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                           unsigned b0, unsigned b1) {
    if constexpr (KIND == BF16) mma_bf16(c, a0, a1, a2, a3, b0, b1);
    else mma_f16(c, a0, a1, a2, a3, b0, b1);
}

static __device__ __forceinline__ unsigned word_of(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

static __device__ __forceinline__ float widen(unsigned bits, int is_bf16) {
    return is_bf16 ? float_of(bits << 16) : half_to_float(bits);
}

template <int KIND, int D, int WARPS, int TILES, int PAIRS> struct Decode {
    static constexpr int THREADS = 32 * WARPS;
    static constexpr bool WIDE = KIND == BF16 || KIND == F16;
    static constexpr int ROW = WIDE ? 2 * D : D;                 // bytes of one token
    static constexpr int SCALE_ROW = KIND == Q8_0 ? D / 16 : 0;  // bytes of its scales
    static constexpr int TILE = 16 * ROW, SCALES = 16 * SCALE_ROW;
    static constexpr int SKEW = TILES == 4 ? 32 : TILES == 2 ? 64 : 0;
    static constexpr int SLOT = TILE + SCALES + SKEW, PAIR = TILES * SLOT;
    static constexpr int UNIT = 16 * TILES;                   // tokens
    static constexpr int AHEAD = (PAIRS + 1) / 2;             // units whose page ids must be known
    static constexpr int K_LANE = KIND == FP8 ? 16 : 8;       // values of d per lane and load of K
    static constexpr int K_STEPS = K_LANE / 4;                // products per load
    static constexpr int K_LOADS = D / (4 * K_LANE);
    static constexpr int V_LANE = WIDE ? 8 : 16;              // values of d per lane and load of V
    static constexpr int V_LOADS = D / (8 * V_LANE);
    static constexpr int M_TILES = D / 16;
    static constexpr int QUADS = 2;                           // float4 per lane and query in one round of the merge
    // Shared memory, in bytes.
    static constexpr int RING = 0, MERGE = WARPS * PAIRS * PAIR, MERGE_BYTES = WARPS * QUERIES * 8 * QUADS * 16;
    static constexpr int BARRIERS = MERGE + MERGE_BYTES, STATS = BARRIERS + WARPS * PAIRS * 8;
    static constexpr int TOTALS = STATS + WARPS * QUERIES * 8, FLAG = TOTALS + QUERIES * 8;
    static constexpr int PREFIX = FLAG + 16, BYTES = PREFIX + 4 * (MAX_BATCH + 4);

    const Problem& p;
    const unsigned shared;
    const int tid, lane, warp, g, t, block, grid;
    unsigned ring, bars, prefix;
    // The ring: the next buffer to read and its parity; tile numbers of the units ahead, one lane per tile.
    unsigned stage = 0, parity = 0;
    unsigned ahead[AHEAD + 1];
    int pending_page = 0, pending_head = 0, pending_sub = 0, pending_state = 0;  // state 0 no unit, 1 no tile, 2 a tile
    Cursor producer;
    int blocks, share, longer;  // with work; units of each; the first `longer` blocks have one more
    int first, last;            // this block's units [first, last)
    // One item's state.
    unsigned query[K_LOADS * K_STEPS * 2];
    float row_scale[2], top[2], sum[2], v_scale;
    float acc[M_TILES][4];

    __device__ __forceinline__ Decode(const Problem& problem, unsigned base, int thread, int block_, int grid_)
        : p(problem), shared(base), tid(thread), lane(thread & 31), warp(thread >> 5), g(lane >> 2), t(lane & 3),
          block(block_), grid(grid_) {
        ring = shared + RING + warp * PAIRS * PAIR;
        bars = shared + BARRIERS + warp * PAIRS * 8;
        prefix = shared + PREFIX;
    }

#include "decode_work.cuh"
#include "decode_products.cuh"
#include "decode_merge.cuh"

    __device__ __forceinline__ void run() {
        // The table on its way to L2 while the lengths are: together the blocks ask for every 128-byte line of it.
        for (int i = block * THREADS + tid; i < (p.batch * p.max_pages + 31) / 32; i += grid * THREADS)
            prefetch(p.table + min(32 * i, p.batch * p.max_pages - 1));
        scan();
        for (int b = block; b < p.batch; b += grid)  // an empty sequence is nobody's: zeros
            if (prefix_at(prefix, b) == prefix_at(prefix, b + 1))
                for (int i = tid; i < p.kv_heads * p.group * D / 2; i += THREADS)
                    ((unsigned*)p.o)[(u64)b * p.kv_heads * p.group * (D / 2) + i] = 0;
        if (block >= blocks) return;
        first = block * share + min(block, longer);
        last = first + share + (block < longer);

        Cursor c = locate(p, prefix, first);
        producer = c;
        producer.unit = first + warp;
        int page[AHEAD + 1], head[AHEAD + 1], sub[AHEAD + 1], state[AHEAD + 1];
#pragma unroll
        for (int i = 0; i <= AHEAD; ++i) {  // all loads first
            fetch();
            page[i] = pending_page, head[i] = pending_head, sub[i] = pending_sub, state[i] = pending_state;
        }
#pragma unroll
        for (int i = 0; i <= AHEAD; ++i) {
            pending_page = page[i], pending_head = head[i], pending_sub = sub[i], pending_state = state[i];
            ahead[i] = fetched();
        }
        sync_warp();  // this warp's barriers are set up
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) issue(ahead[i / 2], i & 1, i);
        fetch();

        for (int mine = first + warp;;) {
            const int end = min(c.begin + c.count, last);
            begin_item(c);
            for (; mine < end; mine += WARPS) unit(c.length - (mine - c.begin) * UNIT);
            end_item(c, end == last);
            if (end == last) break;
            next_item(p, prefix, c);
        }
    }
};

#define KV_DECODE(name, KIND, D, WARPS, TILES, PAIRS)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) name(                                                  \
        const unsigned char* q, const unsigned char* k, const unsigned char* v, const unsigned char* k_scale,          \
        const unsigned char* v_scale, const int* table, const int* lengths, unsigned char* o, float* part,             \
        float* part_ml, unsigned* arrived, int batch, int kv_heads, int group, int page_shift, int max_pages,          \
        float logit_scale, int q_is_bf16) {                                                                            \
        extern __shared__ __align__(128) unsigned char memory[];                                                       \
        typedef Decode<KIND, D, WARPS, TILES, PAIRS> Kernel;                                                           \
        static_assert(Kernel::BYTES <= 232448, "shared memory");                                                       \
        const Problem problem = {q, k, v, k_scale, v_scale, table, lengths, o, part, part_ml, arrived, batch, kv_heads,\
                                 group, page_shift, max_pages, logit_scale, q_is_bf16};                                \
        Kernel(problem, shared_base(memory), threadIdx.x, blockIdx.x, gridDim.x).run();                                \
    }

KV_DECODE(kv_fp8_d256_w8_t2_p3, FP8, 256, 8, 2, 3)
KV_DECODE(kv_fp8_d128_w8_t4_p3, FP8, 128, 8, 4, 3)
KV_DECODE(kv_q8_0_d256_w8_t2_p3, Q8_0, 256, 8, 2, 3)
KV_DECODE(kv_q8_0_d128_w8_t2_p5, Q8_0, 128, 8, 2, 5)
KV_DECODE(kv_bf16_d256_w8_t1_p3, BF16, 256, 8, 1, 3)
KV_DECODE(kv_bf16_d128_w8_t2_p3, BF16, 128, 8, 2, 3)
KV_DECODE(kv_fp16_d256_w8_t1_p3, F16, 256, 8, 1, 3)
KV_DECODE(kv_fp16_d128_w8_t2_p3, F16, 128, 8, 2, 3)
