"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

from allotrope.attention.backend import Backend, runs_anywhere
from allotrope.attention.mla import reference
from allotrope.attention.mla.plan import build_plan


class MLA:
    """Attention over a latent row per token that all heads share."""

    name = "mla"
    backends = (Backend("reference", runs_anywhere, build_plan, reference.run),)
