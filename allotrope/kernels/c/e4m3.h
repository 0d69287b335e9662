// Numbers of FP8 (e4m3: a sign, four bits of exponent, three of mantissa, no infinities) as fp32. Included by `blocks.h`,
// whose lanes of W outputs hold four of them each. Every one of them is a bf16.
#pragma once

#if W == 16 && defined(__AVX512VBMI__)
// The codes of a panel lie so that two instructions make them bf16, two inputs of an output side by side.
#define E4M3_PAIRS 1
#else
#define E4M3_PAIRS 0
#endif

#if E4M3_PAIRS
// The bits of code i, without its sign, as bf16: below 8 there is no leading one.
#define BF16_OF(i) \
    ((i) == 127 ? 0x7fc0 : (i) >= 8 ? (120 << 7) + ((i) << 4) : (i) >= 4 ? (120 << 7) + (((i)-4) << 5) \
     : (i) >= 2 ? (119 << 7) + (((i)-2) << 6) : (i) * (118 << 7))
#define HIGH_OF(i) BF16_OF(i) >> 8
#define LOW_OF(i) BF16_OF(i) & 255
#define FOUR(of, i) of(i), of(i + 1), of(i + 2), of(i + 3)
#define SIXTEEN(of, i) FOUR(of, i), FOUR(of, i + 4), FOUR(of, i + 8), FOUR(of, i + 12)
#define HALF(of, i) SIXTEEN(of, i), SIXTEEN(of, i + 16), SIXTEEN(of, i + 32), SIXTEEN(of, i + 48)
static const uint8_t e4m3_high[128] __attribute__((aligned(64))) = {HALF(HIGH_OF, 0), HALF(HIGH_OF, 64)};
static const uint8_t e4m3_low[128] __attribute__((aligned(64))) = {HALF(LOW_OF, 0), HALF(LOW_OF, 64)};

// Four inputs of each output, the lower one in the lower half: inputs 0 and 1, then 2 and 3.
static inline void pairs_of(vu pairs[2], vi codes) {
    const __m512i c = (__m512i)codes;
    const __m512i sizes = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_high), c, _mm512_load_si512(e4m3_high + 64));
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_low), c, _mm512_load_si512(e4m3_low + 64));
    // sizes | (c & 128).
    const __m512i high = _mm512_ternarylogic_epi32(sizes, c, _mm512_set1_epi8((char)128), 0xf8);
    pairs[0] = (vu)_mm512_unpacklo_epi8(low, high);
    pairs[1] = (vu)_mm512_unpackhi_epi8(low, high);
}
#endif

// Input b of the codes.
static inline vf e4m3_of(vi codes, int b) {
#if E4M3_PAIRS
    vu pairs[2];
    pairs_of(pairs, codes);
    return (vf)(b % 2 ? pairs[b / 2] & 0xffff0000u : pairs[b / 2] << 16);
#else
    const vu code = (vu)codes >> 8 * b & 255, size = code & 127;
    const vu normal = (size << 20) + (120u << 23);
    // Without a leading one: that of the next exponent, taken away again.
    const vu small = (vu)((vf)(normal + (1u << 23)) - 0.015625f);
    const vu is_small = (vu)(size < 8), is_none = (vu)(size == 127);
    return (vf)((is_small & small) | (~is_small & normal) | (is_none & 0x7fc00000u) | (code & 128) << 24);
#endif
}
