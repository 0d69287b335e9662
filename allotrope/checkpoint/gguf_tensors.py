"""Where the values of each Hugging Face tensor are in a GGUF file.

Owns the rules between the two kinds of names: a tensor is renamed, taken from a stack of experts, reordered by rows or
columns, or computed from stored ones. It must not know how values are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from allotrope.gguf_file import GgufFile, GgufTensor

Config = Mapping[str, Any]
Order = Callable[[Config, int], np.ndarray]
"""From the model's config and a count of rows (or columns): for each one of the result, its index in the file."""

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class GgufRule:
    """What becomes of one stored tensor.

    `target`: Hugging Face name, behind that of the layer if the tensor is in a block. `{e}` is one tensor of each
    expert, which the file stacks. `rows`, `columns`: their order. `half`: the first (0) or second (1) half of the rows.
    `make`: values from the stored ones, and from those of the tensor `partner` in the same block. `shape`: of the
    result, from that in the file.
    """

    target: str
    rows: Order | None = None
    columns: Order | None = None
    half: int | None = None
    make: Callable[..., np.ndarray] | None = None
    partner: str | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


Rules = Mapping[str, str | GgufRule | tuple[GgufRule, ...]]
"""Stored name, within its block if in one -> the Hugging Face tensors that are in it. A name without ending stands for
weight and bias, and so does its target."""


@dataclass(frozen=True)
class GgufView:
    """One Hugging Face tensor. `sources`: stored tensors, several only with `make`. `expert`: index in a stack.

    `rows`, `columns`: for each one of the result, its index in what is stored (of one expert); None: all, in order.
    `make`: values from the stored ones; None if each is a stored one.
    """

    sources: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    make: Callable[..., np.ndarray] | None = None


@dataclass(frozen=True)
class GgufNames:
    """The rules of one architecture.

    `top`: tensors outside of blocks. `block`: those of a layer. `layer`: Hugging Face name of a layer, `{i}` its
    number. `draft`: the same of a layer that makes drafts, `{j}` its number among them; None if files have none.
    `draft_parts`: what such a layer has beside a usual one's tensors; targets are whole names.
    """

    top: Rules
    block: Rules
    layer: str = "model.layers.{i}."
    draft: str | None = None
    draft_parts: Rules = field(default_factory=dict)


def views(file: GgufFile, names: GgufNames, config: Config) -> tuple[dict[str, GgufView], list[GgufTensor]]:
    """Hugging Face name -> view, and the tensors of `file` that no rule covers."""
    found: dict[str, GgufView] = {}
    unknown = []
    partners = {rule.partner for rule in _all_rules(names.block) if rule.partner is not None}
    for tensor in file.tensors.values():
        block = _BLOCK.fullmatch(tensor.name)
        inner = tensor.name if block is None else block[2]
        if block is not None and inner in partners:
            continue
        rules, prefix = _rules_of(names, inner, None if block is None else int(block[1]), config)
        if not rules:
            unknown.append(tensor)
        for rule, target in rules:
            found |= _views_of(file, tensor, rule, prefix + target, config)
    return found, unknown


def _all_rules(rules: Rules) -> Iterator[GgufRule]:
    for one in rules.values():
        yield from (one,) if isinstance(one, GgufRule) else one if isinstance(one, tuple) else ()


def _rules_of(
    names: GgufNames, inner: str, block: int | None, config: Config
) -> tuple[list[tuple[GgufRule, str]], str]:
    """The rules of a stored tensor with the names of their targets, and what stands before those."""
    if block is None:
        return _matching(names.top, inner), ""
    layers = config["num_hidden_layers"]
    if block < layers:
        return _matching(names.block, inner), names.layer.format(i=block)
    if names.draft is None:
        return [], ""
    numbers = {"i": block, "j": block - layers}
    parts = [(rule, target.format(**numbers)) for rule, target in _matching(names.draft_parts, inner)]
    return (parts, "") if parts else (_matching(names.block, inner), names.draft.format(**numbers))


def _matching(rules: Rules, name: str) -> list[tuple[GgufRule, str]]:
    stem, _, kind = name.rpartition(".")
    found, ending = rules.get(name), ""
    if found is None and kind in ("weight", "bias"):
        found, ending = rules.get(stem), f".{kind}"
    if found is None:
        return []
    several = found if isinstance(found, tuple) else (GgufRule(found) if isinstance(found, str) else found,)
    return [(rule, rule.target + ending) for rule in several]


def _views_of(
    file: GgufFile, tensor: GgufTensor, rule: GgufRule, target: str, config: Config
) -> Iterator[tuple[str, GgufView]]:
    sources = [tensor]
    if rule.partner is not None:
        other = file.tensors.get(tensor.name.replace(_inner(tensor.name), rule.partner))
        if other is None:
            return
        sources.append(other)
    stacked = "{e}" in target
    stored = tensor.shape[1:] if stacked else tensor.shape
    rows = None if rule.rows is None else rule.rows(config, stored[0])
    if rule.half is not None:
        rows = np.arange(stored[0]).reshape(2, -1)[rule.half]
    columns = None if rule.columns is None else rule.columns(config, stored[-1])
    shape = stored if rows is None else (len(rows), *stored[1:])
    if rule.shape is not None:
        shape = rule.shape(shape)
    if rule.make is not None and len(sources) > 1:
        shape = rule.make(*(np.empty(one.shape, np.bool_) for one in sources)).shape
    for expert in range(tensor.shape[0]) if stacked else (None,):
        name = target if expert is None else target.replace("{e}", str(expert))
        yield name, GgufView(tuple(sources), shape, expert, rows, columns, rule.make)


def _inner(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    assert block is not None
    return block[2]


def rows_of_halves(count: str) -> Order:
    """Rotation pairs (0, 1), (2, 3), ... of each head to halves: row i beside row i + D/2.

    out[h, i, j] = stored[h, j, i] for i < 2, j < D/2. `count`: config key of the number of heads.
    """

    def order(config: Config, rows: int) -> np.ndarray:
        heads = config[count]
        if rows % (2 * heads):
            raise ValueError(f"{rows} rows for {heads} heads")
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    return order


def grouped_value_heads(config: Config, count: int) -> np.ndarray:
    """Value heads of the delta rule, which the file orders by their number in a group, to the order of their groups."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(count).reshape(heads // groups, groups, count // heads).swapaxes(0, 1).reshape(-1)


def grouped_values_behind_keys(config: Config, count: int) -> np.ndarray:
    """As `grouped_value_heads`, of the last channels of [q | k | v]."""
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return np.concatenate([np.arange(keys), keys + grouped_value_heads(config, count - keys)])


def minus_one(values: np.ndarray) -> np.ndarray:
    """A norm's weight, which the file stores with the 1 that the model adds."""
    return values - np.float32(1)


def decay_log(values: np.ndarray) -> np.ndarray:
    """`A_log` from the stored -exp(A_log)."""
    return np.log(-values)


def latent_keys_and_values(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[H * (N + V), C] of `kv_b_proj` from the stored [H, C, N] keys and [H, V, C] values."""
    joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return joined.reshape(-1, joined.shape[-1])


def convolution_taps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[channels, 1, width] of a depthwise convolution, however many dimensions of 1 the file has."""
    channels, width = (size for size in shape if size != 1) if len(shape) > 2 else shape
    return channels, 1, width
