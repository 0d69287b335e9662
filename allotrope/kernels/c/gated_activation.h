// The activation between the two products of a feed-forward block.
#pragma once
#include "element.h"

// How gate and up become one: act(gate) * (up + offset), gate at most `limit`, up within +-`limit`.
typedef struct {
    long gelu;
    float slope, limit, offset;
} gating;

// The last arguments of functions that take one.
#define GATING_ARGUMENTS long gelu, float slope, float limit, float offset
#define GATING {gelu, slope, limit, offset}

static inline lanes gated(lanes gate, lanes up, const gating *how) {
    const float limit = how->limit;
    gate = choose((bits)(gate > limit), all(limit), gate);
    up = choose((bits)(up > limit), all(limit), choose((bits)(up < -limit), all(-limit), up)) + how->offset;
    // tanh's form of gelu is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
    const lanes inner = how->gelu ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : how->slope * gate;
    return gate / (1 + exponential(-inner)) * up;
}
