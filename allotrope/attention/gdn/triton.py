"""The gated delta rule by Triton kernels: one launch for the decodes of a step, four for its prefills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex
from allotrope.attention.family import CacheViews
from allotrope.attention.gdn import triton_conv, triton_decode, triton_pairs, triton_scan
from allotrope.attention.gdn.inputs import GdnInputs
from allotrope.attention.gdn.reference import NORM_EPS
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.triton_conv import CHUNK, VALUE_SCALE
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv


@dataclass(frozen=True)
class GdnTritonPlan:
    """`seq_lens`: [B] int32, `query_start`: [B + 1] int32, `slots`: [B] int64, on the device. `decodes`: requests with
    one new token, the first of the batch. `arrivals`: [decodes, nk] int32 zeros, which kernels leave zero.

    `chunks`: [N, 2] int32, for every chunk of the other requests its request and the place of its first token among
    the request's new ones; None if there are none. `first_chunk`: [B] int32, the first one of each request.
    """

    seq_lens: torch.Tensor
    query_start: torch.Tensor
    slots: torch.Tensor
    decodes: int
    arrivals: torch.Tensor
    chunks: torch.Tensor | None
    first_chunk: torch.Tensor | None


def build_plan(spec: GdnSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> GdnTritonPlan:
    """Plan one step for all layers with as many key heads. `index` has the entry "state"."""
    where = index["state"]
    assert isinstance(where, SlotIndex)
    chunks: list[tuple[int, int]] = []
    first: list[int] = []
    for b, length in enumerate(batch.query_lens):
        first.append(len(chunks))
        if length > 1:
            chunks += [(b, place) for place in range(0, length, CHUNK)]
    arrivals = batch.cleared(batch.num_decodes, spec.num_k_heads)
    listed = (
        [torch.tensor(found, dtype=torch.int32, device=batch.device) for found in (chunks, first)] if chunks else []
    )
    return GdnTritonPlan(
        batch.tensors.seq_lens,
        batch.tensors.query_start,
        where.slots,
        batch.num_decodes,
        arrivals,
        listed[0] if listed else None,
        listed[1] if listed else None,
    )


def run(spec: GdnSpec, plan: GdnTritonPlan, caches: CacheViews, inputs: GdnInputs) -> torch.Tensor:
    """As `reference.run`."""
    pools, qkv, b, a = caches["state"], inputs.qkv, inputs.b, inputs.a
    assert qkv.stride(1) == 1 and pools["ssm"][0].is_contiguous() and pools["conv"].stride(2) == 1
    layer = (inputs.conv_weight, inputs.conv_bias, inputs.A_log, inputs.dt_bias)
    out = qkv.new_empty((qkv.shape[0], spec.num_v_heads, spec.v_head_dim))
    if plan.decodes:
        triton_decode.decode(
            spec, plan.slots[: plan.decodes], plan.seq_lens, plan.arrivals, pools, qkv, b, a, layer, out
        )
    if plan.chunks is not None:
        _prefill(spec, plan, pools, qkv, b, a, layer, out)
    return out


Layer = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def _prefill(
    spec: GdnSpec,
    plan: GdnTritonPlan,
    pools: Mapping[str, torch.Tensor],
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    layer: Layer,
    out: torch.Tensor,
) -> None:
    """Advance the requests behind the decodes. `layer`: (conv_weight, conv_bias, A_log, dt_bias)."""
    assert plan.chunks is not None
    weight, bias, a_log, dt_bias = layer
    conv, ssm, chunks = pools["conv"], pools["ssm"], plan.chunks
    chip = chip_of(qkv.device)
    heads, tokens = spec.num_v_heads, qkv.shape[0]
    exact = qkv.dtype != torch.bfloat16
    # Types of what goes from kernel to kernel: see triton_conv.
    dtype = torch.float32 if exact else torch.float16
    value_scale = 1.0 if exact else VALUE_SCALE
    mixed = qkv.new_empty(tokens, spec.conv_dim, dtype=dtype)
    sizes = {"KEY_HEADS": spec.num_k_heads, "VALUE_HEADS": heads, "DK": spec.k_head_dim, "DV": spec.v_head_dim}
    launch = triton_conv.config(chip, max(spec.k_head_dim, spec.v_head_dim))
    triton_conv.conv_kernel[(2 * spec.num_k_heads + heads, len(chunks) * (CHUNK // launch["TOKENS"]))](
        qkv, weight, weight if bias is None else bias, conv, mixed, chunks, plan.query_start, plan.seq_lens, plan.slots,
        qkv.stride(0), weight.stride(0), weight.stride(1), conv.stride(0), conv.stride(1), spec.k_head_dim**-0.5,
        NORM_EPS, 1.0 / value_scale, CHUNK=CHUNK, WIDTH=spec.conv_width, BIAS=bias is not None, **sizes, **launch,
    )  # fmt: skip
    # Requests behind the decodes: their slots, lengths and chunks start further on.
    begin = plan.decodes
    start, lens, slots = plan.query_start[begin:], plan.seq_lens[begin:], plan.slots[begin:]
    triton_conv.keep_kernel[(len(slots), cdiv(spec.conv_dim, 1024))](
        qkv, conv, start, lens, slots, qkv.stride(0), conv.stride(0), conv.stride(1), spec.conv_dim,
        WIDTH=spec.conv_width, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    mix, scores = (qkv.new_empty(tokens, heads, CHUNK, dtype=dtype) for _ in range(2))
    launch = triton_pairs.config(chip, spec.k_head_dim, spec.channel_decay)
    strides = (b.stride(0), b.stride(1), a.stride(0), a.stride(1))
    precision = _precision(chip, exact, spec.channel_decay)
    unused = plan.query_start
    grown = rest = seen = queries = keys = last = unused
    if spec.channel_decay:
        seen, queries, keys = (qkv.new_empty(tokens, heads, spec.k_head_dim, dtype=dtype) for _ in range(3))
        last = qkv.new_empty(len(chunks), heads, spec.k_head_dim, dtype=torch.float32)
        triton_pairs.channel_pairs_kernel[(heads, len(chunks))](
            mixed, b, a, a_log, dt_bias, mix, scores, seen, queries, keys, last, chunks, plan.query_start, plan.slots,
            *strides, CHUNK=CHUNK, **sizes, **precision, **launch,
        )  # fmt: skip
    else:
        grown, rest = (qkv.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2))
        triton_pairs.pairs_kernel[(heads, len(chunks))](
            mixed, b, a, a_log, dt_bias, mix, scores, grown, rest, chunks, plan.query_start, plan.slots,
            *strides, CHUNK=CHUNK, **sizes, **precision, **launch,
        )  # fmt: skip
    launch = triton_scan.config(chip, spec.k_head_dim, spec.v_head_dim, not exact)
    assert plan.first_chunk is not None
    triton_scan.scan_kernel[(cdiv(spec.v_head_dim, launch["BLOCK_V"]), heads, len(slots))](
        mixed, mix, scores, grown, rest, seen, queries, keys, last, ssm, out, start, lens, slots,
        plan.first_chunk[begin:], ssm.stride(0), value_scale, CHUNK=CHUNK, CHANNEL=spec.channel_decay,
        PRECISION=precision["PRECISION"], **sizes, **launch,
    )  # fmt: skip


def _precision(chip: Chip, exact: bool, channel: bool) -> dict[str, Any]:
    """How products are formed, where a chip has tf32: `exact` ones of fp32 as three of it, and the inverse, which is
    rounded to fp16 behind, as one, unless the kernel is large already (`channel`)."""
    if not chip.has_tf32:
        return {"PRECISION": "ieee", "INVERSE": "ieee"}
    return {"PRECISION": "tf32x3" if exact else "ieee", "INVERSE": "ieee" if exact or channel else "tf32"}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The released size with each kind of decay; values on their way are fp16."""
    sizes = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "DK": 128, "DV": 128}
    place = {"chunks": "*i32:16", "query_start": "*i32:16", "seq_lens": "*i32:16", "slots": "*i64:16"}
    half, exact = "*fp16:16", "*fp32:16"
    launch = triton_conv.config(chip, 128)
    signature = place | {"qkv": "*bf16:16", "weight": exact, "bias": exact, "conv": "*bf16:16", "mixed": half}
    signature |= dict.fromkeys(("scale", "eps", "value_scale"), "fp32") | {"weight_channel": "i32"}
    signature |= dict.fromkeys(("qkv_row", "weight_tap", "conv_slot", "conv_row", "channels"), "i32:16")
    constants = sizes | {
        "CHUNK": CHUNK,
        "WIDTH": 4,
        "BIAS": False,
        "TOKENS": launch["TOKENS"],
        "BLOCK": launch["BLOCK"],
    }
    kept = {"WIDTH": 4, "BLOCK": 1024}
    made = [
        Specialization("gdn convolution", triton_conv.conv_kernel, signature, constants, launch["num_warps"], 1),
        Specialization("gdn kept inputs", triton_conv.keep_kernel, signature, kept, 4, 1),
    ]
    for channel in (False, True):
        name = " by channel" if channel else ""
        launch, precision = triton_pairs.config(chip, 128, channel), _precision(chip, False, channel)
        signature = place | dict.fromkeys(("mixed", "mix", "scores", "seen_keys", "queries", "keys"), half)
        signature |= {"b": "*bf16:16", "a": "*bf16:16", "A_log": exact, "dt_bias": exact}
        signature |= dict.fromkeys(("grown", "rest", "last"), exact)
        signature |= dict.fromkeys(("b_row", "b_head", "a_row", "a_rate"), "i32")
        constants = sizes | precision | {"CHUNK": CHUNK, "BLOCK_K": launch["BLOCK_K"]}
        kernel = triton_pairs.channel_pairs_kernel if channel else triton_pairs.pairs_kernel
        spills = 2400 if channel else 256
        made.append(Specialization(f"gdn pairs{name}", kernel, signature, constants, launch["num_warps"], 1, spills))
        launch = triton_scan.config(chip, 128, 128, True)
        signature |= {
            "ssm": exact,
            "out": "*bf16:16",
            "first_chunk": "*i32:16",
            "ssm_slot": "i32:16",
            "value_scale": "fp32",
        }
        constants = sizes | {"CHUNK": CHUNK, "CHANNEL": channel, "PRECISION": precision["PRECISION"]}
        constants |= {key: launch[key] for key in ("BLOCK_K", "BLOCK_V", "STAGES")}
        made.append(
            Specialization(
                f"gdn scan{name}", triton_scan.scan_kernel, signature, constants, launch["num_warps"], 3, 256
            )
        )
    return made
