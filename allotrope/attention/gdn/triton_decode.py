"""One token of a request in one launch: convolution, norms, gates, and the step of the recurrent state where it lies.

A program owns BLOCK_V value channels of one value head of one request: it reads and writes that part of the state once.
The queries' and keys' convolution is computed by every program of a key head; whichever of them is the last to have
read its kept inputs moves these on. That order is counted in integers, so results do not depend on it.

With S the state before the token, o = (e^g S)^T q + (k . q) d needs no second pass over the new state.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.triton_gates import keep_newest, newest, softplus
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2


@pdl_jit
def decode_kernel(
    qkv, b, a, weight, bias, A_log, dt_bias, conv, ssm, out, slots, seq_lens, arrivals,
    qkv_row, b_row, b_head, a_row, a_rate, weight_channel, weight_tap, conv_slot, conv_row, ssm_slot, scale, eps,
    KEY_HEADS: tl.constexpr, REPEAT: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr, CHANNEL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`arrivals`: [B, KEY_HEADS] int32, zeros before and after. The rest as `reference.run`."""
    gdc_wait()
    gdc_launch_dependents()
    part, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // REPEAT
    key, value = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < DK, value < DV
    place = out + (request.to(tl.int64) * KEY_HEADS * REPEAT + head) * DV + value
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        tl.store(place, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=in_value)
        return
    fresh = tl.load(seq_lens + request) <= 1
    cell = ssm + slot * ssm_slot + head * (DK * DV) + key[:, None] * DV + value[None, :]
    in_cell = in_key[:, None] & in_value[None, :]
    state = tl.load(cell, mask=in_cell & (fresh == 0), other=0.0).to(tl.float32)

    row, kept = qkv + request.to(tl.int64) * qkv_row, conv + slot * conv_slot
    q_channel = key_head * DK + key
    k_channel = KEY_HEADS * DK + q_channel
    v_channel = 2 * KEY_HEADS * DK + head * DV + value
    q = newest(
        row, kept, weight, bias, q_channel, in_key, fresh, conv_row, weight_channel, weight_tap, WIDTH, BIAS
    )  # fmt: skip
    k = newest(
        row, kept, weight, bias, k_channel, in_key, fresh, conv_row, weight_channel, weight_tap, WIDTH, BIAS
    )  # fmt: skip
    v = newest(
        row, kept, weight, bias, v_channel, in_value, fresh, conv_row, weight_channel, weight_tap, WIDTH, BIAS
    )  # fmt: skip
    q = tl.where(in_key, q, 0.0)
    k = tl.where(in_key, k, 0.0)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + eps)
    # The kept inputs have been read; nothing has been written yet that a release would have to wait for.
    tl.debug_barrier()
    counter = arrivals + request * KEY_HEADS + key_head
    before = tl.atomic_add(counter, 1, sem="release")

    beta = tl.sigmoid(tl.load(b + request.to(tl.int64) * b_row + head * b_head).to(tl.float32))
    rates = a + request.to(tl.int64) * a_row
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    if CHANNEL:
        at = head * DK + key
        step = tl.load(rates + at * a_rate, mask=in_key, other=0.0).to(tl.float32)
        step += tl.load(dt_bias + at, mask=in_key, other=0.0).to(tl.float32)
        state *= tl.exp(-rate * softplus(step))[:, None]
    else:
        step = tl.load(rates + head * a_rate).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        state *= tl.exp(-rate * softplus(step))
    seen_k = tl.sum(state * k[:, None], axis=0)
    seen_q = tl.sum(state * q[:, None], axis=0)
    delta = beta * (v - seen_k)
    state += k[:, None] * delta[None, :]
    tl.store(cell, state.to(ssm.dtype.element_ty), mask=in_cell)
    tl.store(place, (seen_q + tl.sum(q * k, axis=0) * delta).to(out.dtype.element_ty), mask=in_value)

    keep_newest(row, kept, v_channel, in_value, fresh, conv_row, WIDTH)
    if before == REPEAT * tl.num_programs(0) - 1:
        keep_newest(row, kept, q_channel, in_key, fresh, conv_row, WIDTH)
        keep_newest(row, kept, k_channel, in_key, fresh, conv_row, WIDTH)
        tl.store(counter, 0)


def config(chip: Chip, key_dim: int, value_dim: int) -> dict[str, int]:
    """A tile of the state that leaves room for many programs on a multiprocessor."""
    block_k = max(16, next_power_of_2(key_dim))
    block_v = min(max(16, next_power_of_2(value_dim)), max(16, 8192 // block_k))
    return {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": 2, "num_stages": 1}


def decode(
    spec: GdnSpec, slots: torch.Tensor, seq_lens: torch.Tensor, arrivals: torch.Tensor,
    pools: Any, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, layer: Any, out: torch.Tensor, launch: Any = None,
) -> None:  # fmt: skip
    """Advance one token of each of B requests.

    `slots`: [B] int64. `seq_lens`: [B] int32. `arrivals`: [B, nk] int32 zeros. `pools`: "conv", "ssm". `qkv`, `b`, `a`:
    rows of B tokens. `layer`: (conv_weight, conv_bias, A_log, dt_bias). `out`: [B, nv, dv], written. `launch`: instead
    of `config`'s.
    """
    weight, bias, a_log, dt_bias = layer
    conv, ssm = pools["conv"], pools["ssm"]
    launch = launch or config(chip_of(qkv.device), spec.k_head_dim, spec.v_head_dim)
    grid = (cdiv(spec.v_head_dim, launch["BLOCK_V"]), spec.num_v_heads, len(slots))
    decode_kernel[grid](
        qkv, b, a, weight, weight if bias is None else bias, a_log, dt_bias, conv, ssm, out, slots, seq_lens, arrivals,
        qkv.stride(0), b.stride(0), b.stride(1), a.stride(0), a.stride(1), weight.stride(0), weight.stride(1),
        conv.stride(0), conv.stride(1), ssm.stride(0), spec.k_head_dim**-0.5, 1e-6,
        KEY_HEADS=spec.num_k_heads, REPEAT=spec.num_v_heads // spec.num_k_heads, DK=spec.k_head_dim,
        DV=spec.v_head_dim, WIDTH=spec.conv_width, CHANNEL=spec.channel_decay, BIAS=bias is not None, **launch,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The released size with each kind of decay."""
    launch = config(chip, 128, 128)
    made = []
    for channel in (False, True):
        signature = dict.fromkeys(("qkv", "b", "a", "conv", "out"), "*bf16:16") | {"ssm": "*fp32:16"}
        signature |= dict.fromkeys(("weight", "bias", "A_log", "dt_bias"), "*fp32:16")
        signature |= {"slots": "*i64:16", "seq_lens": "*i32:16", "arrivals": "*i32:16", "scale": "fp32", "eps": "fp32"}
        signature |= dict.fromkeys(("qkv_row", "weight_tap", "conv_slot", "conv_row", "ssm_slot"), "i32:16")
        signature |= dict.fromkeys(("b_row", "b_head", "a_row", "a_rate", "weight_channel"), "i32")
        constants = {"KEY_HEADS": 16, "REPEAT": 2, "DK": 128, "DV": 128, "WIDTH": 4, "CHANNEL": channel, "BIAS": False}
        constants |= {"BLOCK_K": launch["BLOCK_K"], "BLOCK_V": launch["BLOCK_V"]}
        name = f"gdn decode{' by channel' if channel else ''}"
        made.append(Specialization(name, decode_kernel, signature, constants, launch["num_warps"], 1))
    return made
