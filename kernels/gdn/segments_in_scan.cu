// The split scan of segments.cu without a launch that composes: maps in the form that compose.cuh takes, and scans that
// compose their own S, each from its sequence's second segment on, while others do the same for theirs (sm_90a).
// rows as in segments.cu, with a segment's place in its sequence, from 0, for the last number. starts: of a sequence's
// second segment S, of later ones B in the order of accumulators; transitions: pieces of A transposed.
//   PARTS 1 (fp16)   A in fp16, S in two fp16 parts          PARTS 2 (parts)   both in two bf16 parts

#include "segments.cuh"

// The scan's blocks start where a block of this launch has ended, and wait for all of them.
#define MAPS(D, NAME, TYPE, RECOMPUTE, PARTS)                                                       \
    extern "C" __global__ void __launch_bounds__(384, 1) gdn_in_scan_maps_d##D##_##NAME(ARGUMENTS) { \
        GIVEN                                                                                       \
        launch_dependent_grids();                                                                   \
        const Segment x = segment_of(rows);                                                         \
        if (x.leads) scan_segment<D, TYPE, 1, true, RECOMPUTE>(s, joint, shared, rows);             \
        else map_segment<D, TYPE, RECOMPUTE, PARTS>(s, joint, shared, x);                           \
    }
// Three warpgroups at least: with two, which keep the registers they are launched with, ptxas serialises products.
#define SCANS(D, NAME, TYPE, GROUPS, RECOMPUTE, PARTS)                                            \
    extern "C" __global__ void __launch_bounds__(GROUPS == 2 && RECOMPUTE ? 512 : 384, 1)         \
        gdn_in_scan_d##D##_##NAME(ARGUMENTS) {                                                    \
        GIVEN                                                                                     \
        scan_segment<D, TYPE, GROUPS, false, RECOMPUTE, PARTS>(s, joint, shared, rows);           \
    }

MAPS(128, bf16_fp16, BF16, false, 1)
MAPS(128, bf16_parts, BF16, false, 2)
MAPS(128, bf16_fp16_lean, BF16, true, 1)
MAPS(128, bf16_parts_lean, BF16, true, 2)
SCANS(128, bf16_fp16_g1, BF16, 1, false, 1)
SCANS(128, bf16_fp16_g2, BF16, 2, false, 1)
SCANS(128, bf16_parts_g1, BF16, 1, false, 2)
SCANS(128, bf16_parts_g2, BF16, 2, false, 2)
SCANS(128, bf16_fp16_g1_lean, BF16, 1, true, 1)
SCANS(128, bf16_fp16_g2_lean, BF16, 2, true, 1)
SCANS(128, bf16_parts_g1_lean, BF16, 1, true, 2)
SCANS(128, bf16_parts_g2_lean, BF16, 2, true, 2)
