// Softmax attention of one new token per request over paged keys and values, for sizes known when it is compiled:
// DIM of queries and keys, VALUE_DIM of values (multiples of LANES), REPEAT query heads to a key/value head, PIECE keys
// scored at a time (a multiple of LANES).
//
// A request's keys are cut into pieces that depend on its own length alone. Each piece gives its largest logit, the
// sum of e^(logit - largest) and the values weighted so; the merge of a request's pieces is exact.
#include <math.h>

#include "element.h"

// Numbers of queries and keys that are multiplied at once, with what they are kept in.
#if ELEMENT_BFLOAT16 && defined(__AVX512BF16__) && DIM % (2 * LANES) == 0
#define WIDTH (2 * LANES)
typedef __m512bh factors;
static inline lanes multiply_add(lanes total, factors a, factors b) {
    return (lanes)_mm512_dpbf16_ps((__m512)total, a, b);
}
static inline factors load_factors(const element *from) {
    factors found;
    memcpy(&found, from, sizeof found);
    return found;
}
#else
#define WIDTH LANES
typedef lanes factors;
static inline lanes multiply_add(lanes total, factors a, factors b) { return total + a * b; }
static inline factors load_factors(const element *from) { return load(from); }
#endif

// The sums over the lanes of 16 vectors: halves of two are added into one, then quarters, and so on.
static inline lanes sums(const lanes x[LANES]) {
    lanes y[8], z[4], u[2];
    for (int i = 0; i < 8; i++)
        y[i] = __builtin_shufflevector(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        z[i] = __builtin_shufflevector(y[i], y[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(y[i], y[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        u[i] = __builtin_shufflevector(z[i], z[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(z[i], z[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(u[0], u[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(u[0], u[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

typedef struct {
    float largest[REPEAT], mass[REPEAT];
    lanes values[REPEAT][VALUE_DIM / LANES];
} partial;

// A pool of keys or values: numbers between two pages, two rows of a page, two heads of a row.
typedef struct {
    long page, row, head;
} strides;

// Ask for the rows of all heads before the first head needs its part: rows are contiguous, a head's parts are not.
static void fetch(const element *pool, const long *at, long count, long size) {
    for (long i = 0; i < count; i++)
        for (long d = 0; d < size; d += 64 / sizeof(element)) __builtin_prefetch(pool + at[i] + d, 0, 2);
}

// One piece for one key/value head. key_at, value_at: where each of its `count` rows is.
static void attend(partial *to, const element *q, const element *keys, const element *values, const long *key_at,
                   const long *value_at, long count, float scale) {
    factors query[REPEAT][DIM / WIDTH];
    for (int r = 0; r < REPEAT; r++)
        for (int d = 0; d < DIM / WIDTH; d++) query[r][d] = load_factors(q + r * DIM + d * WIDTH);
    float weights[REPEAT][PIECE] __attribute__((aligned(64)));
    for (long begin = 0; begin < count; begin += LANES) {
        lanes products[REPEAT][LANES] = {};
        for (int i = 0; i < LANES; i++) {
            // Beyond the last key comes the last key again, to be left out below.
            const element *key = keys + key_at[begin + i < count ? begin + i : count - 1];
#pragma GCC unroll 32
            for (int d = 0; d < DIM / WIDTH; d++) {
                const factors part = load_factors(key + d * WIDTH);
#pragma GCC unroll 16
                for (int r = 0; r < REPEAT; r++)
                    products[r][i] = multiply_add(products[r][i], query[r][d], part);
            }
        }
        for (int r = 0; r < REPEAT; r++) *(lanes *)(weights[r] + begin) = sums(products[r]) * scale;
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
        const element *value = values + value_at[i];
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

static void write(element *pool, strides stride, long slot, long page, const element *from, long groups, long dim) {
    for (long g = 0; g < groups; g++)
        memcpy(pool + slot / page * stride.page + slot % page * stride.row + g * stride.head, from + g * dim,
               dim * sizeof(element));
}

// Write the rows of `tokens` tokens, then attend for the first `requests` of them.
// out: [requests, groups, REPEAT, VALUE_DIM]. q, k, v: heads side by side, tokens a stride apart; k is none where
// nothing is written. slots: [tokens], row of the pool for each token, below 0 for none. keys, values: [pages, page,
// groups, dim] pools. pieces: [n, 3] request, first key, end. starts: [requests + 1], first piece of each request.
// table: [requests, width] pages, below 0 where there is none: row 0, which holds zeros, is read then. sinks: [groups *
// REPEAT] or none. scratch: n * groups partials.
void store_and_attend(element *out, const element *q, long q_stride, const element *k, long k_stride,
                      const element *v, long v_stride, const int64_t *slots, long tokens, element *keys,
                      strides key_strides, element *values, strides value_strides, long groups, long page,
                      const int64_t *pieces, const int64_t *starts, long requests, const int64_t *table, long width,
                      float scale, const float *sinks, partial *scratch) {
    const long count = starts[requests];
#pragma omp parallel if (count > 1 || tokens > 64)
    {
        if (k) {
#pragma omp for schedule(static)
            for (long t = 0; t < tokens; t++) {
                if (slots[t] < 0) continue;
                write(keys, key_strides, slots[t], page, k + t * k_stride, groups, DIM);
                if (values != keys)
                    write(values, value_strides, slots[t], page, v + t * v_stride, groups, VALUE_DIM);
            }
        }
#pragma omp for schedule(dynamic)
        for (long n = 0; n < count; n++) {
            const long b = pieces[3 * n], first = pieces[3 * n + 1], end = pieces[3 * n + 2];
            long key_at[PIECE], value_at[PIECE];
            for (long i = first; i < end; i++) {
                const long at = table[b * width + i / page], row = at < 0 ? 0 : i % page;
                key_at[i - first] = (at < 0 ? 0 : at) * key_strides.page + row * key_strides.row;
                value_at[i - first] = (at < 0 ? 0 : at) * value_strides.page + row * value_strides.row;
            }
            if (key_strides.head == DIM) fetch(keys, key_at, end - first, groups * DIM);
            if (value_strides.head == VALUE_DIM) fetch(values, value_at, end - first, groups * VALUE_DIM);
            for (long g = 0; g < groups; g++)
                attend(scratch + n * groups + g, q + b * q_stride + g * REPEAT * DIM, keys + g * key_strides.head,
                       values + g * value_strides.head, key_at, value_at, end - first, scale);
        }
#pragma omp for schedule(static)
        for (long b = 0; b < requests; b++)
            for (long h = 0; h < groups * REPEAT; h++)
                merge(out + (b * groups * REPEAT + h) * VALUE_DIM, scratch + starts[b] * groups + h / REPEAT,
                      starts[b + 1] - starts[b], groups, h % REPEAT, sinks ? sinks + h : 0);
    }
}
