// NVFP4 linear for up to 32 tokens: y[M, N] = x[M, K] w^T, as y^T = w x^T on wgmma with x resident.
//
// K is cut over the SPLIT CTAs of a cluster. A CTA keeps x of its slice of K in shared memory for good, in the order in
// which tiles.py deals k to lanes, so that weights are all that streams. Clusters share the tiles of 64 rows; the
// GROUPS warpgroups of a CTA make a tile each, all of its slice. Tiles that do not fill a round are cut in k among the
// warpgroups. Such a piece of work is an item:
//
//   warpgroups   a ring of stages (two chunks of 64 k) each: decode into registers, multiply, then send the sums
//                to their owners: each CTA owns 32 / SPLIT tokens
//   producers    a thread for each ring copies its weights: one for all rings waits for the slowest of them
//   reducer      two warps wait for the sums of all CTAs, add them in order of k, write the owned tokens of y
//
// Warpgroups that end their items together leave the multiprocessor idle together, so each starts a little after the
// one before.
//
// So every sum is formed in one order: the same bits on every run, and no sums in global memory.
//
// Macros: KERNEL (name), X_BF16 0/1, SPLIT 2/4/8, GROUPS, STAGES (of a ring).
#include "operand.cuh"
#include "wgmma.cuh"

constexpr int THREADS = 128 * GROUPS + 32 * (GROUPS + 2);
constexpr int AHEAD = 2;               // stages of a ring that are asked for before x; more of them would delay x
constexpr unsigned LATER = 1000;       // clocks from the start of a warpgroup to that of the next
static_assert(AHEAD <= STAGES, "nothing empties a stage before x is there");
constexpr int TOKENS = 32, UNITS = TOKENS / (4 * SPLIT);  // of four tokens, that a CTA owns
constexpr unsigned W_CHUNK_BYTES = 4 * TILE_BYTES, STAGE_BYTES = 2 * W_CHUNK_BYTES, X_CHUNK_BYTES = TOKENS * 128;
constexpr unsigned UNIT_BYTES = 64 * 16;  // sums of 64 rows x 4 tokens
constexpr unsigned SOURCE_BYTES = UNITS * UNIT_BYTES, SLOT_BYTES = SPLIT * SOURCE_BYTES;

// Shared memory: rings, a slot for the sums of each warpgroup, barriers, and x of as many chunks as the slice has.
constexpr unsigned SLOT = GROUPS * STAGES * STAGE_BYTES, FULL = SLOT + GROUPS * SLOT_BYTES;
constexpr unsigned EMPTY = FULL + 8 * GROUPS * STAGES, SENT = EMPTY + 8 * GROUPS * STAGES;
constexpr unsigned FREE = SENT + 8 * GROUPS, X = (FREE + 8 * GROUPS + 1023) / 1024 * 1024;

constexpr int X_BATCH = 4;  // pieces of x that a warp asks for at once
constexpr int X_READY = 1, SLOT_READ = 2;  // named barriers

// The items of a cluster with `count` tiles, for a CTA with `depth` stages of k. Item i is done by group i % GROUPS.
struct Items {
  int depth, whole, parts, all;
  DEVICE Items(int count, int depth_) : depth(depth_), whole(count / GROUPS * GROUPS) {
    const int left = count - whole;
    parts = left ? GROUPS / left : 1, all = whole + left * parts;
  }
};
struct Item {
  int tile, part, from, to;  // stages from .. to - 1
  bool last;                 // part of its tile
  DEVICE Item(const Items& items, int item) : tile(item), part(0), from(0), to(items.depth), last(true) {
    if (item >= items.whole) {
      const int left = (item - items.whole) / items.parts;
      tile = items.whole + left, part = item - items.whole - left * items.parts, last = part == items.parts - 1;
      from = part * items.depth / items.parts, to = (part + 1) * items.depth / items.parts;
    }
  }
};

// x [rows of m, k] -> chunks of 64 k, each the B operand of four products: row r at 128 r, piece p of it at p ^ r % 8.
// Piece p, word t is what lane t of a row takes from it: k = 16 t + 2 p + {0, 1}. A warp moves 8 rows of a chunk.
DEVICE void bring_x(const unsigned char* x, unsigned to, int first_chunk, int chunks, int m, int k) {
  const int lane = threadIdx.x % 32, t = lane % 4, r = lane / 4, pieces = chunks * (TOKENS / 8);
  for (int at = threadIdx.x / 32; at < pieces; at += 4 * GROUPS * X_BATCH) {
    uint4 v[X_BATCH][2];
#pragma unroll
    for (int b = 0; b < X_BATCH; b++) {
      const int piece = at + b * 4 * GROUPS;
      const int row = piece % (TOKENS / 8) * 8 + r, from = 64 * (first_chunk + piece / (TOKENS / 8)) + 16 * t;
      v[b][0] = v[b][1] = uint4{0, 0, 0, 0};
      if (piece < pieces && row < m && from < k) {
        const unsigned char* p = x + 2 * (static_cast<size_t>(row) * k + from);
        v[b][0] = load_once(p), v[b][1] = load_once(p + 16);
      }
    }
#pragma unroll
    for (int b = 0; b < X_BATCH; b++) {
      const int piece = at + b * 4 * GROUPS;
      if (piece >= pieces) break;
      const unsigned row = to + piece * 1024 + 128 * r + 4 * t;
      const unsigned words[8] = {v[b][0].x, v[b][0].y, v[b][0].z, v[b][0].w,
                                 v[b][1].x, v[b][1].y, v[b][1].z, v[b][1].w};
#pragma unroll
      for (int p = 0; p < 8; p++) sts32(row + 16 * (p ^ r), words[p]);
    }
  }
}

// x: [m, k] 16-bit. w: [tiles of 64 rows, chunks of 64 k, 4, 576] in tiles.py's order. y: [m, n] 16-bit. depth: stages
// (pairs of chunks) of a tile.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, 1)
    KERNEL(const unsigned char* x, const unsigned char* w, const float* tensor_scale, unsigned short* y, int m, int n,
           int k, int depth) {
  extern __shared__ __align__(1024) unsigned char shared_start[];
  const unsigned base = shared_address(shared_start);
  const int group = same_in_warp(threadIdx.x / 128), warp = same_in_warp(threadIdx.x / 32) % 4, lane = threadIdx.x % 32;
  const int service = same_in_warp(threadIdx.x / 32) - 4 * GROUPS;  // producers of the rings, then two that reduce
  const int rank = cluster_rank(), cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
  const int slice = rank * depth / SPLIT, mine = (rank + 1) * depth / SPLIT - slice;  // stages of this CTA
  const Items items(((n + 63) / 64 - cluster + clusters - 1) / clusters, mine);  // tiles cluster, cluster + clusters ..

  if (service >= 0 && service < GROUPS) {
    const unsigned ring = base + service * STAGES * STAGE_BYTES, barriers = base + 8 * service * STAGES;
    unsigned long long policy = 0;
    int i = service, at = 0, to = 0, stage = 0;
    unsigned parity = 1;
    const unsigned char* from = w;
    const auto copy = [&]() {  // whether there was one left
      for (; at == to; i += GROUPS) {
        if (i >= items.all) return false;
        const Item item(items, i);
        const size_t tile = cluster + static_cast<size_t>(item.tile) * clusters;
        at = item.from, to = item.to, from = w + (tile * depth + slice + at) * STAGE_BYTES;
      }
      barrier_wait(barriers + EMPTY + 8 * stage, parity);
      barrier_expect(barriers + FULL + 8 * stage, STAGE_BYTES);
      bulk_copy_by(ring + stage * STAGE_BYTES, from, STAGE_BYTES, barriers + FULL + 8 * stage, policy);
      at++, from += STAGE_BYTES;
      if (++stage == STAGES) stage = 0, parity ^= 1;
      return true;
    };
    if (lane == 0) {
      for (int s = 0; s < STAGES; s++) {
        barrier_init(barriers + FULL + 8 * s, 1);
        barrier_init(barriers + EMPTY + 8 * s, 4);
      }
      barrier_init(base + SENT + 8 * service, 1);
      barrier_init(base + FREE + 8 * service, SPLIT);
      barrier_init_fence();
      if (service < items.all) barrier_expect(base + SENT + 8 * service, SLOT_BYTES);
    }
    __syncwarp();
    cluster_arrive();
    if (lane == 0) {  // the weights wait for nobody: no other kernel has written them
      launch_dependents();
      policy = leave_first();
      for (int s = 0; s < AHEAD && copy(); s++) continue;
    }
    __syncwarp();
    cluster_wait();
    named_meet(X_READY, 160 * GROUPS);
    while (lane == 0 && copy()) continue;
  } else if (service >= GROUPS) {
    cluster_arrive();
    cluster_wait();
    const int thread = threadIdx.x - 160 * GROUPS, strip = thread / 16, g = thread / 2 % 8, t = thread % 2;
    const float scale = *tensor_scale * OPERAND_TO_VALUE;
    const unsigned zero = static_cast<unsigned>(m) >> 31;  // for once_loaded
    float4 sums[UNITS];
    wait_for_earlier_grid();  // they may still read what y was
#pragma unroll 1
    for (int i = 0; i < items.all; i++) {
      const Item item(items, i);
      const int row = 64 * (cluster + item.tile * clusters) + 16 * strip + (g & ~1), slot = i % GROUPS;
      const unsigned at = base + SLOT + slot * SLOT_BYTES + 16 * thread;
      unsigned loaded = 0;
      barrier_wait_cluster(base + SENT + 8 * slot, i / GROUPS & 1);
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        float4 v[SPLIT], &sum = sums[u];
#pragma unroll
        for (int s = 0; s < SPLIT; s++) v[s] = shared_load_float4(at + s * SOURCE_BYTES + u * UNIT_BYTES);
        if (item.part == 0) sum = float4{0, 0, 0, 0};
#pragma unroll
        for (int s = 0; s < SPLIT; s++) sum.x += v[s].x, sum.y += v[s].y, sum.z += v[s].z, sum.w += v[s].w;
        loaded |= __float_as_uint(sum.x);
      }
      named_sync(once_loaded(SLOT_READ, loaded, zero), 64);  // neither warp reads the slot any more
      if (service == GROUPS && i + GROUPS < items.all) {
        if (lane == 0) barrier_expect(base + SENT + 8 * slot, SLOT_BYTES);
        if (lane < SPLIT) barrier_arrive_cluster(peer_address(base + FREE + 8 * slot, lane));
      }
      if (!item.last) continue;
      // A thread has rows g and g + 8 of two tokens; with its neighbour's it has pairs of rows of one token.
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        const float4 v = sums[u];
        const bool odd = g & 1;
        const float upper = shuffle_xor(odd ? v.x : v.y, 2), lower = shuffle_xor(odd ? v.z : v.w, 2);
        const unsigned pairs[2] = {round_pair<X_BF16>((odd ? upper : v.x) * scale, (odd ? v.y : upper) * scale),
                                   round_pair<X_BF16>((odd ? lower : v.z) * scale, (odd ? v.w : lower) * scale)};
        const int token = 4 * (rank * UNITS + u) + 2 * t + odd;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at_row = row + 8 * half;
          unsigned short* const to = y + static_cast<size_t>(token) * n + at_row;
          if (token >= m || at_row >= n) continue;
          if (n % 2 == 0 && reinterpret_cast<unsigned long long>(y) % 4 == 0) {
            *reinterpret_cast<unsigned*>(to) = pairs[half];
          } else {
            to[0] = static_cast<unsigned short>(pairs[half]);
            if (at_row + 1 < n) to[1] = static_cast<unsigned short>(pairs[half] >> 16);
          }
        }
      }
    }
  } else {
    cluster_arrive();
    wait_for_earlier_grid();
    bring_x(x, base + X, 2 * slice, 2 * mine, m, k);
    fence_async_shared();
    named_meet(X_READY, 160 * GROUPS);
    cluster_wait();
    const unsigned my_codes = base + group * STAGES * STAGE_BYTES + warp * TILE_BYTES + 16 * lane;
    const unsigned my_scales = my_codes + TILE_CODE_BYTES - 14 * lane;
    const unsigned full = base + FULL + 8 * group * STAGES, empty = base + EMPTY + 8 * group * STAGES;
    const unsigned mine_at =
        SLOT + group * SLOT_BYTES + rank * SOURCE_BYTES + warp * 256 + lane / 4 * 32 + lane % 2 * 16;
    unsigned a[2][4][4];
    float acc[TOKENS / 2];
    int stage = 0;
    unsigned parity = 0;
    if (items.whole > 0) pass_clocks(group * LATER);  // a part of a tile each would only end later
#pragma unroll 1
    for (int i = group; i < items.all; i += GROUPS) {
      const Item item(items, i);
#pragma unroll
      for (int e = 0; e < TOKENS / 2; e++) acc[e] = 0;
      pin(acc);
#pragma unroll 1
      for (int at = item.from; at < item.to; at++) {
        const unsigned stage_at = stage * STAGE_BYTES;
        const unsigned long long operand = tile_descriptor(base + X + at * 2 * X_CHUNK_BYTES);
        uint4 codes[2];
        unsigned scales[2];
        barrier_wait(full + 8 * stage, parity);
#pragma unroll
        for (int c = 0; c < 2; c++) {
          codes[c] = lds128(my_codes + stage_at + c * W_CHUNK_BYTES);
          scales[c] = lds16(my_scales + stage_at + c * W_CHUNK_BYTES);
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
          tile_fragments_by_half<X_BF16>(codes[c], scales[c], a[c]);
          pin(a[c]);
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < 4; j++) {
            Wgmma<TOKENS, X_BF16>::go(acc, a[c][j], operand + c * (X_CHUNK_BYTES / 16) + 2 * j);
          }
          wgmma_commit();
          wgmma_wait<1>();
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);  // the products have taken what was loaded from it
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      const int use = i / GROUPS;
      if (use > 0) barrier_wait_cluster(base + FREE + 8 * group, (use - 1) & 1);
      wgmma_wait<0>();
      pin(acc);
#pragma unroll
      for (int e = 0; e < TOKENS / 8; e++) {  // of eight tokens this lane's are in unit 2 e + lane % 4 / 2
        const int unit = 2 * e + lane % 4 / 2;
        const float* const v = &acc[4 * e];
        const unsigned there = peer_address(base, unit / UNITS);
        peer_store(there + mine_at + unit % UNITS * UNIT_BYTES, float4{v[0], v[1], v[2], v[3]},
                   there + SENT + 8 * group);
      }
    }
  }
  __syncwarp();
  cluster_sync();  // the others still send here
}
