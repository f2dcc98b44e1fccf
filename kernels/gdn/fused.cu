// Gated delta rule over a sequence in ONE launch, whose blocks prepare or scan (scan.cuh, prepare.cuh; sm_90a).
//
// Grid: the entries of `blocks` [2 a block], made by order.py.
//   preparation: {0, first unit, units, 0}
//   scan:        {1, sequence, head, first column}, {first token, tokens, first chunk, 0}
// Progress: a block that prepares waits for nobody. Whatever a scan waits for is prepared by blocks of lower index, and
// the hardware starts blocks in the order of their indices: when a scan runs, all that it waits for is done or running,
// however few SMs are free (MPS, MIG, another stream): they need not all be resident at once. CUDA does not
// promise that order; should scans ever take every SM first, a look at a flag traps after seconds (spin_pause).
// Flags hold an epoch, which the launch takes from memory and counts up when the last loader is through: nothing is
// reset and nothing an argument, so that a graph may replay the launch. Two launches at once need a `sync` each.

#include "scan.cuh"

#define FUSED(D, NAME, TYPE, STAGES)                                                                                  \
    extern "C" __global__ void __launch_bounds__(128 * TEAMS, 1) gdn_fused_d##D##_##NAME(                             \
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap q_map,                             \
        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map, const u16* q, const u16* k, \
        const u16* v, const float* g, const float* beta, char* workspace, const void* initial_state,                  \
        void* final_state, u16* o, const int4* blocks, const int4* units, u32* sync, float scale, int hk, int hv,     \
        int chunks, int scans, int state_type, int normalise) {                                                       \
        const int4 a = __ldg(blocks + 2 * blockIdx.x);                                                                \
        const u32 epoch = *(const volatile u32*)sync + 1;                                                             \
        if (a.x == 0)                                                                                                 \
            prepare_units<D, TYPE>(Work{q, k, g, beta, workspace, scale, hk, hv, normalise, nullptr, nullptr},        \
                                   units + a.y, a.z, sync + FLAGS, chunks, epoch);                                    \
        else                                                                                                          \
            scan<D, TYPE, 1, STAGES, TYPE, false, true>(                                                              \
                Scan{&k_map,        &q_map,      &v_map, &o_map,  q,       k,    v,         workspace,                \
                     initial_state, final_state, o,      nullptr, nullptr, hk,   hv,        state_type,               \
                     blocks,        sync,        epoch,  chunks,  scans,   0.0f, state_type});                        \
    }

FUSED(128, bf16, BF16, 3)
FUSED(128, fp16, FP16, 3)
