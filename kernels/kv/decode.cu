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
// Work: a team of `width` blocks, one kv head each, walks a line of sequences and units of TOKENS TILES tokens side by
// side (heads beyond the width are further items). The line is cut evenly into one range per team, or, where all items
// are alike and it ends no later, each item gets teams of its own. A block's warps take its units in turn.
// PRODUCERS more warps bring K and V of the units to a ring of PAIRS buffers for each, by one bulk copy per tile: the
// first copies leave after two dependent loads (lengths, page ids), and nothing that the products wait for queues
// behind the tiles. Where a (sequence, head) ends, the warps' (m, l, O) are merged in shared memory; a range that ends
// inside one leaves its part in a workspace, and the last block to arrive merges the parts. All counters are left at
// zero.
//
// A tile comes by a tensor copy, which swizzles each line of 128 bytes by its token; which token is which row of the
// product (token_row) is chosen so that the fragments' loads meet no bank conflict. Skewed buffers would do that too,
// but a copy that moves its bytes within 128 bytes makes more requests of L2.
#include "decode_ptx.cuh"

enum { FP8 = 0, Q8_0 = 1, BF16 = 2, F16 = 3 };
constexpr int PRODUCERS = 4;      // warps that bring tiles: number i those of warps i, i + PRODUCERS ..
constexpr int QUERIES = 8;        // columns of the product
constexpr int MAX_BATCH = 512;    // prefix sums in shared memory
constexpr int MAX_HEADS = 128;    // kv heads: their scales in shared memory
constexpr int MAX_PARTS = 160;    // of an item: a lane's registers hold five parts' weights
constexpr unsigned NO_TILE = 0xFFFFFFFEu;
constexpr float RESCALE = 8.0f;   // the running maximum may lag by this many powers of two before O is rescaled

struct Problem {
    const TensorMap *k_map, *v_map;            // the caches [pages Hkv page][D], in boxes of a tile
    const unsigned char *q, *k_scale, *v_scale;  // q [batch, Hkv G, D] 16-bit; scales like the caches
    const int *table, *lengths;                          // [batch, max_pages], [batch]
    unsigned char* o;                                    // like q
    unsigned char* part;  // [2 blocks, G, D] half, each row scaled by a power of two
    float* part_ml;       // [2 blocks, 8, 4]: a row's maximum, its sum, what undoes the scale
    unsigned* arrived;                                   // zeros: [batch Hkv] arrivals
    int width, rows, teams;                              // blocks of a team; Hkv / width; blocks / width
    int per_item, second;                                // teams / (batch rows); what a second item costs, in units
    int capped_below;                                    // units: in shorter ranges copies under way are capped
    int batch, kv_heads, group, page_shift, max_pages;   // page_shift: log2(page / 16)
    float logit_scale;                                   // D^-1/2 log2(e)
    int q_is_bf16;
    unsigned zero;                                       // 0, which no compiler knows: what depends on it has to wait
};

// The token, of 8, that is row p = 2 t + e of a product. With the swizzle, which moves 16-byte pieces by the token's
// lowest three bits, loads of K (lanes that differ in e and by a quarter of 64 bytes) need e in the highest of them, and
// loads of V (lanes that differ in t and by one piece) t in the upper two.
static __device__ __forceinline__ int token_row(int p) { return (p & 3) | ((p ^ p >> 2) & 1) << 2; }

// How the line is cut: into `spans` of `span` units, each into one range for each of its `teams`, of `share` units (the
// first `longer` have one more).
struct Cut {
    int span, spans, teams, share, longer;
};

// All sequences: units of one head of them, of the first, and of those before this lane's `each`.
struct Lengths {
    int units, first, before, each;
    bool alike;  // as many units each
};

// A position in the line of units: unit `unit` lies in the item (sequence b, head h) that spans [begin, begin + count).
struct Cursor {
    int unit, begin, count, b, h, length;
};

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
    static constexpr int SERVED = WARPS / PRODUCERS;         // warps, by one producer
    static constexpr int CAP = (8 + PRODUCERS) / PRODUCERS;  // copies of one producer under way where they are capped
    static_assert(WARPS % PRODUCERS == 0, "a producer serves whole warps");
    static_assert(CAP <= SERVED * (PAIRS - 1) + 1, "no phase of the copy waited for may be followed by another");
    static constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32 * PRODUCERS;
    static constexpr bool WIDE = KIND == BF16 || KIND == F16;
    static constexpr int ROW = WIDE ? 2 * D : D;                 // bytes of one token
    static constexpr int SCALE_ROW = KIND == Q8_0 ? D / 16 : 0;  // bytes of its scales
    static constexpr int TOKENS = ROW > 256 ? 8 : 16;            // of a tile: what one copy brings
    static constexpr int TILE = TOKENS * ROW, SCALES = TOKENS * SCALE_ROW, PAIR = TILES * TILE;
    static constexpr int UNIT = TOKENS * TILES, PRODUCTS = UNIT / 16;  // tokens; of 16 rows
    static_assert(TOKENS == 16 ? PRODUCTS == TILES : PRODUCTS == 1, "a tile's tokens are rows of one product");
    static constexpr int LINE = 128, ASIDE = TOKENS * LINE;  // bytes swizzled together; from those of a token to its next
    static constexpr int BATCH = 32 / TILES;                  // units whose page ids a producer loads at once
    static constexpr int K_LANE = KIND == FP8 ? 16 : 8;       // values of d per lane and load of K
    static constexpr int K_STEPS = K_LANE / 4;                // products per load
    static constexpr int K_LOADS = D / (4 * K_LANE);
    static constexpr int V_LANE = WIDE ? 8 : 16;              // values of d per lane and load of V
    static constexpr int V_LOADS = D / (8 * V_LANE);
    static constexpr int M_TILES = D / 16;
    static constexpr int QUADS = 2;                           // float4 per lane and query in one round of the merge
    static constexpr int QUERY_ROW = 2 * D + 64, QUERY_BYTES = QUERIES * QUERY_ROW;  // 64: free of bank conflicts
    // Shared memory, in bytes.
    static constexpr int RING = 0, SCALE_RING = WARPS * PAIRS * PAIR;
    static constexpr int MERGE = SCALE_RING + WARPS * PAIRS * TILES * SCALES;
    static constexpr int MERGE_BYTES = WARPS * QUERIES * 8 * QUADS * 16;
    static constexpr int QUERY = MERGE + MERGE_BYTES, BARRIERS = QUERY + 2 * QUERY_BYTES;
    static constexpr int STATS = (BARRIERS + (2 * WARPS * PAIRS + 5) * 8 + 15) / 16 * 16;
    static constexpr int TOTALS = STATS + WARPS * QUERIES * 16, FLAG = TOTALS + QUERIES * 8, CUT = FLAG + 32;
    static constexpr int PREFIX = CUT + 32, LENGTHS = PREFIX + 4 * (MAX_BATCH + 4);
    static constexpr int HEAD_SCALES = LENGTHS + 4 * MAX_BATCH, BYTES = HEAD_SCALES + 8 * MAX_HEADS;

    const Problem& p;
    const unsigned shared, prefix, lengths;
    const unsigned full, empty, query_full, query_empty, parts_full;  // barriers
    const int tid, lane, warp, g, t, block, grid, page_tiles;
    unsigned buffer = 0, parity = 0;  // a consumer's next, of all buffers; of its barriers
    // One item's state.
    unsigned query[K_LOADS * K_STEPS * 2];
    float row_scale[2], top[2], sum[2], v_scale;
    float acc[M_TILES][4];

    __device__ __forceinline__ Decode(const Problem& problem, unsigned base, int thread, int block_, int grid_)
        : p(problem), shared(base), prefix(base + PREFIX), lengths(base + LENGTHS), full(base + BARRIERS),
          empty(full + 8 * WARPS * PAIRS), query_full(empty + 8 * WARPS * PAIRS), query_empty(query_full + 16),
          parts_full(query_empty + 16), tid(thread), lane(thread & 31),
          warp(shuffle_int(thread >> 5, 0)),  // seen to be the same in all lanes
          g(lane >> 2), t(lane & 3), block(block_), grid(grid_), page_tiles(problem.page_shift + (TOKENS == 8)) {}

    // From a unit's first row to row 8 f of its product number m, of tokens and of their scales.
    static __device__ __forceinline__ constexpr int step(int m, int f) {
        return TOKENS == 16 ? m * TILE + f * 8 * LINE : f * TILE;
    }
    static __device__ __forceinline__ constexpr int scale_step(int m, int f) {
        return TOKENS == 16 ? m * SCALES + f * 8 * SCALE_ROW : f * SCALES;
    }
    // Where the bytes from `at` on of a token's first 128 bytes lie, from its tile's first byte.
    static __device__ __forceinline__ int placed(int token, int at) { return token * LINE + (at ^ (token & 7) * 16); }

    __device__ __forceinline__ int prefix_at(int b) const { return (int)lds32(prefix + 4 * b); }

    // The item of a unit, in the line of the team's block number `own`; its sequence is one of low .. high.
    __device__ __forceinline__ Cursor locate(int own, int unit, int low, int high) const {
        while (low < high) {  // the last b whose units begin at or before `unit`; empty sequences are skipped
            const int middle = (low + high + 1) >> 1;
            if (p.rows * prefix_at(middle) <= unit) low = middle;
            else high = middle - 1;
        }
        Cursor c;
        c.unit = unit, c.b = low;
        const int first = prefix_at(low);
        c.count = prefix_at(low + 1) - first;
        const int row = p.rows > 1 && c.count ? (unit - p.rows * first) / c.count : 0;
        c.h = row * p.width + own;
        c.begin = p.rows * first + row * c.count;
        c.length = (int)lds32(lengths + 4 * low);
        return c;
    }

    // The item behind this one; there must be one.
    __device__ __forceinline__ void next_item(Cursor& c) const {
        c.begin += c.count, c.h += p.width;
        if (c.h >= p.kv_heads) {
            c.h -= p.kv_heads;
            do {
                ++c.b;
                c.count = prefix_at(c.b + 1) - prefix_at(c.b);
            } while (c.count == 0);
            c.length = (int)lds32(lengths + 4 * c.b);
        }
    }

#include "decode_work.cuh"
#include "decode_products.cuh"
#include "decode_merge.cuh"

    // A producer's own: those of the warps that it serves; the last one's, of the queries and parts, too.
    __device__ __forceinline__ void init_barriers() {
        if (lane == 0) {  // a loop over lanes would run them one by one
#pragma unroll
            for (int w = 0; w < WARPS; w += PRODUCERS)
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) {
                    const int at = 8 * ((warp - WARPS + w) * PAIRS + i);
                    barrier_init(full + at, TILES);
                    barrier_init(empty + at, 1);
                }
            if (warp == WARPS + PRODUCERS - 1) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    barrier_init(query_full + 8 * i, p.group);
                    barrier_init(query_empty + 8 * i, WARPS);
                }
                barrier_init(parts_full, 1);
            }
            barrier_init_done();
        }
    }

    __device__ __forceinline__ void consume() {
        // The table on its way to L2: the blocks ask for every 128-byte line.
        for (int i = block * CONSUMERS + tid; i < (p.batch * p.max_pages + 31) / 32; i += grid * CONSUMERS)
            prefetch(p.table + min(32 * i, p.batch * p.max_pages - 1));
        if constexpr (KIND == FP8)
            for (int i = tid; i < 2 * p.kv_heads; i += CONSUMERS) {
                const bool v = i >= p.kv_heads;
                const float x = ((const float*)(v ? p.v_scale : p.k_scale))[v ? i - p.kv_heads : i];
                sts32(shared + HEAD_SCALES + 4 * i, bits_of(x));
            }
        sync_at_start<THREADS>();
        for (int b = block; b < p.batch; b += grid)  // an empty sequence is nobody's: zeros
            if (prefix_at(b) == prefix_at(b + 1))
                for (int i = tid; i < p.kv_heads * p.group * D / 2; i += CONSUMERS)
                    ((unsigned*)p.o)[(u64)b * p.kv_heads * p.group * (D / 2) + i] = 0;
        const uint4 range = lds128(shared + CUT + 16);
        const int first = range.y, last = range.z, own = range.w;
        if (first == last) return;
        buffer = warp * PAIRS;
        Cursor c = locate(own, first, 0, p.batch - 1);
        Ticket early = {0, 0, 0, 0, 0};
        bool begun = false, whole;
        int item = 0;
        for (int mine = first + warp;;) {
            const int end = min(c.begin + c.count, last);
            begin_item(c, item++);
            for (; mine < end; mine += WARPS) unit(c.length - (mine - c.begin) * UNIT);
            whole = end_item(c, first, last);
            if (end == last) break;
            if (!whole) {  // the range's first item; nobody waits for the answer
                begun = true;
                sync_consumers<CONSUMERS>();
                if (tid == 0) early = arrive(c);
            }
            next_item(c);
        }
        finish(c, whole, begun, early, own);
    }

    __device__ __forceinline__ void run() {
        if (warp >= WARPS) {  // warpgroups, as registers go from one to another
            registers_down<56>();
            produce();
        } else {
            registers_up<224>();
            consume();
        }
    }
};

#define KV_DECODE(name, KIND, D, WARPS, TILES, PAIRS)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * (WARPS + PRODUCERS), 1) name(                                 \
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const unsigned char* q,      \
        const unsigned char* k_scale, const unsigned char* v_scale, const int* table, const int* lengths,              \
        unsigned char* o, unsigned char* part, float* part_ml, unsigned* arrived, int width, int rows, int teams,      \
        int per_item, int second, int capped_below, int batch, int kv_heads, int group, int page_shift, int max_pages, \
        float logit_scale, int q_is_bf16, unsigned zero) {                                                             \
        extern __shared__ __align__(1024) unsigned char memory[];                                                      \
        typedef Decode<KIND, D, WARPS, TILES, PAIRS> Kernel;                                                           \
        static_assert(Kernel::BYTES <= 232448, "shared memory");                                                       \
        const Problem problem = {&k_map,   &v_map,    q,        k_scale, v_scale,      table,     lengths,             \
                                 o,        part,      part_ml,  arrived, width,        rows,      teams,               \
                                 per_item, second,    capped_below, batch, kv_heads,   group,     page_shift,          \
                                 max_pages, logit_scale, q_is_bf16, zero};                                             \
        Kernel(problem, shared_base(memory), threadIdx.x, blockIdx.x, gridDim.x).run();                                \
    }

KV_DECODE(kv_fp8_d256_w8_t2_p3, FP8, 256, 8, 2, 3)
KV_DECODE(kv_fp8_d128_w8_t4_p3, FP8, 128, 8, 4, 3)
KV_DECODE(kv_q8_0_d256_w8_t2_p2, Q8_0, 256, 8, 2, 2)
KV_DECODE(kv_q8_0_d128_w8_t2_p5, Q8_0, 128, 8, 2, 5)
KV_DECODE(kv_bf16_d256_w8_t2_p3, BF16, 256, 8, 2, 3)
KV_DECODE(kv_bf16_d128_w8_t2_p3, BF16, 128, 8, 2, 3)
KV_DECODE(kv_fp16_d256_w8_t2_p3, F16, 256, 8, 2, 3)
KV_DECODE(kv_fp16_d128_w8_t2_p3, F16, 128, 8, 2, 3)
