"""Sees every logit that the engine computes, compares it with what is wanted, and keeps the tokens on their course."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from allotrope.verify.sample import Sample, Wanted


class Seen:
    """What was seen of one sample. A position that is seen again keeps its worst.

    `error`: [F] largest difference of a logit, NaN where not seen. `same`: [F] 1 where the likeliest token agrees, 0
    where it does not, -1 where not seen. `off`, `size`: [F] sums of squares of errors and of wanted logits.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.error = torch.full(wanted.top1.shape, torch.nan)
        self.same = torch.full(wanted.top1.shape, -1, dtype=torch.int8)
        self.off, self.size = torch.zeros(2, len(self.error), dtype=torch.float64)

    def add(self, start: int, logits: torch.Tensor) -> None:
        """`logits`: [n, vocabulary] after the tokens at `start`, `start + 1`, ..."""
        got = logits[: max(0, len(self.error) - start)].float().cpu()
        if not len(got):
            return
        here = slice(start, start + len(got))
        want = self.wanted
        at_peak = (got.gather(1, want.top1[here, None])[:, 0] - want.peak[here]).abs()
        error = torch.maximum(at_peak, (got.logsumexp(-1) - want.total[here]).abs())
        known = (want.positions >= start) & (want.positions < start + len(got))
        if bool(known.any()):
            positions, rows = want.positions[known], want.rows[known]
            off = got[positions - start] - rows
            error[positions - start] = off.abs().amax(-1)
            squares = off.double().square().sum(-1).nan_to_num(nan=torch.inf)
            self.off[positions] = torch.fmax(self.off[positions], squares)
            self.size[positions] = rows.double().square().sum(-1)
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        same = (got.argmax(-1) == want.top1[here]).to(torch.int8)
        before = self.same[here]
        self.same[here] = torch.where(before == 0, before, same)
        self.error[here] = torch.fmax(self.error[here], error)


class LogitsRecorder:
    """An `Observer`. Requests are named SAMPLE/RUN; others are strangers, which are let alone."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = {sample.name: sample for sample in samples}
        self.seen = {sample.name: Seen(sample.wanted) for sample in samples}
        self.chosen: dict[str, list[int]] = defaultdict(list)

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        name = request_id.partition("/")[0]
        if name in self.seen:
            self.seen[name].add(start, logits)

    def token(self, request_id: str, index: int, chosen: int) -> int:
        sample = self.samples.get(request_id.partition("/")[0])
        if sample is None:
            return max(chosen, 0)
        so_far = self.chosen[request_id]
        so_far.append(chosen)
        return sample.forced[len(so_far) - 1]


class FreeRun:
    """An `Observer` that only notes what the engine chooses; where it could choose nothing, token 0 goes on."""

    def __init__(self) -> None:
        self.chosen: dict[str, list[int]] = defaultdict(list)

    def logits(self, request_id: str, index: int, start: int, logits: torch.Tensor) -> None:
        pass

    def token(self, request_id: str, index: int, chosen: int) -> int:
        self.chosen[request_id].append(max(chosen, 0))
        return max(chosen, 0)
