// NVFP4 linear for many tokens: y[M, N] = x[M, K] w^T on wgmma, y^T = w x^T.
//
// Weights are the A operand, made in registers from gemm_tiles.py's tiles; x is B, in shared memory. A CTA makes 128
// weight rows by TOKENS tokens:
//
//   two threads       per stage: one bulk copy of weights; x by its tensor map (TMA). In a cluster of two, which make
//                     256 rows by the same tokens, each CTA fetches half of x for both
//   warpgroups        64 rows each: decode 64 k into one of two sets of fragments while the products of the other set
//                     are under way
//   two more warps    tell other CTAs that a warpgroup's sums are in memory: the fence of the whole device that this
//                     takes would hold up a warpgroup
//
// The warpgroups meet only in barriers of stages. Results of a tile go out by a copy (TMA) from shared memory of their
// own, while the next tile's products are under way.
//
// A worker (a CTA or a cluster) makes `waves` whole tiles, all workers side by side at the same k, so that what they
// read stays in L2. The tiles left are stream-K: their units of UNIT * 64 k stand in one line, cut in equal parts, one
// per worker. Who has the first units of a tile owns it: the others leave float32 sums in `parts` (a place for each
// worker, which has at most one such piece and does it first), raise a flag, and the owner adds them in the order of k.
// So the same bits on every run, one launch, flags back down at the end. Worker w runs on the grid's CTAs from the end:
// an owner waits only for CTAs of lower index.
//
// SPLIT: few tiles, one for each cluster of two CTAs, which have half of its k each (stream-K with two workers a tile).
// A CTA owns the rows of one of its warpgroups; the other warpgroup's sums go into the other CTA's shared memory, where
// results go later. x is not shared then.
//
// Macros: KERNEL (name), X_BF16 0/1, TOKENS 64/128/176/256, CLUSTER 1/2 (CTAs that share x; 1 where SPLIT), SPLIT 0/1,
// STAGES (of 64 k).
#include "operand.cuh"
#include "wgmma.cuh"

#include "shares.cuh"  // after the two: it needs DEVICE

constexpr int ROWS = 128;
constexpr int CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
constexpr int UNIT = 2;           // chunks of 64 k in a unit of work: one for each set of fragments
constexpr int SUMS = TOKENS / 2;  // float32 per thread
constexpr unsigned X_BYTES = TOKENS * 128, W_BYTES = 8 * TILE_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr unsigned OUT_BYTES = TOKENS * 128;  // results of a warpgroup, swizzled as x is

// Shared memory, which starts on 1024 bytes: x of all stages, results, weights of all stages, barriers.
constexpr unsigned X = 0, OUT = STAGES * X_BYTES, W = OUT + CONSUMERS * OUT_BYTES;
constexpr unsigned FULL = W + STAGES * W_BYTES, EMPTY = FULL + 8 * STAGES, SENT = EMPTY + 8 * STAGES;
constexpr unsigned SHARED_BYTES = SENT + 8 * SPLIT, SENT_BYTES = 512 * SUMS;  // a warpgroup's sums from the other CTA
static_assert(!SPLIT || CLUSTER == 1, "the CTAs of a split tile have different k of x");
static_assert(SENT_BYTES <= CONSUMERS * OUT_BYTES, "sums come to where results go later");
static_assert(SHARED_BYTES <= 227 * 1024, "too much shared memory");
static_assert(STAGES >= 3, "a stage is asked for while the two before it are in use");
static_assert(X_BYTES / CLUSTER % 1024 == 0, "a half of x must keep the swizzle's phase");

constexpr int SUMS_LEFT = 1, GROUP_MEETS = 3;  // named barriers, one for each warpgroup

constexpr int PART_FLOATS = 128 * SUMS;  // of one warpgroup

// One lane's codes and scales of a tile of 16 rows x 64 k.
struct Packed {
  uint4 codes;
  uint2 scales;
  DEVICE void load(unsigned codes_at, unsigned scales_at) {
    codes = lds128(codes_at);
    scales = lds64(scales_at);
  }
};

// -> the A fragments of the tile's four products. A word of scales holds those of products 0, 2, 1, 3 in its bytes,
// rotated left to where the format wants them.
DEVICE void decode_fragments(const Packed& packed, unsigned (&a)[4][4]) {
  constexpr unsigned MASK = X_BF16 ? 0x0FF00FF0u : 0x7F807F80u, ONES = X_BF16 ? 0x70007000u : 0;
  const uint4 codes = packed.codes;
  const uint2 scales = packed.scales;
  unsigned upper[8], lower[8];
  decode16<X_BF16>(codes.x, codes.y, upper);
  decode16<X_BF16>(codes.z, codes.w, lower);
  const unsigned above[2] = {mask_and_set(scales.x, MASK, ONES), mask_and_set(rotate_right(scales.x, 8), MASK, ONES)};
  const unsigned below[2] = {mask_and_set(scales.y, MASK, ONES), mask_and_set(rotate_right(scales.y, 8), MASK, ONES)};
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
      a[j][2 * part] = mul2_by_half<X_BF16, 0>(upper[2 * j + part], above[j / 2]);
      a[j][2 * part + 1] = mul2_by_half<X_BF16, 0>(lower[2 * j + part], below[j / 2]);
      a[j + 1][2 * part] = mul2_by_half<X_BF16, 1>(upper[2 * j + 2 + part], above[j / 2]);
      a[j + 1][2 * part + 1] = mul2_by_half<X_BF16, 1>(lower[2 * j + 2 + part], below[j / 2]);
    }
  }
}

// x_map: x [m, k], boxes of 64 k by TOKENS / CLUSTER tokens. y_map: y, boxes of 64 rows by TOKENS tokens; not looked at
// where y has no such map (N no multiple of 8, or not on 16 bytes). w: [tiles of 128 rows, chunks of 64 k, 8, 576].
// y: [m, n] 16-bit. parts: float32 [workers * CLUSTER, 2, PART_FLOATS]. flags: zeros, [workers * CLUSTER, 2].
// depth: units of a tile (chunks / UNIT). token_tiles: of the row tiles of CLUSTER * ROWS rows, of TOKENS tokens each.
// waves: whole tiles per worker. SPLIT: waves 0, depth even, two workers for each tile.
#if CLUSTER == 2 || SPLIT
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    KERNEL(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map, const unsigned char* w,
           const float* tensor_scale, unsigned short* y, float* parts, unsigned* flags, int m, int n, int depth,
           int row_tiles, int token_tiles, int waves) {
  extern __shared__ __align__(1024) unsigned char shared_start[];
  const unsigned base = shared_address(shared_start);
  const int group = same_in_warp(threadIdx.x / 128);
  const int rank = CLUSTER == 2 ? cluster_rank() : 0;
  const int workers = gridDim.x / CLUSTER, worker = workers - 1 - blockIdx.x / CLUSTER;
  const int tiles = row_tiles * token_tiles, shared_units = max(0, tiles - waves * workers) * depth;
  const auto row_of = [&](int tile) { return (tile / token_tiles * CLUSTER + rank) * ROWS; };  // the CTA's first
  const auto token_of = [&](int tile) { return tile % token_tiles * TOKENS; };
  const Shares shares(shared_units, workers);
  const int chunks = depth * UNIT, last_tile = (n + 127) / 128 - 1;
  if (threadIdx.x == 128 * CONSUMERS) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + FULL + 8 * i, 1);
      barrier_init(base + EMPTY + 8 * i, 8 * CLUSTER);  // the warps of two warpgroups of each CTA
    }
    if constexpr (SPLIT) barrier_init(base + SENT, 1);
    barrier_init_fence();
    if constexpr (SPLIT) barrier_expect(base + SENT, SENT_BYTES);
  }
  __syncwarp();
  if constexpr (CLUSTER == 2 || SPLIT) cluster_arrive();
  if constexpr (CLUSTER == 1) __syncthreads();

  if (group == CONSUMERS) {
    registers_down<56>();
    const int warp = same_in_warp(threadIdx.x % 128 / 32), half = warp - 1;
    const bool first_lane = threadIdx.x % 32 == 0;
    if (warp == 0 && first_lane) {  // weights wait for nobody: no other kernel has written them
      launch_dependents();
      const bool once = token_tiles == 1;
      Ring ring;
      for (Piece piece(shares, worker, workers, tiles, depth, waves); piece.valid(); piece.next()) {
        // Rows past N: the last tile once more; its sums are not written.
        const size_t tile = min(row_of(piece.tile) / 128, last_tile);
        const unsigned char* from = w + (tile * chunks + piece.first * UNIT) * W_BYTES;
        for (int left = (piece.last - piece.first) * UNIT; left > 0; left--, ring.next(), from += W_BYTES) {
          const unsigned full = base + FULL + 8 * ring.stage, to = base + W + ring.stage * W_BYTES;
          barrier_wait(base + EMPTY + 8 * ring.stage, ring.parity ^ 1);
          barrier_expect(full, STAGE_BYTES);
          if (once) {
            bulk_copy_once(to, from, W_BYTES, full);
          } else {
            bulk_copy(to, from, W_BYTES, full);
          }
        }
      }
    }
    __syncwarp();
    if constexpr (CLUSTER == 2) cluster_wait();  // x goes into the other CTA
    if (warp == 3 && first_lane) {
      wait_for_earlier_grid();
      Ring ring;
      for (Piece piece(shares, worker, workers, tiles, depth, waves); piece.valid(); piece.next()) {
        const int token = token_of(piece.tile) + rank * (TOKENS / CLUSTER);
        for (int chunk = piece.first * UNIT; chunk < piece.last * UNIT; chunk++, ring.next()) {
          barrier_wait(base + EMPTY + 8 * ring.stage, ring.parity ^ 1);
          tensor_copy<CLUSTER == 2>(base + X + ring.stage * X_BYTES + rank * (X_BYTES / CLUSTER), &x_map, 64 * chunk,
                                    token, base + FULL + 8 * ring.stage);
        }
      }
    } else if (!SPLIT && (half == 0 || half == 1) && shares.begin(worker) % depth != 0 &&
               shares.begin(worker) < shares.begin(worker + 1)) {
      named_sync(SUMS_LEFT + half, 128 + 32);
      if (first_lane) flag_raise(flags + (worker * CLUSTER + rank) * 2 + half);
    }
    if constexpr (SPLIT) {
      __syncwarp();
      cluster_wait();
    }
  } else {
    if constexpr (CLUSTER == 2) cluster_wait();
    registers_up<224>();
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, half = group;
    unsigned a[2][4][4];
    float acc[SUMS];
    Ring ring;
    const float scale = *tensor_scale * OPERAND_TO_VALUE;  // early: at the end its latency would show
    wait_for_earlier_grid();                               // they may still read y's and the sums' old values
    // This lane's codes and scales in stage 0.
    const unsigned strip = base + W + (4 * half + warp) * TILE_BYTES;
    const unsigned my_codes = keep(strip + 16 * lane), my_scales = keep(strip + TILE_CODE_BYTES + 8 * (lane / 4));

    // Where this lane's 16 bytes of results go: token 8 (lane / 16) + lane % 8, rows 16 warp + 8 (lane / 8 % 2) and on.
    const unsigned corner = base + OUT + half * OUT_BYTES + 128 * (8 * (lane / 16) + lane % 8) +
                            16 * ((2 * warp + lane / 8 % 2) ^ lane % 8);
    const bool y_has_map = n % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;

    // After the products of the stage, which have taken what was loaded from it: no need of once_loaded.
    const auto release = [&](int stage) {
      __syncwarp();
      if (lane < CLUSTER) {
        if constexpr (CLUSTER == 2) {
          barrier_arrive_cluster(peer_address(base + EMPTY + 8 * stage, lane));
        } else {
          barrier_arrive(base + EMPTY + 8 * stage);
        }
      }
    };

    for (Piece piece(shares, worker, workers, tiles, depth, waves); piece.valid(); piece.next()) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) acc[i] = 0;
      pin(acc);
      int before = -1;
#pragma unroll 1
      for (int unit = piece.first; unit < piece.last; unit++) {
#pragma unroll
        for (int c = 0; c < UNIT; c++) {
          const int stage = ring.stage;
          const unsigned long long x = tile_descriptor(base + X + same_in_warp(stage) * X_BYTES);
          Packed packed;
          barrier_wait(base + FULL + 8 * stage, ring.parity);
          packed.load(my_codes + stage * W_BYTES, my_scales + stage * W_BYTES);
          ring.next();
          decode_fragments(packed, a[c]);
          pin(a[c]);
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < 4; j++) Wgmma<TOKENS, X_BF16>::go(acc, a[c][j], x + 2 * j);
          wgmma_commit();
          wgmma_wait<1>();
          if (before >= 0) release(before);
          before = stage;
        }
      }
      wgmma_wait<0>();
      pin(acc);
      release(before);

      if constexpr (SPLIT) {
        const int own = cluster_rank();
        const unsigned at = base + OUT + 16 * thread;
        cluster_wait();  // the other CTA's barrier is made
        if (half != own) {
          const unsigned there = peer_address(at, 1 - own), sent = peer_address(base + SENT, 1 - own);
#pragma unroll
          for (int i = 0; i < SUMS; i += 4) {
            peer_store(there + 512 * i, float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]}, sent);
          }
          break;
        }
        barrier_wait_cluster(base + SENT, 0);
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
          const float4 v = *reinterpret_cast<const float4*>(shared_start + (at - base) + 512 * i);
          acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
        }
      }

      if (!SPLIT && piece.first > 0) {
        const size_t place = (worker * CLUSTER + rank) * 2 + half;
        float4* const to = reinterpret_cast<float4*>(parts + place * PART_FLOATS) + thread;
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) to[32 * i] = float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
        named_arrive(SUMS_LEFT + half, 128 + 32);
      } else {
        // The other workers of the tile: a thread for each one's flag, then their sums without a stop.
        const int tile_end = (piece.tile - waves * workers + 1) * depth;
        int others = 0;
        while (!SPLIT && piece.last < depth && shares.begin(worker + 1 + others) < tile_end) others++;
        for (int i = thread; i < others; i += 128) flag_take(flags + ((worker + 1 + i) * CLUSTER + rank) * 2 + half);
        if (others > 0) named_sync(GROUP_MEETS + half, 128);
#pragma unroll 1
        for (int other = worker + 1; other <= worker + others; other++) {
          const size_t place = (other * CLUSTER + rank) * 2 + half;
          const float4* const from = reinterpret_cast<const float4*>(parts + place * PART_FLOATS) + thread;
#pragma unroll
          for (int i = 0; i < SUMS; i += 4) {
            const float4 v = load_shared_by_gpu(from + 32 * i);
            acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
          }
        }
        // Through shared memory: a lane has two tokens of two weight rows, y wants a token's rows side by side.
        const int row = row_of(piece.tile) + half * 64, token = token_of(piece.tile);
        if (thread == 0) stores_read();  // the tile before
        named_sync(GROUP_MEETS + half, 128);
#pragma unroll
        for (int i = 0; i < TOKENS; i += 16) {
          const float* v = &acc[i / 2];
          unsigned pairs[4];
#pragma unroll
          for (int p = 0; p < 4; p++) pairs[p] = round_pair<X_BF16>(v[2 * p] * scale, v[2 * p + 1] * scale);
          store_transposed(corner + i * 128, pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        fence_async_shared();
        named_sync(GROUP_MEETS + half, 128);
        if (y_has_map) {
          if (thread == 0) tensor_store(&y_map, row, token, base + OUT + half * OUT_BYTES);
        } else {
          for (int i = thread; i < min(TOKENS, m - token) * 64; i += 128) {
            const int t = i / 64, at = i % 64;
            const unsigned from = OUT + half * OUT_BYTES + 128 * t + (2 * at ^ 16 * (t % 8));
            if (row + at < n) {
              y[static_cast<size_t>(token + t) * n + row + at] =
                  *reinterpret_cast<const unsigned short*>(shared_start + from);
            }
          }
        }
      }
    }
    if (thread == 0) stores_read();
  }
  if constexpr (CLUSTER == 2) {
    __syncwarp();
    cluster_sync();  // the other CTA still sends here
  }
}
