// Weights in blocks of few bits, packed into panels of 16 outputs. The macros are the type of the blocks, see
// `ops/matmul/cpu_blocks.py`. A weight of a panel is
//
//     w = scale * (code - ZERO) - minimum
//
// with floats of one group of GROUP inputs; of E4M3 it is scale * (the FP8 number that the code is). A panel holds the
// scales of all its inputs, then the codes. Lanes are outputs: 32 bits of a vector hold four inputs of one output, as
// dot products of bytes want them.
#pragma once
#include "element.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define W 16
#define SIGNED_CODES 0
#elif defined(__AVX2__)
#include <immintrin.h>
#define W 8
#define SIGNED_CODES 1
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define W 4
#define SIGNED_CODES 1
#else
#define W 4
#define SIGNED_CODES 1
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int8_t narrow_signed __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint8_t narrow_unsigned __attribute__((vector_size(W), aligned(1), may_alias));

#define PANEL 16
#define STEP 32
// How far ahead codes are fetched.
#define AHEAD_BYTES 4096
// Inputs of an output that have floats of their own.
#define SPAN NUMBERS
#define GROUPS (SPAN / GROUP)
#define BITS (P0_BITS + P1_BITS)
// Bytes of 32 inputs of a panel: their lower bits, then their upper ones.
#define LOW_BYTES (STEP * PANEL * P0_BITS / 8)
#define CODE_BYTES (LOW_BYTES + STEP * PANEL * P1_BITS / 8)
// Floats of a span, and the integer scales of its groups.
#define FLOAT_BYTES (POWER ? PANEL : SINGLE ? 4 * PANEL : 2 * PANEL)
#define SCALE_BYTES (FLOAT_BYTES * (1 + MINIMUM) + (INTEGER_SCALES ? GROUPS * PANEL * (1 + MINIMUM) : 0))
// Codes that reach 128 are signed where the processor multiplies no unsigned bytes by signed ones.
#define SIGNED (SIGNED_CODES && (BITS == 8 || TABLE) && !E4M3)
#define ZERO (SIGNED || E4M3 ? 0 : TABLE == 1 ? 128 : TABLE == 2 ? 12 : OFFSET)

#if TABLE == 1
static const int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
#elif TABLE == 2
static const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#endif

static inline long scales_size(long inputs) { return (inputs / SPAN * SCALE_BYTES + 63) / 64 * 64; }

// Bytes of a packed panel.
long panel_size(long inputs) { return scales_size(inputs) + inputs / STEP * CODE_BYTES; }

#if W == 4 && !defined(__ARM_NEON) || W == 8 && !defined(__F16C__)
static inline float half_to_float(const void *from) {
    uint16_t h;
    memcpy(&h, from, 2);
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t bits;
    if (rest < 0x400) {
        const float tiny = (float)rest * 5.9604644775390625e-8f;
        memcpy(&bits, &tiny, 4);
    } else
        bits = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
    bits |= sign;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
#endif

static inline vf floats_of(const uint8_t *from, long part) {
#if POWER
    narrow_unsigned stored;
    memcpy(&stored, from + part * W, sizeof stored);
    vi bits = __builtin_convertvector(stored, vi) - 1;
    return (vf)((bits & ~(bits >> 31)) << 23);
#elif SINGLE
    vf stored;
    memcpy(&stored, from + 4 * part * W, sizeof stored);
    return stored;
#elif BRAIN
    typedef uint16_t halves __attribute__((vector_size(2 * W)));
    halves stored;
    memcpy(&stored, from + 2 * part * W, sizeof stored);
    return (vf)(__builtin_convertvector(stored, vu) << 16);
#elif W == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + 2 * part * W)));
#elif W == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * part * W)));
#elif defined(__ARM_NEON)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * part * W)));
#else
    vf x;
    for (int i = 0; i < W; i++) x[i] = half_to_float(from + 2 * (part * W + i));
    return x;
#endif
}

static inline vf integers_of(const uint8_t *from, long part, int is_signed) {
#if W == 16
    // Compilers widen bytes in several steps otherwise.
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#endif
    if (is_signed) {
        narrow_signed stored;
        memcpy(&stored, from + part * W, sizeof stored);
        return __builtin_convertvector(__builtin_convertvector(stored, vi), vf);
    }
    narrow_unsigned stored;
    memcpy(&stored, from + part * W, sizeof stored);
    return __builtin_convertvector(__builtin_convertvector(stored, vi), vf);
}

// total + the sums of four products of bytes in each lane; codes are signed or not, x is signed.
static inline vi dots(vi total, vi codes, vi x) {
#if W == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)x);
#elif W == 8
    __m256i c = (__m256i)codes, y = (__m256i)x;
#if SIGNED
    y = _mm256_sign_epi8(y, c);
    c = _mm256_abs_epi8(c);
#endif
#ifdef __AVXVNNI__
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)total, c, y);
#else
    return total + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(c, y), _mm256_set1_epi16(1));
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)x);
#elif defined(__ARM_NEON)
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)codes), vget_low_s8((int8x16_t)x));
    const int16x8_t high = vmull_s8(vget_high_s8((int8x16_t)codes), vget_high_s8((int8x16_t)x));
    return total + (vi)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    for (int i = 0; i < 4; i++) total += (codes << (24 - 8 * i) >> 24) * (x << (24 - 8 * i) >> 24);
    return total;
#endif
}

#if TABLE
static inline vi looked_up(vi codes) {
#if W == 16
    // Unsigned bytes: as much more than the number as ZERO says.
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)ZERO)));
    return (vi)_mm512_shuffle_epi8(numbers, (__m512i)codes);
#elif W == 8
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (vi)_mm256_shuffle_epi8(numbers, (__m256i)codes);
#elif defined(__aarch64__)
    return (vi)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes);
#else
    int8_t bytes[4 * W];
    memcpy(bytes, &codes, sizeof bytes);
    for (int i = 0; i < 4 * W; i++) bytes[i] = table[bytes[i] & 15];
    memcpy(&codes, bytes, sizeof bytes);
    return codes;
#endif
}
#endif

static inline vi load_bytes(const uint8_t *from, long part) {
    vi x;
    memcpy(&x, from + 4 * W * part, sizeof x);
    return x;
}

// The codes of 32 inputs: eight vectors of four inputs. from: as they are packed.
static inline __attribute__((always_inline)) void unpack(vi codes[8], const uint8_t *from, long part) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
#if P0_BITS == 8
        codes[s] = load_bytes(from + s * 64, part);
#elif P0_BITS == 4
        codes[s] = (vi)((vu)load_bytes(from + s % 4 * 64, part) >> (s < 4 ? 0 : 4)) & 0x0f0f0f0f;
#else
        codes[s] = (vi)((vu)load_bytes(from + s / 4 * 64, part) >> 2 * (s % 4)) & 0x03030303;
#endif
#if P1_BITS == 1
        const vu upper = (vu)load_bytes(from + LOW_BYTES, part);
        codes[s] |= (vi)((s < P0_BITS ? upper << (P0_BITS - s) : upper >> (s - P0_BITS)) & (0x01010101u << P0_BITS));
#elif P1_BITS == 2
        const vu upper = (vu)load_bytes(from + LOW_BYTES + s / 4 * 64, part);
        const int shift = P0_BITS - 2 * (s % 4);
        codes[s] |= (vi)((shift >= 0 ? upper << (shift & 31) : upper >> (-shift & 31)) & (0x03030303u << P0_BITS));
#endif
#if TABLE
        codes[s] = looked_up(codes[s]);
#endif
    }
}

#if E4M3
#include "e4m3.h"
#endif

// Input 4 s + b of the codes as numbers.
static inline vf numbers_of(vi codes, int b) {
#if E4M3
    return e4m3_of(codes, b);
#elif SIGNED
    return __builtin_convertvector(codes << (24 - 8 * b) >> 24, vf);
#else
    return __builtin_convertvector((vi)((vu)codes >> 8 * b) & 255, vf) - (float)ZERO;
#endif
}

// A weight without its minimum.
static inline vf scaled(vf numbers, vf scale) {
    const vf w = numbers * scale;
#if ROUNDED_WEIGHTS
    const vu exact = (vu)w;
    return (vf)((exact + 0x7fff + ((exact >> 16) & 1)) & 0xffff0000u);
#else
    return w;
#endif
}

// The scales and minima of a group.
typedef struct {
    vf scale, minimum;
} factors;

// Of the span at `from`.
static inline factors span_factors(const uint8_t *from, long part) {
    factors of = {floats_of(from, part), {}};
#if MINIMUM
    of.minimum = floats_of(from + FLOAT_BYTES, part);
#endif
    return of;
}

static inline factors group_factors(factors span, const uint8_t *from, long group, long part) {
#if INTEGER_SCALES
    const uint8_t *scales = from + FLOAT_BYTES * (1 + MINIMUM) + group * PANEL;
    span.scale *= integers_of(scales, part, 1);
#if MINIMUM
    span.minimum *= integers_of(scales + GROUPS * PANEL, part, 0);
#endif
#endif
    return span;
}
