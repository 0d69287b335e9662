"""What a step asks of sampling, in tensors, and what it gets back.

Must not know requests, text or how rows come to be in a batch: the host makes a `SamplingStep`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.ops.logprobs.spec import LogprobsTensors
from allotrope.ops.token_mask.spec import BitMask


@dataclass(frozen=True)
class SamplingSpec:
    """`vocab_size`: logits of a row."""

    vocab_size: int


@dataclass(frozen=True)
class Penalties:
    """Tokens that rows have seen, as coordinates without repeats, and what it costs to repeat them.

    `rows`, `ids`: [M] int64. `output_counts`: [M] fp32, times seen in the output (0: in the prompt only).
    `repetition`, `frequency`, `presence`: [M] fp32, of the coordinate's row.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    output_counts: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True)
class TokenMask:
    """Coordinates of tokens. `rows`, `ids`: [M] int64. `masked_rows`: [N] int64, the rows that occur in `rows`."""

    rows: torch.Tensor
    ids: torch.Tensor
    masked_rows: torch.Tensor


@dataclass(frozen=True)
class TokenBias:
    """Numbers to add to logits. `rows`, `ids`: [M] int64, without repeats. `values`: [M] fp32."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class LogitsProcessors:
    """Changes to the logits of some rows before a token is chosen; None where no row asks for one.

    `min_tokens_mask`: end tokens of rows that are shorter than their `min_tokens`. `bits`: tokens that the grammars of
    rows allow.
    """

    penalties: Penalties | None = None
    bias: TokenBias | None = None
    allowed: TokenMask | None = None
    min_tokens_mask: TokenMask | None = None
    bits: BitMask | None = None

    def __bool__(self) -> bool:
        parts = (self.penalties, self.bias, self.allowed, self.min_tokens_mask, self.bits)
        return any(one is not None for one in parts)


@dataclass(frozen=True)
class RandomRows:
    """Rows whose token is drawn, either all truncated (some top-k or top-p) or none.

    `rows`: [N] int64, ascending. `temperature`: [N, 1] fp32, above 0. `min_p`: [N, 1] fp64, or None if no row has one.
    `top_p`: [N, 1] fp64. `top_k`: [N, 1] int64, 0 for none. `uniform`: [N, 1] fp64 in [0, 1). `top_ks`: `top_k` as
    host integers.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_p: torch.Tensor
    top_k: torch.Tensor
    uniform: torch.Tensor
    top_ks: tuple[int, ...]


@dataclass(frozen=True)
class SamplingStep:
    """What the rows of one step ask for. Every row is in exactly one of `greedy`, `untruncated` and `truncated`.

    `greedy`: [N] int64 rows. `untruncated`: rows drawn from all tokens (or those that min-p leaves). `truncated`: rows
    drawn after top-k or top-p. `scored`: [N] int64 rows whose log-probabilities are wanted, and
    of `top_count` others each.
    """

    greedy: torch.Tensor | None
    untruncated: RandomRows | None = None
    truncated: RandomRows | None = None
    processors: LogitsProcessors = LogitsProcessors()
    scored: torch.Tensor | None = None
    top_count: int = 0


@dataclass(frozen=True)
class Sampled:
    """`token_ids`: [B] int64, -1 for a row that has no distribution (NaN or infinite logits, or every token masked):
    its request must end with an error. `scores`: of the rows in `SamplingStep.scored`, in that order.
    """

    token_ids: torch.Tensor
    scores: LogprobsTensors | None

    @property
    def nan_rows(self) -> torch.Tensor:
        """[B] bool, the rows without a token: nothing finite was left of their logits."""
        return self.token_ids < 0
