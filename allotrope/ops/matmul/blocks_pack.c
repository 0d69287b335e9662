// Stored blocks into panels, once, and outputs back out of them.
#include "blocks.h"

// `bits` of each of `numbers` codes, from the plane that begins at `from` in runs of `run` bytes; or-ed, `shift` up.
static inline __attribute__((always_inline)) void read_plane(uint8_t *codes, const uint8_t *from, const long numbers,
                                                             const int bits, const long run, const int shift) {
    for (long first = 0; first < numbers; first += run * 8 / bits, from += run)
        for (int place = 0; place < 8 / bits; place++)
            for (long i = 0; i < run; i++)
                codes[first + place * run + i] |= (from[i] >> bits * place & ((1 << bits) - 1)) << shift;
}

#define NUMBERS_OF_SCALES ((INTEGER_SCALES ? NUMBERS / GROUP : 0) * (1 + MINIMUM))

// The codes of one block; of its groups the integer scales, then the minima.
static void read_block(uint8_t codes[NUMBERS], uint8_t scales[64], const uint8_t *block) {
    memset(codes, 0, NUMBERS);
#if P0_BITS == 8
    for (int i = 0; i < NUMBERS; i++) codes[i] = block[P0_AT + i] ^ (SIGNED || E4M3 ? 0 : 128);
#else
    read_plane(codes, block + P0_AT, NUMBERS, P0_BITS, P0_RUN, 0);
#endif
#if P1_BITS
    read_plane(codes, block + P1_AT, NUMBERS, P1_BITS, P1_RUN, P0_BITS);
#endif
#if MIXED
    for (int i = 0; i < 4; i++) {
        const uint8_t scale = block[4 + i], minimum = block[8 + i], low = block[12 + i];
        scales[i] = scale & 63;
        scales[4 + i] = (low & 15) | (scale >> 2 & 48);
        scales[8 + i] = minimum & 63;
        scales[12 + i] = low >> 4 | (minimum >> 2 & 48);
    }
#elif INTEGER_SCALES
    memset(scales, 0, 64);
#if S0_BITS == 8
    for (int i = 0; i < NUMBERS_OF_SCALES; i++) scales[i] = block[S0_AT + i];
#else
    read_plane(scales, block + S0_AT, NUMBERS_OF_SCALES, S0_BITS, S0_RUN, 0);
#if S1_BITS
    read_plane(scales, block + S1_AT, NUMBERS_OF_SCALES, S1_BITS, S1_RUN, S0_BITS);
#endif
    for (int i = 0; i < NUMBERS / GROUP; i++) scales[i] -= SCALE_OFFSET;
#endif
#endif
}

// Where the codes of 32 inputs of output `lane` of a panel go.
static void pack_codes(uint8_t *to, const uint8_t *codes, long lane) {
#if E4M3 && E4M3_PAIRS
    to += lane / 4 * 16 + lane % 4 * 2;
    for (int pair = 0; pair < 16; pair++) memcpy(to + pair / 2 * 64 + pair % 2 * 8, codes + 2 * pair, 2);
    return;
#endif
    to += 4 * lane;
#if P0_BITS == 8
    for (int s = 0; s < 8; s++) memcpy(to + s * 64, codes + 4 * s, 4);
#elif P0_BITS == 4
    uint8_t both[16];
    for (int i = 0; i < 16; i++) both[i] = (codes[i] & 15) | codes[16 + i] << 4;
    for (int s = 0; s < 4; s++) memcpy(to + s * 64, both + 4 * s, 4);
#else
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < 4; b++) {
            uint8_t four = 0;
            for (int s = 0; s < 4; s++) four |= (codes[16 * half + 4 * s + b] & 3) << 2 * s;
            to[half * 64 + b] = four;
        }
#endif
#if P1_BITS == 1
    for (int b = 0; b < 4; b++) {
        uint8_t eight = 0;
        for (int s = 0; s < 8; s++) eight |= (codes[4 * s + b] >> P0_BITS & 1) << s;
        to[LOW_BYTES + b] = eight;
    }
#elif P1_BITS == 2
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < 4; b++) {
            uint8_t four = 0;
            for (int s = 0; s < 4; s++) four |= (codes[16 * half + 4 * s + b] >> P0_BITS & 3) << 2 * s;
            to[LOW_BYTES + half * 64 + b] = four;
        }
#endif
}

// stored: [experts, outputs, inputs / NUMBERS, BYTES]. packed: [experts, panels, panel_size].
void pack(uint8_t *packed, const uint8_t *stored, long experts, long outputs, long inputs) {
    const long panels = (outputs + PANEL - 1) / PANEL, size = panel_size(inputs), row_bytes = inputs / NUMBERS * BYTES;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < experts * panels; p++) {
        uint8_t *panel = packed + p * size;
        memset(panel, 0, size);
        const long first = p % panels * PANEL, kept = outputs - first < PANEL ? outputs - first : PANEL;
        for (long lane = 0; lane < kept; lane++) {
            const uint8_t *block = stored + (p / panels * outputs + first + lane) * row_bytes;
            for (long at = 0; at < inputs; at += NUMBERS, block += BYTES) {
                uint8_t codes[NUMBERS], whole[64];
                read_block(codes, whole, block);
                uint8_t *scales = panel + at / SPAN * SCALE_BYTES;
                memcpy(scales + FLOAT_BYTES / PANEL * lane, block + SCALE_AT, FLOAT_BYTES / PANEL);
#if MINIMUM
                memcpy(scales + FLOAT_BYTES + 2 * lane, block + MINIMUM_AT, 2);
                if (MINIMUM_SIGN < 0) scales[FLOAT_BYTES + 2 * lane + 1] ^= 128;
#endif
                for (int i = 0; i < NUMBERS_OF_SCALES; i++)
                    scales[FLOAT_BYTES * (1 + MINIMUM) + i * PANEL + lane] = whole[i];
                uint8_t *to = panel + scales_size(inputs) + at / STEP * CODE_BYTES;
                for (int i = 0; i < NUMBERS; i += STEP, to += CODE_BYTES) pack_codes(to, codes + i, lane);
            }
        }
    }
}

// Outputs `ids` of a packed weight, unpacked. y: [count, inputs] of fp32.
void rows(float *y, const uint8_t *packed, const int64_t *ids, long count, long inputs) {
    const long size = panel_size(inputs);
#pragma omp parallel for schedule(static) if (count > 1)
    for (long n = 0; n < count; n++) {
        const uint8_t *panel = packed + ids[n] / PANEL * size, *codes = panel + scales_size(inputs);
        const long lane = ids[n] % PANEL, part = lane / W, at_lane = lane % W;
        float *to = y + n * inputs;
        for (long at = 0; at < inputs; at += STEP, codes += CODE_BYTES) {
            const uint8_t *scales = panel + at / SPAN * SCALE_BYTES;
            const factors of_span = span_factors(scales, part);
            vi unpacked[8];
            unpack(unpacked, codes, part);
            for (int s = 0; s < 8; s++) {
                const factors of = group_factors(of_span, scales, at % SPAN / GROUP + s * 4 / GROUP, part);
                for (int b = 0; b < 4; b++) {
                    vf w = scaled(numbers_of(unpacked[s], b), of.scale);
                    if (MINIMUM) w -= of.minimum;
                    to[at + 4 * s + b] = w[at_lane];
                }
            }
        }
    }
}
