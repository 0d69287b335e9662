// The weighted sum of experts' outputs. fp32 inside, rounded once.
#include "element.h"

// Multiply-adds below which a second thread costs more than it brings.
#define WORTH_THREADS 200000

// y_t = sum over the choices i of token t of weights_ti (results[inverse_ti] + bias_e), e = experts_ti.
// results: [pairs, hidden]. weights, inverse, experts: [tokens, topk]. bias: [number of experts, hidden] or NULL.
// y: [tokens, hidden]. Choices of experts from `held` on count nothing.
void combine(element *y, const element *results, const float *weights, const long *inverse, const long *experts,
             const element *bias, long tokens, long topk, long hidden, long held) {
#pragma omp parallel for if (tokens * topk * hidden > WORTH_THREADS) schedule(static)
    for (long t = 0; t < tokens; t++) {
        long i = 0;
        for (; i + LANES <= hidden; i += LANES) {
            lanes total = {};
            for (long pair = t * topk; pair < (t + 1) * topk; pair++) {
                if (experts[pair] >= held) continue;
                lanes x = load(results + inverse[pair] * hidden + i);
                if (bias) x += load(bias + experts[pair] * hidden + i);
                total += weights[pair] * x;
            }
            store(y + t * hidden + i, total);
        }
        for (; i < hidden; i++) {
            float total = 0;
            for (long pair = t * topk; pair < (t + 1) * topk; pair++) {
                if (experts[pair] >= held) continue;
                total += weights[pair] * (widen(results[inverse[pair] * hidden + i]) +
                                          (bias ? widen(bias[experts[pair] * hidden + i]) : 0));
            }
            y[t * hidden + i] = narrow(total);
        }
    }
}
