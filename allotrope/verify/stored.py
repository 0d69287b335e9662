"""Outputs that were stored beside a model: `expected.safetensors` and `manifest.json`. Needs no other library.

Per prompt `pNN` the file holds token ids, logits of the last positions (or of all), the likeliest token and its logit
at every position, the greedy continuation and its logits; the manifest says how far off an engine may be.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from allotrope.errors import ModelError
from allotrope.verify.sample import Sample, Wanted
from allotrope.verify.tolerance import Limits

EXPECTED, MANIFEST = "expected.safetensors", "manifest.json"


@dataclass(frozen=True)
class Stored:
    """`samples`: prompts with their outputs. `manifest`: as it stands in the file."""

    directory: Path
    samples: list[Sample]
    manifest: dict[str, Any]

    def limits(self, *, exact: bool) -> Limits:
        """How far off an engine may be; `exact`: in fp32 throughout. Raises ModelError if the manifest does not say."""
        tolerance, noise = self.manifest.get("tolerance", {}), self.manifest.get("noise", {}).get("bf16", {})
        if exact:
            return Limits(self._number("tolerance.fp32_max_abs", tolerance.get("fp32_max_abs")), self._origin)
        median = tolerance.get("bf16_median_abs", 3 * noise.get("median", math.nan))
        top1 = tolerance.get("bf16_top1", max(0.5, noise.get("top1", math.nan) - 0.08))
        return Limits(
            max_abs=math.inf,
            origin=self._origin,
            median_abs=self._number("tolerance.bf16_median_abs", median),
            top1=self._number("tolerance.bf16_top1", top1),
        )

    @property
    def _origin(self) -> str:
        return f"the tolerance of {MANIFEST}"

    def _number(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"cannot judge by {self.directory / MANIFEST}", [f"{name}={value!r} (needs a number)"])
        return float(value)

    @property
    def closest_pick(self) -> float:
        """The smallest gap by which an expert or a row was picked in any prompt, in deviations of the scores."""
        gaps = [prompt.get("min_topk_gap") for prompt in self.manifest.get("prompts", [])]
        return min((gap for gap in gaps if gap is not None), default=math.inf)

    def changed_files(self) -> list[str]:
        """Files of the model that are not those that the outputs were made with, by their SHA-256."""
        stated = self.manifest.get("sha256", {})
        found = [name for name in stated if (self.directory / name).is_file()]
        return [name for name in found if _digest(self.directory / name) != stated[name]]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def has_stored(directory: Path) -> bool:
    """Whether outputs are stored in `directory`."""
    return all((directory / name).is_file() for name in (EXPECTED, MANIFEST))


def read_stored(directory: Path) -> Stored:
    """Read stored outputs. Raises ModelError if they are missing or damaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        tensors = load_file(directory / EXPECTED)
        names = sorted({key.partition(".")[0] for key in tensors})
        samples = [_sample(name, tensors) for name in names]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"cannot read {EXPECTED} and {MANIFEST} in {directory}", [repr(error)]) from error
    if not samples:
        raise ModelError(f"cannot read {EXPECTED} in {directory}", ["it holds no prompt"])
    return Stored(directory, samples, manifest)


def _sample(name: str, tensors: dict[str, torch.Tensor]) -> Sample:
    """Rows of logits from whatever is stored, later ones in place of earlier ones where two are of one position."""
    prompt = tensors[f"{name}.input_ids"].tolist()
    greedy = tensors[f"{name}.greedy"].tolist()
    decode = tensors[f"{name}.greedy_logits"].float()
    last = tensors.get(f"{name}.logits_all", tensors[f"{name}.logits_last8"]).float()
    start = len(prompt) - 1
    rows = dict(enumerate(last, start - len(last) + 1)) | dict(enumerate(decode, start))
    positions = torch.tensor(sorted(rows))
    wanted = Wanted(
        top1=_joined(tensors[f"{name}.top1_all"].long(), decode.argmax(-1)),
        peak=_joined(tensors[f"{name}.top1_logit_all"], decode.amax(-1)),
        total=_joined(tensors[f"{name}.logsumexp_all"], decode.logsumexp(-1)),
        margin=_joined(tensors[f"{name}.margin_all"], -decode.topk(2).values.diff()[:, 0]),
        positions=positions,
        rows=torch.stack([rows[int(position)] for position in positions]),
    )
    return Sample(name, tuple(prompt), tuple(greedy), tuple(greedy), wanted)


def _joined(prompt: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    """Numbers of the prompt's positions, then of those behind it; the last of the first is the first of the second."""
    return torch.cat((prompt[:-1], decode))
