// The mixing weights of hyper-connections, token by token. All fp32. Tensor operations would need a launch for each of
// the few numbers of a token.
#include <math.h>

// Tokens below which a second thread costs more than it brings.
#define WORTH_THREADS 64

static inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Divide every number by eps and the sum of its row or column: n sums of n numbers.
static void divide(float *c, long n, long outer, long inner, float eps) {
    for (long i = 0; i < n; i++) {
        float sum = eps;
        for (long j = 0; j < n; j++) sum += c[i * outer + j * inner];
        for (long j = 0; j < n; j++) c[i * outer + j * inner] /= sum;
    }
}

// From m [tokens, (2 + n) n]: pre = sigmoid(m scale[0] + base) + eps of the first n, post = 2 sigmoid(m scale[1] + base)
// of the next n, both [tokens, n]; comb [tokens, n, n] = sinkhorn(softmax over rows of m scale[2] + base of the others +
// eps).
void mixing_weights(float *pre, float *post, float *comb, const float *m, const float *base, const float *scale,
                    long tokens, long n, long iterations, float eps) {
    const long count = (2 + n) * n;
#pragma omp parallel for if (tokens > WORTH_THREADS) schedule(static)
    for (long t = 0; t < tokens; t++) {
        float *c = comb + t * n * n;
        for (long i = 0; i < count; i++) {
            const float x = m[t * count + i] * scale[i < n ? 0 : i < 2 * n ? 1 : 2] + base[i];
            if (i < n)
                pre[t * n + i] = sigmoid(x) + eps;
            else if (i < 2 * n)
                post[t * n + i - n] = 2 * sigmoid(x);
            else
                c[i - 2 * n] = x;
        }
        for (long row = 0; row < n; row++) {
            float *r = c + row * n, max = r[0], sum = 0;
            for (long j = 1; j < n; j++) max = r[j] > max ? r[j] : max;
            for (long j = 0; j < n; j++) sum += r[j] = expf(r[j] - max);
            for (long j = 0; j < n; j++) r[j] = r[j] / sum + eps;
        }
        divide(c, n, 1, n, eps);
        for (long i = 1; i < iterations; i++) {
            divide(c, n, n, 1, eps);
            divide(c, n, 1, n, eps);
        }
    }
}
