// RMS norms, one pass over memory each. fp32 inside, rounded once.
#include <math.h>

#include "element.h"

// Below this many numbers a second thread costs more than it brings.
#define WORTH_THREADS 32768

static inline float root(const element *from, long size, float floor) {
    float square = 0;
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < size; i++) square += widen(from[i]) * widen(from[i]);
    return 1 / sqrtf(square + floor);
}

static inline void norm(element *to, const element *from, const float *weight, long size, float scale) {
#pragma omp simd
    for (long i = 0; i < size; i++) to[i] = narrow(widen(from[i]) * scale * weight[i]);
}

// y = x / sqrt(sum x^2 + floor) * weight over the last dim of x: [tokens, heads, size], with strides; y is contiguous.
void rms_norm(element *y, const element *x, const float *weight, long tokens, long heads, long size,
              long token_stride, long head_stride, float floor) {
    const long rows = tokens * heads;
#pragma omp parallel for if (rows * size > WORTH_THREADS) schedule(static)
    for (long row = 0; row < rows; row++) {
        const element *from = x + row / heads * token_stride + row % heads * head_stride;
        norm(y + row * size, from, weight, size, root(from, size, floor));
    }
}

// s = (residual + x) * scale, with x normed by `inner` first where that is not null, and y = norm(s); scale: one number,
// or null for 1. Each step rounds. All are [tokens, size], x and residual with a stride from one to the next.
void add_rms_norm(element *s, element *y, const element *x, const element *residual, const float *weight,
                  const float *inner, const element *scale, long tokens, long size, long x_stride,
                  long residual_stride, float floor) {
#pragma omp parallel for if (tokens * size > WORTH_THREADS) schedule(static)
    for (long token = 0; token < tokens; token++) {
        const element *from = x + token * x_stride, *other = residual + token * residual_stride;
        element *to = s + token * size;
        if (inner) {
            norm(to, from, inner, size, root(from, size, floor));
            from = to;
        }
#pragma omp simd
        for (long i = 0; i < size; i++) to[i] = narrow(widen(other[i]) + widen(from[i]));
        if (scale) {
            const float factor = widen(*scale);
#pragma omp simd
            for (long i = 0; i < size; i++) to[i] = narrow(widen(to[i]) * factor);
        }
        norm(y + token * size, to, weight, size, root(to, size, floor));
    }
}

// y = x / sqrt(sum x^2 + floor) * weight * act(gate) over the last dim of x: [tokens, heads, size], contiguous as y;
// act(g): sigmoid(g), times g where it is silu. gates: [tokens, heads * size]. The size is a multiple of LANES.
void gated_rms_norm(element *y, const element *x, const float *weight, const element *gates, long tokens, long heads,
                    long size, long gate_stride, long silu, float floor) {
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
