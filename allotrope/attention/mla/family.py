"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import torch

from allotrope.attention.backend import Backend
from allotrope.attention.mla import reference
from allotrope.attention.mla.plan import build_plan
from allotrope.attention.mla.spec import MlaSpec


def _runs_anywhere(spec: MlaSpec, device: torch.device) -> list[str]:
    return []


class MLA:
    """Attention over a latent row per token that all heads share."""

    name = "mla"
    plan = staticmethod(build_plan)
    backends = (Backend("reference", _runs_anywhere, reference.run),)
