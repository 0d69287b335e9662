// Whole experts for few tokens, without sorting by expert. fp32 inside; results are rounded once.
#include "gated_activation.h"

// Multiply-adds below which a second thread costs more than it brings.
#define WORTH_THREADS 200000

static inline float dot(const element *a, const float *b, long size) {
    lanes total = {};
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        lanes other;
        memcpy(&other, b + i, sizeof other);
        total += load(a + i) * other;
    }
    float result = sum(total);
    for (; i < size; i++) result += widen(a[i]) * b[i];
    return result;
}

// y_t = sum over the choices i of token t of weights_ti (down_e act(gate_up_e x_t + gate_up_bias_e) + down_bias_e),
// e = experts_ti. x: [tokens, hidden], rows `stride` apart. gate_up: [E, 2 width, hidden]. down: [E, hidden, width].
// Biases may be NULL. scratch: [pairs, 2 padded] with `padded` the width rounded up to LANES, + [tokens, hidden].
void moe_experts(element *y, const element *x, long stride, const element *gate_up, const element *gate_up_bias,
                 const element *down, const element *down_bias, const float *weights, const long *experts,
                 float *scratch, long tokens, long topk, long hidden, long width,
                 GATING_ARGUMENTS) {
    const gating how = GATING;
    const long pairs = tokens * topk, padded = (width + LANES - 1) / LANES * LANES;
    float *exact = scratch + pairs * 2 * padded;
    for (long t = 0; t < tokens; t++)
        for (long i = 0; i < hidden; i++) exact[t * hidden + i] = widen(x[t * stride + i]);
    const int threads = pairs * width * hidden * 3 > WORTH_THREADS;
#pragma omp parallel if (threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (long pair = 0; pair < pairs; pair++)
            for (long begin = 0; begin < padded; begin += LANES) {
                const long e = experts[pair];
                const element *matrix = gate_up + e * 2 * width * hidden;
                lanes found[2] = {};
                for (int half = 0; half < 2; half++)
                    for (long i = begin; i < begin + LANES && i < width; i++) {
                        const long row = half * width + i;
                        found[half][i - begin] = dot(matrix + row * hidden, exact + pair / topk * hidden, hidden) +
                                                 (gate_up_bias ? widen(gate_up_bias[e * 2 * width + row]) : 0);
                    }
                const lanes inner = gated(found[0], found[1], &how);
                memcpy(scratch + pair * padded + begin, &inner, sizeof inner);
            }
#pragma omp for collapse(2) schedule(static)
        for (long t = 0; t < tokens; t++)
            for (long i = 0; i < hidden; i++) {
                float total = 0;
                for (long pair = t * topk; pair < (t + 1) * topk; pair++) {
                    const long row = experts[pair] * hidden + i;
                    const float found = dot(down + row * width, scratch + pair * padded, width);
                    total += weights[pair] * (found + (down_bias ? widen(down_bias[row]) : 0));
                }
                y[t * hidden + i] = narrow(total);
            }
    }
}
