"""From errors to a verdict: what is wrong, and what is only a near-tie.

Two ways to judge. Exact: no logit may be off by more than a limit. By medians, for types that round: the median of the
errors and the share of equal top-1 tokens, because rounding flips an expert or an index pick here and there, and a
single position then says nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.verify.logits_recorder import LogitsRecorder
from allotrope.verify.sample import Sample


@dataclass(frozen=True)
class Limits:
    """`max_abs`: of any logit's error, in exact judgement; `rel_rms`: of all together. `median_abs`, `top1`: set where
    medians decide. `origin`: where the numbers come from, in words.
    """

    max_abs: float
    origin: str
    rel_rms: float = math.inf
    median_abs: float | None = None
    top1: float | None = None

    @property
    def exact(self) -> bool:
        return self.median_abs is None

    def __str__(self) -> str:
        if self.median_abs is None:
            together = "" if math.isinf(self.rel_rms) else f", all together by a relative RMS of {self.rel_rms:.1g}"
            return f"no logit may be off by more than {self.max_abs:.2g}{together} ({self.origin})"
        return (
            f"the median position may be off by {self.median_abs:.2g} and {self.top1:.1%} of top-1 tokens must agree "
            f"({self.origin})"
        )


# What FP8 rows may cost on top of bf16. Rows alone, with all else in fp32 on a CPU, gave six tiny oracle models 0.8 to
# 1.1 times the median error that bf16 throughout may have, where every token is a step of its own (half of that where
# prompts are whole), and up to 0.18 less top-1 agreement than bf16 must have.
FP8_MEDIAN = 1.5
_FP8_TOP1 = 0.25
FP8_ROUNDING = 16.0
"""How much coarser than bf16 rounds an FP8 row is rounded."""


def with_fp8_rows(limits: Limits) -> Limits:
    """The bound of an engine whose cached rows are FP8, from that of bf16: a larger median, less agreement."""
    if limits.median_abs is None or limits.top1 is None:
        raise ValueError("FP8 rows are judged by medians")
    origin = f"{limits.origin}, for FP8 rows {FP8_MEDIAN} times the error and {_FP8_TOP1:.0%} less agreement"
    median, top1 = FP8_MEDIAN * limits.median_abs, max(0.0, limits.top1 - _FP8_TOP1)
    return dataclasses.replace(limits, median_abs=median, top1=top1, origin=origin)


def measured(what: str) -> Limits:
    """The error is found, and only judged if logits are no numbers, or worse than 0 for each. `what`: has it."""
    return Limits(math.inf, f"{what}: the error is measured", rel_rms=1.0, median_abs=math.inf, top1=0.0)


# What other ways to cut prompts may add to the error of quantized weights: products of few rows round activations
# otherwise than products of many. Steps of three tokens gave a tiny Qwen3 in int8 1.3 times the median.
_QUANTIZED_MEDIAN, _QUANTIZED_TOP1 = 1.5, 0.1


def as_measured(score: Score) -> Limits:
    """The bound of further modes with the same quantized weights. `score`: of whole prompts."""
    origin = f"whole prompts with the same weights, {_QUANTIZED_MEDIAN} times their error"
    median, top1 = _QUANTIZED_MEDIAN * score.median_abs, max(0.0, score.top1 - _QUANTIZED_TOP1)
    return Limits(math.inf, origin, median_abs=median, top1=top1)


@dataclass(frozen=True)
class Fault:
    """A position that is wrong. `error`: of its worst logit."""

    sample: str
    prompt_tokens: int
    position: int
    error: float
    what: str

    def __str__(self) -> str:
        return f"prompt of {self.prompt_tokens} tokens, position {self.position}: {self.what}"


@dataclass(frozen=True)
class Score:
    """What a mode's logits and tokens came to.

    `rel_rms`: RMS of all errors over RMS of the wanted logits. `top1`: share of positions whose likeliest token
    agrees. `greedy_same`, `greedy_total`: prompts whose chosen tokens are all the reference's, and prompts.
    `argmax_ties`: positions where another token was likeliest by less than the error. `router_ties`: positions not
    judged, because an expert or a row before them was picked by less than the rounding. `faults`: worst first.
    """

    positions: int
    max_abs: float
    median_abs: float
    rel_rms: float
    top1: float
    greedy_same: int
    greedy_total: int
    argmax_ties: int
    router_ties: int
    faults: tuple[Fault, ...]


def score_samples(
    samples: Sequence[Sample], recorder: LogitsRecorder, limits: Limits, tainted: Mapping[str, int]
) -> Score:
    """Compare what `recorder` saw. `tainted`: per sample, the first position after a router near-tie, if any."""
    errors, same = [], []
    off = size = 0.0
    faults: list[Fault] = []
    argmax_ties = router_ties = 0
    for sample in samples:
        seen = recorder.seen[sample.name]
        looked = ~seen.error.isnan()
        behind = torch.arange(len(looked)) >= tainted.get(sample.name, len(looked))
        router_ties += int((looked & behind).sum())
        compared = looked & ~behind
        errors.append(seen.error[compared])
        same.append(seen.same[compared])
        off, size = off + float(seen.off[compared].sum()), size + float(seen.size[compared].sum())
        differs = compared & (seen.same == 0)
        argmax_ties += int((differs & (sample.wanted.margin <= 2 * seen.error)).sum())
        if limits.exact:
            faults += _faults(sample, recorder, limits.max_abs, compared)
    error = torch.cat(errors)
    if not len(error):
        error = torch.tensor([torch.inf])
    runs = [(sample, tokens) for sample in samples for tokens in _runs(sample, recorder)]
    score = Score(
        positions=sum(map(len, errors)),
        max_abs=float(error.max()),
        median_abs=float(error.median()),
        rel_rms=(off / size) ** 0.5 if size else float("inf"),
        top1=float(torch.cat(same).float().mean()) if sum(map(len, same)) else 0.0,
        greedy_same=sum(tuple(tokens) == sample.greedy[: len(tokens)] for sample, tokens in runs),
        greedy_total=len(runs),
        argmax_ties=argmax_ties,
        router_ties=router_ties,
        faults=tuple(sorted(faults, key=lambda fault: -fault.error)),
    )
    if not limits.exact:
        return _by_medians(score, limits)
    if score.rel_rms <= limits.rel_rms or score.faults or not size:
        return score
    text = f"all logits together have a relative RMS error of {score.rel_rms:.1e}; allowed: {limits.rel_rms:.1e}"
    return dataclasses.replace(score, faults=(Fault("all", 0, -1, score.max_abs, text),))


def _runs(sample: Sample, recorder: LogitsRecorder) -> list[list[int]]:
    return [tokens for name, tokens in recorder.chosen.items() if name.partition("/")[0] == sample.name]


def _faults(sample: Sample, recorder: LogitsRecorder, limit: float, compared: torch.Tensor) -> list[Fault]:
    """Logits that are off, and tokens that were chosen although another one was clearly likelier."""
    seen, length = recorder.seen[sample.name], len(sample.prompt)
    found = [
        Fault(sample.name, length, position, float(seen.error[position]), f"off by {float(seen.error[position]):.2g}")
        for position in (compared & ~(seen.error <= limit)).nonzero().flatten().tolist()
    ]
    for tokens in _runs(sample, recorder):
        for i, (chosen, right) in enumerate(zip(tokens, sample.greedy, strict=False)):
            position = length - 1 + i
            clear = float(sample.wanted.margin[position]) > 2 * limit
            if chosen != right and clear and bool(compared[position]) and seen.error[position] <= limit:
                what = f"chose token {chosen} although its own logits favour {right}"
                found.append(Fault(sample.name, length, position, float(seen.error[position]), what))
    return found


def _by_medians(score: Score, limits: Limits) -> Score:
    assert limits.median_abs is not None and limits.top1 is not None
    wrong = []
    if not math.isfinite(score.max_abs):
        wrong.append("logits that are no numbers")
    elif limits.rel_rms < score.rel_rms < math.inf:
        wrong.append(f"relative RMS error {score.rel_rms:.3g}; allowed: {limits.rel_rms:.3g}")
    if not score.median_abs <= limits.median_abs:
        wrong.append(f"median error {score.median_abs:.3g}; allowed: {limits.median_abs:.3g}")
    if not score.top1 >= limits.top1:
        wrong.append(f"top-1 agreement {score.top1:.1%}; needed: {limits.top1:.1%}")
    faults = tuple(Fault("all", 0, -1, score.median_abs, text) for text in wrong)
    return dataclasses.replace(score, faults=faults)
