"""LSE merge: softmax attention over disjoint sets of keys, from the partial result of each set."""

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

    `first`, `second`: of equal shapes. A partial result without keys leaves the other unchanged; two of them give out 0
    and lse -inf.
    Source: Ye et al. 2024 (FlashInfer), section 2.2.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    # Where neither has a key, both weights are exp(-inf - 0) = 0; exp(-inf + inf) would be NaN.
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0)
    out = first.out * (first.lse - finite_lse).exp()[..., None]
    return Partial(torch.addcmul(out, second.out, (second.lse - finite_lse).exp()[..., None]), lse)
