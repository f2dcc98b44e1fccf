// NVFP4 linear for few tokens (M <= 32): y[M, N] = x[M, K] w^T at the speed of reading w.
//
// Weights are the A operand of mma.sync.m16n8k16, made in registers; tokens are its N = 8 (TOKENS / 8 of them). x
// stands still: each of the WARPS warps of a team keeps the fragments of its share of K in registers for the whole
// kernel, and 16-row strips of weights stream past. So x costs no shared memory, and nothing but weights moves.
//
// Every warp runs its own stream: DEPTH stages of its own in shared memory, filled by its own bulk copies (its share of
// a strip is contiguous in tiles.py's layout), refilled as soon as it has read one. No producer warp, no barrier
// between warps. A warp leaves its 16 x TOKENS partial sums of a strip in one of SLOTS slots; the warp that comes last
// adds them in a fixed order. TEAMS teams of WARPS warps take turns with the strips.
//
// SPLIT = 2: a cluster of two halves K, and the CTAs take turns in collecting a strip's two halves: the other's comes
// through distributed shared memory and is added at the end of the kernel, so that no warp waits for the other CTA in
// between. When the fragments of x do not fit (CHUNKS tiles of K per warp), K is walked in phases: for a group of
// strips the partial sums wait in their slots between phases. No atomics on sums and no workspace in global memory: the
// same bits on every run, safe in a CUDA graph.
//
// Macros: KERNEL (name), X_BF16 0/1 (dtype of x and y), TOKENS 8/16/32, CHUNKS, WARPS, TEAMS, SPLIT 1/2, DEPTH, SLOTS
// (strips that wait for their sum, or for their next phase), PHASED 0/1 (more than one phase), MISSING (at most so many
// of CHUNKS tiles are missing from some warp's share), ONCE 0/1 (weights leave L2 first).
#include "operand.cuh"

constexpr int N_TILES = TOKENS / 8;
constexpr int CHAINS = N_TILES == 1 ? 2 : 1;  // independent sums, so that a product need not wait for the one before
constexpr int THREADS = 32 * WARPS * TEAMS;
constexpr unsigned STRIP_BYTES = N_TILES * 32 * 16;  // the partial sums of one warp
constexpr unsigned SLOT_BYTES = WARPS * STRIP_BYTES;
constexpr unsigned STAGE_BYTES = CHUNKS * TILE_BYTES;

// Shared memory: barriers and counters, slots of partial sums, the stages, then `places` for sums of two CTAs per team.
constexpr unsigned FULL = 0, FREE = FULL + 8 * TEAMS * WARPS * DEPTH, COUNT = FREE + 8 * TEAMS * SLOTS;
constexpr unsigned PARTS = (COUNT + 4 * TEAMS * SLOTS + 127) / 128 * 128, STAGES = PARTS + TEAMS * SLOTS * SLOT_BYTES;
constexpr unsigned PLACES = STAGES + TEAMS * WARPS * DEPTH * STAGE_BYTES;

// The order of units: for each group of SLOTS strips, for each phase of K, for each strip of the group.
struct Cursor {
  int strips, phases, group, end, phase, strip;
  DEVICE Cursor(int strips_, int phases_)
      : strips(strips_), phases(phases_), group(0), end(min(SLOTS, strips_)), phase(0), strip(0) {}
  DEVICE bool valid() const { return group < strips; }
  DEVICE void next() {
    if (++strip < end) return;
    strip = group;
    if (PHASED && ++phase < phases) return;
    phase = 0;
    strip = group = end;
    end = min(end + SLOTS, strips);
  }
};

DEVICE float4 add(const float4& a, const float4& b) { return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// x: [m, k] 16-bit. w: [strips of 16 rows, chunks of 64 k] tiles. y: [m, n] 16-bit. phase_chunks: tiles of K per phase.
// places: sums of two CTAs that a team of a CTA collects (SPLIT = 2), at least half of its strips.
#if SPLIT == 2
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    KERNEL(const unsigned char* x, const unsigned char* w, const float* tensor_scale, unsigned short* y, int m, int n,
           int k, int chunks, int phase_chunks, int places) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned base = shared_address(shared);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int team = threadIdx.x / (32 * WARPS), warp = threadIdx.x / 32 % WARPS;
  const int rank = SPLIT == 2 ? cluster_rank() : 0;
  const int workers = gridDim.x / SPLIT, worker = blockIdx.x / SPLIT + team * workers, step = TEAMS * workers;
  const int strips = ((n + 15) / 16 - worker + step - 1) / step;
  const int half = (chunks + SPLIT - 1) / SPLIT, first = rank * half, mine = min(half, chunks - first);
  const int phases = PHASED ? (mine + phase_chunks - 1) / phase_chunks : 1;

  // This warp's tiles of a phase: `count` of them from `start`, as even as they can be.
  struct Share {
    int start, count;
  };
  const auto share = [&](int phase) {
    const int tiles = PHASED ? min(phase_chunks, mine - phase * phase_chunks) : mine;
    return Share{first + phase * phase_chunks + warp * (tiles / WARPS) + min(warp, tiles % WARPS),
                 tiles / WARPS + (warp < tiles % WARPS)};
  };

  const unsigned full = base + FULL + 8 * DEPTH * (team * WARPS + warp);
  const unsigned stages = STAGES + (team * WARPS + warp) * DEPTH * STAGE_BYTES;
  Cursor ahead(strips, phases);
  const auto fetch = [&](int stage, unsigned long long policy) {
    const size_t strip = worker + static_cast<size_t>(ahead.strip) * step;
    const Share s = share(ahead.phase);
    if (MISSING == CHUNKS && s.count == 0) return;
    const unsigned char* from = w + (strip * chunks + s.start) * TILE_BYTES;
    const unsigned bytes = s.count * TILE_BYTES, to = base + stages + stage * STAGE_BYTES;
    barrier_arrive_expect(full + 8 * stage, bytes);
    if constexpr (ONCE) {
      bulk_copy_by(to, from, bytes, full + 8 * stage, policy);
    } else {
      bulk_copy(to, from, bytes, full + 8 * stage);
    }
  };

  unsigned operand[N_TILES][CHUNKS][8];
  const auto load_x = [&](int phase) {
    const Share s = share(phase);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int at = (s.start + c) * 64 + 16 * t;
#pragma unroll
      for (int i = 0; i < N_TILES; i++) {
        // Columns past M repeat the last token; their sums are not written. k past K is zero.
        const unsigned char* from = x + 2 * (static_cast<size_t>(min(8 * i + g, m - 1)) * k + at);
        const bool inside = (c < CHUNKS - MISSING || c < s.count) && at < k;
        const uint4 low = inside ? load_early(from) : uint4{0, 0, 0, 0};
        const uint4 high = inside ? load_early(from + 16) : uint4{0, 0, 0, 0};
        unsigned(&o)[8] = operand[i][c];
        o[0] = low.x, o[1] = low.y, o[2] = low.z, o[3] = low.w;
        o[4] = high.x, o[5] = high.y, o[6] = high.z, o[7] = high.w;
      }
    }
  };

  // The first units are on their way before anything else happens; x follows while they travel.
  unsigned long long policy = 0;
  if (lane == 0) {
    if constexpr (ONCE) policy = leave_first();
    for (int i = 0; i < DEPTH; i++) barrier_init(full + 8 * i, 1);
    barrier_init_fence();
  }
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    if (ahead.valid()) {
      if (lane == 0) fetch(i, policy);
      ahead.next();
    }
  }
  const unsigned arrived = base + PLACES + 8 * places * team;
  const unsigned sums = PLACES + (8 * places * TEAMS + 127) / 128 * 128 + places * team * 2 * STRIP_BYTES + 16 * lane;
  if (lane == 0) {
    for (int i = warp; i < SLOTS; i += WARPS) {
      barrier_init(base + FREE + 8 * (team * SLOTS + i), 1);
      *reinterpret_cast<unsigned*>(shared + COUNT + 4 * (team * SLOTS + i)) = 0;
    }
    if constexpr (SPLIT == 2) {
#pragma unroll 1
      for (int i = warp; i < places; i += WARPS) barrier_init(arrived + 8 * i, 1);
    }
    barrier_init_fence();
  }
  const float tensor = *tensor_scale;
  load_x(0);
  __syncwarp();
  if constexpr (SPLIT == 2) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const float scale = tensor * OPERAND_TO_VALUE;

  const auto write = [&](int strip, const float4(&sum)[N_TILES]) {
    const int row = 16 * (worker + strip * step) + g;
#pragma unroll
    for (int i = 0; i < N_TILES; i++) {
      const float values[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int token = 8 * i + 2 * t + (e & 1), at = row + 8 * (e >> 1);
        if (token < m && at < n) y[static_cast<size_t>(token) * n + at] = round16<X_BF16>(values[e] * scale);
      }
    }
  };

  int loaded = 0, stage = 0;
  unsigned parity = 0;
  for (Cursor now(strips, phases); now.valid(); now.next()) {
    if (PHASED && now.phase != loaded) load_x(loaded = now.phase);
    const int count = share(now.phase).count, slot = now.strip - now.group;
    const unsigned parts = PARTS + (team * SLOTS + slot) * SLOT_BYTES + 16 * lane;
    unsigned char* part = shared + parts + warp * STRIP_BYTES;
    float acc[CHAINS][N_TILES][4] = {};
    if (PHASED && now.phase > 0) {
#pragma unroll
      for (int i = 0; i < N_TILES; i++) {
        const float4 v = *reinterpret_cast<const float4*>(part + 512 * i);
        acc[0][i][0] = v.x, acc[0][i][1] = v.y, acc[0][i][2] = v.z, acc[0][i][3] = v.w;
      }
    }
    const unsigned char* codes_at = shared + stages + stage * STAGE_BYTES + 16 * lane;
    const unsigned char* scales_at = shared + stages + stage * STAGE_BYTES + TILE_CODE_BYTES + 2 * lane;
    if (MISSING < CHUNKS || count > 0) barrier_wait(full + 8 * stage, parity);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c >= CHUNKS - MISSING && c >= count) break;
      const uint4 codes = *reinterpret_cast<const uint4*>(codes_at + c * TILE_BYTES);
      const unsigned scales = *reinterpret_cast<const unsigned short*>(scales_at + c * TILE_BYTES);
      unsigned a[4][4];
      tile_fragments<X_BF16>(codes, scales, a);
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int i = 0; i < N_TILES; i++) {
          mma16816<X_BF16>(acc[j % CHAINS][i], a[j], operand[i][c][2 * j], operand[i][c][2 * j + 1]);
        }
      }
    }
    __syncwarp();
    if (ahead.valid()) {
      if (lane == 0) fetch(stage, policy);
      ahead.next();
    }
    if (++stage == DEPTH) stage = 0, parity ^= 1;

    const unsigned free = base + FREE + 8 * (team * SLOTS + slot);
    if (now.phase == 0 && now.group > 0) barrier_wait(free, (now.group / SLOTS - 1) & 1);
#pragma unroll
    for (int i = 0; i < N_TILES; i++) {
      float4 v{acc[0][i][0], acc[0][i][1], acc[0][i][2], acc[0][i][3]};
      if constexpr (CHAINS == 2) {
        v = add(v, float4{acc[CHAINS - 1][i][0], acc[CHAINS - 1][i][1], acc[CHAINS - 1][i][2], acc[CHAINS - 1][i][3]});
      }
      *reinterpret_cast<float4*>(part + 512 * i) = v;
    }
    if (PHASED && now.phase < phases - 1) continue;
    __syncwarp();
    unsigned before = 0;
    if (lane == 0) before = count_arrival(base + COUNT + 4 * (team * SLOTS + slot), WARPS - 1);
    if (__shfl_sync(0xFFFFFFFFu, before, 0) != WARPS - 1) continue;

    // The last of the team: every warp's sums are there.
    float4 sum[N_TILES];
#pragma unroll
    for (int i = 0; i < N_TILES; i++) {
      sum[i] = *reinterpret_cast<const float4*>(shared + parts + 512 * i);
#pragma unroll
      for (int from = 1; from < WARPS; from++) {
        sum[i] = add(sum[i], *reinterpret_cast<const float4*>(shared + parts + from * STRIP_BYTES + 512 * i));
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(free);
    if constexpr (SPLIT == 1) {
      write(now.strip, sum);
    } else {
      const int place = now.strip / 2, to = sums + place * 2 * STRIP_BYTES;
      const bool collects = (now.strip & 1) == rank;
#pragma unroll
      for (int i = 0; i < N_TILES; i++) {
        if (collects) {
          *reinterpret_cast<float4*>(shared + to + 512 * i) = sum[i];
        } else {
          peer_store(peer_address(base + to + STRIP_BYTES + 512 * i, rank ^ 1), sum[i],
                     peer_address(arrived + 8 * place, rank ^ 1));
        }
      }
      __syncwarp();
      if (collects && lane == 0) barrier_arrive_expect(arrived + 8 * place, STRIP_BYTES);
    }
  }

  if constexpr (SPLIT == 2) {
    for (int place = warp; 2 * place + rank < strips; place += WARPS) {
      barrier_wait_cluster(arrived + 8 * place, 0);
      float4 sum[N_TILES];
#pragma unroll
      for (int i = 0; i < N_TILES; i++) {
        const unsigned char* at = shared + sums + place * 2 * STRIP_BYTES + 512 * i;
        sum[i] = add(*reinterpret_cast<const float4*>(at), *reinterpret_cast<const float4*>(at + STRIP_BYTES));
      }
      write(2 * place + rank, sum);
    }
  }
}
