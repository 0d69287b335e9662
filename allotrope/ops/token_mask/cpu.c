// z = z where the packed bit of a token is 1, else value. Words of ones are passed over, and words of zeros are filled.
#include "element.h"

#include <stdint.h>

// Below this many words a second thread costs more than it brings.
#define WORTH_THREADS 16384

// z: rows of `row_stride` elements, of which `vocab` are logits. rows: [count]. bits: [count, words].
void mask_tokens(element *z, const int64_t *rows, const uint32_t *bits, long count, long vocab, long row_stride,
                 long words, float value) {
#pragma omp parallel for if (count * words > WORTH_THREADS) schedule(static)
    for (long i = 0; i < count; i++) {
        element *row = z + rows[i] * row_stride;
        const uint32_t *own = bits + i * words;
        for (long w = 0; 32 * w < vocab; w++) {
            const long left = vocab - 32 * w, tokens = left < 32 ? left : 32;
            element *block = row + 32 * w;
            if (own[w] == UINT32_MAX) continue;
            if (own[w] == 0) {
                for (long j = 0; j < tokens; j++) block[j] = value;
                continue;
            }
            for (long j = 0; j < tokens; j++)
                if (!(own[w] >> j & 1)) block[j] = value;
        }
    }
}
