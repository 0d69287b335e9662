// Absorbed MLA decode over a paged latent KV cache [c | k_pe]: the query is projected to the latent by W_UK, all heads
// attend to the same cache entries, read in place, and the output is projected by W_UV.
//
// A request's keys are cut into chunks of CHUNK, counted from its first one. Each chunk gives a head's row max m_i, its
// row sum l_i of e^(logit - m_i), and the latents weighted likewise. The merge of a request's chunks is exact.
#include <math.h>

#include "element.h"

#define CHUNK 256
// Heads, and keys, of a register tile.
#define BLOCK 4
// Multiply-adds below which a second thread costs more than it gains.
#define WORTH_THREADS 400000

typedef struct {
    long heads, latent, rope, nope, values;
    long tokens, requests;
    long page, table_width;
    // Elements from one entry of a pool to the next.
    long c_row, pe_row;
    float scale;
} sizes;

static inline lanes load_floats(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

// The `count` elements at `from`, then zeros.
static inline lanes load_some(const element *from, long count) {
    element padded[LANES] = {0};
    memcpy(padded, from, count * sizeof(element));
    return load(padded);
}

static inline long round_up(long size) { return (size + LANES - 1) / LANES * LANES; }

// q_nope W_UK of one head, then q_pe, padded with zeros to whole vectors; both times scale, in fp32.
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

// Logits of BLOCK heads for `count` keys. q: absorbed queries, one for each head. rows: slots of the keys.
static void score(float (*logits)[CHUNK], const float *const *q, const element *c, const element *k_pe,
                  const long *rows, long count, const sizes *n) {
    for (long first = 0; first < count; first += BLOCK) {
        lanes dots[BLOCK][BLOCK] = {};
        const element *key[BLOCK], *key_pe[BLOCK];
        for (int j = 0; j < BLOCK; j++) {
            // The lanes behind the last key repeat it, and are dropped.
            const long row = rows[first + j < count ? first + j : count - 1];
            key[j] = c + row * n->c_row, key_pe[j] = k_pe + row * n->pe_row;
        }
        for (long d = 0; d < n->latent; d += LANES) {
            const lanes k[BLOCK] = {load(key[0] + d), load(key[1] + d), load(key[2] + d), load(key[3] + d)};
#pragma GCC unroll 4
            for (int h = 0; h < BLOCK; h++)
#pragma GCC unroll 4
                for (int j = 0; j < BLOCK; j++) dots[h][j] += load_floats(q[h] + d) * k[j];
        }
        for (long d = 0; d < n->rope; d += LANES) {
            const long remaining = n->rope - d;
            for (int j = 0; j < BLOCK; j++) {
                const lanes k = remaining >= LANES ? load(key_pe[j] + d) : load_some(key_pe[j] + d, remaining);
                for (int h = 0; h < BLOCK; h++) dots[h][j] += load_floats(q[h] + n->latent + d) * k;
            }
        }
        for (int h = 0; h < BLOCK; h++)
            for (int j = 0; j < BLOCK && first + j < count; j++) logits[h][first + j] = sum(dots[h][j]);
    }
}

// Replace logits by p = e^(logit - m_i). Returns the row max m_i and the row sum l_i.
static void softmax(float *logits, long count, float *m_i, float *l_i) {
    float row_max = -INFINITY;
    for (long i = 0; i < count; i++) row_max = logits[i] > row_max ? logits[i] : row_max;
    // A masked lane gets e^-87, which is lost beside the 1 of the row max.
    for (long i = count; i % LANES; i++) logits[i] = -INFINITY;
    lanes total = {};
    for (long i = 0; i < count; i += LANES) {
        const lanes weights = exponential(load_floats(logits + i) - row_max);
        memcpy(logits + i, &weights, sizeof weights);
        total += weights;
    }
    *m_i = row_max, *l_i = sum(total);
}

// One chunk for BLOCK heads. A partial is [m_i, l_i, latent].
static void attend_chunk(float *const *to, const float *const *q, const element *c, const element *k_pe,
                         const long *rows, long count, const sizes *n) {
    float weights[BLOCK][CHUNK] __attribute__((aligned(64)));
    score(weights, q, c, k_pe, rows, count, n);
    for (int h = 0; h < BLOCK; h++) softmax(weights[h], count, to[h], to[h] + 1);
    for (long begin = 0; begin < n->latent; begin += BLOCK * LANES) {
        const long remaining = (n->latent - begin) / LANES;
        lanes total[BLOCK][BLOCK] = {};
        if (remaining >= BLOCK)
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
                for (long d = 0; d < remaining; d++) {
                    const lanes part = load(c + rows[i] * n->c_row + begin + d * LANES);
                    for (int h = 0; h < BLOCK; h++) total[h][d] += weights[h][i] * part;
                }
        for (int h = 0; h < BLOCK; h++)
            memcpy(to[h] + 2 + begin, total[h], (remaining < BLOCK ? remaining : BLOCK) * sizeof(lanes));
    }
}

// Merge one head's `count` partials, `stride` floats apart, into the first; then W_UV z.
static void finish(element *to, float *partials, long count, long stride, const element *w_uv, const sizes *n) {
    float m_i = -INFINITY, l_i = 0;
    for (long i = 0; i < count; i++) m_i = partials[i * stride] > m_i ? partials[i * stride] : m_i;
    for (long i = 0; i < count; i++) {
        float *other = partials + i * stride;
        const float alpha = expf(other[0] - m_i);
        l_i += alpha * other[1];
        for (long d = 0; d < n->latent; d++) partials[2 + d] = (i ? partials[2 + d] : 0) + alpha * other[2 + d];
    }
    for (long v = 0; v < n->values; v++) {
        lanes total = {};
        for (long d = 0; d < n->latent; d += LANES)
            total += load(w_uv + v * n->latent + d) * load_floats(partials + 2 + d);
        to[v] = narrow(sum(total) / l_i);
    }
}

// Floats of scratch for the absorbed query of a head, and for one partial.
static inline long query_size(const sizes *n) { return n->latent + round_up(n->rope); }

static inline long partial_size(const sizes *n) { return 2 + n->latent; }

// Write c and k_pe of all tokens, then attend for the first `requests` of them.
// out: [requests, heads, values]. q_nope, q_pe: strides of a token and of a head. new_c, new_pe: tokens a stride apart.
// slot_mapping: [tokens], -1 for none. w_uk: [heads, nope, latent]. w_uv: [heads, values, latent]. chunks: [count, 2]
// request and first key. chunk_starts: [requests + 1], first chunk of each request. kv_lens: [requests]. table:
// [requests, table_width] pages; a negative one reads row 0 of the null page, which holds zeros. scratch: requests *
// heads queries, then count * heads partials.
void store_and_decode(element *out, const element *q_nope, const long *nope_strides, const element *q_pe,
                      const long *pe_strides, const element *new_c, long c_stride, const element *new_pe,
                      long pe_stride, const int64_t *slot_mapping, element *c, element *k_pe, const element *w_uk,
                      const element *w_uv, const int64_t *chunks, const int64_t *chunk_starts, const int64_t *kv_lens,
                      const int64_t *table, float *scratch, const sizes *n) {
    const long heads = n->heads, requests = n->requests, count = chunk_starts[requests];
    const long query = query_size(n), partial = partial_size(n), blocks = (heads + BLOCK - 1) / BLOCK;
    float *partials = scratch + requests * heads * query;
    const long work = heads * n->latent * (requests * (n->nope + n->values) + 2 * count * CHUNK);
#pragma omp parallel if (work > WORTH_THREADS)
    {
#pragma omp for schedule(static) nowait
        for (long t = 0; t < n->tokens; t++) {
            if (slot_mapping[t] < 0) continue;
            memcpy(c + slot_mapping[t] * n->c_row, new_c + t * c_stride, n->latent * sizeof(element));
            memcpy(k_pe + slot_mapping[t] * n->pe_row, new_pe + t * pe_stride, n->rope * sizeof(element));
        }
#pragma omp for collapse(2) schedule(static)
        for (long h = 0; h < heads; h++)
            for (long b = 0; b < requests; b++)
                absorb(scratch + (b * heads + h) * query, q_nope + b * nope_strides[0] + h * nope_strides[1],
                       q_pe + b * pe_strides[0] + h * pe_strides[1], w_uk + h * n->nope * n->latent, n);
#pragma omp for collapse(2) schedule(dynamic)
        for (long chunk = 0; chunk < count; chunk++)
            for (long block = 0; block < blocks; block++) {
                const long b = chunks[2 * chunk], first = chunks[2 * chunk + 1];
                const long keys = kv_lens[b] - first < CHUNK ? kv_lens[b] - first : CHUNK;
                long rows[CHUNK];
                for (long i = 0; i < keys; i++) {
                    const long page_id = table[b * n->table_width + (first + i) / n->page];
                    rows[i] = page_id < 0 ? 0 : page_id * n->page + (first + i) % n->page;
                }
                const float *q[BLOCK];
                float *to[BLOCK], unused[partial];
                for (int i = 0; i < BLOCK; i++) {
                    const long h = block * BLOCK + i;
                    q[i] = scratch + (b * heads + (h < heads ? h : heads - 1)) * query;
                    to[i] = h < heads ? partials + (chunk * heads + h) * partial : unused;
                }
                attend_chunk(to, q, c, k_pe, rows, keys, n);
            }
#pragma omp for collapse(2) schedule(static)
        for (long h = 0; h < heads; h++)
            for (long b = 0; b < requests; b++)
                finish(out + (b * heads + h) * n->values, partials + (chunk_starts[b] * heads + h) * partial,
                       chunk_starts[b + 1] - chunk_starts[b], heads * partial, w_uv + h * n->values * n->latent, n);
    }
}
