// y = x W^T + bias of weights in blocks of few bits, packed once into panels of 16 outputs and never unpacked whole.
// The macros are the type of the blocks, see `cpu_blocks.py`. A weight of a panel is
//
//     w = scale * (code - ZERO) - minimum
//
// with floats of one group of GROUP inputs. A panel holds the scales of all its inputs, then the codes. Lanes are
// outputs: 32 bits of a vector hold four inputs of one output, as dot products of bytes want them.
#include "element.h"
#include <stdlib.h>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define W 16
#define SIGNED_CODES 0
#elif defined(__AVX2__)
#include <immintrin.h>
#define W 8
#define SIGNED_CODES 1
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define W 4
#define SIGNED_CODES 1
#else
#define W 4
#define SIGNED_CODES 1
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && W == 16 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define MATRIX_UNITS 1
#else
#define MATRIX_UNITS 0
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int8_t narrow_signed __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint8_t narrow_unsigned __attribute__((vector_size(W), aligned(1), may_alias));

#define PANEL 16
#define STEP 32
// How far ahead codes are fetched.
#define AHEAD_BYTES 2048
#define SPAN (INTEGER_SCALES ? 256 : STEP)
#define GROUPS (SPAN / GROUP)
#define BITS (P0_BITS + P1_BITS)
// Bytes of 32 inputs of a panel: their lower bits, then their upper ones.
#define LOW_BYTES (STEP * PANEL * P0_BITS / 8)
#define CODE_BYTES (LOW_BYTES + STEP * PANEL * P1_BITS / 8)
// Floats of a span, and the integer scales of its groups.
#define FLOAT_BYTES (POWER ? PANEL : 2 * PANEL)
#define SCALE_BYTES (FLOAT_BYTES * (1 + MINIMUM) + (INTEGER_SCALES ? GROUPS * PANEL * (1 + MINIMUM) : 0))
// Codes that reach 128 are signed where the processor multiplies no unsigned bytes by signed ones.
#define SIGNED (SIGNED_CODES && (BITS == 8 || TABLE))
#define ZERO (SIGNED ? 0 : TABLE == 1 ? 128 : TABLE == 2 ? 12 : OFFSET)

#if TABLE == 1
static const int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
#elif TABLE == 2
static const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#endif

static inline long scales_size(long inputs) { return (inputs / SPAN * SCALE_BYTES + 63) / 64 * 64; }

// Bytes of a packed panel.
long panel_size(long inputs) { return scales_size(inputs) + inputs / STEP * CODE_BYTES; }

#if W == 4 && !defined(__ARM_NEON) || W == 8 && !defined(__F16C__)
static inline float half_to_float(const void *from) {
    uint16_t h;
    memcpy(&h, from, 2);
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t bits;
    if (rest < 0x400) {
        const float tiny = (float)rest * 5.9604644775390625e-8f;
        memcpy(&bits, &tiny, 4);
    } else
        bits = (rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u);
    bits |= sign;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
#endif

static inline vf floats_of(const uint8_t *from, long part) {
#if POWER
    narrow_unsigned stored;
    memcpy(&stored, from + part * W, sizeof stored);
    vi bits = __builtin_convertvector(stored, vi) - 1;
    return (vf)((bits & ~(bits >> 31)) << 23);
#elif W == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + 2 * part * W)));
#elif W == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * part * W)));
#elif defined(__ARM_NEON)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * part * W)));
#else
    vf x;
    for (int i = 0; i < W; i++) x[i] = half_to_float(from + 2 * (part * W + i));
    return x;
#endif
}

static inline vf integers_of(const uint8_t *from, long part, int is_signed) {
    if (is_signed) {
        narrow_signed stored;
        memcpy(&stored, from + part * W, sizeof stored);
        return __builtin_convertvector(__builtin_convertvector(stored, vi), vf);
    }
    narrow_unsigned stored;
    memcpy(&stored, from + part * W, sizeof stored);
    return __builtin_convertvector(__builtin_convertvector(stored, vi), vf);
}

// total + the sums of four products of bytes in each lane; codes are signed or not, x is signed.
static inline vi dots(vi total, vi codes, vi x) {
#if W == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)x);
#elif W == 8
    __m256i c = (__m256i)codes, y = (__m256i)x;
#if SIGNED
    y = _mm256_sign_epi8(y, c);
    c = _mm256_abs_epi8(c);
#endif
#ifdef __AVXVNNI__
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)total, c, y);
#else
    return total + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(c, y), _mm256_set1_epi16(1));
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)x);
#elif defined(__ARM_NEON)
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)codes), vget_low_s8((int8x16_t)x));
    const int16x8_t high = vmull_s8(vget_high_s8((int8x16_t)codes), vget_high_s8((int8x16_t)x));
    return total + (vi)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    for (int i = 0; i < 4; i++) total += (codes << (24 - 8 * i) >> 24) * (x << (24 - 8 * i) >> 24);
    return total;
#endif
}

#if TABLE
static inline vi looked_up(vi codes) {
#if W == 16
    // Unsigned bytes: as much more than the number as ZERO says.
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_add_epi8(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi8((char)ZERO)));
    return (vi)_mm512_shuffle_epi8(numbers, (__m512i)codes);
#elif W == 8
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (vi)_mm256_shuffle_epi8(numbers, (__m256i)codes);
#elif defined(__aarch64__)
    return (vi)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes);
#else
    int8_t bytes[4 * W];
    memcpy(bytes, &codes, sizeof bytes);
    for (int i = 0; i < 4 * W; i++) bytes[i] = table[bytes[i] & 15];
    memcpy(&codes, bytes, sizeof bytes);
    return codes;
#endif
}
#endif

static inline vi load_bytes(const uint8_t *from, long part) {
    vi x;
    memcpy(&x, from + 4 * W * part, sizeof x);
    return x;
}

// The codes of 32 inputs: eight vectors of four inputs. from: as they are packed.
static inline __attribute__((always_inline)) void unpack(vi codes[8], const uint8_t *from, long part) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; s++) {
#if P0_BITS == 8
        codes[s] = load_bytes(from + s * 64, part);
#elif P0_BITS == 4
        codes[s] = (vi)((vu)load_bytes(from + s % 4 * 64, part) >> (s < 4 ? 0 : 4)) & 0x0f0f0f0f;
#else
        codes[s] = (vi)((vu)load_bytes(from + s / 4 * 64, part) >> 2 * (s % 4)) & 0x03030303;
#endif
#if P1_BITS == 1
        const vu upper = (vu)load_bytes(from + LOW_BYTES, part);
        codes[s] |= (vi)((s < P0_BITS ? upper << (P0_BITS - s) : upper >> (s - P0_BITS)) & (0x01010101u << P0_BITS));
#elif P1_BITS == 2
        const vu upper = (vu)load_bytes(from + LOW_BYTES + s / 4 * 64, part);
        const int shift = P0_BITS - 2 * (s % 4);
        codes[s] |= (vi)((shift >= 0 ? upper << (shift & 31) : upper >> (-shift & 31)) & (0x03030303u << P0_BITS));
#endif
#if TABLE
        codes[s] = looked_up(codes[s]);
#endif
    }
}

// Input 4 s + b of the codes as numbers.
static inline vf numbers_of(vi codes, int b) {
#if SIGNED
    return __builtin_convertvector(codes << (24 - 8 * b) >> 24, vf);
#else
    return __builtin_convertvector((vi)((vu)codes >> 8 * b) & 255, vf) - (float)ZERO;
#endif
}

// Where the scales and minima of a group lie, and what they are.
typedef struct {
    vf scale, minimum;
} factors;

// Of the span at `from`.
static inline factors span_factors(const uint8_t *from, long part) {
    factors of = {floats_of(from, part), {}};
#if MINIMUM
    of.minimum = floats_of(from + FLOAT_BYTES, part);
#endif
    return of;
}

static inline factors group_factors(factors span, const uint8_t *from, long group, long part) {
#if INTEGER_SCALES
    const uint8_t *scales = from + FLOAT_BYTES * (1 + MINIMUM) + group * PANEL;
    span.scale *= integers_of(scales, part, 1);
#if MINIMUM
    span.minimum *= integers_of(scales + GROUPS * PANEL, part, 0);
#endif
#endif
    return span;
}

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

// Bytes of activations of so many rows, in the form that takes most.
long scratch_size(long rows, long inputs) {
    const long as_bytes = rows * (inputs + inputs / STEP * 4 + inputs / GROUP * 8);
    const long as_floats = (rows + 32) * (inputs * 4 + 128);
    return (as_bytes > as_floats ? as_bytes : as_floats) + 64;
}

static void round_row(const element *x, const rounded *to, long row) {
    const long inputs = to->inputs;
    int8_t *numbers = to->numbers + row * inputs;
    for (long g = 0; g < inputs / STEP; g++, x += STEP, numbers += STEP) {
        const lanes a = load(x), b = load(x + LANES);
        const bits positive = (bits){} + 0x7fffffffu;
        const lanes a_size = (lanes)((bits)a & positive), b_size = (lanes)((bits)b & positive);
        const lanes larger = choose((bits)(a_size > b_size), a_size, b_size);
        float largest = 0;
        for (int i = 0; i < LANES; i++) largest = larger[i] > largest ? larger[i] : largest;
        const float inverse = largest > 0 ? 127 / largest : 0, scale = largest / 127;
        // Adding this rounds to the nearest integer, ties to even, which is then in the lowest bits.
        const float shift = 12582912.0f;
        const bits a_whole = (bits)(a * inverse + shift), b_whole = (bits)(b * inverse + shift);
        typedef int8_t bytes __attribute__((vector_size(LANES)));
        const bytes a_bytes = __builtin_convertvector(a_whole, bytes), b_bytes = __builtin_convertvector(b_whole, bytes);
        memcpy(numbers, &a_bytes, LANES);
        memcpy(numbers + LANES, &b_bytes, LANES);
        int32_t halves[2] = {0, 0};
        for (int i = 0; i < LANES; i++) halves[0] += numbers[i];
        for (int i = 0; i < LANES; i++) halves[1] += numbers[LANES + i];
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
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const long sum_at = (first + r) * (inputs / GROUP) + at * (STEP / GROUP) + h;
                    const int8_t *numbers = x->numbers + (first + r) * inputs + at * STEP + h * GROUP;
                    vi whole = ZERO ? (vi){} + x->shifts[sum_at] : (vi){};
#pragma GCC unroll 8
                    for (int s = 0; s < GROUP / 4; s++) {
                        int32_t four;
                        memcpy(&four, numbers + 4 * s, 4);
                        whole = dots(whole, unpacked[h * (GROUP / 4) + s], (vi){} + four);
                    }
                    total[r] += __builtin_convertvector(whole, vf) * (of.scale * x->scales[(first + r) * steps + at]);
#if MINIMUM
                    total[r] -= of.minimum * x->sums[sum_at];
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
    vf total[8];
    for (int r = 0; r < rows; r++) total[r] = (vf){};
    for (long span = 0; span < inputs / SPAN; span++, scales += SCALE_BYTES) {
        const factors of_span = span_factors(scales, part);
        for (long step = 0; step < SPAN / STEP; step++, codes += CODE_BYTES) {
            vi unpacked[8];
            unpack(unpacked, codes, part);
            for (int h = 0; h < STEP / GROUP; h++) {
                const factors of = group_factors(of_span, scales, step * (STEP / GROUP) + h, part);
                const float *from = x + (span * (SPAN / STEP) + step) * STEP + h * GROUP;
#pragma GCC unroll 8
                for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 4
                    for (int b = 0; b < 4; b++) {
                        const vf number = numbers_of(unpacked[h * (GROUP / 4) + s], b);
                        const vf w = MINIMUM ? number * of.scale - of.minimum : number * of.scale;
#pragma GCC unroll 8
                        for (int r = 0; r < rows; r++) total[r] += w * from[r * stride + 4 * s + b];
                    }
            }
        }
    }
    for (int r = 0; r < rows; r++) memcpy(sums[r] + part * W, &total[r], sizeof(vf));
}

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

#if MATRIX_UNITS
// Rows, and inputs, whose sums and weights stay in the cache; panels that share the rows' way there.
#define BLOCK_ROWS 512
#define BLOCK_INPUTS 1024
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
            // Of codes as they are stored.
            const vf minimum = MINIMUM ? of.minimum : of.scale * (float)ZERO;
#pragma GCC unroll 8
            for (int s = 0; s < GROUP / 4; s++)
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; pair++, to += PANEL) {
                    const vu four = (vu)unpacked[h * (GROUP / 4) + s] >> 16 * pair;
                    const vf even = __builtin_convertvector((vi)(four & 255), vf) * of.scale - minimum;
                    const vf odd = __builtin_convertvector((vi)(four >> 8 & 255), vf) * of.scale - minimum;
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
#endif

// From so many rows on, matrix units are faster than products of bytes.
#define MANY_ROWS 12

enum { ROUNDED, EXACT, TILES };

static int way_of(long rows, long exact) {
#if MATRIX_UNITS
    // Activations that are not to be rounded are bf16 already.
    if (rows >= MANY_ROWS && (!exact || sizeof(element) == 2) && matrix_units()) return TILES;
#endif
    return exact ? EXACT : ROUNDED;
}

// Rows `stride` bytes apart, which are of no use as a power of two: they would share the cache's lines.
static long tile_stride(long inputs) { return (inputs * 2 + 63) / 128 * 128 + 64; }

// One row of x as `way` wants it.
static void prepare(int way, const element *x, const rounded *to, void *scratch, long row) {
    const long inputs = to->inputs;
    if (way == ROUNDED) {
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
    const int alone = rows == 1;
    if (alone) prepare(way, x, &small, scratch, 0);
#if MATRIX_UNITS
    long block = 2;
    while (block < BLOCK_PANELS && panels * experts / block > 8) block += 2;
#else
    const long block = 1;
#endif
    const long units = way == TILES ? (panels + block - 1) / block : panels;
    // Few enough for threads to end together, whatever else they are kept by.
    const long chunk = units * experts / 64 + 1;
#pragma omp parallel
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (long row = 0; row < rows; row++) prepare(way, x + row * x_stride, &small, scratch, row);
        }
#if MATRIX_UNITS
        uint8_t *memory = 0;
        if (way == TILES) {
            memory = aligned_alloc(64, THREAD_MEMORY);
            begin_tiles();
        }
#endif
#pragma omp for collapse(2) schedule(dynamic, chunk)
        for (long e = 0; e < experts; e++)
            for (long u = 0; u < units; u++) {
                const long begin = ends && e ? ends[e - 1] : 0, end = ends ? ends[e] : rows;
                if (begin == end) continue;
                const long p = way == TILES ? u * block : u;
                const uint8_t *from = packed + (e * panels + p) * size;
                target to = whole;
                if (bias) to.bias = bias + e * panels * PANEL;
                const long kept = outputs - p * PANEL < PANEL ? outputs - p * PANEL : PANEL;
                if (way == ROUNDED)
                    panel_rounded(&to, &small, from, p * PANEL, kept, begin, end);
                else if (way == EXACT)
                    panel_exact(&to, scratch, inputs, inputs, from, p * PANEL, kept, begin, end);
#if MATRIX_UNITS
                else
                    panels_in_tiles(&to, scratch, tile_stride(inputs), inputs, from, p * PANEL, outputs,
                                    panels - p < block ? panels - p : block, begin, end, memory);
#endif
            }
#if MATRIX_UNITS
        if (way == TILES) {
            _tile_release();
            free(memory);
        }
#endif
    }
}

// `bits` of each of `numbers` codes, from the plane that begins at `from` in runs of `run` bytes; or-ed, `shift` up.
static inline __attribute__((always_inline)) void read_plane(uint8_t *codes, const uint8_t *from, const long numbers,
                                                             const int bits, const long run, const int shift) {
    for (long first = 0; first < numbers; first += run * 8 / bits, from += run)
        for (int place = 0; place < 8 / bits; place++)
            for (long i = 0; i < run; i++)
                codes[first + place * run + i] |= (from[i] >> bits * place & ((1 << bits) - 1)) << shift;
}

#define NUMBERS_OF_SCALES ((INTEGER_SCALES ? NUMBERS / GROUP : 0) * (1 + MINIMUM))

// The codes of one block; of its groups the integer scales, then the minima.
static void read_block(uint8_t codes[NUMBERS], uint8_t scales[64], const uint8_t *block) {
    memset(codes, 0, NUMBERS);
#if P0_BITS == 8
    for (int i = 0; i < NUMBERS; i++) codes[i] = block[P0_AT + i] ^ (SIGNED ? 0 : 128);
#else
    read_plane(codes, block + P0_AT, NUMBERS, P0_BITS, P0_RUN, 0);
#endif
#if P1_BITS
    read_plane(codes, block + P1_AT, NUMBERS, P1_BITS, P1_RUN, P0_BITS);
#endif
#if MIXED
    for (int i = 0; i < 4; i++) {
        const uint8_t scale = block[4 + i], minimum = block[8 + i], low = block[12 + i];
        scales[i] = scale & 63;
        scales[4 + i] = (low & 15) | (scale >> 2 & 48);
        scales[8 + i] = minimum & 63;
        scales[12 + i] = low >> 4 | (minimum >> 2 & 48);
    }
#elif INTEGER_SCALES
    memset(scales, 0, 64);
#if S0_BITS == 8
    for (int i = 0; i < NUMBERS_OF_SCALES; i++) scales[i] = block[S0_AT + i];
#else
    read_plane(scales, block + S0_AT, NUMBERS_OF_SCALES, S0_BITS, S0_RUN, 0);
#if S1_BITS
    read_plane(scales, block + S1_AT, NUMBERS_OF_SCALES, S1_BITS, S1_RUN, S0_BITS);
#endif
    for (int i = 0; i < NUMBERS / GROUP; i++) scales[i] -= SCALE_OFFSET;
#endif
#endif
}

// Where the codes of 32 inputs of an output go.
static void pack_codes(uint8_t *to, const uint8_t *codes) {
#if P0_BITS == 8
    for (int s = 0; s < 8; s++) memcpy(to + s * 64, codes + 4 * s, 4);
#elif P0_BITS == 4
    uint8_t both[16];
    for (int i = 0; i < 16; i++) both[i] = (codes[i] & 15) | codes[16 + i] << 4;
    for (int s = 0; s < 4; s++) memcpy(to + s * 64, both + 4 * s, 4);
#else
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < 4; b++) {
            uint8_t four = 0;
            for (int s = 0; s < 4; s++) four |= (codes[16 * half + 4 * s + b] & 3) << 2 * s;
            to[half * 64 + b] = four;
        }
#endif
#if P1_BITS == 1
    for (int b = 0; b < 4; b++) {
        uint8_t eight = 0;
        for (int s = 0; s < 8; s++) eight |= (codes[4 * s + b] >> P0_BITS & 1) << s;
        to[LOW_BYTES + b] = eight;
    }
#elif P1_BITS == 2
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < 4; b++) {
            uint8_t four = 0;
            for (int s = 0; s < 4; s++) four |= (codes[16 * half + 4 * s + b] >> P0_BITS & 3) << 2 * s;
            to[LOW_BYTES + half * 64 + b] = four;
        }
#endif
}

// stored: [experts, outputs, inputs / NUMBERS, BYTES]. packed: [experts, panels, panel_size].
void pack(uint8_t *packed, const uint8_t *stored, long experts, long outputs, long inputs) {
    const long panels = (outputs + PANEL - 1) / PANEL, size = panel_size(inputs), row_bytes = inputs / NUMBERS * BYTES;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < experts * panels; p++) {
        uint8_t *panel = packed + p * size;
        memset(panel, 0, size);
        const long first = p % panels * PANEL, kept = outputs - first < PANEL ? outputs - first : PANEL;
        for (long lane = 0; lane < kept; lane++) {
            const uint8_t *block = stored + (p / panels * outputs + first + lane) * row_bytes;
            for (long at = 0; at < inputs; at += NUMBERS, block += BYTES) {
                uint8_t codes[NUMBERS], whole[64];
                read_block(codes, whole, block);
                uint8_t *scales = panel + at / SPAN * SCALE_BYTES;
                if (POWER)
                    scales[lane] = block[SCALE_AT];
                else
                    memcpy(scales + 2 * lane, block + SCALE_AT, 2);
#if MINIMUM
                memcpy(scales + FLOAT_BYTES + 2 * lane, block + MINIMUM_AT, 2);
                if (MINIMUM_SIGN < 0) scales[FLOAT_BYTES + 2 * lane + 1] ^= 128;
#endif
                for (int i = 0; i < NUMBERS_OF_SCALES; i++)
                    scales[FLOAT_BYTES * (1 + MINIMUM) + i * PANEL + lane] = whole[i];
                uint8_t *to = panel + scales_size(inputs) + at / STEP * CODE_BYTES + 4 * lane;
                for (int i = 0; i < NUMBERS; i += STEP, to += CODE_BYTES) pack_codes(to, codes + i);
            }
        }
    }
}

// Outputs `ids` of a packed weight, unpacked. y: [count, inputs] of fp32.
void rows(float *y, const uint8_t *packed, const int64_t *ids, long count, long inputs) {
    const long size = panel_size(inputs);
#pragma omp parallel for schedule(static) if (count > 1)
    for (long n = 0; n < count; n++) {
        const uint8_t *panel = packed + ids[n] / PANEL * size, *codes = panel + scales_size(inputs);
        const long lane = ids[n] % PANEL, part = lane / W, at_lane = lane % W;
        float *to = y + n * inputs;
        for (long at = 0; at < inputs; at += STEP, codes += CODE_BYTES) {
            const uint8_t *scales = panel + at / SPAN * SCALE_BYTES;
            const factors of_span = span_factors(scales, part);
            vi unpacked[8];
            unpack(unpacked, codes, part);
            for (int s = 0; s < 8; s++) {
                const factors of = group_factors(of_span, scales, at % SPAN / GROUP + s * 4 / GROUP, part);
                for (int b = 0; b < 4; b++) {
                    vf w = numbers_of(unpacked[s], b) * of.scale;
                    if (MINIMUM) w -= of.minimum;
                    to[at + 4 * s + b] = w[at_lane];
                }
            }
        }
    }
}
