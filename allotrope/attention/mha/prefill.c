// Flash attention of prompts over a paged KV cache, for sizes known at compile time: DIM of queries and keys, VALUE_DIM
// of values (multiples of LANES), Q_PER_KV query heads for each KV head, BLOCK query tokens of a block.
//
// BLOCK_N keys are packed into panels and multiplied with all rows of a query block: Q_PER_KV heads of its tokens.
// TILE_ROWS rows are a tile, whose logits, p and accumulator stay in the L1 cache. Key blocks begin at multiples of
// BLOCK_N, and a masked key weighs exactly 0. So the result of a row follows from its own position alone.
#include <math.h>

#include "panel.h"
#include "tiles.h"

// Whether matrix units multiply: they take 32 inputs at a time.
#define BY_MATRIX_UNITS (MATRIX_UNITS && ELEMENT_BFLOAT16 && DIM % 32 == 0)

int suits(void) {
#if BY_MATRIX_UNITS
    return SUITS && matrix_units();
#else
    return SUITS;
#endif
}

#if SUITS
#include <immintrin.h>

#if BY_MATRIX_UNITS
#define TILE_ROWS 32
#else
#define TILE_ROWS ROWS
#endif
#define BLOCK_N 128
// Query tokens of a block, for about 256 rows.
#define TOKENS (Q_PER_KV <= 256 / BLOCK ? BLOCK : Q_PER_KV < 256 ? 256 / Q_PER_KV : 1)
#define TILES ((TOKENS * Q_PER_KV + TILE_ROWS - 1) / TILE_ROWS)
#define WORDS (DIM / PAIR)
#define VALUE_PANELS ((VALUE_DIM + PANEL - 1) / PANEL)
// Lower than any logit, and finite, so that differences are not NaN.
#define LOWEST -1e30f
#define LOG2_E 1.44269504f

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }

// Strides of a pool of keys or values, in elements.
typedef struct {
    long page, row, head;
} strides;

// The buffers of a thread. Online softmax keeps for each row its max m_i, the sum l_i of 2^(logit - m_i), and the
// accumulator acc of the values weighted likewise; logits are those of powers of two.
typedef struct {
    element queries[TILES * TILE_ROWS][DIM];
    float m_i[TILES * TILE_ROWS + LANES];
    lanes l_i[TILES * TILE_ROWS];
    float acc[TILES * TILE_ROWS][VALUE_PANELS * PANEL];
    element keys[BLOCK_N / PANEL][WORDS][PANEL][PAIR];
    element values[VALUE_PANELS][BLOCK_N / PAIR][PANEL][PAIR];
} __attribute__((aligned(64))) workspace;

static _Thread_local workspace buffers;

// Transpose. Interleaving two vectors that lie 8 apart rotates the index of each value, the bits of its row followed by
// those of its column, by one bit. Four rounds exchange row and column.
static inline void transpose(bits x[LANES]) {
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        bits y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                                   30, 15, 31);
        }
        memcpy(x, y, sizeof y);
    }
}

// Pack the first `count` keys, a multiple of PANEL. rows: the address of each key.
static void pack_keys(workspace *to, const element *const *rows, long count) {
    for (long k = 0; k < count; k += LANES)
        for (long d = 0; d < WORDS; d += LANES) {
            const long words = WORDS % LANES && d + LANES > WORDS ? WORDS % LANES : LANES;
            bits part[LANES] = {};
            for (long i = 0; i < LANES; i++) memcpy(&part[i], rows[k + i] + d * PAIR, words * 4);
            transpose(part);
            for (long i = 0; i < words; i++) memcpy(to->keys[k / PANEL][d + i][k % PANEL], &part[i], sizeof *part);
        }
}

// Pack the values of the first `count` keys.
static void pack_values(workspace *to, const element *const *rows, long count) {
    for (long k = 0; k < count; k += PAIR)
        for (long d = 0; d < VALUE_DIM; d += LANES) {
            element *panel = to->values[d / PANEL][k / PAIR][d % PANEL];
#if ELEMENT_BFLOAT16
            const bits pair = (bits)load(rows[k] + d) >> 16 | (bits)load(rows[k + 1] + d);
            memcpy(panel, &pair, sizeof pair);
#else
            memcpy(panel, rows[k] + d, sizeof(lanes));
#endif
        }
}

// 2^x, where 2^-126 and less may be 0: x = n + r, |r| at most a half. The polynomial is that of Cephes' exp2f.
static inline __m512 power_of_two(__m512 x) {
    // Of two numbers of which one is none, the second is returned: not a number stays so.
    x = _mm512_max_ps(_mm512_set1_ps(-1e4f), x);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.535336188e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.339887440e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618437357e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550332471e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402264791e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931472028e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, n);
}

// Mask one row of logits, of which those from `first` to `last` are seen, and return the largest. They begin at `begin`
// and end at `end`, multiples of PANEL.
static inline float mask_and_max(float *logits, long begin, long end, long first, long last) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (long i = begin; i < end; i += LANES) {
        __m512 x = _mm512_load_ps(logits + i);
        if (i < first || i + LANES > last) {
            const long from = smaller(larger(first - i, 0), LANES), to = smaller(larger(last - i, 0), LANES);
            const __mmask16 seen = from < to ? (0xffffu << from) & (0xffffu >> (LANES - to)) : 0;
            x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
            _mm512_store_ps(logits + i, x);
        }
        largest = _mm512_max_ps(largest, x);
    }
    return _mm512_reduce_max_ps(largest);
}

// Write p = 2^(scale logit - m_i) of one row as `weights`, and return their sums by lane.
static inline lanes weigh(element *weights, const float *logits, long begin, long end, float scale, float m_i) {
    __m512 total = _mm512_setzero_ps();
    for (long i = begin; i < end; i += LANES) {
        const __m512 x = _mm512_load_ps(logits + i);
        const __m512 weight = power_of_two(_mm512_fmsub_ps(x, _mm512_set1_ps(scale), _mm512_set1_ps(m_i)));
        total = _mm512_add_ps(total, weight);
        store(weights + i, (lanes)weight);
    }
    return (lanes)total;
}

// sums = x w, or sums + x w where they are to be `kept`, for a tile of rows of x and a panel w.
static inline void multiply_rows(float *sums, long sums_stride, const int kept, const element *x, long x_stride,
                                 const element *w, long inputs) {
#if BY_MATRIX_UNITS
    const tile_sums to = {sums, sums_stride};
    multiply_tiles(to, kept ? to : (tile_sums){}, (const uint8_t *)x, 2 * x_stride, (const uint8_t *)w, 4 * PANEL, 64,
                   inputs, 1);
#else
    lanes total[ROWS][COLUMNS] = {};
    for (int r = 0; r < ROWS && kept; r++) memcpy(total[r], sums + r * sums_stride, sizeof total[r]);
    multiply(total, x, x_stride, w, inputs, ROWS);
    for (int r = 0; r < ROWS; r++) memcpy(sums + r * sums_stride, total[r], sizeof total[r]);
#endif
}

// One tile against the packed keys begin .. end, multiples of PANEL. `seen`: the number of packed keys that the block's
// first token attends to, negative where it lies before them. `scale`: of logits that are powers of two.
static void attend_tile(workspace *at, long row, long begin, long end, long seen, long window, float scale) {
    float logits[TILE_ROWS][BLOCK_N] __attribute__((aligned(64)));
    // With room for whole lanes.
    float alphas[TILE_ROWS + LANES] __attribute__((aligned(64)));
    element weights[TILE_ROWS][BLOCK_N] __attribute__((aligned(64)));
    float *m_i = at->m_i + row;
    for (long k = begin; k < end; k += PANEL)
        multiply_rows(logits[0] + k, BLOCK_N, 0, at->queries[row], DIM, at->keys[k / PANEL][0][0], DIM);
    for (int r = 0; r < TILE_ROWS; r++) {
        const long last = seen + (row + r) / Q_PER_KV, first = window ? last - window : 0;
        const float largest = mask_and_max(logits[r], begin, end, smaller(larger(first, 0), BLOCK_N),
                                           smaller(larger(last, 0), BLOCK_N));
        const float m_new = scale * largest > m_i[r] ? scale * largest : m_i[r];
        alphas[r] = m_i[r] - m_new;
        m_i[r] = m_new;
    }
    for (int r = 0; r < TILE_ROWS; r += LANES)
        _mm512_store_ps(alphas + r, power_of_two(_mm512_load_ps(alphas + r)));
    for (int r = 0; r < TILE_ROWS; r++) {
        at->l_i[row + r] = at->l_i[row + r] * alphas[r] + weigh(weights[r], logits[r], begin, end, scale, m_i[r]);
        for (long d = 0; d < VALUE_PANELS * PANEL && alphas[r] != 1; d += LANES)
            *(lanes *)(at->acc[row + r] + d) *= alphas[r];
    }
    for (long c = 0; c < VALUE_PANELS; c++)
        multiply_rows(at->acc[row] + c * PANEL, VALUE_PANELS * PANEL, 1, weights[0] + begin, BLOCK_N,
                      at->values[c][begin / PAIR][0], end - begin);
}

// Keys and values of one head, and the pages of one request.
typedef struct {
    const element *keys, *values;
    strides key_strides, value_strides;
    const int64_t *pages;
    long page;
} source;

// Pack the keys `from` .. `to` of the block that begins with `key_block`; other keys, and absent pages, become zeros.
static void pack(workspace *to_, const source *of, long key_block, long from, long to) {
    static const element nothing[DIM > VALUE_DIM ? DIM : VALUE_DIM];
    const element *keys[BLOCK_N], *values[BLOCK_N];
    long row = key_block % of->page;
    const int64_t *pages = of->pages + key_block / of->page;
    for (long i = 0; i < BLOCK_N; i++, row++) {
        if (row == of->page) row = 0, pages++;
        const long key = key_block + i, page = key < from || key >= to ? -1 : *pages;
        keys[i] = page < 0 ? nothing : of->keys + page * of->key_strides.page + row * of->key_strides.row;
        values[i] = page < 0 ? nothing : of->values + page * of->value_strides.page + row * of->value_strides.row;
    }
    const long count = smaller((to - key_block + PANEL - 1) / PANEL * PANEL, BLOCK_N);
    pack_keys(to_, keys, count);
    pack_values(to_, values, count);
}

// Attend for `tokens` query tokens of one request and KV head, the first at `position`.
static void attend(element *out, long out_stride, const element *q, long q_stride, const source *of, long tokens,
                   long position, long window, float scale, const float *sinks) {
    workspace *at = &buffers;
    const long rows = tokens * Q_PER_KV, end = position + tokens, start = window ? larger(position + 1 - window, 0) : 0;
    for (long t = 0; t < tokens; t++) memcpy(at->queries[t * Q_PER_KV], q + t * q_stride,
                                             Q_PER_KV * DIM * sizeof(element));
    for (long r = 0; r < (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; r++) {
        if (r >= rows) memset(at->queries[r], 0, sizeof at->queries[r]);
        memset(at->acc[r], 0, sizeof at->acc[r]);
        // A sink is a first logit of every row, without a value.
        at->m_i[r] = sinks && sinks[r % Q_PER_KV] > LOWEST ? sinks[r % Q_PER_KV] * LOG2_E : LOWEST;
        at->l_i[r] = (lanes){sinks ? 1 : 0};
    }
    for (long key_block = start / BLOCK_N * BLOCK_N; key_block < end; key_block += BLOCK_N) {
        pack(at, of, key_block, start, end);
        for (long row = 0; row < rows; row += TILE_ROWS) {
            const long newest = position + smaller(row + TILE_ROWS - 1, rows - 1) / Q_PER_KV;
            const long oldest = window ? larger(position + row / Q_PER_KV + 1 - window, 0) : 0;
            const long last = smaller(newest + 1 - key_block, BLOCK_N), first = larger(oldest - key_block, 0);
            if (first < last)
                attend_tile(at, row, first / PANEL * PANEL, (last + PANEL - 1) / PANEL * PANEL,
                            position + 1 - key_block, window, scale * LOG2_E);
        }
    }
    for (long r = 0; r < rows; r++) {
        const float l_i = sum(at->l_i[r]);
        for (long d = 0; d < VALUE_DIM; d += LANES)
            store(out + r / Q_PER_KV * out_stride + r % Q_PER_KV * VALUE_DIM + d, *(lanes *)(at->acc[r] + d) / l_i);
    }
}

// Attend for `count` blocks of query tokens whose keys and values are stored. out: [tokens, kv_heads, Q_PER_KV,
// VALUE_DIM]. q: contiguous heads, tokens a stride apart. keys, values: [pages, page, kv_heads, dim] pools. blocks:
// [count, 4] request, first token, number of tokens (at most BLOCK), position of the first. table: [requests, width]
// pages, negative where there is none. window: 0 for none. sinks: [kv_heads * Q_PER_KV] or null.
void prefill(element *out, const element *q, long q_stride, const element *keys, strides key_strides,
                    const element *values, strides value_strides, long kv_heads, long page, const int64_t *blocks,
                    long count, const int64_t *table, long width, long window, float scale, const float *sinks) {
    const long out_stride = kv_heads * Q_PER_KV * VALUE_DIM;
#pragma omp parallel
    {
#if BY_MATRIX_UNITS
        begin_tiles();
#endif
#pragma omp for collapse(3) schedule(dynamic)
        for (long n = 0; n < count; n++)
            for (long part = 0; part < BLOCK; part += TOKENS)
                for (long g = 0; g < kv_heads; g++) {
                    const int64_t *block = blocks + 4 * n;
                    const long token = block[1] + part, tokens = smaller(block[2] - part, TOKENS);
                    const source of = {
                        keys + g * key_strides.head, values + g * value_strides.head, key_strides, value_strides,
                        table + block[0] * width, page,
                    };
                    if (tokens > 0)
                        attend(out + token * out_stride + g * Q_PER_KV * VALUE_DIM, out_stride,
                               q + token * q_stride + g * Q_PER_KV * DIM, q_stride, &of, tokens, block[3] + part,
                               window, scale, sinks ? sinks + g * Q_PER_KV : 0);
                }
#if BY_MATRIX_UNITS
        _tile_release();
#endif
    }
}
#endif
