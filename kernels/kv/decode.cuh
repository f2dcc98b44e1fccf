// A kernel of decode.cu: its arguments, what shared memory holds where, and the members that the other headers define.
#ifndef KV_DECODE_CUH
#define KV_DECODE_CUH

#include "sm90/mma.cuh"

// 1: a programmatic dependent launch. Lengths, page ids and all tokens but a sequence's newest may be read before the
// kernel ahead has ended; it writes those and the queries.
#ifndef PDL
#define PDL 0
#endif

enum { FP8 = 0, Q8_0 = 1, BF16 = 2, F16 = 3 };
constexpr int PRODUCERS = 4;    // producer warps: number i loads the tiles of warps i, i + PRODUCERS ..
constexpr int QUERIES = 8;      // columns of the product
constexpr int MAX_BATCH = 512;  // prefix sums in shared memory
constexpr int MAX_HEADS = 128;  // kv heads: their scales in shared memory
constexpr int MAX_PARTS = 160;  // of an item: a lane's registers hold five parts' weights
constexpr int CONSUMERS_MEET = 1, STARTED = 2, PRODUCERS_READY = 3;  // named barriers
constexpr u32 NO_TILE = 0xFFFFFFFEu;
constexpr float RESCALE = 8.0f;  // the running maximum may lag by this many powers of two before O is rescaled

struct Problem {
    const TensorMap *k_map, *v_map;              // the caches [pages Hkv page][D], in boxes of a tile
    const unsigned char *q, *k_scale, *v_scale;  // q [batch, Hkv G, D] 16-bit; scales like the caches
    const int *table, *lengths;                  // [batch, max_pages], [batch]
    unsigned char* o;                            // like q
    unsigned char* part;                         // [2 blocks, G, D] half, each row scaled by a power of two
    float* part_ml;                              // [2 blocks, 8, 4]: a row's maximum, its sum, what undoes the scale
    u32* arrived;                                // zeros: [batch Hkv] arrivals
    int width, rows, teams;                      // blocks of a team; Hkv / width; blocks / width
    int per_item, second;                        // teams / (batch rows); what a second item costs, in units
    int capped_below;                            // units: in shorter ranges loads in flight are capped
    int batch, kv_heads, group, page_shift, max_pages;  // page_shift: log2(page / 16)
    float logit_scale;                                  // D^-1/2 log2(e)
    int q_is_bf16;
    u32 zero;  // 0, which no compiler knows: what depends on it has to wait
};

// The token, of 8, that is row p = 2 t + e of a product. With the swizzle, which moves 16-byte pieces by the token's
// lowest three bits, loads of K (lanes that differ in e and by a quarter of 64 bytes) need e in the highest of them,
// and loads of V (lanes that differ in t and by one piece) t in the upper two.
DEVICE int token_row(int p) { return (p & 3) | ((p ^ p >> 2) & 1) << 2; }

// How the line is cut: into `spans` of `span` units, each into one range for each of its `teams`, of `share` units
// (the first `longer` have one more).
struct Partition {
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
DEVICE void int8_to_half2(u32 word, u32& low, u32& high) {
    word ^= 0x80808080u;
    low = sub_half2(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u);
    high = sub_half2(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u);
}

template <int KIND>
DEVICE void halves(u32 word, u32& low, u32& high) {
    if constexpr (KIND == Q8_0) {
        int8_to_half2(word, low, high);
    } else {
        low = e4m3_to_half2(word & 0xFFFF);
        high = e4m3_to_half2(word >> 16);
    }
}

template <int KIND>
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (KIND == BF16) mma_16816<true>(c, a0, a1, a2, a3, b0, b1);
    else mma_16816<false>(c, a0, a1, a2, a3, b0, b1);
}

DEVICE u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

DEVICE float widen(u32 bits, int is_bf16) { return is_bf16 ? __uint_as_float(bits << 16) : half_to_float(bits); }

// What a producer keeps: per lane the position of the unit and tile it loads, and that tile's page.
struct Producer {
    Cursor c;
    int page, state;  // of the load in flight; 0 no unit, 1 no tile, 2 a tile
    int at, until;    // its next unit that is not fetched yet; the end of the range
};

// What came back from the counter of an item's parts, how many there are, and the team that holds the first.
struct Ticket {
    u32 before;
    int parts, from, b, h;
};

template <int KIND, int D, int WARPS, int TILES, int STAGES>
struct Decode {
    static constexpr int SERVED = WARPS / PRODUCERS;         // warps, by one producer
    static constexpr int CAP = (8 + PRODUCERS) / PRODUCERS;  // loads of one producer in flight where they are capped
    static_assert(WARPS % PRODUCERS == 0, "a producer serves whole warps");
    static_assert(CAP <= SERVED * (STAGES - 1) + 1, "no phase of the copy waited for may be followed by another");
    static constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32 * PRODUCERS;
    static constexpr bool WIDE = KIND == BF16 || KIND == F16;
    static constexpr int ROW = WIDE ? 2 * D : D;                 // bytes of one token
    static constexpr int SCALE_ROW = KIND == Q8_0 ? D / 16 : 0;  // bytes of its scales
    static constexpr int TOKENS = ROW > 256 ? 8 : 16;            // of a tile: what one load brings
    static constexpr int TILE = TOKENS * ROW, SCALES = TOKENS * SCALE_ROW, STAGE_BYTES = TILES * TILE;
    static constexpr int UNIT = TOKENS * TILES, PRODUCTS = UNIT / 16;  // tokens; of 16 rows
    static_assert(TOKENS == 16 ? PRODUCTS == TILES : PRODUCTS == 1, "a tile's tokens are rows of one product");
    static constexpr int LINE = 128,
                         ASIDE = TOKENS * LINE;          // bytes swizzled together; from those of a token to its next
    static constexpr int BATCH = 32 / TILES;             // units whose page ids a producer loads at once
    static constexpr int K_LANE = KIND == FP8 ? 16 : 8;  // values of d per lane and load of K
    static constexpr int K_STEPS = K_LANE / 4;           // products per load
    static constexpr int K_LOADS = D / (4 * K_LANE);
    static constexpr int V_LANE = WIDE ? 8 : 16;  // values of d per lane and load of V
    static constexpr int V_LOADS = D / (8 * V_LANE);
    static constexpr int M_TILES = D / 16;
    static constexpr int QUADS = 2;  // float4 per lane and query in one round of the merge
    static constexpr int QUERY_ROW = 2 * D + 64, QUERY_BYTES = QUERIES * QUERY_ROW;  // 64: free of bank conflicts
    // Shared memory, in bytes.
    static constexpr int TILES_AT = 0, SCALES_AT = WARPS * STAGES * STAGE_BYTES;
    static constexpr int MERGE = SCALES_AT + WARPS * STAGES * TILES * SCALES;
    static constexpr int MERGE_BYTES = WARPS * QUERIES * 8 * QUADS * 16;
    static constexpr int QUERY = MERGE + MERGE_BYTES, BARRIERS = QUERY + 2 * QUERY_BYTES;
    static constexpr int STATS = (BARRIERS + (2 * WARPS * STAGES + 5) * 8 + 15) / 16 * 16;
    static constexpr int TOTALS = STATS + WARPS * QUERIES * 16, FLAG = TOTALS + QUERIES * 8, PARTITION_AT = FLAG + 32;
    static constexpr int PREFIX = PARTITION_AT + 32, LENGTHS = PREFIX + 4 * (MAX_BATCH + 4);
    static constexpr int HEAD_SCALES = LENGTHS + 4 * MAX_BATCH, BYTES = HEAD_SCALES + 8 * MAX_HEADS;

    const Problem& p;
    const u32 shared, prefix, lengths;
    const u32 full, empty, query_full, query_empty, parts_full;  // barriers
    const int tid, lane, warp, g, t, block, grid, page_tiles;
    u32 stage = 0, phase = 0;  // where a consumer stands: its next stage, of all warps'; the parity of its round
    // One item's state.
    u32 query[K_LOADS * K_STEPS * 2];
    float row_scale[2], top[2], sum[2], v_scale;
    float acc[M_TILES][4];

    DEVICE Decode(const Problem& problem, u32 base, int thread, int block_, int grid_)
        : p(problem),
          shared(base),
          prefix(base + PREFIX),
          lengths(base + LENGTHS),
          full(base + BARRIERS),
          empty(full + 8 * WARPS * STAGES),
          query_full(empty + 8 * WARPS * STAGES),
          query_empty(query_full + 16),
          parts_full(query_empty + 16),
          tid(thread),
          lane(thread & 31),
          warp(warp_uniform(thread >> 5)),
          g(lane >> 2),
          t(lane & 3),
          block(block_),
          grid(grid_),
          page_tiles(problem.page_shift + (TOKENS == 8)) {}

    // From a unit's first row to row 8 f of its product number m, of tokens and of their scales.
    DEVICE static constexpr int step(int m, int f) { return TOKENS == 16 ? m * TILE + f * 8 * LINE : f * TILE; }
    DEVICE static constexpr int scale_step(int m, int f) {
        return TOKENS == 16 ? m * SCALES + f * 8 * SCALE_ROW : f * SCALES;
    }
    // Where the bytes from `at` on of a token's first 128 bytes lie, from its tile's first byte.
    DEVICE static int placed(int token, int at) { return token * LINE + (at ^ (token & 7) * 16); }

    DEVICE void sync_consumers() const { named_barrier_sync_unaligned(CONSUMERS_MEET, CONSUMERS); }
    DEVICE int prefix_at(int b) const { return (int)lds32(prefix + 4 * b); }

    // The item of a unit, in the line of the team's block number `own`; its sequence is one of low .. high.
    DEVICE Cursor locate(int own, int unit, int low, int high) const {
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
    DEVICE void next_item(Cursor& c) const {
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

    // decode_scheduler.cuh: how the line of units is cut, and the warps that load it
    DEVICE Lengths scan();
    DEVICE Partition partition(const Lengths& all) const;
    DEVICE static void range(const Partition& c, int team, int& first, int& last);
    DEVICE static int team_of(const Partition& c, int unit);
    DEVICE int fetch(Producer& f);
    DEVICE u32 fetched(const Producer& f) const;
    DEVICE void load_tile(u32 tile, bool is_v, int slot, u32 barrier);
    DEVICE static void wait_together(u32 barrier, u32 phase);
    DEVICE void wait_for_copy(int i) const;
    DEVICE void load_queries(const Cursor& c, int item);
    DEVICE void produce();
    // decode_mainloop.cuh: the two products and the softmax of one warp
    DEVICE void begin_item(const Cursor& c, int item);
    DEVICE u32 keys(float (&s)[PRODUCTS][4]);
    DEVICE void softmax(float (&s)[PRODUCTS][4], u32 (&probability)[PRODUCTS][2], int valid);
    DEVICE void clear_tail(int valid);
    DEVICE u32 values(const u32 (&probability)[PRODUCTS][2]);
    DEVICE void unit(int valid);
    DEVICE void release(u32 last);
    // decode_epilogue.cuh: merging the states of a block's warps, and the parts of an item
    DEVICE void store(int item, int q, int d, float4 x);
    DEVICE bool end_item(const Cursor& c, int first, int last);
    DEVICE Ticket arrive(const Cursor& c) const;
    DEVICE void publish(const Ticket& x, u32 to) const;
    DEVICE void finish(const Cursor& c, bool whole, bool begun, const Ticket& early, int own);
    DEVICE int slot_of(int from, int i, int own) const;
    DEVICE void merge_all(int parts, int from, int own, int item, int h, int& rounds);
    DEVICE void weigh(int from, int parts, int own, u32 weights);

    // A producer's own: those of the warps that it serves; the last one's, of the queries and parts, too.
    DEVICE void init_barriers() {
        if (lane == 0) {  // a loop over lanes would run them one by one
#pragma unroll
            for (int w = 0; w < WARPS; w += PRODUCERS)
#pragma unroll
                for (int i = 0; i < STAGES; ++i) {
                    const int at = 8 * ((warp - WARPS + w) * STAGES + i);
                    mbarrier_init(full + at, TILES);
                    mbarrier_init(empty + at, 1);
                }
            if (warp == WARPS + PRODUCERS - 1) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mbarrier_init(query_full + 8 * i, p.group);
                    mbarrier_init(query_empty + 8 * i, WARPS);
                }
                mbarrier_init(parts_full, 1);
            }
            mbarrier_init_fence();
        }
    }

    DEVICE void consume() {
        // The table into L2: the blocks prefetch every 128-byte line.
        for (int i = block * CONSUMERS + tid; i < (p.batch * p.max_pages + 31) / 32; i += grid * CONSUMERS)
            prefetch_l2(p.table + min(32 * i, p.batch * p.max_pages - 1));
        if constexpr (KIND == FP8)
            for (int i = tid; i < 2 * p.kv_heads; i += CONSUMERS) {
                const bool v = i >= p.kv_heads;
                const float x = ((const float*)(v ? p.v_scale : p.k_scale))[v ? i - p.kv_heads : i];
                sts32(shared + HEAD_SCALES + 4 * i, __float_as_uint(x));
            }
        named_barrier_sync_unaligned(STARTED, THREADS);
        if constexpr (PDL) wait_on_dependent_grids();  // every block, so that the grid ends behind the one ahead
        for (int b = block; b < p.batch; b += grid)    // an empty sequence is nobody's: zeros
            if (prefix_at(b) == prefix_at(b + 1))
                for (int i = tid; i < p.kv_heads * p.group * D / 2; i += CONSUMERS)
                    ((u32*)p.o)[(u64)b * p.kv_heads * p.group * (D / 2) + i] = 0;
        const uint4 range = lds128(shared + PARTITION_AT + 16);
        const int first = range.y, last = range.z, own = range.w;
        if (first == last) return;
        stage = warp * STAGES;
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
                sync_consumers();
                if (tid == 0) early = arrive(c);
            }
            next_item(c);
        }
        finish(c, whole, begun, early, own);
    }

    DEVICE void run() {
        if constexpr (PDL) launch_dependent_grids();
        if (warp >= WARPS) {  // warpgroups, as registers go from one to another
            warpgroup_reg_dealloc<56>();
            produce();
        } else {
            warpgroup_reg_alloc<224>();
            consume();
        }
    }
};

#endif
