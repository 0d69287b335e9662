"""Cases of queries and one key: columns of wider tensors, more heads than a program takes, with and without a norm."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.mla_rope import LayerNorm, MlaRopeSpec
from allotrope.ops.rope import RopeSpec
from allotrope.ops.rope.cases import SPECS, rotation_of

TOKENS, DIM = 3, 16


def _arguments(
    rope: RopeSpec | None,
    heads: int,
    normed: bool,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    q, k = draw(dtype, TOKENS, heads, DIM + 8)[..., 8:], draw(dtype, TOKENS, DIM + 24)[:, 24:]
    norm = LayerNorm(1 + draw(torch.float32, DIM) / 4, draw(torch.float32, DIM), 1e-6) if normed else None
    return q, k, None if rope is None else rotation_of(rope, TOKENS, dtype, device), norm


CASES: Cases = {
    "mla_rope": {
        f"{name}, {heads} heads{', normed' if normed else ''}": OpCase(
            partial(MlaRopeSpec, rope), partial(_arguments, rope, heads, normed)
        )
        for name, rope in (*SPECS.items(), ("no rotation", None))
        for heads, normed in ((1, False), (5, True), (70, False))
    }
}
