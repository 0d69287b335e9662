// y = x W^T + bias, for weights packed once into panels: at memory speed where tokens are few.
#include "panel.h"

#if SUITS

// Tokens whose inputs stay in the cache while a panel meets them.
#define BLOCK 96

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
    multiply(total, x, x_stride, w, inputs, rows);
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

// The same for rows sorted by their expert, each of which has panels of its own, one after another, and no bias. ends:
// [experts], where each one's rows end.
void grouped_product(element *y, const element *x, long x_stride, const element *w, const int32_t *ends, long experts,
                     long inputs, long outputs) {
    const long panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (long e = 0; e < experts; e++)
        for (long p = 0; p < panels; p++) {
            const long kept = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
            for (long t = e ? ends[e - 1] : 0; t < ends[e]; t += BLOCK)
                panel(y + t * outputs + p * PANEL, outputs, x + t * x_stride, x_stride,
                      w + (e * panels + p) * PANEL * inputs, 0, inputs, kept,
                      ends[e] - t < BLOCK ? ends[e] - t : BLOCK);
        }
}
#endif
