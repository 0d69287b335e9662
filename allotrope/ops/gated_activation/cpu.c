// act(gate) * up, one pass over memory. fp32 inside, rounded once.
#include "gated_activation.h"

// Below this many numbers a second thread costs more than it brings.
#define WORTH_THREADS 32768

// A row of x is gate and up side by side: x: [tokens, 2 width], y: [tokens, width]. The width is a multiple of LANES.
void gated_activation(element *y, const element *x, long tokens, long width, long token_stride, GATING_ARGUMENTS) {
    const gating how = GATING;
#pragma omp parallel for if (tokens * width > WORTH_THREADS) schedule(static)
    for (long token = 0; token < tokens; token++) {
        const element *gates = x + token * token_stride, *ups = gates + width;
        for (long i = 0; i < width; i += LANES)
            store(y + token * width + i, gated(load(gates + i), load(ups + i), &how));
    }
}
