// Products in bf16 by the matrix units of x86 (AMX).
#pragma once
#include "element.h"

// Bytes from a row to the next: a power of two would put all of them into the same lines of the cache.
static inline long padded(long bytes) { return (bytes + 63) / 128 * 128 + 64; }

// With the vectors of 512 bits that `blocks.h` wants.
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && \
    defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MATRIX_UNITS 1

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

// Sums of 32 rows, or 16 unless `both`, and 32 outputs, `stride` floats from row to row.
typedef struct {
    float *sums;
    long stride;
} tile_sums;

// to = from + x w, where `from` has sums: else x w. x: bf16, rows `stride` bytes apart. w: pairs of inputs, `w_stride`
// bytes apart, for 16 outputs, and for the others `apart` bytes behind.
static inline void multiply_tiles(tile_sums to, tile_sums from, const uint8_t *x, long stride, const uint8_t *w,
                                  long w_stride, long apart, long count, int both) {
    // Compilers do not see that tiles read memory: what was stored there must be.
    __asm__ volatile("" ::: "memory");
    if (!from.sums) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, from.sums, 4 * from.stride);
        _tile_loadd(1, from.sums + 16, 4 * from.stride);
        if (both) _tile_loadd(2, from.sums + 16 * from.stride, 4 * from.stride);
        if (both) _tile_loadd(3, from.sums + 16 * from.stride + 16, 4 * from.stride);
    }
    for (long k = 0; k < count; k += 32, x += 64, w += 16 * w_stride) {
        _tile_loadd(6, w, w_stride);
        _tile_loadd(7, w + apart, w_stride);
        _tile_loadd(4, x, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to.sums, 4 * to.stride);
    _tile_stored(1, to.sums + 16, 4 * to.stride);
    if (both) _tile_stored(2, to.sums + 16 * to.stride, 4 * to.stride);
    if (both) _tile_stored(3, to.sums + 16 * to.stride + 16, 4 * to.stride);
}
#else
#define MATRIX_UNITS 0
#endif
