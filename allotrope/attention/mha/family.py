"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import functools

from allotrope.attention.backend import Backend, runs_anywhere
from allotrope.attention.mha import cpu, reference
from allotrope.attention.mha.plan import build_plan


class MHA:
    """Softmax attention over keys and values."""

    name = "mha"
    backends = (
        Backend("cpu", cpu.rejects, build_plan, functools.partial(reference.run, core=cpu.attend)),
        Backend("reference", runs_anywhere, build_plan, reference.run),
    )
