// Recurrent decode of the gated delta rule, with its convolution and gates; the convolution of prompts. The state is
// updated in place, read once and written once. Everything is computed in fp32, and the output is rounded once.
#include <math.h>

#include "element.h"

// Vectors of value channels of a state that are in registers at a time.
#define BLOCK 8
// Elements of state below which a second thread costs more than it gains.
#define WORTH_THREADS 65536

typedef struct {
    long requests, key_heads, value_heads, key_dim, value_dim, conv_width;
    // Whether the decay is per key channel, and not per head.
    long channel_decay;
    // Elements from one token to the next.
    long qkv_stride, b_stride, a_stride;
    // Elements from one slot of a pool to the next.
    long conv_slot, ssm_slot;
} sizes;

static inline lanes load_floats(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store_floats(float *to, lanes x) { memcpy(to, &x, sizeof x); }

static inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// softplus(x) is x above 20, as in PyTorch.
static inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// conv_out = silu(bias + sum_j weight_j * u_j) over the conv state and the new input, which is then appended to the
// state. conv_state: [width - 1, channels]. weight: [width, channels]. channels: a multiple of LANES.
static void conv_step(float *conv_out, element *conv_state, const element *new, const float *weight,
                      const float *bias, long width, long channels) {
    for (long c = 0; c < channels; c += LANES) {
        const lanes newest = load(new + c);
        lanes total = bias ? load_floats(bias + c) : all(0);
        for (long j = 0; j + 1 < width; j++)
            total += load(conv_state + j * channels + c) * load_floats(weight + j * channels + c);
        total += newest * load_floats(weight + (width - 1) * channels + c);
        store_floats(conv_out + c, total / (1 + exponential(-total)));
    }
    memmove(conv_state, conv_state + channels, (width - 2) * channels * sizeof(element));
    memcpy(conv_state + (width - 2) * channels, new, channels * sizeof(element));
}

// L2-normalize, then multiply by scale.
static void normalize(float *x, long size, float scale) {
    float norm_squared = 1e-6f;
    for (long i = 0; i < size; i++) norm_squared += x[i] * x[i];
    const float inv_norm = scale / sqrtf(norm_squared);
    for (long i = 0; i < size; i++) x[i] *= inv_norm;
}

// S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q of one head, with o computed as (e^g S)^T q + (k . q) d.
// decay: e^g of each key channel.
static void recurrent_step(element *out, float *state, const float *q, const float *k, const float *v,
                           const float *decay, float beta, long key_dim, long value_dim) {
    float k_dot_q = 0;
    for (long i = 0; i < key_dim; i++) k_dot_q += q[i] * k[i];
    for (long begin = 0; begin < value_dim; begin += BLOCK * LANES) {
        const long left = (value_dim - begin) / LANES, count = left < BLOCK ? left : BLOCK;
        lanes delta[BLOCK] = {}, q_state[BLOCK] = {};
        for (long i = 0; i < key_dim; i++) {
            const float key = decay[i] * k[i], query = decay[i] * q[i];
            for (long d = 0; d < count; d++) {
                const lanes row = load_floats(state + i * value_dim + begin + d * LANES);
                delta[d] += row * key, q_state[d] += row * query;
            }
        }
        for (long d = 0; d < count; d++) {
            delta[d] = beta * (load_floats(v + begin + d * LANES) - delta[d]);
            store(out + begin + d * LANES, q_state[d] + k_dot_q * delta[d]);
        }
        for (long i = 0; i < key_dim; i++)
            for (long d = 0; d < count; d++) {
                float *row = state + i * value_dim + begin + d * LANES;
                store_floats(row, load_floats(row) * decay[i] + k[i] * delta[d]);
            }
    }
}

// out: [requests, value_heads, value_dim]. qkv: rows [q | k | v]. b: [requests, value_heads]. a: [requests, rates].
// conv: [slots, conv_width - 1, channels]. ssm: [slots, value_heads, key_dim, value_dim]. slots: [requests], 0 or less
// for a padding row, whose output is zero. weight: [conv_width, channels]. bias: [channels] or NULL. A_log:
// [value_heads]. dt_bias: [rates]. scratch: requests * (channels + value_heads * key_dim).
void decode(element *out, const element *qkv, const element *b, const element *a, element *conv, float *ssm,
            const int64_t *slots, const float *weight, const float *bias, const float *A_log, const float *dt_bias,
            float *scratch, const sizes *n) {
    const long keys = n->key_heads * n->key_dim, values = n->value_heads * n->value_dim;
    const long channels = 2 * keys + values, state = n->value_heads * n->key_dim * n->value_dim;
    const long values_per_key = n->value_heads / n->key_heads;
    float *decays = scratch + n->requests * channels;
#pragma omp parallel if (n->requests * state > WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < n->requests; r++) {
            if (slots[r] <= 0) continue;
            float *conv_out = scratch + r * channels;
            conv_step(conv_out, conv + slots[r] * n->conv_slot, qkv + r * n->qkv_stride, weight, bias,
                     n->conv_width, channels);
            for (long h = 0; h < 2 * n->key_heads; h++)
                normalize(conv_out + h * n->key_dim, n->key_dim, h < n->key_heads ? 1 / sqrtf(n->key_dim) : 1);
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
                const float A = -expf(A_log[h]);
                for (long i = 0; i < n->key_dim; i++) {
                    const long index = n->channel_decay ? h * n->key_dim + i : h;
                    decay[i] = i && !n->channel_decay
                                   ? decay[0]
                                   : expf(A * softplus(widen(a[r * n->a_stride + index]) + dt_bias[index]));
                }
                const float *conv_out = scratch + r * channels;
                recurrent_step(to, ssm + slots[r] * n->ssm_slot + h * n->key_dim * n->value_dim,
                               conv_out + h / values_per_key * n->key_dim,
                               conv_out + keys + h / values_per_key * n->key_dim,
                               conv_out + 2 * keys + h * n->value_dim, decay, sigmoid(widen(b[r * n->b_stride + h])),
                               n->key_dim, n->value_dim);
            }
    }
}

// The convolution of prompts: conv_out = silu(bias + sum_j weight_j * u_(t + j)), [requests, length, channels], with
// L2-normalized queries and keys, queries times 1 / sqrt(key_dim). inputs: [requests, width - 1 + length, channels].
// Queries are the first channels, then keys; channels: a multiple of LANES.
void conv_prompts(float *conv_out, const element *inputs, const float *weight, const float *bias, long requests,
                  long length, long channels, long key_heads, long key_dim, long width) {
    const long rows = requests * length;
#pragma omp parallel for if (rows * channels > WORTH_THREADS) schedule(static)
    for (long row = 0; row < rows; row++) {
        const element *from = inputs + (row / length * (width - 1 + length) + row % length) * channels;
        float *to = conv_out + row * channels;
        for (long c = 0; c < channels; c += LANES) {
            lanes total = bias ? load_floats(bias + c) : all(0);
            for (long j = 0; j < width; j++)
                total += load(from + j * channels + c) * load_floats(weight + j * channels + c);
            store_floats(to + c, total / (1 + exponential(-total)));
        }
        for (long head = 0; head < 2 * key_heads; head++)
            normalize(to + head * key_dim, key_dim, head < key_heads ? 1 / sqrtf((float)key_dim) : 1);
    }
}
