/* Runs the exported kernel on the vectors and holds its outputs against the reference's: 0 when they are within the
 * limits of case.h, 1 when not, 2 when it cannot run. Each output starts as NaN, and the kernel runs twice, so what a
 * launch leaves to the next one has to be in order too. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "killgate.h"

typedef enum { F32, F16, BF16 } kind;
typedef struct { const char *name, *file; size_t bytes; unsigned fill; } tensor;         /* no file: words of `fill` */
typedef struct { int tensor; const char *file; size_t count; kind kind; double relative, largest; } check;
#include "case.h"

enum { TENSOR_COUNT = sizeof TENSORS / sizeof *TENSORS, CHECK_COUNT = sizeof CHECKS / sizeof *CHECKS };

static void must(CUresult code, const char *what) {
    const char *said = "?";
    if (code == CUDA_SUCCESS) return;
    cuGetErrorString(code, &said);
    fprintf(stderr, "%s: %s\n", what, said);
    exit(2);
}

static void *contents(const char *path, size_t bytes) {
    FILE *file = fopen(path, "rb");
    void *to = malloc(bytes + 1);
    if (!file || !to || fread(to, 1, bytes + 1, file) != bytes) {
        fprintf(stderr, "%s: not a file of %zu bytes; run this in the exported folder\n", path, bytes);
        exit(2);
    }
    fclose(file);
    return to;
}

static double value(const void *at, size_t i, kind of) {
    float wide;
    uint32_t bits;
    if (of == F32) {
        memcpy(&wide, (const char *)at + 4 * i, 4);
        return wide;
    }
    uint16_t half;
    memcpy(&half, (const char *)at + 2 * i, 2);
    if (of == BF16) {
        bits = (uint32_t)half << 16;
        memcpy(&wide, &bits, 4);
        return wide;
    }
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                  : exponent     ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return half >> 15 ? -size : size;
}

/* Frobenius error over the reference's norm, and the largest error over its rms; a NaN is within no limit. */
static int within(const check *c, const double *wanted, const void *got, int tell) {
    double norm = 0, error = 0, largest = 0;
    int wrong = 0;
    for (size_t i = 0; i < c->count; i++) {
        double off = fabs((got ? value(got, i, c->kind) : 0) - wanted[i]);
        wrong |= !(off < INFINITY);
        norm += wanted[i] * wanted[i];
        error += off * off;
        largest = off > largest ? off : largest;
    }
    double rms = sqrt(norm / c->count);
    error = norm > 0 ? sqrt(error / norm) : sqrt(error);
    largest = rms > 0 ? largest / rms : largest;
    wrong |= !(error <= c->relative && largest <= c->largest);
    if (tell)
        printf("%s: relative error %.3g (limit %.3g), largest %.3g (limit %.3g): %s\n", TENSORS[c->tensor].name, error,
               c->relative, largest, c->largest, wrong ? "WRONG" : "ok");
    return !wrong;
}

int main(void) {
    CUdevice device;
    CUcontext context;
    CUdeviceptr at[TENSOR_COUNT];
    killgate kernels;
    int wrong = 0;
    must(cuInit(0), "cuInit");
    must(cuDeviceGet(&device, 0), "cuDeviceGet");
    must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    must(killgate_load(&kernels), "killgate_load");
    for (int run = 0; run < 2; run++) {
        for (int i = 0; i < TENSOR_COUNT; i++) {
            const tensor *t = &TENSORS[i];
            if (!run) must(cuMemAlloc(&at[i], t->bytes ? t->bytes : 1), t->name);
            if (!t->bytes) continue;
            if (t->file) {
                void *from = contents(t->file, t->bytes);
                must(cuMemcpyHtoD(at[i], from, t->bytes), t->name);
                free(from);
            } else if (!run || t->fill == POISON) {
                must(t->bytes % 4 ? cuMemsetD8(at[i], t->fill & 255, t->bytes) : cuMemsetD32(at[i], t->fill, t->bytes / 4),
                     t->name);
            }
        }
        must(RUN(&kernels, at, 0), "killgate_run");
        must(cuCtxSynchronize(), "killgate_run");
    }
    for (int i = 0; i < CHECK_COUNT; i++) {
        const check *c = &CHECKS[i];
        const tensor *t = &TENSORS[c->tensor];
        double *wanted = contents(c->file, c->count * sizeof(double));
        void *got = malloc(t->bytes);
        must(cuMemcpyDtoH(got, at[c->tensor], t->bytes), t->name);
        if (within(c, wanted, NULL, 0)) {
            fprintf(stderr, "%s: zeros would pass, so this is no test; export another shape\n", t->name);
            return 2;
        }
        wrong |= !within(c, wanted, got, 1);
        free(wanted);
        free(got);
    }
    must(killgate_unload(&kernels), "killgate_unload");
    return wrong;
}
