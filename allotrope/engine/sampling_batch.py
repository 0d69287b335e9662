"""From sequences to what the sampler needs: parameters as tensors, token counts, random numbers, and back again.

Owns what sampling remembers of a sequence between steps. Must not know the scheduler, the cache or text.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from allotrope.engine.seeds import stream_keys, uniforms
from allotrope.grammars.backend import pack
from allotrope.grammars.constraint import Constraint
from allotrope.ops.logprobs import LogprobsTensors
from allotrope.ops.sampling.spec import (
    LogitsProcessors,
    Penalties,
    RandomRows,
    Sampled,
    SamplingStep,
    TokenBias,
    TokenMask,
)
from allotrope.ops.token_mask import BitMask
from allotrope.request import SamplingParams, TokenLogprobs


@dataclass(eq=False, kw_only=True)
class RowSampling:
    """One sequence as sampling sees it; lives as long as the sequence, through preemption too.

    `eos_ids`: ids that end the sequence, none for a model without. `seed`: any integer; with the number of output
    tokens it decides every draw. `prompt_ids` never changes. `output_ids`: the engine's own list of the tokens
    chosen so far, read afresh at each step and only ever appended to. `constraint`: the grammar that it follows.
    `drafts`: its draft tokens of the present step (speculative decoding).
    """

    params: SamplingParams
    eos_ids: Sequence[int]
    seed: int
    prompt_ids: Sequence[int]
    output_ids: list[int]
    constraint: Constraint | None = None
    drafts: Sequence[int] = ()
    _after_drafts: list[RowSampling] = field(default_factory=list, init=False, repr=False)
    _seen: _SeenTokens | None = field(default=None, init=False, repr=False)
    _allowed_bits: NDArray[np.int32] | None = field(default=None, init=False, repr=False)

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the sequence by its request's word."""
        return frozenset(self.params.stop_token_ids)

    @functools.cached_property
    def allowed(self) -> NDArray[np.int64] | None:
        """The only ids that may be chosen; None: any."""
        ids = self.params.allowed_token_ids
        return None if ids is None else np.unique(np.array(ids, dtype=np.int64))

    def allowed_bits(self, vocab_size: int) -> NDArray[np.int32]:
        """[W] packed mask of `allowed`, which is not None."""
        if self._allowed_bits is None:
            assert self.allowed is not None
            self._allowed_bits = pack(self.allowed[self.allowed < vocab_size], vocab_size)
        return self._allowed_bits

    @functools.cached_property
    def ends(self) -> NDArray[np.int64]:
        """Ids that end the sequence, by anyone's word."""
        return np.array(sorted({*self.eos_ids, *self.stop_ids}), dtype=np.int64)

    @functools.cached_property
    def greedy(self) -> bool:
        """Whether every token is that of the largest logit as it comes, and no log-probabilities are wanted."""
        params = self.params
        processed = has_penalty(params) or params.logit_bias or self.allowed is not None or params.min_tokens > 0
        follows = self.constraint is not None
        return params.temperature == 0 and not processed and not follows and params.logprobs is None

    @property
    def num_output(self) -> int:
        """Output tokens before the one that is sampled."""
        return len(self.output_ids)

    def after_drafts(self, count: int) -> RowSampling:
        """The row behind the first `count` of `drafts`, the same object for each count; this one itself for 0."""
        while len(self._after_drafts) < count:
            self._after_drafts.append(DraftRow(self, len(self._after_drafts) + 1))
        return self._after_drafts[count - 1] if count else self

    def seen(self) -> _SeenTokens:
        """The tokens that penalties look at, up to date with `output_ids`."""
        if self._seen is None:
            # Only the repetition penalty looks at the prompt.
            prompt = self.prompt_ids if self.params.repetition_penalty != 1.0 else ()
            self._seen = _SeenTokens(prompt)
        self._seen.update(self.output_ids)
        return self._seen


class DraftRow(RowSampling):
    """`row` as sampling sees it behind the first `count` of its drafts, as if they were its output.

    `constraint`: what holds behind these, since the masks of the step were filled.
    """

    def __init__(self, row: RowSampling, count: int) -> None:
        super().__init__(
            params=row.params,
            eos_ids=row.eos_ids,
            seed=row.seed,
            prompt_ids=row.prompt_ids,
            output_ids=row.output_ids,
            constraint=row.constraint,
        )
        self.row, self.count = row, count

    @property
    def num_output(self) -> int:
        return self.row.num_output + self.count

    def seen(self) -> _SeenTokens:
        return self.row.seen().with_tokens(self.row.drafts[: self.count])


class _SeenTokens:
    """Distinct tokens of a sequence in order of appearance, and how often the output has each.

    Kept as arrays that grow at the end, so that a step costs one new entry and one copy of a few kilobytes, not a
    walk over the sequence or over the vocabulary.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._place = {token: place for place, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self._num_counted = 0

    def update(self, output_ids: Sequence[int]) -> None:
        """Count the tokens that `output_ids` has gained since the last call."""
        self._count(output_ids[self._num_counted :])
        self._num_counted = len(output_ids)

    def with_tokens(self, tokens: Sequence[int]) -> _SeenTokens:
        """A copy that has counted `tokens` too."""
        other = _SeenTokens(())
        other._place, other._ids, other._counts = dict(self._place), self._ids.copy(), self._counts.copy()
        other._count(tokens)
        return other

    def _count(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                spare = max(64, place)
                self._ids = np.concatenate([self._ids, np.zeros(spare, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(spare, dtype=np.float32)])
            self._ids[place] = token
            self._counts[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._place)]


class SamplingBatch:
    """The rows of a step, in order. Build it anew when the rows change; call `step` once per step."""

    def __init__(self, rows: Sequence[RowSampling], vocab_size: int, device: torch.device) -> None:
        """`rows`: row i is row i of the logits. `vocab_size`: V, columns of the logits. `device`: theirs."""
        self.rows = tuple(rows)
        self._vocab_size = vocab_size
        self._device = device
        params = [row.params for row in rows]
        # A top-k of the whole vocabulary cuts nothing.
        top_ks = [p.top_k if p.top_k < vocab_size else 0 for p in params]
        random = [i for i, p in enumerate(params) if p.temperature > 0]
        greedy = [i for i, p in enumerate(params) if p.temperature == 0]

        def group(members: list[int]) -> _RandomGroup | None:
            if not members:
                return None
            return _RandomGroup([self.rows[i] for i in members], members, [top_ks[i] for i in members], device)

        self._greedy = self._indices(greedy) if greedy else None
        self._untruncated = group([i for i in random if not top_ks[i] and params[i].top_p == 1.0])
        self._truncated = group([i for i in random if top_ks[i] or params[i].top_p < 1.0])
        self._penalised = [i for i, p in enumerate(params) if has_penalty(p)]
        self._bias = self._token_bias()
        # The mask of a grammar has these limits in it.
        free = [(i, row) for i, row in enumerate(self.rows) if row.constraint is None]
        self._allowed = self._mask((i, row.allowed) for i, row in free if row.allowed is not None)
        self._held_back = [i for i, row in free if row.params.min_tokens > 0]
        self._scored = [i for i, p in enumerate(params) if p.logprobs is not None]
        self._scored_rows = self._indices(self._scored) if self._scored else None
        self._top_count = max((params[i].logprobs or 0 for i in self._scored), default=0)

    def serves(self, rows: Sequence[RowSampling]) -> bool:
        """Whether this batch was built of these very rows in this order, and so can be used again."""
        return len(rows) == len(self.rows) and all(map(operator.is_, rows, self.rows))

    @property
    def draws(self) -> bool:
        """Whether any row draws its token."""
        return self._untruncated is not None or self._truncated is not None

    def step(self, bits: BitMask | None = None, ahead: torch.Tensor | None = None, most_ahead: int = 0) -> SamplingStep:
        """What to sample now, at the rows' present `output_ids`. `bits`: the masks of the rows that have a grammar.

        `ahead`: [rows] on the device, output tokens of each row that the host has yet to read beside those; None: none.
        `most_ahead`: no row has more of them.
        """
        return SamplingStep(
            greedy=self._greedy,
            untruncated=self._untruncated.step(ahead, most_ahead) if self._untruncated else None,
            truncated=self._truncated.step(ahead, most_ahead) if self._truncated else None,
            processors=LogitsProcessors(self._penalties(), self._bias, self._allowed, self._min_tokens_mask(), bits),
            scored=self._scored_rows,
            top_count=self._top_count,
        )

    def read(self, sampled: Sampled) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Bring one step's result to the host; the only place that waits for the device.

        Returns a token id per row, -1 where the row has no distribution and its request must end with an error, and
        the log-probabilities of the rows that ask for them.
        """
        logprobs: list[TokenLogprobs | None] = [None] * len(self.rows)
        token_ids = sampled.token_ids.tolist()
        if sampled.scores is not None:
            counts = [self.rows[i].params.logprobs or 0 for i in self._scored]
            for i, record in zip(self._scored, read_logprobs(sampled.scores, counts), strict=True):
                logprobs[i] = record if token_ids[i] >= 0 else None
        return token_ids, logprobs

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _penalties(self) -> Penalties | None:
        if not self._penalised:
            return None
        seen = [(i, self.rows[i].seen()) for i in self._penalised]
        sizes = [len(tokens.ids) for _, tokens in seen]
        if not any(sizes):
            return None

        def spread(value: Callable[[SamplingParams], float]) -> torch.Tensor:
            numbers = np.array([value(self.rows[i].params) for i in self._penalised], dtype=np.float32)
            return _to_device(np.repeat(numbers, sizes), self._device)

        return Penalties(
            rows=_to_device(np.repeat(np.array(self._penalised, dtype=np.int64), sizes), self._device),
            ids=_to_device(np.concatenate([tokens.ids for _, tokens in seen]), self._device),
            output_counts=_to_device(np.concatenate([tokens.counts for _, tokens in seen]), self._device),
            repetition=spread(lambda p: p.repetition_penalty),
            frequency=spread(lambda p: p.frequency_penalty),
            presence=spread(lambda p: p.presence_penalty),
        )

    def _token_bias(self) -> TokenBias | None:
        added = [(i, token, bias) for i, row in enumerate(self.rows) for token, bias in row.params.logit_bias.items()]
        if not added:
            return None
        rows, ids, values = zip(*added, strict=True)
        numbers = torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)
        return TokenBias(self._indices(rows), self._indices(ids), numbers)

    def _min_tokens_mask(self) -> TokenMask | None:
        """Ids that would end a sequence which is still below its `min_tokens`."""
        early = [i for i in self._held_back if self.rows[i].num_output < self.rows[i].params.min_tokens]
        return self._mask((i, self.rows[i].ends) for i in early)

    def _mask(self, of_rows: Iterable[tuple[int, NDArray[np.int64]]]) -> TokenMask | None:
        # A tokenizer may know ids that the output layer does not score; those can neither be allowed nor chosen.
        scored = ((i, ids[ids < self._vocab_size]) for i, ids in of_rows)
        masked = {i: ids for i, ids in scored if len(ids)}
        if not masked:
            return None
        distinct = np.array(list(masked), dtype=np.int64)
        rows = np.repeat(distinct, [len(ids) for ids in masked.values()])
        tensors = (rows, np.concatenate(list(masked.values())), distinct)
        return TokenMask(*(_to_device(numbers, self._device) for numbers in tensors))


def read_logprobs(scores: LogprobsTensors, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Bring scores to the host as records.

    `counts`: per row, how many of the most likely tokens its record names. Returns one record per row.
    """
    columns = (scores.token_ids, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids[:count], top_logprobs[:count], strict=True)))
        for token_id, logprob, rank, top_ids, top_logprobs, count in zip(
            *(column.tolist() for column in columns), counts, strict=True
        )
    ]


class _RandomGroup:
    """Rows that draw: their parameters, and their places in the space of random numbers."""

    def __init__(self, rows: list[RowSampling], indices: list[int], top_ks: list[int], device: torch.device) -> None:
        """`rows`: the group's own. `indices`: their places in the batch. `top_ks`: 0 where nothing is cut."""
        self._rows = rows
        self._keys = stream_keys([row.seed for row in rows])
        self._device = device

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype)[:, None].to(device, non_blocking=True)

        min_ps = [row.params.min_p for row in rows]
        self._at_step_0 = RandomRows(
            rows=torch.tensor(indices, dtype=torch.int64).to(device, non_blocking=True),
            temperature=column([row.params.temperature for row in rows], torch.float32),
            min_p=column(min_ps, torch.float64) if any(min_ps) else None,
            top_p=column([row.params.top_p for row in rows], torch.float64),
            top_k=column(top_ks, torch.int64),
            uniform=torch.zeros(len(rows), 1, dtype=torch.float64, device=device),
            top_ks=tuple(top_ks),
        )

    def step(self, ahead: torch.Tensor | None, most_ahead: int) -> RandomRows:
        """The rows with the numbers that their next tokens are drawn by. `ahead`, `most_ahead`: of all rows."""
        steps = np.array([row.num_output for row in self._rows], dtype=np.uint64)
        if ahead is None:
            return replace(self._at_step_0, uniform=_to_device(uniforms(self._keys, steps)[:, None], self._device))
        further = [uniforms(self._keys, steps + np.uint64(count)) for count in range(most_ahead + 1)]
        of_rows = ahead[self._at_step_0.rows][:, None]
        return replace(self._at_step_0, uniform=_to_device(np.stack(further, 1), self._device).gather(1, of_rows))


def has_penalty(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
