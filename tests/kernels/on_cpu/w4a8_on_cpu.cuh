// The words of kernels/nvfp4/e4m3.cuh on a CPU, so that w4a8_gemm.cu and quantise_e4m3.cu run without a GPU. Threads,
// barriers and copies are wgmma_on_cpu.cuh's; the products are fp8 ones, done as late as the waits allow, and a wait for
// kernels ahead lets other threads run. Sums are exact in float32's sense: the tensor core's 14 bits are not imitated.
#pragma once
#include <cmath>
// The products there are 16-bit ones with waits of their own.
#define wgmma_commit commit_16_bit
#define wgmma_wait wait_16_bit
#define flag_raise raise_there
#include "wgmma_on_cpu.cuh"
#undef wgmma_commit
#undef wgmma_wait
#undef flag_raise
#define NVFP4_E4M3_CUH
#define __shared__ static
struct float2 { float x, y; };
static Axis blockDim;

// Blocks run one after another, so that a flag raised too early would harm nobody. Where sums are not there yet (NaN) it
// stays down, and its reader waits in vain.
static struct { const float* parts; const unsigned* flags; size_t floats; } left;
static void flag_raise(unsigned* flag) {
  const float* const sums = left.parts + (flag - left.flags) * left.floats;
  for (size_t i = 0; i < left.floats; i++) if (std::isnan(sums[i])) return;
  raise_there(flag);
}
static unsigned lds32(unsigned at) { return *(const unsigned*)place(at, 4); }
struct Product8 { float* sums[128]; const unsigned* a[128]; int add[128]; uint64_t b; int columns, group; };
struct Queue8 { Meeting meeting; Product8 next; std::vector<Product8> under_way; int committed = 0; };
static Queue8 queues[MOST_CTAS][8];
static Queue8& my_queue() { return queues[cpu.now->cta][cpu.now->thread / 128]; }
static void wgmma_commit() {
  Queue8& q = my_queue();
  meet(q.meeting, 128);
  if (cpu.now->thread % 128 == 0) q.committed++;
  meet(q.meeting, 128);
}
static void execute8(const Product8& p) {
  static float a[64][32], b[32][256];
  for (int thread = 0; thread < 128; thread++)
    for (int i = 0; i < 16; i++) {  // register i / 4: rows g, g + 8, g, g + 8; the upper two hold k + 16
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 4 % 2 * 8, k = thread % 4 * 4 + i % 4 + i / 8 * 16;
      a[row][k] = e4m3_to_float(p.a[thread][i / 4] >> 8 * (i % 4));
    }
  const unsigned start = (p.b & 0x3FFF) << 4, lines = (p.b >> 32 & 0x3FFF) << 4;
  if (p.b >> 62 != 1) stop("not the 128-byte swizzle");
  for (int k = 0; k < 32; k++)
    for (int n = 0; n < p.columns; n++)
      b[k][n] = e4m3_to_float(*place(in_cta(swizzled(start + n / 8 * lines + n % 8 * 128 + k), cpu.now->cta), 1));
  for (int thread = 0; thread < 128; thread++)
    for (int i = 0; i < p.columns / 2; i++) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + (i / 2 % 2) * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float sum = p.add[thread] ? p.sums[thread][i] : 0;
      for (int k = 0; k < 32; k++) sum += a[row][k] * b[k][n];
      p.sums[thread][i] = sum;
    }
}
template <int PENDING> static void wgmma_wait() {
  Queue8& q = my_queue();
  meet(q.meeting, 128);
  if (cpu.now->thread % 128 == 0) {
    while (!q.under_way.empty() && q.under_way.front().group < q.committed - PENDING) {
      execute8(q.under_way.front());
      q.under_way.erase(q.under_way.begin());
    }
  }
  meet(q.meeting, 128);
}
template <int COLUMNS> struct Wgmma8 {
  static void go(float (&d)[COLUMNS / 2], const unsigned (&a)[4], uint64_t b, int add) {
    Queue8& q = my_queue();
    const int thread = cpu.now->thread % 128;
    q.next.sums[thread] = d, q.next.a[thread] = a, q.next.add[thread] = add;
    meet(q.meeting, 128);
    if (thread == 0) {
      q.next.b = b, q.next.columns = COLUMNS, q.next.group = q.committed;
      q.under_way.push_back(q.next);
    }
    meet(q.meeting, 128);
  }
};

// --- rounding activations ---------------------------------------------------------------------------------------
static unsigned round_e4m3(float v) {  // nearest even, saturating
  const unsigned sign = std::signbit(v) ? 128 : 0;
  const float a = fabsf(v);
  if (std::isnan(v)) return sign | 0x7F;
  if (a >= 448) return sign | 0x7E;
  if (a == 0) return sign;
  int e;
  frexpf(a, &e);
  e = max(e - 1, -6);
  return sign | (((e + 6) << 3) + static_cast<unsigned>(nearbyintf(ldexpf(a, 3 - e))));
}
static unsigned round_e4m3_pair(float low, float high) { return round_e4m3(low) | round_e4m3(high) << 8; }
static unsigned max_halves(unsigned a, unsigned b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
template <bool BF16> static float from_half(unsigned bits) { return value16(bits, BF16); }
static float __fdiv_rn(float a, float b) { return a / b; }
static unsigned largest_in_warp(unsigned v) {
  const Given all = exchange({v});
  for (int lane = 0; lane < 32; lane++) v = max(v, all.from(lane));
  return v;
}

static void simulate8(void (*kernel)(), int threads, int ctas, int blocks, unsigned shared_bytes, int seed) {
  blockDim.x = threads;
  for (auto& c : queues) for (auto& q : c) q = {};
  simulate(kernel, threads, ctas, blocks, shared_bytes, seed);
  for (auto& c : queues)
    for (auto& q : c)
      if (!q.under_way.empty() && why_stopped.empty()) why_stopped = "fp8 products left";
}
