// Matrix units (AMX) in plain C, for processors that lack them: included before anything else.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
// Asked once: whether the units may be used.
#define syscall(...) 0
#define _tile_loadconfig(shapes) ((void)(shapes))
#define _tile_release() ((void)0)
#define _tile_zero(t) memset(tiles[t], 0, sizeof tiles[t])
#define _tile_loadd(t, from, stride) load_tile(tiles[t], (const uint8_t *)(from), stride)
#define _tile_stored(t, to, stride) store_tile(tiles[t], (uint8_t *)(to), stride)
#define _tile_dpbf16ps(t, a, b) multiply_tile(tiles[t], tiles[a], tiles[b])

typedef uint32_t emulated_tile[16][16];
static _Thread_local emulated_tile tiles[8];

static inline void load_tile(emulated_tile t, const uint8_t *from, long stride) {
    for (int i = 0; i < 16; i++) memcpy(t[i], from + i * stride, 64);
}

static inline void store_tile(emulated_tile t, uint8_t *to, long stride) {
    for (int i = 0; i < 16; i++) memcpy(to + i * stride, t[i], 64);
}

static inline float number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void multiply_tile(emulated_tile sums, emulated_tile a, emulated_tile b) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            float sum = number(sums[i][j]);
            for (int k = 0; k < 16; k++)
                sum += number(a[i][k] << 16) * number(b[k][j] << 16) +
                       number(a[i][k] & 0xffff0000u) * number(b[k][j] & 0xffff0000u);
            memcpy(&sums[i][j], &sum, 4);
        }
}
