"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

from allotrope.attention.backend import Backend, runs_anywhere
from allotrope.attention.dsa import reference
from allotrope.attention.dsa.plan import build_plan


class DSA:
    """Latent attention over the rows that an indexer picks."""

    name = "dsa"
    backends = (Backend("reference", runs_anywhere, build_plan, reference.run),)
