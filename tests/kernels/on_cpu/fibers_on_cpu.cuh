// What the stand-ins tests/*_on_cpu.cuh have in common: threads as fibers, what they meet and wait at, what a warp
// exchanges, and the products of one warp. A stand-in says where it stands (position), lets other fibers run (others),
// notes that the program gets on (moved), and knows its warps (own_lane, own_exchange).
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>
using std::max;
using std::min;

static void others();
static void moved();

// A launch that must not go on ends with a reason, which the host asks for (on_cpu/stand_in.py): an abort would take the
// whole test run along. The fibers of a launch that was stopped are never resumed.
struct Stop { std::string why; };
static std::string why_stopped;
static std::string position();
[[noreturn]] static void stop(const char* why, unsigned where = 0) {
  char at[32] = "";
  if (where) snprintf(at, sizeof at, " (%x)", where);
  throw Stop{why + std::string(at) + ": " + position()};
}
// A barrier whose address waits for loads: with another zero it would be another barrier.
static unsigned once_loaded(unsigned barrier, unsigned word, unsigned zero) {
  if (zero) stop("moves the barrier", barrier);
  return barrier;
}
template <class Run> static void until_stopped(Run run) {  // a fiber's whole run, and a launch's
  try {
    run();
  } catch (const Stop& s) {
    why_stopped = s.why;
  }
}
extern "C" const char* why_it_stopped() {  // since it was last asked; empty if it was not
  static std::string told;
  told = std::exchange(why_stopped, "");
  return told.c_str();
}

struct Fiber { ucontext_t context; std::vector<char> stack; bool done; int cta, thread; };
static void make_fiber(Fiber& f, void (*entry)()) {
  f.stack.resize(1 << 16), f.done = false;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size(), f.context.uc_link = nullptr;
  makecontext(&f.context, entry, 0);
}
static void resume(Fiber& f, ucontext_t& from) {
  swapcontext(&from, &f.context);
  if (!why_stopped.empty()) throw Stop{why_stopped};
}

// Where `count` threads meet: __syncthreads, bar.sync, a warp's or a cluster's. Who only comes does not wait.
struct Meeting { int here = 0; unsigned generation = 0; };
static void come(Meeting& m, int count) {
  moved();
  if (++m.here == count) m.here = 0, m.generation++;
}
static void meet(Meeting& m, int count) {
  const unsigned before = m.generation;
  come(m, count);
  while (m.generation == before) others();
}

// An mbarrier: a phase ends when no arrival is pending and no bytes are. All zero where nobody has set it up.
struct Barrier { int count, pending; long bytes; unsigned phase; };
static Barrier new_barrier(int count) { return {count, count, 0, 0}; }
static void settle(Barrier& b) {
  moved();
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
}
static void expect(Barrier& b, unsigned bytes) {
  if (!b.pending) stop("an arrival too many, or a barrier nobody set up");
  b.bytes += bytes, b.pending--;
  settle(b);
}
static bool waits(const Barrier& b, unsigned parity) { return b.phase == parity; }

// A copy under way, and the barrier that is told of its bytes. It reads what is there when it lands.
struct Copy { Barrier* barrier; unsigned bytes; std::function<void()> write; };
static void land(const Copy& c) {
  c.write();
  c.barrier->bytes -= c.bytes, settle(*c.barrier);
}
static void land_those_of(const Barrier& b, std::vector<Copy>& copies) {
  std::vector<Copy> stay, go;
  for (const Copy& c : copies) (c.barrier == &b ? go : stay).push_back(c);
  copies = stay;
  for (const Copy& c : go) land(c);
}

// What the 32 lanes gave; double-buffered, as a lane is at most one exchange ahead.
struct Exchange { Meeting meeting; uint64_t given[2][32][8]; };
static int own_lane();
static Exchange& own_exchange();
struct Given {
  const uint64_t (*x)[8];
  unsigned from(int lane, int i = 0) const { return (unsigned)x[lane][i]; }
  template <class T> T* at(int lane) const { return reinterpret_cast<T*>(x[lane][0]); }
};
static Given exchange(std::initializer_list<uint64_t> values) {
  Exchange& e = own_exchange();
  const unsigned side = e.meeting.generation & 1;
  std::copy(values.begin(), values.end(), e.given[side][own_lane()]);
  meet(e.meeting, 32);
  return {e.given[side]};
}

static unsigned bits_of(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static float float_of(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static float half_to_float(unsigned bits) {
  const int e = bits >> 10 & 31, m = bits & 1023;
  const float x = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return bits & 0x8000 ? -x : x;
}
static unsigned float_to_half(float x) {  // to nearest even
  const unsigned sign = bits_of(x) >> 16 & 0x8000;
  const double a = fabs((double)x);
  if (std::isnan(x)) return sign | 0x7E00;
  if (a >= 65520) return sign | 0x7C00;
  if (a == 0) return sign;
  int e;
  frexp(a, &e);
  e = max(e - 1, -14);
  const unsigned steps = (unsigned)nearbyint(ldexp(a, 10 - e));  // 1024 .. 2048 where normal; a carry moves e along
  return sign | (((unsigned)(e + 14) << 10) + steps);
}
static float bf16_to_float(unsigned bits) { return float_of(bits << 16); }
static unsigned float_to_bf16(float x) {
  const unsigned bits = bits_of(x);
  return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float e4m3_to_float(unsigned byte) {
  const int e = byte >> 3 & 15, m = byte & 7;
  if (e == 15 && m == 7) return NAN;
  const float x = e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
  return byte & 128 ? -x : x;
}
static unsigned pick_bytes(unsigned a, unsigned b, unsigned selector) {  // prmt.b32
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 15, byte = both >> 8 * (nibble & 7) & 255;
    out |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}

// mma.m16n8k16 as the PTX manual has it; `widen` makes a float of 16 bits. a0: rows g, columns 2t and next; a1: rows
// g + 8; a2: columns 2t + 8 and next; a3: both; b0, b1: rows 2t.., column g.
template <class Widen>
static void product(Widen widen, float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                    unsigned b1) {
  const Given x = exchange({a0, a1, a2, a3, b0, b1});
  const int g = own_lane() >> 2, t = own_lane() & 3;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i >> 1), column = 2 * t + (i & 1);
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const unsigned pair = x.from((row & 7) * 4 + (k & 7) / 2, (row >> 3) + 2 * (k >> 3));
      const float a = widen(pair >> 16 * (k & 1) & 0xFFFF);
      const float b = widen(x.from(column * 4 + (k & 7) / 2, 4 + (k >> 3)) >> 16 * (k & 1) & 0xFFFF);
      sum += (double)a * b;
    }
    c[i] = (float)sum;
  }
}
static unsigned transposed_8x8(unsigned own) {  // of a fragment of 16-bit elements
  const Given x = exchange({own});
  const int g = own_lane() >> 2, t = own_lane() & 3;
  const auto at = [&](int row, int column) { return x.from(row * 4 + column / 2) >> 16 * (column & 1) & 0xFFFF; };
  return at(2 * t, g) | at(2 * t + 1, g) << 16;
}
