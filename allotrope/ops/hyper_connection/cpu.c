// The mixing weights of hyper-connections, token by token: a few numbers each, which tensor operations take one at a
// time. All fp32.
#include <math.h>

// Tokens below which a second thread costs more than it brings.
#define WORTH_THREADS 64

static inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Divide every number by eps and the sum of its row or column: n sums of n numbers.
static void divide(float *c, long n, long outer, long inner, float eps) {
    for (long i = 0; i < n; i++) {
        float total = eps;
        for (long j = 0; j < n; j++) total += c[i * outer + j * inner];
        for (long j = 0; j < n; j++) c[i * outer + j * inner] /= total;
    }
}

// From mixes [tokens, (2 + n) n], with m = mixes * scales + base: pre = sigmoid(m) + eps of the first n, post =
// 2 sigmoid(m) of the next n, both [tokens, n]; comb [tokens, n, n] = Sinkhorn(softmax over rows of the others + eps).
void mixing(float *pre, float *post, float *comb, const float *mixes, const float *base, const float *scales,
            long tokens, long n, long iterations, float eps) {
    const long count = (2 + n) * n;
#pragma omp parallel for if (tokens > WORTH_THREADS) schedule(static)
    for (long t = 0; t < tokens; t++) {
        float *c = comb + t * n * n;
        for (long i = 0; i < count; i++) {
            const float m = mixes[t * count + i] * scales[i] + base[i];
            if (i < n)
                pre[t * n + i] = sigmoid(m) + eps;
            else if (i < 2 * n)
                post[t * n + i - n] = 2 * sigmoid(m);
            else
                c[i - 2 * n] = m;
        }
        for (long row = 0; row < n; row++) {
            float *r = c + row * n, largest = r[0], total = 0;
            for (long j = 1; j < n; j++) largest = r[j] > largest ? r[j] : largest;
            for (long j = 0; j < n; j++) total += r[j] = expf(r[j] - largest);
            for (long j = 0; j < n; j++) r[j] = r[j] / total + eps;
        }
        divide(c, n, 1, n, eps);
        for (long i = 1; i < iterations; i++) {
            divide(c, n, n, 1, eps);
            divide(c, n, 1, n, eps);
        }
    }
}
