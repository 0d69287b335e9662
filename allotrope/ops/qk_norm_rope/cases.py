"""Cases of norm, rotation and store: whole and partial rotation, values of keys, rows that go to the cache or back."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.qk_norm_rope import HeadSpec, Rows
from allotrope.ops.rope import RopeSpec
from allotrope.ops.rope.cases import rotation_of

TOKENS, PAGES, PAGE_SIZE = 7, 4, 5
# The second token is not stored.
SLOTS = (7, -1, 19, 5, 0, 6, 12)
PLAIN = HeadSpec(heads=6, kv_heads=3, dim=16, v_dim=16)
NORMED = dataclasses.replace(PLAIN, qk_norm=True)
SPECS: dict[str, tuple[HeadSpec, RopeSpec | None]] = {
    "plain": (PLAIN, RopeSpec(dim=16, theta=1e4)),
    "normed": (NORMED, RopeSpec(dim=16, theta=1e4)),
    "interleaved": (NORMED, RopeSpec(dim=16, theta=1e4, interleaved=True)),
    "partial": (dataclasses.replace(NORMED, dim=24, v_dim=8), RopeSpec(dim=12, theta=1e4)),
    "partial interleaved": (dataclasses.replace(NORMED, dim=24), RopeSpec(dim=12, theta=1e4, interleaved=True)),
    "no rotation": (NORMED, None),
    "values from keys": (
        dataclasses.replace(NORMED, values_from_keys=True, v_norm=True, heads=5, kv_heads=1),
        RopeSpec(dim=16, theta=1e4),
    ),
    "scaled values": (dataclasses.replace(PLAIN, value_scale=0.5), RopeSpec(dim=16, theta=1e4)),
    "queries only": (dataclasses.replace(NORMED, kv_heads=0), RopeSpec(dim=16, theta=1e4)),
}


def _spec(spec: HeadSpec, dtype: torch.dtype) -> HeadSpec:
    return spec


def _arguments(
    spec: HeadSpec,
    rope: RopeSpec | None,
    stored: bool,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[object, ...]:
    """A projection with columns of others behind it, and pools that are views of one buffer."""
    draw = Draw(generator, device)
    projected = draw(dtype, TOKENS, spec.width + 8)
    rotation = None if rope is None else rotation_of(rope, TOKENS, dtype, device)
    weights = [1 + draw(torch.float32, spec.dim) / 4 if spec.qk_norm else None for _ in range(2)]
    rows = None
    if stored and spec.kv_heads:
        sizes = spec.kv_heads * spec.dim, spec.kv_heads * spec.v_dim
        k, v = draw(dtype, PAGES, PAGE_SIZE, sum(sizes)).split(sizes, dim=-1)
        k, v = (pool.unflatten(-1, (spec.kv_heads, -1)) for pool in (k, v))
        rows = Rows(k, v, torch.tensor(SLOTS, device=device))
    return spec, projected, rotation, *weights, rows


CASES: Cases = {
    "qk_norm_rope": {
        f"{name}, {'stored' if stored else 'returned'}": OpCase(
            partial(_spec, spec), partial(_arguments, spec, rope, stored)
        )
        for name, (spec, rope) in SPECS.items()
        for stored in (True, False)
        if spec.kv_heads or not stored
    }
}
