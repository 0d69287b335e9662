// Latent attention of one new token per request over paged rows [c | k_pe], absorbed: the query is brought to the
// latent, all heads read the same rows where they lie, and the result is brought back.
//
// A request's keys are cut into pieces of PIECE, counted from its first one. Each piece gives a head's largest logit,
// the sum of e^(logit - largest) and the latent rows weighted so; the merge of a request's pieces is exact.
#include <math.h>

#include "element.h"

#define PIECE 256
// Heads and keys that share their loads.
#define BLOCK 4
// Multiply-adds below which a second thread costs more than it brings.
#define WORTH_THREADS 400000

typedef struct {
    long heads, latent, rope, nope, values;
    long tokens, requests;
    long page, table_width;
    // Numbers from one row of a pool to the next.
    long c_row, pe_row;
    float scale;
} sizes;

static inline lanes take(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

// The `count` numbers from here on, then zeros.
static inline lanes load_some(const element *from, long count) {
    element padded[LANES] = {0};
    memcpy(padded, from, count * sizeof(element));
    return load(padded);
}

static inline long round_up(long size) { return (size + LANES - 1) / LANES * LANES; }

// q_h W_UK_h and the rotated part behind it, filled up with zeros to whole lanes, both times scale: fp32.
static void absorb(float *to, const element *q_nope, const element *q_pe, const element *w_uk, const sizes *n) {
    for (long begin = 0; begin < n->latent; begin += BLOCK * LANES) {
        const long count = n->latent - begin < BLOCK * LANES ? (n->latent - begin) / LANES : BLOCK;
        lanes total[BLOCK] = {};
        for (long p = 0; p < n->nope; p++)
            for (long i = 0; i < count; i++)
                total[i] += widen(q_nope[p]) * load(w_uk + p * n->latent + begin + i * LANES);
        for (long i = 0; i < count; i++) {
            const lanes scaled = total[i] * n->scale;
            memcpy(to + begin + i * LANES, &scaled, sizeof scaled);
        }
    }
    for (long r = 0; r < round_up(n->rope); r++) to[n->latent + r] = r < n->rope ? widen(q_pe[r]) * n->scale : 0;
}

// Logits of BLOCK heads for `count` keys. q: absorbed queries, one per head. rows: of the pools.
static void score(float (*logits)[PIECE], const float *const *q, const element *c, const element *k_pe,
                  const long *rows, long count, const sizes *n) {
    for (long first = 0; first < count; first += BLOCK) {
        lanes products[BLOCK][BLOCK] = {};
        const element *key[BLOCK], *turned[BLOCK];
        for (int j = 0; j < BLOCK; j++) {
            // Past the last key its logits are computed again, and dropped.
            const long row = rows[first + j < count ? first + j : count - 1];
            key[j] = c + row * n->c_row, turned[j] = k_pe + row * n->pe_row;
        }
        for (long d = 0; d < n->latent; d += LANES) {
            const lanes k[BLOCK] = {load(key[0] + d), load(key[1] + d), load(key[2] + d), load(key[3] + d)};
#pragma GCC unroll 4
            for (int h = 0; h < BLOCK; h++)
#pragma GCC unroll 4
                for (int j = 0; j < BLOCK; j++) products[h][j] += take(q[h] + d) * k[j];
        }
        for (long d = 0; d < n->rope; d += LANES) {
            const long left = n->rope - d;
            for (int j = 0; j < BLOCK; j++) {
                const lanes k = left >= LANES ? load(turned[j] + d) : load_some(turned[j] + d, left);
                for (int h = 0; h < BLOCK; h++) products[h][j] += take(q[h] + n->latent + d) * k;
            }
        }
        for (int h = 0; h < BLOCK; h++)
            for (int j = 0; j < BLOCK && first + j < count; j++) logits[h][first + j] = sum(products[h][j]);
    }
}

// Turn logits into weights. Returns largest logit and sum of weights.
static void soften(float *logits, long count, float *largest, float *mass) {
    float top = -INFINITY;
    for (long i = 0; i < count; i++) top = logits[i] > top ? logits[i] : top;
    // What is no key weighs e^-87: nothing beside the largest, which weighs 1.
    for (long i = count; i % LANES; i++) logits[i] = -INFINITY;
    lanes total = {};
    for (long i = 0; i < count; i += LANES) {
        const lanes weights = exponential(take(logits + i) - top);
        memcpy(logits + i, &weights, sizeof weights);
        total += weights;
    }
    *largest = top, *mass = sum(total);
}

// One piece for BLOCK heads. A partial is [largest, mass, latent row], `apart` floats from the next head's.
static void attend(float *const *to, const float *const *q, const element *c, const element *k_pe, const long *rows,
                   long count, const sizes *n) {
    float weights[BLOCK][PIECE] __attribute__((aligned(64)));
    score(weights, q, c, k_pe, rows, count, n);
    for (int h = 0; h < BLOCK; h++) soften(weights[h], count, to[h], to[h] + 1);
    for (long begin = 0; begin < n->latent; begin += BLOCK * LANES) {
        const long left = (n->latent - begin) / LANES;
        lanes total[BLOCK][BLOCK] = {};
        if (left >= BLOCK)
            for (long i = 0; i < count; i++) {
                const element *row = c + rows[i] * n->c_row + begin;
                const lanes part[BLOCK] = {load(row), load(row + LANES), load(row + 2 * LANES), load(row + 3 * LANES)};
#pragma GCC unroll 4
                for (int h = 0; h < BLOCK; h++)
#pragma GCC unroll 4
                    for (int d = 0; d < BLOCK; d++) total[h][d] += weights[h][i] * part[d];
            }
        else
            for (long i = 0; i < count; i++)
                for (long d = 0; d < left; d++) {
                    const lanes part = load(c + rows[i] * n->c_row + begin + d * LANES);
                    for (int h = 0; h < BLOCK; h++) total[h][d] += weights[h][i] * part;
                }
        for (int h = 0; h < BLOCK; h++)
            memcpy(to[h] + 2 + begin, total[h], (left < BLOCK ? left : BLOCK) * sizeof(lanes));
    }
}

// Merge one head's `count` partials into the first, then W_UV z.
static void finish(element *to, float *partials, long count, long apart, const element *w_uv, const sizes *n) {
    float largest = -INFINITY, mass = 0;
    for (long i = 0; i < count; i++) largest = partials[i * apart] > largest ? partials[i * apart] : largest;
    for (long i = 0; i < count; i++) {
        float *one = partials + i * apart;
        const float share = expf(one[0] - largest);
        mass += share * one[1];
        for (long d = 0; d < n->latent; d++) partials[2 + d] = (i ? partials[2 + d] : 0) + share * one[2 + d];
    }
    for (long v = 0; v < n->values; v++) {
        lanes total = {};
        for (long d = 0; d < n->latent; d += LANES) total += load(w_uv + v * n->latent + d) * take(partials + 2 + d);
        to[v] = narrow(sum(total) / mass);
    }
}

// Numbers of scratch for the absorbed query of a head, and for one partial.
static inline long query_size(const sizes *n) { return n->latent + round_up(n->rope); }

static inline long partial_size(const sizes *n) { return 2 + n->latent; }

// Write the rows of all tokens, then attend for the first `requests` of them.
// out: [requests, heads, values]. q_nope, q_pe: strides of a token and of a head. new_c, new_pe: rows a stride apart.
// slots: [tokens], row of the pools for each token, below 0 for none. w_uk: [heads, nope, latent]. w_uv: [heads, values,
// latent]. pieces: [count, 2] request and first key. starts: [requests + 1], first piece of each. seen: [requests] keys.
// table: [requests, table_width] pages, below 0 where there is none: row 0, which holds zeros, is read then.
// scratch: requests * heads queries, then count * heads partials.
void store_and_attend(element *out, const element *q_nope, const long *nope_strides, const element *q_pe,
                      const long *pe_strides, const element *new_c, long c_stride, const element *new_pe,
                      long pe_stride, const int64_t *slots, element *c, element *k_pe, const element *w_uk,
                      const element *w_uv, const int64_t *pieces, const int64_t *starts, const int64_t *seen,
                      const int64_t *table, float *scratch, const sizes *n) {
    const long heads = n->heads, requests = n->requests, count = starts[requests];
    const long query = query_size(n), partial = partial_size(n), blocks = (heads + BLOCK - 1) / BLOCK;
    float *partials = scratch + requests * heads * query;
    const long work = heads * n->latent * (requests * (n->nope + n->values) + 2 * count * PIECE);
#pragma omp parallel if (work > WORTH_THREADS)
    {
#pragma omp for schedule(static) nowait
        for (long t = 0; t < n->tokens; t++) {
            if (slots[t] < 0) continue;
            memcpy(c + slots[t] * n->c_row, new_c + t * c_stride, n->latent * sizeof(element));
            memcpy(k_pe + slots[t] * n->pe_row, new_pe + t * pe_stride, n->rope * sizeof(element));
        }
#pragma omp for collapse(2) schedule(static)
        for (long h = 0; h < heads; h++)
            for (long b = 0; b < requests; b++)
                absorb(scratch + (b * heads + h) * query, q_nope + b * nope_strides[0] + h * nope_strides[1],
                       q_pe + b * pe_strides[0] + h * pe_strides[1], w_uk + h * n->nope * n->latent, n);
#pragma omp for collapse(2) schedule(dynamic)
        for (long piece = 0; piece < count; piece++)
            for (long block = 0; block < blocks; block++) {
                const long b = pieces[2 * piece], first = pieces[2 * piece + 1];
                const long keys = seen[b] - first < PIECE ? seen[b] - first : PIECE;
                long rows[PIECE];
                for (long i = 0; i < keys; i++) {
                    const long at = table[b * n->table_width + (first + i) / n->page];
                    rows[i] = at < 0 ? 0 : at * n->page + (first + i) % n->page;
                }
                const float *q[BLOCK];
                float *to[BLOCK], unused[partial];
                for (int i = 0; i < BLOCK; i++) {
                    const long h = block * BLOCK + i;
                    q[i] = scratch + (b * heads + (h < heads ? h : heads - 1)) * query;
                    to[i] = h < heads ? partials + (piece * heads + h) * partial : unused;
                }
                attend(to, q, c, k_pe, rows, keys, n);
            }
#pragma omp for collapse(2) schedule(static)
        for (long h = 0; h < heads; h++)
            for (long b = 0; b < requests; b++)
                finish(out + (b * heads + h) * n->values, partials + (starts[b] * heads + h) * partial,
                       starts[b + 1] - starts[b], heads * partial, w_uv + h * n->values * n->latent, n);
    }
}
