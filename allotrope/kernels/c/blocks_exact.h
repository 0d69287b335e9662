// Products of panels and activations as they are, in fp32.
#pragma once
#include "blocks_products.h"

// Input 4 s + b of the codes as products with activations in fp32 take it: of E4M3 without its scale.
static inline vf weight_of(vi codes, int b, factors of) {
    const vf number = numbers_of(codes, b);
    return E4M3 ? number : MINIMUM ? number * of.scale - of.minimum : scaled(number, of.scale);
}

// One part of a panel times `rows` rows, a constant of each caller.
static inline __attribute__((always_inline)) void multiply_exact(float sums[][PANEL], const float *x,
                                                                 const uint8_t *panel, long inputs, long part,
                                                                 const int rows) {
    const uint8_t *scales = panel, *codes = panel + scales_size(inputs);
    // Two sums of a row are under way at a time: one alone waits for itself.
    vf total[2][8], whole[8];
    for (int r = 0; r < rows; r++) total[0][r] = total[1][r] = whole[r] = (vf){};
    for (long span = 0; span < inputs / SPAN; span++, scales += SCALE_BYTES) {
        const factors of_span = span_factors(scales, part);
        for (long step = 0; step < SPAN / STEP; step++, codes += CODE_BYTES) {
            vi unpacked[8];
            unpack(unpacked, codes, part);
#if W == 16
#pragma GCC unroll 8
            for (int line = 0; line < CODE_BYTES / 64; line++) __builtin_prefetch(codes + AHEAD_BYTES + line * 64);
#endif
            // Copied: compilers keep an address of every row in memory otherwise, and load it for each product.
            float near[8][STEP];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                memcpy(near[r], x + r * inputs + (span * (SPAN / STEP) + step) * STEP, 4 * STEP);
#pragma GCC unroll 2
            for (int h = 0; h < STEP / GROUP; h++) {
                const factors of = group_factors(of_span, scales, step * (STEP / GROUP) + h, part);
#pragma GCC unroll 8
                for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 4
                    for (int b = 0; b < 4; b++) {
                        const vf w = weight_of(unpacked[h * (GROUP / 4) + s], b, of);
#pragma GCC unroll 8
                        for (int r = 0; r < rows; r++) total[b % 2][r] += w * near[r][h * GROUP + 4 * s + b];
                    }
            }
        }
        // One scale of a whole span multiplies its sums.
        if (E4M3)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                whole[r] += (total[0][r] + total[1][r]) * of_span.scale;
                total[0][r] = total[1][r] = (vf){};
            }
    }
    for (int r = 0; r < rows; r++) {
        const vf both = E4M3 ? whole[r] : total[0][r] + total[1][r];
        memcpy(sums[r] + part * W, &both, sizeof both);
    }
}

static void panel_exact(const target *to, const float *x, long inputs, const uint8_t *panel, long output, long kept,
                        long begin, long end) {
    for (long t = begin; t < end; t += ROWS) {
        const long rows = end - t < ROWS ? end - t : ROWS;
        float sums[8][PANEL];
        for (long part = 0; part < PANEL / W; part++) switch (rows) {
#define MANY(n) \
    case n: \
        if (n <= ROWS) multiply_exact(sums, x + t * inputs, panel, inputs, part, n <= ROWS ? n : 1); \
        break;
                EACH(MANY)
#undef MANY
            }
        for (long r = 0; r < rows; r++) put(to, t + r, output, kept, sums[r]);
    }
}

typedef struct {
    float numbers[KC_WEIGHTS][NR] __attribute__((aligned(64)));
    float scales[KC_WEIGHTS / STEP][NR];
} unpacked_weights;

// Inputs `first` to `first + count` of two panels. scales: of whole spans, where numbers are without them.
static void unpack_weights(unpacked_weights *to, const uint8_t *packed, long inputs, long first, long count) {
    for (long p = 0; p < NR / PANEL; p++)
        for (long part = 0; part < PANEL / W; part++) {
            const uint8_t *panel = packed + p * panel_size(inputs);
            const uint8_t *codes = panel + scales_size(inputs) + first / STEP * CODE_BYTES;
            const long at = p * PANEL + part * W;
            for (long i = 0; i < count; i += STEP, codes += CODE_BYTES) {
                const uint8_t *next = codes + count / STEP * CODE_BYTES;
                for (int line = 0; line < CODE_BYTES; line += 64) __builtin_prefetch(next + line);
                const uint8_t *scales = panel + (first + i) / SPAN * SCALE_BYTES;
                const factors of_span = span_factors(scales, part);
                if (E4M3) memcpy(to->scales[i / STEP] + at, &of_span.scale, sizeof(vf));
                vi unpacked[8];
                unpack(unpacked, codes, part);
#pragma GCC unroll 2
                for (int h = 0; h < STEP / GROUP; h++) {
                    const factors of = group_factors(of_span, scales, (first + i) % SPAN / GROUP + h, part);
#pragma GCC unroll 8
                    for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 4
                        for (int b = 0; b < 4; b++) {
                            const vf w = weight_of(unpacked[h * (GROUP / 4) + s], b, of);
                            memcpy(to->numbers[i + h * GROUP + 4 * s + b] + at, &w, sizeof w);
                        }
                }
            }
        }
}

// Sums of one row: those of even inputs and of odd ones, and of E4M3 those of the spans before.
typedef struct {
    float halves[2][NR], whole[NR];
} weight_sums;

// `rows` rows, a constant of each caller, times two vectors of outputs, added to `sums`. x: at the first row and input.
// at: of the inputs.
static inline __attribute__((always_inline)) void multiply_weights(weight_sums *sums, const float *x, long stride,
                                                                   const unpacked_weights *w, long at, long count,
                                                                   long output, const int rows) {
    vf total[8][2][2];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < 2; b++) memcpy(total[r][b], sums[r].halves[b] + output, sizeof total[r][b]);
    for (long i = 0; i < count; i += 2) {
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
            vf number[2];
            memcpy(number, w->numbers[i + b] + output, sizeof number);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const float each = x[r * stride + i + b];
                total[r][b][0] += number[0] * each;
                total[r][b][1] += number[1] * each;
            }
        }
        if (E4M3 && (at + i + 2) % SPAN == 0)
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < 2; v++) {
                    vf scale, whole;
                    memcpy(&scale, w->scales[i / STEP] + output + v * W, sizeof scale);
                    memcpy(&whole, sums[r].whole + output + v * W, sizeof whole);
                    whole += (total[r][0][v] + total[r][1][v]) * scale;
                    memcpy(sums[r].whole + output + v * W, &whole, sizeof whole);
                    total[r][0][v] = total[r][1][v] = (vf){};
                }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < 2; b++) memcpy(sums[r].halves[b] + output, total[r][b], sizeof total[r][b]);
}

// Two panels and rows `begin` to `end`. kept: outputs of them.
static void two_panels_exact(const target *to, const float *x, long inputs, const uint8_t *packed, long output,
                             long kept, long begin, long end) {
    unpacked_weights w;
    weight_sums sums[MC];
    for (long t = begin; t < end; t += MC) {
        const long rows = end - t < MC ? end - t : MC;
        memset(sums, 0, rows * sizeof *sums);
        for (long k = 0; k < inputs; k += KC_WEIGHTS) {
            const long count = inputs - k < KC_WEIGHTS ? inputs - k : KC_WEIGHTS;
            unpack_weights(&w, packed, inputs, k, count);
            for (long r = 0; r < rows; r += MR)
                for (long o = 0; o < NR; o += 2 * W) switch (rows - r < MR ? rows - r : MR) {
#define MANY(n) \
    case n: \
        if (n <= MR) \
            multiply_weights(sums + r, x + (t + r) * inputs + k, inputs, &w, k, count, o, n <= MR ? n : 1); \
        break;
                        EACH(MANY)
#undef MANY
                    }
        }
        for (long r = 0; r < rows; r++) {
            float *half = sums[r].halves[0], *other = sums[r].halves[1];
            for (long o = 0; o < NR; o++) half[o] += other[o];
            put(to, t + r, output, kept, E4M3 ? sums[r].whole : half);
        }
    }
}

// One or two panels.
static void panels_exact(const target *to, const float *x, long inputs, const uint8_t *packed, long panels, long output,
                         long kept, long begin, long end) {
    if (panels == 2 && end - begin >= BLOCKED_FROM) {
        two_panels_exact(to, x, inputs, packed, output, kept, begin, end);
        return;
    }
    for (long p = 0; p < panels; p++, packed += panel_size(inputs), output += PANEL, kept -= PANEL)
        panel_exact(to, x, inputs, packed, output, kept < PANEL ? kept : PANEL, begin, end);
}
