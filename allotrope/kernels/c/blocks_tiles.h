// Products of panels and activations in bf16 by matrix units (AMX).
#pragma once
#include "blocks_products.h"
#include "tiles.h"

#if MATRIX_UNITS
// Rows, and inputs, whose sums and weights stay in the cache; panels that share the rows' way there.
#define BLOCK_ROWS 512
#define BLOCK_INPUTS 768
#define BLOCK_PANELS 8

// Inputs `first` to `first + count` of a panel as bf16, two inputs of each output side by side: [count / 2, PANEL, 2].
static void unpack_bf16(uint32_t *to, const uint8_t *panel, long inputs, long first, long count) {
    const uint8_t *codes = panel + scales_size(inputs) + first / STEP * CODE_BYTES;
    // An even input and an odd one of each output.
    const __m512i in_turn = _mm512_or_si512(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_slli_epi32(_mm512_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31), 16));
    for (long at = first; at < first + count; at += STEP, codes += CODE_BYTES) {
        const uint8_t *scales = panel + at / SPAN * SCALE_BYTES;
        const factors of_span = span_factors(scales, 0);
        vi unpacked[8];
        unpack(unpacked, codes, 0);
#pragma GCC unroll 2
        for (int h = 0; h < STEP / GROUP; h++) {
            const factors of = group_factors(of_span, scales, at % SPAN / GROUP + h, 0);
#if !E4M3
            // Of codes as they are stored.
            const vf minimum = MINIMUM ? of.minimum : of.scale * (float)ZERO;
#endif
#pragma GCC unroll 8
            for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; pair++, to += PANEL) {
#if E4M3
                    const vi four = unpacked[h * (GROUP / 4) + s];
                    const vf even = numbers_of(four, 2 * pair) * of.scale;
                    const vf odd = numbers_of(four, 2 * pair + 1) * of.scale;
#else
                    const vu four = (vu)unpacked[h * (GROUP / 4) + s] >> 16 * pair;
                    const vf even = __builtin_convertvector((vi)(four & 255), vf) * of.scale - minimum;
                    const vf odd = __builtin_convertvector((vi)(four >> 8 & 255), vf) * of.scale - minimum;
#endif
                    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
                    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(in_turn, apart));
                }
        }
    }
}

// `panels` panels, at most BLOCK_PANELS, and rows `begin` to `end` of x in bf16, rows `stride` bytes apart. memory: of
// this thread. output: of the first panel.
static void panels_in_tiles(const target *to, const uint8_t *x, long stride, long inputs, const uint8_t *packed,
                            long output, long outputs, long panels, long begin, long end, uint8_t *memory) {
    const long size = panel_size(inputs), apart = BLOCK_INPUTS * 2 * PANEL;
    float *sums = (float *)memory;
    uint8_t *w = memory + BLOCK_ROWS * BLOCK_PANELS * PANEL * 4;
    for (long t = begin; t < end; t += BLOCK_ROWS) {
        const long rows = end - t < BLOCK_ROWS ? end - t : BLOCK_ROWS;
        for (long k = 0; k < inputs; k += BLOCK_INPUTS) {
            const long count = inputs - k < BLOCK_INPUTS ? inputs - k : BLOCK_INPUTS;
            for (long p = 0; p < panels; p++)
                unpack_bf16((uint32_t *)(w + p * apart), packed + p * size, inputs, k, count);
            for (long r = 0; r < rows; r += 32)
                for (long p = 0; p < panels; p += 2) {
                    const tile_sums to = {sums + (r * BLOCK_PANELS + p) * PANEL, BLOCK_PANELS * PANEL};
                    multiply_tiles(to, k ? to : (tile_sums){}, x + (t + r) * stride + 2 * k, stride, w + p * apart,
                                   4 * PANEL, apart, count, rows - r > 16);
                }
        }
        for (long r = 0; r < rows; r++) {
            const long kept = outputs - output < panels * PANEL ? outputs - output : panels * PANEL;
            put(to, t + r, output, kept, sums + r * BLOCK_PANELS * PANEL);
        }
    }
}

#define THREAD_MEMORY (BLOCK_ROWS * BLOCK_PANELS * PANEL * 4 + BLOCK_PANELS * BLOCK_INPUTS * 2 * PANEL)
#else
#define THREAD_MEMORY 0
#endif
