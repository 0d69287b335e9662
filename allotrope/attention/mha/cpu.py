"""The rectangle on a CPU: PyTorch's flash attention for decoding, blocks of matrix products for prompts.

The query heads that share a key/value head become rows of one matrix, so that keys are read once a group and never
repeated. Logits and softmax are fp32; the weights are rounded to the rows' type before they meet the values.
"""

from __future__ import annotations

import torch

from allotrope.attention.mha.plan import Part
from allotrope.attention.mha.spec import MhaSpec

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Queries of one block: small enough that a block's logits stay in the cache.
_BLOCK = 64


def rejects(spec: MhaSpec, device: torch.device) -> list[str]:
    """Why this backend cannot run a layer."""
    reasons = []
    if device.type != "cpu":
        reasons.append(f"device={device.type} (needs cpu)")
    if spec.softcap is not None:
        reasons.append(f"softcap={spec.softcap} (needs none)")
    if spec.value_dim != spec.head_dim:
        reasons.append(f"v_head_dim={spec.value_dim} (needs head_dim={spec.head_dim})")
    return reasons


def attend(
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, sinks: torch.Tensor | None
) -> torch.Tensor:
    """As `reference.attend`."""
    if q.shape[1] == 1 and part.visible is not None:
        return _decode(spec, q, k, v, part.bias(q.dtype), sinks)
    return _prefill(spec, q, k, v, part, sinks)


def _decode(
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query a request; sinks by `o * sigmoid(lse - sink)`. `bias`: [b, 1, L]."""
    requests, _, heads, dim = q.shape
    groups = k.shape[2]
    rows = q.view(requests, groups, heads // groups, dim)
    out, lse = _flash(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias[:, None], scale=spec.scale)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float().view(1, groups, heads // groups))[..., None].to(out.dtype)
    return out.reshape(requests, 1, heads, dim)


def _prefill(
    spec: MhaSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Block after block of queries, each against the keys that any of them sees; one request at a time."""
    _, queries, heads, dim = q.shape
    groups, length = k.shape[2], k.shape[1]
    repeat = heads // groups
    keys, values = k[0].float().permute(1, 2, 0), v[0].transpose(0, 1)
    rows = (q[0].float() * spec.scale).view(queries, groups, repeat, dim)
    out = torch.empty_like(q)
    for start in range(0, queries, _BLOCK):
        size = min(_BLOCK, queries - start)
        block = rows[start : start + size].permute(1, 2, 0, 3).reshape(groups, repeat * size, dim)
        seen = length if part.visible is not None else length - queries + start + size
        logits = torch.bmm(block, keys[:, :, :seen]).view(groups, repeat, size, seen)
        if part.visible is not None:
            logits += part.bias(torch.float32)[0, start : start + size]
        else:
            # Only the last `size` keys differ between the block's queries.
            logits[..., seen - size :] += torch.full((size, size), -torch.inf).triu_(1)
        weights = _softmax(logits, sinks).to(v.dtype).view(groups, repeat * size, seen)
        mixed = torch.bmm(weights, values[:, :seen]).view(groups, repeat, size, dim)
        out[0, start : start + size].view(size, groups, repeat, dim).copy_(mixed.permute(2, 0, 1, 3))
    return out


def _softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dim of [G, H / G, q, L]; sinks join the denominator."""
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    groups, repeat, queries, _ = logits.shape
    sink = sinks.float().view(groups, repeat, 1, 1).expand(-1, -1, queries, 1)
    return torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)[..., :-1]
