// What the instructions of sm90.cuh do, and the launch: compiled once, linked into each kernel's library.
#include "sm90.cuh"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

Axes threadIdx, blockIdx, blockDim, gridDim;
Cpu cpu;

// ---- a launch that must not go on ------------------------------------------------------------------------------------
// It ends with a reason, which the host asks for (stand_in.py): an abort would take the whole test run along. The fibers
// of a launch that was stopped are never resumed.
struct Stop {
    std::string why;
};
const char* why_stopped;
static std::string position() {
    std::string at = "block " + std::to_string(blockIdx.x);
    if (gridDim.y * gridDim.z > 1) at += " " + std::to_string(blockIdx.y) + " " + std::to_string(blockIdx.z);
    return at + " thread " + std::to_string(threadIdx.x);
}
[[noreturn]] static void stop(const std::string& why, u32 address = 0) {
    char at[32] = "";
    if (address) snprintf(at, sizeof at, " (%x)", address);
    throw Stop{why + at + ": " + position()};
}
void stop(const char* why, u32 address) { stop(std::string(why), address); }
static std::string first_why;
template <class Run>
static void until_stopped(Run run) {
    try {
        run();
    } catch (const Stop& s) {
        if (!why_stopped) first_why = s.why, why_stopped = first_why.c_str();
    }
}
extern "C" const char* why_it_stopped() {  // since it was last asked; empty if it was not
    const char* told = std::exchange(why_stopped, nullptr);
    return told ? told : "";
}

// ---- fibers, CTAs, barriers -----------------------------------------------------------------------------------------
static std::function<void()> kernel_of_launch;
static int slow_from = 1 << 30;  // threads that run only when no other can go on
extern "C" void slow_on_cpu(int from) { slow_from = from; }
static int rounds_in_flight = 3;  // of the scheduler, that a copy takes on average
extern "C" void slow_copies() { rounds_in_flight = 50; }
// Bulk copies of the CTA that had most, in any launch: issued when it last read global memory, and in flight at once.
static int most_before_loads, most_in_flight;
extern "C" int copies_before_loads() { return std::exchange(most_before_loads, 0); }
extern "C" int copies_in_flight() { return std::exchange(most_in_flight, 0); }

static Cta& own_cta() { return cpu.ctas[cpu.now->cta]; }
static int own_lane() { return cpu.now->thread % 32; }
static void moved() { cpu.moves++; }
void others() {
    if (!_setjmp(cpu.now->later)) _longjmp(cpu.scheduler, 1);
}
// A CTA starts with what an SM's 65,536 leave each thread in steps of 8, at most 248, and gets no more: a kernel whose
// warpgroups ask for more hangs on the GPU as soon as nobody exits.
void set_registers(int count) {
    Cta& cta = own_cta();
    const int warpgroups = blockDim.x / 128, mine = threadIdx.x / 128;
    const int launched = min(248, (int)(65536 / blockDim.x) / 8 * 8);
    const auto held = [&] {
        int sum = count;
        for (int i = 0; i < warpgroups; i++)
            if (i != mine) sum += cta.registers[i] ? cta.registers[i] : launched;
        return sum;
    };
    while (held() > launched * warpgroups) others();
    cta.registers[mine] = count;
    moved();
}
static void arrive(Meeting& m, int count) {
    moved();
    if (++m.here == count) m.here = 0, m.generation++;
}
static void wait_for(const Meeting& m, u32 before) {
    while (m.generation == before) {
        cpu.now->meeting = &m, cpu.now->generation = before;
        others();
    }
}
static void meet(Meeting& m, int count) {
    const u32 before = m.generation;
    arrive(m, count);
    wait_for(m, before);
}
Given exchange(std::initializer_list<u64> values) {
    Exchange& e = own_cta().warps[cpu.now->thread / 32];
    const u32 side = e.meeting.generation & 1;
    std::copy(values.begin(), values.end(), e.given[side][own_lane()]);
    meet(e.meeting, 32);
    return {e.given[side]};
}

// ---- shared memory --------------------------------------------------------------------------------------------------
static u32 in_cta(u32 address, u32 cta) { return (address & 0xFFFFFF) | cta << 24; }
unsigned char* place(u32 address, u32 bytes, u32 align) {
    const u32 cta = address >> 24, at = address & 0xFFFFFF;
    if (cta >= cpu.ctas.size() || at + bytes > cpu.launch.shared_bytes) stop("outside shared memory", address);
    if (at % align) stop("shared address not aligned", address);
    return cpu.ctas[cta].shared + at;
}
u32 shared_address(const void* p) {
    const long at = (const unsigned char*)p - own_cta().shared;
    if (at < 0 || at > (long)cpu.launch.shared_bytes) stop("no pointer to shared memory");
    return (u32)at | (u32)cpu.now->cta << 24;
}
void note_store(u32 address, u32 bytes) {
    Cta& cta = cpu.ctas[address >> 24];
    for (u32 word = (address & 0xFFFFFF) / 4; word < ((address & 0xFFFFFF) + bytes + 3) / 4; word++) {
        cta.stored[word] = cpu.now->thread + 1;
        cpu.now->unfenced.push_back((address >> 24) << 24 | word);
    }
}
// The async proxy reads or overwrites this range.
static void check_fenced(u32 address, u32 bytes) {
    const Cta& cta = cpu.ctas[address >> 24];
    for (u32 word = (address & 0xFFFFFF) / 4; word < ((address & 0xFFFFFF) + bytes + 3) / 4; word++)
        if (cta.stored[word])
            stop("no proxy fence since thread " + std::to_string(cta.stored[word] - 1) + " stored", 4 * word);
}
void fence_proxy_async_shared() {
    for (u32 word : cpu.now->unfenced) {
        u16& by = cpu.ctas[word >> 24].stored[word & 0xFFFFFF];
        if (by == cpu.now->thread + 1) by = 0;
    }
    cpu.now->unfenced.clear();
}
uint4 lds128(u32 at) { return load_shared<uint4>(at); }
float4 lds_float4(u32 at) { return load_shared<float4>(at); }
uint2 lds64(u32 at) { return load_shared<uint2>(at); }
u32 lds32(u32 at) { return load_shared<u32>(at); }
u32 lds16(u32 at) { return load_shared<u16>(at); }
void sts128(u32 at, uint4 x) { store_shared(at, x); }
void sts64(u32 at, uint2 x) { store_shared(at, x); }
void sts32(u32 at, u32 x) { store_shared(at, x); }

// ---- mbarriers ------------------------------------------------------------------------------------------------------
static Barrier& barrier_at(u32 address) {
    auto& barriers = cpu.ctas[address >> 24].barriers;
    const auto found = barriers.find(address & 0xFFFFFF);
    if (found == barriers.end()) stop("a barrier nobody set up", address);
    if (found->second.thread >= 0 && found->second.thread != cpu.now->thread) stop("a barrier not published", address);
    return found->second;
}
static void settle(Barrier& b) {
    moved();
    if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
void mbarrier_init(u32 address, u32 arrivals) {
    place(address, 8, 8);
    if (!arrivals) stop("a barrier without arrivals", address);
    cpu.ctas[address >> 24].barriers[address & 0xFFFFFF] = {(int)arrivals, (int)arrivals, 0, 0, cpu.now->thread};
}
void mbarrier_init_fence() {
    for (auto& [at, b] : own_cta().barriers)
        if (b.thread == cpu.now->thread) b.thread = -1;
}
void mbarrier_arrive_expect_tx(u32 address, u32 bytes) {
    Barrier& b = barrier_at(address);
    if (!b.pending) stop("an arrival too many", address);
    b.bytes += bytes, b.pending--;
    settle(b);
}
void mbarrier_arrive(u32 address) { mbarrier_arrive_expect_tx(address, 0); }
void mbarrier_arrive_cluster(u32 address) { mbarrier_arrive(address); }
static void land(const Copy& c) {
    c.write();
    if (c.bulk) cpu.ctas[c.cta].bulk_in_flight--;
    c.barrier->bytes -= c.bytes, settle(*c.barrier);
}
static void land_those_of(const Barrier& b) {
    if (!b.bytes) return;
    std::vector<Copy> stay, go;
    for (const Copy& c : cpu.copies) (c.barrier == &b ? go : stay).push_back(c);
    cpu.copies = stay;
    for (const Copy& c : go) land(c);
}
void mbarrier_wait(u32 address, u32 parity) {
    Barrier& b = barrier_at(address);
    while (b.phase == parity) {
        if (cpu.launch.copies == AT_WAIT) land_those_of(b);
        if (b.phase != parity) break;
        cpu.now->barrier = &b, cpu.now->parity = parity;
        others();
    }
}
void mbarrier_wait_cluster(u32 address, u32 parity) { mbarrier_wait(address, parity); }
// With another zero it would be another barrier.
u32 once_loaded(u32 barrier, u32 word, u32 zero) {
    if (zero) stop("moves the barrier", barrier);
    return barrier;
}

// ---- bulk copies ----------------------------------------------------------------------------------------------------
std::function<void(const void*, u32)> on_async_read, on_prefetch, on_state, on_read;
static void copy_later(u32 to, u32 bytes, u32 barrier, bool bulk, std::function<void()> write) {
    place(to, bytes, 16), moved();
    const Copy c{&barrier_at(barrier), bytes, write, (int)(to >> 24), bulk};
    Cta& cta = cpu.ctas[to >> 24];
    if (bulk) {
        check_fenced(to, bytes);
        cta.bulk_issued++, most_in_flight = max(most_in_flight, ++cta.bulk_in_flight);
    }
    if (cpu.launch.copies == AT_ISSUE) return land(c);
    if (cpu.launch.copies == AT_WAIT) memset(place(to, bytes), 0x7F, bytes);
    cpu.copies.push_back(c);
}
static void async_reads(const void* from, u32 bytes) {
    if (on_async_read) on_async_read(from, bytes);
}
void tma_load_1d(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (bytes % 16 || (uintptr_t)from % 16 || !bytes) stop("bulk copy not on 16 bytes", to);
    async_reads(from, bytes);
    copy_later(to, bytes, barrier, true, [=] { memcpy(place(to, bytes), from, bytes); });
}
void tma_load_1d(u32 to, const void* from, u32 bytes, u32 barrier, u64) { tma_load_1d(to, from, bytes, barrier); }
void tma_load_1d_evict_first(u32 to, const void* from, u32 bytes, u32 barrier) {
    tma_load_1d(to, from, bytes, barrier);
}
static u32 swizzled_128(u32 address) { return address ^ (address >> 7 & 7) << 4; }
static u32 swizzled_64(u32 address) { return address ^ (address >> 7 & 3) << 4; }
static void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    const TensorMap m = *map;
    place(to, m.box_rows * 128, 1024);
    async_reads(m.from, 1);
    copy_later(to, m.box_rows * 128, barrier, false, [=] {
        for (int r = 0; r < m.box_rows; r++)
            for (int c = 0; c < 64; c += 8) {
                u16 v[8] = {};
                for (int i = 0; i < 8; i++)
                    if (row + r < m.rows && column + c + i < m.columns)
                        memcpy(v + i, m.from + 2 * ((row + r) * m.columns + column + c + i), 2);
                memcpy(place(swizzled_128(to + 128 * r + 2 * c), 16), v, 16);
            }
    });
    check_fenced(to, m.box_rows * 128);
}
void tma_load_2d(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    load_box(to, map, column, row, barrier);
}
void tma_load_2d_multicast(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    const u32 first = cpu.now->cta / cpu.launch.cluster * cpu.launch.cluster;
    for (u32 cta = first; cta < first + cpu.launch.cluster; cta++)
        load_box(in_cta(to, cta), map, column, row, in_cta(barrier, cta));
}
void tma_load_rows(u32 to, const TensorMap* map, int row, u32 barrier) {
    const TensorMap m = *map;
    const u32 row_bytes = 2 * m.columns, bytes = m.box_rows * row_bytes;
    place(to, bytes, 1024);
    if (row % m.box_rows || row >= m.rows) stop("rows that are no tile");
    const unsigned char* from = m.from + (long)row * row_bytes;
    async_reads(from, bytes);
    copy_later(to, bytes, barrier, true, [=] {
        for (u32 i = 0; i < bytes; i += 16) {
            const u32 in = i % row_bytes;
            memcpy(place(swizzled_128(to + in / 128 * m.box_rows * 128 + i / row_bytes * 128 + in % 128), 16), from + i,
                   16);
        }
    });
}
void tma_load_words(u32 to, const TensorMap* map, int word, int row, u32 barrier, u64) {
    const TensorMap m = *map;
    const u32 bytes = 8 * m.box_words * m.box_rows;
    place(to, bytes, 128);
    async_reads(m.from, 1);
    copy_later(to, bytes, barrier, true, [=] {
        for (int r = 0; r < m.box_rows; r++)
            for (int c = 0; c < m.box_words; c++) {
                u64 v = 0;
                if (row + r < m.rows && word + c < m.columns)
                    memcpy(&v, m.from + 8 * ((row + r) * m.columns + word + c), 8);
                memcpy(place(to + 8 * (m.box_words * r + c), 8), &v, 8);
            }
    });
}
void tma_store_1d(void* to, u32 from, u32 bytes) {
    place(from, bytes, 16);
    if ((uintptr_t)to % 16 || bytes % 16) stop("bulk store not on 16 bytes");
    check_fenced(from, bytes);
    cpu.now->stores.push_back([=] { memcpy(to, place(from, bytes), bytes); });
}
void tma_store_2d(const TensorMap* map, int column, int row, u32 from) {
    const TensorMap m = *map;
    const int width = m.box_bytes ? m.box_bytes : 128;
    place(from, m.box_rows * width, 8 * width);
    check_fenced(from, m.box_rows * width);
    cpu.now->stores.push_back([=] {
        for (int r = 0; r < m.box_rows && row + r < m.rows; r++)
            for (int c = 0; c < width / 2 && column + c < m.columns; c++) {
                const u32 at = from + width * r + 2 * c;
                memcpy(m.from + 2 * ((row + r) * m.columns + column + c),
                       place(width == 64 ? swizzled_64(at) : swizzled_128(at), 2), 2);
            }
    });
}
std::function<void()> on_store_done;
void stores_read(u32 but) {
    for (auto& stores = cpu.now->stores; stores.size() > but; stores.pop_front()) {
        stores.front()();
        if (on_store_done) on_store_done();
    }
}
void tma_prefetch_1d(const void* from, u32 bytes) {
    if ((uintptr_t)from % 16 || bytes % 16) stop("bulk prefetch not on 16 bytes");
    if (on_prefetch) on_prefetch(from, bytes);
}
void cp_async_16(u32 to, const void* from, bool live) {
    async_reads(from, 16);
    memset(place(to, 16, 16), 0, 16);
    if (live) memcpy(place(to, 16), from, 16);
    note_store(to, 16);
}

// ---- global memory --------------------------------------------------------------------------------------------------
static void note_load(const void* p, u32 bytes) {
    if ((uintptr_t)p % bytes) stop("global address not aligned");
    most_before_loads = max(most_before_loads, own_cta().bulk_issued);
    if (on_read) on_read(p, bytes);
}
template <class T>
static T load_global(const void* p) {
    note_load(p, sizeof(T));
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
uint4 ldg128(const void* p) {
    if (on_state) on_state(p, 16);
    return load_global<uint4>(p);
}
uint4 ldg128(const void* p, u64) { return ldg128(p); }
u32 ldg32(const void* p) { return load_global<u32>(p); }
u32 ldg16(const void* p) { return load_global<u16>(p); }
uint4 ldg128_nc(const void* p) { return load_global<uint4>(p); }
float4 ldg_cg_float4(const void* p) { return load_global<float4>(p); }
void stg128(void* p, uint4 x) {
    if ((uintptr_t)p % 16) stop("global address not aligned");
    if (on_state) on_state(p, 16);
    memcpy(p, &x, 16);
}
void stg128(void* p, uint4 x, u64) { stg128(p, x); }
std::vector<std::pair<const char*, const char*>> written;
extern "C" void writes(const char* begin, u64 bytes) {
    if (!bytes) written.clear();
    else written.push_back({begin, begin + bytes});
}
void read_only(const void* p, u32 bytes) {
    for (const auto& [begin, end] : written)
        if ((const char*)p >= begin && (const char*)p < end) stop("__ldg of written memory");
    note_load(p, bytes);
}
std::function<void(const u32*)> on_acquire;
std::function<void(u32*, u32)> on_release;
static int looks;
u32 ld_acquire(const u32* p) {
    if (++looks > 300000) stop("a flag that nobody raises");
    others();
    if (on_acquire) on_acquire(p);
    return *p;
}
void st_release(u32* p, u32 x) {
    if (on_release) on_release(p, x);
    if (*p == x) stop("a flag raised twice");
    *p = x, looks = 0, moved();
}
void st_relaxed(u32* p, u32 x) { *p = x, moved(); }
static std::map<const float4*, int> looks_at;
float4 ld_relaxed(const float4* p) {
    if (++looks > 300000) stop("sums that never come");
    others();
    float none;
    memset(&none, 0xFF, 4);
    return looks_at[p]++ ? *p : float4{none, none, none, none};  // a store may be seen late
}
void st_relaxed(float4* p, const float4& x) { *p = x, looks = looks_at[p] = 0, moved(); }
u32 atomic_add_acq_rel(u32* p, u32 x) {
    looks = 0, moved();
    return std::exchange(*p, *p + x);
}
u32 atomic_add_relaxed(u32* p, u32 x) { return std::exchange(*p, *p + x); }
void spin_pause(int&) { stop("waits for a block of higher index"); }  // blocks run in turn
std::function<void()> on_global_fence;
void fence_proxy_async_global() {
    if (on_global_fence) on_global_fence();
}

// ---- named barriers, clusters, warps, launches ----------------------------------------------------------------------
void __syncthreads() { meet(own_cta().block, cpu.launch.threads); }
void named_barrier_sync(int id, int threads) { meet(own_cta().named[id], threads); }
void named_barrier_arrive(int id, int threads) { arrive(own_cta().named[id], threads); }
void named_barrier_sync_unaligned(int id, int threads) { named_barrier_sync(id, threads); }
void named_barrier_arrive_unaligned(int id, int threads) { named_barrier_arrive(id, threads); }
u32 cluster_rank() { return cpu.now->cta % cpu.launch.cluster; }
void cluster_arrive() {
    Meeting& m = cpu.clusters[cpu.now->cta / cpu.launch.cluster];
    cpu.now->cluster_generation = m.generation;
    arrive(m, cpu.launch.threads * cpu.launch.cluster);
}
void cluster_wait() { wait_for(cpu.clusters[cpu.now->cta / cpu.launch.cluster], cpu.now->cluster_generation); }
u32 map_to_rank(u32 local, u32 rank) {
    return in_cta(local, cpu.now->cta / cpu.launch.cluster * cpu.launch.cluster + rank);
}
void st_async(u32 remote, const float4& x, u32 barrier) {  // lands late and in any order
    copy_later(remote, 16, barrier, false, [=] { memcpy(place(remote, 16), &x, 16); });
}
static u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float float_of(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
u32 __float_as_uint(float x) { return bits_of(x); }
float __uint_as_float(u32 x) { return float_of(x); }
void __syncwarp() { exchange({0}); }
static u32 shuffled(u32 x, int lane) { return exchange({x}).from(lane); }
int __shfl_sync(u32, int x, int lane) { return (int)shuffled(x, lane); }
u32 __shfl_sync(u32, u32 x, int lane) { return shuffled(x, lane); }
float __shfl_sync(u32, float x, int lane) { return float_of(shuffled(bits_of(x), lane)); }
u32 __shfl_xor_sync(u32, u32 x, int mask) { return shuffled(x, own_lane() ^ mask); }
float __shfl_xor_sync(u32, float x, int mask) { return float_of(shuffled(bits_of(x), own_lane() ^ mask)); }
static int up_lane(int by) { return own_lane() >= by ? own_lane() - by : own_lane(); }
int __shfl_up_sync(u32, int x, int by) { return (int)shuffled(x, up_lane(by)); }
float __shfl_up_sync(u32, float x, int by) { return float_of(shuffled(bits_of(x), up_lane(by))); }
float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
u32 warp_ballot(bool x) {
    const Given all = exchange({x});
    u32 mask = 0;
    for (int lane = 0; lane < 32; lane++) mask |= all.from(lane) << lane;
    return mask;
}
u32 __ballot_sync(u32, bool x) { return warp_ballot(x); }
bool warp_any(bool x) { return warp_ballot(x) != 0; }
u32 warp_max(u32 x) {
    const Given all = exchange({x});
    for (int lane = 0; lane < 32; lane++) x = max(x, all.from(lane));
    return x;
}
void wait_on_dependent_grids() {
    cpu.now->waited = true;
    others();
}

// ---- conversions ----------------------------------------------------------------------------------------------------
float half_to_float(u32 bits) {
    _Float16 h;
    const u16 low = bits;
    memcpy(&h, &low, 2);
    return h;
}
u32 float_to_half(float x) {
    const _Float16 h = x;
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}
float bf16_to_float(u32 bits) { return float_of(bits << 16); }
u32 float_to_bf16(float x) {
    const u32 bits = bits_of(x);
    return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float e4m3_as_float(u32 byte) {
    const int e = byte >> 3 & 15, m = byte & 7;
    if (e == 15 && m == 7) return NAN;
    const float x = e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    return byte & 128 ? -x : x;
}
static float e4m3_to_float(u32 byte) {
    static const auto all = [] {
        std::vector<float> made;
        for (u32 i = 0; i < 256; i++) made.push_back(e4m3_as_float(i));
        return made;
    }();
    return all[byte];
}
static u32 float_to_e4m3(float x) {  // nearest even, saturating
    const u32 sign = std::signbit(x) ? 128 : 0;
    const float a = fabsf(x);
    if (std::isnan(x)) return sign | 0x7F;
    if (a >= 448) return sign | 0x7E;
    if (a == 0) return sign;
    int e;
    frexpf(a, &e);
    e = max(e - 1, -6);
    return sign | (((e + 6) << 3) + (u32)nearbyintf(ldexpf(a, 3 - e)));
}
u32 pack_half2(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }
u32 pack_bf162(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }
u32 pack_e4m3x2(float low, float high) { return float_to_e4m3(low) | float_to_e4m3(high) << 8; }
u32 e4m3_to_half2(u32 x) { return pack_half2(e4m3_to_float(x & 255), e4m3_to_float(x >> 8 & 255)); }
void stg_half(u16* p, float x) { *p = (u16)float_to_half(x); }
u32 mul_bf162(u32 a, u32 b) {
    return pack_bf162(bf16_to_float(a & 0xFFFF) * bf16_to_float(b & 0xFFFF),
                      bf16_to_float(a >> 16) * bf16_to_float(b >> 16));
}
u32 mul_half2(u32 a, u32 b) {
    return pack_half2(half_to_float(a) * half_to_float(b), half_to_float(a >> 16) * half_to_float(b >> 16));
}
u32 sub_half2(u32 a, u32 b) {
    return pack_half2(half_to_float(a) - half_to_float(b), half_to_float(a >> 16) - half_to_float(b >> 16));
}
u32 max_u16x2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
u32 prmt(u32 a, u32 b, u32 selector) {
    const u64 both = (u64)b << 32 | a;
    u32 x = 0;
    for (int i = 0; i < 4; i++) {
        const u32 nibble = selector >> 4 * i & 15, byte = both >> 8 * (nibble & 7) & 255;
        x |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return x;
}
u32 __byte_perm(u32 a, u32 b, u32 selector) { return prmt(a, b, selector & 0x7777); }

// ---- matrices of a warp ---------------------------------------------------------------------------------------------
// Lane 8 i + r names row r of matrix i; lane l holds columns 2 (l & 3), + 1 of row l >> 2, or of the transposed matrix.
static void load_matrices(u32 (&x)[4], u32 row, bool transposed) {
    place(row, 16, 16);
    const Given rows = exchange({row});
    const int quad = own_lane() >> 2, pair = own_lane() & 3;
    for (int i = 0; i < 4; i++) {
        const auto at = [&](int r, int c) { return (u32)load_shared<u16>(rows.from(8 * i + r) + 2 * c); };
        x[i] = transposed ? at(2 * pair, quad) | at(2 * pair + 1, quad) << 16
                          : at(quad, 2 * pair) | at(quad, 2 * pair + 1) << 16;
    }
    __syncwarp();
}
void ldmatrix_x4(u32 (&x)[4], u32 row) { load_matrices(x, row, false); }
void ldmatrix_x4_trans(u32 (&x)[4], u32 row) { load_matrices(x, row, true); }
static void store_matrices_transposed(u32 row, std::initializer_list<u64> matrices) {
    const Given given = exchange(matrices);
    const int lane = own_lane();
    if (lane / 8 < (int)matrices.size()) {
        u16 elements[8];  // of the lane's row: element c is row c of the fragment, at column lane % 8
        for (int c = 0; c < 8; c++) elements[c] = given.from(4 * c + lane % 8 / 2, lane / 8) >> 16 * (lane % 2);
        memcpy(place(row, 16, 16), elements, 16), note_store(row, 16);
    }
    __syncwarp();
}
void stmatrix_x4_trans(u32 row, u32 m0, u32 m1, u32 m2, u32 m3) { store_matrices_transposed(row, {m0, m1, m2, m3}); }
void stmatrix_x2_trans(u32 row, u32 m0, u32 m1) { store_matrices_transposed(row, {m0, m1}); }
u32 movmatrix_trans(u32 own) {
    const Given x = exchange({own});
    const int g = own_lane() >> 2, t = own_lane() & 3;
    const auto at = [&](int row, int column) { return x.from(row * 4 + column / 2) >> 16 * (column & 1) & 0xFFFF; };
    return at(2 * t, g) | at(2 * t + 1, g) << 16;
}
// a0: rows g, columns 2t and next; a1: rows g + 8; a2: columns 2t + 8 and next; a3: both; b0, b1: rows 2t.., column g.
template <bool BF16>
static void multiply_halves(float (&c)[4], const Given& x) {
    const int g = own_lane() >> 2, t = own_lane() & 3;
    float rows[2][16], columns[2][16];  // widened once for the four sums; to double at once, a half takes a call
    for (int of = 0; of < 2; of++)
        for (int k = 0; k < 16; k++) {
            const auto wide = [&](u32 pair) {
                const u32 bits = pair >> 16 * (k & 1) & 0xFFFF;
                return BF16 ? bf16_to_float(bits) : half_to_float(bits);
            };
            rows[of][k] = wide(x.from(g * 4 + (k & 7) / 2, of + 2 * (k >> 3)));
            columns[of][k] = wide(x.from((2 * t + of) * 4 + (k & 7) / 2, 4 + (k >> 3)));
        }
    for (int i = 0; i < 4; i++) {
        double sum = c[i];
        for (int k = 0; k < 16; k++) sum += (double)rows[i >> 1][k] * columns[i & 1][k];
        c[i] = (float)sum;
    }
}
void mma_of_halves(bool bf16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const Given x = exchange({a0, a1, a2, a3, b0, b1});
    if (bf16) multiply_halves<true>(c, x);
    else multiply_halves<false>(c, x);
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
static Warpgroup& own_warpgroup() { return own_cta().warpgroups[cpu.now->thread / 128]; }
void wgmma_commit() {
    Warpgroup& g = own_warpgroup();
    if (cpu.now->committed++ == g.first_group + (long)g.groups.size()) g.groups.push_back(cpu.now->issued);
}
// Where element (k, n) of an operand lies, n a row of a K-major one.
static u32 element_at(u64 descriptor, bool mn_major, int k, int n, int element_bytes) {
    const u32 low = (u32)descriptor, high = (u32)(descriptor >> 32);
    const u32 start = (low & 0x3FFF) << 4, leading = (low >> 16 & 0x3FFF) << 4, stride = (high & 0x3FFF) << 4;
    const u32 mode = high >> 30;
    if (mode != 1 && mode != 3) stop("a swizzle of neither 128 nor 32 bytes");
    u32 at = start;
    if (mn_major) at += n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2;
    else at += n / 8 * stride + n % 8 * (mode == 1 ? 128 : 32) + k * element_bytes;
    return in_cta(mode == 1 ? swizzled_128(at) : at ^ (at >> 7 & 1) << 4, cpu.now->cta);
}
// An operand's elements, [k][n].
__attribute__((optimize("O3"))) static void read_operand(float* to, const Product& p, u64 descriptor, bool mn_major,
                                                         int columns) {
    const int bytes = p.type == Product::E4M3 ? 1 : 2, depth = 32 / bytes;
    for (int k = 0; k < depth; k++)
        for (int n = 0; n < columns; n++) {
            const unsigned char* at = place(element_at(descriptor, mn_major, k, n, bytes), bytes);
            u16 bits;
            memcpy(&bits, at, 2);
            to[k * columns + n] = bytes == 1                ? e4m3_to_float(*at)
                                  : p.type == Product::BF16 ? bf16_to_float(bits)
                                                            : half_to_float(bits);
        }
}
__attribute__((optimize("O3"))) static void execute(const Product& p) {
    static float a[32][64], b[32 * 256], d[64][256];
    const int depth = p.type == Product::E4M3 ? 32 : 16;
    if (p.a_shared) read_operand(&a[0][0], p, p.a_shared, false, 64);
    for (int t = 0; t < 128 && !p.a_shared; t++)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < depth / 8; j++) {
                const int row = t / 32 * 16 + t % 32 / 4 + 8 * (i & 1),
                          k = depth / 8 * (t & 3) + j + depth / 2 * (i >> 1);
                const u32 word = p.a[t][i];
                a[k][row] = p.type == Product::E4M3   ? e4m3_to_float(word >> 8 * j & 255)
                            : p.type == Product::BF16 ? bf16_to_float(word >> 16 * j & 0xFFFF)
                                                      : half_to_float(word >> 16 * j);
            }
    read_operand(b, p, p.b, p.mn_major, p.n);
    for (int store = 0; store < 2; store++) {
        for (int t = 0; t < 128; t++)
            for (int i = 0; i < p.n / 2; i++) {
                float& x = d[t / 32 * 16 + (t & 31) / 4 + 8 * (i >> 1 & 1)][i / 4 * 8 + 2 * (t & 3) + (i & 1)];
                if (store) p.d[t][i] = x;
                else x = p.scale_d ? p.d[t][i] : 0.0f;
            }
        for (int m = 0; m < 64 && !store; m++)
            for (int k = 0; k < depth; k++)
                for (int n = 0; n < p.n; n++) d[m][n] += a[k][m] * b[k * p.n + n];
    }
}
void products_done(int but) {
    Warpgroup& g = own_warpgroup();
    meet(g.meeting, 128);
    for (; (long)g.groups.size() > but; g.groups.pop_front(), g.first_group++)
        for (; g.first < g.groups.front(); g.first++, g.queue.pop_front()) execute(g.queue.front());
    meet(g.meeting, 128);
}
static void check_operand(u64 descriptor, bool mn_major, int columns, int element_bytes) {
    for (int k = 0; k < 32 / element_bytes; k += mn_major ? 1 : 16 / element_bytes)
        for (int n = 0; n < columns; n += mn_major ? 8 : 1)
            check_fenced(element_at(descriptor, mn_major, k, n, element_bytes), 16);
}
void issue(float* d, const u32* a, u64 a_shared, u64 b, int n, bool mn_major, int scale_d, Product::Type type) {
    Warpgroup& g = own_warpgroup();
    const long at = cpu.now->issued++ - g.first;
    if (at == (long)g.queue.size()) {
        g.queue.push_back({{}, {}, a_shared, b, n, scale_d, type, mn_major});
        check_operand(b, mn_major, n, type == Product::E4M3 ? 1 : 2);
        if (a_shared) check_operand(a_shared, false, 64, 2);
    }
    Product& p = g.queue[at];
    if (p.b != b || p.a_shared != a_shared || p.n != n || p.scale_d != scale_d)
        stop("threads of a warpgroup issue different products");
    p.d[cpu.now->thread % 128] = d, p.a[cpu.now->thread % 128] = a;
}
// ---- the launch -----------------------------------------------------------------------------------------------------
static void fiber() {
    until_stopped([] {
        kernel_of_launch();
        while (!cpu.now->stores.empty()) stop("a store that nobody waited for");
    });
    cpu.now->done = true, moved();
    others();
}
static void resume(Fiber& f) {
    const Cta& cta = cpu.ctas[f.cta];
    cpu.now = &f;
    threadIdx = {f.thread, 0, 0}, blockIdx = {cta.x, cta.y, cta.z};
    if (!_setjmp(cpu.scheduler)) {
        if (f.started) _longjmp(f.later, 1);
        f.started = true;
        swapcontext(&cpu.main, &f.first);
    }
    if (why_stopped) throw Stop{why_stopped};
}
static bool can_go_on(Fiber& f) {
    if (f.meeting && f.meeting->generation == f.generation) return false;
    if (f.barrier && f.barrier->phase == f.parity) {
        if (cpu.launch.copies == AT_WAIT) land_those_of(*f.barrier);
        if (f.barrier->phase == f.parity) return false;
    }
    f.meeting = nullptr, f.barrier = nullptr;
    return true;
}
// Of the CTAs of a launch. Given back behind it: a test run loads hundreds of libraries and unloads none.
struct Freed {
    void operator()(unsigned char* memory) const { free(memory); }
};
static std::vector<std::unique_ptr<unsigned char, Freed>> memories;
static std::vector<std::unique_ptr<char[]>> stacks;
static void give_back() {
    memories.clear(), stacks.clear(), kernel_of_launch = nullptr;
    std::vector<Fiber>().swap(cpu.fibers), std::vector<Cta>().swap(cpu.ctas);
    std::vector<Meeting>().swap(cpu.clusters), std::vector<Copy>().swap(cpu.copies);
}
static void start_cta(int i, int block) {
    Cta& cta = cpu.ctas[i];
    const Axes& grid = cpu.launch.grid;
    while ((int)memories.size() <= i) memories.emplace_back((unsigned char*)aligned_alloc(1024, MOST_SHARED));
    cta = Cta();
    cta.x = block % grid.x, cta.y = block / grid.x % grid.y, cta.z = block / grid.x / grid.y;
    cta.shared = memories[i].get(), cta.stored.assign(MOST_SHARED / 4, 0);
    memset(cta.shared, cpu.launch.copies == AT_RANDOM ? 0xFF : 0x7F, cpu.launch.shared_bytes);
    for (int t = 0; t < cpu.launch.threads; t++) {
        const size_t at = i * cpu.launch.threads + t;
        constexpr size_t STACK = 1 << 16;
        if (stacks.size() <= at) stacks.emplace_back(new char[STACK]);
        Fiber& f = cpu.fibers[at];
        f = Fiber();
        f.cta = i, f.thread = t;
        getcontext(&f.first);
        f.first.uc_stack.ss_sp = stacks[at].get(), f.first.uc_stack.ss_size = STACK, f.first.uc_link = nullptr;
        makecontext(&f.first, fiber, 0);
    }
}
static void run_some(std::vector<int> blocks) {
    const Launch& launch = cpu.launch;
    cpu.copies.clear(), cpu.ctas.resize(blocks.size()), cpu.fibers.resize(blocks.size() * launch.threads);
    cpu.clusters.assign(max<size_t>(1, blocks.size() / launch.cluster), {});
    looks = 0, looks_at.clear();
    for (size_t i = 0; i < blocks.size(); i++) start_cta(i, blocks[i]);
    std::vector<int> warps(cpu.fibers.size() / 32);
    for (size_t i = 0; i < warps.size(); i++) warps[i] = i;
    if (blocks[0] & 1 && launch.seed < 0 && launch.copies != AT_WAIT) std::reverse(warps.begin(), warps.end());
    bool stuck = false;
    for (int idle = 0, round = 0, alive = 1; alive; round++) {
        const u64 before = cpu.moves;
        alive = 0;
        for (size_t i = warps.size(); i-- > 1 && launch.seed >= 0;) std::swap(warps[i], warps[rand() % (i + 1)]);
        for (int w : warps) {
            const bool tired = launch.uneven && round % (1 + (w + blocks[0]) % 4);
            const bool asleep = tired || (launch.seed >= 0 && rand() % 4 == 0 && idle < 100);
            for (int lane = 0; lane < 32; lane++) {
                Fiber& f = cpu.fibers[32 * w + lane];
                if (f.done) continue;
                alive++;
                if (asleep || (f.thread >= slow_from && !stuck) || !can_go_on(f)) continue;
                resume(f);
            }
        }
        for (size_t i = 0; i < cpu.copies.size() && launch.copies == AT_RANDOM;) {
            if (rand() % rounds_in_flight) {
                i++;
                continue;
            }
            const Copy c = cpu.copies[i];
            cpu.copies.erase(cpu.copies.begin() + i), land(c);
        }
        stuck = cpu.moves == before;
        idle = stuck && (cpu.copies.empty() || launch.copies != AT_RANDOM) ? idle + 1 : 0;
        if (alive && idle > 1000) stop("no thread can go on");
    }
    if (!cpu.copies.empty()) stop("a copy that nobody waited for");
    for (const Cta& cta : cpu.ctas)
        for (const Warpgroup& g : cta.warpgroups)
            if (!g.queue.empty()) stop("products in flight at the end");
}
void launch_on_cpu(const Launch& launch, std::function<void()> kernel) {
    kernel_of_launch = kernel, cpu.launch = launch;
    gridDim = launch.grid, blockDim = {launch.threads, 1, 1};
    if (launch.seed >= 0) srand(launch.seed);
    const int blocks = launch.grid.x * launch.grid.y * launch.grid.z, at_once = max(launch.at_once, launch.cluster);
    until_stopped([=] {
        for (int first = 0; first < blocks; first += at_once) {
            std::vector<int> some;
            for (int i = first; i < min(first + at_once, blocks); i++)
                some.push_back(launch.backwards ? blocks - 1 - i : i);
            run_some(some);
        }
    });
    give_back();
}
