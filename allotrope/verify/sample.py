"""A prompt, the tokens that follow it, and what a right engine answers. Must not know who gave the answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Wanted:
    """What follows each of F tokens, by the reference.

    `top1`: [F] int64, the likeliest next token. `peak`: [F] its logit. `total`: [F] log-sum-exp of all logits.
    `margin`: [F] between the two largest logits. `rows`: [n, vocabulary] fp32, all logits at `positions`: [n] int64,
    ascending; elsewhere only the four numbers above are known.
    """

    top1: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    margin: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor


def wanted_of(logits: torch.Tensor, most: int | None = None) -> Wanted:
    """`logits`: [F, vocabulary] fp32. `most`: rows to keep, the last ones and an even spread; default: all."""
    count = len(logits)
    best = logits.topk(2, dim=-1)
    positions = torch.arange(count)
    if most is not None and most < count:
        tail = min(16, most)
        spread = torch.linspace(0, count - 1 - tail, max(1, most - tail)).long()
        positions = torch.cat((spread, positions[count - tail :])).unique()
    return Wanted(
        top1=best.indices[:, 0],
        peak=best.values[:, 0],
        total=logits.logsumexp(-1),
        margin=best.values[:, 0] - best.values[:, 1],
        positions=positions,
        rows=logits if len(positions) == count else logits[positions].clone(),
    )


@dataclass(frozen=True)
class ForcedTokens:
    """`prompt`: token ids. `forced`: tokens that follow it, whatever the engine would choose."""

    name: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]

    @property
    def fed(self) -> tuple[int, ...]:
        """Tokens that the engine computes: all but the last forced one, which nothing follows."""
        return (*self.prompt, *self.forced[:-1])


@dataclass(frozen=True)
class Sample(ForcedTokens):
    """`greedy`: what the reference would choose in place of each forced token. `wanted`: what it says after each token
    of `fed`.
    """

    greedy: tuple[int, ...]
    wanted: Wanted


def spread(samples: list[Sample]) -> float:
    """Standard deviation of the wanted logits around the mean of their row: the scale that errors are seen on."""
    rows = torch.cat([sample.wanted.rows for sample in samples])
    return float((rows - rows.mean(-1, keepdim=True)).square().mean().sqrt())
