"""Decode of a verify step, fused: replay of the accepted drafts, the new tokens, and the conv state, in one launch.

A program owns BLOCK_V value channels of one value head of one sequence. It reads that part of the state once, replays
the drafts of the step before that turned out to be right, takes the sequence's first new token, stores the state, and
goes on over the drafts without storing it. Programs of the rows of drafts end at once. A token's arithmetic is that of
`triton_decode`, in its order and with the state rounded to its stored type between tokens, so that the results have the
bits of plain decoding.

Every program of a key head reads the conv state and the kept inputs of q and k, and the programs of a value head read
its kept b and a. The last of them to be done overwrites these; an integer counter finds the last one.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
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
from allotrope.attention.gdn.triton_gates import decayed, silu
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv


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
def load_taps(weight, bias, channel, mask_c, weight_channel, weight_w, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """The convolution's weights of `channel`, oldest input first, then its bias."""
    taps = ()
    for j in tl.static_range(WIDTH):
        pointer = weight + channel * weight_channel + j * weight_w
        taps = taps + (tl.load(pointer, mask=mask_c, other=0.0).to(tl.float32),)
    if BIAS:
        taps = taps + (tl.load(bias + channel, mask=mask_c, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def load_window(conv_state, channel, mask_c, is_new, conv_row, WIDTH: tl.constexpr):
    """The convolution's inputs before the first token, oldest first: zeros if `is_new`."""
    window = ()
    for j in tl.static_range(WIDTH - 1):
        old = tl.load(conv_state + j * conv_row + channel, mask=mask_c & (is_new == 0), other=0.0)
        window = window + (old,)
    return window


@triton.jit
def shifted(window, x, WIDTH: tl.constexpr):
    """`window` without its oldest input, and with `x`."""
    moved = ()
    for j in tl.static_range(1, WIDTH - 1):
        moved = moved + (window[j],)
    return moved + (x,)


@triton.jit
def conv_token(window, x, taps, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """Convolution and SiLU of the token of input `x`, as `triton_gates.conv_step`."""
    y = tl.fma(x.to(tl.float32), taps[WIDTH - 1], window[0].to(tl.float32) * taps[0])
    for j in tl.static_range(1, WIDTH - 1):
        y = tl.fma(window[j].to(tl.float32), taps[j], y)
    if BIAS:
        y += taps[WIDTH]
    return silu(y)


@triton.jit
def keep_inputs(
    num_rows, num_replay, x_ptr, x_row, draft_ptr, conv_state, channel, mask_c, is_new, conv_row,
    WIDTH: tl.constexpr, CONV_DIM: tl.constexpr,
):  # fmt: skip
    """Store the conv state after the first new token, and the drafts' inputs. All readers of the channels are done."""
    for j in tl.static_range(WIDTH - 1):
        # Rows move towards the oldest one: none is read after it is overwritten.
        x = load_input(
            num_replay - (WIDTH - 2) + j, num_replay, x_ptr, x_row, draft_ptr, conv_state, channel, mask_c, is_new,
            conv_row, WIDTH, CONV_DIM,
        )  # fmt: skip
        tl.debug_barrier()
        tl.store(conv_state + j * conv_row + channel, x, mask=mask_c)
    tl.debug_barrier()
    for draft in range(num_rows - 1):
        x = tl.load(x_ptr + (draft + 1) * x_row + channel, mask=mask_c, other=0.0)
        tl.store(draft_ptr + draft * CONV_DIM + channel, x, mask=mask_c)


@pdl_jit
def verify_kernel(
    qkv, b, a, weight, bias, A_log, dt_bias, conv, ssm, draft_qkv, draft_b, draft_a, out, slots, seq_lens, rows, replay,
    arrivals, qkv_row, b_row, b_head, a_row, a_rate, weight_channel, weight_w, conv_slot, conv_row, ssm_slot,
    draft_qkv_slot, draft_b_slot, draft_a_slot, scale, eps,
    KEY_HEADS: tl.constexpr, VALUES_PER_KEY: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr, CHANNEL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`rows`, `replay`: `num_rows` and `replay` of `VerifyTensors`. `draft_qkv`, `draft_b`, `draft_a`: the kept inputs
    of drafts, contiguous in a slot. `arrivals`: [B, KEY_HEADS] int32 counters, zeros before and after. Other arguments:
    as in `reference.run`.
    """
    gdc_wait()
    gdc_launch_dependents()
    v_block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // VALUES_PER_KEY
    value_heads: tl.constexpr = KEY_HEADS * VALUES_PER_KEY
    conv_dim: tl.constexpr = 2 * KEY_HEADS * DK + value_heads * DV
    rates: tl.constexpr = value_heads * DK if CHANNEL else value_heads
    offs_k, offs_v = tl.arange(0, BLOCK_K), v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < DK, offs_v < DV
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
    state_ptrs = ssm + slot * ssm_slot + head * (DK * DV) + offs_k[:, None] * DV + offs_v[None, :]
    mask_state = mask_k[:, None] & mask_v[None, :]
    state = tl.load(state_ptrs, mask=mask_state & (is_new == 0), other=0.0).to(tl.float32)

    x_ptr, conv_state = qkv + request.to(tl.int64) * qkv_row, conv + slot * conv_slot
    b_ptr, a_ptr = b + request.to(tl.int64) * b_row, a + request.to(tl.int64) * a_row
    draft_x, draft_b_ptr = draft_qkv + slot * draft_qkv_slot, draft_b + slot * draft_b_slot
    draft_a_ptr = draft_a + slot * draft_a_slot
    q_channel = key_head * DK + offs_k
    k_channel = KEY_HEADS * DK + q_channel
    v_channel = 2 * KEY_HEADS * DK + head * DV + offs_v
    q_taps = load_taps(weight, bias, q_channel, mask_k, weight_channel, weight_w, WIDTH, BIAS)
    k_taps = load_taps(weight, bias, k_channel, mask_k, weight_channel, weight_w, WIDTH, BIAS)
    v_taps = load_taps(weight, bias, v_channel, mask_v, weight_channel, weight_w, WIDTH, BIAS)
    q_window = load_window(conv_state, q_channel, mask_k, is_new, conv_row, WIDTH)
    k_window = load_window(conv_state, k_channel, mask_k, is_new, conv_row, WIDTH)
    v_window = load_window(conv_state, v_channel, mask_v, is_new, conv_row, WIDTH)
    for token in range(num_replay):
        kept = draft_x + token * conv_dim
        q_x = tl.load(kept + q_channel, mask=mask_k, other=0.0)
        k_x = tl.load(kept + k_channel, mask=mask_k, other=0.0)
        v_x = tl.load(kept + v_channel, mask=mask_v, other=0.0)
        k = conv_token(k_window, k_x, k_taps, WIDTH, BIAS)
        v = conv_token(v_window, v_x, v_taps, WIDTH, BIAS)
        q_window, k_window, v_window = (
            shifted(q_window, q_x, WIDTH), shifted(k_window, k_x, WIDTH), shifted(v_window, v_x, WIDTH)
        )  # fmt: skip
        k = tl.where(mask_k, k, 0.0)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
        beta = tl.sigmoid(tl.load(draft_b_ptr + token * value_heads + head).to(tl.float32))
        state = decayed(state, draft_a_ptr + token * rates, 1, A_log, dt_bias, head, offs_k, mask_k, DK, CHANNEL)
        k_state = tl.sum(state * k[:, None], axis=0)
        delta = beta * (v - k_state)
        state += k[:, None] * delta[None, :]
        state = state.to(ssm.dtype.element_ty).to(tl.float32)
    for row in range(num_rows):
        new = x_ptr + row * qkv_row
        q_x = tl.load(new + q_channel, mask=mask_k, other=0.0)
        k_x = tl.load(new + k_channel, mask=mask_k, other=0.0)
        v_x = tl.load(new + v_channel, mask=mask_v, other=0.0)
        q = conv_token(q_window, q_x, q_taps, WIDTH, BIAS)
        k = conv_token(k_window, k_x, k_taps, WIDTH, BIAS)
        v = conv_token(v_window, v_x, v_taps, WIDTH, BIAS)
        q_window, k_window, v_window = (
            shifted(q_window, q_x, WIDTH), shifted(k_window, k_x, WIDTH), shifted(v_window, v_x, WIDTH)
        )  # fmt: skip
        q = tl.where(mask_k, q, 0.0)
        k = tl.where(mask_k, k, 0.0)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
        beta = tl.sigmoid(tl.load(b_ptr + row * b_row + head * b_head).to(tl.float32))
        state = decayed(state, a_ptr + row * a_row, a_rate, A_log, dt_bias, head, offs_k, mask_k, DK, CHANNEL)
        k_state = tl.sum(state * k[:, None], axis=0)
        q_state = tl.sum(state * q[:, None], axis=0)
        delta = beta * (v - k_state)
        state += k[:, None] * delta[None, :]
        stored = state.to(ssm.dtype.element_ty)
        if row == 0:
            tl.store(state_ptrs, stored, mask=mask_state)
        state = stored.to(tl.float32)
        o = q_state + tl.sum(q * k, axis=0) * delta
        tl.store(out_ptrs + row * (value_heads * DV), o.to(out.dtype.element_ty), mask=mask_v)

    # All threads have read the conv state and the kept inputs, also for the last draft.
    tl.debug_barrier()
    counter = arrivals + request * KEY_HEADS + key_head
    arrived = tl.atomic_add(counter, 1, sem="release")
    keep_inputs(
        num_rows, num_replay, x_ptr, qkv_row, draft_x, conv_state, v_channel, mask_v, is_new, conv_row, WIDTH, conv_dim
    )  # fmt: skip
    if arrived == VALUES_PER_KEY * tl.num_programs(0) - 1:
        keep_inputs(
            num_rows, num_replay, x_ptr, qkv_row, draft_x, conv_state, q_channel, mask_k, is_new, conv_row, WIDTH,
            conv_dim,
        )  # fmt: skip
        keep_inputs(
            num_rows, num_replay, x_ptr, qkv_row, draft_x, conv_state, k_channel, mask_k, is_new, conv_row, WIDTH,
            conv_dim,
        )  # fmt: skip
        for draft in range(num_rows - 1):
            for i in tl.static_range(VALUES_PER_KEY):
                value_head = key_head * VALUES_PER_KEY + i
                new_b = tl.load(b_ptr + (draft + 1) * b_row + value_head * b_head)
                tl.store(draft_b_ptr + draft * value_heads + value_head, new_b)
                if CHANNEL:
                    rate = value_head * DK + offs_k
                    new_a = tl.load(a_ptr + (draft + 1) * a_row + rate * a_rate, mask=mask_k, other=0.0)
                    tl.store(draft_a_ptr + draft * rates + rate, new_a, mask=mask_k)
                else:
                    new_a = tl.load(a_ptr + (draft + 1) * a_row + value_head * a_rate)
                    tl.store(draft_a_ptr + draft * rates + value_head, new_a)
        tl.store(counter, 0)


def verify(
    spec: GdnSpec, tensors: VerifyTensors, slots: torch.Tensor, seq_lens: torch.Tensor, arrivals: torch.Tensor,
    pools: Any, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, layer: Any, out: torch.Tensor, launch: Any = None,
) -> None:  # fmt: skip
    """As `triton_decode.decode` of B requests, of which some are the drafts of others. `tensors`: which ones."""
    weight, bias, a_log, dt_bias = layer
    conv, ssm = pools["conv"], pools["ssm"]
    drafts = [pools[name] for name in ("draft_qkv", "draft_b", "draft_a")]
    # Drafts are replayed from what is kept of them: it has to be what a plain decode reads.
    assert {t.dtype for t in (qkv, b, a)} == {conv.dtype}, "activations of another type than the conv state"
    assert all(one[0].is_contiguous() for one in drafts)
    launch = launch or config(chip_of(qkv.device), spec.k_head_dim, spec.v_head_dim)
    grid = (cdiv(spec.v_head_dim, launch["BLOCK_V"]), spec.num_v_heads, len(slots))
    verify_kernel[grid](
        qkv, b, a, weight, weight if bias is None else bias, a_log, dt_bias, conv, ssm, *drafts, out, slots, seq_lens,
        tensors.num_rows, tensors.replay, arrivals, qkv.stride(0), b.stride(0), b.stride(1), a.stride(0), a.stride(1),
        weight.stride(0), weight.stride(1), conv.stride(0), conv.stride(1), ssm.stride(0),
        *(one.stride(0) for one in drafts), spec.k_head_dim**-0.5, 1e-6,
        KEY_HEADS=spec.num_k_heads, VALUES_PER_KEY=spec.num_v_heads // spec.num_k_heads, DK=spec.k_head_dim,
        DV=spec.v_head_dim, WIDTH=spec.conv_width, CHANNEL=spec.channel_decay, BIAS=bias is not None, **launch,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The released size, with a decay per head and per channel. How many drafts there are is an argument."""
    launch = config(chip, 128, 128)
    found = []
    for channel in (False, True):
        pointers = ("qkv", "b", "a", "conv", "out", "draft_qkv", "draft_b", "draft_a")
        signature = dict.fromkeys(pointers, "*bf16:16") | {"ssm": "*fp32:16", "scale": "fp32", "eps": "fp32"}
        signature |= dict.fromkeys(("weight", "bias", "A_log", "dt_bias"), "*fp32:16") | {"slots": "*i64:16"}
        signature |= dict.fromkeys(("seq_lens", "rows", "replay", "arrivals"), "*i32:16")
        strides = ("qkv_row", "weight_w", "conv_slot", "conv_row", "ssm_slot")
        signature |= dict.fromkeys((*strides, "draft_qkv_slot", "draft_b_slot", "draft_a_slot"), "i32:16")
        signature |= dict.fromkeys(("b_row", "b_head", "a_row", "a_rate", "weight_channel"), "i32")
        constants = {
            "KEY_HEADS": 16,
            "VALUES_PER_KEY": 2,
            "DK": 128,
            "DV": 128,
            "WIDTH": 4,
            "CHANNEL": channel,
            "BIAS": False,
        }
        constants |= {"BLOCK_K": launch["BLOCK_K"], "BLOCK_V": launch["BLOCK_V"]}
        name = f"gdn verify{' by channel' if channel else ''}"
        # With more warps nothing would spill, but sums over key channels would have another order than in a decode.
        spills = 40 if channel else 0
        found.append(Specialization(name, verify_kernel, signature, constants, launch["num_warps"], 1, spills))
    return found
