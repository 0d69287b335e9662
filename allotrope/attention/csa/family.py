"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import torch

from allotrope.attention.backend import Backend
from allotrope.attention.csa import reference
from allotrope.attention.csa.plan import build_plan
from allotrope.attention.csa.spec import CsaSpec


def _runs_anywhere(spec: CsaSpec, device: torch.device) -> list[str]:
    return []


class CSA:
    """Compressed sparse attention."""

    name = "csa"
    plan = staticmethod(build_plan)
    backends = (Backend("reference", _runs_anywhere, reference.run),)
