// kernels/sm90 on a CPU: this header stands in for the instructions of its ptx.cuh and mma.cuh and is included first;
// pipeline, scheduler, epilogue and the kernels run as they are. What an instruction does stands in machine.cuh, which is
// compiled once for all kernels.
//
// Every thread is a fiber. What a device may do late is done as late as the barriers allow: copies land at random, or
// not before their barrier is waited for (the buffer holds junk until then), wgmma reads fragments and shared memory
// when it is waited for, stores read shared memory when their group is. So a fragment overwritten, a stage released too
// early or a wrong phase gives wrong numbers or a deadlock, and what must never happen stops the launch:
//
//   proxies    bulk copies and wgmma on shared memory that a thread has stored to without a fence_proxy_async_shared
//   mbarriers  one that nobody set up, or no mbarrier_init_fence has published; an arrival too many; copies or products
//              in flight at the end; a deadlock
//   addresses  what lies outside shared memory or is not aligned as the instruction wants it
//
// Layouts are the PTX manual's: descriptors are read, not restated. Not shown: time, and the tensor cores' rounding.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

// Not <cmath>, <memory> and <string>: g++ instantiates their templates anew in every build, for 0.1 s, though this
// header is precompiled. The C header has the functions.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>
using std::max;
using std::min;

#define SM90_ON_CPU
#define DEVICE inline
#define DYNAMIC_SHARED(name) unsigned char* name = cpu.ctas[cpu.now->cta].shared
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n)
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Axes {
    int x, y, z;
};
// Of 16-bit elements; boxes have box_rows rows of 64 elements.
struct alignas(64) TensorMap {
    unsigned char* from;
    long long rows, columns, box_rows, box_words;  // the last of a word_map, whose columns are words
    long long box_bytes;                           // of a row of a box in shared memory, its swizzle: 64, or 0 for 128
    char unused[80];
};
static_assert(sizeof(TensorMap) == 128, "as the driver's");

// Each library has a machine of its own, and calls within it need no table.
#pragma GCC visibility push(hidden)
extern Axes threadIdx, blockIdx, blockDim, gridDim;

// ---- a launch that must not go on ------------------------------------------------------------------------------------
extern const char* why_stopped;  // null where nothing was
[[noreturn]] void stop(const char* why, u32 address = 0);

// ---- fibers, CTAs, barriers -----------------------------------------------------------------------------------------
// Where `count` threads meet. Who only arrives does not wait.
struct Meeting {
    int here = 0;
    u32 generation = 0;
};
// A phase ends when no arrival is pending and no bytes are.
struct Barrier {
    int count, pending;
    long bytes;
    u32 phase;
    int thread;  // that set it up and has not published it
};
struct Exchange {  // what 32 lanes gave; double-buffered, as a lane is at most one exchange ahead
    Meeting meeting;
    u64 given[2][32][8];
};
struct Fiber {
    ucontext_t first;
    jmp_buf later;
    bool started, done;
    int cta, thread;
    const Meeting* meeting;  // what it waits for, with the generation before
    u32 generation;
    Barrier* barrier;  // or with the parity
    u32 parity;
    bool waited, cluster_arrived;  // for the grid ahead; at the cluster's barrier
    u32 cluster_generation;
    std::vector<u32> unfenced;                 // words of shared memory that it has stored to since its last fence
    std::deque<std::function<void()>> stores;  // bulk groups that have yet to read shared memory
    long issued, committed;                    // wgmmas, groups
};
struct Copy {
    Barrier* barrier;
    u32 bytes;
    std::function<void()> write;
    int cta;
    bool bulk;
};
struct Product {
    float* d[128];
    const u32* a[128];
    u64 a_shared, b;
    int n, scale_d;
    enum Type { F16, BF16, E4M3 } type;
    bool mn_major;
};
struct Warpgroup {
    Meeting meeting;
    std::deque<Product> queue;
    long first = 0;           // the number of queue[0]
    std::deque<long> groups;  // where each ends
    long first_group = 0;
};
constexpr u32 MOST_SHARED = 232448;
struct Cta {
    int x, y, z;
    unsigned char* shared;
    std::vector<u16> stored;  // per word: 1 + the thread that has stored to it and not fenced
    std::map<u32, Barrier> barriers;
    Meeting block, named[16];
    Warpgroup warpgroups[8];
    Exchange warps[32];
    int bulk_issued, bulk_in_flight;
    int registers[8] = {};  // of a thread of each warpgroup by setmaxnreg; 0: as launched
};
// When copies land: at random, when they are issued (an early overwrite shows), when their barrier is waited for (an
// early read shows).
enum Copies { AT_RANDOM, AT_ISSUE, AT_WAIT };
struct Launch {
    Axes grid;
    int threads;
    int cluster = 1;
    int at_once = 1;  // CTAs that run side by side, a multiple of the cluster
    u32 shared_bytes = MOST_SHARED;
    int seed = -1;  // of the order of warps; negative: all in turn
    Copies copies = AT_RANDOM;
    bool backwards = false;  // the last blocks first
    bool uneven = false;     // warps of different speeds
};
struct Cpu {
    Launch launch;
    std::vector<Fiber> fibers;
    std::vector<Cta> ctas;
    std::vector<Meeting> clusters;
    std::vector<Copy> copies;
    Fiber* now;
    ucontext_t main;
    jmp_buf scheduler;
    u64 moves;  // whatever gets the program on
};
extern Cpu cpu;
// `kernel` in every thread of every block.
void launch_on_cpu(const Launch& launch, std::function<void()> kernel);

void others();  // let them go on
struct Given {
    const u64 (*x)[8];
    u32 from(int lane, int i = 0) const { return (u32)x[lane][i]; }
};
Given exchange(std::initializer_list<u64> values);

// ---- shared memory --------------------------------------------------------------------------------------------------
// An address is CTA << 24 | offset.
unsigned char* place(u32 address, u32 bytes, u32 align = 1);
u32 shared_address(const void* p);
void note_store(u32 address, u32 bytes);  // by this thread, of the generic proxy
void fence_proxy_async_shared();
template <class T>
static T load_shared(u32 at) {
    T x;
    memcpy(&x, place(at, sizeof x, sizeof x), sizeof x);
    return x;
}
template <class T>
static void store_shared(u32 at, const T& x) {
    memcpy(place(at, sizeof x, sizeof x), &x, sizeof x), note_store(at, sizeof x);
}
template <class T>
struct AsyncShared {
    void* p;
    void operator=(const T& x) const { store_shared(shared_address(p), x); }
};
#define ASYNC_SHARED(T, p) \
    AsyncShared<T> { (void*)(p) }
uint4 lds128(u32 at);
float4 lds_float4(u32 at);
uint2 lds64(u32 at);
u32 lds32(u32 at);
u32 lds16(u32 at);
void sts128(u32 at, uint4 x);
void sts64(u32 at, uint2 x);
void sts32(u32 at, u32 x);

// ---- mbarriers ------------------------------------------------------------------------------------------------------
void mbarrier_init(u32 address, u32 arrivals);
void mbarrier_init_fence();
void mbarrier_arrive_expect_tx(u32 address, u32 bytes);
void mbarrier_arrive(u32 address);
void mbarrier_arrive_cluster(u32 address);
void mbarrier_wait(u32 address, u32 parity);
void mbarrier_wait_cluster(u32 address, u32 parity);
u32 once_loaded(u32 barrier, u32 word, u32 zero);

// ---- bulk copies ----------------------------------------------------------------------------------------------------
// What tests want to know of accesses to global memory: by whom is in cpu.now.
extern std::function<void(const void*, u32)> on_async_read, on_prefetch, on_state, on_read;  // the last of any load
extern std::function<void()> on_store_done;
void tma_load_1d(u32 to, const void* from, u32 bytes, u32 barrier);
void tma_load_1d(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy);
void tma_load_1d_evict_first(u32 to, const void* from, u32 bytes, u32 barrier);
static u64 evict_first_policy() { return 0; }
void tma_load_2d(u32 to, const TensorMap* map, int column, int row, u32 barrier);
void tma_load_2d_multicast(u32 to, const TensorMap* map, int column, int row, u32 barrier);
void tma_load_rows(u32 to, const TensorMap* map, int row, u32 barrier);
void tma_load_words(u32 to, const TensorMap* map, int word, int row, u32 barrier, u64 policy = 0);
void tma_store_1d(void* to, u32 from, u32 bytes);
void tma_store_2d(const TensorMap* map, int column, int row, u32 from);
void stores_read(u32 but);
template <int N>
static void tma_store_wait_read() {
    stores_read(N);
}
static void tma_store_wait_all() { stores_read(0); }
static void prefetch_tensor_map(const TensorMap*) {}
void tma_prefetch_1d(const void* from, u32 bytes);
static void prefetch_l2(const void*) {}
void cp_async_16(u32 to, const void* from, bool live);
static void cp_async_commit() {}
template <int N>
static void cp_async_wait() {}

// ---- global memory --------------------------------------------------------------------------------------------------
uint4 ldg128(const void* p);
uint4 ldg128(const void* p, u64 policy);
u32 ldg32(const void* p);
u32 ldg16(const void* p);
static float ldg_float(const float* p) { return *p; }
static int ldg_nc_int(const int* p) { return *p; }
uint4 ldg128_nc(const void* p);
float4 ldg_cg_float4(const void* p);
void stg128(void* p, uint4 x);
void stg128(void* p, uint4 x, u64 policy);
// What the launch writes: the read-only path must not be taken there.
extern std::vector<std::pair<const char*, const char*>> written;
void read_only(const void* p, u32 bytes);
template <class T>
static T __ldg(const T* p) {
    read_only(p, sizeof *p);
    return *p;
}
extern std::function<void(const u32*)> on_acquire;  // a look at a flag
extern std::function<void(u32*, u32)> on_release;
u32 ld_acquire(const u32* p);
void st_release(u32* p, u32 x);
void st_relaxed(u32* p, u32 x);
float4 ld_relaxed(const float4* p);
void st_relaxed(float4* p, const float4& x);
u32 atomic_add_acq_rel(u32* p, u32 x);
u32 atomic_add_relaxed(u32* p, u32 x);
void spin_pause(int&);
extern std::function<void()> on_global_fence;
void fence_proxy_async_global();

// ---- named barriers, clusters, warps, launches ----------------------------------------------------------------------
void __syncthreads();
void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);
void named_barrier_sync_unaligned(int id, int threads);
void named_barrier_arrive_unaligned(int id, int threads);
u32 cluster_rank();
void cluster_arrive();
void cluster_wait();
u32 map_to_rank(u32 local, u32 rank);
void st_async(u32 remote, const float4& x, u32 barrier);
u32 __float_as_uint(float x);
float __uint_as_float(u32 x);
void __syncwarp();
int __shfl_sync(u32, int x, int lane);
u32 __shfl_sync(u32, u32 x, int lane);
float __shfl_sync(u32, float x, int lane);
u32 __shfl_xor_sync(u32, u32 x, int mask);
float __shfl_xor_sync(u32, float x, int mask);
int __shfl_up_sync(u32, int x, int by);
float __shfl_up_sync(u32, float x, int by);
float shuffle_xor(float x, int mask);
u32 shuffle_xor(u32 x, int mask);
u32 warp_ballot(bool x);
u32 __ballot_sync(u32, bool x);
bool warp_any(bool x);
u32 warp_max(u32 x);
template <class T>
static T warp_uniform(T x) {
    const u32 first = exchange({(u64)x}).from(0);
    if ((u32)x != first) stop("lanes of a warp differ");
    return x;
}
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
void set_registers(int count);  // waits until the CTA's other warpgroups leave as many
template <int COUNT>
static void warpgroup_reg_alloc() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256);
    set_registers(COUNT);
}
template <int COUNT>
static void warpgroup_reg_dealloc() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256);
    set_registers(COUNT);
}
static void launch_dependent_grids() {}
void wait_on_dependent_grids();
static void spin_clocks(u32) {}
template <class T>
static T opaque(T x) {
    return x;
}
static u32 kept(u32 x) { return x; }
template <class T>
static void pin(T&) {}

// ---- conversions ----------------------------------------------------------------------------------------------------
float half_to_float(u32 bits);
u32 float_to_half(float x);
float bf16_to_float(u32 bits);
u32 float_to_bf16(float x);
u32 pack_half2(float low, float high);
u32 pack_bf162(float low, float high);
u32 pack_e4m3x2(float low, float high);
u32 e4m3_to_half2(u32 x);
template <bool BF16>
static u16 round16(float x) {
    return BF16 ? float_to_bf16(x) : float_to_half(x);
}
void stg_half(u16* p, float x);
u32 mul_bf162(u32 a, u32 b);
u32 mul_half2(u32 a, u32 b);
template <bool BF16>
static u32 mul2(u32 a, u32 b) {
    return BF16 ? mul_bf162(a, b) : mul_half2(a, b);
}
u32 sub_half2(u32 a, u32 b);
template <int HALF>
static u32 broadcast_half(u32 x) {
    return (x >> 16 * HALF & 0xFFFF) * 0x10001u;
}
u32 max_u16x2(u32 a, u32 b);
static float exp2_fast(float x) { return exp2f(x); }
static float rsqrt_fast(float x) { return 1 / sqrtf(x); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fdividef(float a, float b) { return a / b; }
u32 prmt(u32 a, u32 b, u32 selector);
u32 __byte_perm(u32 a, u32 b, u32 selector);
static u32 select_bits(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }
static u32 mask_and_set(u32 x, u32 mask, u32 ones) { return (x & mask) | ones; }
static u32 rotate_right(u32 x, u32 by) { return x >> by | x << (32 - by); }

// ---- matrices of a warp ---------------------------------------------------------------------------------------------
void ldmatrix_x4(u32 (&x)[4], u32 row);
void ldmatrix_x4_trans(u32 (&x)[4], u32 row);
void stmatrix_x4_trans(u32 row, u32 m0, u32 m1, u32 m2, u32 m3);
void stmatrix_x2_trans(u32 row, u32 m0, u32 m1);
u32 movmatrix_trans(u32 own);
void mma_of_halves(bool bf16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <bool BF16>
static void mma_16816(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_of_halves(BF16, c, a0, a1, a2, a3, b0, b1);
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
static void wgmma_fence() {}
void wgmma_commit();
void products_done(int but);
template <int PENDING>
static void wgmma_wait() {
    products_done(PENDING);
}
void issue(float* d, const u32* a, u64 a_shared, u64 b, int n, bool mn_major, int scale_d, Product::Type type);
template <int N, bool BF16, bool MN_MAJOR = false>
static void wgmma_rs(float (&d)[N / 2], const u32* a, u64 b, int scale_d = 1) {
    issue(d, a, 0, b, N, MN_MAJOR, scale_d, BF16 ? Product::BF16 : Product::F16);
}
template <bool BF16>
static void wgmma_ss_n64(float (&d)[32], u64 a, u64 b, int scale_d) {
    issue(d, nullptr, a, b, 64, false, scale_d, BF16 ? Product::BF16 : Product::F16);
}
template <int N>
static void wgmma_rs_e4m3(float (&d)[N / 2], const u32* a, u64 b, int scale_d) {
    issue(d, a, 0, b, N, false, scale_d, Product::E4M3);
}
#pragma GCC visibility pop
