"""What a backend of attention offers beside `run`: the plan that it makes of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.kernels.backend import Backend
from allotrope.kernels.chip import Chip


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Backend):
    """One implementation of a family.

    `run(spec, plan, caches, inputs)` stores the step's entries or states and attends. `inputs` is the family's
    dataclass (`inputs.py`): what comes out of the projections, before norm, rotation and convolution. The backend
    decides which of these it fuses.
    `plan(spec, batch, index)` builds what all layers of `spec.plan_key` share in a step; only this backend's `run`
    reads it. `index`: cache name -> where its entries lie. `in_graphs`: its plan is made by device operations alone
    from `batch.tensors` and `index`, the host's integers being upper bounds, so that a step of one token a request can
    be captured and replayed. `fallbacks(spec, dtype, chip)`: which steps of such a layer go to another backend, with
    activations of `dtype`, and why; none for most backends. `store(spec, plan, caches, inputs)`: the part of `run` that
    stores the step's entries, for a layer whose output nobody reads; None where no part of `run` does that alone.
    `recorded(plan)`: what a recording of the C calls of a decode step must know of a plan: a key, and tensors. Plans of
    one key make the same calls, but for the addresses of these tensors. None where a step cannot be recorded.
    """

    plan: Callable[..., Any]
    in_graphs: bool = False
    fallbacks: Callable[[Any, torch.dtype, Chip], list[str]] = lambda spec, dtype, chip: []
    store: Callable[..., None] | None = None
    recorded: Callable[[Any], tuple[Hashable, tuple[torch.Tensor, ...]]] | None = None
