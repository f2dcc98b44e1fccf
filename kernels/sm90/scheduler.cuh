// Stream-K: the k iterations of all output tiles stand in one line, cut into as many equal parts as there are workers
// (CTAs or clusters). A worker's part may begin and end inside a tile: its k slice of that tile. Who has the first
// iterations of a tile owns it and adds what the others have summed, in the order of k. So the same bits on every run.
#ifndef SM90_SCHEDULER_CUH
#define SM90_SCHEDULER_CUH

#include "sm90/ptx.cuh"

// The line in parts: every worker has `each` iterations, the first `more` workers one more.
struct StreamKPartition {
    int each, more;
    // The first iteration of a worker, in the line.
    DEVICE int begin(int worker) const { return worker * each + min(worker, more); }
};
DEVICE StreamKPartition stream_k_partition(int iters, int workers) { return {iters / workers, iters % workers}; }

// Workers first .. last - 1 share the tile whose iterations start at `start` of the line; those before `owners` end in it,
// or have it alone. For a reduction in slices: who goes on to another tile owns no piece of this one, for it would have to
// come back.
struct StreamKSharers {
    int first, last, owners;
    bool before;  // the first has a k slice of the tile before this
    DEVICE StreamKSharers(const StreamKPartition& partition, int worker, int start, int iters)
        : first(worker), last(worker + 1) {
        while (partition.begin(first) > start) first--;
        while (partition.begin(last) < start + iters) last++;
        owners = last - (last - first > 1 && partition.begin(last) > start + iters);
        before = partition.begin(first) < start;
    }
    // Who adds up a piece of the tile, which has so many.
    DEVICE int owner(int piece, int pieces) const { return first + piece * (owners - first) / pieces; }
    // Which of 2 * workers places has a worker's sums: the first of the tile leaves them after those of all that have no k
    // slice before it.
    DEVICE int place(int of, int workers) const { return of + (of == first && before ? workers : 0); }
};

// A walk over the tiles of one worker: of `tiles`, the first waves * workers go out whole (data-parallel), the others in
// parts. It stands at iterations iter_begin .. iter_end - 1 of `tile`.
struct StreamKScheduler {
    int worker, workers, tiles, iters, waves, wave = 0, at, end, tile, iter_begin, iter_end;
    // partition: with `begin` as above, strictly ascending as long as a worker has an iteration. iters: of a tile.
    template <class Partition>
    DEVICE StreamKScheduler(const Partition& partition, int worker_, int workers_, int tiles_, int iters_, int waves_)
        : worker(worker_),
          workers(workers_),
          tiles(tiles_),
          iters(iters_),
          waves(waves_),
          at(partition.begin(worker_)),
          end(partition.begin(worker_ + 1)) {
        locate();
    }
    DEVICE void locate() {
        if (wave < waves) {
            tile = wave * workers + worker, iter_begin = 0, iter_end = iters;
        } else {
            tile = at / iters, iter_begin = at - tile * iters, iter_end = min(iters, iter_begin + end - at);
            tile += waves * workers;
        }
    }
    DEVICE bool valid() const { return wave < waves ? tile < tiles : at < end; }
    DEVICE void next() {
        if (wave < waves) {
            wave++;
        } else {
            at += iter_end - iter_begin;
        }
        locate();
    }
    DEVICE bool owns_tile() const { return iter_begin <= 0; }
    // How many workers behind this one have iterations of the tile, which this one owns.
    template <class Partition>
    DEVICE int peers(const Partition& partition) const {
        const int tile_end = (tile - waves * workers + 1) * iters;
        int count = 0;
        while (iter_end < iters && partition.begin(worker + 1 + count) < tile_end) count++;
        return count;
    }
};

#endif
