"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import functools

from allotrope.attention.backend import Backend, runs_anywhere
from allotrope.attention.gdn import chunked, reference
from allotrope.attention.gdn.plan import build_plan


class GDN:
    """Gated delta rule with a short convolution."""

    name = "gdn"
    backends = (
        Backend("chunked", runs_anywhere, build_plan, functools.partial(reference.run, core=chunked.advance)),
        Backend("reference", runs_anywhere, build_plan, reference.run),
    )
