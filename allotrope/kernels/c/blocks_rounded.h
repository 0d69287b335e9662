// Products of panels and activations that are rounded to int8, in integers.
#pragma once
#include "blocks_products.h"

// Activations as products see them. numbers: [rows, inputs] int8. scales: [rows, inputs / 32]. shifts: [rows, inputs /
// GROUP], what stands for -ZERO of every code. sums: [rows, inputs / GROUP], of the rounded activations.
typedef struct {
    int8_t *numbers;
    float *scales;
    int32_t *shifts;
    float *sums;
    long inputs;
} rounded;

static rounded place(void *scratch, long rows, long inputs) {
    rounded x = {.inputs = inputs};
    x.scales = scratch;
    x.sums = x.scales + rows * (inputs / STEP);
    x.shifts = (int32_t *)(x.sums + rows * (inputs / GROUP));
    x.numbers = (int8_t *)(x.shifts + rows * (inputs / GROUP));
    return x;
}

// Of 32 numbers a and b the largest size; whether all of them are numbers.
static inline float largest_of(lanes a, lanes b, int *known) {
    const bits positive = (bits){} + 0x7fffffffu;
    const lanes a_size = (lanes)((bits)a & positive), b_size = (lanes)((bits)b & positive);
    const lanes larger = choose((bits)(a_size > b_size), a_size, b_size);
#if W == 16
    *known = !_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
    return _mm512_reduce_max_ps((__m512)larger);
#else
    const bits unknown = (bits)(a != a) | (bits)(b != b);
    uint32_t any = 0;
    float largest = 0;
    for (int i = 0; i < LANES; i++) any |= unknown[i];
    for (int i = 0; i < LANES; i++) largest = larger[i] > largest ? larger[i] : largest;
    *known = !any;
    return largest;
#endif
}

// Stores the bytes of whole numbers, and returns their sum.
static inline int32_t store_bytes(int8_t *to, bits whole) {
#if W == 16
    const __m512i numbers = _mm512_srai_epi32(_mm512_slli_epi32((__m512i)whole, 24), 24);
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(numbers));
    return _mm512_reduce_add_epi32(numbers);
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    const bytes narrowed = __builtin_convertvector(whole, bytes);
    memcpy(to, &narrowed, LANES);
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += to[i];
    return sum;
#endif
}

static void round_row(const element *x, const rounded *to, long row) {
    const long inputs = to->inputs;
    int8_t *numbers = to->numbers + row * inputs;
    for (long g = 0; g < inputs / STEP; g++, x += STEP, numbers += STEP) {
        const lanes a = load(x), b = load(x + LANES);
        int known;
        const float largest = largest_of(a, b, &known);
        // Not a number, which is no larger than another one, is no integer either: the scale becomes it.
        const float inverse = largest > 0 ? 127 / largest : 0, scale = known ? largest / 127 : __builtin_nanf("");
        // Adding this rounds to the nearest integer, ties to even, which is then in the lowest bits. Compilers fuse it
        // with the product.
        const float shift = 12582912.0f;
        const int32_t halves[2] = {store_bytes(numbers, (bits)(a * inverse + shift)),
                                   store_bytes(numbers + LANES, (bits)(b * inverse + shift))};
        to->scales[row * (inputs / STEP) + g] = scale;
        for (int h = 0; h < STEP / GROUP; h++) {
            const int32_t sum = GROUP == STEP ? halves[0] + halves[1] : halves[h];
            const long at = row * (inputs / GROUP) + g * (STEP / GROUP) + h;
            to->shifts[at] = -ZERO * sum;
            to->sums[at] = scale * (float)sum;
        }
    }
}

// One part of a panel times `rows` rows of rounded activations, a constant of each caller.
static inline __attribute__((always_inline)) void multiply_rounded(float sums[][PANEL], const rounded *x, long first,
                                                                   const uint8_t *panel, long part, const int rows) {
    const long inputs = x->inputs, steps = inputs / STEP;
    const uint8_t *scales = panel, *codes = panel + scales_size(inputs);
    vf total[8];
    for (int r = 0; r < rows; r++) total[r] = (vf){};
    for (long span = 0; span < inputs / SPAN; span++, scales += SCALE_BYTES) {
        const factors of_span = span_factors(scales, part);
        for (long step = 0; step < SPAN / STEP; step++, codes += CODE_BYTES) {
            const long at = span * (SPAN / STEP) + step;
            vi unpacked[8];
            unpack(unpacked, codes, part);
#if W == 16
#pragma GCC unroll 8
            for (int line = 0; line < CODE_BYTES / 64; line++) __builtin_prefetch(codes + AHEAD_BYTES + line * 64);
#endif
#pragma GCC unroll 2
            for (int h = 0; h < STEP / GROUP; h++) {
                const factors of = group_factors(of_span, scales, step * (STEP / GROUP) + h, part);
                const long sums_at = first * (inputs / GROUP) + at * (STEP / GROUP) + h;
                const int8_t *numbers = x->numbers + first * inputs + at * STEP + h * GROUP;
                // Sums of several rows, or two of one row, are under way at a time: one alone waits for itself.
                vi whole[8], other = {};
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    whole[r] = ZERO ? (vi){} + x->shifts[sums_at + r * (inputs / GROUP)] : (vi){};
#pragma GCC unroll 8
                for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        int32_t four;
                        memcpy(&four, numbers + r * inputs + 4 * s, 4);
                        vi *to = rows == 1 && s % 2 ? &other : whole + r;
                        *to = dots(*to, unpacked[h * (GROUP / 4) + s], (vi){} + four);
                    }
                if (rows == 1) whole[0] += other;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    total[r] += __builtin_convertvector(whole[r], vf) * (of.scale * x->scales[(first + r) * steps + at]);
#if MINIMUM
                    total[r] -= of.minimum * x->sums[sums_at + r * (inputs / GROUP)];
#endif
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) memcpy(sums[r] + part * W, &total[r], sizeof(vf));
}

// One panel and rows `begin` to `end` of rounded activations.
static void panel_rounded(const target *to, const rounded *x, const uint8_t *panel, long output, long kept, long begin,
                          long end) {
    for (long t = begin; t < end; t += ROWS) {
        const long rows = end - t < ROWS ? end - t : ROWS;
        float sums[8][PANEL];
        for (long part = 0; part < PANEL / W; part++) switch (rows) {
#define MANY(n) \
    case n: \
        if (n <= ROWS) multiply_rounded(sums, x, t, panel, part, n <= ROWS ? n : 1); \
        break;
                EACH(MANY)
#undef MANY
            }
        for (long r = 0; r < rows; r++) put(to, t + r, output, kept, sums[r]);
    }
}

typedef struct {
    uint8_t codes[KC_CODES / 4][NR * 4] __attribute__((aligned(64)));
    float scales[KC_CODES / GROUP][NR];
#if MINIMUM
    float minima[KC_CODES / GROUP][NR];
#endif
} unpacked_codes;

// Inputs `first` to `first + count` of two panels.
static void unpack_codes(unpacked_codes *to, const uint8_t *packed, long inputs, long first, long count) {
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
                vi unpacked[8];
                unpack(unpacked, codes, part);
                for (int s = 0; s < 8; s++) memcpy(to->codes[i / 4 + s] + 4 * at, &unpacked[s], sizeof(vi));
                for (int h = 0; h < STEP / GROUP; h++) {
                    const factors of = group_factors(of_span, scales, (first + i) % SPAN / GROUP + h, part);
                    memcpy(to->scales[i / GROUP + h] + at, &of.scale, sizeof(vf));
#if MINIMUM
                    memcpy(to->minima[i / GROUP + h] + at, &of.minimum, sizeof(vf));
#endif
                }
            }
        }
}

// `rows` rows, a constant of each caller, times two vectors of outputs, added to `sums`. first: of the rows; at: of the
// inputs.
static inline __attribute__((always_inline)) void multiply_codes(float sums[][NR], const rounded *x, long first,
                                                                const unpacked_codes *w, long at, long count,
                                                                long output, const int rows) {
    const long inputs = x->inputs, steps = inputs / STEP, groups = inputs / GROUP;
    const int8_t *numbers = x->numbers + first * inputs + at;
    const float *x_scales = x->scales + first * steps + at / STEP;
    const long sums_at = first * groups + at / GROUP;
    vf total[8][2];
    for (int r = 0; r < rows; r++) memcpy(total[r], sums[r] + output, sizeof total[r]);
    for (long g = 0; g < count / GROUP; g++) {
        vi whole[8][2];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            whole[r][0] = whole[r][1] = ZERO ? (vi){} + x->shifts[sums_at + r * groups + g] : (vi){};
#pragma GCC unroll 8
        for (int s = 0; s < GROUP / 4; s++) {
            vi codes[2];
            memcpy(codes, w->codes[g * (GROUP / 4) + s] + 4 * output, sizeof codes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, numbers + r * inputs + g * GROUP + 4 * s, 4);
                const vi each = (vi){} + four;
                whole[r][0] = dots(whole[r][0], codes[0], each);
                whole[r][1] = dots(whole[r][1], codes[1], each);
            }
        }
        vf scales[2];
        memcpy(scales, w->scales[g] + output, sizeof scales);
#if MINIMUM
        vf minima[2];
        memcpy(minima, w->minima[g] + output, sizeof minima);
#endif
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                const vf scale = scales[v] * x_scales[r * steps + g * GROUP / STEP];
                total[r][v] += __builtin_convertvector(whole[r][v], vf) * scale;
#if MINIMUM
                total[r][v] -= minima[v] * x->sums[sums_at + r * groups + g];
#endif
            }
    }
    for (int r = 0; r < rows; r++) memcpy(sums[r] + output, total[r], sizeof total[r]);
}

// Two panels and rows `begin` to `end`. kept: outputs of them.
static void two_panels_rounded(const target *to, const rounded *x, const uint8_t *packed, long output, long kept,
                               long begin, long end) {
    unpacked_codes w;
    float sums[MC][NR];
    for (long t = begin; t < end; t += MC) {
        const long rows = end - t < MC ? end - t : MC;
        memset(sums, 0, rows * sizeof *sums);
        for (long k = 0; k < x->inputs; k += KC_CODES) {
            const long count = x->inputs - k < KC_CODES ? x->inputs - k : KC_CODES;
            unpack_codes(&w, packed, x->inputs, k, count);
            for (long r = 0; r < rows; r += MR)
                for (long o = 0; o < NR; o += 2 * W) switch (rows - r < MR ? rows - r : MR) {
#define MANY(n) \
    case n: \
        if (n <= MR) multiply_codes(sums + r, x, t + r, &w, k, count, o, n <= MR ? n : 1); \
        break;
                        EACH(MANY)
#undef MANY
                    }
        }
        for (long r = 0; r < rows; r++) put(to, t + r, output, kept, sums[r]);
    }
}

// One or two panels.
static void panels_rounded(const target *to, const rounded *x, const uint8_t *packed, long panels, long output,
                           long kept, long begin, long end) {
    if (panels == 2 && end - begin >= BLOCKED_FROM) {
        two_panels_rounded(to, x, packed, output, kept, begin, end);
        return;
    }
    for (long p = 0; p < panels; p++, packed += panel_size(x->inputs), output += PANEL, kept -= PANEL)
        panel_rounded(to, x, packed, output, kept < PANEL ? kept : PANEL, begin, end);
}
