// The split scan of segments.cu without a launch that composes: maps in the form that compose.cuh takes, and scans that
// compose their own S, each from its sequence's second segment on, while others do the same for theirs (sm_90a).
// rows as in segments.cu, with a segment's place in its sequence, from 0, for the last number. starts: of a sequence's
// second segment S, of later ones B in the order of accumulators; transitions: pieces of A transposed.

#include "segments.cuh"

// The scan's blocks start where a block of this launch has ended, and wait for all of them.
#define MAPS(D, NAME, TYPE, RECOMPUTE)                                                               \
    extern "C" __global__ void __launch_bounds__(384, 1) gdn_in_scan_maps_d##D##_##NAME(ARGUMENTS) { \
        GIVEN                                                                                        \
        launch_dependent_grids();                                                                    \
        const Segment x = segment_of(rows);                                                          \
        if (x.leads) scan_segment<D, TYPE, 1, true, RECOMPUTE>(s, joint, shared, rows);              \
        else map_segment<D, TYPE, RECOMPUTE, true>(s, joint, shared, x);                             \
    }
// Three warpgroups at least: with two, which keep the registers they are launched with, ptxas serialises products.
#define SCANS(D, NAME, TYPE, GROUPS, RECOMPUTE)                                           \
    extern "C" __global__ void __launch_bounds__(GROUPS == 2 && RECOMPUTE ? 512 : 384, 1) \
        gdn_in_scan_d##D##_##NAME(ARGUMENTS) {                                            \
        GIVEN                                                                             \
        scan_segment<D, TYPE, GROUPS, false, RECOMPUTE, true>(s, joint, shared, rows);    \
    }

MAPS(128, bf16, BF16, false)
MAPS(128, bf16_lean, BF16, true)
SCANS(128, bf16_g1, BF16, 1, false)
SCANS(128, bf16_g2, BF16, 2, false)
SCANS(128, bf16_g1_lean, BF16, 1, true)
SCANS(128, bf16_g2_lean, BF16, 2, true)
