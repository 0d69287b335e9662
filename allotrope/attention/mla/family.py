"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

from typing import Any

import torch

from allotrope.attention.backend import Backend, lazily, runs_anywhere, triton_reasons
from allotrope.attention.mla import compiled, reference
from allotrope.attention.mla.plan import build_plan

# Channels of a latent row that one program can hold for the heads it serves.
WIDEST_LATENT = 512


def triton_rejects(spec: Any, device: torch.device) -> list[str]:
    """Why the Triton kernels cannot run a layer."""
    reasons = triton_reasons(device)
    if spec.latent_dim > WIDEST_LATENT:
        reasons.append(f"latent_dim={spec.latent_dim} (needs at most {WIDEST_LATENT})")
    if spec.row_format == "scaled" and spec.latent_dim & (spec.latent_dim - 1):
        reasons.append(f"latent_dim={spec.latent_dim} in scaled rows (needs a power of two)")
    return reasons


class MLA:
    """Attention over a latent row per token that all heads share."""

    name = "mla"
    backends = (
        Backend(
            "triton",
            triton_rejects,
            lazily("allotrope.attention.mla.triton", "build_plan"),
            lazily("allotrope.attention.mla.triton", "run"),
            in_graphs=True,
        ),
        Backend("compiled", compiled.rejects, compiled.plan, compiled.run, fallbacks=compiled.fallbacks),
        Backend("reference", runs_anywhere, build_plan, reference.run),
    )
