// The words of kernels/nvfp4/hopper.cuh and wgmma.cuh on a CPU, so that wgmma_gemm.cu runs without a GPU: every thread
// of a cluster is a fiber, clusters run one after the other from block 0. What a device may do late is done as late as
// the barriers allow: copies land in random order, products read fragments and shared memory only when they are waited
// for, so a fragment overwritten or a stage released too early gives wrong numbers. Layouts are the PTX manual's.
#pragma once
#include "fibers_on_cpu.cuh"

#define NVFP4_HOPPER_CUH
#define NVFP4_WGMMA_CUH
#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct Axis { int x; };
struct alignas(64) TensorMap { const unsigned char* from; long long rows, columns, box_rows; };  // boxes: 64 columns

struct Store { unsigned from; const TensorMap* map; int column, row, cta, thread; };
struct Product { float* sums[128]; const unsigned* a[128]; uint64_t b; int columns; bool bf16; int group; };
struct Group { Meeting meeting; Product next; std::vector<Product> under_way; int committed = 0; };
constexpr int MOST_CTAS = 8;  // of a cluster
static struct {
  std::vector<Fiber*> fibers;
  Fiber* now;
  ucontext_t scheduler;
  std::vector<unsigned char> shared[MOST_CTAS];
  std::map<unsigned, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<Store> stores;  // each reads its shared memory when its thread waits for it
  Meeting cluster, block[MOST_CTAS], named[MOST_CTAS][16];
  Group groups[MOST_CTAS][8];
  Exchange warps[MOST_CTAS][32];
  int threads, ctas;
  int copies_asked[MOST_CTAS], copies_under_way[MOST_CTAS];  // bulk copies
  unsigned long moves;  // whatever gets the program on
} cpu;
// Bulk copies of the CTA that had most, in any launch: asked for when it last read x, and under way at once.
static int most_before_x, most_under_way;
extern "C" int asked_before_x() { return most_before_x; }
extern "C" int at_once() { return most_under_way; }
static int rounds_under_way = 3;  // of the scheduler, that a copy takes on average
extern "C" void slow_copies() { rounds_under_way = 50; }
static Axis threadIdx, blockIdx, gridDim;

static std::string position() {
  return "block " + std::to_string(blockIdx.x) + " thread " + std::to_string(threadIdx.x);
}
static void others() { swapcontext(&cpu.now->context, &cpu.scheduler); }
static void moved() { cpu.moves++; }
static int own_lane() { return cpu.now->thread % 32; }
static Exchange& own_exchange() { return cpu.warps[cpu.now->cta][cpu.now->thread / 32]; }
static unsigned char* simulated_shared() { return cpu.shared[cpu.now->cta].data(); }
static unsigned shared_address(const void* p) {
  return static_cast<unsigned>((const unsigned char*)p - simulated_shared()) | cpu.now->cta << 24;
}
static unsigned char* place(unsigned address, unsigned bytes) {
  const unsigned cta = address >> 24, at = address & 0xFFFFFF;
  if (cta >= unsigned(cpu.ctas) || at + bytes > cpu.shared[cta].size()) stop("outside shared memory", address);
  return cpu.shared[cta].data() + at;
}
static unsigned keep(unsigned v) { return v; }
static uint4 lds128(unsigned at) { return *(const uint4*)place(at, 16); }
static uint2 lds64(unsigned at) { return *(const uint2*)place(at, 8); }
static unsigned in_cta(unsigned address, unsigned cta) { return (address & 0xFFFFFF) | cta << 24; }
static Barrier& barrier(unsigned address) {
  if (!cpu.barriers.count(address)) stop("not a barrier", address);
  return cpu.barriers[address];
}
static void barrier_init(unsigned address, unsigned count) {
  place(address, 8);
  cpu.barriers[address] = new_barrier(count);
}
static void barrier_init_fence() {}
static void barrier_expect(unsigned address, unsigned bytes) { expect(barrier(address), bytes); }
static void barrier_arrive(unsigned address) { barrier_expect(address, 0); }
static unsigned __float_as_uint(float x) { return bits_of(x); }
static void barrier_arrive_cluster(unsigned address) { barrier_arrive(address); }
static void launch_dependents() {}
static void wait_for_earlier_grid() { others(); }
static void barrier_wait(unsigned address, unsigned parity) {
  while (waits(barrier(address), parity)) others();
}
static void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned done) {
  if (to % 16 || bytes % 16 || (uintptr_t)from % 16 || !bytes) stop("copy not aligned", to);
  place(to, bytes), moved();
  const int cta = cpu.now->cta;
  cpu.copies_asked[cta]++, most_under_way = max(most_under_way, ++cpu.copies_under_way[cta]);
  cpu.copies.push_back(
      {&barrier(done), bytes, [=] { memcpy(place(to, bytes), from, bytes), cpu.copies_under_way[cta]--; }});
}
static uint4 read_x(const void* p) {
  most_before_x = max(most_before_x, cpu.copies_asked[cpu.now->cta]);
  return *(const uint4*)p;
}
static unsigned long long leave_first() { return 0; }
static void bulk_copy_by(unsigned to, const void* from, unsigned bytes, unsigned done, unsigned long long) {
  bulk_copy(to, from, bytes, done);
}
static void bulk_copy_once(unsigned to, const void* from, unsigned bytes, unsigned done) {
  bulk_copy(to, from, bytes, done);
}
// A store into another CTA, which lands late and in any order.
static void peer_store(unsigned remote, const float4& v, unsigned remote_barrier) {
  if (remote % 16) stop("store not on 16 bytes", remote);
  place(remote, 16), moved();
  cpu.copies.push_back({&barrier(remote_barrier), 16, [=] { memcpy(place(remote, 16), &v, 16); }});
}
static unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }
static void write_box(unsigned to, const TensorMap& map, int k, int row) {
  for (int r = 0; r < map.box_rows; r++)
    for (int i = 0; i < 64; i++) {
      unsigned short v = 0;
      if (row + r < map.rows && k + i < map.columns) memcpy(&v, map.from + 2 * ((row + r) * map.columns + k + i), 2);
      memcpy(place(swizzled(to + 128 * r + 2 * i), 2), &v, 2);
    }
}
template <bool MULTICAST>
static void tensor_copy(unsigned to, const TensorMap* map, int k, int row, unsigned done) {
  if (to % 1024) stop("box not on 1024 bytes", to);
  for (int cta = 0; cta < cpu.ctas; cta++) {
    if (!MULTICAST && cta != cpu.now->cta) continue;
    const unsigned bytes = map->box_rows * 128, there = in_cta(to, cta);
    place(there, bytes);
    cpu.copies.push_back({&barrier(in_cta(done, cta)), bytes, [=] { write_box(there, *map, k, row); }});
  }
  moved();
}
static void tensor_store(const TensorMap* map, int column, int row, unsigned from) {
  if (from % 1024) stop("box not on 1024 bytes", from);
  place(from, map->box_rows * 128), cpu.stores.push_back({from, map, column, row, cpu.now->cta, cpu.now->thread});
}
static void stores_read() {
  for (size_t i = 0; i < cpu.stores.size();) {
    const Store s = cpu.stores[i];
    if (s.cta != cpu.now->cta || s.thread != cpu.now->thread) { i++; continue; }
    cpu.stores.erase(cpu.stores.begin() + i);
    for (int r = 0; r < s.map->box_rows && s.row + r < s.map->rows; r++)
      for (int i = 0; i < 64 && s.column + i < s.map->columns; i++)
        memcpy((unsigned char*)s.map->from + 2 * ((s.row + r) * s.map->columns + s.column + i),
               place(swizzled(s.from + 128 * r + 2 * i), 2), 2);
  }
}
static void barrier_wait_cluster(unsigned address, unsigned parity) { barrier_wait(address, parity); }
static int same_in_warp(int v) { return v; }
static void prefetch_map(const TensorMap*) {}
static unsigned cluster_rank() { return cpu.now->cta; }
static unsigned peer_address(unsigned local, unsigned rank) { return in_cta(local, rank); }
static void cluster_sync() { meet(cpu.cluster, cpu.threads * cpu.ctas); }
static unsigned arrived_at[MOST_CTAS][1024];
static void cluster_arrive() {
  arrived_at[cpu.now->cta][cpu.now->thread] = cpu.cluster.generation;
  come(cpu.cluster, cpu.threads * cpu.ctas);
}
static void cluster_wait() {
  while (cpu.cluster.generation == arrived_at[cpu.now->cta][cpu.now->thread]) others();
}
static void fence_async_shared() {}
static void __syncthreads() { meet(cpu.block[cpu.now->cta], cpu.threads); }
static Group& my_group() { return cpu.groups[cpu.now->cta][cpu.now->thread / 128]; }
static void __syncwarp() { exchange({0}); }
static void named_sync(int id, int threads) { meet(cpu.named[cpu.now->cta][id], threads); }
static void named_meet(int id, int threads) { named_sync(id, threads); }
static void named_arrive(int id, int threads) { come(cpu.named[cpu.now->cta][id], threads); }
static void flag_raise(unsigned* flag) {
  if (*flag) stop("flag already up");
  *flag = 1, moved();
}
static void flag_take(unsigned* flag) {
  while (!*flag) others();
  *flag = 0;
}
static float4 load_shared_by_gpu(const float4* p) { return *p; }
static float value16(unsigned short bits, bool bf16) {
  if (!bf16) { _Float16 h; memcpy(&h, &bits, 2); return h; }
  const unsigned u = bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static unsigned short bits16(float f, bool bf16) {
  if (!bf16) { _Float16 h = f; unsigned short bits; memcpy(&bits, &h, 2); return bits; }
  unsigned u;
  memcpy(&u, &f, 4);
  return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
template <bool BF16> static unsigned round_pair(float low, float high) {
  return bits16(low, BF16) | static_cast<unsigned>(bits16(high, BF16)) << 16;
}
template <bool BF16> static unsigned mul2(unsigned a, unsigned b) {
  return round_pair<BF16>(value16(a, BF16) * value16(b, BF16), value16(a >> 16, BF16) * value16(b >> 16, BF16));
}
template <bool BF16, int HALF> static unsigned mul2_by_half(unsigned a, unsigned b) {
  return mul2<BF16>(a, (b >> 16 * HALF & 0xFFFF) * 0x10001u);
}
static float4 add(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
static unsigned mask_and_set(unsigned v, unsigned mask, unsigned ones) { return (v & mask) | ones; }
static unsigned select_bits(unsigned a, unsigned b, unsigned mask) { return (a & mask) | (b & ~mask); }
static unsigned rotate_right(unsigned w, unsigned by) { return w >> by | w << (32 - by); }
static unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) { return pick_bytes(a, b, selector); }
static float shuffle_xor(float v, int mask) { return float_of(exchange({bits_of(v)}).from(own_lane() ^ mask)); }
template <int> static void registers_up() {}
template <int> static void registers_down() {}
template <class T> static void pin(T&) {}
static void store_transposed(unsigned row, unsigned m0, unsigned m1, unsigned m2, unsigned m3) {
  const Given w = exchange({m0, m1, m2, m3});
  const int lane = own_lane();
  if (row % 16) stop("row not on 16 bytes", row);
  for (int c = 0; c < 8; c++) {  // element c of the lane's memory row is row c of the fragment, at column lane % 8
    const unsigned short v = w.from(4 * c + lane % 8 / 2, lane / 8) >> 16 * (lane % 2);
    memcpy(place(row + 2 * c, 2), &v, 2);
  }
  __syncwarp();
}
static uint64_t tile_descriptor(unsigned address) {
  return (address & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
static void wgmma_fence() {}
static void wgmma_commit() {
  meet(my_group().meeting, 128);
  if (cpu.now->thread % 128 == 0) my_group().committed++;
  meet(my_group().meeting, 128);
}
static void execute(const Product& p) {
  static float a[64][16], b[16][256];
  for (int thread = 0; thread < 128; thread++)
    for (int i = 0; i < 8; i++) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + (i / 2 % 2) * 8, k = thread % 4 * 2 + i % 2 + i / 4 * 8;
      a[row][k] = value16(p.a[thread][i / 2] >> 16 * (i % 2), p.bf16);
    }
  const unsigned start = (p.b & 0x3FFF) << 4, lines = (p.b >> 32 & 0x3FFF) << 4;
  if (p.b >> 62 != 1) stop("not the 128-byte swizzle");
  for (int k = 0; k < 16; k++)
    for (int n = 0; n < p.columns; n++) {
      unsigned short v;
      memcpy(&v, place(in_cta(swizzled(start + n / 8 * lines + n % 8 * 128 + 2 * k), cpu.now->cta), 2), 2);
      b[k][n] = value16(v, p.bf16);
    }
  for (int thread = 0; thread < 128; thread++)
    for (int i = 0; i < p.columns / 2; i++) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + (i / 2 % 2) * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float sum = p.sums[thread][i];
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][n];
      p.sums[thread][i] = sum;
    }
}
template <int PENDING> static void wgmma_wait() {
  Group& g = my_group();
  meet(g.meeting, 128);
  if (cpu.now->thread % 128 == 0) {
    while (!g.under_way.empty() && g.under_way.front().group < g.committed - PENDING) {
      execute(g.under_way.front());
      g.under_way.erase(g.under_way.begin());
    }
  }
  meet(g.meeting, 128);
}
template <int COLUMNS, bool BF16> struct Wgmma {
  static void go(float (&d)[COLUMNS / 2], const unsigned (&a)[4], uint64_t b) {
    Group& g = my_group();
    const int thread = cpu.now->thread % 128;
    g.next.sums[thread] = d, g.next.a[thread] = a;
    meet(g.meeting, 128);
    if (thread == 0) {
      g.next.b = b, g.next.columns = COLUMNS, g.next.bf16 = BF16, g.next.group = g.committed;
      g.under_way.push_back(g.next);
    }
    meet(g.meeting, 128);
  }
};

static void (*kernel_of_fiber)();
static void fiber() {
  until_stopped(kernel_of_fiber);
  cpu.now->done = true, moved(), others();
}
static void run_blocks(int threads, int ctas, int blocks, unsigned shared_bytes, int seed) {
  srand(seed);
  gridDim.x = blocks, cpu.threads = threads, cpu.ctas = ctas;
  for (int block = 0; block < blocks; block += ctas) {
    cpu.barriers.clear(), cpu.copies.clear(), cpu.stores.clear(), cpu.cluster = {};
    for (int c = 0; c < ctas; c++) {
      cpu.shared[c].assign(shared_bytes, 0xFF), cpu.block[c] = {};
      cpu.copies_asked[c] = cpu.copies_under_way[c] = 0;
      for (auto& m : cpu.named[c]) m = {};
      for (auto& g : cpu.groups[c]) g = {};
      for (auto& w : cpu.warps[c]) w = {};
    }
    std::vector<Fiber> fibers(threads * ctas);
    cpu.fibers.clear();
    for (int i = 0; i < threads * ctas; i++) {
      Fiber& f = fibers[i];
      f.cta = i / threads, f.thread = i % threads;
      make_fiber(f, fiber);
    }
    std::vector<int> warps(fibers.size() / 32);
    for (size_t i = 0; i < warps.size(); i++) warps[i] = i;
    for (int idle = 0, alive = 1; alive;) {
      const unsigned long before = cpu.moves;
      alive = 0;
      for (size_t i = warps.size(); i-- > 1;) std::swap(warps[i], warps[rand() % (i + 1)]);
      for (int w : warps) {
        const bool asleep = rand() % 4 == 0 && idle < 100;
        for (int lane = 0; lane < 32; lane++) {
          Fiber& f = fibers[32 * w + lane];
          if (f.done) continue;
          alive++;
          if (asleep) continue;
          cpu.now = &f, threadIdx.x = f.thread, blockIdx.x = block + f.cta;
          resume(f, cpu.scheduler);
        }
      }
      for (size_t i = 0; i < cpu.copies.size();) {
        if (rand() % rounds_under_way) { i++; continue; }
        const Copy c = cpu.copies[i];
        cpu.copies.erase(cpu.copies.begin() + i), cpu.now = &fibers[0], land(c);
      }
      idle = cpu.moves == before && cpu.copies.empty() ? idle + 1 : 0;
      if (idle > 1000) stop("no thread can go on");
    }
    if (!cpu.copies.empty() || !cpu.stores.empty()) stop("copies left");
    for (auto& c : cpu.groups) for (auto& g : c) if (!g.under_way.empty()) stop("products left");
  }
}
// Runs `kernel` in every thread of `blocks` blocks.
static void simulate(void (*kernel)(), int threads, int ctas, int blocks, unsigned shared_bytes, int seed) {
  kernel_of_fiber = kernel;
  until_stopped([=] { run_blocks(threads, ctas, blocks, shared_bytes, seed); });
}
