"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

from allotrope.attention.backend import Backend, runs_anywhere
from allotrope.attention.csa import reference
from allotrope.attention.csa.plan import build_plan


class CSA:
    """Compressed sparse attention."""

    name = "csa"
    backends = (Backend("reference", runs_anywhere, build_plan, reference.run),)
