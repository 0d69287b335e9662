// Rotary position embedding of heads, one pass over memory. fp32 inside, rounded once.
#include "element.h"

// Below this many numbers a second thread costs more than it brings.
#define WORTH_THREADS 32768

// Rotate the pairs (i, i + rotated / 2), or (2i, 2i + 1) where they are interleaved, of the first `rotated` dims of each
// head; the other dims are copied. x: [tokens, heads, dim], with strides. cosine, sine: [tokens, rotated], sine with the
// sign of its dim.
void apply_rope(element *y, const element *x, const element *cosine, const element *sine, long tokens, long heads,
                long dim, long rotated, long token_stride, long head_stride, long interleaved) {
    const long half = rotated / 2;
#pragma omp parallel for if (tokens * heads * dim > WORTH_THREADS) schedule(static)
    for (long token = 0; token < tokens; token++) {
        const element *c = cosine + token * rotated, *s = sine + token * rotated;
        for (long head = 0; head < heads; head++) {
            const element *from = x + token * token_stride + head * head_stride;
            element *to = y + (token * heads + head) * dim;
            if (interleaved) {
#pragma omp simd
                for (long i = 0; i < rotated; i += 2) {
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
            memcpy(to + rotated, from + rotated, (dim - rotated) * sizeof(element));
        }
    }
}
