"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import functools

import torch

from allotrope.attention.backend import Backend
from allotrope.attention.mha import cpu, reference
from allotrope.attention.mha.plan import build_plan
from allotrope.attention.mha.spec import MhaSpec


def _runs_anywhere(spec: MhaSpec, device: torch.device) -> list[str]:
    return []


class MHA:
    """Softmax attention over keys and values."""

    name = "mha"
    plan = staticmethod(build_plan)
    backends = (
        Backend("cpu", cpu.rejects, functools.partial(reference.run, core=cpu.attend)),
        Backend("reference", _runs_anywhere, reference.run),
    )
