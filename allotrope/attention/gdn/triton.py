"""The gated delta rule by Triton kernels: one launch for the decodes of a step, four for its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex, VerifyTensors, on_device
from allotrope.attention.family import CacheViews
from allotrope.attention.gdn import triton_chunk_scan, triton_conv, triton_decode, triton_verify, triton_wy
from allotrope.attention.gdn.inputs import GdnInputs
from allotrope.attention.gdn.reference import NORM_EPS
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.triton_conv import CHUNK, VALUE_SCALE
from allotrope.attention.gdn.verify import holds_drafts
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv


@dataclass(frozen=True)
class GdnTritonPlan:
    """`seq_lens`: [B] int32, `query_start`: [B + 1] int32, `slots`: [B] int64, on the device. `decodes`: requests with
    one new token, the first of the batch. `arrivals`: [decodes, nk] int32 counters, zero between launches.

    `chunks`: [N, 2] int32, for every chunk of a prompt its request and the index of its first token among the request's
    new ones; None without prompts. `first_chunk`: [B] int32, the first chunk of each request. `verify`: which
    of the decodes are drafts of others; None without speculative decoding.
    """

    seq_lens: torch.Tensor
    query_start: torch.Tensor
    slots: torch.Tensor
    decodes: int
    arrivals: torch.Tensor
    chunks: torch.Tensor | None
    first_chunk: torch.Tensor | None
    verify: VerifyTensors | None = None


def build_plan(spec: GdnSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> GdnTritonPlan:
    """Plan one step for all layers with as many key heads. `index` has the entry "state"."""
    slot_index = index["state"]
    assert isinstance(slot_index, SlotIndex)
    chunks: list[tuple[int, int]] = []
    first: list[int] = []
    for b, length in enumerate(batch.query_lens):
        first.append(len(chunks))
        if length > 1:
            chunks += [(b, start) for start in range(0, length, CHUNK)]
    arrivals = batch.cleared(batch.num_decodes, spec.num_k_heads)
    tables = [on_device(rows, torch.int32, batch.device) for rows in (chunks, first)] if chunks else []
    return GdnTritonPlan(
        batch.tensors.seq_lens,
        batch.tensors.query_start,
        slot_index.slots,
        batch.num_decodes,
        arrivals,
        tables[0] if tables else None,
        tables[1] if tables else None,
        batch.verify_tensors if holds_drafts(spec, batch) else None,
    )


def run(spec: GdnSpec, plan: GdnTritonPlan, caches: CacheViews, inputs: GdnInputs) -> torch.Tensor:
    """As `reference.run`."""
    pools, qkv, b, a = caches["state"], inputs.qkv, inputs.b, inputs.a
    assert qkv.stride(1) == 1 and pools["ssm"][0].is_contiguous() and pools["conv"].stride(2) == 1
    layer = (inputs.conv_weight, inputs.conv_bias, inputs.A_log, inputs.dt_bias)
    out = qkv.new_empty((qkv.shape[0], spec.num_v_heads, spec.v_head_dim))
    if plan.decodes:
        decodes = (plan.slots[: plan.decodes], plan.seq_lens, pools, qkv, b, a, layer, out)
        if plan.verify is None:
            triton_decode.decode(spec, plan.arrivals, *decodes)
        else:
            triton_verify.verify(spec, plan.verify, *decodes)
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
    """Run the prompts, which follow the decodes. `layer`: (conv_weight, conv_bias, A_log, dt_bias)."""
    assert plan.chunks is not None
    weight, bias, a_log, dt_bias = layer
    conv, ssm, chunks = pools["conv"], pools["ssm"], plan.chunks
    chip = chip_of(qkv.device)
    heads, tokens = spec.num_v_heads, qkv.shape[0]
    is_fp32 = qkv.dtype != torch.bfloat16
    # Type of the tensors between the kernels: see triton_conv.
    dtype = torch.float32 if is_fp32 else torch.float16
    value_scale = 1.0 if is_fp32 else VALUE_SCALE
    conv_out = qkv.new_empty(tokens, spec.conv_dim, dtype=dtype)
    sizes = {"KEY_HEADS": spec.num_k_heads, "VALUE_HEADS": heads, "DK": spec.k_head_dim, "DV": spec.v_head_dim}
    launch = triton_conv.config(chip, max(spec.k_head_dim, spec.v_head_dim))
    triton_conv.conv_kernel[(2 * spec.num_k_heads + heads, len(chunks) * (CHUNK // launch["TOKENS"]))](
        qkv, weight, weight if bias is None else bias, conv, conv_out, chunks, plan.query_start, plan.seq_lens,
        plan.slots, qkv.stride(0), weight.stride(0), weight.stride(1), conv.stride(0), conv.stride(1),
        spec.k_head_dim**-0.5, NORM_EPS, 1.0 / value_scale, CHUNK=CHUNK, WIDTH=spec.conv_width, BIAS=bias is not None,
        **sizes, **launch,
    )  # fmt: skip
    # The prompts' slots, lengths and chunks begin behind those of the decodes.
    begin = plan.decodes
    start, lens, slots = plan.query_start[begin:], plan.seq_lens[begin:], plan.slots[begin:]
    triton_conv.update_conv_state_kernel[(len(slots), cdiv(spec.conv_dim, 1024))](
        qkv, conv, start, lens, slots, qkv.stride(0), conv.stride(0), conv.stride(1), spec.conv_dim,
        WIDTH=spec.conv_width, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    Akk_inv, Aqk = (qkv.new_empty(tokens, heads, CHUNK, dtype=dtype) for _ in range(2))
    launch = triton_wy.config(chip, spec.k_head_dim, spec.channel_decay)
    strides = (b.stride(0), b.stride(1), a.stride(0), a.stride(1))
    precision = _precision(chip, is_fp32, spec.channel_decay)
    unused = plan.query_start
    exp_g = decay_to_end = k_exp_g = q_exp_g = k_to_end = exp_g_last = unused
    if spec.channel_decay:
        k_exp_g, q_exp_g, k_to_end = (qkv.new_empty(tokens, heads, spec.k_head_dim, dtype=dtype) for _ in range(3))
        exp_g_last = qkv.new_empty(len(chunks), heads, spec.k_head_dim, dtype=torch.float32)
        triton_wy.channel_wy_kernel[(heads, len(chunks))](
            conv_out, b, a, a_log, dt_bias, Akk_inv, Aqk, k_exp_g, q_exp_g, k_to_end, exp_g_last, chunks,
            plan.query_start, plan.slots, *strides, CHUNK=CHUNK, **sizes, **precision, **launch,
        )  # fmt: skip
    else:
        exp_g, decay_to_end = (qkv.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2))
        triton_wy.wy_kernel[(heads, len(chunks))](
            conv_out, b, a, a_log, dt_bias, Akk_inv, Aqk, exp_g, decay_to_end, chunks, plan.query_start, plan.slots,
            *strides, CHUNK=CHUNK, **sizes, **precision, **launch,
        )  # fmt: skip
    launch = triton_chunk_scan.config(chip, spec.k_head_dim, spec.v_head_dim, not is_fp32)
    assert plan.first_chunk is not None
    triton_chunk_scan.chunk_scan_kernel[(cdiv(spec.v_head_dim, launch["BLOCK_V"]), heads, len(slots))](
        conv_out, Akk_inv, Aqk, exp_g, decay_to_end, k_exp_g, q_exp_g, k_to_end, exp_g_last, ssm, out, start, lens,
        slots, plan.first_chunk[begin:], ssm.stride(0), value_scale, CHUNK=CHUNK, CHANNEL=spec.channel_decay,
        PRECISION=precision["PRECISION"], **sizes, **launch,
    )  # fmt: skip


def _precision(chip: Chip, is_fp32: bool, channel: bool) -> dict[str, Any]:
    """Precision of the matrix products. Where the chip has tf32, fp32 products are three tf32 products. An inverse that
    is rounded to fp16 afterwards is one tf32 product, unless the kernel is large already (`channel`)."""
    if not chip.has_tf32:
        return {"PRECISION": "ieee", "INVERSE_PRECISION": "ieee"}
    return {"PRECISION": "tf32x3" if is_fp32 else "ieee", "INVERSE_PRECISION": "ieee" if is_fp32 or channel else "tf32"}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The released size, with a decay per head and per channel; the tensors between the kernels are fp16."""
    sizes = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "DK": 128, "DV": 128}
    index_types = {"chunks": "*i32:16", "query_start": "*i32:16", "seq_lens": "*i32:16", "slots": "*i64:16"}
    fp16, fp32 = "*fp16:16", "*fp32:16"
    launch = triton_conv.config(chip, 128)
    signature = index_types | {"qkv": "*bf16:16", "weight": fp32, "bias": fp32, "conv": "*bf16:16", "conv_out": fp16}
    signature |= dict.fromkeys(("scale", "eps", "value_scale"), "fp32") | {"weight_channel": "i32"}
    signature |= dict.fromkeys(("qkv_row", "weight_w", "conv_slot", "conv_row", "channels"), "i32:16")
    constants = sizes | {
        "CHUNK": CHUNK,
        "WIDTH": 4,
        "BIAS": False,
        "TOKENS": launch["TOKENS"],
        "BLOCK": launch["BLOCK"],
    }
    state_constants = {"WIDTH": 4, "BLOCK": 1024}
    made = [
        Specialization("gdn convolution", triton_conv.conv_kernel, signature, constants, launch["num_warps"], 1),
        Specialization("gdn conv state", triton_conv.update_conv_state_kernel, signature, state_constants, 4, 1),
    ]
    for channel in (False, True):
        name = " by channel" if channel else ""
        launch, precision = triton_wy.config(chip, 128, channel), _precision(chip, False, channel)
        signature = index_types | dict.fromkeys(("conv_out", "Akk_inv", "Aqk", "k_exp_g", "q_exp_g", "k_to_end"), fp16)
        signature |= {"b": "*bf16:16", "a": "*bf16:16", "A_log": fp32, "dt_bias": fp32}
        signature |= dict.fromkeys(("exp_g", "decay_to_end", "exp_g_last"), fp32)
        signature |= dict.fromkeys(("b_row", "b_head", "a_row", "a_rate"), "i32")
        constants = sizes | precision | {"CHUNK": CHUNK, "BLOCK_K": launch["BLOCK_K"]}
        kernel = triton_wy.channel_wy_kernel if channel else triton_wy.wy_kernel
        spills = 2400 if channel else 256
        made.append(Specialization(f"gdn wy{name}", kernel, signature, constants, launch["num_warps"], 1, spills))
        launch = triton_chunk_scan.config(chip, 128, 128, True)
        signature |= {
            "ssm": fp32,
            "out": "*bf16:16",
            "first_chunk": "*i32:16",
            "ssm_slot": "i32:16",
            "value_scale": "fp32",
        }
        constants = sizes | {"CHUNK": CHUNK, "CHANNEL": channel, "PRECISION": precision["PRECISION"]}
        constants |= {key: launch[key] for key in ("BLOCK_K", "BLOCK_V", "STAGES")}
        made.append(
            Specialization(
                f"gdn chunk scan{name}",
                triton_chunk_scan.chunk_scan_kernel,
                signature,
                constants,
                launch["num_warps"],
                3,
                256,
            )
        )
    return made
