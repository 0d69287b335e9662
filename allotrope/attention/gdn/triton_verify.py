"""Decode of a verify step: replay of the accepted drafts, the new tokens, and the conv state, in two launches.

`tokens_kernel` computes what the recurrence reads of a token: the convolution of q, k and v, norms and gates. All
tokens do that at once, those that are replayed as well.

In `verify_kernel` a program owns BLOCK_V value channels of one value head of one sequence. It reads that part of the
state once, replays the drafts of the step before that turned out to be right, takes the sequence's first new token,
stores the state, and goes on over the drafts without storing it. Programs of the rows of drafts end at once. Then the
programs of a sequence share its channels out, and store the conv state and the inputs of the drafts.

A token's arithmetic is that of `triton_decode`, in its order and with the state rounded to its stored type between
tokens, so that the results have the bits of plain decoding.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,misc"
# Triton's compiler knows no (*tuple, item).
# ruff: noqa: RUF005
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.attention.batch import VerifyTensors
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.triton_decode import config
from allotrope.attention.gdn.triton_gates import (
    conv_token,
    decay_of,
    dot,
    load_a,
    load_rates,
    load_taps,
    normalized,
    update,
)
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2


@triton.jit
def load_input(
    token, num_replay, x_ptr, x_row, draft_ptr, conv_state, channel, mask_c, is_new, conv_row,
    WIDTH: tl.constexpr, CONV_DIM: tl.constexpr,
):  # fmt: skip
    """The convolution's input of a token: of the conv state below 0, of a draft below `num_replay`, else a new one."""
    is_kept, is_row = token >= 0, token >= num_replay
    old = tl.load(
        conv_state + (token + WIDTH - 1) * conv_row + channel, mask=mask_c & (is_new == 0) & (token < 0), other=0.0
    )
    kept = tl.load(draft_ptr + token * CONV_DIM + channel, mask=mask_c & is_kept & (token < num_replay), other=0.0)
    new = tl.load(x_ptr + (token - num_replay) * x_row + channel, mask=mask_c & is_row, other=0.0)
    return tl.where(is_row, new, tl.where(is_kept, kept, old))


@triton.jit
def load_inputs(
    token, num_replay, x_ptr, x_row, draft_ptr, conv_state, channel, mask_c, is_new, conv_row,
    WIDTH: tl.constexpr, CONV_DIM: tl.constexpr,
):  # fmt: skip
    """The convolution's inputs of a token, its own the last."""
    inputs = ()
    for j in tl.static_range(WIDTH):
        x = load_input(
            token - (WIDTH - 1) + j, num_replay, x_ptr, x_row, draft_ptr, conv_state, channel, mask_c, is_new, conv_row,
            WIDTH, CONV_DIM,
        )  # fmt: skip
        inputs = inputs + (x,)
    return inputs


@pdl_jit
def tokens_kernel(
    qkv, b, a, weight, bias, A_log, dt_bias, conv, draft_qkv, draft_b, draft_a, q_out, k_out, qk_out, v_out, beta_out,
    decay_out, slots, seq_lens, first_row, rows, replay, qkv_row, b_row, b_head, a_row, a_rate, weight_channel,
    weight_w, conv_slot, conv_row, draft_qkv_slot, draft_b_slot, draft_a_slot, scale, eps,
    KEY_HEADS: tl.constexpr, VALUES_PER_KEY: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr, CHANNEL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Token [0, b] is the new one of request b, token [1 + i, b] the draft i that the sequence of request b replays.

    Writes, of a token and a key head, q and k with their norms, and k . q; of its value heads v, beta and e^g.
    """
    gdc_wait()
    gdc_launch_dependents()
    key_head, request, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    value_heads: tl.constexpr = KEY_HEADS * VALUES_PER_KEY
    conv_dim: tl.constexpr = 2 * KEY_HEADS * DK + value_heads * DV
    rates: tl.constexpr = value_heads * DK if CHANNEL else value_heads
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        return
    first = tl.load(first_row + request)
    is_new = tl.load(seq_lens + first) <= 1
    num_replay = tl.where(is_new, 0, tl.load(replay + first))
    if kind > 0:
        if tl.load(rows + request) == 0:
            return
        if kind > num_replay:
            return
    token = tl.where(kind > 0, kind - 1, num_replay + request - first)
    x_ptr, conv_state = qkv + first.to(tl.int64) * qkv_row, conv + slot * conv_slot
    draft_x = draft_qkv + slot * draft_qkv_slot
    low, offs_v = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_V)
    high = BLOCK_K // 2 + low
    mask_low, mask_high, mask_v = low < DK, high < DK, offs_v < DV
    channels = (key_head * DK + low, key_head * DK + high)
    channels += (KEY_HEADS * DK + channels[0], KEY_HEADS * DK + channels[1])
    masks = (mask_low, mask_high, mask_low, mask_high)
    convolved = ()
    for i in tl.static_range(4):
        inputs = load_inputs(
            token, num_replay, x_ptr, qkv_row, draft_x, conv_state, channels[i], masks[i], is_new, conv_row, WIDTH,
            conv_dim,
        )  # fmt: skip
        taps = load_taps(weight, bias, channels[i], masks[i], weight_channel, weight_w, WIDTH, BIAS)
        convolved += (tl.where(masks[i], conv_token(inputs, inputs[WIDTH - 1], taps, WIDTH, BIAS), 0.0),)
    q, qh, k, kh = convolved
    q, qh = normalized(q, qh, scale, eps)
    k, kh = normalized(k, kh, 1.0, eps)
    place = kind * tl.num_programs(1) + request
    at_key = place.to(tl.int64) * KEY_HEADS + key_head
    tl.store(q_out + at_key * DK + low, q, mask=mask_low)
    tl.store(q_out + at_key * DK + high, qh, mask=mask_high)
    tl.store(k_out + at_key * DK + low, k, mask=mask_low)
    tl.store(k_out + at_key * DK + high, kh, mask=mask_high)
    tl.store(qk_out + at_key, dot(q, k, qh, kh))

    is_kept = kind > 0
    b_ptr = tl.where(is_kept, draft_b + slot * draft_b_slot + token * value_heads, b + request.to(tl.int64) * b_row)
    a_ptr = tl.where(is_kept, draft_a + slot * draft_a_slot + token * rates, a + request.to(tl.int64) * a_row)
    b_step, a_step = tl.where(is_kept, 1, b_head), tl.where(is_kept, 1, a_rate)
    for i in tl.static_range(VALUES_PER_KEY):
        head = key_head * VALUES_PER_KEY + i
        v_channel = 2 * KEY_HEADS * DK + head * DV + offs_v
        v_inputs = load_inputs(
            token, num_replay, x_ptr, qkv_row, draft_x, conv_state, v_channel, mask_v, is_new, conv_row, WIDTH,
            conv_dim,
        )  # fmt: skip
        v_taps = load_taps(weight, bias, v_channel, mask_v, weight_channel, weight_w, WIDTH, BIAS)
        A, dt, dt_high = load_rates(A_log, dt_bias, head, low, high, mask_low, mask_high, DK, CHANNEL)
        token_a, token_a_high = load_a(a_ptr, a_step, head, low, high, mask_low, mask_high, DK, CHANNEL)
        v = conv_token(v_inputs, v_inputs[WIDTH - 1], v_taps, WIDTH, BIAS)
        at_value = place.to(tl.int64) * value_heads + head
        tl.store(v_out + at_value * DV + offs_v, v, mask=mask_v)
        tl.store(beta_out + at_value, tl.sigmoid(tl.load(b_ptr + head * b_step).to(tl.float32)))
        decay = decay_of(token_a, A, dt)
        if CHANNEL:
            tl.store(decay_out + at_value * DK + low, decay, mask=mask_low)
            tl.store(decay_out + at_value * DK + high, decay_of(token_a_high, A, dt_high), mask=mask_high)
        else:
            tl.store(decay_out + at_value, decay)


@triton.jit
def load_token(
    q, k, qk, v, beta, decay, place, key_head, head, low, high, offs_v, mask_low, mask_high, mask_v,
    KEY_HEADS: tl.constexpr, VALUES_PER_KEY: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """What `tokens_kernel` wrote of the token at `place`: both halves of q, of k and of e^g, k . q, v, beta."""
    at_key = place.to(tl.int64) * KEY_HEADS + key_head
    at_value = place.to(tl.int64) * (KEY_HEADS * VALUES_PER_KEY) + head
    q += at_key * DK
    k += at_key * DK
    both_q = (tl.load(q + low, mask=mask_low, other=0.0), tl.load(q + high, mask=mask_high, other=0.0))
    both_k = (tl.load(k + low, mask=mask_low, other=0.0), tl.load(k + high, mask=mask_high, other=0.0))
    token_v = tl.load(v + at_value * DV + offs_v, mask=mask_v, other=0.0)
    if CHANNEL:
        decay += at_value * DK
        near, far = tl.load(decay + low, mask=mask_low, other=0.0), tl.load(decay + high, mask=mask_high, other=0.0)
        both_decays = (near[:, None], far[:, None])
    else:
        one = tl.load(decay + at_value)
        both_decays = (one, one)
    return both_q + both_k + both_decays + (tl.load(qk + at_key), token_v, tl.load(beta + at_value))


@triton.jit
def rounded(state, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """`state` as the cache would give it back. PAIRS: bf16, two numbers at once."""
    if PAIRS:
        # The compiler takes the pair apart in four instructions.
        state = tl.inline_asm_elementwise(
            """{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xFFFF0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f", [state], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        state = state.to(dtype).to(tl.float32)
    return state


@triton.jit
def keep_inputs(
    num_rows, num_replay, x_ptr, x_row, draft_ptr, conv_state, channel, mask_c, is_new, conv_row,
    WIDTH: tl.constexpr, CONV_DIM: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Store the conv state after the first new token, and the drafts' inputs."""
    # All but the oldest of what the first new token saw.
    inputs = load_inputs(
        num_replay, num_replay, x_ptr, x_row, draft_ptr, conv_state, channel, mask_c, is_new, conv_row, WIDTH, CONV_DIM
    )  # fmt: skip
    draft = tl.arange(0, DRAFTS)
    mask = (draft < num_rows - 1)[:, None] & mask_c[None, :]
    new = tl.load(x_ptr + (draft[:, None] + 1) * x_row + channel[None, :], mask=mask, other=0.0)
    # All threads have read what is overwritten.
    tl.debug_barrier()
    for j in tl.static_range(1, WIDTH):
        tl.store(conv_state + (j - 1) * conv_row + channel, inputs[j], mask=mask_c)
    tl.store(draft_ptr + draft[:, None] * CONV_DIM + channel[None, :], new, mask=mask)


@pdl_jit
def verify_kernel(
    q, k, qk, v, beta, decay, qkv, b, a, conv, ssm, draft_qkv, draft_b, draft_a, out, slots, seq_lens, rows, replay,
    qkv_row, b_row, b_head, a_row, a_rate, conv_slot, conv_row, ssm_slot, draft_qkv_slot, draft_b_slot, draft_a_slot,
    KEY_HEADS: tl.constexpr, VALUES_PER_KEY: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DRAFTS: tl.constexpr, WIDTH: tl.constexpr, CHANNEL: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """`q` to `decay`: what `tokens_kernel` wrote. `rows`, `replay`: `num_rows` and `replay` of `VerifyTensors`.
    `draft_qkv`, `draft_b`, `draft_a`: the kept inputs of up to DRAFTS drafts, contiguous in a slot. Other arguments: as
    in `reference.run`.
    """
    gdc_wait()
    gdc_launch_dependents()
    v_block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // VALUES_PER_KEY
    value_heads: tl.constexpr = KEY_HEADS * VALUES_PER_KEY
    conv_dim: tl.constexpr = 2 * KEY_HEADS * DK + value_heads * DV
    rates: tl.constexpr = value_heads * DK if CHANNEL else value_heads
    low, offs_v = tl.arange(0, BLOCK_K // 2), v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    high = BLOCK_K // 2 + low
    mask_low, mask_high, mask_v = low < DK, high < DK, offs_v < DV
    out_ptrs = out + (request.to(tl.int64) * value_heads + head) * DV + offs_v
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        tl.store(out_ptrs, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=mask_v)
        return
    num_rows = tl.load(rows + request)
    if num_rows == 0:
        return
    is_new = tl.load(seq_lens + request) <= 1
    num_replay = tl.where(is_new, 0, tl.load(replay + request))
    state_ptrs = ssm + slot * ssm_slot + head * (DK * DV) + offs_v[None, :]
    low_ptrs, high_ptrs = state_ptrs + low[:, None] * DV, state_ptrs + high[:, None] * DV
    mask_state, mask_state_high = mask_low[:, None] & mask_v[None, :], mask_high[:, None] & mask_v[None, :]
    state = tl.load(low_ptrs, mask=mask_state & (is_new == 0), other=0.0).to(tl.float32)
    state_high = tl.load(high_ptrs, mask=mask_state_high & (is_new == 0), other=0.0).to(tl.float32)
    # What a token needs is asked for one token ahead.
    requests = tl.num_programs(2)
    token = load_token(
        q, k, qk, v, beta, decay, tl.where(num_replay > 0, requests + request, request), key_head, head, low, high,
        offs_v, mask_low, mask_high, mask_v, KEY_HEADS, VALUES_PER_KEY, DK, DV, CHANNEL,
    )  # fmt: skip
    for i in range(num_replay):
        ahead = tl.where(i + 1 < num_replay, (i + 2) * requests + request, request)
        token_ahead = load_token(
            q, k, qk, v, beta, decay, ahead, key_head, head, low, high, offs_v, mask_low, mask_high, mask_v, KEY_HEADS,
            VALUES_PER_KEY, DK, DV, CHANNEL,
        )  # fmt: skip
        token_q, q_high, token_k, k_high, token_decay, decay_high, _, token_v, token_beta = token
        _, _, state, state_high = update(
            state * token_decay, state_high * decay_high, token_q, q_high, token_k, k_high, token_v, token_beta
        )  # fmt: skip
        state = rounded(state, ssm.dtype.element_ty, PAIRS)
        state_high = rounded(state_high, ssm.dtype.element_ty, PAIRS)
        token = token_ahead
    for row in range(num_rows):
        token_ahead = load_token(
            q, k, qk, v, beta, decay, request + tl.minimum(row + 1, num_rows - 1), key_head, head, low, high, offs_v,
            mask_low, mask_high, mask_v, KEY_HEADS, VALUES_PER_KEY, DK, DV, CHANNEL,
        )  # fmt: skip
        token_q, q_high, token_k, k_high, token_decay, decay_high, token_qk, token_v, token_beta = token
        q_state, delta, state, state_high = update(
            state * token_decay, state_high * decay_high, token_q, q_high, token_k, k_high, token_v, token_beta
        )  # fmt: skip
        if row == 0:
            tl.store(low_ptrs, state.to(ssm.dtype.element_ty), mask=mask_state)
            tl.store(high_ptrs, state_high.to(ssm.dtype.element_ty), mask=mask_state_high)
        state = rounded(state, ssm.dtype.element_ty, PAIRS)
        state_high = rounded(state_high, ssm.dtype.element_ty, PAIRS)
        o = tl.fma(token_qk, delta, q_state)
        tl.store(out_ptrs + row * (value_heads * DV), o.to(out.dtype.element_ty), mask=mask_v)
        token = token_ahead

    x_ptr, conv_state = qkv + request.to(tl.int64) * qkv_row, conv + slot * conv_slot
    draft_x = draft_qkv + slot * draft_qkv_slot
    for block in range(head * tl.num_programs(0) + v_block, tl.cdiv(conv_dim, 128), value_heads * tl.num_programs(0)):
        channel = block * 128 + tl.arange(0, 128)
        keep_inputs(
            num_rows, num_replay, x_ptr, qkv_row, draft_x, conv_state, channel, channel < conv_dim, is_new, conv_row,
            WIDTH, conv_dim, DRAFTS,
        )  # fmt: skip
    if v_block == 0:
        draft = tl.arange(0, DRAFTS)
        is_draft = draft < num_rows - 1
        b_ptrs = b + (request + draft + 1).to(tl.int64) * b_row + head * b_head
        tl.store(
            draft_b + slot * draft_b_slot + draft * value_heads + head,
            tl.load(b_ptrs, mask=is_draft, other=0.0), mask=is_draft,
        )  # fmt: skip
        a_ptrs, draft_a_ptrs = a + (request + draft + 1).to(tl.int64) * a_row, draft_a + slot * draft_a_slot
        if CHANNEL:
            offs_k = tl.arange(0, BLOCK_K)[None, :]
            rate, has_rate = head * DK + offs_k, is_draft[:, None] & (offs_k < DK)
            new_a = tl.load(a_ptrs[:, None] + rate * a_rate, mask=has_rate, other=0.0)
            tl.store(draft_a_ptrs + draft[:, None] * rates + rate, new_a, mask=has_rate)
        else:
            new_a = tl.load(a_ptrs + head * a_rate, mask=is_draft, other=0.0)
            tl.store(draft_a_ptrs + draft * rates + head, new_a, mask=is_draft)


def verify(
    spec: GdnSpec, tensors: VerifyTensors, slots: torch.Tensor, seq_lens: torch.Tensor, pools: Any, qkv: torch.Tensor,
    b: torch.Tensor, a: torch.Tensor, layer: Any, out: torch.Tensor, launch: Any = None,
) -> None:  # fmt: skip
    """As `triton_decode.decode` of B requests, of which some are the drafts of others. `tensors`: which ones."""
    weight, bias, a_log, dt_bias = layer
    conv, ssm = pools["conv"], pools["ssm"]
    drafts = [pools[name] for name in ("draft_qkv", "draft_b", "draft_a")]
    # Drafts are replayed from what is kept of them: it has to be what a plain decode reads.
    assert {t.dtype for t in (qkv, b, a, *drafts)} == {conv.dtype}, "activations of another type than the conv state"
    assert all(one[0].is_contiguous() for one in drafts)
    chip = chip_of(qkv.device)
    launch = launch or config(chip, spec.k_head_dim, spec.v_head_dim)
    requests, kinds = len(slots), 1 + spec.max_drafts

    def of_tokens(*shape: int) -> torch.Tensor:
        return torch.empty((kinds, requests, *shape), dtype=torch.float32, device=qkv.device)

    q, k = (of_tokens(spec.num_k_heads, spec.k_head_dim) for _ in range(2))
    qk, v = of_tokens(spec.num_k_heads), of_tokens(spec.num_v_heads, spec.v_head_dim)
    beta, decay = of_tokens(spec.num_v_heads), of_tokens(spec.decay_dim)
    sizes = {
        "KEY_HEADS": spec.num_k_heads, "VALUES_PER_KEY": spec.num_v_heads // spec.num_k_heads, "DK": spec.k_head_dim,
        "DV": spec.v_head_dim, "WIDTH": spec.conv_width, "CHANNEL": spec.channel_decay,
    }  # fmt: skip
    gates = (b.stride(0), b.stride(1), a.stride(0), a.stride(1))
    kept = [one.stride(0) for one in drafts]
    tokens_kernel[(spec.num_k_heads, requests, kinds)](
        qkv, b, a, weight, weight if bias is None else bias, a_log, dt_bias, conv, *drafts, q, k, qk, v, beta, decay,
        slots, seq_lens, tensors.first_row, tensors.num_rows, tensors.replay, qkv.stride(0), *gates, weight.stride(0),
        weight.stride(1), conv.stride(0), conv.stride(1), *kept, spec.k_head_dim**-0.5, 1e-6, BIAS=bias is not None,
        **sizes, **launch | {"BLOCK_V": max(16, next_power_of_2(spec.v_head_dim))},
    )  # fmt: skip
    verify_kernel[(cdiv(spec.v_head_dim, launch["BLOCK_V"]), spec.num_v_heads, requests)](
        q, k, qk, v, beta, decay, qkv, b, a, conv, ssm, *drafts, out, slots, seq_lens, tensors.num_rows,
        tensors.replay, qkv.stride(0), *gates, conv.stride(0), conv.stride(1), ssm.stride(0), *kept,
        DRAFTS=next_power_of_2(spec.max_drafts), PAIRS=_in_pairs(chip, ssm.dtype), **sizes, **launch,
    )  # fmt: skip


def _in_pairs(chip: Chip, dtype: torch.dtype) -> bool:
    return chip.vendor == "nvidia" and dtype == torch.bfloat16


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The released size, with a decay per head and per channel. How many drafts there are is an argument."""
    launch = config(chip, 128, 128)
    found = []
    for channel, state in ((False, torch.float32), (False, torch.bfloat16), (True, torch.float32)):
        pointers = ("qkv", "b", "a", "conv", "out", "draft_qkv", "draft_b", "draft_a")
        read = ("q", "k", "qk", "v", "beta", "decay")
        signature = dict.fromkeys(pointers, "*bf16:16") | dict.fromkeys(read, "*fp32:16")
        signature |= dict.fromkeys((f"{name}_out" for name in read), "*fp32:16") | {"scale": "fp32", "eps": "fp32"}
        signature |= {"ssm": "*bf16:16" if state == torch.bfloat16 else "*fp32:16", "slots": "*i64:16"}
        signature |= dict.fromkeys(("weight", "bias", "A_log", "dt_bias"), "*fp32:16")
        signature |= dict.fromkeys(("seq_lens", "first_row", "rows", "replay"), "*i32:16")
        strides = ("qkv_row", "weight_w", "conv_slot", "conv_row", "ssm_slot")
        signature |= dict.fromkeys((*strides, "draft_qkv_slot", "draft_b_slot", "draft_a_slot"), "i32:16")
        signature |= dict.fromkeys(("b_row", "b_head", "a_row", "a_rate", "weight_channel"), "i32")
        sizes = {"KEY_HEADS": 16, "VALUES_PER_KEY": 2, "DK": 128, "DV": 128, "WIDTH": 4, "CHANNEL": channel}
        sizes["BLOCK_K"] = launch["BLOCK_K"]
        name = f"{' by channel' if channel else ''}{' bf16' if state == torch.bfloat16 else ''}"
        made = [(verify_kernel, "", {"BLOCK_V": launch["BLOCK_V"], "DRAFTS": 4, "PAIRS": _in_pairs(chip, state)})]
        if state == torch.float32:
            made.append((tokens_kernel, " tokens", {"BLOCK_V": 128, "BIAS": False}))
        for kernel, part, more in made:
            constants = sizes | more
            found.append(
                Specialization(f"gdn verify{part}{name}", kernel, signature, constants, launch["num_warps"], 1)
            )
    return found
