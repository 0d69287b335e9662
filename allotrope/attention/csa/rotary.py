"""Rotation of the last dims of a head or entry; the dims before them pass through."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from allotrope.kernels.backend import best_backend
from allotrope.ops.rope import APPLY_ROPE, ApplyRopeSpec, RopeSpec, RopeTable, Rotation


@functools.lru_cache(maxsize=16)
def table(spec: RopeSpec, device: torch.device) -> RopeTable:
    """The table that all layers share."""
    return RopeTable(spec, device)


def rotation_at(spec: RopeSpec, positions: torch.Tensor) -> Rotation:
    """cos and sin in fp32. `positions`: [n] int64."""
    return table(spec, positions.device).at(positions, torch.float32)


def rotate_tail(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the last R dims, in fp32. `x`: [T, ..., D]. Returns the same shape and type."""
    border = x.shape[-1] - rotation.cos.shape[-1]
    tail = x[..., border:]
    run: Callable[..., torch.Tensor] = best_backend(APPLY_ROPE, ApplyRopeSpec(torch.float32), x.device).run
    rotated = run(tail.float() if x.dim() == 3 else tail.float()[:, None], rotation)
    return torch.cat((x[..., :border], rotated.view(tail.shape).to(x.dtype)), dim=-1)
