// Packs blocks and multiplies, for processors of other kinds. Arguments: a file of stored blocks and rows of activations,
// a file for the products and the unpacked weight, then outputs, inputs and rows.
#include "blocks.c"
#include "blocks_pack.c"
#include <stdio.h>

int main(int count, char **given) {
    if (count != 6) return 1;
    const long outputs = atol(given[3]), inputs = atol(given[4]), tokens = atol(given[5]);
    const long stored_bytes = outputs * (inputs / NUMBERS * BYTES);
    uint8_t *stored = malloc(stored_bytes), *scratch = malloc(scratch_size(tokens, inputs));
    uint8_t *packed = aligned_alloc(64, (outputs + PANEL - 1) / PANEL * panel_size(inputs));
    element *x = malloc(tokens * inputs * sizeof(element));
    float *y = malloc(tokens * outputs * 4), *w = malloc(outputs * inputs * 4);
    int64_t *ids = malloc(outputs * 8);
    for (long i = 0; i < outputs; i++) ids[i] = i;
    FILE *from = fopen(given[1], "rb"), *to = fopen(given[2], "wb");
    if (!from || !to || fread(stored, 1, stored_bytes, from) != (size_t)stored_bytes) return 2;
    if (fread(x, sizeof(element), tokens * inputs, from) != (size_t)(tokens * inputs)) return 3;
    pack(packed, stored, 1, outputs, inputs);
    product(y, outputs, 1, x, inputs, packed, 0, 0, 1, tokens, inputs, outputs, scratch);
    rows(w, packed, ids, outputs, inputs);
    fwrite(y, 4, tokens * outputs, to);
    fwrite(w, 4, outputs * inputs, to);
    return fclose(to);
}
