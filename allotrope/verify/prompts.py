"""Which prompts put a model to the test: lengths around everything that changes with length, tokens at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from allotrope.attention.family import Spec, boundaries

# What every engine has, whatever the model: the chunk of the `chunked-64` mode.
_CHUNK = 64


def all_boundaries(specs: Iterable[Spec], page_size: int) -> tuple[int, ...]:
    """Context lengths at which some layer or the engine starts to work in another way."""
    found = {length for spec in specs for length in boundaries(spec)}
    return tuple(sorted(found | {page_size, _CHUNK}))


def prompt_lengths(marks: Sequence[int], longest: int, new_tokens: int) -> tuple[list[int], list[int]]:
    """Lengths below, at and above each mark, and for the larger ones one from which decoding crosses its double.

    `longest`: of a prompt. Returns the lengths, and the marks that they do not cross.
    """
    found = {1, 2, 3}
    for mark in marks:
        found |= {mark - 1, mark, mark + 1}
        if mark > _CHUNK:
            found.add(2 * mark - new_tokens // 2)
    found.add(max(100, max(marks) + 30))
    lengths = sorted(length for length in found if 0 < length <= longest)
    return lengths, [mark for mark in marks if mark + 1 > longest]


def usable_ids(config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Token ids that mean text: those that the config names (end of text, image and the like) are left out."""
    named = set()
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in section.items():
            if key.endswith(("token_id", "token_index")):
                named |= set(value) if isinstance(value, list) else {value}
    return [token for token in range(vocab_size) if token not in named]


def draw_prompt(ids: Sequence[int], length: int, generator: torch.Generator) -> tuple[int, ...]:
    """`length` tokens of `ids` at random."""
    return tuple(ids[i] for i in torch.randint(0, len(ids), (length,), generator=generator).tolist())


def draw_prompts(ids: Sequence[int], lengths: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """One prompt of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [draw_prompt(ids, length, generator) for length in lengths]
