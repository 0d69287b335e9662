"""Layer by layer against the reference: the first that diverges, and in which of its parts.

A token whose expert or row was picked by less than the rounding may go another way on either side, and with it all
tokens behind it: such near-ties are told apart from a layer that is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from types import TracebackType

import torch
from torch import nn

from allotrope.engine.engine import Engine
from allotrope.layers.step import Step
from allotrope.verify.hooks import EMBEDDING, PARTIAL_STAGES, STAGES, LayerHooks, Place, TopkSelection, hooked
from allotrope.verify.logits_recorder import LogitsRecorder
from allotrope.verify.sample import Sample
from allotrope.verify.transformers_model import Trace

# In standard deviations of the scores. A pick that differs where the gap is wider is wrong.
NEAR_TIE = 1e-3
# The same where our selections could not be compared: only a gap that rounding alone can close is a near-tie.
UNSEEN_TIE = 2e-5
# How many times its usual error a part of a layer must have to be the one that diverges.
_UNUSUAL = 3.0


@dataclass(frozen=True)
class LayerError:
    """One layer against the reference's.

    `kind`: its attention family. `rms`: stage -> largest relative RMS error of any sample, or the relative error of the
    median token; a stage that cannot be compared is missing. `selections`: what became of its top-k selections. `ties`:
    tokens with a near-tie here. `worst`: sample and position of the largest error, as text.
    """

    index: int
    kind: str
    rms: dict[str, float]
    selections: str
    ties: int
    worst: str

    @property
    def error(self) -> float:
        """Relative error of what the layer hands on; inf if it has another shape."""
        return self.rms.get("out", float("inf"))


@dataclass(frozen=True)
class LayerReport:
    """`layers`: each one's error. `limits`: largest error allowed of each. `embedding`: error before the first layer.

    `tainted`: per sample, the first position that a near-tie may have changed.
    """

    layers: list[LayerError]
    limits: list[float]
    embedding: float
    tainted: dict[str, int] = field(default_factory=dict)

    @property
    def first(self) -> LayerError | None:
        """The first layer that diverges."""
        pairs = zip(self.layers, self.limits, strict=True)
        return next((layer for layer, limit in pairs if not layer.error <= limit), None)

    def finding(self) -> str | None:
        """The first divergence in words, None if there is none."""
        if not self.embedding <= self.limits[0]:
            return f"the embedding differs before the first layer: relative RMS {self.embedding:.1e}"
        layer = self.first
        if layer is None:
            return None
        limit = self.limits[layer.index]
        text = f"layer {layer.index} ({layer.kind}) is the first that diverges: relative error {layer.error:.1e}"
        return f"{text} (allowed: {limit:.0e}), {self._part(layer, limit)}; {layer.worst}"

    def _part(self, layer: LayerError, limit: float) -> str:
        # What a stage is off by in layers that agree is rounding, or not the same thing on both sides.
        sound = [one for one, most in zip(self.layers, self.limits, strict=True) if one.error <= most]
        usual = {stage: max((one.rms.get(stage, 0.0) for one in sound), default=0.0) for stage in STAGES}
        words = {
            "mixer in": "in the norm before its mixer",
            "mixer out": "in its mixer",
            "ffn in": "between its mixer and its ffn (the mixer's own output agrees)",
            "ffn out": "in its ffn",
            "out": "in what follows its ffn",
        }
        for stage in STAGES:
            if stage in layer.rms and not layer.rms[stage] <= max(limit, _UNUSUAL * usual[stage]):
                return words[stage] + (
                    f" (top-k: {layer.selections})" if stage == "ffn out" and layer.selections else ""
                )
        return "part unknown"


class LayerRecorder(LogitsRecorder):
    """Also compares every layer's hidden states and selections with `traces`. A context around the run."""

    def __init__(self, samples: Sequence[Sample], traces: Mapping[str, Trace]) -> None:
        super().__init__([sample for sample in samples if sample.name in traces])
        self.traces = traces
        # Per place and sample: sums of squares of error and of wanted state, of each token.
        self.sums: dict[Place, dict[str, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        self.selections: dict[tuple[int, str], list[TopkSelection]] = {}
        self._open = ExitStack()
        self._hooks: LayerHooks | None = None
        self._done = self._tokens = 0
        self._unseen: frozenset[str] = frozenset()

    def attach(self, engine: Engine) -> None:
        """Look into the model of `engine` from now on."""
        self._open.close()
        self._hooks = self._open.enter_context(hooked(list(engine.model.layers)))
        # Of several ranks, no one sees what leaves the two parts of a layer.
        self._unseen = PARTIAL_STAGES if engine.model.parallel.layout.size > 1 else frozenset()
        self._open.callback(engine.model.register_forward_pre_hook(self._begin).remove)

    def __enter__(self) -> LayerRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _begin(self, _: nn.Module, args: tuple[Step, ...]) -> None:
        assert self._hooks is not None
        self._hooks.clear()
        self._done, self._tokens = 0, len(args[0].ids)

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        super().logits(request_id, index, start, logits)
        rows = slice(self._done, self._done + len(logits))
        self._done = rows.stop
        name = request_id.partition("/")[0]
        if name in self.samples:
            self._compare(name, start, rows)

    def _compare(self, name: str, start: int, rows: slice) -> None:
        """Hold the tokens in `rows` of the step, from position `start` of a sample on, against its trace."""
        assert self._hooks is not None
        trace = self.traces[name]
        for place, want in trace.hidden.items():
            if place[1] in self._unseen:
                continue
            found = self._hooks.hidden.get(place)
            # Nothing follows the last forced token: the reference has not computed it.
            length = min(rows.stop - rows.start, len(want) - start)
            if found is None or length <= 0 or found[0].numel() != want.shape[1]:
                continue
            got = found[rows][:length].flatten(1).float().cpu()
            exact = want[start : start + length].float()
            off, size = self.sums[place].setdefault(name, _blank(len(want)))
            worse = torch.nan_to_num((got - exact).square().sum(-1), nan=torch.inf, posinf=torch.inf)
            off[start : start + length] = torch.maximum(off[start : start + length], worse)
            size[start : start + length] = exact.square().sum(-1)
        for layer, calls in self._hooks.selections(self._tokens).items():
            self._keep_selections(layer, name, start, rows, calls)

    def _keep_selections(self, layer: int, name: str, start: int, rows: slice, calls: Sequence[TopkSelection]) -> None:
        length = len(self.samples[name].fed)
        kept = self.selections.setdefault((layer, name), [])
        if not kept:
            kept += [
                TopkSelection(c.count, c.k, torch.empty(0), c.chosen.new_full((length, c.shape[2]), -1)) for c in calls
            ]
        for old, new in zip(kept[::-1], calls[::-1], strict=False):
            if old.shape == new.shape:
                got = new.chosen[rows][: length - start]
                old.chosen[start : start + len(got)] = got


def _blank(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(length), torch.zeros(length)


def read_layers(
    recorder: LayerRecorder, kinds: Sequence[str], limits: Sequence[float], *, medians: bool = False
) -> LayerReport:
    """What `recorder` saw, layer by layer. `kinds`: the attention family of each. `limits`: largest error of each.

    `medians`: errors are the median token's, of all tokens: where rounding is coarse, selections often differ.
    """
    tainted: dict[str, int] = {}
    layers = []
    for index, kind in enumerate(kinds):
        flipped = {name: _flips(recorder, index, name, limits[index]) for name in recorder.samples}
        clean = {}
        for name, sample in recorder.samples.items():
            positions = torch.arange(len(sample.fed))
            clean[name] = (positions < tainted.get(name, len(sample.fed))) & ~flipped[name][0]
            clean[name] |= torch.tensor(medians)
        rms = {
            stage: _median(recorder.sums[index, stage].values())
            if medians
            else max(_rms(*sums, clean[name]) for name, sums in recorder.sums[index, stage].items())
            for stage in STAGES
            if recorder.sums.get((index, stage))
        }
        ties = sum(int(flips.sum()) for flips, _ in flipped.values())
        states = {state for _, state in flipped.values()}
        selections = next((state for state in ("wrong", "unseen", "same, some unseen", "same") if state in states), "")
        selections = "some differ" if medians and selections == "wrong" else selections
        layers.append(LayerError(index, kind, rms, selections, ties, _worst(recorder, index, clean)))
        for name, (flips, _) in flipped.items():
            if bool(flips.any()):
                first = int(flips.nonzero()[0])
                tainted[name] = min(first, tainted.get(name, first))
    before = [_rms(*sums, torch.ones_like(sums[0]) > 0) for sums in recorder.sums.get((0, EMBEDDING), {}).values()]
    return LayerReport(layers, list(limits), max(before, default=0.0), tainted)


def _median(sums: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Relative error of the median token of all samples, of those that were seen."""
    relative = torch.cat([(off / size)[size > 0] for off, size in sums])
    return float(relative.median()) ** 0.5 if len(relative) else 0.0


def _rms(off: torch.Tensor, size: torch.Tensor, clean: torch.Tensor) -> float:
    total = float(size[clean].double().sum())
    error = float(off[clean].double().sum())
    return (error / total) ** 0.5 if total else 0.0


def _worst(recorder: LayerRecorder, layer: int, clean: Mapping[str, torch.Tensor]) -> str:
    """Where the layer's output is farthest off."""
    worst = (-1.0, "")
    for name, (off, size) in recorder.sums.get((layer, "out"), {}).items():
        relative = (off / size.clamp(min=1e-30)).where(clean[name], 0.0)
        position = int(relative.argmax())
        text = f"worst at position {position} of the prompt of {len(recorder.samples[name].prompt)} tokens"
        worst = max(worst, (float(relative[position]), text))
    return worst[1]


def _flips(recorder: LayerRecorder, layer: int, name: str, limit: float) -> tuple[torch.Tensor, str]:
    """Which tokens of a sample had a near-tie in a layer, and what became of the layer's selections."""
    flips = torch.zeros(len(recorder.samples[name].fed), dtype=torch.bool)
    theirs = recorder.traces[name].selections.get(layer, [])
    ours = recorder.selections.get((layer, name), [])
    # The choice of experts comes last, on both sides; what was picked before it may be picked in another way.
    pairs = list(takewhile(lambda pair: pair[0].shape == pair[1].shape, zip(theirs[::-1], ours[::-1], strict=False)))
    sums = recorder.sums.get((layer, "out"), {}).get(name)
    for unseen in theirs[: len(theirs) - len(pairs)]:
        if sums is not None:
            flips |= (unseen.gap < UNSEEN_TIE) & (sums[0] > limit**2 * sums[1])
    wrong = False
    for want, got in pairs:
        # Where a group of experts was nearly tied, the experts within it may differ by any gap.
        differs = (got.chosen[:, 0] >= 0) & (want.chosen != got.chosen).any(-1) & ~flips
        flips |= differs & (want.gap < NEAR_TIE)
        wrong |= bool((differs & (want.gap >= NEAR_TIE)).any())
    if wrong or not theirs:
        return flips, "wrong" if wrong else ""
    return flips, ("same" if len(pairs) == len(theirs) else "same, some unseen") if pairs else "unseen"
