// y = x W^T + bias, for weights packed once into panels: at memory speed where tokens are few. Of bf16 by matrix units
// (AMX) where the machine has them.
#include "panel.h"
#include "tiles.h"
#include <stdlib.h>

int suits(void) { return SUITS; }

#if SUITS

// Tokens whose inputs stay in the cache while a panel meets them.
#define BLOCK 96

// Stores the first `kept` outputs of a panel.
static inline void put(element *y, const lanes total[COLUMNS], long kept) {
    element row[PANEL];
    element *to = kept == PANEL ? y : row;
    for (int c = 0; c < COLUMNS; c++) store(to + c * LANES, total[c]);
    if (kept < PANEL) memcpy(y, row, kept * sizeof(element));
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
    multiply(total, x, x_stride, w, inputs, rows);
    for (int r = 0; r < rows; r++) put(y + r * y_stride, total[r], kept);
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

#if MATRIX_UNITS && ELEMENT_BFLOAT16
// Tokens and panels whose sums, and inputs whose weights stay in the cache.
#define TILE_TOKENS 512
#define TILE_PANELS 4
#define TILE_INPUTS 768

// x as tiles read it, rows `padded(2 * inputs)` apart, with room behind the last one; 0 where it is to be multiplied
// without tiles. Never by the number of tokens: sums would have another order.
static uint8_t *rows_for_tiles(const element *x, long x_stride, long tokens, long inputs) {
    if (inputs % 32 || !matrix_units()) return 0;
    const long stride = padded(2 * inputs);
    uint8_t *rows = aligned_alloc(64, (tokens + 32) * stride);
    if (!rows) abort();
#pragma omp parallel for schedule(static) if (tokens > 32)
    for (long t = 0; t < tokens; t++) memcpy(rows + t * stride, x + t * x_stride, 2 * inputs);
    return rows;
}

// `rows` rows of the sums of a panel, with the bias.
static void put_rows(element *y, long y_stride, const float *sums, const float *bias, long kept, long rows) {
    for (long r = 0; r < rows; r++, y += y_stride, sums += PANEL) {
        lanes total[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) {
            lanes added = {};
            memcpy(&total[c], sums + c * LANES, sizeof(lanes));
            if (bias) memcpy(&added, bias + c * LANES, sizeof added);
            total[c] += added;
        }
        put(y, total, kept);
    }
}

// As `panel`, of rows that `rows_for_tiles` made, and of `panels` panels, at most TILE_PANELS. kept: outputs of them.
static void panels_in_tiles(element *y, long y_stride, const uint8_t *x, const element *w, const float *bias, long inputs,
                            long panels, long kept, long tokens) {
    float sums[TILE_PANELS][TILE_TOKENS][PANEL] __attribute__((aligned(64)));
    const long stride = padded(2 * inputs);
    for (long k = 0; k < inputs; k += TILE_INPUTS) {
        const long count = inputs - k < TILE_INPUTS ? inputs - k : TILE_INPUTS;
        for (long p = 0; p < panels; p++)
            for (long t = 0; t < tokens; t += 32) {
                float finished[32][PANEL] __attribute__((aligned(64)));
                const int last = k + count == inputs;
                const tile_sums so_far = {sums[p][t], PANEL}, whole = {finished[0], PANEL};
                multiply_tiles(last ? whole : so_far, k ? so_far : (tile_sums){}, x + t * stride + 2 * k, stride,
                               (const uint8_t *)(w + (p * inputs + k) * PANEL), 4 * PANEL, 64, count, tokens - t > 16);
                if (last)
                    put_rows(y + t * y_stride + p * PANEL, y_stride, finished[0], bias ? bias + p * PANEL : 0,
                             kept - p * PANEL < PANEL ? kept - p * PANEL : PANEL, tokens - t < 32 ? tokens - t : 32);
            }
    }
}

// As `grouped_product`, of rows that `rows_for_tiles` made; without `ends` one weight for all `tokens`, with a bias.
static void product_in_tiles(element *y, const uint8_t *x, const element *w, const float *bias, const int32_t *ends,
                             long experts, long tokens, long inputs, long outputs) {
    const long panels = (outputs + PANEL - 1) / PANEL;
    // Enough units for threads to end together.
    long block = 1;
    while (block < TILE_PANELS && panels * experts / block > 8) block++;
#pragma omp parallel
    {
        begin_tiles();
#pragma omp for collapse(2) schedule(dynamic)
        for (long e = 0; e < experts; e++)
            for (long p = 0; p < panels; p += block) {
                const long several = panels - p < block ? panels - p : block, left = outputs - p * PANEL;
                const long end = ends ? ends[e] : tokens;
                for (long t = ends && e ? ends[e - 1] : 0; t < end; t += TILE_TOKENS)
                    panels_in_tiles(y + t * outputs + p * PANEL, outputs, x + t * padded(2 * inputs),
                                    w + (e * panels + p) * PANEL * inputs, bias ? bias + p * PANEL : 0, inputs, several,
                                    left < several * PANEL ? left : several * PANEL,
                                    end - t < TILE_TOKENS ? end - t : TILE_TOKENS);
            }
        _tile_release();
    }
}
#endif

// w: [panels, inputs / PAIR, PANEL, PAIR], zero beyond `outputs`. bias: [panels * PANEL] or none. x: tokens a stride
// apart. y: [tokens, outputs].
void product(element *y, const element *x, long x_stride, const element *w, const float *bias, long tokens, long inputs,
             long outputs) {
#if MATRIX_UNITS && ELEMENT_BFLOAT16
    uint8_t *rows = rows_for_tiles(x, x_stride, tokens, inputs);
    if (rows) {
        product_in_tiles(y, rows, w, bias, 0, 1, tokens, inputs, outputs);
        free(rows);
        return;
    }
#endif
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
#if MATRIX_UNITS && ELEMENT_BFLOAT16
    uint8_t *rows = rows_for_tiles(x, x_stride, ends[experts - 1], inputs);
    if (rows) {
        product_in_tiles(y, rows, w, 0, ends, experts, 0, inputs, outputs);
        free(rows);
        return;
    }
#endif
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
