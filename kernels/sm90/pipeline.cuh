// A ring of stages in shared memory between warps that fill it and warps that read it: a full and an empty mbarrier for
// each stage, and a state (stage, phase) for each walker.
//
//   producer                                consumer
//     pipeline.producer_acquire(state)        pipeline.consumer_wait(state)
//     pipeline.producer_expect(state, bytes)  ... read the stage
//     ... bulk copies, counted on full        pipeline.consumer_release(state)
//     state.advance()                         state.advance()
//
// A phase of a full barrier ends with its arrivals and their bytes, one of an empty barrier with its arrivals.
#ifndef SM90_PIPELINE_CUH
#define SM90_PIPELINE_CUH

#include "sm90/ptx.cuh"

// Where a walker stands: phase is the parity of its round.
template <int kStages>
struct PipelineState {
    int stage = 0;
    u32 phase = 0;
    // Of the walker's nth stage, from 0 on; kStages is a power of two.
    DEVICE static PipelineState of(u32 n) {
        PipelineState state;
        state.stage = n % kStages, state.phase = n / kStages & 1;
        return state;
    }
    DEVICE void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

// The barriers of a pipeline: kStages of 8 bytes each at kFull and at kEmpty from `base`, an address in shared memory.
template <int kStages, u32 kFull, u32 kEmpty>
struct Pipeline {
    using State = PipelineState<kStages>;
    u32 base;

    DEVICE u32 full(int stage) const { return base + kFull + 8 * stage; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + 8 * stage; }
    // By one thread: arrivals that fill a stage, and that empty it. mbarrier_init_fence is left to the caller.
    DEVICE void init(u32 producers, u32 consumers) const {
        for (int i = 0; i < kStages; i++) {
            mbarrier_init(full(i), producers);
            mbarrier_init(empty(i), consumers);
        }
    }
    // In the first round every stage is empty.
    DEVICE void producer_acquire(const State& state) const { mbarrier_wait(empty(state.stage), state.phase ^ 1); }
    DEVICE void producer_expect(const State& state, u32 bytes) const {
        mbarrier_arrive_expect_tx(full(state.stage), bytes);
    }
    DEVICE void consumer_wait(const State& state) const { mbarrier_wait(full(state.stage), state.phase); }
    DEVICE void consumer_release(int stage) const { mbarrier_arrive(empty(stage)); }
};

#endif
