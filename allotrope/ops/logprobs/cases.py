"""Cases of log-probabilities: none, one and several best tokens; equal logits; several segments of a vocabulary."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.logprobs import LogprobsSpec


def _make(
    vocab: int, count: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    draw = Draw(generator, device)
    logits = 3 * draw(dtype, 4, vocab)
    logits[1] = 0.5
    return logits, draw.integers(0, vocab, 4), count


def _spec(vocab: int, dtype: torch.dtype) -> LogprobsSpec:
    return LogprobsSpec(vocab)


CASES: Cases = {
    "logprobs": {
        f"vocabulary {vocab}, best {count}": OpCase(
            partial(_spec, vocab), partial(_make, vocab, count), dtypes=(torch.float32,)
        )
        for vocab, count in ((37, 0), (777, 3), (9000, 2))
    }
}
