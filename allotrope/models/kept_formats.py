"""Which weights of a model stay quantized: found by its rules, from what is stored or else from what its config says.

Must not know how products are made; layers decide what they can keep.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from allotrope.layers.build import Build, Formats
from allotrope.layers.quant.format import FP4_RUN, Format
from allotrope.models.checkpoint import Checkpoint
from allotrope.models.dequantize import QuantizedView, dequantized, quantization_of
from allotrope.models.registry import Architecture
from allotrope.models.spec import ModelSpec
from allotrope.models.weights import Rule, filled

Places = dict[tuple[str, str], Format]

# Experts of a layer are alike: the first stands for all.
_LATER_EXPERT = re.compile(r"\.experts\.(?!0\.)\d+\.")
# Where configs list what is not quantized.
_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude")


def kept_formats(checkpoint: Checkpoint, architecture: Architecture, spec: ModelSpec, build: Build) -> Formats:
    """Weights that stay quantized where a device keeps them so. `checkpoint`: as it stands, scales included."""
    rules = architecture.rules(spec)
    if checkpoint.has_weights or not quantization_of(checkpoint.config):
        return stored_formats(dequantized(checkpoint), rules)
    model = architecture.decoder(spec, dataclasses.replace(build, device=torch.device("meta")))
    return stated_formats(checkpoint.config, rules, [name for name, _ in model.named_parameters()])


def stored_formats(checkpoint: Checkpoint, rules: Sequence[Rule]) -> Formats:
    """Our weights and sections whose tensors are all stored in one format that can be kept."""
    if not isinstance(checkpoint, QuantizedView):
        return {}
    patterns = [(rule.pattern(), rule) for rule in rules if rule.target is not None]
    found: dict[tuple[str, str], set[Format | None]] = {}
    for name in checkpoint.headers():
        if _LATER_EXPERT.search(name):
            continue
        for pattern, rule in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                found.setdefault((filled(rule, match), rule.section), set()).add(checkpoint.format(name))
    alike = {place: next(iter(formats)) for place, formats in found.items() if len(formats) == 1}
    kept = {place: format for place, format in alike.items() if format is not None}
    # Sections of one product are kept in one format, or not at all.
    of_weight: dict[str, set[Format]] = {}
    for (weight, _), format in kept.items():
        of_weight.setdefault(weight, set()).add(format)
    return {place: format for place, format in kept.items() if len(of_weight[place[0]]) == 1}


def stated_formats(config: Mapping[str, Any], rules: Sequence[Rule], parameters: Iterable[str]) -> Formats:
    """The same for a checkpoint without weights. `parameters`: names of ours, as if none were quantized."""
    stated = quantization_of(config)
    format = _stated_format(stated)
    if format is None:
        return {}
    excluded = [str(entry) for key in _EXCLUSIONS for entry in stated.get(key) or ()]
    made: Places = {}
    for place, source in _sources(rules, list(parameters)):
        experts = ".experts." in source
        wanted = experts if format.kind == "mxfp4" else experts or source.endswith("_proj.weight")
        if wanted and not _is_excluded(source, excluded):
            kind = Format("mxfp4", FP4_RUN) if experts and config.get("expert_dtype") == "fp4" else format
            made[place] = kind
    return made


def _stated_format(stated: Mapping[str, Any]) -> Format | None:
    if not stated:
        return None
    if stated.get("quant_method") == "mxfp4":
        return Format("mxfp4", FP4_RUN)
    block = stated.get("weight_block_size")
    return Format("fp8", int(block[1]) if block else 0)


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
                for hole, number in match.groupdict().items():
                    source = source.replace("{" + hole + "}", number)
                # The first expert, where ours are stacked.
                yield (name, rule.section), re.sub(r"\{\w+\}", "0", source)


def _is_excluded(source: str, excluded: Sequence[str]) -> bool:
    """Whether a module that holds the tensor, or one around it, is listed: by name, a pattern, or "re:" and a regular
    expression."""
    module = source.removesuffix(".weight")
    around = [module[: match.start()] for match in re.finditer(r"\.|$", module)]
    for entry in excluded:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif any(fnmatch.fnmatchcase(name, entry) or name.endswith("." + entry) for name in around):
            return True
    return False
