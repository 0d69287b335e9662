"""Cases of hyper-connections: tokens cut out of wider rows, a width that fills neither a split nor a block."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.hyper_connection import HyperConnectionSpec

TOKENS, HIDDEN = 18, 344


def _streams(draw: Draw, streams: int, dtype: torch.dtype) -> torch.Tensor:
    return draw(dtype, TOKENS, streams + 1, HIDDEN)[:, :streams]


def _pre(
    spec: HyperConnectionSpec, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw, count = Draw(generator, device), (2 + spec.streams) * spec.streams
    fn = draw(torch.float32, count, spec.streams * HIDDEN) / 20
    return spec, _streams(draw, spec.streams, dtype), fn, draw(torch.float32, count), draw(torch.float32, 3)


def _post(
    spec: HyperConnectionSpec, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw, n = Draw(generator, device), spec.streams
    streams, post = _streams(draw, n, dtype), 2 * draw(dtype, TOKENS, n).sigmoid()
    return draw(dtype, TOKENS, HIDDEN), streams, post, draw(dtype, TOKENS, n, n).softmax(dim=1)


SPECS = {
    f"{streams} streams, {iterations} iterations": HyperConnectionSpec(
        streams=streams, hidden=HIDDEN, iterations=iterations, eps=1e-6, norm_eps=1e-5
    )
    for streams, iterations in ((2, 1), (3, 3), (4, 20))
}


def _spec(spec: HyperConnectionSpec, dtype: torch.dtype) -> HyperConnectionSpec:
    return spec


CASES: Cases = {
    "hc_pre": {name: OpCase(partial(_spec, spec), partial(_pre, spec)) for name, spec in SPECS.items()},
    "hc_post": {name: OpCase(partial(_spec, spec), partial(_post, spec)) for name, spec in SPECS.items()},
}
