// Split-KV decode over a paged KV cache, for sizes known at compile time: DIM of queries and keys, VALUE_DIM of values
// (multiples of LANES), Q_PER_KV query heads for each KV head, CHUNK keys of a chunk (a multiple of LANES).
//
// A request's keys are cut into chunks that follow from its own length alone. Each chunk gives its row max m_i, its row
// sum l_i of e^(logit - m_i), and the values weighted likewise. The merge of a request's chunks is exact.
#include <math.h>

#include "element.h"

// The operands of one multiply_add: WIDTH values of a query or a key.
#if ELEMENT_BFLOAT16 && defined(__AVX512BF16__) && DIM % (2 * LANES) == 0
#define WIDTH (2 * LANES)
typedef __m512bh operand;
static inline lanes multiply_add(lanes total, operand a, operand b) {
    return (lanes)_mm512_dpbf16_ps((__m512)total, a, b);
}
static inline operand load_operand(const element *from) {
    operand result;
    memcpy(&result, from, sizeof result);
    return result;
}
#else
#define WIDTH LANES
typedef lanes operand;
static inline lanes multiply_add(lanes total, operand a, operand b) { return total + a * b; }
static inline operand load_operand(const element *from) { return load(from); }
#endif

// The horizontal sums of 16 vectors: halves of two are added into one, then quarters, and so on.
static inline lanes horizontal_sums(const lanes x[LANES]) {
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
    float m_i[Q_PER_KV], l_i[Q_PER_KV];
    lanes acc[Q_PER_KV][VALUE_DIM / LANES];
} partial;

// Strides of a pool of keys or values, in elements.
typedef struct {
    long page, row, head;
} strides;

// Prefetch the keys of all heads before the first head uses its own: a token's heads are contiguous.
static void prefetch(const element *pool, const long *offsets, long count, long size) {
    for (long i = 0; i < count; i++)
        for (long d = 0; d < size; d += 64 / sizeof(element)) __builtin_prefetch(pool + offsets[i] + d, 0, 2);
}

// One chunk for one KV head. key_offsets, value_offsets: of its `count` keys and values in the pool.
static void attend_chunk(partial *to, const element *q, const element *keys, const element *values,
                         const long *key_offsets, const long *value_offsets, long count, float scale) {
    operand query[Q_PER_KV][DIM / WIDTH];
    for (int r = 0; r < Q_PER_KV; r++)
        for (int d = 0; d < DIM / WIDTH; d++) query[r][d] = load_operand(q + r * DIM + d * WIDTH);
    float weights[Q_PER_KV][CHUNK] __attribute__((aligned(64)));
    for (long begin = 0; begin < count; begin += LANES) {
        lanes dots[Q_PER_KV][LANES] = {};
        for (int i = 0; i < LANES; i++) {
            // The lanes behind the last key repeat it, and are masked below.
            const element *key = keys + key_offsets[begin + i < count ? begin + i : count - 1];
#pragma GCC unroll 32
            for (int d = 0; d < DIM / WIDTH; d++) {
                const operand part = load_operand(key + d * WIDTH);
#pragma GCC unroll 16
                for (int r = 0; r < Q_PER_KV; r++)
                    dots[r][i] = multiply_add(dots[r][i], query[r][d], part);
            }
        }
        for (int r = 0; r < Q_PER_KV; r++) *(lanes *)(weights[r] + begin) = horizontal_sums(dots[r]) * scale;
    }
    for (int r = 0; r < Q_PER_KV; r++) {
        float m_i = -INFINITY;
        for (long i = 0; i < count; i++) m_i = weights[r][i] > m_i ? weights[r][i] : m_i;
        // A masked lane gets e^-87, which is lost beside the 1 of the row max.
        for (long i = count; i % LANES; i++) weights[r][i] = -INFINITY;
        lanes l_i = {};
        for (long i = 0; i < count; i += LANES) {
            lanes *p = (lanes *)(weights[r] + i);
            *p = exponential(*p - m_i);
            l_i += *p;
        }
        to->m_i[r] = m_i, to->l_i[r] = sum(l_i);
    }
    lanes total[Q_PER_KV][VALUE_DIM / LANES] = {};
    for (long i = 0; i < count; i++) {
        const element *value = values + value_offsets[i];
#pragma GCC unroll 32
        for (int d = 0; d < VALUE_DIM / LANES; d++) {
            lanes part = load(value + d * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < Q_PER_KV; r++) total[r][d] += weights[r][i] * part;
        }
    }
    memcpy(to->acc, total, sizeof total);
}

// Merge the `count` chunks of one query head, whose partials lie `apart` from each other.
static void merge(element *to, const partial *from, long count, long stride, int r, const float *sink) {
    float m_i = sink ? *sink : -INFINITY;
    for (long i = 0; i < count; i++) {
        float other = from[i * stride].m_i[r];
        m_i = other > m_i ? other : m_i;
    }
    float l_i = sink ? expf(*sink - m_i) : 0;
    lanes total[VALUE_DIM / LANES] = {};
    for (long i = 0; i < count; i++) {
        const partial *chunk = from + i * stride;
        float alpha = expf(chunk->m_i[r] - m_i);
        l_i += alpha * chunk->l_i[r];
        for (int d = 0; d < VALUE_DIM / LANES; d++) total[d] += alpha * chunk->acc[r][d];
    }
    for (int d = 0; d < VALUE_DIM / LANES; d++) store(to + d * LANES, total[d] / l_i);
}

// Bytes of scratch for each chunk and KV head.
long partial_bytes(void) { return sizeof(partial); }

static void write(element *pool, strides stride, long slot, long page, const element *from, long kv_heads, long dim) {
    for (long g = 0; g < kv_heads; g++)
        memcpy(pool + slot / page * stride.page + slot % page * stride.row + g * stride.head, from + g * dim,
               dim * sizeof(element));
}

// Write keys and values of `tokens` tokens, then attend for the first `requests` of them.
// out: [requests, kv_heads, Q_PER_KV, VALUE_DIM]. q, k, v: contiguous heads, tokens a stride apart; k is null where
// nothing is written. slot_mapping: [tokens], -1 for none. keys, values: [pages, page, kv_heads, dim] pools.
// chunks: [n, 3] request, first key, end. chunk_starts: [requests + 1], first chunk of each request. table: [requests,
// width] pages; a negative one reads row 0 of the null page, which holds zeros. sinks: [kv_heads * Q_PER_KV] or null.
// scratch: n * kv_heads partials.
void store_and_decode(element *out, const element *q, long q_stride, const element *k, long k_stride,
                      const element *v, long v_stride, const int64_t *slot_mapping, long tokens, element *keys,
                      long key_page, long key_row, long key_head, element *values, long value_page, long value_row,
                      long value_head, long kv_heads, long page, const int64_t *chunks, const int64_t *chunk_starts,
                      long requests, const int64_t *table, long width, const float *sinks, partial *scratch,
                      float scale) {
    const strides key_strides = {key_page, key_row, key_head}, value_strides = {value_page, value_row, value_head};
    const long count = chunk_starts[requests];
#pragma omp parallel if (count > 1 || tokens > 64)
    {
        if (k) {
#pragma omp for schedule(static)
            for (long t = 0; t < tokens; t++) {
                if (slot_mapping[t] < 0) continue;
                write(keys, key_strides, slot_mapping[t], page, k + t * k_stride, kv_heads, DIM);
                if (values != keys)
                    write(values, value_strides, slot_mapping[t], page, v + t * v_stride, kv_heads, VALUE_DIM);
            }
        }
#pragma omp for schedule(dynamic)
        for (long n = 0; n < count; n++) {
            const long b = chunks[3 * n], first = chunks[3 * n + 1], end = chunks[3 * n + 2];
            long key_offsets[CHUNK], value_offsets[CHUNK];
            for (long i = first; i < end; i++) {
                const long entry = table[b * width + i / page], row = entry < 0 ? 0 : i % page;
                key_offsets[i - first] = (entry < 0 ? 0 : entry) * key_strides.page + row * key_strides.row;
                value_offsets[i - first] = (entry < 0 ? 0 : entry) * value_strides.page + row * value_strides.row;
            }
            if (key_strides.head == DIM) prefetch(keys, key_offsets, end - first, kv_heads * DIM);
            if (value_strides.head == VALUE_DIM) prefetch(values, value_offsets, end - first, kv_heads * VALUE_DIM);
            for (long g = 0; g < kv_heads; g++)
                attend_chunk(scratch + n * kv_heads + g, q + b * q_stride + g * Q_PER_KV * DIM,
                             keys + g * key_strides.head, values + g * value_strides.head, key_offsets, value_offsets,
                             end - first, scale);
        }
#pragma omp for schedule(static)
        for (long b = 0; b < requests; b++)
            for (long h = 0; h < kv_heads * Q_PER_KV; h++)
                merge(out + (b * kv_heads * Q_PER_KV + h) * VALUE_DIM,
                      scratch + chunk_starts[b] * kv_heads + h / Q_PER_KV, chunk_starts[b + 1] - chunk_starts[b],
                      kv_heads, h % Q_PER_KV, sinks ? sinks + h : 0);
    }
}
