// Pairs of token and choice, sorted by expert: a counting sort.
#include <string.h>

// Earlier pairs come first. experts: [pairs]. expert_offsets: [count], where each expert's rows end. sorted_token_ids,
// expert_ids: [pairs], of each sorted row. inverse: [pairs], the row of each pair.
void group(int *expert_offsets, long *sorted_token_ids, long *expert_ids, long *inverse, const long *experts, long pairs,
           long count, long topk) {
    long next[count];
    memset(next, 0, sizeof next);
    for (long i = 0; i < pairs; i++) next[experts[i]]++;
    for (long e = 0, row = 0; e < count; e++) {
        const long rows = next[e];
        next[e] = row;
        expert_offsets[e] = row += rows;
    }
    for (long i = 0; i < pairs; i++) {
        const long row = inverse[i] = next[experts[i]]++;
        sorted_token_ids[row] = i / topk;
        expert_ids[row] = experts[i];
    }
}
