// What every product with panels of blocks shares: how rows meet a panel, and how sums are stored.
#pragma once
#include "blocks.h"

// How sums are stored. y: of elements, or of fp32.
typedef struct {
    void *y;
    long stride, exact;
    const float *bias;
} target;

static inline void put(const target *to, long row, long output, long kept, const float *sums) {
    for (long i = 0; i < kept; i++) {
        const float y = sums[i] + (to->bias ? to->bias[output + i] : 0);
        const long at = row * to->stride + output + i;
        if (to->exact)
            ((float *)to->y)[at] = y;
        else
            ((element *)to->y)[at] = narrow(y);
    }
}

// Rows that share a pass over a panel.
#define ROWS (W == 16 ? 8 : 4)
#define EACH(many) many(1) many(2) many(3) many(4) many(5) many(6) many(7) many(8)

// Of many rows, KC inputs of NR outputs are unpacked once, to codes of a byte beside their factors or to numbers, and
// stay in the nearest cache while up to MC rows meet them, MR at a time (the names are those of BLIS). Sums are those of
// few rows bit for bit: each is made of the same steps in the same order.
#define KC_CODES 512
#define KC_WEIGHTS 128
#define NR (2 * PANEL)
#define MR (W == 8 ? 3 : 6)
#define MC 256
// From so many rows on it is worth the unpacking.
#define BLOCKED_FROM 18
