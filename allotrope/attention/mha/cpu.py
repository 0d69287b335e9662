"""The rectangle on a CPU by PyTorch's flash attention, a prompt by blocks of its queries.

The query heads that share a key/value head become rows of one matrix, so that keys are read once a group and never
repeated. Logits and softmax are fp32; the weights are rounded to the rows' type before they meet the values.
"""

from __future__ import annotations

import torch

from allotrope.attention.mha.plan import Part
from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.chip import Chip

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Queries of one block: small enough that a block's logits stay in the cache.
_BLOCK = 64


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
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, sinks: torch.Tensor | None
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
    """One query a request; sinks by `o * sigmoid(lse - sink)`. `bias`: [b, 1, 1, L]."""
    requests, _, heads, dim = q.shape
    groups = k.shape[2]
    rows = q.view(requests, groups, heads // groups, dim)
    out, lse = _flash(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=spec.scale)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float().view(1, groups, heads // groups))[..., None].to(out.dtype)
    return out.reshape(requests, 1, heads, dim)


def _prefill(
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Block after block of queries, each against the keys that any of them sees."""
    requests, queries, heads, dim = q.shape
    groups, length = k.shape[2], k.shape[1]
    repeat = heads // groups
    rows, keys, values = q.view(requests, queries, groups, repeat, dim), k.transpose(1, 2), v.transpose(1, 2)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for start in range(0, queries, _BLOCK):
        size = min(_BLOCK, queries - start)
        seen = length if part.visible is not None else length - queries + start + size
        block = rows[:, start : start + size].permute(0, 2, 3, 1, 4).reshape(requests, groups, repeat * size, dim)
        bias = part.block_bias(start, size, repeat, q.dtype)
        mixed, lse = _flash(block, keys[:, :, :seen], values[:, :, :seen], attn_mask=bias, scale=spec.scale)
        if sinks is not None:
            sink = sinks.float().view(1, groups, repeat, 1).expand(-1, -1, -1, size).flatten(2)
            mixed = mixed * torch.sigmoid(lse - sink)[..., None].to(mixed.dtype)
        out[:, start : start + size] = mixed.view(requests, groups, repeat, size, dim).permute(0, 3, 1, 2, 4)
    return out.flatten(2, 3)
