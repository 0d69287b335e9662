"""Weight rules of multi-token-prediction layers, which checkpoints keep beside the layers of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from allotrope.checkpoint.weights import Rule, drop

DRAFTS_ALONE = "multi-token-prediction layers are read for drafts alone (speculative decoding)"
SHARED = "a copy of the model's own, which drafts share"


def drop_mtp_layers(prefix: str, layers: int, mtp_layers: int) -> list[Rule]:
    """Leave the multi-token-prediction layers out of the model's tensors. `layers`: number of the model's own.
    `mtp_layers`: number of those."""
    return [drop(f"{prefix}layers.{i}.*", DRAFTS_ALONE) for i in range(layers, layers + mtp_layers)]


def mtp_layer_rules(rules: Sequence[Rule], layers: str, layer: str) -> list[Rule]:
    """The rules of one multi-token-prediction layer, from the `rules` of the model.

    `layers`: what the names of the model's layers begin with, such as `model.layers.{i}.`. `layer`: the same of the
    multi-token-prediction layer. Its parameters become those of `layers.0`.
    """
    found = []
    for rule in rules:
        if rule.source.startswith(layers):
            target = rule.target and rule.target.replace("layers.{i}.", "layers.0.", 1)
            found.append(dataclasses.replace(rule, source=layer + rule.source.removeprefix(layers), target=target))
    return found


def mtp_part_rules(prefix: str, parts: Mapping[str, str], copies: Sequence[str] = ()) -> list[Rule]:
    """Rules of the parts around the layer. `parts`: their names behind `prefix` -> ours. `copies`: names of embedding
    and head, which are the model's own by definition."""
    return [
        *(Rule(prefix + theirs, ours) for theirs, ours in parts.items()),
        *(drop(prefix + copy, SHARED) for copy in copies),
    ]
