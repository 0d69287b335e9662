// Numbers of the model's type as fp32 and back, one by one and in lanes. ELEMENT_BFLOAT16 is 1 or 0 (then fp32).
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Operations on lanes are GCC's and Clang's vector extensions: the compiler turns them into what the machine has.
#define LANES 16
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

#if ELEMENT_BFLOAT16
typedef uint16_t element;

static inline float widen(element x) {
    const uint32_t bits = (uint32_t)x << 16;
    float exact;
    memcpy(&exact, &bits, sizeof exact);
    return exact;
}

// To nearest, ties to even; not a number stays one.
static inline element narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (element)(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0);
}
#else
typedef float element;
static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#endif

typedef element stored __attribute__((vector_size(sizeof(element) * LANES), aligned(sizeof(element)), may_alias));

static inline lanes load(const element *from) {
#if ELEMENT_BFLOAT16
    return (lanes)(__builtin_convertvector(*(const stored *)from, bits) << 16);
#else
    return (lanes) * (const stored *)from;
#endif
}

static inline lanes choose(bits mask, lanes yes, lanes no) { return (lanes)((mask & (bits)yes) | (~mask & (bits)no)); }

static inline void store(element *to, lanes x) {
#if ELEMENT_BFLOAT16 && defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &rounded, sizeof rounded);
#elif ELEMENT_BFLOAT16
    const bits exact = (bits)x, number = (bits)(x == x);
    const bits rounded = (exact + 0x7fff + ((exact >> 16) & 1)) >> 16;
    *(stored *)to = __builtin_convertvector((number & rounded) | (~number & 0x7fc0), stored);
#else
    *(stored *)to = (stored)x;
#endif
}

static inline lanes all(float x) { return x - (lanes){}; }

static inline float sum(lanes x) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    const eight a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    const four b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// e^x to about one unit in the last place: x = n ln 2 + r, e^x = 2^n e^r, held between e^-87 and e^88.
static inline lanes exponential(lanes x) {
    x = choose((bits)(x < -87.0f), all(-87.0f), x);
    x = choose((bits)(x > 88.0f), all(88.0f), x);
    // Adding this rounds to an integer, which is then in the lowest bits.
    const float shift = 12582912.0f;
    const lanes shifted = x * 1.44269504f + shift, n = shifted - shift;
    const lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (lanes)(((bits)shifted + 127) << 23);
}
