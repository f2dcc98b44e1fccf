// Gated delta rule over a sequence in two launches, the preparation and the scan of scan.cuh (sm_90a).

#include "scan.cuh"

#define PREPARE(D, NAME, TYPE, CONVERT)                                                                             \
    extern "C" __global__ void __launch_bounds__(128, PREPARE_BLOCKS) gdn_prepare_d##D##_##NAME(                    \
        const u16* q, const u16* k, const float* g, const float* beta, const int* chunks, char* workspace,          \
        float scale, int hk, int hv, int normalise, u16* q_fp16, u16* k_fp16) {                                     \
        prepare<D, TYPE, CONVERT>(Work{q, k, g, beta, workspace, scale, hk, hv, normalise, q_fp16, k_fp16}, chunks); \
    }
#define SCAN(D, NAME, GROUPS, ...)                                                                                  \
    extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) gdn_scan_d##D##_##NAME##_g##GROUPS(         \
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap q_map,                           \
        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map, const u16* q,             \
        const u16* k, const u16* v, const char* workspace, const void* initial_state, void* final_state, u16* o,    \
        const int* bounds, const int* chunk_offsets, int hk, int hv, int state_type) {                              \
        scan<D, __VA_ARGS__>(Scan{&k_map, &q_map, &v_map, &o_map, q, k, v, workspace, initial_state, final_state,   \
                                  o, bounds, chunk_offsets, hk, hv, state_type});                                   \
    }

PREPARE(128, bf16, BF16, false)
PREPARE(128, fp16, FP16, false)
PREPARE(64, bf16, BF16, false)
PREPARE(64, fp16, FP16, false)
SCAN(128, bf16, 1, BF16, 1, 3)
SCAN(128, bf16, 2, BF16, 2, 3)
SCAN(128, fp16, 1, FP16, 1, 3)
SCAN(128, fp16, 2, FP16, 2, 3)
SCAN(64, bf16, 1, BF16, 1, 3)
SCAN(64, fp16, 1, FP16, 1, 3)
// bf16 in, operands in fp16, float32 out
PREPARE(128, bf16_f32, BF16, true)
SCAN(128, bf16_f32, 1, FP16, 1, 3, BF16, true)
SCAN(128, bf16_f32, 2, FP16, 2, 3, BF16, true)
