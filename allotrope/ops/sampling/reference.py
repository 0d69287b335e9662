"""Sampling by sorting, in PyTorch: what kernels are held against.

Order: temperature, top-k, top-p, min-p, draw. Equal rows give equal tokens whatever stands beside them: probabilities
become integer weights, whose sums do not depend on the order of addition, and each row's way of computing is chosen by
that row's parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from allotrope.ops.logprobs.reference import largest, row_blocks
from allotrope.ops.sampling.spec import RandomRows, SamplingStep

# The most likely token weighs 2^40. Sums over 2^22 tokens stay below 2^63, and what is rounded to zero
# has less than 1e-12 of the best token's probability.
_UNIT = 2.0**40
# Its weight is 0. The exponential of -inf, which a mask leaves, takes a CPU twice the time.
_LEAST_EXPONENT = -30.0
# How many candidates the first search for a nucleus takes, on a CPU; the next takes more.
_NUCLEUS_WIDTH = 256
_NUCLEUS_GROWTH = 16
# Below this the temperature only tells equal logits from different ones; dividing by less would overflow to NaN.
_LEAST_TEMPERATURE = 1e-30


def choose(logits: torch.Tensor, step: SamplingStep) -> torch.Tensor:
    """`argmax(z)` for greedy rows, else a draw from `softmax(z / temperature)` after truncation.

    `logits`: [B, V], any float type; `step.processors` are applied. Returns [B] int64, -1 where the row's largest logit
    is not finite (NaN if it holds a NaN).
    """
    if step.untruncated is None and step.truncated is None:
        token_ids = logits.argmax(-1)
        peaks = logits.gather(-1, token_ids[:, None])[:, 0]
        return token_ids.where(peaks.isfinite(), -1)
    peaks = logits.amax(-1)
    token_ids = torch.empty_like(peaks, dtype=torch.int64)
    if step.greedy is not None:
        token_ids[step.greedy] = logits.index_select(0, step.greedy).argmax(-1)
    if step.untruncated is not None:
        for part, block in _blocks(logits, step.untruncated):
            token_ids[step.untruncated.rows[part]] = _draw_untruncated(block, peaks, step.untruncated, part)
    if step.truncated is not None:
        for part, block in _blocks(logits, step.truncated):
            token_ids[step.truncated.rows[part]] = _draw_truncated(block, peaks, step.truncated, part)
    return token_ids.where(peaks.isfinite(), -1)


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
    scaled = (logits - peaks).div_(temperature.clamp(min=_LEAST_TEMPERATURE)).clamp_(min=_LEAST_EXPONENT)
    return scaled.exp_().mul_(_UNIT).to(torch.int64)


def _draw_untruncated(logits: torch.Tensor, all_peaks: torch.Tensor, random: RandomRows, part: slice) -> torch.Tensor:
    """Draw from all tokens that min-p leaves, laid out by id. `logits`: [n, V] of `random.rows[part]`. Returns [n]."""
    peaks = all_peaks[random.rows[part], None].float()
    weights = _weights(logits, peaks, random.temperature[part])
    if random.min_p is not None:
        weights *= weights >= random.min_p[part] * _UNIT
    mass = weights.cumsum(-1)
    return _find(mass, mass[:, -1:], random.uniform[part])[:, 0]


def _draw_truncated(logits: torch.Tensor, all_peaks: torch.Tensor, random: RandomRows, part: slice) -> torch.Tensor:
    """Draw after top-k, top-p and min-p, from tokens laid out by falling logit. Arguments as of `_draw_untruncated`."""
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
