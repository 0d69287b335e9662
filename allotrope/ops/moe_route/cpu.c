// A mixture of experts without sorting by tensor operations: who takes a token, in which order the rows of all experts
// lie, and the whole of the experts' work where tokens are few. fp32 inside; results are rounded once.
#include <math.h>

#include "gated_activation.h"

// Multiply-adds below which a second thread costs more than it brings.
#define WORTH_THREADS 200000

enum score { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };

static void score_all(float *scores, long experts, enum score kind) {
    if (kind == SOFTMAX) {
        float largest = -INFINITY, total = 0;
        for (long e = 0; e < experts; e++) largest = scores[e] > largest ? scores[e] : largest;
        for (long e = 0; e < experts; e++) total += scores[e] = expf(scores[e] - largest);
        for (long e = 0; e < experts; e++) scores[e] /= total;
        return;
    }
    for (long e = 0; e < experts; e++) {
        const float x = scores[e];
        // Beyond 20 softplus is x, as in PyTorch.
        scores[e] = kind == SIGMOID ? 1 / (1 + expf(-x)) : sqrtf(x > 20 ? x : log1pf(expf(x)));
    }
}

// Whether a is larger than b; what is not a number is larger than all that are, so that it is chosen and seen.
static inline int larger(float a, float b) { return a > b || (a != a && b == b); }

// Take the largest of `values` that is not yet marked as taken, the first of equal ones, and mark it.
static long take_largest(const float *values, char *taken, long count) {
    long best = -1;
    for (long i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || larger(values[i], values[best]))) best = i;
    taken[best] = 1;
    return best;
}

// Mark as taken every expert outside of the `kept` groups whose `best` experts have the largest sum.
static void leave_groups(const float *values, char *taken, long experts, long groups, long kept, long best) {
    const long size = experts / groups;
    float sums[groups];
    char chosen[groups];
    for (long g = 0; g < groups; g++) {
        sums[g] = chosen[g] = 0;
        for (long i = 0; i < best && i < size; i++) {
            const long e = g * size + take_largest(values + g * size, taken + g * size, size);
            sums[g] += values[e];
        }
    }
    for (long i = 0; i < kept; i++) take_largest(sums, chosen, groups);
    for (long e = 0; e < experts; e++) taken[e] = !chosen[e / size];
}

// Per token, the `topk` experts of the highest score + correction (or none: NULL), within the best groups, and their
// weights: their scores, over their sum with `normalize`, times `scale`. logits: [tokens, experts].
void route(float *weights, long *chosen, const float *logits, const float *correction, long tokens, long experts,
           long topk, long groups, long kept, long best, long kind, long normalize, float scale) {
#pragma omp parallel for if (tokens * experts * (topk + 16) > WORTH_THREADS) schedule(static)
    for (long token = 0; token < tokens; token++) {
        float scores[experts], values[experts];
        char taken[experts];
        memcpy(scores, logits + token * experts, sizeof scores);
        score_all(scores, experts, kind);
        for (long e = 0; e < experts; e++) values[e] = correction ? scores[e] + correction[e] : scores[e];
        memset(taken, 0, sizeof taken);
        if (kept < groups) leave_groups(values, taken, experts, groups, kept, best);
        float *mine = weights + token * topk, total = 0;
        for (long i = 0; i < topk; i++) {
            const long e = chosen[token * topk + i] = take_largest(values, taken, experts);
            total += mine[i] = scores[e];
        }
        for (long i = 0; i < topk; i++) mine[i] = (normalize ? mine[i] / (total + 1e-20f) : mine[i]) * scale;
    }
}

// Sort pairs of token and choice by expert, earlier pairs first. chosen: [pairs]. ends: [experts], where each expert's
// rows end. source: [pairs] token of each sorted row. owner: [pairs] expert of each. place: [pairs] row of each pair.
void group(int *ends, long *source, long *owner, long *place, const long *chosen, long pairs, long experts, long topk) {
    long next[experts];
    memset(next, 0, sizeof next);
    for (long i = 0; i < pairs; i++) next[chosen[i]]++;
    for (long e = 0, row = 0; e < experts; e++) {
        const long count = next[e];
        next[e] = row;
        ends[e] = row += count;
    }
    for (long i = 0; i < pairs; i++) {
        const long row = place[i] = next[chosen[i]]++;
        source[row] = i / topk;
        owner[row] = chosen[i];
    }
}

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
// e = chosen_ti. x: [tokens, hidden], rows `stride` apart. gate_up: [experts, 2 width, hidden]. down: [experts, hidden,
// width]. Biases may be NULL. scratch: [pairs, 2 padded] with `padded` the width rounded up to LANES, + [tokens, hidden].
void mix_experts(element *y, const element *x, long stride, const element *gate_up, const element *gate_up_bias,
                 const element *down, const element *down_bias, const float *weights, const long *chosen,
                 float *scratch, long tokens, long topk, long hidden, long width, gating how) {
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
                const long e = chosen[pair];
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
                    const long row = chosen[pair] * hidden + i;
                    const float found = dot(down + row * width, scratch + pair * padded, width);
                    total += weights[pair] * (found + (down_bias ? widen(down_bias[row]) : 0));
                }
                y[t * hidden + i] = narrow(total);
            }
    }
}

// y_t = sum over the choices i of token t of weights_ti (results[place_ti] + bias_e), e = chosen_ti. results: [pairs,
// hidden]. weights, place, chosen: [tokens, topk]. bias: [experts, hidden] or NULL. y: [tokens, hidden].
void combine(element *y, const element *results, const float *weights, const long *place, const long *chosen,
             const element *bias, long tokens, long topk, long hidden) {
#pragma omp parallel for if (tokens * topk * hidden > WORTH_THREADS) schedule(static)
    for (long t = 0; t < tokens; t++) {
        long i = 0;
        for (; i + LANES <= hidden; i += LANES) {
            lanes total = {};
            for (long pair = t * topk; pair < (t + 1) * topk; pair++) {
                lanes x = load(results + place[pair] * hidden + i);
                if (bias) x += load(bias + chosen[pair] * hidden + i);
                total += weights[pair] * x;
            }
            store(y + t * hidden + i, total);
        }
        for (; i < hidden; i++) {
            float total = 0;
            for (long pair = t * topk; pair < (t + 1) * topk; pair++)
                total += weights[pair] * (widen(results[place[pair] * hidden + i]) +
                                          (bias ? widen(bias[chosen[pair] * hidden + i]) : 0));
            y[t * hidden + i] = narrow(total);
        }
    }
}
