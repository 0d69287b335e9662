// y = x W^T + bias, for weights packed once into panels of PANEL outputs: in a panel the inputs follow one another,
// PAIR of them for each output. So the weights are read from end to end, at memory speed where tokens are few, and a
// sum has the same order however many tokens there are.
#include "element.h"

// Numbers that fit into 32 bits, and outputs of a panel.
#define PAIR (4 / (long)sizeof(element))
#define COLUMNS 2
#define PANEL (COLUMNS * LANES)
// Tokens whose sums fit into the registers, and tokens whose inputs stay in the cache while a panel meets them.
#define ROWS 12
#define BLOCK 96
// How far ahead weights are fetched, in steps of PAIR inputs.
#define AHEAD 32

// Whether this machine should use it: with the registers and instructions that it is made for, and without the matrix
// units that oneDNN uses.
#if defined(__AVX512F__) && !defined(__AMX_TILE__) && (!ELEMENT_BFLOAT16 || defined(__AVX512BF16__))
int suits(void) { return 1; }
#else
int suits(void) { return 0; }
#endif

static inline lanes multiply_add(lanes total, uint32_t x, bits w) {
#if !ELEMENT_BFLOAT16
    float value;
    memcpy(&value, &x, sizeof value);
    return total + value * (lanes)w;
#elif defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#else
    return total + widen(x & 0xffff) * (lanes)(w << 16) + widen(x >> 16) * (lanes)(w & 0xffff0000);
#endif
}

// One panel for `rows` tokens, a constant of each caller. Of the panel's outputs the first `kept` are stored.
static inline __attribute__((always_inline)) void tile(element *y, long y_stride, const element *x, long x_stride,
                                                       const element *w, const float *bias, long inputs, long kept,
                                                       const int rows) {
    lanes total[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) {
            total[r][c] = (lanes){};
            if (bias) memcpy(&total[r][c], bias + c * LANES, sizeof(lanes));
        }
    for (long k = 0; k < inputs; k += PAIR) {
        bits weights[COLUMNS];
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++) {
            memcpy(&weights[c], w + k * PANEL + c * LANES * PAIR, sizeof(bits));
            __builtin_prefetch(w + (k + AHEAD * PAIR) * PANEL + c * LANES * PAIR);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            uint32_t value;
            memcpy(&value, x + r * x_stride + k, sizeof value);
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; c++) total[r][c] = multiply_add(total[r][c], value, weights[c]);
        }
    }
    for (int r = 0; r < rows; r++) {
        element row[PANEL];
        element *to = kept == PANEL ? y + r * y_stride : row;
        for (int c = 0; c < COLUMNS; c++) store(to + c * LANES, total[r][c]);
        if (kept < PANEL) memcpy(y + r * y_stride, row, kept * sizeof(element));
    }
}

// One panel for any number of tokens.
static void panel(element *y, long y_stride, const element *x, long x_stride, const element *w, const float *bias,
                  long inputs, long kept, long tokens) {
#define TILE(rows) \
    case rows: tile(y, y_stride, x, x_stride, w, bias, inputs, kept, rows); break;
    for (; tokens > 0; tokens -= ROWS, y += ROWS * y_stride, x += ROWS * x_stride) {
        switch (tokens < ROWS ? tokens : ROWS) {
            TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
        }
    }
}

// w: [panels, inputs / PAIR, PANEL, PAIR], zero beyond `outputs`. bias: [panels * PANEL] or none. x: tokens a stride
// apart. y: [tokens, outputs].
void product(element *y, const element *x, long x_stride, const element *w, const float *bias, long tokens, long inputs,
             long outputs) {
    const long panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for collapse(2) schedule(static)
    for (long p = 0; p < panels; p++)
        for (long t = 0; t < tokens; t += BLOCK) {
            const long kept = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
            panel(y + t * outputs + p * PANEL, outputs, x + t * x_stride, x_stride, w + p * PANEL * inputs,
                  bias ? bias + p * PANEL : 0, inputs, kept, tokens - t < BLOCK ? tokens - t : BLOCK);
        }
}
