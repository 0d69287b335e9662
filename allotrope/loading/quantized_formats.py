"""Which weights of a model stay quantized: found by its rules, from what is stored or else from what its config says.

Must not know how products are made; layers decide what they can keep.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.checkpoint.dequantize import QuantizedView, dequantized
from allotrope.checkpoint.weight_formats import WeightFormats, weight_formats
from allotrope.checkpoint.weights import Rule, filled
from allotrope.kernels.backend import Chooser
from allotrope.layers.build import Build, Formats
from allotrope.layers.parallel import placement_of
from allotrope.ops.matmul.gguf import GgufBlocks
from allotrope.ops.matmul.weight import Format

# Experts of a layer are nearly always alike: the first stands for those in its format.
_LATER_EXPERT = re.compile(r"\.experts\.(?!0\.)\d+\.")


def formats_kept_quantized(
    checkpoint: Checkpoint, rules: Sequence[Rule], build: Build, make: Callable[[Build], nn.Module]
) -> Formats:
    """Weights that stay quantized where a device keeps them so. `checkpoint`: as it stands, scales included. `make`:
    makes the module that `rules` fill."""
    stated = weight_formats(checkpoint.config, checkpoint.source)
    if checkpoint.has_weights or stated is None:
        return stored_formats(dequantized(checkpoint), rules)
    # A chooser of its own: what plain weights would run by is nobody's choice.
    chooser = Chooser(build.chooser.chip, build.chooser.wanted)
    model = make(dataclasses.replace(build, device=torch.device("meta"), chooser=chooser))
    return stated_formats(stated, rules, {name: _inputs(one) for name, one in model.named_parameters()})


def stored_formats(checkpoint: Checkpoint, rules: Sequence[Rule]) -> Formats:
    """Our weights and sections whose tensors are all stored in one format that can be kept."""
    if not isinstance(checkpoint, QuantizedView):
        return {}
    patterns = [(rule.pattern(), rule) for rule in rules if rule.target is not None]
    found: dict[tuple[str, str], set[Format | None]] = {}
    formats = {name: checkpoint.format(name) for name in checkpoint.headers()}
    for name, format in formats.items():
        first = _LATER_EXPERT.sub(".experts.0.", name)
        if first != name and first in formats and formats[first] == format:
            continue
        for pattern, rule in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                found.setdefault((filled(rule, match), rule.section), set()).add(format)
    return _uniform(found)


def stated_formats(stated: WeightFormats, rules: Sequence[Rule], parameters: Mapping[str, int]) -> Formats:
    """The same for a checkpoint without weights. `parameters`: names of ours, as if none were quantized -> inputs.

    Places that no quantized product reads, such as norms, are among them: their modules do not ask.
    """
    found: dict[tuple[str, str], set[Format | None]] = {}
    sources = list(_sources(rules, list(parameters)))
    names = {source for _, source in sources}
    for place, source in sources:
        scheme = stated.scheme(source)
        # As `PlainCheckpoint` tells stacks of experts that have the inputs first.
        inputs_first = source + "_bias" in names
        if scheme is not None and not stated.quantizes(scheme, parameters[place[0]], inputs_first=inputs_first):
            scheme = None
        found.setdefault(place, set()).add(None if scheme is None else scheme.format)
    return _uniform(found)


def _inputs(parameter: nn.Parameter) -> int:
    """The last dim of a weight, on all ranks together."""
    placement = placement_of(parameter)
    if placement.dim + bool(placement.experts) < parameter.dim() - 1:
        return parameter.shape[-1]
    return sum(section.size for section in placement.sections)


def _uniform(found: Mapping[tuple[str, str], set[Format | None]]) -> Formats:
    """Places whose tensors are all in one format; sections of one product are kept in one format, or not at all, unless
    all of these are blocks of GGUF."""
    uniform = {place: next(iter(formats)) for place, formats in found.items() if len(formats) == 1}
    kept = {place: format for place, format in uniform.items() if format is not None}
    of_weight: dict[str, set[Format]] = {}
    for (weight, _), format in kept.items():
        of_weight.setdefault(weight, set()).add(format)
    blocks = {weight for weight, formats in of_weight.items() if all(isinstance(one, GgufBlocks) for one in formats)}
    return {place: one for place, one in kept.items() if place[0] in blocks or len(of_weight[place[0]]) == 1}


def _sources(rules: Sequence[Rule], parameters: Sequence[str]) -> Iterator[tuple[tuple[str, str], str]]:
    """Each of our places with the name of a tensor that would fill it."""
    for rule in rules:
        if rule.target is None:
            continue
        pattern = Rule(rule.target, None).pattern()
        for name in parameters:
            match = pattern.fullmatch(name)
            if match is not None:
                source = rule.source
                for placeholder, number in match.groupdict().items():
                    source = source.replace("{" + placeholder + "}", number)
                # The first expert, where ours are stacked.
                yield (name, rule.section), re.sub(r"\{\w+\}", "0", source)
