"""Weight rules of mixtures of experts, for both layouts of checkpoints: one tensor per expert, or one for all."""

from __future__ import annotations

import torch

from allotrope.checkpoint.weights import Rule

Names = tuple[str, str, str]
"""A checkpoint's names of the gate, up and down projections."""

PROJECTIONS: Names = ("gate_proj", "up_proj", "down_proj")


def mlp_rules(theirs: str, ours: str, names: Names = PROJECTIONS) -> list[Rule]:
    """Weight rules of a gated MLP. `theirs`, `ours`: prefixes of the projections' names, with the last dot."""
    gate, up, down = names
    return [
        Rule(f"{theirs}{gate}.weight", ours + "gate_up.weight", "gate"),
        Rule(f"{theirs}{up}.weight", ours + "gate_up.weight", "up"),
        Rule(f"{theirs}{down}.weight", ours + "down.weight"),
    ]


def expert_rules(theirs: str, ours: str, names: Names = PROJECTIONS) -> list[Rule]:
    """Weight rules of routed experts, unfused (`theirs{e}.gate_proj.weight`) and fused (`theirs` + `gate_up_proj`).

    A fused `gate_up_proj` is [E, 2 * width, hidden], gate first.
    """
    return [
        *unfused_expert_rules(theirs, ours, names),
        Rule(f"{theirs}gate_up_proj", ours + "gate_up", "gate", transform=first_half),
        Rule(f"{theirs}gate_up_proj", ours + "gate_up", "up", transform=second_half),
        Rule(f"{theirs}down_proj", ours + "down"),
    ]


def first_half(fused: torch.Tensor) -> torch.Tensor:
    """[E, 2 * n, ...] to the first n of each expert."""
    return fused[:, : fused.shape[1] // 2]


def second_half(fused: torch.Tensor) -> torch.Tensor:
    """[E, 2 * n, ...] to the last n of each expert."""
    return fused[:, fused.shape[1] // 2 :]


def unfused_expert_rules(theirs: str, ours: str, names: Names = PROJECTIONS) -> list[Rule]:
    """Weight rules of routed experts with a tensor each."""
    gate, up, down = names
    return [
        Rule(f"{theirs}{{e}}.{gate}.weight", ours + "gate_up", "gate", expert="e"),
        Rule(f"{theirs}{{e}}.{up}.weight", ours + "gate_up", "up", expert="e"),
        Rule(f"{theirs}{{e}}.{down}.weight", ours + "down", expert="e"),
    ]
