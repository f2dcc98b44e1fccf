// NVFP4 linear for few tokens (M <= 32): y[M, N] = x[M, K] w^T at the speed of reading w.
//
// Weights are the A operand of mma.sync.m16n8k16, 16 rows by 16 k; x is the B operand, 8 tokens wide, and stands still
// in registers. One producer warp copies large pieces of weights into one ring of stages that all warps share, and a
// few warps do nothing but finish strips: large copies, no address arithmetic in the warps that multiply.
//
//   WARPS warps      take strips of 16 rows together: tile c of a warp is tile c * WARPS + warp of the strip; each leaves
//                    16 x TOKENS partial sums in a slot
//   producer warp    one copy per PIECE * WARPS tiles (contiguous in tiles.py's layout), STAGES - 1 of them under way
//   FINISHERS warps  add the partial sums in a fixed order, each those of its columns; scale, round, write y
//
// SPLIT > 1: the CTAs of a cluster share K, so each holds only its part of x and takes small pieces of many strips.
// They take turns in collecting the sums of a strip, and collect one when their next turn comes, so that none waits for
// another. All of a CTA's share of x must fit (CHUNKS tiles of K per warp). No atomics and no workspace in global
// memory: the same bits on every run, safe in a CUDA graph.
//
// Macros: KERNEL (name), X_BF16 0/1 (dtype of x and y), TOKENS 8/16/24/32, CHUNKS, WARPS, FINISHERS, SPLIT 1/2/4, PIECE
// (tiles per warp and stage), STAGES, SLOTS (strips that wait for their sum), MISSING (tiles that some warp's share
// lacks of CHUNKS), REGISTERS (a thread's in the warps that multiply, by setmaxnreg; 0: all warps have as many), ONCE
// 0/1 (weights leave L2 first), CHAINED 0/1 (launched programmatically: this kernel starts while the one ahead ends,
// and reads nothing before that one has ended).
#include "operand.cuh"

constexpr int N_TILES = TOKENS / 8;
constexpr int CHAINS = N_TILES == 1 ? 2 : 1;  // independent sums, so that a product need not wait for the one before
constexpr int OWN = N_TILES / FINISHERS;      // columns of a finishing warp, in eights
static_assert(OWN * FINISHERS == N_TILES, "finishing warps share the columns evenly");
constexpr int PRODUCER = WARPS, FINISHER = PRODUCER + 1;
// setmaxnreg is for whole warpgroups: the producer and those that finish are one.
constexpr bool UNEVEN = REGISTERS > 0;
static_assert(!UNEVEN || (WARPS % 4 == 0 && FINISHERS <= 3), "registers are given to warpgroups");
constexpr int THREADS = 32 * (UNEVEN ? WARPS + 4 : FINISHER + FINISHERS);
constexpr int FEW_REGISTERS = 56;
constexpr int EVERYONE = 1;  // a named barrier
constexpr int PIECES = (CHUNKS + PIECE - 1) / PIECE;  // stages of a strip
constexpr int PIECE_TILES = PIECE * WARPS;
// Copies under way. More would only queue: what is asked for after them comes after them.
constexpr int FLIGHT = STAGES > 1 ? STAGES - 1 : 1;
// A stage starts on 128 bytes, as its source mostly does: a copy between places that differ modulo 128 asks L2 for
// more.
constexpr unsigned STAGE_BYTES = (PIECE_TILES * TILE_BYTES + 127) / 128 * 128;
constexpr unsigned STRIP_BYTES = N_TILES * 32 * 16;  // the partial sums of one warp
constexpr unsigned SLOT_BYTES = WARPS * STRIP_BYTES;

// Shared memory: barriers, then places, then slots of partial sums, then the stages.
// A place holds the sums of a strip that this CTA collects, one per CTA of the cluster. Three places suffice: CTA r
// sends for strip s + 3 SPLIT, into the place of s, only after it has collected one of the strips s + SPLIT + 1 ..
// s + 2 SPLIT - 1; the collector of s had sent its own sums of that one after collecting s.
constexpr int PLACES = 3;
constexpr unsigned PLACE_BYTES = SPLIT > 1 ? SPLIT * STRIP_BYTES : 0;
constexpr unsigned FULL = 0, EMPTY = FULL + 8 * STAGES, SUMMED = EMPTY + 8 * STAGES, FREE = SUMMED + 8 * SLOTS;
constexpr unsigned ARRIVED = FREE + 8 * SLOTS, PLACE = 1024;
constexpr unsigned PARTS = PLACE + PLACES * PLACE_BYTES, RING = PARTS + SLOTS * SLOT_BYTES;
static_assert(ARRIVED + 8 * PLACES * FINISHERS <= PLACE, "too many barriers");

struct Turn {
  int stage = 0;
  unsigned parity = 0;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// x: [m, k] 16-bit. w: [strips of 16 rows, chunks of 64 k] tiles. y: [m, n] 16-bit.
#if SPLIT > 1
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    KERNEL(const unsigned char* x, const unsigned char* w, const float* tensor_scale, unsigned short* y, int m, int n,
           int k, int chunks) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned base = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = SPLIT > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int worker = blockIdx.x / SPLIT, workers = gridDim.x / SPLIT;
  const int strips = ((n + 15) / 16 - worker + workers - 1) / workers;
  const unsigned zero = static_cast<unsigned>(m) >> 31;  // for once_loaded
  const int share = (chunks + SPLIT - 1) / SPLIT, first = rank * share, mine = max(0, min(share, chunks - first));

  // The producer's place in the order of copies.
  int strip = 0, piece = 0;
  Turn to;
  const auto fetch = [&](unsigned long long policy) {
    const int tiles = max(0, min(PIECE_TILES, mine - piece * PIECE_TILES));
    const unsigned char* from =
        w + ((worker + static_cast<size_t>(strip) * workers) * chunks + first + piece * PIECE_TILES) * TILE_BYTES;
    const unsigned bytes = tiles * TILE_BYTES, barrier = base + FULL + 8 * to.stage;
    barrier_expect(barrier, bytes);
    if (tiles > 0) {
      if constexpr (ONCE) {
        bulk_copy_by(base + RING + to.stage * STAGE_BYTES, from, bytes, barrier, policy);
      } else {
        bulk_copy(base + RING + to.stage * STAGE_BYTES, from, bytes, barrier);
      }
    }
    to.next();
    if (++piece == PIECES) piece = 0, strip++;
  };

  if constexpr (CHAINED) launch_dependents();
  unsigned long long policy = 0;
  float scale = 0.0f;
  // Asked for before the weights, as x is before all but the first of them: what comes later waits in the memory's
  // queues behind everything that is under way.
  if (warp >= FINISHER) {
    if constexpr (CHAINED) wait_for_earlier_grid();
    scale = load_early_float(tensor_scale);
  }
  if (warp == PRODUCER && lane == 0) {
    if constexpr (ONCE) policy = leave_first();
    for (int i = 0; i < STAGES; i++) barrier_init(base + FULL + 8 * i, 1), barrier_init(base + EMPTY + 8 * i, WARPS);
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(base + SUMMED + 8 * i, WARPS), barrier_init(base + FREE + 8 * i, FINISHERS);
    }
    for (int i = 0; i < PLACES * FINISHERS; i++) barrier_init(base + ARRIVED + 8 * i, 1);
    barrier_init_fence();
    if constexpr (CHAINED) wait_for_earlier_grid();
    fetch(policy);
  }
  const auto together = [&]() {
    __syncwarp();
    if constexpr (SPLIT > 1) {
      cluster_sync();
    } else {
      named_meet(EVERYONE, THREADS);
    }
  };

  if (warp < PRODUCER) {
    if constexpr (UNEVEN) registers_up<REGISTERS>();
    unsigned operand[N_TILES][CHUNKS][8];
    if constexpr (CHAINED) wait_for_earlier_grid();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int tile = c * WARPS + warp, at = (first + tile) * 64 + 16 * t;
#pragma unroll
      for (int i = 0; i < N_TILES; i++) {
        // Columns past M repeat the last token; their sums are not written. k past K is zero.
        const unsigned char* from = x + 2 * (static_cast<size_t>(min(8 * i + g, m - 1)) * k + at);
        const bool inside = tile < mine && at < k;
        const uint4 low = inside ? load_early(from) : uint4{0, 0, 0, 0};
        const uint4 high = inside ? load_early(from + 16) : uint4{0, 0, 0, 0};
        unsigned(&o)[8] = operand[i][c];
        o[0] = low.x, o[1] = low.y, o[2] = low.z, o[3] = low.w;
        o[4] = high.x, o[5] = high.y, o[6] = high.z, o[7] = high.w;
      }
    }
    together();
    Turn at;
    int slot = 0, use = 0;  // of the slot
    for (int now = 0; now < strips; now++) {
      float acc[CHAINS][N_TILES][4] = {};
#pragma unroll
      for (int p = 0; p < PIECES; p++) {
        const unsigned char* stage = shared + RING + at.stage * STAGE_BYTES + warp * TILE_BYTES;
        unsigned loaded = 0;
        barrier_wait(base + FULL + 8 * at.stage, at.parity);
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
          const int c = p * PIECE + i;
          if (c >= CHUNKS || (c >= CHUNKS - MISSING && c * WARPS + warp >= mine)) break;
          const unsigned char* tile = stage + i * WARPS * TILE_BYTES;
          const uint4 codes = *reinterpret_cast<const uint4*>(tile + 16 * lane);
          const unsigned scales = *reinterpret_cast<const unsigned short*>(tile + TILE_CODE_BYTES + 2 * lane);
          unsigned a[4][4];
          tile_fragments<X_BF16>(codes, scales, a);
          loaded = a[3][3];  // of codes and scales of the last tile: a warp's loads come back in order
#pragma unroll
          for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int b = 0; b < N_TILES; b++) {
              mma16816<X_BF16>(acc[j % CHAINS][b], a[j], operand[b][c][2 * j], operand[b][c][2 * j + 1]);
            }
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(once_loaded(base + EMPTY + 8 * at.stage, loaded, zero));
        at.next();
      }
      if (use > 0) barrier_wait(base + FREE + 8 * slot, (use - 1) & 1);
#pragma unroll
      for (int i = 0; i < N_TILES; i++) {
        float4 v{acc[0][i][0], acc[0][i][1], acc[0][i][2], acc[0][i][3]};
        if constexpr (CHAINS == 2) {
          const float(&other)[4] = acc[CHAINS - 1][i];
          v = add(v, float4{other[0], other[1], other[2], other[3]});
        }
        *reinterpret_cast<float4*>(shared + PARTS + slot * SLOT_BYTES + warp * STRIP_BYTES + 512 * i + 16 * lane) = v;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(base + SUMMED + 8 * slot);
      if (++slot == SLOTS) slot = 0, use++;
    }
    return;
  }
  if constexpr (UNEVEN) registers_down<FEW_REGISTERS>();
  together();
  if (warp == PRODUCER) {
    if (lane == 0) {
      Turn landed, emptied;
      for (int copy = 1; strip < strips; copy++) {
        if (copy >= FLIGHT) {
          barrier_wait(base + FULL + 8 * landed.stage, landed.parity);
          landed.next();
        }
        if (copy >= STAGES) {
          barrier_wait(base + EMPTY + 8 * emptied.stage, emptied.parity);
          emptied.next();
        }
        fetch(policy);
      }
    }
    return;
  }

  // Finishing warp `own` takes columns 8 OWN own on of all strips, with barriers of its own.
  const int own = warp - FINISHER;
  if (own >= FINISHERS) return;
  scale *= OPERAND_TO_VALUE;
  const unsigned column = 512 * OWN * own + 16 * lane;
  const auto write = [&](int strip, const float4(&sum)[OWN]) {
    const int row = 16 * (worker + strip * workers) + g;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float values[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int token = 8 * (OWN * own + i) + 2 * t + (e & 1), at = row + 8 * (e >> 1);
        if (token < m && at < n) y[static_cast<size_t>(token) * n + at] = round16<X_BF16>(values[e] * scale);
      }
    }
  };
  const auto arrived = [&](int place) { return base + ARRIVED + 8 * (place * FINISHERS + own); };
  const auto collect = [&](int strip) {
    const int turn = strip / SPLIT;
    barrier_wait_cluster(arrived(turn % PLACES), turn / PLACES & 1);
    float4 sum[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const unsigned char* at = shared + PLACE + turn % PLACES * PLACE_BYTES + 512 * i + column;
      sum[i] = *reinterpret_cast<const float4*>(at);
#pragma unroll
      for (int from = 1; from < SPLIT; from++) {
        sum[i] = add(sum[i], *reinterpret_cast<const float4*>(at + from * STRIP_BYTES));
      }
    }
    write(strip, sum);
  };
  for (int now = 0; now < strips; now++) {
    const int slot = now % SLOTS;
    barrier_wait(base + SUMMED + 8 * slot, (now / SLOTS) & 1);
    float4 sum[OWN];
    unsigned loaded = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const unsigned char* part = shared + PARTS + slot * SLOT_BYTES + 512 * i + column;
      sum[i] = *reinterpret_cast<const float4*>(part);
#pragma unroll
      for (int from = 1; from < WARPS; from++) {
        sum[i] = add(sum[i], *reinterpret_cast<const float4*>(part + from * STRIP_BYTES));
      }
      loaded |= __float_as_uint(sum[i].x);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(once_loaded(base + FREE + 8 * slot, loaded, zero));
    if constexpr (SPLIT == 1) {
      write(now, sum);
    } else {
      const int place = now / SPLIT % PLACES, collector = now % SPLIT;
      const unsigned to = PLACE + place * PLACE_BYTES + rank * STRIP_BYTES + column;
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        if (collector == rank) {
          *reinterpret_cast<float4*>(shared + to + 512 * i) = sum[i];
        } else {
          peer_store(peer_address(base + to + 512 * i, collector), sum[i], peer_address(arrived(place), collector));
        }
      }
      if (collector == rank) {
        if (lane == 0) barrier_expect(arrived(place), (SPLIT - 1) * 512 * OWN);
        if (now >= SPLIT) collect(now - SPLIT);
      }
    }
  }
  if constexpr (SPLIT > 1) {
    if (rank < strips) collect((strips - 1 - rank) / SPLIT * SPLIT + rank);
  }
}
