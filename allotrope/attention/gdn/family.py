"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import functools

import torch

from allotrope.attention.backend import Backend
from allotrope.attention.gdn import chunked, reference
from allotrope.attention.gdn.plan import build_plan
from allotrope.attention.gdn.spec import GdnSpec


def _runs_anywhere(spec: GdnSpec, device: torch.device) -> list[str]:
    return []


class GDN:
    """Gated delta rule with a short convolution."""

    name = "gdn"
    plan = staticmethod(build_plan)
    backends = (
        Backend("chunked", _runs_anywhere, functools.partial(reference.run, core=chunked.advance)),
        Backend("reference", _runs_anywhere, reference.run),
    )
