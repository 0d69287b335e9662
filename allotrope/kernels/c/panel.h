// Products of a few rows with a panel: a matrix packed so that inputs follow one another, PAIR of them for each of its
// PANEL outputs. It is read from end to end, and a sum has the same order however many rows there are.
#pragma once
#include "element.h"

// Numbers that fit into 32 bits, and outputs of a panel.
#define PAIR (4 / (long)sizeof(element))
#define COLUMNS 2
#define PANEL (COLUMNS * LANES)
// Rows whose sums fit into the registers.
#define ROWS 12
// How far ahead a panel is fetched, in steps of PAIR inputs.
#define AHEAD 32

// Whether this machine should use it: with the registers and instructions that it is made for. Elsewhere nothing but
// a `suits` that says so is compiled: emulating the rest takes the compiler 20 s.
#if defined(__AVX512F__) && (!ELEMENT_BFLOAT16 || defined(__AVX512BF16__))
#define SUITS 1
#else
#define SUITS 0
#endif

#if SUITS
static inline lanes multiply_add(lanes total, uint32_t x, bits w) {
#if !ELEMENT_BFLOAT16
    float value;
    memcpy(&value, &x, sizeof value);
    return total + value * (lanes)w;
#else
    return (lanes)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#endif
}

// total += x w for `rows` rows of x, a constant of each caller. x: rows a stride apart. w: [inputs / PAIR, PANEL, PAIR].
static inline __attribute__((always_inline)) void multiply(lanes total[ROWS][COLUMNS], const element *x, long x_stride,
                                                           const element *w, long inputs, const int rows) {
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
}
#endif
