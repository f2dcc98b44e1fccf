// The words of kernels/gdn/hopper.cuh on a CPU, so that scan.cu runs without a GPU: every thread of a block is a fiber,
// blocks run one after the other. What a device may do late is done as late as the barriers allow: copies land when
// their barrier is waited for, products read their operands when they are waited for, stores read shared memory when
// their group is; so a fragment overwritten or a stage released too early gives wrong numbers. Layouts are the PTX
// manual's. Not shown: timing, proxies.
#pragma once
#include "fibers_on_cpu.cuh"

#define INLINE inline
#define __global__
#define __shared__
#define __align__(x)
#define __grid_constant__
#define __launch_bounds__(...)
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Axes { int x, y, z; };
struct alignas(64) TensorMap { u16* from; long rows, columns, unused[13]; };  // of 16-bit elements; boxes of 64 by 64
constexpr int BF16 = 0, FP16 = 1, SHARED_BYTES = 232448;
alignas(1024) char shared[SHARED_BYTES];
static Axes threadIdx, blockIdx, blockDim, gridDim;

struct Product { float* d[128]; const u32* a[128]; u64 b; int columns, rows_major, add, type; u64 a_shared; };
struct Group { Meeting meeting; std::vector<Product> queue; std::vector<int> ends; int done = 0, finished = 0; };
struct Lane {
    int issued = 0, committed = 0;
    bool waited = false, fenced = true;  // fenced: since what it stored has arrived
    std::vector<std::vector<std::function<void()>>> stores;
    std::vector<const u32*> seen;
};
static struct {
    std::vector<Fiber> fibers;
    ucontext_t main;
    int now, threads;
    long moves;
    std::map<u64*, Barrier> barriers;
    std::vector<Copy> later;
    Meeting block, named[16];
    Group groups[8];
    Exchange warps[32];
    std::vector<Lane> lanes;
} cpu;

static std::string position() {
    std::string at = "block";
    for (int i : {blockIdx.x, blockIdx.y, blockIdx.z}) at += " " + std::to_string(i);
    return at + " thread " + std::to_string(threadIdx.x);
}
static void others() {
    const int me = cpu.now;
    swapcontext(&cpu.fibers[me].context, &cpu.main);
    cpu.now = threadIdx.x = me;
}
static void moved() { cpu.moves++; }
static int own_lane() { return cpu.now & 31; }
static Exchange& own_exchange() { return cpu.warps[cpu.now >> 5]; }
static void __syncthreads() { meet(cpu.block, cpu.threads); }
static void named_sync(int id, int threads) { meet(cpu.named[id], threads); }
static void __syncwarp() { exchange({0}); }
inline float __uint_as_float(u32 x) { return float_of(x); }
inline u32 __float_as_uint(float x) { return bits_of(x); }
inline float __shfl_up_sync(u32, float x, int by) {
    const int lane = cpu.now & 31;
    return __uint_as_float(exchange({bits_of(x)}).from(lane >= by ? lane - by : lane));
}
inline u32 __shfl_sync(u32, u32 x, int lane) { return exchange({x}).from(lane); }
inline float __shfl_sync(u32, float x, int lane) { return __uint_as_float(exchange({bits_of(x)}).from(lane)); }
inline u32 __shfl_xor_sync(u32, u32 x, int mask) { return exchange({x}).from((cpu.now & 31) ^ mask); }
inline float __shfl_xor_sync(u32, float x, int mask) {
    return __uint_as_float(exchange({bits_of(x)}).from((cpu.now & 31) ^ mask));
}
inline int same(int x) { return x; }
inline u32 uniform(u32 x) { return exchange({x}).from(0); }

inline u32 shared_address(const void* p) { return (u32)((const char*)p - shared); }
static void inside(const void* p, long bytes, int align) {
    const long at = (const char*)p - shared;
    if (at < 0 || at + bytes > SHARED_BYTES || at % align) stop("shared address");
}
static Barrier& barrier_of(u64* bar) {
    if (!cpu.barriers.count(bar)) stop("a barrier nobody set up");
    return cpu.barriers[bar];
}
inline void barrier_init(u64* bar, int count) { inside(bar, 8, 8), cpu.barriers[bar] = new_barrier(count); }
inline void barrier_init_done() {}
inline void barrier_expect(u64* bar, u32 bytes) { expect(barrier_of(bar), bytes); }
inline void barrier_arrive(u64* bar) { barrier_expect(bar, 0); }
inline void barrier_wait(u64* bar, u32 parity) {
    const Barrier& b = barrier_of(bar);
    while (waits(b, parity)) {
        land_those_of(b, cpu.later);
        if (waits(b, parity)) others();
    }
}
inline void fence_async_shared() {}
inline void launch_dependents() {}
// What an earlier grid writes: no thread reads it before it has waited for that grid.
static std::vector<std::pair<const void*, long>> of_earlier_grid;
inline void wait_for_earlier_grid() { cpu.lanes[cpu.now].waited = true; }
// What blocks of this launch write for others: no thread reads a part of it before its flag was seen and fenced.
static struct {
    const char* workspace;
    long bytes, block_bytes;
    int hv, ratio, chunks;
    const u32* flags;
    u32 raised;
    std::vector<const u32*> loaded;  // and found raised, by any thread of the block
} flagged;
inline u32 load_acquire(const u32* p) {
    if (*p == flagged.raised) flagged.loaded.push_back(p);
    return *p;
}
inline void store_release(u32* p, u32 x) {
    if (!cpu.lanes[cpu.now].stores.empty()) stop("a flag ahead of its copies");
    if (!cpu.lanes[cpu.now].fenced) stop("a flag without a fence");
    if (*p == x) stop("a flag raised twice");
    *p = x;
}
inline u32 add_acq_rel(u32* p, u32 x) { return std::exchange(*p, *p + x); }
inline void fence_async_global() { cpu.lanes[cpu.now].fenced = true, cpu.lanes[cpu.now].seen = flagged.loaded; }
inline int leading_lanes(bool yes) {
    const Given all = exchange({yes});
    int n = 0;
    while (n < 32 && all.from(n)) n++;
    return n;
}
inline void pause(int&) { stop("waits for a block of higher index"); }  // blocks run in turn
inline int4 table_entry(const int4* p) { return *p; }
inline int again(int x) { return x; }
static void reads(const void* from) {
    for (const auto& [at, bytes] : of_earlier_grid)
        if (!cpu.lanes[cpu.now].waited && from >= at && from < (const char*)at + bytes) stop("read too early");
    const long at = (const char*)from - flagged.workspace;
    if (at < 0 || at >= flagged.bytes) return;
    const long block = at / flagged.block_bytes;
    const u32* flag = flagged.flags + block % flagged.hv / flagged.ratio * flagged.chunks + block / flagged.hv;
    const auto& seen = cpu.lanes[cpu.now].seen;
    if (std::find(seen.begin(), seen.end(), flag) == seen.end()) stop("a chunk read before its flag");
}
template <int N> inline void registers_up() {}
template <int N> inline void registers_down() {}

inline void bulk_load(void* to, const void* from, u32 bytes, u64* bar) {
    inside(to, bytes, 16);
    if ((uintptr_t)from % 16 || bytes % 16) stop("bulk load");
    reads(from);
    memset(to, 0x7F, bytes);
    cpu.later.push_back({&barrier_of(bar), bytes, [=] { memcpy(to, from, bytes); }});
}
inline void commit_store(std::function<void()> store) { cpu.lanes[cpu.now].stores.push_back({store}); }
inline void bulk_store(void* to, const void* from, u32 bytes) {
    inside(from, bytes, 16);
    if ((uintptr_t)to % 16 || bytes % 16) stop("bulk store");
    commit_store([=] { memcpy(to, from, bytes); });
}
static void finish_stores(size_t left) {
    auto& stores = cpu.lanes[cpu.now].stores;
    while (stores.size() > left) {
        for (auto& f : stores.front()) f();
        stores.erase(stores.begin());
        cpu.lanes[cpu.now].fenced = false;
    }
}
template <int N> inline void bulk_wait_read() { finish_stores(N); }
inline void bulk_wait_all() { finish_stores(0); }
inline int swizzled_128(int at) { return at ^ (at >> 7 & 7) << 4; }
inline void tensor_load(void* to, const TensorMap* map, int column, int row, u64* bar) {
    inside(to, 8192, 1024);
    memset(to, 0x7F, 8192);
    const TensorMap m = *map;
    reads(m.from);
    cpu.later.push_back({&barrier_of(bar), 8192, [=] {
        for (int r = 0; r < 64; r++)
            for (int c = 0; c < 64; c++)
                *(u16*)((char*)to + swizzled_128(r * 128 + 2 * c)) =
                    row + r < m.rows && column + c < m.columns ? m.from[(row + r) * m.columns + column + c] : 0;
    }});
}
inline void tensor_store(const TensorMap* map, const void* tile, int column, int row) {
    inside(tile, 8192, 1024);
    const TensorMap m = *map;
    commit_store([=] {
        for (int r = 0; r < 64 && row + r < m.rows; r++)
            for (int c = 0; c < 64; c++)
                m.from[(row + r) * m.columns + column + c] =
                    *(const u16*)((const char*)tile + swizzled_128(r * 128 + 2 * c));
    });
}
inline void copy_16(void* to, const void* from, bool live) {
    inside(to, 16, 16);
    reads(from);
    if (live) memcpy(to, from, 16);
    else memset(to, 0, 16);
}
inline void copy_commit() {}
template <int N> inline void copy_wait() {}

template <int TYPE> inline float widen(u16 bits) {
    return TYPE == BF16 ? __uint_as_float((u32)bits << 16) : half_to_float(bits);
}
template <int TYPE> inline u32 pack_half(float low, float high) {
    return TYPE == BF16 ? float_to_bf16(low) | float_to_bf16(high) << 16
                        : float_to_half(low) | float_to_half(high) << 16;
}
inline u32 times(u32 a, u32 b) {
    return pack_half<FP16>(half_to_float(a & 0xFFFF) * half_to_float(b & 0xFFFF),
                           half_to_float(a >> 16) * half_to_float(b >> 16));
}
inline float exp2_fast(float x) { return exp2f(x); }
inline float inverse_root(float x) { return 1 / sqrtf(x); }

// Four 8 x 8 matrices: lane 8 i + r gives row r of matrix i; lane l holds columns 2 (l & 3), + 1 of row l >> 2.
static void load_matrices(u32* x, const void* row, bool transposed) {
    inside(row, 16, 16);
    const Given rows = exchange({(uint64_t)row});
    const int quad = (cpu.now & 31) >> 2, pair = cpu.now & 3;
    for (int i = 0; i < 4; i++) {
        const auto at = [&](int r, int c) { return (u32)rows.at<const u16>(8 * i + r)[c]; };
        x[i] = transposed ? at(2 * pair, quad) | at(2 * pair + 1, quad) << 16
                          : at(quad, 2 * pair) | at(quad, 2 * pair + 1) << 16;
    }
    __syncwarp();
}
inline void ldmatrix(u32* x, const void* row) { load_matrices(x, row, false); }
inline void ldmatrix_t(u32* x, const void* row) { load_matrices(x, row, true); }
inline void stmatrix_t(void* row, const u32* x) {
    inside(row, 16, 16);
    const Given rows = exchange({(uint64_t)row});
    const int quad = (cpu.now & 31) >> 2, pair = cpu.now & 3;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) rows.at<u16>(8 * i + 2 * pair + j)[quad] = (u16)(x[i] >> 16 * j);
    __syncwarp();
}
inline u32 transpose_8x8(u32 x) { return transposed_8x8(x); }
static float widen_as(int type, u32 bits) { return type == BF16 ? widen<BF16>((u16)bits) : half_to_float(bits); }
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    product(widen<FP16>, d, a[0], a[1], a[2], a[3], b0, b1);
    __syncwarp();
}

inline u64 narrow_descriptor(u32 tile) { return (u64)(256 >> 4 | 3u << 30) << 32 | (tile >> 4 | 1u << 16); }
inline u64 wide_descriptor(u32 tile, u32 lead_bytes) {
    return (u64)(1024 >> 4 | 1u << 30) << 32 | (tile >> 4 | (lead_bytes >> 4) << 16);
}
static float operand(const Product& p, u64 matrix, int k, int n) {
    const u32 low = (u32)matrix, high = (u32)(matrix >> 32);
    const u32 start = (low & 0x3FFF) << 4, lead = (low >> 16 & 0x3FFF) << 4;
    const u32 stride = (high & 0x3FFF) << 4, mode = high >> 30;
    u32 at = start;
    if (p.rows_major) at += n / 64 * lead + k / 8 * stride + k % 8 * 128 + n % 64 * 2;
    else at += n / 8 * stride + n % 8 * (mode == 1 ? 128 : 32) + k * 2;
    if (mode == 1) at ^= (at >> 7 & 7) << 4;
    else if (mode == 3) at ^= (at >> 7 & 1) << 4;
    else stop("swizzle mode");
    if (at + 2 > SHARED_BYTES) stop("descriptor");
    return widen_as(p.type, *(const u16*)(shared + at));
}
static void carry_out(const Product& p) {
    std::vector<float> b(16 * p.columns), a(64 * 16);
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < p.columns; n++) b[k * p.columns + n] = operand(p, p.b, k, n);
    if (p.a_shared)  // both operands by descriptors, a [64, 16] K-major
        for (int m = 0; m < 64; m++)
            for (int k = 0; k < 16; k++) a[m * 16 + k] = operand(p, p.a_shared, k, m);
    for (int t = 0; !p.a_shared && t < 128; t++)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 2; j++)
                a[(t / 32 * 16 + (t & 31) / 4 + 8 * (i & 1)) * 16 + 2 * (t & 3) + j + 8 * (i >> 1)] =
                    widen_as(p.type, p.a[t][i] >> 16 * j & 0xFFFF);
    for (int t = 0; t < 128; t++)
        for (int i = 0; i < p.columns / 2; i++) {
            const int row = t / 32 * 16 + (t & 31) / 4 + 8 * (i >> 1 & 1), column = i / 4 * 8 + 2 * (t & 3) + (i & 1);
            double sum = p.add ? p.d[t][i] : 0.0f;
            for (int k = 0; k < 16; k++) sum += (double)a[row * 16 + k] * b[k * p.columns + column];
            p.d[t][i] = (float)sum;
        }
}
static void issue(float* d, const u32* a, u64 b, int columns, int rows_major, int add, int type,
                  u64 a_shared = 0) {
    Group& group = cpu.groups[cpu.now >> 7];
    Lane& lane = cpu.lanes[cpu.now];
    const int at = lane.issued++, thread = cpu.now & 127;
    if (at == (int)group.queue.size()) group.queue.push_back({{}, {}, b, columns, rows_major, add, type, a_shared});
    Product& p = group.queue[at];
    if (p.b != b || p.a_shared != a_shared || p.columns != columns || p.add != add)
        stop("threads of a warpgroup issue different products");
    p.d[thread] = d, p.a[thread] = a;
}
template <int TYPE> inline void wgmma_n64(float (&d)[32], const u32* a, u64 b, int add) {
    issue(d, a, b, 64, 0, add, TYPE);
}
template <int TYPE> inline void wgmma_n64_shared(float (&d)[32], u64 a, u64 b, int add) {
    issue(d, nullptr, b, 64, 0, add, TYPE, a);
}
template <int TYPE> inline void wgmma_n64_rows(float (&d)[32], const u32* a, u64 b, int add) {
    issue(d, a, b, 64, 1, add, TYPE);
}
template <int TYPE> inline void wgmma_n128_rows(float (&d)[64], const u32* a, u64 b, int add) {
    issue(d, a, b, 128, 1, add, TYPE);
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
    Group& group = cpu.groups[cpu.now >> 7];
    Lane& lane = cpu.lanes[cpu.now];
    if (lane.committed++ == (int)group.ends.size()) group.ends.push_back(lane.issued);
}
template <int N, int R> inline void wgmma_wait(float (&)[R]) {
    Group& group = cpu.groups[cpu.now >> 7];
    meet(group.meeting, 128);
    for (const int upto = (int)group.ends.size() - N; group.finished < upto; group.finished++)
        for (; group.done < group.ends[group.finished]; group.done++) carry_out(group.queue[group.done]);
    meet(group.meeting, 128);
}

// Threads that run only when no other can go on.
static int slow_from = 1 << 30;
extern "C" void slow_on_cpu(int from) { slow_from = from; }

static std::function<void()> kernel_now;
static void fiber() {
    until_stopped([] { kernel_now(), finish_stores(0); });
    cpu.fibers[cpu.now].done = true;
    swapcontext(&cpu.fibers[cpu.now].context, &cpu.main);
}
static void run_block(int threads) {
    cpu.threads = threads, cpu.barriers.clear(), cpu.later.clear();
    cpu.lanes.assign(threads, Lane());
    cpu.block = {}, flagged.loaded.clear();
    for (Meeting& m : cpu.named) m = {};
    for (Group& g : cpu.groups) g = Group();
    for (Exchange& w : cpu.warps) w = Exchange();
    memset(shared, 0x7F, SHARED_BYTES);
    cpu.fibers.resize(threads);
    for (Fiber& f : cpu.fibers) make_fiber(f, fiber);
    bool stuck = false;
    for (int left = threads, idle = 0; left;) {
        const long before = cpu.moves;
        left = 0;
        for (int t = 0; t < threads; t++) {
            left += t >= slow_from && !stuck && !cpu.fibers[t].done;
            if (cpu.fibers[t].done || (t >= slow_from && !stuck)) continue;
            cpu.now = threadIdx.x = t;
            resume(cpu.fibers[t], cpu.main);
            left += !cpu.fibers[t].done;
        }
        stuck = cpu.moves == before;
        idle = stuck ? idle + 1 : 0;
        if (left && idle > 50) stop("no thread can go on");
    }
    if (!cpu.later.empty()) stop("a copy that nobody waited for");
}
static void run_blocks(Axes grid, int threads, std::function<void()> kernel) {
    kernel_now = kernel, gridDim = grid, blockDim = {threads, 1, 1};
    for (int z = 0; z < grid.z; z++)
        for (int y = 0; y < grid.y; y++)
            for (int x = 0; x < grid.x; x++) blockIdx = {x, y, z}, run_block(threads);
}
static void launch_on_cpu(Axes grid, int threads, std::function<void()> kernel) {
    until_stopped([=] { run_blocks(grid, threads, kernel); });
}
