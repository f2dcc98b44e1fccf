// Paged decode attention with the operands swapped: tokens are the rows of the matrix product, the query heads of one
// kv head its 8 columns (mma.sync m16n8k16), so that 6 queries are padded to 8 and not to 16 or 64.
//
//   S^T[token, query] = K Q^T          A = K from shared memory, converted in registers; B = Q^T, kept in registers
//   O^T[d, query]    += V^T P^T        A = V^T: bytes of two tokens interleaved, then converted; B = P^T, transposed
//
// Which token is which row, and which d is which column, is free as long as both products agree, so the fragments are
// chosen for wide loads (lane (g, t) = (lane / 4, lane % 4) reads 16 bytes of one token) and no converted value is ever
// written to shared memory again.
//
// Work: a team of `width` blocks, one kv head each, walks a line of sequences and units of TOKENS TILES tokens side by
// side (heads beyond the width are further items). The line is cut evenly into one range per team, or, where all items
// are alike and it ends no later, each item gets teams of its own (decode_scheduler.cuh). A block's consumer warps take
// its units in turn (decode_mainloop.cuh). PRODUCERS more warps load K and V of the units into a pipeline of STAGES for
// each consumer warp, one TMA load per tile: the first loads are issued after two dependent ones (lengths, page ids),
// and nothing that the products wait for queues behind the tiles. Where a (sequence, head) ends, the warps' (m, l, O)
// are merged in shared memory; a range that ends inside one leaves its part in a workspace, and the last block to
// arrive merges the parts (decode_epilogue.cuh). All counters are left at zero.
//
// A tile comes by TMA, which swizzles each line of 128 bytes by its token; which token is which row of the product
// (token_row) is chosen so that the fragments' loads meet no bank conflict. Skewed stages would do that too, but a copy
// that moves its bytes within 128 bytes makes more requests of L2.
#include "decode_epilogue.cuh"
#include "decode_mainloop.cuh"
#include "decode_scheduler.cuh"

#define KV_DECODE(name, KIND, D, WARPS, TILES, STAGES)                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * (WARPS + PRODUCERS), 1)                                          \
        name(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const unsigned char* q, \
             const unsigned char* k_scale, const unsigned char* v_scale, const int* table, const int* lengths,         \
             unsigned char* o, unsigned char* part, float* part_ml, u32* arrived, int width, int rows, int teams,      \
             int per_item, int second, int capped_below, int batch, int kv_heads, int group, int page_shift,           \
             int max_pages, float logit_scale, int q_is_bf16, u32 zero) {                                              \
        DYNAMIC_SHARED(memory);                                                                                        \
        typedef Decode<KIND, D, WARPS, TILES, STAGES> Kernel;                                                          \
        static_assert(Kernel::BYTES <= 232448, "shared memory");                                                       \
        const Problem problem = {                                                                                      \
            &k_map,     &v_map,    q,           k_scale,   v_scale,  table,  lengths,      o,     part,     part_ml,   \
            arrived,    width,     rows,        teams,     per_item, second, capped_below, batch, kv_heads, group,     \
            page_shift, max_pages, logit_scale, q_is_bf16, zero};                                                      \
        Kernel(problem, opaque(shared_address(memory)), threadIdx.x, blockIdx.x, gridDim.x).run();                     \
    }

KV_DECODE(kv_fp8_d256_w8_t2_p3, FP8, 256, 8, 2, 3)
KV_DECODE(kv_fp8_d128_w8_t4_p3, FP8, 128, 8, 4, 3)
KV_DECODE(kv_q8_0_d256_w8_t2_p2, Q8_0, 256, 8, 2, 2)
KV_DECODE(kv_q8_0_d128_w8_t2_p5, Q8_0, 128, 8, 2, 5)
KV_DECODE(kv_bf16_d256_w8_t2_p3, BF16, 256, 8, 2, 3)
KV_DECODE(kv_bf16_d128_w8_t2_p3, BF16, 128, 8, 2, 3)
KV_DECODE(kv_fp16_d256_w8_t2_p3, F16, 256, 8, 2, 3)
KV_DECODE(kv_fp16_d128_w8_t2_p3, F16, 128, 8, 2, 3)
