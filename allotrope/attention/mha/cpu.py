"""One sub-batch on a CPU by PyTorch's flash attention, a prompt in blocks of its queries.

The query heads of one KV head become rows of one matrix, so that keys are read once and never repeated. Logits and
softmax are fp32; p is rounded to the dtype of the KV cache before it multiplies the values.
"""

from __future__ import annotations

import torch

from allotrope.attention.mha.plan import SubBatch
from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.chip import Chip

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Queries of one block: small enough that a block's logits stay in the cache.
_BLOCK = 128


def rejects(spec: MhaSpec, chip: Chip) -> list[str]:
    """Why this backend cannot run a layer."""
    reasons = []
    if chip.vendor != "cpu":
        reasons.append(f"chip={chip.arch} (needs cpu)")
    if spec.softcap is not None:
        reasons.append(f"softcap={spec.softcap} (needs none)")
    if spec.value_dim != spec.head_dim:
        reasons.append(f"v_head_dim={spec.value_dim} (needs head_dim={spec.head_dim})")
    if spec.kv_dtype.itemsize == 1:
        reasons.append(f"kv_dtype={spec.kv_dtype} (needs 2 or 4 bytes)")
    return reasons


def attend(
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: SubBatch, sinks: torch.Tensor | None
) -> torch.Tensor:
    """As `reference.attend`."""
    if q.shape[1] == 1:
        bias = None if part.visible is None else part.bias(q.dtype)[:, None]
        return _decode(spec, q, k, v, bias, sinks)
    return _prefill(spec, q, k, v, part, sinks)


def _decode(
    spec: MhaSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One query token for each request. A sink scales the output by sigmoid(lse - sink). `bias`: [b, 1, 1, L]."""
    requests, _, heads, dim = q.shape
    num_kv_heads = k.shape[2]
    q_rows = q.view(requests, num_kv_heads, heads // num_kv_heads, dim)
    out, lse = _flash(q_rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=spec.scale)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float().view(1, num_kv_heads, heads // num_kv_heads))[..., None].to(
            out.dtype
        )
    return out.reshape(requests, 1, heads, dim)


def _prefill(
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: SubBatch, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Block after block of queries, each against the keys that any of its queries attends to."""
    requests, queries, heads, dim = q.shape
    num_kv_heads, length = k.shape[2], k.shape[1]
    q_per_kv = heads // num_kv_heads
    q_rows, keys, values = q.view(requests, queries, num_kv_heads, q_per_kv, dim), k.transpose(1, 2), v.transpose(1, 2)
    out = torch.empty_like(q_rows, memory_format=torch.contiguous_format)
    for start in range(0, queries, _BLOCK):
        size = min(_BLOCK, queries - start)
        kv_len = length if part.visible is not None else length - queries + start + size
        block = (
            q_rows[:, start : start + size].permute(0, 2, 3, 1, 4).reshape(requests, num_kv_heads, q_per_kv * size, dim)
        )
        bias = part.block_bias(start, size, q_per_kv, q.dtype)
        out_block, lse = _flash(block, keys[:, :, :kv_len], values[:, :, :kv_len], attn_mask=bias, scale=spec.scale)
        if sinks is not None:
            sink = sinks.float().view(1, num_kv_heads, q_per_kv, 1).expand(-1, -1, -1, size).flatten(2)
            out_block = out_block * torch.sigmoid(lse - sink)[..., None].to(out_block.dtype)
        out[:, start : start + size] = out_block.view(requests, num_kv_heads, q_per_kv, size, dim).permute(
            0, 3, 1, 2, 4
        )
    return out.flatten(2, 3)
