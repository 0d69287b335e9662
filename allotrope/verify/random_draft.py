"""Which tensors the draft head of a random checkpoint has: those of a layer of the model, and the parts around it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.checkpoint import TensorHeader
from allotrope.checkpoint.weights import Rule, filled
from allotrope.layers.build import Build
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.parallel import placement_of
from allotrope.loading.decoder import make_meta_decoder
from allotrope.loading.draft import make_meta_draft

_OF_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.(.+)")


def draft_head(
    architecture: Architecture, spec: ModelSpec, draft: DraftSpec, headers: Mapping[str, TensorHeader]
) -> dict[str, torch.Tensor]:
    """Every tensor of the draft head by its released name, with the value that it is drawn around.

    `headers`: of the model's tensors, whose layers lend names and shapes. Empty where they lend too few: a model that
    is cut to its first layers may have none like the head's.
    """
    build = Build(device=torch.device("meta"))
    model = make_meta_draft(draft, make_meta_decoder(architecture, spec, build), build)
    head = _Head(model, [rule for rule in architecture.draft_rules(spec, draft) if rule.target is not None])
    shapes: dict[str, tuple[int, ...]] = {}
    for name, header in headers.items():
        lent = _OF_LAYER.fullmatch(name)
        for prefix in (draft.prefix, draft.prefix + "layers.0."):
            if lent and prefix + lent[1] not in shapes and head.take(prefix + lent[1], header.shape):
                shapes[prefix + lent[1]] = header.shape
    for rule in head.rules:
        # The parts around the layer are stored as our parameters are.
        parameter = head.parameters.get(rule.target or "")
        if parameter is not None and head.take(rule.source, tuple(parameter.shape)):
            shapes[rule.source] = tuple(parameter.shape)
    if head.missing:
        return {}
    centers = {name: 1.0 - spec.norm_offset if "norm" in name else 0.0 for name in shapes}
    # Expanded: a released head takes tens of GB.
    return {name: torch.tensor(centers[name]).expand(shape) for name, shape in shapes.items()}


class _Head:
    """`missing`: (parameter, section, expert) that no tensor has filled yet; expert -1 where they are not stacked."""

    def __init__(self, model: nn.Module, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.parameters = dict(model.named_parameters())
        self.patterns = [(rule.pattern(), rule) for rule in rules]
        self.missing = {
            (name, section.name, expert)
            for name, parameter in self.parameters.items()
            for section in placement_of(parameter).sections
            for expert in _experts(parameter)
        }

    def take(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that name and shape fits every place that it goes to, all of them still missing."""
        places: list[tuple[str, str, int]] = []
        for pattern, rule in self.patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                target = filled(rule, match)
                parameter = self.parameters.get(target)
                if parameter is None:
                    return False
                experts = _experts(parameter) if rule.expert is None else [int(match[rule.expert])]
                filling = [(target, rule.section, expert) for expert in experts]
                if not self.missing.issuperset(filling) or not _fits(rule, parameter, shape):
                    return False
                places += filling
        self.missing.difference_update(places)
        return bool(places)


def _experts(parameter: nn.Parameter) -> Sequence[int]:
    return range(placement_of(parameter).experts) or (-1,)


def _fits(rule: Rule, parameter: nn.Parameter, shape: tuple[int, ...]) -> bool:
    placement = placement_of(parameter)
    wanted = list(parameter.shape)
    wanted[placement.dim + bool(placement.experts)] = placement.section(rule.section)[0].size
    if rule.expert is not None:
        wanted = wanted[1:]
    tensor = torch.empty(shape, device="meta")
    if rule.transform is not None:
        try:
            tensor = rule.transform(tensor)
        except (ValueError, RuntimeError, IndexError):
            # It takes a tensor of another layer type apart.
            return False
    return list(tensor.shape) == wanted
