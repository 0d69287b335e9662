// y = x W^T + bias of weights in panels of blocks, which are never unpacked whole. INT8_ACTIVATIONS: whether activations
// may be rounded to int8.
#include "blocks_exact.h"
#include "blocks_pairs.h"
#include "blocks_rounded.h"
#include "blocks_tiles.h"
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#define omp_get_thread_num() 0
#endif

// Bytes of activations of so many rows, in fp32, the form that takes most; whole lines of the cache.
static long prepared_size(long rows, long inputs) {
    return ((rows + 32) * (inputs * 4 + 128) + 63) / 64 * 64;
}

// Of activations, what the cache of a core holds beside a panel.
#define CACHED_BYTES (1 << 20)

// From so many rows on, matrix units are faster than products of bytes.
#define TILES_FROM 17

// Bytes that a product of so many rows needs: its activations, and of many rows memory of each thread.
long scratch_size(long rows, long inputs) {
    return 64 + prepared_size(rows, inputs) + (rows < TILES_FROM ? 0 : (long)omp_get_max_threads() * THREAD_MEMORY);
}

enum { ROUNDED, EXACT, PAIRS, TILES };

static int way_of(long rows) {
#if MATRIX_UNITS
    // Activations that are not to be rounded are bf16 already.
    if (rows >= TILES_FROM && (INT8_ACTIVATIONS || sizeof(element) == 2) && matrix_units()) return TILES;
#endif
    return PAIRS_MULTIPLY ? PAIRS : INT8_ACTIVATIONS ? ROUNDED : EXACT;
}

// One row of x as `way` wants it.
static void prepare(int way, const element *x, const rounded *to, void *scratch, long row) {
    const long inputs = to->inputs;
    if (INT8_ACTIVATIONS && way == ROUNDED) {
        round_row(x, to, row);
    } else if (way == EXACT) {
        float *exact = (float *)scratch + row * inputs;
        for (long i = 0; i < inputs; i++) exact[i] = widen(x[i]);
    } else {
        uint16_t *bf16 = (uint16_t *)((uint8_t *)scratch + row * padded(2 * inputs));
#if ELEMENT_BFLOAT16
        memcpy(bf16, x, inputs * 2);
#elif MATRIX_UNITS
        for (long i = 0; i < inputs; i += 16) {
            const __m256bh narrowed = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
            memcpy(bf16 + i, &narrowed, sizeof narrowed);
        }
#endif
    }
}

// For each expert e the rows from ends[e - 1] to ends[e]; without `ends` one weight for all rows. packed: [experts,
// panels, panel_size]. bias: [experts, panels * PANEL] or none. y: [rows, outputs], rows `y_stride` apart, of fp32 where
// `y_exact`. scratch: of `scratch_size`.
void product(void *y, long y_stride, long y_exact, const element *x, long x_stride, const uint8_t *packed,
             const float *bias, const int32_t *ends, long experts, long rows, long inputs, long outputs,
             void *scratch) {
    const long panels = (outputs + PANEL - 1) / PANEL, size = panel_size(inputs);
    const int way = way_of(rows / (experts ? experts : 1));
    const rounded small = place(scratch, rows, inputs);
    const target whole = {y, y_stride, y_exact, bias};
    // Pairs are read from where they are.
    const int alone = rows == 1 || way == PAIRS;
    if (rows == 1 && way != PAIRS) prepare(way, x, &small, scratch, 0);
    long block = alone ? 1 : 2;
#if MATRIX_UNITS
    if (way == TILES)
        for (block = 2; block < BLOCK_PANELS && panels * experts / block > 8;) block += 2;
#endif
    const long units = (panels + block - 1) / block;
    // Few enough for threads to end together, whatever else they are kept by.
    const long chunk = units * experts / 64 + 1;
    // Rows that stay in the second cache while every panel meets them; those of experts are few.
    const long fitting = CACHED_BYTES / (way == ROUNDED ? inputs : 4 * inputs) / ROWS * ROWS;
    const long many = way != TILES && !ends ? (fitting > ROWS ? fitting : ROWS) : rows;
    const long blocks = rows ? (rows + many - 1) / many : 0;
#pragma omp parallel
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (long row = 0; row < rows; row++) prepare(way, x + row * x_stride, &small, scratch, row);
        }
#if MATRIX_UNITS
        uint8_t *memory = (uint8_t *)(((uintptr_t)scratch + 63) / 64 * 64);
        memory += prepared_size(rows, inputs) + omp_get_thread_num() * THREAD_MEMORY;
        if (way == TILES) begin_tiles();
#endif
#pragma omp for collapse(3) schedule(dynamic, chunk)
        for (long e = 0; e < experts; e++)
        for (long b = 0; b < blocks; b++)
            for (long u = 0; u < units; u++) {
                const long begin = ends ? (e ? ends[e - 1] : 0) : b * many;
                const long end = ends ? ends[e] : begin + many < rows ? begin + many : rows;
                if (begin == end) continue;
                const long p = u * block, several = panels - p < block ? panels - p : block;
                const uint8_t *from = packed + (e * panels + p) * size;
                target to = whole;
                if (bias) to.bias = bias + e * panels * PANEL;
                const long kept = outputs - p * PANEL < several * PANEL ? outputs - p * PANEL : several * PANEL;
                if (INT8_ACTIVATIONS && way == ROUNDED)
                    panels_rounded(&to, &small, from, several, p * PANEL, kept, begin, end);
                else if (!INT8_ACTIVATIONS && way == EXACT)
                    panels_exact(&to, scratch, inputs, from, several, p * PANEL, kept, begin, end);
#if PAIRS_MULTIPLY
                else if (way == PAIRS)
                    panel_pairs(&to, x, x_stride, inputs, from, p * PANEL, kept, begin, end);
#endif
#if MATRIX_UNITS
                else
                    panels_in_tiles(&to, scratch, padded(2 * inputs), inputs, from, p * PANEL, outputs,
                                    several, begin, end, memory);
#endif
            }
#if MATRIX_UNITS
        if (way == TILES) _tile_release();
#endif
    }
}
