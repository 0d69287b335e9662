// RMS norms, one pass over memory each. fp32 inside, rounded once.
#include <math.h>

#include "element.h"

// Below this many numbers a second thread costs more than it brings.
#define WORTH_THREADS 32768

// y = x / sqrt(sum x^2 + floor) * weight over the last dim of x: [tokens, heads, size], with strides; y is contiguous.
void rms_norm(element *y, const element *x, const float *weight, long tokens, long heads, long size,
              long token_stride, long head_stride, float floor) {
    const long rows = tokens * heads;
#pragma omp parallel for if (rows * size > WORTH_THREADS) schedule(static)
    for (long row = 0; row < rows; row++) {
        const element *from = x + row / heads * token_stride + row % heads * head_stride;
        element *to = y + row * size;
        float square = 0;
#pragma omp simd reduction(+ : square)
        for (long i = 0; i < size; i++) square += widen(from[i]) * widen(from[i]);
        const float scale = 1 / sqrtf(square + floor);
#pragma omp simd
        for (long i = 0; i < size; i++) to[i] = narrow(widen(from[i]) * scale * weight[i]);
    }
}

// y = x / sqrt(sum x^2 + floor) * weight * act(gate) over the last dim of x: [tokens, heads, size], contiguous as y;
// act(g): sigmoid(g), times g where it is silu. gates: [tokens, heads * size]. The size is a multiple of LANES.
void gated_rms_norm(element *y, const element *x, const float *weight, const element *gates, long tokens, long heads,
                    long size, long gate_stride, float floor, long silu) {
    const long rows = tokens * heads;
#pragma omp parallel for if (rows * size > WORTH_THREADS) schedule(static)
    for (long row = 0; row < rows; row++) {
        const element *from = x + row * size, *gate = gates + row / heads * gate_stride + row % heads * size;
        lanes squares = {};
        for (long i = 0; i < size; i += LANES) {
            const lanes value = load(from + i);
            squares += value * value;
        }
        const float scale = 1 / sqrtf(sum(squares) + floor);
        for (long i = 0; i < size; i += LANES) {
            lanes w, g = load(gate + i);
            memcpy(&w, weight + i, sizeof w);
            const lanes gated = (silu ? g : all(1)) / (1 + exponential(-g));
            store(y + row * size + i, load(from + i) * scale * w * gated);
        }
    }
}
