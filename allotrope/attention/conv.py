"""The short causal convolution in front of a recurrent layer. Owns the equation; must not know where state is kept."""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_conv(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Depthwise convolution and SiLU: y_t,c = silu(bias_c + sum_j weight_c,j * u_(t + j),c), in fp32.

    `inputs`: [b, W - 1 + L, C] the raw inputs u, the last W - 1 ones before the step (zeros before position 0) and
    the step's L. `weight`: [C, W], the newest input's factor last (fastest if its transpose is
    contiguous). `bias`: [C]. Returns [b, L, C] fp32. The state
    that the next step needs is `inputs[:, L:]`, whatever L is.
    """
    width = weight.shape[1]
    length = inputs.shape[1] - width + 1
    taps, u = weight.float().t(), inputs.float()
    y = u[:, :length] * taps[0]
    for j in range(1, width):
        y.addcmul_(u[:, j : j + length], taps[j])
    if bias is not None:
        y += bias.float()
    return functional.silu(y, inplace=True)
