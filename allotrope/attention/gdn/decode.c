// The gated delta rule for one new token per request, with the convolution and the gates before it. The state is read
// and written where it lies, once each. fp32 inside; results are rounded once. For prompts, what comes before the rule.
#include <math.h>

#include "element.h"

// Columns of a state that are held in registers at a time, in lanes.
#define BLOCK 8
// Numbers of state below which a second thread costs more than it brings.
#define WORTH_THREADS 65536

typedef struct {
    long requests, key_heads, value_heads, key_dim, value_dim, conv_width;
    // Whether every key channel decays at its own rate, not the whole head at one.
    long channel_decay;
    // Numbers from one token to the next.
    long qkv_stride, b_stride, a_stride;
    // Numbers from one slot of a pool to the next.
    long conv_slot, ssm_slot;
} sizes;

static inline lanes take(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void put(float *to, lanes x) { memcpy(to, &x, sizeof x); }

static inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Beyond 20 softplus is x, as in PyTorch.
static inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// mixed = silu(bias + sum_j taps_j * u_j) over the held inputs and the new one, which then becomes the last held one.
// held: [width - 1, channels]. taps: [width, channels]. channels: a multiple of LANES.
static void convolve(float *mixed, element *held, const element *new, const float *taps, const float *bias, long width,
                     long channels) {
    for (long c = 0; c < channels; c += LANES) {
        const lanes newest = load(new + c);
        lanes total = bias ? take(bias + c) : all(0);
        for (long j = 0; j + 1 < width; j++) total += load(held + j * channels + c) * take(taps + j * channels + c);
        total += newest * take(taps + (width - 1) * channels + c);
        put(mixed + c, total / (1 + exponential(-total)));
    }
    memmove(held, held + channels, (width - 2) * channels * sizeof(element));
    memcpy(held + (width - 2) * channels, new, channels * sizeof(element));
}

// Unit length, then times scale.
static void normalize(float *x, long size, float scale) {
    float square = 1e-6f;
    for (long i = 0; i < size; i++) square += x[i] * x[i];
    const float factor = scale / sqrtf(square);
    for (long i = 0; i < size; i++) x[i] *= factor;
}

// S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q, for columns of one head; as o = (e^g S)^T q + (k . q) d.
// decay: e^g of each key channel.
static void advance(element *out, float *state, const float *q, const float *k, const float *v, const float *decay,
                    float beta, long key_dim, long value_dim) {
    float product = 0;
    for (long i = 0; i < key_dim; i++) product += q[i] * k[i];
    for (long begin = 0; begin < value_dim; begin += BLOCK * LANES) {
        const long left = (value_dim - begin) / LANES, count = left < BLOCK ? left : BLOCK;
        lanes by_key[BLOCK] = {}, by_query[BLOCK] = {};
        for (long i = 0; i < key_dim; i++) {
            const float key = decay[i] * k[i], query = decay[i] * q[i];
            for (long d = 0; d < count; d++) {
                const lanes row = take(state + i * value_dim + begin + d * LANES);
                by_key[d] += row * key, by_query[d] += row * query;
            }
        }
        for (long d = 0; d < count; d++) {
            by_key[d] = beta * (take(v + begin + d * LANES) - by_key[d]);
            store(out + begin + d * LANES, by_query[d] + product * by_key[d]);
        }
        for (long i = 0; i < key_dim; i++)
            for (long d = 0; d < count; d++) {
                float *row = state + i * value_dim + begin + d * LANES;
                put(row, take(row) * decay[i] + k[i] * by_key[d]);
            }
    }
}

// out: [requests, value_heads, value_dim]. qkv: rows [q | k | v]. b: [requests, value_heads]. a: [requests, rates].
// conv: [slots, conv_width - 1, channels]. ssm: [slots, value_heads, key_dim, value_dim]. slots: [requests], 0 or less
// for a request that only fills up: its output is zero. taps: [conv_width, channels]. bias: [channels] or NULL.
// A_log: [value_heads]. dt_bias: [rates]. scratch: requests * (channels + value_heads * key_dim).
void decode(element *out, const element *qkv, const element *b, const element *a, element *conv, float *ssm,
            const int64_t *slots, const float *taps, const float *bias, const float *A_log, const float *dt_bias,
            float *scratch, const sizes *n) {
    const long keys = n->key_heads * n->key_dim, values = n->value_heads * n->value_dim;
    const long channels = 2 * keys + values, state = n->value_heads * n->key_dim * n->value_dim;
    const long repeat = n->value_heads / n->key_heads;
    float *decays = scratch + n->requests * channels;
#pragma omp parallel if (n->requests * state > WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < n->requests; r++) {
            if (slots[r] <= 0) continue;
            float *mixed = scratch + r * channels;
            convolve(mixed, conv + slots[r] * n->conv_slot, qkv + r * n->qkv_stride, taps, bias,
                     n->conv_width, channels);
            for (long h = 0; h < 2 * n->key_heads; h++)
                normalize(mixed + h * n->key_dim, n->key_dim, h < n->key_heads ? 1 / sqrtf(n->key_dim) : 1);
        }
#pragma omp for collapse(2) schedule(static)
        for (long r = 0; r < n->requests; r++)
            for (long h = 0; h < n->value_heads; h++) {
                element *to = out + r * values + h * n->value_dim;
                if (slots[r] <= 0) {
                    memset(to, 0, n->value_dim * sizeof(element));
                    continue;
                }
                float *decay = decays + (r * n->value_heads + h) * n->key_dim;
                const float rate = -expf(A_log[h]);
                for (long i = 0; i < n->key_dim; i++) {
                    const long at = n->channel_decay ? h * n->key_dim + i : h;
                    decay[i] = i && !n->channel_decay
                                   ? decay[0]
                                   : expf(rate * softplus(widen(a[r * n->a_stride + at]) + dt_bias[at]));
                }
                const float *mixed = scratch + r * channels;
                advance(to, ssm + slots[r] * n->ssm_slot + h * n->key_dim * n->value_dim, mixed + h / repeat * n->key_dim,
                        mixed + keys + h / repeat * n->key_dim, mixed + 2 * keys + h * n->value_dim, decay,
                        sigmoid(widen(b[r * n->b_stride + h])), n->key_dim, n->value_dim);
            }
    }
}

// What the rule is fed with for every token of a prompt: mixed = silu(bias + sum_j taps_j * u_(t + j)), [requests,
// length, channels], then queries and keys of unit length, queries times 1 / sqrt(key_dim). inputs: [requests,
// width - 1 + length, channels]. Queries come first, then keys; channels: a multiple of LANES.
void feed(float *mixed, const element *inputs, const float *taps, const float *bias, long requests, long length,
          long channels, long key_heads, long key_dim, long width) {
    const long rows = requests * length;
#pragma omp parallel for if (rows * channels > WORTH_THREADS) schedule(static)
    for (long row = 0; row < rows; row++) {
        const element *from = inputs + (row / length * (width - 1 + length) + row % length) * channels;
        float *to = mixed + row * channels;
        for (long c = 0; c < channels; c += LANES) {
            lanes total = bias ? take(bias + c) : all(0);
            for (long j = 0; j < width; j++) total += load(from + j * channels + c) * take(taps + j * channels + c);
            put(to + c, total / (1 + exponential(-total)));
        }
        for (long head = 0; head < 2 * key_heads; head++)
            normalize(to + head * key_dim, key_dim, head < key_heads ? 1 / sqrtf((float)key_dim) : 1);
    }
}
