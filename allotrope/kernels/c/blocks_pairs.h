// Products of panels of E4M3 and activations in bf16, by an instruction that multiplies two of them.
#pragma once
#include "blocks_products.h"

// Whether codes become pairs of bf16 for an instruction that multiplies two of them: it takes as long as one product of
// fp32 on AMD's processors (compilers older than these call them Zen 3), and four times as long on Intel's.
#if E4M3 && ELEMENT_BFLOAT16 && defined(__AVX512BF16__) \
    && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
#define PAIRS_MULTIPLY E4M3_PAIRS
#else
#define PAIRS_MULTIPLY 0
#endif

#if PAIRS_MULTIPLY
// One panel times `rows` rows, a constant of each caller: the sums of a span are multiplied by its scale.
static inline __attribute__((always_inline)) void multiply_pairs(float sums[][PANEL], const element *x, long stride,
                                                                 const uint8_t *panel, long inputs, const int rows) {
    const uint8_t *scales = panel, *codes = panel + scales_size(inputs);
    vf total[8];
    for (int r = 0; r < rows; r++) total[r] = (vf){};
    for (long span = 0; span < inputs / SPAN; span++, scales += SCALE_BYTES) {
        // Two sums of a row are under way at a time: one alone waits for itself.
        __m512 of_span[2][8];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) of_span[0][r] = of_span[1][r] = _mm512_setzero_ps();
        for (long step = 0; step < SPAN / STEP; step++, codes += CODE_BYTES, x += STEP) {
#pragma GCC unroll 8
            for (int s = 0; s < STEP / 4; s++) {
                __builtin_prefetch(codes + AHEAD_BYTES + s * 64);
                vu pairs[2];
                pairs_of(pairs, load_bytes(codes + s * 64, 0));
#pragma GCC unroll 2
                for (int p = 0; p < 2; p++)
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        int32_t two;
                        memcpy(&two, x + r * stride + 4 * s + 2 * p, 4);
                        of_span[p][r] = _mm512_dpbf16_ps(of_span[p][r], (__m512bh)pairs[p],
                                                         (__m512bh)_mm512_set1_epi32(two));
                    }
            }
        }
        const vf scale = floats_of(scales, 0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) total[r] += (vf)_mm512_add_ps(of_span[0][r], of_span[1][r]) * scale;
    }
    for (int r = 0; r < rows; r++) memcpy(sums[r], &total[r], sizeof(vf));
}

static void panel_pairs(const target *to, const element *x, long stride, long inputs, const uint8_t *panel, long output,
                        long kept, long begin, long end) {
    for (long t = begin; t < end; t += ROWS) {
        const long rows = end - t < ROWS ? end - t : ROWS;
        float sums[8][PANEL];
        switch (rows) {
#define MANY(n) \
    case n: multiply_pairs(sums, x + t * stride, stride, panel, inputs, n); break;
            EACH(MANY)
#undef MANY
        }
        for (long r = 0; r < rows; r++) put(to, t + r, output, kept, sums[r]);
    }
}
#endif
