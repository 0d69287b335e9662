"""Loading weights by rules that are data, with the proof that every key was read and every parameter filled.

A `Rule` maps checkpoint names to our parameters: rename, fuse (several tensors into sections of one parameter), stack
(one tensor per expert), transform, or drop with a reason. Sharding follows from each parameter's placement, so one rule
serves every tensor-parallel size.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.checkpoint.copies import Copies
from allotrope.checkpoint.dequantize import QuantizedView
from allotrope.errors import ModelError
from allotrope.layers.parallel import parallel_of, placement_of
from allotrope.layers.weights import SCALES, VALUES, format_of, kept_names, scales_of_blocks
from allotrope.ops.matmul.gguf import GgufBlocks
from allotrope.ops.matmul.int4 import Int4
from allotrope.ops.matmul.weight import SHARED_ROWS, Format
from allotrope.progress import report_bytes

Transform = Callable[[torch.Tensor], torch.Tensor]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# Reasons shown before the rest is counted: a wrong checkpoint has thousands of them, all alike.
_SHOWN = 20


@dataclass(frozen=True)
class Rule:
    """`source`: checkpoint name with placeholders such as `{i}` for integers, the same in `target`.

    `section`: which part of the target the tensor fills. `expert`: the placeholder that counts the experts of a stacked
    target; without one, the tensor holds all of them.
    `transform`: applied to the full tensor before it is cut. A `target` of None drops the tensor, for `reason`.
    """

    source: str
    target: str | None
    section: str = ""
    expert: str | None = None
    transform: Transform | None = None
    reason: str = ""

    def pattern(self) -> re.Pattern[str]:
        """The source as a regular expression; `{i}` matches an integer, `*` anything."""
        parts = []
        last = 0
        for placeholder in _PLACEHOLDER.finditer(self.source):
            parts.append(re.escape(self.source[last : placeholder.start()]))
            parts.append(f"(?P<{placeholder.group(1)}>\\d+)")
            last = placeholder.end()
        parts.append(re.escape(self.source[last:]))
        return re.compile("".join(parts).replace(r"\*", ".*"))


def drop(source: str, reason: str) -> Rule:
    """Leave matching tensors out, whatever other rules they match, and say why. `*` matches anything."""
    return Rule(source, None, reason=reason)


def fuse(source: str, target: str, sections: Iterable[str]) -> list[Rule]:
    """One rule per section, its name put for `{}` in `source`."""
    return [Rule(source.replace("{}", section), target, section.removesuffix("_proj")) for section in sections]


def filled(rule: Rule, match: re.Match[str]) -> str:
    """The rule's target with the integers of a match of its source."""
    assert rule.target is not None
    return _PLACEHOLDER.sub(lambda placeholder: match.group(placeholder.group(1)), rule.target)


@dataclass
class LoadReport:
    """What loading did: tensors read, bytes, and tensors dropped with their reasons.

    `dequantized`: weights that are stored quantized and were not kept so, with `*` for numbers, by the format that they
    could be kept in; None: none.
    """

    tensors: int = 0
    bytes: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    dequantized: dict[Format | None, set[str]] = field(default_factory=dict)


class Loader:
    """Fills a module's parameters from a checkpoint and accounts for every name on both sides.

    `is_elsewhere`: whether a parameter is on another pipeline stage, which reads it.
    """

    def __init__(
        self, module: nn.Module, rules: Sequence[Rule], is_elsewhere: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._is_elsewhere = is_elsewhere
        self.parameters = dict(module.named_parameters())
        self.rules = [(rule.pattern(), rule) for rule in rules]
        # Per parameter, what is still to be filled: (section, expert) pairs.
        self.missing = {name: _pieces(parameter) for name, parameter in self.parameters.items()}
        self.reasons: list[str] = []

    def load(self, checkpoint: Checkpoint) -> LoadReport:
        """Read every tensor once. Raises ModelError with every mismatch at the end."""
        with Copies(max((parallel_of(one).size for one in self.parameters.values()), default=1)) as self._copies:
            report = self._read_all(checkpoint)
        for name, pieces in self.missing.items():
            self.reasons.extend(
                f"parameter {name}{_piece_text(piece)} is in no checkpoint tensor" for piece in sorted(pieces)
            )
        if self.reasons:
            shown = self.reasons[:_SHOWN]
            if len(self.reasons) > _SHOWN:
                shown.append(f"and {len(self.reasons) - _SHOWN} more")
            raise ModelError(f"{checkpoint.source} does not fit its architecture", shown)
        return report

    def _read_all(self, checkpoint: Checkpoint) -> LoadReport:
        report = LoadReport()
        headers = checkpoint.headers()
        total, done = sum(header.stored_bytes for header in headers.values()), 0
        for name, header in headers.items():
            report_bytes(done, total)
            done += header.stored_bytes
            matches = [(match, rule) for pattern, rule in self.rules if (match := pattern.fullmatch(name))]
            if not matches:
                self.reasons.append(f"checkpoint tensor {name} is used by no rule")
                continue
            reason = next((rule.reason for _, rule in matches if rule.target is None), None)
            if reason is not None:
                report.dropped[name] = reason
                continue
            mine = [one for one in matches if not self._is_elsewhere(filled(one[1], one[0])) and self._holds(*one)]
            if mine:
                report.tensors += 1
                self._read(checkpoint, name, mine, report)
        report_bytes(total, total)
        return report

    def _holds(self, match: re.Match[str], rule: Rule) -> bool:
        """Whether this rank has what a tensor fills: an expert may be on other ranks alone."""
        if rule.expert is None:
            return True
        expert, target = int(match.group(rule.expert)), filled(rule, match)
        parameter = self.parameters.get(target, self.parameters.get(target + VALUES))
        if parameter is None:
            return True
        placement = placement_of(parameter)
        return not expert < placement.experts or expert in placement.slots

    def _read(
        self, checkpoint: Checkpoint, name: str, matches: Sequence[tuple[re.Match[str], Rule]], report: LoadReport
    ) -> None:
        """Put a tensor into every place that it fills, quantized where the place keeps it so."""
        plain: torch.Tensor | None = None
        packed: tuple[torch.Tensor, torch.Tensor] | None = None
        view = checkpoint if isinstance(checkpoint, QuantizedView) else None
        format = view.format(name) if view is not None else None
        for match, rule in matches:
            target = filled(rule, match)
            kept = self._kept(target, rule.section) if format is not None else None
            if view is not None and kept is not None:
                if packed is None:
                    packed = view.packed(name)
                    report.bytes += sum(part.nbytes for part in packed)
                for ending, part in zip((VALUES, SCALES), packed, strict=True):
                    self._place(name, part, kept + ending, match, rule)
                continue
            if plain is None:
                plain = checkpoint.read(name)
                report.bytes += plain.nbytes
            if view is not None and name in view.made:
                report.dequantized.setdefault(format, set()).add(re.sub(r"\d+", "*", target))
            self._place(name, plain, target, match, rule)

    def _kept(self, target: str, section: str) -> str | None:
        """The name of the quantized weight that a section of `target` is kept in, None where it is not."""
        for name in kept_names(target):
            values = self.parameters.get(name + VALUES)
            if values is None:
                return None
            if any(one.name == section for one in placement_of(values).sections):
                return name
        return None

    def _place(self, name: str, tensor: torch.Tensor, target: str, match: re.Match[str], rule: Rule) -> None:
        parameter = self.parameters.get(target)
        if parameter is None:
            self.reasons.append(f"checkpoint tensor {name} goes to {target}, which this model does not have")
            return
        placement = placement_of(parameter)
        count, stacked = placement.experts, rule.expert is None
        stack = tensor.shape[0] if tensor.dim() else 0
        wrong = f"checkpoint tensor {name} has {stack} experts (needs {count})"
        first, needed = 0, count
        if count and stacked and placement.held is not None:
            if stack != count:
                self.reasons.append(wrong)
                return
            # Of a file that is mapped, the rest is never read.
            first, needed = min(placement.held), max(placement.held) + 1 - min(placement.held)
            tensor = tensor[first : first + needed]
        if rule.transform is not None:
            tensor = rule.transform(tensor)
        if not count or not stacked:
            expert = -1 if rule.expert is None else int(match.group(rule.expert))
            self._fill(name, tensor, target, rule.section, expert)
        elif not tensor.dim() or tensor.shape[0] != needed:
            self.reasons.append(wrong)
        else:
            for expert in placement.slots:
                self._fill(name, tensor[expert - first], target, rule.section, expert)

    def _fill(self, name: str, tensor: torch.Tensor, target: str, part: str, expert: int) -> None:
        """Put a tensor into section `part` of a parameter, or of one expert of it."""
        parameter = self.parameters[target]
        placement = placement_of(parameter)
        piece = (part, expert)
        if piece not in self.missing[target]:
            self.reasons.append(
                f"checkpoint tensor {name} fills {target}{_piece_text(piece)}, which is full or not there"
            )
            return
        data = parameter.data if expert < 0 else parameter.data[placement.slots[expert]]
        section, _ = placement.section(part)
        wanted = list(data.shape)
        wanted[placement.dim] = section.size
        if list(tensor.shape) != wanted:
            self.reasons.append(f"checkpoint tensor {name} has shape {list(tensor.shape)} (needs {wanted})")
        elif data.dtype.is_floating_point and not tensor.dtype.is_floating_point:
            # Numbers of a format that the config does not name: taken as they are, they would be other weights.
            stored = str(tensor.dtype).removeprefix("torch.")
            self.reasons.append(f"checkpoint tensor {name} is {stored} (needs floating-point numbers)")
        else:
            copy = functools.partial(placement.fill, data, tensor, part, parallel_of(parameter))
            self._copies.add(tensor.nbytes, copy)
        self.missing[target].discard(piece)


def _pieces(parameter: nn.Parameter) -> set[tuple[str, int]]:
    placement = placement_of(parameter)
    if placement.derived:
        return set()
    return {(section.name, expert) for section in placement.sections for expert in placement.slots}


def _piece_text(piece: tuple[str, int]) -> str:
    section, expert = piece
    parts = [part for part in (section, f"expert {expert}" if expert >= 0 else "") if part]
    return f" ({', '.join(parts)})" if parts else ""


def finish(module: nn.Module) -> None:
    """Let modules derive what they need from their loaded weights."""
    for part in module.modules():
        hook = getattr(part, "finish_loading", None)
        if hook is not None:
            hook()


def fill_random(module: nn.Module, seed: int) -> None:
    """Reproducible random weights: of unit gain for matrices, around 1 for vectors; equal at every parallel size.

    They are drawn where they stay, so that a GPU's differ from a CPU's.
    """
    for name, parameter in module.named_parameters():
        placement, parallel = placement_of(parameter), parallel_of(parameter)
        if placement.derived:
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        shape = list(parameter.shape)
        dim = placement.dim + bool(placement.experts)
        for section in placement.sections:
            shape[dim] = section.size
            if not placement.experts:
                placement.fill(parameter.data, _draw(name, shape, parameter, generator), section.name, parallel)
                continue
            slots = placement.slots
            for expert in range(placement.experts):
                full = _draw(name, shape[1:], parameter, generator)
                if expert in slots:
                    placement.fill(parameter.data[slots[expert]], full, section.name, parallel)


def _draw(name: str, shape: list[int], parameter: nn.Parameter, generator: torch.Generator) -> torch.Tensor:
    below, device = placement_of(parameter).below, parameter.device
    if below:
        return torch.randint(below, shape, generator=generator, device=device)
    format = format_of(parameter)
    if isinstance(format, GgufBlocks) and shape[-1]:
        # Random bytes would have scales that are no numbers.
        inputs = shape[-1] // format.layout.bytes * format.layout.numbers
        plain = torch.randn((*shape[:-1], inputs), generator=generator, dtype=torch.float32, device=device)
        return format.quantize(plain / math.sqrt(inputs)).values
    if parameter.dtype == torch.uint8:
        # Codes of four bits, or exponents of scales a little below 2^-5.
        low, high = (118, 121) if name.endswith(SCALES) else (0, 256)
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)
    if parameter.dtype == torch.int32:
        # Eight integers each.
        return torch.randint(-(2**31), 2**31, shape, generator=generator, device=device, dtype=torch.int32)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
    if name.endswith(VALUES):
        return values
    if name.endswith(SCALES):
        # Of 128 inputs each, or nearly, that are around 1; integers are around 4.6.
        if scales_of_blocks(parameter):
            values = values[..., ::SHARED_ROWS, :].repeat_interleave(SHARED_ROWS, dim=-2)[..., : shape[-2], :]
        size = math.sqrt(128 * shape[-1])
        if isinstance(format, Int4):
            size = 4.6 * math.sqrt((format.group_size or 128) * shape[-1])
        return values.clamp_(-2, 2).mul_(0.2).add_(1.0).div_(size)
    return values / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0 + 0.1 * values
