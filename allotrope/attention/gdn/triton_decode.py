"""Recurrent decode, fused: convolution, norms, gates, and the in-place update of the state, in one launch.

A program owns BLOCK_V value channels of one value head of one request: it reads and writes that part of the state once.
Every program of a key head computes the convolution of q and k. The last of them to read the conv state updates it; an
integer counter finds the last one, so results do not depend on the order.

With S the state before the token, o = (e^g S)^T q + (k . q) d needs no second pass over the new state.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,misc"
from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.triton_gates import (
    conv_token,
    decay_of,
    dot,
    load_a,
    load_rates,
    load_taps,
    load_window,
    normalized,
    shifted,
    store_window,
    update,
)
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2


@pdl_jit
def decode_kernel(
    qkv, b, a, weight, bias, A_log, dt_bias, conv, ssm, out, slots, seq_lens, arrivals,
    qkv_row, b_row, b_head, a_row, a_rate, weight_channel, weight_w, conv_slot, conv_row, ssm_slot, scale, eps,
    KEY_HEADS: tl.constexpr, VALUES_PER_KEY: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr, CHANNEL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`arrivals`: [B, KEY_HEADS] int32 counters, zeros before and after. Other arguments: as in `reference.run`."""
    gdc_wait()
    gdc_launch_dependents()
    v_block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // VALUES_PER_KEY
    low, offs_v = tl.arange(0, BLOCK_K // 2), v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    high = BLOCK_K // 2 + low
    mask_low, mask_high, mask_v = low < DK, high < DK, offs_v < DV
    out_ptrs = out + (request.to(tl.int64) * KEY_HEADS * VALUES_PER_KEY + head) * DV + offs_v
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        tl.store(out_ptrs, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=mask_v)
        return
    is_new = tl.load(seq_lens + request) <= 1
    # Everything is asked for before anything is waited for.
    state_ptrs = ssm + slot * ssm_slot + head * (DK * DV) + offs_v[None, :]
    low_ptrs, high_ptrs = state_ptrs + low[:, None] * DV, state_ptrs + high[:, None] * DV
    mask_state, mask_state_high = mask_low[:, None] & mask_v[None, :], mask_high[:, None] & mask_v[None, :]
    state = tl.load(low_ptrs, mask=mask_state & (is_new == 0), other=0.0).to(tl.float32)
    state_high = tl.load(high_ptrs, mask=mask_state_high & (is_new == 0), other=0.0).to(tl.float32)
    x_ptr, conv_state = qkv + request.to(tl.int64) * qkv_row, conv + slot * conv_slot
    q_low, q_high = key_head * DK + low, key_head * DK + high
    k_low, k_high = KEY_HEADS * DK + q_low, KEY_HEADS * DK + q_high
    v_channel = 2 * KEY_HEADS * DK + head * DV + offs_v
    channels = (q_low, q_high, k_low, k_high, v_channel)
    masks = (mask_low, mask_high, mask_low, mask_high, mask_v)
    x, windows, taps = (), (), ()
    for i in tl.static_range(5):
        x += (tl.load(x_ptr + channels[i], mask=masks[i], other=0.0),)
        windows += (load_window(conv_state, channels[i], masks[i], is_new, conv_row, WIDTH),)
        taps += (load_taps(weight, bias, channels[i], masks[i], weight_channel, weight_w, WIDTH, BIAS),)
    token_b = tl.load(b + request.to(tl.int64) * b_row + head * b_head)
    a_ptr = a + request.to(tl.int64) * a_row
    token_a, token_a_high = load_a(a_ptr, a_rate, head, low, high, mask_low, mask_high, DK, CHANNEL)
    A, dt, dt_high = load_rates(A_log, dt_bias, head, low, high, mask_low, mask_high, DK, CHANNEL)

    convolved = ()
    for i in tl.static_range(5):
        convolved += (tl.where(masks[i], conv_token(windows[i], x[i], taps[i], WIDTH, BIAS), 0.0),)
    q, qh, k, kh, v = convolved
    q, qh = normalized(q, qh, scale, eps)
    k, kh = normalized(k, kh, 1.0, eps)
    # All threads have read the conv state, and none has stored anything: the release orders nothing else.
    tl.debug_barrier()
    counter = arrivals + request * KEY_HEADS + key_head
    arrived = tl.atomic_add(counter, 1, sem="release")

    decay = decay_of(token_a, A, dt)
    if CHANNEL:
        state *= decay[:, None]
        state_high *= decay_of(token_a_high, A, dt_high)[:, None]
    else:
        state *= decay
        state_high *= decay
    q_state, delta, state, state_high = update(
        state, state_high, q, qh, k, kh, v, tl.sigmoid(token_b.to(tl.float32))
    )  # fmt: skip
    tl.store(low_ptrs, state.to(ssm.dtype.element_ty), mask=mask_state)
    tl.store(high_ptrs, state_high.to(ssm.dtype.element_ty), mask=mask_state_high)
    tl.store(out_ptrs, tl.fma(dot(q, k, qh, kh), delta, q_state).to(out.dtype.element_ty), mask=mask_v)

    store_window(conv_state, v_channel, mask_v, shifted(windows[4], x[4], WIDTH), conv_row, WIDTH)
    if arrived == VALUES_PER_KEY * tl.num_programs(0) - 1:
        for i in tl.static_range(4):
            store_window(conv_state, channels[i], masks[i], shifted(windows[i], x[i], WIDTH), conv_row, WIDTH)
        tl.store(counter, 0)


def config(chip: Chip, key_dim: int, value_dim: int) -> dict[str, int]:
    """Launch parameters: a small tile of the state, so that a multiprocessor holds many programs. A warp that owns all
    key channels of its values adds them up without waiting for another."""
    warps = 2 if chip.vendor == "amd" else 1
    block_k = max(16, next_power_of_2(key_dim))
    block_v = min(max(16, next_power_of_2(value_dim)), max(16, warps * 4096 // block_k))
    return {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": warps, "num_stages": 1}


def decode(
    spec: GdnSpec, arrivals: torch.Tensor, slots: torch.Tensor, seq_lens: torch.Tensor,
    pools: Any, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, layer: Any, out: torch.Tensor, launch: Any = None,
) -> None:  # fmt: skip
    """One step of the recurrence for each of B requests.

    `arrivals`: [B, nk] int32 zeros. `slots`: [B] int64. `seq_lens`: [B] int32. `pools`: "conv", "ssm". `qkv`, `b`, `a`:
    of B tokens. `layer`: (conv_weight, conv_bias, A_log, dt_bias). `out`: [B, nv, dv], overwritten. `launch`: replaces
    the result of `config`.
    """
    weight, bias, a_log, dt_bias = layer
    conv, ssm = pools["conv"], pools["ssm"]
    launch = launch or config(chip_of(qkv.device), spec.k_head_dim, spec.v_head_dim)
    grid = (cdiv(spec.v_head_dim, launch["BLOCK_V"]), spec.num_v_heads, len(slots))
    decode_kernel[grid](
        qkv, b, a, weight, weight if bias is None else bias, a_log, dt_bias, conv, ssm, out, slots, seq_lens, arrivals,
        qkv.stride(0), b.stride(0), b.stride(1), a.stride(0), a.stride(1), weight.stride(0), weight.stride(1),
        conv.stride(0), conv.stride(1), ssm.stride(0), spec.k_head_dim**-0.5, 1e-6,
        KEY_HEADS=spec.num_k_heads, VALUES_PER_KEY=spec.num_v_heads // spec.num_k_heads, DK=spec.k_head_dim,
        DV=spec.v_head_dim, WIDTH=spec.conv_width, CHANNEL=spec.channel_decay, BIAS=bias is not None, **launch,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The released size, with a decay per head and per channel."""
    launch = config(chip, 128, 128)
    found = []
    for channel in (False, True):
        signature = dict.fromkeys(("qkv", "b", "a", "conv", "out"), "*bf16:16") | {"ssm": "*fp32:16"}
        signature |= dict.fromkeys(("weight", "bias", "A_log", "dt_bias"), "*fp32:16")
        signature |= {"slots": "*i64:16", "seq_lens": "*i32:16", "arrivals": "*i32:16", "scale": "fp32", "eps": "fp32"}
        signature |= dict.fromkeys(("qkv_row", "weight_w", "conv_slot", "conv_row", "ssm_slot"), "i32:16")
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
        name = f"gdn decode{' by channel' if channel else ''}"
        found.append(Specialization(name, decode_kernel, signature, constants, launch["num_warps"], 1))
    return found
