// What happens between the products of a layer, one pass over memory each. fp32 inside, rounded once.
#include <math.h>

#include "gated_activation.h"

// Below this many numbers a second thread costs more than it brings.
#define WORTH_THREADS 32768

// y = x / sqrt(sum x^2 + floor) * weight over the last dim of x: [tokens, heads, size], with strides; y is contiguous.
void normalize(element *y, const element *x, const float *weight, long tokens, long heads, long size,
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
void open_heads(element *y, const element *x, const float *weight, const element *gates, long tokens, long heads,
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
            lanes factor, g = load(gate + i);
            memcpy(&factor, weight + i, sizeof factor);
            const lanes opened = (silu ? g : all(1)) / (1 + exponential(-g));
            store(y + row * size + i, load(from + i) * scale * factor * opened);
        }
    }
}

// A row of x is gate and up side by side: x: [tokens, 2 width], y: [tokens, width]. The width is a multiple of LANES.
void gate(element *y, const element *x, long tokens, long width, long token_stride, gating how) {
#pragma omp parallel for if (tokens * width > WORTH_THREADS) schedule(static)
    for (long token = 0; token < tokens; token++) {
        const element *gates = x + token * token_stride, *ups = gates + width;
        for (long i = 0; i < width; i += LANES)
            store(y + token * width + i, gated(load(gates + i), load(ups + i), &how));
    }
}

// Rotate the pairs (i, i + turned / 2), or (2i, 2i + 1) where they are interleaved, of the first `turned` dims of each
// head; the other dims are copied. x: [tokens, heads, dim], with strides. cosine, sine: [tokens, turned], sine with the
// sign of its place.
void rotate(element *y, const element *x, const element *cosine, const element *sine, long tokens, long heads,
            long dim, long turned, long token_stride, long head_stride, long interleaved) {
    const long half = turned / 2;
#pragma omp parallel for if (tokens * heads * dim > WORTH_THREADS) schedule(static)
    for (long token = 0; token < tokens; token++) {
        const element *c = cosine + token * turned, *s = sine + token * turned;
        for (long head = 0; head < heads; head++) {
            const element *from = x + token * token_stride + head * head_stride;
            element *to = y + (token * heads + head) * dim;
            if (interleaved) {
#pragma omp simd
                for (long i = 0; i < turned; i += 2) {
                    float a = widen(from[i]), b = widen(from[i + 1]);
                    to[i] = narrow(a * widen(c[i]) + b * widen(s[i]));
                    to[i + 1] = narrow(b * widen(c[i + 1]) + a * widen(s[i + 1]));
                }
            } else {
#pragma omp simd
                for (long i = 0; i < half; i++) {
                    float a = widen(from[i]), b = widen(from[i + half]);
                    to[i] = narrow(a * widen(c[i]) + b * widen(s[i]));
                    to[i + half] = narrow(b * widen(c[i + half]) + a * widen(s[i + half]));
                }
            }
            memcpy(to + turned, from + turned, (dim - turned) * sizeof(element));
        }
    }
}
