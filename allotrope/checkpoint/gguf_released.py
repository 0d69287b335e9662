"""Tensors of a GGUF file as the model's released checkpoint has them, for libraries that know that one alone.

Our own rules read the files as they are: each expert a tensor, projections apart. Where a released checkpoint has them
as one tensor, a `Merge` says how it is made. Must not know how values are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from allotrope.checkpoint.gguf_tensors import Config

Parts = list[torch.Tensor]


@dataclass(frozen=True)
class Merge:
    """`target`: name of the tensor within a layer. `parts`: names of what it is made of; `{e}` is each expert, whose
    tensors `make` gets stacked. `make(config, parts)`: the tensor."""

    target: str
    parts: tuple[str, ...]
    make: Callable[[Config, Parts], torch.Tensor]


def merged(
    names: list[str], read: Callable[[str], torch.Tensor], merges: tuple[Merge, ...], config: Config
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor of the released checkpoint. `names`, `read`: of those that a file has."""
    known = set(names)
    used: set[str] = set()
    for layer in dict.fromkeys(match[0] for name in names if (match := re.match(r".*?layers\.\d+\.", name))):
        for merge in merges:
            sources = [_sources(layer + part, known) for part in merge.parts]
            if all(sources):
                used.update(name for group in sources for name in group)
                yield layer + merge.target, merge.make(config, [_stacked(group, read) for group in sources])
    for name in names:
        if name not in used:
            yield name, read(name)


def _sources(name: str, known: set[str]) -> list[str]:
    """The names that `name` stands for: one of each expert, or itself; none where one is missing."""
    if "{e}" not in name:
        return [name] if name in known else []
    found: list[str] = []
    while (expert := name.replace("{e}", str(len(found)))) in known:
        found.append(expert)
    return found


def _stacked(names: list[str], read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    return read(names[0]) if re.search(r"experts\.\d", names[0]) is None else torch.stack([read(one) for one in names])


def gate_then_up(_: Config, parts: Parts) -> torch.Tensor:
    """[E, 2 * width, hidden] of gate and up, [E, width, hidden] each."""
    return torch.cat(parts, dim=1)


def alone(_: Config, parts: Parts) -> torch.Tensor:
    """The stacked part."""
    return parts[0]


def alternating(_: Config, parts: Parts) -> torch.Tensor:
    """Outputs of gate and up in turns: [E, hidden, 2 * width] of matrices [E, width, hidden], or [E, 2 * width] of
    biases."""
    turns = torch.stack(parts, dim=2).flatten(1, 2)
    return turns.transpose(1, 2) if turns.dim() == 3 else turns


def inputs_first(_: Config, parts: Parts) -> torch.Tensor:
    """[E, inputs, outputs]."""
    return parts[0].transpose(1, 2)


def by_key_head(config: Config, parts: Parts) -> torch.Tensor:
    """[q | k | v.. | z..] of each key head, of [q | k | v] of all heads and of z."""
    groups, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    keys = groups * key_dim
    q, k, v = parts[0].split((keys, keys, len(parts[0]) - 2 * keys))
    return _by_group([q, k, v, parts[1]], groups)


def gates_by_key_head(config: Config, parts: Parts) -> torch.Tensor:
    """[b.. | a..] of each key head, of b and a of all heads."""
    return _by_group(parts, config["linear_num_key_heads"])


def _by_group(parts: Parts, groups: int) -> torch.Tensor:
    return torch.cat([one.unflatten(0, (groups, -1)) for one in parts], dim=1).flatten(0, 1)


def stacked_experts(prefix: str) -> tuple[Merge, ...]:
    """Experts as two tensors [E, outputs, inputs]. `prefix`: of their names, with the last dot."""
    return (
        Merge(
            f"{prefix}gate_up_proj",
            (f"{prefix}{{e}}.gate_proj.weight", f"{prefix}{{e}}.up_proj.weight"),
            gate_then_up,
        ),
        Merge(f"{prefix}down_proj", (f"{prefix}{{e}}.down_proj.weight",), alone),
    )


def transposed_experts(prefix: str) -> tuple[Merge, ...]:
    """Experts as two tensors [E, inputs, outputs] and their biases, gate and up in turns."""
    return (
        Merge(
            f"{prefix}gate_up_proj", (f"{prefix}{{e}}.gate_proj.weight", f"{prefix}{{e}}.up_proj.weight"), alternating
        ),
        Merge(
            f"{prefix}gate_up_proj_bias", (f"{prefix}{{e}}.gate_proj.bias", f"{prefix}{{e}}.up_proj.bias"), alternating
        ),
        Merge(f"{prefix}down_proj", (f"{prefix}{{e}}.down_proj.weight",), inputs_first),
        Merge(f"{prefix}down_proj_bias", (f"{prefix}{{e}}.down_proj.bias",), alone),
    )


RELEASED: Mapping[str, tuple[Merge, ...]] = {
    "gemma4": stacked_experts("experts."),
    "gpt-oss": transposed_experts("mlp.experts."),
    "qwen3next": (
        Merge(
            "linear_attn.in_proj_qkvz.weight",
            ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
            by_key_head,
        ),
        Merge(
            "linear_attn.in_proj_ba.weight",
            ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
            gates_by_key_head,
        ),
    ),
}
"""By `general.architecture`, where a released checkpoint has tensors that a file has in parts."""
