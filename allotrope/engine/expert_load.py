"""How many tokens each expert of each layer gets, in a file: written by an engine that counts them, read to place them.

Owns the file: a JSON object, full name of a module of experts -> tokens of each of them.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from allotrope.errors import ConfigError
from allotrope.layers.expert_placement import ExpertPlacement
from allotrope.layers.moe import Experts


def expert_load(model: nn.Module) -> dict[str, list[int]]:
    """What the experts of `model` have counted. Waits for the device."""
    return {name: one.load.tolist() for name, one in _experts(model).items() if one.load is not None}


def write_expert_load(loads: dict[str, list[int]], path: str) -> None:
    """Write what `expert_load` returned."""
    Path(path).write_text(json.dumps(loads, indent=1) + "\n")


def reset_expert_load(model: nn.Module) -> None:
    """Forget what the experts of `model` have counted, such as in a warm-up."""
    for one in _experts(model).values():
        if one.load is not None:
            one.load.zero_()


def read_expert_placements(path: str, ranks: int, copies: int) -> dict[str, ExpertPlacement]:
    """Who of `ranks` ranks holds which experts, by the counts in a file. `copies`: as in `ExpertPlacement.balanced`.

    Raises ConfigError for a file that is no such thing, ValueError for ranks or copies that the experts do not allow.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"expert_placement={path!r} cannot be read: {error}.") from error
    for name, loads in found.items() if isinstance(found, dict) else [("", None)]:
        whole = isinstance(loads, list) and all(type(one) is int and 0 <= one < 2**63 for one in loads)
        if not whole:
            raise ConfigError(
                f"expert_placement={path!r}: {name or 'it'} is no list of counts; a JSON object is needed, such as "
                f'{{"layers.0.ffn.experts": [12, 40, 7, 9]}}, which --expert-load-file writes.'
            )
    return {name: ExpertPlacement.balanced(loads, ranks, copies) for name, loads in found.items()}


def refuse_misplaced(model: nn.Module, placements: dict[str, ExpertPlacement], path: str) -> None:
    """Raise ConfigError, with every reason, where a file counts other experts than those of `model`."""
    own = _experts(model)
    reasons = [f"{name} has no experts" for name in placements if name not in own]
    reasons += [f"{name} is missing" for name in own if name not in placements]
    for name, placement in placements.items():
        count = placement.experts if name not in own else own[name].experts_of_layer or own[name].count
        if count != placement.experts:
            reasons.append(f"{name} has {count} experts, and counts of {placement.experts}")
    if reasons:
        raise ConfigError(f"expert_placement={path!r} is not of this model: {'; '.join(reasons)}.")


def _experts(model: nn.Module) -> dict[str, Experts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
