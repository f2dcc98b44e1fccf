// What wgmma_resident.cu needs of hopper.cuh and wgmma.cuh beyond on_cpu/wgmma_on_cpu.cuh.
#pragma once
#include "wgmma_on_cpu.cuh"

static uint4 load_once(const void* p) { return read_x(p); }
static unsigned lds16(unsigned at) { return *(const unsigned short*)place(at, 2); }
static float4 shared_load_float4(unsigned at) { return *(const float4*)place(at, 16); }
static void sts32(unsigned at, unsigned v) { memcpy(place(at, 4), &v, 4); }
static void pass_clocks(unsigned) {}
