"""Greedy tokens of logits whose columns lie on several ranks: one integer a row and rank is exchanged.

    best  = key(z) * 2^32 + (columns - 1 - column), the largest of a row;  key sorts as the logits do
    token = columns - 1 - best mod 2^32

Whatever makes each rank's columns those of the whole vocabulary adds an offset to `best`, and the largest `best` of all
ranks has the token: the one of lowest id among equal logits. NaN is above all.
"""

from __future__ import annotations

from dataclasses import dataclass

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.vocab_argmax import reference


@dataclass(frozen=True)
class VocabArgmaxSpec:
    """`vocab_size`: logits of a row on all ranks together."""

    vocab_size: int


VOCAB_BEST = Op(
    "vocab_best",
    "best = the largest logit of a row and its column, in one integer",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.vocab_argmax.triton", "best")),
        Backend("reference", runs_anywhere, reference.best),
    ),
)
VOCAB_TOKEN = Op(
    "vocab_token",
    "the column of a `best`; -1 where its logit is not finite",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.vocab_argmax.triton", "token")),
        Backend("reference", runs_anywhere, reference.token),
    ),
)
