// y = x W^T + bias of weights in panels of blocks, which are never unpacked whole.
#include "blocks.h"
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#define omp_get_thread_num() 0
#endif

// Whether codes become pairs of bf16 for an instruction that multiplies two of them: it takes as long as one product of
// fp32 on AMD's processors (compilers older than these call them Zen 3), and four times as long on Intel's.
#if E4M3 && ELEMENT_BFLOAT16 && defined(__AVX512BF16__) \
    && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
#define PAIRS_MULTIPLY E4M3_PAIRS
#else
#define PAIRS_MULTIPLY 0
#endif

// Activations as products see them. numbers: [rows, inputs] int8. scales: [rows, inputs / 32]. shifts: [rows, inputs /
// GROUP], what stands for -ZERO of every code. sums: [rows, inputs / GROUP], of the rounded activations.
typedef struct {
    int8_t *numbers;
    float *scales;
    int32_t *shifts;
    float *sums;
    long inputs;
} rounded;

static rounded place(void *scratch, long rows, long inputs) {
    rounded x = {.inputs = inputs};
    x.scales = scratch;
    x.sums = x.scales + rows * (inputs / STEP);
    x.shifts = (int32_t *)(x.sums + rows * (inputs / GROUP));
    x.numbers = (int8_t *)(x.shifts + rows * (inputs / GROUP));
    return x;
}

// Bytes of activations of so many rows, in the form that takes most; whole lines of the cache.
static long prepared_size(long rows, long inputs) {
    const long as_bytes = rows * (inputs + inputs / STEP * 4 + inputs / GROUP * 8);
    const long as_floats = (rows + 32) * (inputs * 4 + 128);
    return ((as_bytes > as_floats ? as_bytes : as_floats) + 63) / 64 * 64;
}

// Of 32 numbers a and b the largest size; whether all of them are numbers.
static inline float largest_of(lanes a, lanes b, int *known) {
    const bits positive = (bits){} + 0x7fffffffu;
    const lanes a_size = (lanes)((bits)a & positive), b_size = (lanes)((bits)b & positive);
    const lanes larger = choose((bits)(a_size > b_size), a_size, b_size);
#if W == 16
    *known = !_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q);
    return _mm512_reduce_max_ps((__m512)larger);
#else
    const bits unknown = (bits)(a != a) | (bits)(b != b);
    uint32_t any = 0;
    float largest = 0;
    for (int i = 0; i < LANES; i++) any |= unknown[i];
    for (int i = 0; i < LANES; i++) largest = larger[i] > largest ? larger[i] : largest;
    *known = !any;
    return largest;
#endif
}

// Stores the bytes of whole numbers, and returns their sum.
static inline int32_t store_bytes(int8_t *to, bits whole) {
#if W == 16
    const __m512i numbers = _mm512_srai_epi32(_mm512_slli_epi32((__m512i)whole, 24), 24);
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(numbers));
    return _mm512_reduce_add_epi32(numbers);
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    const bytes narrowed = __builtin_convertvector(whole, bytes);
    memcpy(to, &narrowed, LANES);
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += to[i];
    return sum;
#endif
}

static void round_row(const element *x, const rounded *to, long row) {
    const long inputs = to->inputs;
    int8_t *numbers = to->numbers + row * inputs;
    for (long g = 0; g < inputs / STEP; g++, x += STEP, numbers += STEP) {
        const lanes a = load(x), b = load(x + LANES);
        int known;
        const float largest = largest_of(a, b, &known);
        // Not a number, which is no larger than another one, is no integer either: the scale becomes it.
        const float inverse = largest > 0 ? 127 / largest : 0, scale = known ? largest / 127 : __builtin_nanf("");
        // Adding this rounds to the nearest integer, ties to even, which is then in the lowest bits. Compilers fuse it
        // with the product.
        const float shift = 12582912.0f;
        const int32_t halves[2] = {store_bytes(numbers, (bits)(a * inverse + shift)),
                                   store_bytes(numbers + LANES, (bits)(b * inverse + shift))};
        to->scales[row * (inputs / STEP) + g] = scale;
        for (int h = 0; h < STEP / GROUP; h++) {
            const int32_t sum = GROUP == STEP ? halves[0] + halves[1] : halves[h];
            const long at = row * (inputs / GROUP) + g * (STEP / GROUP) + h;
            to->shifts[at] = -ZERO * sum;
            to->sums[at] = scale * (float)sum;
        }
    }
}

// How sums are stored. y: of elements, or of fp32.
typedef struct {
    void *y;
    long stride, exact;
    const float *bias;
} target;

static inline void put(const target *to, long row, long output, long kept, const float *sums) {
    for (long i = 0; i < kept; i++) {
        const float y = sums[i] + (to->bias ? to->bias[output + i] : 0);
        const long at = row * to->stride + output + i;
        if (to->exact)
            ((float *)to->y)[at] = y;
        else
            ((element *)to->y)[at] = narrow(y);
    }
}

// One part of a panel times `rows` rows of rounded activations, a constant of each caller.
static inline __attribute__((always_inline)) void multiply_rounded(float sums[][PANEL], const rounded *x, long first,
                                                                   const uint8_t *panel, long part, const int rows) {
    const long inputs = x->inputs, steps = inputs / STEP;
    const uint8_t *scales = panel, *codes = panel + scales_size(inputs);
    vf total[8];
    for (int r = 0; r < rows; r++) total[r] = (vf){};
    for (long span = 0; span < inputs / SPAN; span++, scales += SCALE_BYTES) {
        const factors of_span = span_factors(scales, part);
        for (long step = 0; step < SPAN / STEP; step++, codes += CODE_BYTES) {
            const long at = span * (SPAN / STEP) + step;
            vi unpacked[8];
            unpack(unpacked, codes, part);
#if W == 16
#pragma GCC unroll 8
            for (int line = 0; line < CODE_BYTES / 64; line++) __builtin_prefetch(codes + AHEAD_BYTES + line * 64);
#endif
#pragma GCC unroll 2
            for (int h = 0; h < STEP / GROUP; h++) {
                const factors of = group_factors(of_span, scales, step * (STEP / GROUP) + h, part);
                const long sums_at = first * (inputs / GROUP) + at * (STEP / GROUP) + h;
                const int8_t *numbers = x->numbers + first * inputs + at * STEP + h * GROUP;
                // Sums of several rows, or two of one row, are under way at a time: one alone waits for itself.
                vi whole[8], other = {};
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    whole[r] = ZERO ? (vi){} + x->shifts[sums_at + r * (inputs / GROUP)] : (vi){};
#pragma GCC unroll 8
                for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        int32_t four;
                        memcpy(&four, numbers + r * inputs + 4 * s, 4);
                        vi *to = rows == 1 && s % 2 ? &other : whole + r;
                        *to = dots(*to, unpacked[h * (GROUP / 4) + s], (vi){} + four);
                    }
                if (rows == 1) whole[0] += other;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    total[r] += __builtin_convertvector(whole[r], vf) * (of.scale * x->scales[(first + r) * steps + at]);
#if MINIMUM
                    total[r] -= of.minimum * x->sums[sums_at + r * (inputs / GROUP)];
#endif
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) memcpy(sums[r] + part * W, &total[r], sizeof(vf));
}

// The same with activations as they are, in fp32.
static inline __attribute__((always_inline)) void multiply_exact(float sums[][PANEL], const float *x, long stride,
                                                                 const uint8_t *panel, long inputs, long part,
                                                                 const int rows) {
    const uint8_t *scales = panel, *codes = panel + scales_size(inputs);
    // Two sums of a row are under way at a time: one alone waits for itself.
    vf total[2][8], whole[8];
    for (int r = 0; r < rows; r++) total[0][r] = total[1][r] = whole[r] = (vf){};
    for (long span = 0; span < inputs / SPAN; span++, scales += SCALE_BYTES) {
        const factors of_span = span_factors(scales, part);
        for (long step = 0; step < SPAN / STEP; step++, codes += CODE_BYTES) {
            vi unpacked[8];
            unpack(unpacked, codes, part);
#if W == 16
#pragma GCC unroll 8
            for (int line = 0; line < CODE_BYTES / 64; line++) __builtin_prefetch(codes + AHEAD_BYTES + line * 64);
#endif
            // Copied: compilers keep an address of every row in memory otherwise, and load it for each product.
            float near[8][STEP];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) memcpy(near[r], x + r * stride + (span * (SPAN / STEP) + step) * STEP, 4 * STEP);
#pragma GCC unroll 2
            for (int h = 0; h < STEP / GROUP; h++) {
                const factors of = group_factors(of_span, scales, step * (STEP / GROUP) + h, part);
#pragma GCC unroll 8
                for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 4
                    for (int b = 0; b < 4; b++) {
                        const vf number = numbers_of(unpacked[h * (GROUP / 4) + s], b);
                        const vf w = E4M3 ? number : MINIMUM ? number * of.scale - of.minimum : scaled(number, of.scale);
#pragma GCC unroll 8
                        for (int r = 0; r < rows; r++) total[b % 2][r] += w * near[r][h * GROUP + 4 * s + b];
                    }
            }
        }
        // One scale of a whole span multiplies its sums.
        if (E4M3)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                whole[r] += (total[0][r] + total[1][r]) * of_span.scale;
                total[0][r] = total[1][r] = (vf){};
            }
    }
    for (int r = 0; r < rows; r++) {
        const vf both = E4M3 ? whole[r] : total[0][r] + total[1][r];
        memcpy(sums[r] + part * W, &both, sizeof both);
    }
}

#if PAIRS_MULTIPLY
// The same with activations in bf16, which are multiplied by the codes' numbers, and the sums of a span by its scale.
static inline __attribute__((always_inline)) void multiply_pairs(float sums[][PANEL], const element *x, long stride,
                                                                 const uint8_t *panel, long inputs, const int rows) {
    const uint8_t *scales = panel, *codes = panel + scales_size(inputs);
    vf total[8];
    for (int r = 0; r < rows; r++) total[r] = (vf){};
    for (long span = 0; span < inputs / SPAN; span++, scales += SCALE_BYTES) {
        // Two sums of a row are under way at a time: one alone waits for itself.
        __m512 of_span[2][8];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) of_span[0][r] = of_span[1][r] = _mm512_setzero_ps();
        for (long step = 0; step < SPAN / STEP; step++, codes += CODE_BYTES, x += STEP) {
#pragma GCC unroll 8
            for (int s = 0; s < STEP / 4; s++) {
                __builtin_prefetch(codes + AHEAD_BYTES + s * 64);
                vu pairs[2];
                pairs_of(pairs, load_bytes(codes + s * 64, 0));
#pragma GCC unroll 2
                for (int p = 0; p < 2; p++)
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        int32_t two;
                        memcpy(&two, x + r * stride + 4 * s + 2 * p, 4);
                        of_span[p][r] = _mm512_dpbf16_ps(of_span[p][r], (__m512bh)pairs[p],
                                                         (__m512bh)_mm512_set1_epi32(two));
                    }
            }
        }
        const vf scale = floats_of(scales, 0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) total[r] += (vf)_mm512_add_ps(of_span[0][r], of_span[1][r]) * scale;
    }
    for (int r = 0; r < rows; r++) memcpy(sums[r], &total[r], sizeof(vf));
}
#endif

// Rows that share a pass over a panel.
#define ROWS (W == 16 ? 8 : 4)
#define EACH(many) many(1) many(2) many(3) many(4) many(5) many(6) many(7) many(8)

// One panel and rows `begin` to `end` of rounded activations.
static void panel_rounded(const target *to, const rounded *x, const uint8_t *panel, long output, long kept, long begin,
                          long end) {
    for (long t = begin; t < end; t += ROWS) {
        const long rows = end - t < ROWS ? end - t : ROWS;
        float sums[8][PANEL];
        for (long part = 0; part < PANEL / W; part++) switch (rows) {
#define MANY(n) \
    case n: \
        if (n <= ROWS) multiply_rounded(sums, x, t, panel, part, n <= ROWS ? n : 1); \
        break;
                EACH(MANY)
#undef MANY
            }
        for (long r = 0; r < rows; r++) put(to, t + r, output, kept, sums[r]);
    }
}

static void panel_exact(const target *to, const float *x, long stride, long inputs, const uint8_t *panel, long output,
                        long kept, long begin, long end) {
    for (long t = begin; t < end; t += ROWS) {
        const long rows = end - t < ROWS ? end - t : ROWS;
        float sums[8][PANEL];
        for (long part = 0; part < PANEL / W; part++) switch (rows) {
#define MANY(n) \
    case n: \
        if (n <= ROWS) multiply_exact(sums, x + t * stride, stride, panel, inputs, part, n <= ROWS ? n : 1); \
        break;
                EACH(MANY)
#undef MANY
            }
        for (long r = 0; r < rows; r++) put(to, t + r, output, kept, sums[r]);
    }
}

#if PAIRS_MULTIPLY
static void panel_pairs(const target *to, const element *x, long stride, long inputs, const uint8_t *panel, long output,
                        long kept, long begin, long end) {
    for (long t = begin; t < end; t += ROWS) {
        const long rows = end - t < ROWS ? end - t : ROWS;
        float sums[8][PANEL];
        switch (rows) {
#define MANY(n) \
    case n: multiply_pairs(sums, x + t * stride, stride, panel, inputs, n); break;
            EACH(MANY)
#undef MANY
        }
        for (long r = 0; r < rows; r++) put(to, t + r, output, kept, sums[r]);
    }
}
#endif

#if MATRIX_UNITS
// Rows, and inputs, whose sums and weights stay in the cache; panels that share the rows' way there.
#define BLOCK_ROWS 512
#define BLOCK_INPUTS 256
#define BLOCK_PANELS 8

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

// Whether the system lets this process use the matrix units.
static int matrix_units(void) {
    static int allowed = -1;
    // ARCH_REQ_XCOMP_PERM of the tiles' data.
    if (allowed < 0) allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

static void begin_tiles(void) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.row_bytes[i] = 64;
    _tile_loadconfig(&shapes);
}

// Inputs `first` to `first + count` of a panel as bf16, two inputs of each output side by side: [count / 2, PANEL, 2].
static void unpack_bf16(uint32_t *to, const uint8_t *panel, long inputs, long first, long count) {
    const uint8_t *codes = panel + scales_size(inputs) + first / STEP * CODE_BYTES;
    for (long at = first; at < first + count; at += STEP, codes += CODE_BYTES) {
        const uint8_t *scales = panel + at / SPAN * SCALE_BYTES;
        const factors of_span = span_factors(scales, 0);
        vi unpacked[8];
        unpack(unpacked, codes, 0);
#pragma GCC unroll 2
        for (int h = 0; h < STEP / GROUP; h++) {
            const factors of = group_factors(of_span, scales, at % SPAN / GROUP + h, 0);
#if !E4M3
            // Of codes as they are stored.
            const vf minimum = MINIMUM ? of.minimum : of.scale * (float)ZERO;
#endif
#pragma GCC unroll 8
            for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; pair++, to += PANEL) {
#if E4M3
                    const vi four = unpacked[h * (GROUP / 4) + s];
                    const vf even = numbers_of(four, 2 * pair) * of.scale;
                    const vf odd = numbers_of(four, 2 * pair + 1) * of.scale;
#else
                    const vu four = (vu)unpacked[h * (GROUP / 4) + s] >> 16 * pair;
                    const vf even = __builtin_convertvector((vi)(four & 255), vf) * of.scale - minimum;
                    const vf odd = __builtin_convertvector((vi)(four >> 8 & 255), vf) * of.scale - minimum;
#endif
                    const __m256i low = (__m256i)_mm512_cvtneps_pbh((__m512)even);
                    const __m256i high = (__m256i)_mm512_cvtneps_pbh((__m512)odd);
                    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
                }
        }
    }
}

// 32 rows times two panels, added to `sums` unless `first`. x: bf16, `stride` bytes apart. w: as `unpack_bf16` leaves
// it, `apart` bytes from one panel to the next. sums: rows `sums_stride` floats apart.
static inline void multiply_tiles(float *sums, long sums_stride, const uint8_t *x, long stride, const uint8_t *w,
                                  long apart, long count, int first, int both) {
    const long bytes = 4 * sums_stride;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + PANEL, bytes);
        if (both) _tile_loadd(2, sums + 16 * sums_stride, bytes);
        if (both) _tile_loadd(3, sums + 16 * sums_stride + PANEL, bytes);
    }
    for (long k = 0; k < count; k += 32, x += 64, w += 1024) {
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + apart, 64);
        _tile_loadd(4, x, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + PANEL, bytes);
    if (both) _tile_stored(2, sums + 16 * sums_stride, bytes);
    if (both) _tile_stored(3, sums + 16 * sums_stride + PANEL, bytes);
}

// `panels` panels, at most BLOCK_PANELS, and rows `begin` to `end` of x in bf16, rows `stride` bytes apart. memory: of
// this thread. output: of the first panel.
static void panels_in_tiles(const target *to, const uint8_t *x, long stride, long inputs, const uint8_t *packed,
                            long output, long outputs, long panels, long begin, long end, uint8_t *memory) {
    const long size = panel_size(inputs), apart = BLOCK_INPUTS * 2 * PANEL;
    float *sums = (float *)memory;
    uint8_t *w = memory + BLOCK_ROWS * BLOCK_PANELS * PANEL * 4;
    for (long t = begin; t < end; t += BLOCK_ROWS) {
        const long rows = end - t < BLOCK_ROWS ? end - t : BLOCK_ROWS;
        for (long k = 0; k < inputs; k += BLOCK_INPUTS) {
            const long count = inputs - k < BLOCK_INPUTS ? inputs - k : BLOCK_INPUTS;
            for (long p = 0; p < panels; p++)
                unpack_bf16((uint32_t *)(w + p * apart), packed + p * size, inputs, k, count);
            for (long r = 0; r < rows; r += 32)
                for (long p = 0; p < panels; p += 2)
                    multiply_tiles(sums + r * BLOCK_PANELS * PANEL + p * PANEL, BLOCK_PANELS * PANEL,
                                   x + (t + r) * stride + 2 * k, stride, w + p * apart, apart, count, k == 0,
                                   rows - r > 16);
        }
        for (long r = 0; r < rows; r++) {
            const long kept = outputs - output < panels * PANEL ? outputs - output : panels * PANEL;
            put(to, t + r, output, kept, sums + r * BLOCK_PANELS * PANEL);
        }
    }
}

#define THREAD_MEMORY (BLOCK_ROWS * BLOCK_PANELS * PANEL * 4 + BLOCK_PANELS * BLOCK_INPUTS * 2 * PANEL)
#else
#define THREAD_MEMORY 0
#endif

// Of activations, what the cache of a core holds beside a panel.
#define CACHED_BYTES (1 << 20)

// From so many rows on, matrix units are faster than products of bytes.
#define MANY_ROWS 17

// Bytes that a product of so many rows needs: its activations, and of many rows memory of each thread.
long scratch_size(long rows, long inputs) {
    return 64 + prepared_size(rows, inputs) + (rows < MANY_ROWS ? 0 : (long)omp_get_max_threads() * THREAD_MEMORY);
}

enum { ROUNDED, EXACT, PAIRS, TILES };

static int way_of(long rows, long exact) {
#if MATRIX_UNITS
    // Activations that are not to be rounded are bf16 already.
    if (rows >= MANY_ROWS && (!exact || sizeof(element) == 2) && matrix_units()) return TILES;
#endif
    return PAIRS_MULTIPLY ? PAIRS : exact || E4M3 ? EXACT : ROUNDED;
}

// Rows `stride` bytes apart, which are of no use as a power of two: they would share the cache's lines.
static long tile_stride(long inputs) { return (inputs * 2 + 63) / 128 * 128 + 64; }

// One row of x as `way` wants it.
static void prepare(int way, const element *x, const rounded *to, void *scratch, long row) {
    const long inputs = to->inputs;
    if (!E4M3 && way == ROUNDED) {
        round_row(x, to, row);
    } else if (way == EXACT) {
        float *exact = (float *)scratch + row * inputs;
        for (long i = 0; i < inputs; i++) exact[i] = widen(x[i]);
    } else {
        uint16_t *bf16 = (uint16_t *)((uint8_t *)scratch + row * tile_stride(inputs));
#if ELEMENT_BFLOAT16
        memcpy(bf16, x, inputs * 2);
#elif MATRIX_UNITS
        for (long i = 0; i < inputs; i += 16) {
            const __m256bh narrowed = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
            memcpy(bf16 + i, &narrowed, sizeof narrowed);
        }
#endif
    }
}

// For each expert e the rows from ends[e - 1] to ends[e]; without `ends` one weight for all rows. packed: [experts,
// panels, panel_size]. bias: [experts, panels * PANEL] or none. y: [rows, outputs], rows `y_stride` apart, of fp32 where
// `y_exact`. x_exact: whether activations are not rounded to int8. scratch: of `scratch_size`.
void product(void *y, long y_stride, long y_exact, const element *x, long x_stride, long x_exact, const uint8_t *packed,
             const float *bias, const int32_t *ends, long experts, long rows, long inputs, long outputs,
             void *scratch) {
    const long panels = (outputs + PANEL - 1) / PANEL, size = panel_size(inputs);
    const int way = way_of(rows / (experts ? experts : 1), x_exact);
    const rounded small = place(scratch, rows, inputs);
    const target whole = {y, y_stride, y_exact, bias};
    // Pairs are read from where they are.
    const int alone = rows == 1 || way == PAIRS;
    if (rows == 1 && way != PAIRS) prepare(way, x, &small, scratch, 0);
#if MATRIX_UNITS
    long block = 2;
    while (block < BLOCK_PANELS && panels * experts / block > 8) block += 2;
#else
    const long block = 1;
#endif
    const long units = way == TILES ? (panels + block - 1) / block : panels;
    // Few enough for threads to end together, whatever else they are kept by.
    const long chunk = units * experts / 64 + 1;
    // Rows that stay in the second cache while every panel meets them; those of experts are few.
    const long fitting = CACHED_BYTES / (way == ROUNDED ? inputs : 4 * inputs) / ROWS * ROWS;
    const long many = way != TILES && !ends ? (fitting > ROWS ? fitting : ROWS) : rows;
    const long blocks = rows ? (rows + many - 1) / many : 0;
#pragma omp parallel
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (long row = 0; row < rows; row++) prepare(way, x + row * x_stride, &small, scratch, row);
        }
#if MATRIX_UNITS
        uint8_t *memory = (uint8_t *)(((uintptr_t)scratch + 63) / 64 * 64);
        memory += prepared_size(rows, inputs) + omp_get_thread_num() * THREAD_MEMORY;
        if (way == TILES) begin_tiles();
#endif
#pragma omp for collapse(3) schedule(dynamic, chunk)
        for (long e = 0; e < experts; e++)
        for (long b = 0; b < blocks; b++)
            for (long u = 0; u < units; u++) {
                const long begin = ends ? (e ? ends[e - 1] : 0) : b * many;
                const long end = ends ? ends[e] : begin + many < rows ? begin + many : rows;
                if (begin == end) continue;
                const long p = way == TILES ? u * block : u;
                const uint8_t *from = packed + (e * panels + p) * size;
                target to = whole;
                if (bias) to.bias = bias + e * panels * PANEL;
                const long kept = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
                if (!E4M3 && way == ROUNDED)
                    panel_rounded(&to, &small, from, p * PANEL, kept, begin, end);
                else if (way == EXACT)
                    panel_exact(&to, scratch, inputs, inputs, from, p * PANEL, kept, begin, end);
#if PAIRS_MULTIPLY
                else if (way == PAIRS)
                    panel_pairs(&to, x, x_stride, inputs, from, p * PANEL, kept, begin, end);
#endif
#if MATRIX_UNITS
                else
                    panels_in_tiles(&to, scratch, tile_stride(inputs), inputs, from, p * PANEL, outputs,
                                    panels - p < block ? panels - p : block, begin, end, memory);
#endif
            }
#if MATRIX_UNITS
        if (way == TILES) _tile_release();
#endif
    }
}
