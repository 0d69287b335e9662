"""The tokens that a step yields to a sequence, and where these end.

Must not know: how they were sampled, or what becomes of a sequence that ends.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

from allotrope.engine.sequence import Sequence
from allotrope.request import FinishReason, TokenLogprobs

NO_TOKEN = "the model's scores for the next token are not numbers, or every token is masked"


@dataclass(slots=True)
class SampledTokens:
    """The new tokens of a sequence from output token `index` on: accepted drafts, and the one sampled behind them.

    The last is -1 where there is no distribution. `logprobs`: per token. `num_drafts`: drafts that were verified.
    """

    seq: Sequence
    index: int
    tokens: abc.Sequence[int]
    logprobs: abc.Sequence[TokenLogprobs | None]
    num_drafts: int

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


class KeptTokens(NamedTuple):
    """Those up to the last one of the sequence.

    `reason`: why that is its last, None where it goes on. `stopped_by`: the stop id that it is. `error`: why there is
    no token behind them.
    """

    tokens: list[int]
    reason: FinishReason | None
    stopped_by: int | None
    error: str | None


def keep_tokens(sampled: SampledTokens) -> KeptTokens:
    """Up to the first that ends the sequence. A grammar that it follows goes on by each."""
    seq, constraint = sampled.seq, sampled.seq.sampling.constraint
    tokens: list[int] = []
    reason: FinishReason | None = None
    stopped_by: int | None = None
    error: str | None = None
    for index, token in enumerate(sampled.tokens, sampled.index):
        if token < 0:
            # What its own row was masked by, which may be behind drafts.
            masked_by = seq.sampling.after_drafts(sampled.num_accepted).constraint
            error = (None if masked_by is None else masked_by.failure) or NO_TOKEN
            break
        tokens.append(token)
        if constraint is not None:
            constraint.take(token)
            if constraint.failure is not None and not constraint.ended:
                error = constraint.failure
                tokens.pop()
                break
        reason, stopped_by = _finish(seq, index + 1, token)
        if reason is not None:
            break
    return KeptTokens(tokens, reason, stopped_by, error)


def _finish(seq: Sequence, output_len: int, token: int) -> tuple[FinishReason | None, int | None]:
    """Why `token`, number `output_len` of the output, is the last of `seq`, and its stop id; None: it is not."""
    params = seq.request.params
    if output_len > params.min_tokens:
        if token in seq.sampling.stop_ids:
            return "stop", token
        if token in seq.sampling.eos_ids:
            return "stop", None
    if seq.sampling.constraint is not None and seq.sampling.constraint.ended:
        return "stop", None
    return ("length", None) if output_len >= seq.max_output_len else (None, None)
