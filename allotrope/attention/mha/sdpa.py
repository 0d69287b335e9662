"""The rectangle on a CPU through PyTorch's flash attention, which never holds the score matrix.

The grouped query heads of one key/value head become query rows, so that keys are read once a group and never expanded.
"""

from __future__ import annotations

import torch

from allotrope.attention.mha.spec import MhaSpec

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
    spec: MhaSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `reference.attend`, sinks by `o * sigmoid(lse - sink)`."""
    requests, queries, heads, dim = q.shape
    groups = k.shape[2]
    repeat = heads // groups
    if queries == 1:
        rows = q.view(requests, groups, repeat, dim)
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
    else:
        rows = q.transpose(1, 2)
        keys = k.transpose(1, 2).repeat_interleave(repeat, dim=1) if repeat > 1 else k.transpose(1, 2)
        values = v.transpose(1, 2).repeat_interleave(repeat, dim=1) if repeat > 1 else v.transpose(1, 2)
    mask = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -torch.inf)[:, None]
    out, lse = _flash(rows, keys, values, 0.0, visible is None, attn_mask=mask, scale=spec.scale)
    if sinks is not None:
        sink = sinks.float().view(1, groups, repeat) if queries == 1 else sinks.float().view(1, heads, 1)
        out = (out * torch.sigmoid(lse - sink)[..., None]).to(out.dtype)
    return out.reshape(requests, 1, heads, dim) if queries == 1 else out.transpose(1, 2)
