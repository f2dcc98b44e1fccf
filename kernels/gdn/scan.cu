// Gated delta rule over a sequence in two launches, the preparation and the scan of scan.cuh (sm_90a).

#include "scan.cuh"

#define PREPARE(D, NAME, BLOCKS, TYPE, ...)                                                                \
    extern "C" __global__ void __launch_bounds__(128, BLOCKS) gdn_prepare_d##D##_##NAME(                   \
        const u16* q, const u16* k, const float* g, const float* beta, const int* chunks, char* workspace, \
        float scale, int hk, int hv, int normalise, u16* q_fp16, u16* k_fp16) {                            \
        const Work work{q, k, g, beta, workspace, scale, hk, hv, normalise, q_fp16, k_fp16};               \
        prepare<D, TYPE, __VA_ARGS__>(work, chunks);                                                       \
    }
#define SCAN(D, NAME, THREADS, ...)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) gdn_scan_d##D##_##NAME(                                  \
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap q_map,                             \
        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map, const u16* q, const u16* k, \
        const u16* v, const char* workspace, const void* initial_state, void* final_state, u16* o, const int* bounds, \
        const int* chunk_offsets, int hk, int hv, int state_type, float scale) {                                      \
        Scan s{&k_map, &q_map, &v_map, &o_map, q, k, v, workspace, initial_state, final_state, o};                    \
        s.bounds = bounds, s.chunk_offsets = chunk_offsets, s.hk = hk, s.hv = hv, s.scale = scale;                    \
        s.state_type = s.final_type = state_type;                                                                     \
        scan<D, __VA_ARGS__>(s);                                                                                      \
    }

PREPARE(128, bf16, PREPARE_BLOCKS, BF16, false)
PREPARE(128, fp16, PREPARE_BLOCKS, FP16, false)
PREPARE(64, bf16, PREPARE_BLOCKS, BF16, false)
PREPARE(64, fp16, PREPARE_BLOCKS, FP16, false)
SCAN(128, bf16_g1, 256, BF16, 1, 3)
SCAN(128, bf16_g2, 384, BF16, 2, 3)
SCAN(128, fp16_g1, 256, FP16, 1, 3)
SCAN(128, fp16_g2, 384, FP16, 2, 3)
SCAN(64, bf16_g1, 256, BF16, 1, 3)
SCAN(64, fp16_g1, 256, FP16, 1, 3)
// whole heads without norms, recomputing the scores: the scan makes P and the vectors
PREPARE(128, bf16_lean, RECOMPUTE_PREPARE_BLOCKS, BF16, false, true)
PREPARE(128, fp16_lean, RECOMPUTE_PREPARE_BLOCKS, FP16, false, true)
SCAN(128, bf16_g2_lean, 512, BF16, 2, 3, BF16, false, false, true)
SCAN(128, fp16_g2_lean, 512, FP16, 2, 3, FP16, false, false, true)
// bf16 in, operands in fp16, float32 out
PREPARE(128, bf16_f32, PREPARE_BLOCKS, BF16, true)
SCAN(128, bf16_f32_g1, 256, FP16, 1, 3, BF16, true)
SCAN(128, bf16_f32_g2, 384, FP16, 2, 3, BF16, true)
