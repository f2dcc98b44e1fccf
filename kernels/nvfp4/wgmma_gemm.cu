// NVFP4 linear for many tokens: y[M, N] = x[M, K] w^T on wgmma, y^T = w x^T.
//
// Weights are the A operand, made in registers from gemm_tiles.py's tiles; x is B, in shared memory. A CTA makes 128
// weight rows by TOKENS tokens:
//
//   producer thread   per stage: one bulk copy of weights, and x by its tensor map (TMA); in a cluster of two, which
//                     make 256 rows by the same tokens, each fetches half of x for both
//   warpgroups        64 rows each: decode 64 k into one of two sets of fragments while the products of the
//                     other set are under way; with K_GROUPS = 2, two warpgroups share rows and take turns in K
//
// Warpgroups meet only in barriers of stages, so that one can write its results while the other multiplies.
//
// A worker (a CTA or a cluster) makes `waves` whole tiles, all workers side by side at the same k, so that what they
// read stays in L2. The tiles left are stream-K: their units of UNIT * 64 k stand in one line, cut in equal parts, one
// per worker. Who has the first units of a tile owns it: the others leave float32 sums in `parts` (a place for each
// worker, which has at most one such piece and does it first), raise a flag, and the owner adds them in the order of k.
// So the same bits on every run, one launch, flags back down at the end. Worker w runs on the grid's CTAs from the end:
// an owner waits only for CTAs of lower index.
//
// Macros: KERNEL (name), X_BF16 0/1, TOKENS 32/64/128/256, CLUSTER 1/2, CHUNKS (of 64 k in a stage),
// STAGES, K_GROUPS 1/2.
#include "operand.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128;
constexpr int CONSUMERS = 2 * K_GROUPS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int UNIT_STAGES = CHUNKS * K_GROUPS >= 2 ? K_GROUPS : 2 / CHUNKS;  // stages in a unit of work
constexpr int UNIT = UNIT_STAGES * CHUNKS;
constexpr int SUMS = TOKENS / 2;  // float32 per thread
constexpr int SLICE = TOKENS < 64 ? TOKENS : 64;
constexpr unsigned X_CHUNK_BYTES = TOKENS * 128, X_BYTES = CHUNKS * X_CHUNK_BYTES;
constexpr unsigned W_CHUNK_BYTES = 8 * TILE_BYTES, W_BYTES = CHUNKS * W_CHUNK_BYTES;
constexpr unsigned STAGE_BYTES = X_BYTES + W_BYTES;
constexpr unsigned OUT_STRIDE = 128 + 16;  // bytes of a token's results of a warpgroup, and a shift of banks
constexpr unsigned SLICE_BYTES = SLICE * OUT_STRIDE, EXCHANGE_BYTES = K_GROUPS == 2 ? 512 * SUMS : 0;
constexpr unsigned OUT_BYTES = SLICE_BYTES > EXCHANGE_BYTES ? SLICE_BYTES : EXCHANGE_BYTES;

// Shared memory, from a multiple of 1024 bytes: x of all stages, weights of all stages, results, barriers.
constexpr unsigned X = 0, W = STAGES * X_BYTES, OUT = W + STAGES * W_BYTES;
constexpr unsigned FULL = OUT + 2 * OUT_BYTES, EMPTY = FULL + 8 * STAGES, SHARED_BYTES = EMPTY + 8 * STAGES;
static_assert(SHARED_BYTES + 1024 <= 227 * 1024, "too much shared memory");
static_assert(K_GROUPS == 1 || CHUNKS == 2, "sets of fragments alternate within a stage");
static_assert(X_CHUNK_BYTES / CLUSTER % 1024 == 0, "a half of x must keep the swizzle's phase");

constexpr int PART_FLOATS = 128 * SUMS;  // of one warpgroup

struct Ring {
  int stage = 0;
  unsigned parity = 0;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The line of units in parts: each worker has `each`, the first `more` of them one more.
struct Shares {
  int each, more;
  DEVICE Shares(int units, int workers) : each(units / workers), more(units % workers) {}
  DEVICE int begin(int worker) const { return worker * each + min(worker, more); }
};

// A worker's piece of one tile: units first .. last - 1 of `tile`. Of `tiles`, the first waves * workers go out whole.
struct Piece {
  int worker, workers, tiles, depth, waves, wave = 0, at, end, tile, first, last;
  DEVICE Piece(const Shares& shares, int worker_, int workers_, int tiles_, int depth_, int waves_)
      : worker(worker_), workers(workers_), tiles(tiles_), depth(depth_), waves(waves_), at(shares.begin(worker_)),
        end(shares.begin(worker_ + 1)) {
    locate();
  }
  DEVICE void locate() {
    if (wave < waves) {
      tile = wave * workers + worker, first = 0, last = depth;
    } else {
      tile = at / depth, first = at - tile * depth, last = min(depth, first + end - at), tile += waves * workers;
    }
  }
  DEVICE bool valid() const { return wave < waves ? tile < tiles : at < end; }
  DEVICE void next() {
    if (wave < waves) {
      wave++;
    } else {
      at += last - first;
    }
    locate();
  }
  DEVICE bool final() const {
    Piece after = *this;
    after.next();
    return !after.valid();
  }
};

// One lane's codes and scales of a tile of 16 rows x 64 k.
struct Packed {
  uint4 codes;
  uint2 scales;
  DEVICE void load(unsigned codes_at, unsigned scales_at) {
    codes = shared_load16(codes_at);
    scales = shared_load8(scales_at);
  }
};

// -> the A fragments of the tile's four products. Scale byte j belongs to product j.
DEVICE void decode_fragments(const Packed& packed, unsigned (&a)[4][4]) {
  const uint4 codes = packed.codes;
  const uint2 scales = packed.scales;
  unsigned upper[8], lower[8];
  decode16<X_BF16>(codes.x, codes.y, upper);
  decode16<X_BF16>(codes.z, codes.w, lower);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const unsigned both = permute_bytes(scales.x, 0u, 0x4040u + 0x0101u * j);
    const unsigned below = permute_bytes(scales.y, 0u, 0x4040u + 0x0101u * j);
    const unsigned upper_scale = X_BF16 ? both * 16u + 0x70007000u : both << 7;
    const unsigned lower_scale = X_BF16 ? below * 16u + 0x70007000u : below << 7;
    a[j][0] = mul2<X_BF16>(upper[2 * j], upper_scale);
    a[j][1] = mul2<X_BF16>(lower[2 * j], lower_scale);
    a[j][2] = mul2<X_BF16>(upper[2 * j + 1], upper_scale);
    a[j][3] = mul2<X_BF16>(lower[2 * j + 1], lower_scale);
  }
}

// x_map: x [m, k], boxes of 64 k by TOKENS / CLUSTER tokens. w: [tiles of 128 rows, chunks of 64 k, 8, 576].
// y: [m, n] 16-bit. parts: float32 [workers * CLUSTER, 2, PART_FLOATS]. flags: zeros, [workers * CLUSTER, 2].
// depth: units of a tile (chunks / UNIT). row_tiles: units of CLUSTER * ROWS rows; token_tiles likewise. waves: whole
// tiles per worker.
#if CLUSTER == 2
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    KERNEL(const __grid_constant__ TensorMap x_map, const unsigned char* w, const float* tensor_scale,
           unsigned short* y, float* parts, unsigned* flags, int m, int n, int depth, int row_tiles, int token_tiles,
           int rows_first, int waves) {
  extern __shared__ __align__(1024) unsigned char shared_start[];
  unsigned char* const shared = shared_start + (-shared_address(shared_start) & 1023u);
  const unsigned base = keep(shared_address(shared));
  const int group = same_in_warp(threadIdx.x / 128);
  const int rank = CLUSTER == 2 ? cluster_rank() : 0;
  const int workers = gridDim.x / CLUSTER, worker = workers - 1 - blockIdx.x / CLUSTER;
  const int tiles = row_tiles * token_tiles, shared_units = max(0, tiles - waves * workers) * depth;
  const auto row_of = [&](int tile) {  // the CTA's first row of weights
    return ((rows_first ? tile % row_tiles : tile / token_tiles) * CLUSTER + rank) * ROWS;
  };
  const auto token_of = [&](int tile) { return (rows_first ? tile / row_tiles : tile % token_tiles) * TOKENS; };

  if (threadIdx.x == 128 * CONSUMERS) prefetch_map(&x_map);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + FULL + 8 * i, 1);
      barrier_init(base + EMPTY + 8 * i, 8 * CLUSTER);  // the warps of two warpgroups of each CTA
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (CLUSTER == 2) cluster_sync();

  if (group == CONSUMERS) {
    if constexpr (K_GROUPS == 1) registers_down<56>();
    if (threadIdx.x % 128 == 0) {
      const int chunks = depth * UNIT, last_tile = (n + 127) / 128 - 1;
      const Shares shares(shared_units, workers);
      Ring ring;
      for (Piece piece(shares, worker, workers, tiles, depth, waves); piece.valid(); piece.next()) {
        const int token = token_of(piece.tile) + rank * (TOKENS / CLUSTER), row_tile = row_of(piece.tile) / 128;
        for (int chunk = piece.first * UNIT; chunk < piece.last * UNIT; chunk += CHUNKS, ring.next()) {
          const unsigned full = base + FULL + 8 * ring.stage;
          barrier_wait(base + EMPTY + 8 * ring.stage, ring.parity ^ 1);
          barrier_arrive_expect(full, STAGE_BYTES);
          // Rows past N: the last tile once more; its sums are not written.
          const unsigned char* from =
              w + (static_cast<size_t>(min(row_tile, last_tile)) * chunks + chunk) * W_CHUNK_BYTES;
          const unsigned to = base + W + ring.stage * W_BYTES;
          if (token_tiles == 1) {
            bulk_copy_once(to, from, W_BYTES, full);
          } else {
            bulk_copy(to, from, W_BYTES, full);
          }
#pragma unroll
          for (int c = 0; c < CHUNKS; c++) {
            const unsigned to = base + X + ring.stage * X_BYTES + c * X_CHUNK_BYTES + rank * (X_CHUNK_BYTES / CLUSTER);
            tensor_copy<CLUSTER == 2>(to, &x_map, 64 * (chunk + c), token, full);
          }
        }
      }
    }
  } else {
    if constexpr (K_GROUPS == 1) registers_up<224>();
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, half = group % 2, turn = group / 2;
    unsigned char* const out = shared + OUT + half * OUT_BYTES;
    unsigned a[2][4][4];
    float acc[SUMS];
    const Shares shares(shared_units, workers);
    Ring ring;
    if (K_GROUPS == 2 && turn == 1) ring.next();
    const float scale = *tensor_scale * OPERAND_TO_VALUE;  // early: at the end its latency would show
    int pieces = 0;
    // This lane's codes and scales in stage 0.
    const unsigned strip = base + W + (4 * half + warp) * TILE_BYTES;
    const unsigned my_codes = keep(strip + 16 * lane), my_scales = keep(strip + TILE_CODE_BYTES + 8 * (lane / 4));

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
    // The stage's chunks; before returning, the products of all but the last are complete.
    const auto multiply = [&](int stage, int first_set, int& before) {
      Packed packed[CHUNKS];  // all loads first: one latency a stage
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const unsigned at = stage * W_BYTES + c * W_CHUNK_BYTES;
        packed[c].load(my_codes + at, my_scales + at);
      }
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        unsigned(&set)[4][4] = a[(first_set + c) & 1];
        decode_fragments(packed[c], set);
        pin(set);
        wgmma_fence();
        const unsigned long long x = tile_descriptor(base + X + stage * X_BYTES + c * X_CHUNK_BYTES);
#pragma unroll
        for (int j = 0; j < 4; j++) Wgmma<TOKENS, X_BF16>::go(acc, set[j], x + 2 * j);
        wgmma_commit();
        wgmma_wait<1>();
        if (c == 0 && before >= 0) release(before);
      }
      before = stage;
    };

    for (Piece piece(shares, worker, workers, tiles, depth, waves); piece.valid(); piece.next(), pieces++) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) acc[i] = 0;
      pin(acc);
      int before = -1;
#pragma unroll 1
      for (int unit = piece.first; unit < piece.last; unit++) {
#pragma unroll
        for (int s = 0; s < UNIT_STAGES / K_GROUPS; s++) {
          barrier_wait(base + FULL + 8 * ring.stage, ring.parity);
          multiply(ring.stage, s * CHUNKS, before);
#pragma unroll
          for (int i = 0; i < K_GROUPS; i++) ring.next();
        }
      }
      wgmma_wait<0>();
      pin(acc);
      release(before);

      if constexpr (K_GROUPS == 2) {
        float* const exchange = reinterpret_cast<float*>(out) + thread;
        if (turn == 1) {
          if (pieces > 0) named_sync(7 + half, 256);
#pragma unroll
          for (int i = 0; i < SUMS; i++) exchange[128 * i] = acc[i];
          named_sync(5 + half, 256);
          continue;
        }
        named_sync(5 + half, 256);
#pragma unroll
        for (int i = 0; i < SUMS; i++) acc[i] += exchange[128 * i];
        named_sync(1 + group, 128);
      }

      if (piece.first > 0) {
        const size_t place = (worker * CLUSTER + rank) * 2 + half;
        float4* const to = reinterpret_cast<float4*>(parts + place * PART_FLOATS) + thread;
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) to[32 * i] = float4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
        named_sync(1 + group, 128);
        if (thread == 0) flag_raise(flags + place);
      } else {
        // The other workers of the tile: a thread for each one's flag, then their sums without a stop.
        const int tile_end = (piece.tile - waves * workers + 1) * depth;
        int others = 0;
        while (piece.last < depth && shares.begin(worker + 1 + others) < tile_end) others++;
        for (int i = thread; i < others; i += 128) flag_take(flags + ((worker + 1 + i) * CLUSTER + rank) * 2 + half);
        if (others > 0) named_sync(1 + group, 128);
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
        const bool whole_pieces = n % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
        // Through shared memory: a lane has two tokens of two weight rows, y wants a token's rows side by side.
        const int row = row_of(piece.tile) + half * 64, token = token_of(piece.tile);
        const unsigned corner = shared_address(out) + (8 * (lane / 16) + lane % 8) * OUT_STRIDE +
                                2 * (16 * warp + 8 * (lane / 8 % 2));
#pragma unroll
        for (int from = 0; from < TOKENS; from += SLICE) {
          if (token + from >= m) break;
#pragma unroll
          for (int i = 0; i < SLICE; i += 16) {
            const float* v = &acc[(from + i) / 2];
            unsigned pairs[4];
#pragma unroll
            for (int p = 0; p < 4; p++) pairs[p] = round_pair<X_BF16>(v[2 * p] * scale, v[2 * p + 1] * scale);
            store_transposed(corner + i * OUT_STRIDE, pairs[0], pairs[1], pairs[2], pairs[3]);
          }
          named_sync(1 + group, 128);
#pragma unroll 4
          for (int i = thread; i < SLICE * 8; i += 128) {
            const int t = i / 8, at = i % 8 * 8;
            if (token + from + t >= m || row + at >= n) continue;
            const uint4 v = *reinterpret_cast<const uint4*>(out + t * OUT_STRIDE + 2 * at);
            unsigned short* const to = y + static_cast<size_t>(token + from + t) * n + row + at;
            if (whole_pieces) {
              *reinterpret_cast<uint4*>(to) = v;
            } else {
              const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
              for (int e = 0; e < 8; e++) {
                if (row + at + e < n) to[e] = static_cast<unsigned short>(words[e / 2] >> (16 * (e % 2)));
              }
            }
          }
          named_sync(1 + group, 128);
        }
      }
      if constexpr (K_GROUPS == 2) {
        if (!piece.final()) named_arrive(7 + half, 256);
      }
    }
  }
  if constexpr (CLUSTER == 2) {
    __syncwarp();
    cluster_sync();  // the other CTA still sends here
  }
}
