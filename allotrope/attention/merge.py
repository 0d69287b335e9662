"""Joining softmax attention over disjoint sets of keys, each computed on its own."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention over some of the keys.

    `out`: [..., V] fp32, normalised over those keys, 0 where there are none. `lse`: [...] fp32, natural logarithm of
    the sum of exp(logits), -inf where there are none.
    """

    out: torch.Tensor
    lse: torch.Tensor


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both, which share none.

        lse = ln(exp(lse_1) + exp(lse_2))
        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

    `first`, `second`: of equal shapes. A side without keys changes nothing; two of them give out 0 and lse -inf.
    Source: Ye et al. 2024 (FlashInfer), section 2.2.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    # Where neither side has a key, exp(-inf - 0) gives both the weight 0 that exp(-inf + inf) would not.
    top = lse.masked_fill(lse == -torch.inf, 0.0)
    out = first.out * (first.lse - top).exp()[..., None]
    return Partial(torch.addcmul(out, second.out, (second.lse - top).exp()[..., None]), lse)
