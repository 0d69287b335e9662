"""Cases of the best column: several segments, ties, rows that are not finite."""

from __future__ import annotations

import math

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.vocab_argmax import VocabArgmaxSpec
from allotrope.ops.vocab_argmax.reference import best

ROWS, VOCABULARY = 5, 5000


def _spec(dtype: torch.dtype) -> VocabArgmaxSpec:
    return VocabArgmaxSpec(VOCABULARY)


def _logits(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    logits: torch.Tensor = 3 * Draw(generator, device)(dtype, ROWS, VOCABULARY)
    # Many equal logits, of either sign of zero, then no finite logit, and an infinite one.
    logits[1] = logits[1].round()
    logits[2] = logits[2].clamp(max=0.0)
    logits[3] = -math.inf
    logits[4, 7] = math.inf
    return logits


def _make_best(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    return (_logits(generator, dtype, device),)


def _make_token(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    return best(_logits(generator, dtype, device)), VOCABULARY


CASES: Cases = {
    "vocab_best": {"all kinds of rows": OpCase(_spec, _make_best, dtypes=(torch.float32,))},
    "vocab_token": {"all kinds of rows": OpCase(_spec, _make_token, dtypes=(torch.float32,))},
}
