// NVFP4 linear for 9 to 32 tokens: y[M, N] = x[M, K] w^T, as y^T = w x^T on wgmma, both operands streamed.
//
// A unit of work is a block of 256 weight rows by 128 k. The units of all blocks stand in a line, which the CTAs share
// evenly (stream-K): every multiprocessor has as many of them, whatever the shape. A CTA walks its units once, so x
// need not stay: a stage is a unit's weights and its x.
//
//   four warpgroups   64 rows each: decode into registers, multiply by the stage's x. They bring the x of the first
//                     units themselves
//   x warps           one for every 8 tokens: x into the order in which tiles.py deals k to lanes; a thread of the
//                     first copies weights
//
// CTAs that share a block leave each other sums of it in global memory, warp to warp: a word that is not MISSING is
// there, so no flag has to be seen first. Those whose walk ends in the block own some of its tiles each, add what the
// others left of these to their own, in one order, and put MISSING back. (A CTA that goes on to another block owns
// none: it would have to come back.) So the same bits on every run.
//
// Macros: KERNEL (name), X_BF16 0/1, TOKENS 16/24/32, STAGES (a power of two, at least 4).
#include "operand.cuh"
#include "wgmma.cuh"

constexpr int GROUPS = 4, WARPS = 4 * GROUPS, ROWS = 64 * GROUPS, X_WARPS = TOKENS / 8;
constexpr int THREADS = 32 * (WARPS + X_WARPS);
constexpr int CHUNKS = 2;   // of a unit
constexpr int AHEAD = 1;    // stages of weights that are asked for before x; more of them would delay it
constexpr int BROUGHT = 4;  // units of x that the warpgroups bring
constexpr int X_AHEAD = 3;  // units of x that an x warp has under way
static_assert(BROUGHT <= STAGES && BROUGHT * X_WARPS <= WARPS && WARPS <= 32, "one piece of x a warp");
constexpr unsigned W_CHUNK_BYTES = WARPS * TILE_BYTES, X_CHUNK_BYTES = TOKENS * 128;
constexpr unsigned X = CHUNKS * W_CHUNK_BYTES, STAGE_BYTES = X + CHUNKS * X_CHUNK_BYTES;
constexpr unsigned STAGED = STAGES * STAGE_BYTES, FULL = STAGED + 2 * ROWS * TOKENS, EMPTY = FULL + 8 * STAGES;
constexpr int INITIALISED = 1, X_READY = 2;  // named barriers
constexpr int N_TILES = TOKENS / 8;
constexpr int TILES = WARPS * N_TILES, TILE_LANES = 32 * WARPS, PART_LANES = TILE_LANES * N_TILES;
constexpr int FEW = 3, AT_ONCE = 8;  // sums of others that a lane asks for at once
constexpr unsigned MISSING = 0xFFFFFFFFu;  // a NaN that no arithmetic makes

// A lane's part of 8 tokens of a unit's x: 8 k of each chunk, of tokens r and r + 4. Tokens past M repeat the last one,
// and their sums are not written. k past K is zero.
struct XPart {
  uint4 v[CHUNKS][2];
};
struct XLane {
  const unsigned char* from[2];
  unsigned to[2][4];
  int at, k;
  // Row r of 8 at 128 r, piece p (16 bytes) of it at p ^ r; word t of piece p is k = 16 t + 2 p + {0, 1}.
  DEVICE XLane(const unsigned char* x, int first_token, int m, int k_) : at(threadIdx.x % 8 * 8), k(k_) {
    const int lane = threadIdx.x % 32, t = lane % 8 / 2, h = lane % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = lane / 8 + 4 * half;
      from[half] = x + 2 * (static_cast<size_t>(min(first_token + row, m - 1)) * k + at);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        to[half][i] = keep(128 * (first_token + row) + 4 * t + 16 * ((4 * h + i) ^ row));
      }
    }
  }
  DEVICE void ask(XPart& part, int unit) const {
    const int first = CHUNKS * 64 * unit;
    const unsigned char* const there[2] = {from[0] + 2 * first, from[1] + 2 * first};
    if (first + CHUNKS * 64 <= k) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        part.v[c][0] = load_early(there[0] + 128 * c), part.v[c][1] = load_early(there[1] + 128 * c);
      }
      return;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        part.v[c][half] = uint4{0, 0, 0, 0};
        if (first + 64 * c + at < k) part.v[c][half] = load_early(there[half] + 128 * c);
      }
    }
  }
  DEVICE void put(const XPart& part, unsigned stage) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const unsigned there = stage + to[half][i];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          const uint4& v = part.v[c][half];
          sts32(there + X + c * X_CHUNK_BYTES, i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w);
        }
      }
    }
  }
};

DEVICE bool is_missing(const float4& v) {
  return __float_as_uint(v.x) == MISSING || __float_as_uint(v.y) == MISSING || __float_as_uint(v.z) == MISSING ||
         __float_as_uint(v.w) == MISSING;
}

// The line of units in parts: each CTA has `each`, the first `more` of them one more.
struct Shares {
  int each, more;
  DEVICE int begin(int of) const { return of * each + min(of, more); }
};

// CTAs first .. last - 1 share the block whose units start at `start`; those before `owners` end in it,
// or have it alone.
struct Sharers {
  int first, last, owners;
  bool before;  // the first has a piece before this
  DEVICE Sharers(const Shares& shares, int worker, int start, int depth)
      : first(worker), last(worker + 1) {
    while (shares.begin(first) > start) first--;
    while (shares.begin(last) < start + depth) last++;
    owners = last - (last - first > 1 && shares.begin(last) > start + depth);
    before = shares.begin(first) < start;
  }
  // Who adds a tile, which is 8 tokens of a warp's rows: WARPS times the n tile and the warp.
  DEVICE int owner(int tile) const { return first + tile * (owners - first) / TILES; }
  // Where a CTA leaves its sums: the first of the block after those of all that have no piece before it.
  DEVICE int slot(int of, int workers) const { return PART_LANES * (of + (of == first && before ? workers : 0)); }
};

// x: [m, k] 16-bit. w: [blocks of 256 rows, units of 128 k, 2, 16, 576] in tiles.py's order. y: [m, n] 16-bit.
// parts: [2 CTAs, 256 * TOKENS], MISSING between launches. depth: units of a block. each, more: every CTA has `each`
// units, the first `more` of them one more.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KERNEL(const unsigned char* x, const unsigned char* w, const float* tensor_scale, unsigned short* y, float4* parts,
           int m, int n, int k, int depth, int each, int more) {
  extern __shared__ __align__(1024) unsigned char shared_start[];
  const unsigned base = shared_address(shared_start);
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, worker = blockIdx.x, workers = gridDim.x;
  const Shares shares{each, more};
  const int from = shares.begin(worker), k_from = from % depth;
  const unsigned units = shares.begin(worker + 1) - from;

  if (warp >= WARPS) {
    const int tokens_at = 8 * (warp - WARPS);
    const bool producer = warp == WARPS && lane == 0;
    unsigned long long policy = 0;
    unsigned copied = 0;
    const auto copy = [&]() {
      const unsigned stage = copied % STAGES, full = base + FULL + 8 * stage;
      barrier_expect(full, X);
      bulk_copy_by(base + stage * STAGE_BYTES, w + static_cast<size_t>(from + copied) * X, X, full, policy);
      copied++;
    };
    if (producer) {
      for (int s = 0; s < STAGES; s++) {
        barrier_init(base + FULL + 8 * s, 1 + X_WARPS);
        barrier_init(base + EMPTY + 8 * s, WARPS);
      }
      barrier_init_fence();
      launch_dependents();
      policy = leave_first();  // the weights wait for nobody: no other kernel has written them
      while (copied < min(AHEAD, int(units))) copy();
    }
    __syncwarp();
    named_sync(INITIALISED, 32 * X_WARPS);
    if (warp == WARPS && lane < BROUGHT * X_WARPS) barrier_arrive(base + FULL + 8 * (lane / X_WARPS));
    wait_for_earlier_grid();
    const XLane mine(x, tokens_at, m, k);
    XPart parts_of_x[X_AHEAD];
    unsigned asked = BROUGHT;
    int k_at = (k_from + BROUGHT) % depth;
    const auto ask = [&](XPart& into) {
      if (asked < units) mine.ask(into, k_at);
      asked++;
      if (++k_at == depth) k_at = 0;
    };
#pragma unroll
    for (int i = 0; i < X_AHEAD; i++) ask(parts_of_x[i]);
    if (warp == WARPS) {
      named_meet(X_READY, 32 * (WARPS + 1));
      if (producer) {
        while (copied < min(STAGES, int(units))) copy();
      }
      __syncwarp();
    }
    if (units > STAGES) barrier_wait(base + EMPTY + 8 * (STAGES - 1), 0);  // the release at unit 0
    for (unsigned at = BROUGHT; at < units;) {
#pragma unroll
      for (int i = 0; i < X_AHEAD; i++) {
        if (at == units) break;
        const unsigned stage = at % STAGES;
        if (at >= STAGES) {
          barrier_wait(base + EMPTY + 8 * stage, (at + 1) / STAGES + 1 & 1);
          if (producer) copy();
        }
        mine.put(parts_of_x[i], base + stage * STAGE_BYTES);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(base + FULL + 8 * stage);
        at++;
        ask(parts_of_x[i]);
      }
    }
    return;
  }

  {
    XPart part;
    const int unit = warp / X_WARPS;
    const bool brings = unit < min(BROUGHT, int(units));
    wait_for_earlier_grid();
    if (brings) {
      const XLane lane_of_x(x, warp % X_WARPS * 8, m, k);
      lane_of_x.ask(part, (k_from + unit) % depth);
      lane_of_x.put(part, base + unit * STAGE_BYTES);
    }
    fence_async_shared();
    __syncwarp();
    named_meet(X_READY, 32 * (WARPS + 1));
  }
  const unsigned ring = same_in_warp(base);  // told to be one, it is not made again at each use
  const unsigned strip = ring + warp * TILE_BYTES;
  const unsigned my_codes = keep(strip + 16 * lane), my_scales = keep(strip + TILE_CODE_BYTES + 2 * lane);
  const float scale = *tensor_scale * OPERAND_TO_VALUE;  // early: at the end its latency would show
  const bool y_in_sixteens = n % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
  unsigned a[CHUNKS][4][4];
  float acc[TOKENS / 2];
  const unsigned long long operand_0 = tile_descriptor(ring + X);
  const auto release = [&](unsigned stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring + EMPTY + 8 * stage);
  };

#pragma unroll 1
  for (unsigned at = 0; at < units;) {
    const int block = (from + at) / depth, block_from = block * depth - from;
    const unsigned end = min(static_cast<int>(units), block_from + depth);
    const Sharers sharers(shares, worker, from + block_from, depth);
#pragma unroll
    for (int e = 0; e < TOKENS / 2; e++) acc[e] = 0;
    pin(acc);
#pragma unroll 1
    for (; at < end; at++) {
      const unsigned stage = at % STAGES, stage_at = stage * STAGE_BYTES;
      const unsigned long long operand = operand_0 + stage * (STAGE_BYTES / 16);
      uint4 codes[CHUNKS];
      unsigned scales[CHUNKS];
      barrier_wait(ring + FULL + 8 * stage, at / STAGES & 1);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        codes[c] = lds128(my_codes + stage_at + c * W_CHUNK_BYTES);
        scales[c] = lds16(my_scales + stage_at + c * W_CHUNK_BYTES);
      }
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        tile_fragments_by_half<X_BF16>(codes[c], scales[c], a[c]);
        pin(a[c]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) {
          Wgmma<TOKENS, X_BF16>::go(acc, a[c][j], operand + c * (X_CHUNK_BYTES / 16) + 2 * j);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (c == 0) release((at - 1) % STAGES);  // whose products are done; at 0 of one that had none
      }
    }
    wgmma_wait<0>();
    pin(acc);

    // Not before: what follows from the lane would take registers in the loop.
    const int late_lane = keep(lane);
    // A lane has two tokens of rows g and g + 8, y wants a token's 16 rows side by side: through shared memory, half a
    // warp writes 16 bytes each.
    const unsigned staged = base + STAGED + 256 * N_TILES * warp;
    const auto stage_sums = [&](int e, const float4& v) {
      store_two_transposed(staged + 256 * e + 32 * (late_lane % 8) + 16 * (late_lane / 8 % 2),
                           round_pair<X_BF16>(v.x * scale, v.y * scale), round_pair<X_BF16>(v.z * scale, v.w * scale));
    };
    const auto write = [&](int e) {
      const int token = 8 * e + late_lane / 2, row = ROWS * block + 16 * warp + late_lane % 2 * 8;
      if (late_lane >= 16 || token >= m || row >= n) return;
      unsigned short* const to = y + static_cast<size_t>(token) * n + row;
      const unsigned from = staged + 256 * e + 16 * late_lane;
      if (y_in_sixteens) {
        *reinterpret_cast<uint4*>(to) = lds128(from);
      } else {
        for (int i = 0; i < min(8, n - row); i++) to[i] = static_cast<unsigned short>(lds16(from + 2 * i));
      }
    };
    float4* const slots = parts + 32 * warp + late_lane;
    float4* const own_slot = slots + sharers.slot(worker, workers);
    const int first = sharers.first, last = sharers.last;
    const float none = __uint_as_float(MISSING);
    const float4 nothing{none, none, none, none};
    bool owned[N_TILES];
    float4 sum[N_TILES];
#pragma unroll
    for (int e = 0; e < N_TILES; e++) {
      owned[e] = sharers.owner(WARPS * e + warp) == worker;
      sum[e] = float4{acc[4 * e], acc[4 * e + 1], acc[4 * e + 2], acc[4 * e + 3]};
      if (!owned[e]) store_for_gpu(own_slot + TILE_LANES * e, sum[e]);
    }
    if (worker >= sharers.owners) continue;
    if (last - first <= FEW) {  // a CTA has many tiles of few others: all of one's at once
#pragma unroll 1
      for (int of = first; of < last; of++) {
        if (of == worker) continue;
        const float4* const from = slots + sharers.slot(of, workers);
        float4 v[N_TILES] = {};
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int e = 0; e < N_TILES; e++) {
            if (owned[e]) v[e] = peek(from + TILE_LANES * e);
          }
#pragma unroll
          for (int e = 0; e < N_TILES; e++) missing |= is_missing(v[e]);
        } while (some_lane(missing));
#pragma unroll
        for (int e = 0; e < N_TILES; e++) sum[e] = add(sum[e], v[e]);
      }
#pragma unroll
      for (int e = 0; e < N_TILES; e++) {
        if (owned[e]) stage_sums(e, sum[e]);
      }
      __syncwarp();
#pragma unroll
      for (int e = 0; e < N_TILES; e++) {
        if (owned[e]) write(e);
      }
      // Last, for nobody waits for it.
#pragma unroll 1
      for (int of = first; of < last; of++) {
        if (of == worker) continue;
        float4* const from = slots + sharers.slot(of, workers);
#pragma unroll
        for (int e = 0; e < N_TILES; e++) {
          if (owned[e]) store_for_gpu(from + TILE_LANES * e, nothing);
        }
      }
      continue;
    }
#pragma unroll
    for (int e = 0; e < N_TILES; e++) {  // one or two tiles of many others: a tile of AT_ONCE at once
      if (!owned[e]) continue;
      float4* const others = slots + TILE_LANES * e;
#pragma unroll 1
      for (int of = first; of < last; of += AT_ONCE) {
        float4 v[AT_ONCE] = {};
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) {
            if (of + i < last && of + i != worker) v[i] = peek(others + sharers.slot(of + i, workers));
          }
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) missing |= is_missing(v[i]);
        } while (some_lane(missing));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) sum[e] = add(sum[e], v[i]);
      }
      stage_sums(e, sum[e]);
      __syncwarp();
      write(e);
#pragma unroll 1
      for (int of = first; of < last; of++) {
        if (of != worker) store_for_gpu(others + sharers.slot(of, workers), nothing);
      }
    }
  }
}
