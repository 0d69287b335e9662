// Softmax attention of one new token per request over paged keys and values, for sizes known when it is compiled:
// DIM of queries and keys, VALUE_DIM of values (multiples of LANES), REPEAT query heads to a key/value head, PIECE keys
// scored at a time (a multiple of LANES).
//
// A request's keys are cut into pieces that depend on its own length alone. Each piece gives its largest logit, the
// sum of e^(logit - largest) and the values weighted so; the merge of a request's pieces is exact.
#include <math.h>

#include "element.h"

typedef struct {
    float largest[REPEAT], mass[REPEAT];
    lanes values[REPEAT][VALUE_DIM / LANES];
} partial;

// One piece for one key/value head. rows: where each of its `count` keys and values is, in rows of the pool.
static void attend(partial *to, const element *q, const element *keys, const element *values, const long *rows,
                   long count, long groups, float scale) {
    lanes query[REPEAT][DIM / LANES];
    for (int r = 0; r < REPEAT; r++)
        for (int d = 0; d < DIM / LANES; d++) query[r][d] = load(q + r * DIM + d * LANES);
    float weights[REPEAT][PIECE] __attribute__((aligned(64)));
    for (long i = 0; i < count; i++) {
        const element *key = keys + rows[i] * groups * DIM;
        lanes products[REPEAT] = {};
#pragma GCC unroll 32
        for (int d = 0; d < DIM / LANES; d++) {
            lanes part = load(key + d * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < REPEAT; r++) products[r] += query[r][d] * part;
        }
#pragma GCC unroll 16
        for (int r = 0; r < REPEAT; r++) weights[r][i] = sum(products[r]) * scale;
    }
    for (int r = 0; r < REPEAT; r++) {
        float largest = -INFINITY;
        for (long i = 0; i < count; i++) largest = weights[r][i] > largest ? weights[r][i] : largest;
        // What is no key weighs e^-87: nothing beside the largest, which weighs 1.
        for (long i = count; i % LANES; i++) weights[r][i] = -INFINITY;
        lanes mass = {};
        for (long i = 0; i < count; i += LANES) {
            lanes *some = (lanes *)(weights[r] + i);
            *some = exponential(*some - largest);
            mass += *some;
        }
        to->largest[r] = largest, to->mass[r] = sum(mass);
    }
    lanes total[REPEAT][VALUE_DIM / LANES] = {};
    for (long i = 0; i < count; i++) {
        const element *value = values + rows[i] * groups * VALUE_DIM;
#pragma GCC unroll 32
        for (int d = 0; d < VALUE_DIM / LANES; d++) {
            lanes part = load(value + d * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < REPEAT; r++) total[r][d] += weights[r][i] * part;
        }
    }
    memcpy(to->values, total, sizeof total);
}

// The result of one query head from its request's `count` pieces, `apart` partials from each other.
static void merge(element *to, const partial *from, long count, long apart, int r, const float *sink) {
    float largest = sink ? *sink : -INFINITY;
    for (long i = 0; i < count; i++) {
        float other = from[i * apart].largest[r];
        largest = other > largest ? other : largest;
    }
    float mass = sink ? expf(*sink - largest) : 0;
    lanes total[VALUE_DIM / LANES] = {};
    for (long i = 0; i < count; i++) {
        const partial *one = from + i * apart;
        float share = expf(one->largest[r] - largest);
        mass += share * one->mass[r];
        for (int d = 0; d < VALUE_DIM / LANES; d++) total[d] += share * one->values[r][d];
    }
    for (int d = 0; d < VALUE_DIM / LANES; d++) store(to + d * LANES, total[d] / mass);
}

// Bytes of scratch for each piece and key/value head.
long partial_bytes(void) { return sizeof(partial); }

// Write the rows of `tokens` tokens, then attend for the first `requests` of them.
// out: [requests, groups, REPEAT, VALUE_DIM]. q, k, v: heads side by side, tokens a stride apart. slots: [tokens], row
// of the pool for each token, below 0 for none. keys, values: [pages, page, groups, dim] pools. pieces: [n, 3]
// request, first key, end. starts: [requests + 1], first piece of each request. table: [requests, width] pages,
// below 0 where there is none: row 0, which holds zeros, is read then.
// sinks: [groups * REPEAT] or none. scratch: n * groups partials.
void store_and_attend(element *out, const element *q, long q_stride, const element *k, long k_stride,
                      const element *v, long v_stride, const int64_t *slots, long tokens, element *keys,
                      element *values, long groups, long page, const int64_t *pieces, const int64_t *starts,
                      long requests, const int64_t *table, long width, float scale, const float *sinks,
                      partial *scratch) {
    const long count = starts[requests];
#pragma omp parallel if (count > 1 || tokens > 64)
    {
        if (k) {
#pragma omp for schedule(static)
            for (long t = 0; t < tokens; t++) {
                if (slots[t] < 0) continue;
                memcpy(keys + slots[t] * groups * DIM, k + t * k_stride, groups * DIM * sizeof(element));
                if (values != keys)
                    memcpy(values + slots[t] * groups * VALUE_DIM, v + t * v_stride,
                           groups * VALUE_DIM * sizeof(element));
            }
        }
#pragma omp for schedule(dynamic)
        for (long n = 0; n < count; n++) {
            const long b = pieces[3 * n], first = pieces[3 * n + 1], end = pieces[3 * n + 2];
            long rows[PIECE];
            for (long i = first; i < end; i++) {
                const long at = table[b * width + i / page];
                rows[i - first] = at < 0 ? 0 : at * page + i % page;
            }
            for (long g = 0; g < groups; g++)
                attend(scratch + n * groups + g, q + b * q_stride + g * REPEAT * DIM, keys + g * DIM,
                       values + g * VALUE_DIM, rows, end - first, groups, scale);
        }
#pragma omp for schedule(static)
        for (long b = 0; b < requests; b++)
            for (long h = 0; h < groups * REPEAT; h++)
                merge(out + (b * groups * REPEAT + h) * VALUE_DIM, scratch + starts[b] * groups + h / REPEAT,
                      starts[b + 1] - starts[b], groups, h % REPEAT, sinks ? sinks + h : 0);
    }
}
