// Top-k experts of each token. fp32 throughout.
#include <math.h>
#include <string.h>

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

// Mark as taken every expert outside of the `top_groups` groups whose `group_best` experts have the largest sum.
static void exclude_groups(const float *values, char *taken, long experts, long groups, long top_groups, long group_best) {
    const long size = experts / groups;
    float sums[groups];
    char chosen[groups];
    for (long g = 0; g < groups; g++) {
        sums[g] = chosen[g] = 0;
        for (long i = 0; i < group_best && i < size; i++) {
            const long e = g * size + take_largest(values + g * size, taken + g * size, size);
            sums[g] += values[e];
        }
    }
    for (long i = 0; i < top_groups; i++) take_largest(sums, chosen, groups);
    for (long e = 0; e < experts; e++) taken[e] = !chosen[e / size];
}

// Per token, the `topk` experts of the highest score + correction (or none: NULL), within the group_best groups, and their
// weights: their scores, over their sum with `normalize`, times `scale`. logits: [tokens, experts].
void route(float *weights, long *chosen, const float *logits, const float *correction, long tokens, long experts,
           long topk, long groups, long top_groups, long group_best, long kind, long normalize, float scale) {
#pragma omp parallel for if (tokens * experts * (topk + 16) > WORTH_THREADS) schedule(static)
    for (long token = 0; token < tokens; token++) {
        float scores[experts], values[experts];
        char taken[experts];
        memcpy(scores, logits + token * experts, sizeof scores);
        score_all(scores, experts, kind);
        for (long e = 0; e < experts; e++) values[e] = correction ? scores[e] + correction[e] : scores[e];
        memset(taken, 0, sizeof taken);
        if (top_groups < groups) exclude_groups(values, taken, experts, groups, top_groups, group_best);
        float *mine = weights + token * topk, total = 0;
        for (long i = 0; i < topk; i++) {
            const long e = chosen[token * topk + i] = take_largest(values, taken, experts);
            total += mine[i] = scores[e];
        }
        for (long i = 0; i < topk; i++) mine[i] = (normalize ? mine[i] / (total + 1e-20f) : mine[i]) * scale;
    }
}
