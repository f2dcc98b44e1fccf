// Members of Decode (decode.cu includes this in its body): how the work is cut and brought to the ring.

    // prefix[b] = units of one head in the sequences before b; then every block's equal share of them all.
    __device__ __forceinline__ void scan() {
        if (lane < PAIRS) barrier_init(bars + 8 * lane, TILES);
        if (tid == 0) sts32(prefix, 0);
        int carry = 0;
        for (int from = 0; from < p.batch; from += THREADS) {
            int b = from + tid;
            int n = b < p.batch ? (load_i32(p.lengths + b) + UNIT - 1) / UNIT : 0;
            for (int by = 1; by < 32; by *= 2) {
                int below = shuffle_up(n, by);
                if (lane >= by) n += below;
            }
            if (lane == 31) sts32(shared + STATS + 4 * warp, n);
            sync_block();
            int all = carry;
            for (int w = 0; w < WARPS; ++w) {
                int x = (int)lds32(shared + STATS + 4 * w);
                if (w < warp) n += x;
                all += x;
            }
            if (b < p.batch) sts32(prefix + 4 * (b + 1), carry + n);
            carry = all;
            sync_block();
        }
        barrier_init_fence();
        const int total = p.kv_heads * carry;
        blocks = min(grid, (total + WARPS - 1) / WARPS);
        share = total / max(blocks, 1);
        longer = total - share * blocks;
        sync_block();
    }

    // The block whose range holds a unit.
    __device__ __forceinline__ int block_of(int unit) const {
        const int at = unit - longer * (share + 1);  // past the longer ranges
        return at < 0 ? unit / (share + 1) : longer + at / share;
    }

    // Starts the load of this lane's page id for the unit at the producer's cursor, and moves the cursor on.
    __device__ __forceinline__ void fetch() {
        pending_state = 0;
        if (producer.unit >= last) return;
        if (producer.unit >= producer.begin + producer.count) {
            do next_item(p, prefix, producer);
            while (producer.unit >= producer.begin + producer.count);
            if (lane * 64 < p.group * D)  // the item's queries on their way to L2, 128 bytes a lane
                prefetch(p.q + (u64)(producer.b * p.kv_heads + producer.h) * p.group * D * 2 + lane * 128);
        }
        int tile = (producer.unit - producer.begin) * TILES + lane;
        pending_state = 1;
        if (lane < TILES && tile * 16 < producer.length) {
            pending_state = 2;
            pending_page = load_i32(p.table + (long long)producer.b * p.max_pages + (tile >> p.page_shift));
            pending_head = producer.h;
            pending_sub = tile & ((1 << p.page_shift) - 1);
        }
        producer.unit += WARPS;
    }
    __device__ __forceinline__ unsigned fetched() const {
        if (pending_state < 2) return pending_state ? NO_TILE : NO_UNIT;
        return ((unsigned)(pending_page * p.kv_heads + pending_head) << p.page_shift) + pending_sub;
    }

    // Lanes 0 .. TILES - 1 each bring their tile of K or V into buffer `into`.
    __device__ __forceinline__ void issue(unsigned tile, bool is_v, unsigned into) {
        if (lane < TILES && tile != NO_UNIT) {
            unsigned barrier = bars + 8 * into, to = ring + into * PAIR + lane * SLOT;
            barrier_expect(barrier, tile == NO_TILE ? 0 : TILE + SCALES);
            if (tile != NO_TILE) {
                bulk_copy(to, (is_v ? p.v : p.k) + (u64)tile * TILE, TILE, barrier);
                if constexpr (KIND == Q8_0)
                    bulk_copy(to + TILE, (is_v ? p.v_scale : p.k_scale) + (u64)tile * SCALES, SCALES, barrier);
            }
        }
    }
    __device__ __forceinline__ void step() {
        if (++stage == PAIRS) {
            stage = 0;
            parity ^= 1;
        }
    }
