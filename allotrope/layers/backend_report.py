"""Which backend runs each attention and operation of a model, and why each one that ranks before it does not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.backend import choose
from allotrope.kernels.triton_version import triton_reasons
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.ops.matmul.weight import Format

log = logging.getLogger("allotrope.layers")


@dataclass(frozen=True)
class ChoiceReport:
    """The backend of one attention or operation, in words.

    `layers`: numbers of the layers that have this attention, such as "0-2, 5"; "" for an operation. `numbers`: what
    tells its spec from others. `passed_over`: better-ranked backend -> reasons. `fallbacks`: which steps go elsewhere.
    """

    op: str
    layers: str
    numbers: tuple[str, ...]
    backend: str
    passed_over: Mapping[str, Sequence[str]]
    fallbacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        whose = f"attention of layers {self.layers}: " if self.layers else "operation "
        passed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in self.passed_over.items())
        numbers = f" ({', '.join(self.numbers)})" if self.numbers else ""
        text = f"{whose}{self.op}/{self.backend}{numbers}"
        return "; ".join([text, *([f"passed over {passed}"] if passed else []), *self.fallbacks])


def choice_reports(model: Decoder, build: Build) -> list[ChoiceReport]:
    """What runs each distinct attention of the model's layers, and then each distinct operation."""
    chosen = {(choice.op, choice.spec): choice for choice in build.chooser.choices}
    layers: dict[tuple[Spec, str], list[int]] = {}
    backends: dict[tuple[Spec, str], AttentionBackend] = {}
    for index, (spec, backend) in enumerate(model.attention):
        layers.setdefault((spec, backend.name), []).append(index)
        backends[spec, backend.name] = backend
    reports = []
    for (spec, name), numbers in layers.items():
        choice = chosen.get((spec.family, spec))
        if choice is None:
            choice = choose(FAMILIES[spec.family], spec, build.chooser.chip, build.chooser.wanted.get(spec.family))
        falls = tuple(backends[spec, name].fallbacks(spec, build.dtype, build.chooser.chip))
        reports.append(
            ChoiceReport(spec.family, _ranges(numbers), tuple(_numbers(spec)), name, choice.passed_over, falls)
        )
    for choice in build.chooser.choices:
        if choice.op not in FAMILIES:
            numbers_of = tuple(_numbers(choice.spec))
            reports.append(ChoiceReport(choice.op, "", numbers_of, choice.backend.name, choice.passed_over))
    # Specs that differ by a factor alone read the same.
    return list({str(report): report for report in reports}.values())


def unused_lines(build: Build) -> list[str]:
    """One sentence for each backend that was asked for in vain."""
    return [
        f"attention backend {op}={name} is not used: this model has no layers of {op}"
        if op in FAMILIES
        else f"backend {op}={name} is not used: this model has no operation {op}"
        for op, name in build.chooser.unused.items()
    ]


def backend_choices(model: Decoder, build: Build) -> list[str]:
    """One sentence for each distinct attention and operation, and one for each backend asked for in vain."""
    return [*map(str, choice_reports(model, build)), *unused_lines(build)]


def warn_without_kernels(build: Build) -> None:
    """Warn of a GPU that runs without the kernels made for it."""
    chip = build.chooser.chip
    reasons = triton_reasons(chip) if chip.is_gpu else []
    if reasons:
        log.warning("layers run at less than full speed, by PyTorch alone: %s", "; ".join(reasons))


def uncaptured(attention: Iterable[tuple[Spec, AttentionBackend]]) -> list[str]:
    """Why steps with a model's layers cannot be captured as CUDA graphs, empty if they can."""
    found = {(spec.family, backend.name) for spec, backend in attention if not backend.in_graphs}
    return [f"{family}/{name} cannot be captured" for family, name in sorted(found)]


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
    if not dataclasses.is_dataclass(spec):
        return
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value is None or value is False or isinstance(value, float):
            continue
        if isinstance(value, Format):
            group = f" in groups of {value.group_size}" if value.group_size else ""
            yield f"{prefix}{field.name}={value.name}{group}"
        elif dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}={str(value).removeprefix('torch.')}"
