"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import torch

from allotrope.attention.backend import Backend
from allotrope.attention.dsa import reference
from allotrope.attention.dsa.plan import build_plan
from allotrope.attention.dsa.spec import DsaSpec


def _runs_anywhere(spec: DsaSpec, device: torch.device) -> list[str]:
    return []


class DSA:
    """Latent attention over the rows that an indexer picks."""

    name = "dsa"
    plan = staticmethod(build_plan)
    backends = (Backend("reference", _runs_anywhere, reference.run),)
