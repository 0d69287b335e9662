"""What one hyper-connection is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HyperConnectionSpec:
    """`streams`: N. `iterations`: of Sinkhorn. `eps`: of the mixing weights. `norm_eps`: of the norm of the streams."""

    streams: int
    hidden: int
    iterations: int
    eps: float
    norm_eps: float
