"""Choosing the next token of each row from logits.

Owns the arithmetic of penalties, masks, truncation and drawing, in tensors. Must not know requests, text or how rows
come to be in a batch; what a step asks for is a `SamplingStep`, made by the host.

Order of operations: penalties (repetition, then frequency and presence), added bias, allowed tokens, forbidden tokens,
temperature, top-k, top-p, min-p, draw. Reported log-probabilities are those of the logits as they came.

Equal rows give equal tokens whatever stands beside them: probabilities become integer weights, whose sums do not
depend on the order of addition, and each row's way of computing is chosen by that row's parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from allotrope.ops.device_kernels import device_kernels
from allotrope.ops.logprobs.reference import TokenScores, largest, row_blocks, score_tokens

# The most likely token weighs 2^40. Sums over 2^22 tokens stay below 2^63, and what is rounded to zero
# has less than 1e-12 of the best token's probability.
_UNIT = 2.0**40
# How many candidates the first search for a nucleus takes, on a CPU; the next takes more.
_NUCLEUS_WIDTH = 256
_NUCLEUS_GROWTH = 16
# Below this the temperature only tells equal logits from different ones; dividing by less would overflow to NaN.
_LEAST_TEMPERATURE = 1e-30


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
class Edits:
    """Changes to the logits of some rows before a token is chosen; None where no row asks for one."""

    penalties: Penalties | None = None
    bias: TokenBias | None = None
    allowed: TokenMask | None = None
    forbidden: TokenMask | None = None

    def __bool__(self) -> bool:
        return any(edit is not None for edit in (self.penalties, self.bias, self.allowed, self.forbidden))


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
    """What the rows of one step ask for. Every row is in exactly one of `greedy`, `whole` and `truncated`.

    `greedy`: [N] int64 rows. `whole`: rows drawn from all tokens (or those that min-p leaves). `truncated`: rows drawn
    after top-k or top-p. `scored`: [N] int64 rows whose log-probabilities are wanted, with `top_count` others each.
    """

    greedy: torch.Tensor | None
    whole: RandomRows | None = None
    truncated: RandomRows | None = None
    edits: Edits = Edits()
    scored: torch.Tensor | None = None
    top_count: int = 0


@dataclass(frozen=True)
class Sampled:
    """`token_ids`: [B] int64, -1 for a row that has no distribution (NaN or infinite logits, or every token masked):
    its request must end with an error. `scores`: of the rows in `SamplingStep.scored`, in that order.
    """

    token_ids: torch.Tensor
    scores: TokenScores | None

    @property
    def bad(self) -> torch.Tensor:
        """[B] bool, the rows without a token."""
        return self.token_ids < 0


def sample(logits: torch.Tensor, step: SamplingStep) -> Sampled:
    """`argmax(z)` for greedy rows, else a draw from `softmax(z / temperature)` after truncation, z the edited logits.

    `logits`: [B, V], any float type; consumed: rows with edits may be changed in place, so that tensors made in
    inference mode must be sampled in it. Raises nothing for bad rows.
    """
    raw = logits
    finite = None
    if step.edits:
        # A mask may hide a NaN, and a row that holds one is not to be trusted.
        finite = logits.amax(-1).isfinite()
        if step.scored is not None:
            raw = logits.index_select(0, step.scored)
        logits = _edit(logits.float(), step.edits)
    elif step.scored is not None and len(step.scored) < len(logits):
        raw = logits.index_select(0, step.scored)

    fused = device_kernels("sampling", logits.device)
    if fused is not None:
        token_ids = fused.choose(logits.float(), step)
        good = finite
    else:
        token_ids, peaks = _choose(logits, step)
        good = peaks.isfinite() if finite is None else peaks.isfinite() & finite
    scores = None
    if step.scored is not None:
        ranking = device_kernels("logprobs", logits.device)
        score = score_tokens if ranking is None else ranking.score_tokens
        scores = score(raw, token_ids.index_select(0, step.scored), step.top_count)
    return Sampled(token_ids if good is None else token_ids.where(good, -1), scores)


def _choose(logits: torch.Tensor, step: SamplingStep) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, and the row's largest logit (NaN if it holds a NaN): both [B]."""
    if step.whole is None and step.truncated is None:
        token_ids = logits.argmax(-1)
        return token_ids, logits.gather(-1, token_ids[:, None])[:, 0]
    peaks = logits.amax(-1)
    token_ids = torch.empty_like(peaks, dtype=torch.int64)
    if step.greedy is not None:
        token_ids[step.greedy] = logits.index_select(0, step.greedy).argmax(-1)
    if step.whole is not None:
        for part, block in _blocks(logits, step.whole):
            token_ids[step.whole.rows[part]] = _draw_whole(block, peaks, step.whole, part)
    if step.truncated is not None:
        for part, block in _blocks(logits, step.truncated):
            token_ids[step.truncated.rows[part]] = _draw_truncated(block, peaks, step.truncated, part)
    return token_ids, peaks


def _edit(logits: torch.Tensor, edits: Edits) -> torch.Tensor:
    """Apply `edits` to `logits` [B, V] fp32 in place, and return it."""
    if edits.penalties is not None:
        _penalise(logits, edits.penalties)
    if edits.bias is not None:
        logits[edits.bias.rows, edits.bias.ids] += edits.bias.values
    if edits.allowed is not None:
        mask = edits.allowed
        kept = logits[mask.rows, mask.ids]
        logits.index_fill_(0, mask.masked_rows, -torch.inf)
        logits[mask.rows, mask.ids] = kept
    if edits.forbidden is not None:
        # An index_put_ with a number as value would make its tensor on the host, and wait for the device.
        lowest = logits.new_full((), -torch.inf)
        logits.index_put_((edits.forbidden.rows, edits.forbidden.ids), lowest)
    return logits


def _penalise(logits: torch.Tensor, seen: Penalties) -> None:
    """`z = (z / r if z > 0 else z * r) - frequency * count - presence * (count > 0)` at the seen tokens, in place."""
    values = logits[seen.rows, seen.ids]
    values = torch.where(values > 0, values / seen.repetition, values * seen.repetition)
    counts = seen.output_counts
    logits[seen.rows, seen.ids] = values - seen.frequency * counts - seen.presence * (counts > 0)


def _blocks(logits: torch.Tensor, random: RandomRows) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parts of `random`'s rows with their logits in fp32, [n, V] each."""
    size, vocab = logits.shape
    for part in row_blocks(len(random.rows), vocab, logits.device):
        if len(random.rows) == size:
            block = logits[part]
        else:
            block = logits.index_select(0, random.rows[part])
        yield part, block.float()


def _weights(logits: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`floor(2^40 exp((z - max z) / temperature))`: unnormalised probabilities as integers.

    `logits`: [n, K] any of the rows' tokens. `peaks`: [n, 1] largest logit of each whole row. Returns [n, K] int64.
    """
    scaled = (logits - peaks).div_(temperature.clamp(min=_LEAST_TEMPERATURE))
    return scaled.exp_().mul_(_UNIT).to(torch.int64)


def _draw_whole(logits: torch.Tensor, all_peaks: torch.Tensor, random: RandomRows, part: slice) -> torch.Tensor:
    """Draw from all tokens that min-p leaves, laid out by id. `logits`: [n, V] of `random.rows[part]`. Returns [n]."""
    peaks = all_peaks[random.rows[part], None].float()
    weights = _weights(logits, peaks, random.temperature[part])
    if random.min_p is not None:
        weights *= weights >= random.min_p[part] * _UNIT
    mass = weights.cumsum(-1)
    return _find(mass, mass[:, -1:], random.uniform[part])[:, 0]


def _draw_truncated(logits: torch.Tensor, all_peaks: torch.Tensor, random: RandomRows, part: slice) -> torch.Tensor:
    """Draw after top-k, top-p and min-p, from tokens laid out by falling logit. Arguments as of `_draw_whole`."""
    vocab = logits.shape[-1]
    rows, temperature, top_k = random.rows[part], random.temperature[part], random.top_k[part]
    peaks = all_peaks[rows, None].float()
    top_ks = random.top_ks[part]
    whole = None
    if 0 in top_ks:
        whole = _weights(logits, peaks, temperature).sum(-1, keepdim=True)
    for width in _widths(top_ks, logits):
        values, ids = largest(logits, width)
        weights = _weights(values, peaks, temperature)
        mass = weights.cumsum(-1)
        total = mass.gather(-1, top_k.clamp(1, width) - 1)
        if whole is not None:
            total = torch.where(top_k > 0, total, whole)
        # The nucleus ends with the token that brings the mass to `needed`. The product may round up beyond `total`.
        needed = (total * random.top_p[part]).ceil().to(torch.int64).minimum(total)
        if width == vocab or whole is None or bool((mass[:, -1:] >= needed).all()):
            break
    # What comes after the first k has at least `total` before it, so this is the cut of top-k as well.
    kept = mass - weights < needed
    if random.min_p is not None:
        kept &= weights >= random.min_p[part] * _UNIT
    # Weights fall along a row, so what is kept is a prefix and the sums so far still hold.
    total = mass.gather(-1, kept.sum(-1, keepdim=True).clamp(min=1) - 1)
    return ids.gather(-1, _find(mass, total, random.uniform[part]))[:, 0]


def _widths(top_ks: tuple[int, ...], logits: torch.Tensor) -> Iterator[int]:
    """How many candidates to look among, growing until a nucleus fits; the answer is the same at any width that does.

    Looking whether it fits waits for the device, so that only a CPU tries narrow ones.
    """
    vocab = logits.shape[-1]
    width = max(top_ks)
    if 0 in top_ks:
        width = max(width, _NUCLEUS_WIDTH) if logits.device.type == "cpu" else vocab
        while width < vocab:
            yield width
            width *= _NUCLEUS_GROWTH
    yield min(width, vocab)


def _find(mass: torch.Tensor, total: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first place where `mass > floor(uniform * total)`: never one of weight zero, since there mass does not grow.

    `mass`: [n, K] int64 running sums. `total`: [n, 1] int64, above 0 and at most the last mass. `uniform`: [n, 1]
    fp64 in [0, 1). Returns [n, 1]. Rows without a distribution give any place within the row.
    """
    # Rounded or not, the product stays below `total`: the largest number, 1 - 2^-53, takes half a unit in the last
    # place or more away.
    target = (uniform * total).to(torch.int64)
    return torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1)
