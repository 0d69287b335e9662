"""Rotation of the last dims of a row; what comes before them passes through."""

from __future__ import annotations

import functools

import torch

from allotrope.ops.rope.reference import RopeSpec, RopeTable, Rotation, rotate


@functools.lru_cache(maxsize=16)
def table(spec: RopeSpec, device: torch.device) -> RopeTable:
    """One for all layers."""
    return RopeTable(spec, device)


def rotation_at(spec: RopeSpec, positions: torch.Tensor) -> Rotation:
    """cos and sin in fp32. `positions`: [n] int64."""
    return table(spec, positions.device).at(positions, torch.float32)


def rotate_tail(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the last R dims, in fp32. `x`: [T, ..., D]. Returns the same shape and type."""
    border = x.shape[-1] - rotation.cos.shape[-1]
    tail = x[..., border:]
    turned = rotate(tail.float() if x.dim() == 3 else tail.float()[:, None], rotation)
    return torch.cat((x[..., :border], turned.view(tail.shape).to(x.dtype)), dim=-1)
