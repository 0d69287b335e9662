"""Which backend runs each kind of layer of a model, and why each one that ranks before it does not, as sentences.

Must not know who writes them to a log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.backend import choose
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder


def backend_choices(model: Decoder, build: Build) -> list[str]:
    """One sentence for each distinct attention of the model's layers, and one for each backend asked for in vain."""
    kinds: dict[tuple[Spec, str], list[int]] = {}
    backends: dict[tuple[Spec, str], AttentionBackend] = {}
    for index, (spec, backend) in enumerate(model.attention):
        kinds.setdefault((spec, backend.name), []).append(index)
        backends[spec, backend.name] = backend
    lines = [_choice(spec, backends[spec, name], layers, build) for (spec, name), layers in kinds.items()]
    families = {spec.family for spec, _ in kinds}
    for family, name in build.chooser.wanted.items():
        if family not in families:
            lines.append(f"attention backend {family}={name} is not used: this model has no layers of {family}")
    return lines


def uncaptured(model: Decoder) -> list[str]:
    """Why decode steps of a model cannot be captured as CUDA graphs, empty if they can."""
    found = {(spec.family, backend.name) for spec, backend in model.attention if not backend.in_graphs}
    return [f"{family}/{name} cannot be captured" for family, name in sorted(found)]


def _choice(spec: Spec, backend: AttentionBackend, layers: Sequence[int], build: Build) -> str:
    family = FAMILIES[spec.family]
    chip, wanted = build.chooser.chip, build.chooser.wanted.get(spec.family)
    over = choose(family, spec, chip, wanted).passed_over
    text = f"attention of layers {_ranges(layers)}: {spec.family}/{backend.name} ({', '.join(_numbers(spec))})"
    passed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in over.items())
    falls = "; ".join(backend.fallbacks(spec, build.dtype, chip))
    return text + (f"; passed over {passed}" if passed else "") + (f"; {falls}" if falls else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, neighbours as a range: "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _numbers(spec: Any, prefix: str = "") -> Iterator[str]:
    """What tells a spec from others of its family: sizes, types and what is on, without factors."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value is None or value is False or isinstance(value, float):
            continue
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}={str(value).removeprefix('torch.')}"
