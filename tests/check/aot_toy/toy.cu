// 96 live floats where __launch_bounds__ leaves 32 registers: the assembler has to spill. 1 KB of static shared memory.
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(const float* a, float* b, int n) {
    __shared__ float edge[256];
    float r[96], sum = 0;
#pragma unroll
    for (int i = 0; i < 96; i++) r[i] = a[threadIdx.x + i * 1024];
    for (int j = 0; j < n; j++) {
#pragma unroll
        for (int i = 0; i < 96; i++) r[i] = r[i] * r[(i + 7) % 96] + j;
    }
#pragma unroll
    for (int i = 0; i < 96; i++) sum += r[i] * i;
    edge[threadIdx.x % 256] = sum;
    __syncthreads();
    b[threadIdx.x] = edge[(threadIdx.x + 1) % 256];
}
