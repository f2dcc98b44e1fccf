// How workers share the tiles of a stream-K product, and the ring of stages that each walks. wgmma_gemm.cu and
// w4a8_gemm.cu include it; the first says what a unit, a piece and an owner are.
//
// Macro: STAGES. DEVICE comes from operand.cuh or its like, included before.
#pragma once

struct Ring {
  int stage = 0;
  unsigned parity = 0;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The line of units in parts: each worker has `each`, the first `more` of them one more.
struct Shares {
  int each, more;
  DEVICE Shares(int units, int workers) : each(units / workers), more(units % workers) {}
  DEVICE int begin(int worker) const { return worker * each + min(worker, more); }
};

// A worker's piece of one tile: units first .. last - 1 of `tile`. Of `tiles`, the first waves * workers go out whole.
struct Piece {
  int worker, workers, tiles, depth, waves, wave = 0, at, end, tile, first, last;
  DEVICE Piece(const Shares& shares, int worker_, int workers_, int tiles_, int depth_, int waves_)
      : worker(worker_), workers(workers_), tiles(tiles_), depth(depth_), waves(waves_), at(shares.begin(worker_)),
        end(shares.begin(worker_ + 1)) {
    locate();
  }
  DEVICE void locate() {
    if (wave < waves) {
      tile = wave * workers + worker, first = 0, last = depth;
    } else {
      tile = at / depth, first = at - tile * depth, last = min(depth, first + end - at), tile += waves * workers;
    }
  }
  DEVICE bool valid() const { return wave < waves ? tile < tiles : at < end; }
  DEVICE void next() {
    if (wave < waves) {
      wave++;
    } else {
      at += last - first;
    }
    locate();
  }
};
