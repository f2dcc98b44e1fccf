// The words of kernels/gdn/hopper.cuh and decode_ptx.cuh that the decode kernels use, on a CPU (see cuda_on_cpu.cuh).
// Shared memory is static, so blocks run one after the other, from the first or from the last. Memory that a launch
// writes and reads through the read-only path (__ldg) stops the run. Which block touches a piece of a state is noted.
#pragma once
#include <functional>
#include <map>
#include <unordered_map>

#include "cuda_on_cpu.cuh"

#undef __shared__
#define __shared__ static
#define INLINE static inline

typedef unsigned int u32;
typedef unsigned short u16;
constexpr int BF16 = 0, FP16 = 1;

struct Grid { int x, y, z; };
static Grid own_grid;
static Grid own_block() {
    const int n = blockIdx.x;
    return {n % own_grid.x, n / own_grid.x % own_grid.y, n / own_grid.x / own_grid.y};
}
static float4 own_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
#define make_float4 own_float4
static float __uint_as_float(u32 x) { return float_of(x); }
static u32 __float_as_uint(float x) { return bits_of(x); }
static float __shfl_xor_sync(unsigned, float x, int step) { return shuffle_xor(x, step); }
static void __syncwarp() { sync_warp(); }
static int __shfl_sync(unsigned, int x, int lane) { return shuffle_int(x, lane); }
static unsigned __ballot_sync(unsigned, bool x) { return lanes_where(x); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) { return pick_bytes(a, b, selector); }
static int __popc(unsigned x) { return bits_set(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static float inverse_root(float x) { return 1 / sqrtf(x); }
static void named_sync(int, int threads) {
    if (threads != cpu.threads) stop("a barrier of some threads");
    sync_block();
}
static void wait_for_earlier_grid() {}
static void launch_dependents() {}
static u64 leave_first() { return 0; }

static std::vector<std::pair<const char*, const char*>> written;
template <class T> static T __ldg(const T* from) {
    for (const auto& range : written)
        if ((const char*)from >= range.first && (const char*)from < range.second) stop("__ldg of written memory");
    return global_read<T>(from);
}
template <int TYPE> static u32 pack_half(float low, float high) {
    return TYPE == BF16 ? pack_bf162(low, high) : pack_half2(low, high);
}
template <int TYPE> static float widen(u16 bits) { return TYPE == BF16 ? bf16_to_float(bits) : half_to_float(bits); }
static std::unordered_map<const char*, int> owners;  // block by 16 bytes of a state, since the last launch
static u64 contested;                                // accesses to what another block has touched
static void note_owner(const char* piece) {
    const auto [entry, first] = owners.insert({piece, (int)blockIdx.x});
    contested += !first && entry->second != (int)blockIdx.x;
}
extern "C" u64 owned_bytes() { return 16 * owners.size(); }
extern "C" u64 contested_accesses() { return contested; }
template <int HINT> static uint4 load_state(const char* from, u64) {
    note_owner(from);
    return global_read<uint4>(from);
}
template <int HINT> static void store_state(char* to, uint4 x, u64) {
    if ((uintptr_t)to % 16) stop("global address");
    note_owner(to);
    memcpy(to, &x, 16);
}
static void store_fp16(u16* to, float x) { *to = (u16)float_to_half(x); }
struct Fetch { u32 bytes; int block; };
static std::map<const char*, Fetch> prefetched;  // by address, since the last launch
static void prefetch_bulk(const void* from, u32 bytes) {
    if ((uintptr_t)from % 16 || bytes % 16) stop("bulk prefetch");
    bool inside = false;
    for (const auto& range : written) inside |= from >= range.first && (const char*)from + bytes <= range.second;
    if (!inside) stop("bulk prefetch of what the launch does not own");
    for (const auto& [begin, other] : prefetched)
        if (begin < (const char*)from + bytes && (const char*)from < begin + other.bytes)
            stop("bulk prefetch of the same twice");
    prefetched[(const char*)from] = {bytes, (int)blockIdx.x};
}
extern "C" u64 prefetched_bytes() {  // 0 where any of them are of a state that no block touched
    u64 sum = 0;
    for (const auto& [begin, fetch] : prefetched) {
        if (!owners.count(begin)) return 0;
        sum += fetch.bytes;
    }
    return sum;
}
extern "C" u64 bytes_prefetched_ahead(int blocks) {  // so many blocks before the one that touches their beginning
    u64 sum = 0;
    for (const auto& [begin, fetch] : prefetched)
        if (owners.count(begin) && owners[begin] - fetch.block == blocks) sum += fetch.bytes;
    return sum;
}
static u32 take_ticket(u32* counter) { return (*counter)++; }
static u32 load_u16(const u16* from) { return global_read<u16>(from); }
static u32 load_u32(const u32* from) { return global_read<u32>(from); }

static std::function<void()> own_call;
static void enter() { own_call(); }
template <class Kernel, class... Arguments>
static void start(Kernel kernel, int x, int y, int z, int threads, int order, Arguments... arguments) {
    own_grid = {x, y, z};
    prefetched.clear(), owners.clear(), contested = 0;
    own_call = [=] { kernel(arguments...); };
    launch_on_cpu(enter, x * y * z, threads, 0, order);
}
extern "C" void writes(const char* begin, u64 bytes) {
    if (!bytes) written.clear();
    else written.push_back({begin, begin + bytes});
}

#define blockIdx own_block()
#define gridDim own_grid
