// Softmax attention of prompts over paged keys and values, for sizes known when it is compiled: DIM of queries and
// keys, VALUE_DIM of values (multiples of LANES), REPEAT query heads to a key/value head, BLOCK tokens of a request at
// a time.
//
// KEYS keys after another are packed into panels and meet all rows of a block: its tokens' REPEAT heads. Rows go by
// ROWS at a time, which is a tile: its logits, weights and sums stay in the nearest cache. Runs of keys begin at
// multiples of KEYS, and what a row does not see weighs exactly 0: its sums depend on its own position alone.
#include <math.h>

#include "panel.h"

#if SUITS

#define KEYS 128
// As many tokens as give about 256 rows.
#define TOKENS (REPEAT <= 256 / BLOCK ? BLOCK : REPEAT < 256 ? 256 / REPEAT : 1)
#define TILES ((TOKENS * REPEAT + ROWS - 1) / ROWS)
#define WORDS (DIM / PAIR)
#define VALUE_PANELS ((VALUE_DIM + PANEL - 1) / PANEL)
// Below every logit, yet finite: differences to it are numbers.
#define LOWEST -1e30f

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }

// A pool of keys or values: numbers between two pages, two rows of a page, two heads of a row.
typedef struct {
    long page, row, head;
} strides;

// What a thread works with. `largest`, `mass`, `found`: of each row the largest logit so far, the sum of
// e^(logit - largest) and of the values weighted so.
typedef struct {
    element queries[TILES * ROWS][DIM];
    float largest[TILES * ROWS + LANES];
    lanes mass[TILES * ROWS];
    float found[TILES * ROWS][VALUE_PANELS * PANEL];
    element keys[KEYS / PANEL][WORDS][PANEL][PAIR];
    element values[VALUE_PANELS][KEYS / PAIR][PANEL][PAIR];
} __attribute__((aligned(64))) workspace;

static _Thread_local workspace own;

// Exchange rows and columns. Taking turns of two vectors that lie 8 apart moves each number's place, as the bits of row
// and column side by side, round by one bit; four times is by half.
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

// Panels of the first `count` keys, a multiple of PANEL. rows: where each key is.
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

// Panels of the values of the first `count` keys.
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

// Weights of one row and what its former sums are to be multiplied with. Logits begin .. end of the row, a multiple of
// PANEL, are there; it sees those from `first` to `last`.
static inline float weigh(element *weights, float *logits, float *largest, lanes *mass, long begin, long end,
                          long first, long last, float scale) {
    const bits place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lanes best = all(*largest);
    for (long i = begin; i < end; i += LANES) {
        lanes *some = (lanes *)(logits + i);
        *some *= scale;
        if (i < first || i + LANES > last) {
            typedef int32_t numbers __attribute__((vector_size(4 * LANES)));
            const numbers key = (numbers)place + (int32_t)i;
            *some = choose((bits)(key >= (int32_t)first) & (bits)(key < (int32_t)last), *some, all(-INFINITY));
        }
        best = choose((bits)(*some > best), *some, best);
    }
    float most = *largest;
    for (int i = 0; i < LANES; i++) most = best[i] > most ? best[i] : most;
    lanes total = {};
    for (long i = begin; i < end; i += LANES) {
        const lanes some = *(lanes *)(logits + i);
        const lanes weight = choose((bits)(some == -INFINITY), all(0), exponential(some - most));
        total += weight;
        store(weights + i, weight);
    }
    const float factor = exponential(all(*largest - most))[0];
    *mass = *mass * factor + total;
    *largest = most;
    return factor;
}

// One tile against the packed keys begin .. end, which are multiples of PANEL. `seen`: how many of the packed keys the
// request's token 0 would see, which is below 0 where it lies before them.
static void attend_tile(workspace *at, long row, long begin, long end, long seen, long window, float scale) {
    float logits[ROWS][KEYS] __attribute__((aligned(64))), factors[ROWS];
    element weights[ROWS][KEYS] __attribute__((aligned(64)));
    for (long k = begin; k < end; k += PANEL) {
        lanes total[ROWS][COLUMNS] = {};
        multiply(total, at->queries[row], DIM, at->keys[k / PANEL][0][0], DIM, ROWS);
        for (int r = 0; r < ROWS; r++) memcpy(logits[r] + k, total[r], sizeof total[r]);
    }
    for (int r = 0; r < ROWS; r++) {
        const long last = seen + (row + r) / REPEAT, first = window ? last - window : 0;
        factors[r] = weigh(weights[r], logits[r], at->largest + row + r, at->mass + row + r, begin, end,
                           smaller(larger(first, 0), KEYS), smaller(larger(last, 0), KEYS), scale);
    }
    for (long c = 0; c < VALUE_PANELS; c++) {
        lanes total[ROWS][COLUMNS];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < COLUMNS; i++)
                total[r][i] = *(lanes *)(at->found[row + r] + c * PANEL + i * LANES) * factors[r];
        multiply(total, weights[0] + begin, KEYS, at->values[c][begin / PAIR][0], end - begin, ROWS);
        for (int r = 0; r < ROWS; r++) memcpy(at->found[row + r] + c * PANEL, total[r], sizeof total[r]);
    }
}

// Keys and values of one head, and the pages of one request.
typedef struct {
    const element *keys, *values;
    strides key_strides, value_strides;
    const int64_t *pages;
    long page;
} source;

// Pack the keys `from` .. `to` of the run of keys that begins with `run`; the others become zeros, as do absent pages.
static void pack(workspace *to_, const source *of, long run, long from, long to) {
    static const element nothing[DIM > VALUE_DIM ? DIM : VALUE_DIM];
    const element *keys[KEYS], *values[KEYS];
    for (long i = 0; i < KEYS; i++) {
        const long key = run + i, page = key < from || key >= to ? -1 : of->pages[key / of->page];
        const long row = key % of->page;
        keys[i] = page < 0 ? nothing : of->keys + page * of->key_strides.page + row * of->key_strides.row;
        values[i] = page < 0 ? nothing : of->values + page * of->value_strides.page + row * of->value_strides.row;
    }
    const long count = smaller((to - run + PANEL - 1) / PANEL * PANEL, KEYS);
    pack_keys(to_, keys, count);
    pack_values(to_, values, count);
}

// `tokens` tokens of one request and key/value head, the first at `position`.
static void attend(element *out, long out_stride, const element *q, long q_stride, const source *of, long tokens,
                   long position, long window, float scale, const float *sinks) {
    workspace *at = &own;
    const long rows = tokens * REPEAT, end = position + tokens, start = window ? larger(position + 1 - window, 0) : 0;
    for (long t = 0; t < tokens; t++) memcpy(at->queries[t * REPEAT], q + t * q_stride, REPEAT * DIM * sizeof(element));
    for (long r = 0; r < (rows + ROWS - 1) / ROWS * ROWS; r++) {
        if (r >= rows) memset(at->queries[r], 0, sizeof at->queries[r]);
        memset(at->found[r], 0, sizeof at->found[r]);
        // A sink is a logit without a value that every row sees first.
        at->largest[r] = sinks && sinks[r % REPEAT] > LOWEST ? sinks[r % REPEAT] : LOWEST;
        at->mass[r] = (lanes){sinks ? 1 : 0};
    }
    for (long run = start / KEYS * KEYS; run < end; run += KEYS) {
        pack(at, of, run, start, end);
        for (long row = 0; row < rows; row += ROWS) {
            const long newest = position + smaller(row + ROWS - 1, rows - 1) / REPEAT;
            const long oldest = window ? larger(position + row / REPEAT + 1 - window, 0) : 0;
            const long last = smaller(newest + 1 - run, KEYS), first = larger(oldest - run, 0);
            if (first < last)
                attend_tile(at, row, first / PANEL * PANEL, (last + PANEL - 1) / PANEL * PANEL, position + 1 - run,
                            window, scale);
        }
    }
    for (long r = 0; r < rows; r++) {
        const float mass = sum(at->mass[r]);
        for (long d = 0; d < VALUE_DIM; d += LANES)
            store(out + r / REPEAT * out_stride + r % REPEAT * VALUE_DIM + d, *(lanes *)(at->found[r] + d) / mass);
    }
}

// Attend for `count` blocks of tokens whose rows are stored. out: [tokens, groups, REPEAT, VALUE_DIM]. q: heads side by
// side, tokens a stride apart. keys, values: [pages, page, groups, dim] pools. blocks: [count, 4] request, first token,
// number of tokens (at most BLOCK), position of the first. table: [requests, width] pages, below 0 where there is none.
// window: 0 for none. sinks: [groups * REPEAT] or none.
void attend_prompts(element *out, const element *q, long q_stride, const element *keys, strides key_strides,
                    const element *values, strides value_strides, long groups, long page, const int64_t *blocks,
                    long count, const int64_t *table, long width, long window, float scale, const float *sinks) {
    const long out_stride = groups * REPEAT * VALUE_DIM;
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (long n = 0; n < count; n++)
        for (long part = 0; part < BLOCK; part += TOKENS)
            for (long g = 0; g < groups; g++) {
                const int64_t *block = blocks + 4 * n;
                const long token = block[1] + part, tokens = smaller(block[2] - part, TOKENS);
                const source of = {
                    keys + g * key_strides.head, values + g * value_strides.head, key_strides, value_strides,
                    table + block[0] * width, page,
                };
                if (tokens > 0)
                    attend(out + token * out_stride + g * REPEAT * VALUE_DIM, out_stride,
                           q + token * q_stride + g * REPEAT * DIM, q_stride, &of, tokens, block[3] + part, window,
                           scale, sinks ? sinks + g * REPEAT : 0);
            }
}
#endif
