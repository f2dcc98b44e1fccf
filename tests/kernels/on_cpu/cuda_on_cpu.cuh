// The words of kernels/kv/decode_ptx.cuh on a CPU, so that decode.cu runs without a GPU: every thread of a block is a
// fiber; collectives of a warp and barriers of the block switch fibers; blocks run one after the other. Products follow
// the fragment layouts of the PTX manual. Bulk copies run when they are issued (mode 0: an early overwrite shows) or
// when their barrier is waited for, the buffer holding junk until then (mode 1: a read too early shows; some warps run
// at a half, a third or a quarter of the others' speed, so that one that should have waited is early).
#pragma once
#include "fibers_on_cpu.cuh"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __shared__
#define __align__(n)
#define __launch_bounds__(threads, blocks)

typedef unsigned long long u64;
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

constexpr unsigned SHARED = 232448;
struct Axis { int x; };
struct Block {
    int number, arrived_start;
    Meeting all, consumers, producers;
    std::vector<Fiber> fibers;
    std::vector<Exchange> warps;
    std::vector<Copy> later;
    ucontext_t main;
    int current, threads, mode;
    long idle, turns;
    unsigned char shared[SHARED];
    Barrier barriers[SHARED / 8];
};
static Block* running;
#define cpu (*running)
static Axis threadIdx, blockIdx, gridDim;

static std::string position() {
    return "block " + std::to_string(blockIdx.x) + " thread " + std::to_string(cpu.current);
}
static void others() {
    const int me = cpu.current;
    swapcontext(&cpu.fibers[me].context, &cpu.main);
    threadIdx.x = me;
}

static void moved() { cpu.idle = 0; }
static int own_lane() { return cpu.current & 31; }
static Exchange& own_exchange() { return cpu.warps[cpu.current >> 5]; }
static void sync_warp() { exchange({0}); }
static void sync_block() { meet(cpu.all, cpu.threads); }
static void meet_invited(Meeting& m, int threads, bool invited) {
    if (!invited) stop("a barrier of others");
    meet(m, threads);
}
template <int THREADS> static void sync_consumers() {
    meet_invited(cpu.consumers, THREADS, cpu.current < THREADS);
}
template <int THREADS> static void sync_producers() {
    meet_invited(cpu.producers, THREADS, cpu.current >= cpu.threads - THREADS);
}

template <int THREADS> static void arrive_at_start() {
    if (++cpu.arrived_start > THREADS) stop("a barrier of others");
}
template <int THREADS> static void sync_at_start() {
    for (arrive_at_start<THREADS>(); cpu.arrived_start < THREADS;) others();
    cpu.idle = 0;
}

static unsigned shared_base(const void*) { return 0; }
static unsigned char* shared_at(unsigned a, unsigned bytes) {
    if (a % bytes || a + bytes > SHARED) stop("shared address");
    return cpu.shared + a;
}
template <class T> static T shared_read(unsigned a) {
    T x;
    memcpy(&x, shared_at(a, sizeof x), sizeof x);
    return x;
}
static uint4 lds128(unsigned a) { return shared_read<uint4>(a); }
static uint2 lds64(unsigned a) { return shared_read<uint2>(a); }
static unsigned lds32(unsigned a) { return shared_read<unsigned>(a); }
static unsigned lds16(unsigned a) { return shared_read<unsigned short>(a); }
static void sts128(unsigned a, uint4 x) { memcpy(shared_at(a, 16), &x, 16); }
static void sts64(unsigned a, uint2 x) { memcpy(shared_at(a, 8), &x, 8); }
static void sts32(unsigned a, unsigned x) { memcpy(shared_at(a, 4), &x, 4); }

template <class T> static T global_read(const void* p) {
    if ((uintptr_t)p % sizeof(T)) stop("global address");
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
static float4 load_shared_by_gpu(const float* p) { return global_read<float4>(p); }
static int load_i32(const int* p) { return *p; }
static void prefetch(const void*) {}

static Barrier& barrier_at(unsigned a) {
    if (a % 8 || a >= SHARED) stop("barrier address");
    return cpu.barriers[a / 8];
}
static void barrier_init(unsigned a, unsigned arrivals) { barrier_at(a) = new_barrier(arrivals); }
static void barrier_init_done() {}
static void barrier_expect(unsigned a, unsigned bytes) { expect(barrier_at(a), bytes); }
static void barrier_arrive(unsigned a) { barrier_expect(a, 0); }
// What bulk copies may read, where a test has said so.
struct Extent { const char* begin; u64 bytes; };
static std::vector<Extent> readable;
extern "C" void allow_copies(const char* begin, u64 bytes) {
    if (!bytes) readable.clear();
    else readable.push_back({begin, bytes});
}
static long most_copies;  // of one block, under way at once (mode 1)
extern "C" long most_under_way() {
    const long most = most_copies;
    most_copies = 0;
    return most;
}
static void copy_later(unsigned to, const void* from, unsigned bytes, unsigned barrier, std::function<void()> write) {
    bool inside = readable.empty();
    const char* at = (const char*)from;
    for (const Extent& x : readable) inside |= at >= x.begin && at + bytes <= x.begin + x.bytes;
    if (!inside) stop("bulk copy from outside the cache");
    const Copy c{&barrier_at(barrier), bytes, write};
    if (cpu.mode == 0) return land(c);
    memset(cpu.shared + to, 0x7F, bytes);
    cpu.later.push_back(c);
    most_copies = max(most_copies, (long)cpu.later.size());
}
static void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    if (to % 16 || bytes % 16 || (uintptr_t)from % 16 || to + bytes > SHARED) stop("bulk copy");
    copy_later(to, from, bytes, barrier, [=] { memcpy(cpu.shared + to, from, bytes); });
}
struct TensorMap { const char* from; int rows, row_bytes, box_rows, room[27]; };
static_assert(sizeof(TensorMap) == 128, "as the driver's");
static void prefetch_map(const TensorMap*) {}
static void tensor_copy(unsigned to, const TensorMap* map, int row, unsigned barrier) {
    const TensorMap m = *map;
    const unsigned bytes = m.box_rows * m.row_bytes;
    if (to % 1024 || to + bytes > SHARED || row % m.box_rows || row >= m.rows) stop("tensor copy");
    const char* from = m.from + (long)row * m.row_bytes;
    copy_later(to, from, bytes, barrier, [=] {
        for (unsigned i = 0; i < bytes; ++i) {
            const unsigned token = i / m.row_bytes, in = i % m.row_bytes;
            const unsigned at = to + in / 128 * m.box_rows * 128 + token * 128 + in % 128;
            cpu.shared[at ^ (at >> 7 & 7) << 4] = from[i];
        }
    });
}
static void barrier_wait(unsigned a, unsigned parity) {
    const Barrier& b = barrier_at(a);
    while (waits(b, parity)) {
        land_those_of(b, cpu.later);
        if (waits(b, parity)) others();
    }
}
static void fence_async_shared() {}
static void fence_async_global() {}

static unsigned pack_half2(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
static unsigned pack_bf162(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }
static unsigned e4m3_to_half2(unsigned x) { return pack_half2(e4m3_to_float(x & 255), e4m3_to_float(x >> 8 & 255)); }
static unsigned sub_half2(unsigned a, unsigned b) {
    return pack_half2(half_to_float(a) - half_to_float(b), half_to_float(a >> 16) - half_to_float(b >> 16));
}
static unsigned mul_half2(unsigned a, unsigned b) {
    return pack_half2(half_to_float(a) * half_to_float(b), half_to_float(a >> 16) * half_to_float(b >> 16));
}
static float exp2_fast(float x) { return exp2f(x); }
static unsigned permute(unsigned a, unsigned b, unsigned selector) { return pick_bytes(a, b, selector); }
static void mma_f16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    product(half_to_float, c, a0, a1, a2, a3, b0, b1);
}
static void mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    product(bf16_to_float, c, a0, a1, a2, a3, b0, b1);
}
static unsigned transpose8x8(unsigned own) { return transposed_8x8(own); }
static float shuffle_xor(float x, int mask) { return float_of(exchange({bits_of(x)}).from(own_lane() ^ mask)); }
static float shuffle_from(float x, int lane) { return float_of(exchange({bits_of(x)}).from(lane)); }
static int shuffle_up(int x, int by) {
    return (int)exchange({(unsigned)x}).from(own_lane() >= by ? own_lane() - by : own_lane());
}
static int shuffle_int(int x, int lane) { return (int)exchange({(unsigned)x}).from(lane); }
static bool any_lane(bool x) {
    const Given all = exchange({x});
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= all.from(i) != 0;
    return any;
}
static unsigned lanes_where(bool x) {
    const Given all = exchange({x});
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= all.from(i) << i;
    return mask;
}
static int bits_set(unsigned x) { return __builtin_popcount(x); }
static unsigned count_one(unsigned* p) { return (*p)++; }
template <int COUNT> static void registers_up() {}
template <int COUNT> static void registers_down() {}

static void (*kernel_of_fiber)();
static void fiber() {
    until_stopped(kernel_of_fiber);
    cpu.fibers[cpu.current].done = true;
    swapcontext(&cpu.fibers[cpu.current].context, &cpu.main);
}
// One launch. Shared memory starts as junk; odd blocks run their threads in reverse order. order: 0 one block after the
// other, 1 from the last, 2 all in turns.
static void start_block(Block& b, int number, int grid, int threads, int mode) {
    running = &b;
    cpu.number = number, cpu.threads = threads, cpu.mode = mode, cpu.idle = 0, cpu.turns = 0;
    cpu.all = {}, cpu.consumers = {}, cpu.producers = {}, cpu.arrived_start = 0;
    cpu.later.clear(), cpu.fibers.resize(threads);
    cpu.warps.assign(threads / 32, Exchange());
    memset(cpu.shared, 0x7F, SHARED);
    memset((void*)cpu.barriers, 0, sizeof cpu.barriers);
    for (Fiber& f : cpu.fibers) make_fiber(f, fiber);
}
static int one_turn() {  // of the running block's threads; how many are left
    int left = 0;
    blockIdx.x = cpu.number, ++cpu.idle, ++cpu.turns;
    for (int j = 0; j < cpu.threads; ++j) {
        const int me = cpu.number & 1 ? cpu.threads - 1 - j : j;
        if (cpu.fibers[me].done) continue;
        if (cpu.mode && cpu.turns % (1 + (me / 32 + cpu.number) % 4)) {  // warps of different speeds
            ++left;
            continue;
        }
        cpu.current = threadIdx.x = me;
        resume(cpu.fibers[me], cpu.main);
        left += !cpu.fibers[me].done;
    }
    if (!left && !cpu.later.empty()) stop("a copy that nobody waited for");
    return left;
}
static void run_blocks(void (*kernel)(), int grid, int threads, int mode, int order) {
    kernel_of_fiber = kernel, gridDim.x = grid;
    std::vector<Block> blocks(order == 2 ? grid : 1);
    if (order == 2) {
        for (int i = 0; i < grid; ++i) start_block(blocks[i], i, grid, threads, mode);
        for (bool left = true; left;) {
            left = false;
            long idle = 1000;
            for (Block& b : blocks) {
                running = &b;
                if (!b.fibers.empty() && !one_turn()) b.fibers.clear();
                if (!b.fibers.empty()) left = true, idle = min(idle, b.idle);
            }
            if (left && idle > 200) stop("no block can go on");
        }
    } else {
        for (int i = 0; i < grid; ++i) {
            start_block(blocks[0], order ? grid - 1 - i : i, grid, threads, mode);
            while (one_turn())
                if (cpu.idle > 200) stop("no thread can go on");
        }
    }
}
static void launch_on_cpu(void (*kernel)(), int grid, int threads, int mode, int order) {
    until_stopped([=] { run_blocks(kernel, grid, threads, mode, order); });
}
