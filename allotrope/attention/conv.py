"""The short causal convolution before a recurrence. Owns the equation; must not know where the state is stored."""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_conv(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Depthwise convolution and SiLU: y_t,c = silu(bias_c + sum_j weight_c,j * u_(t + j),c), in fp32.

    `inputs`: [b, W - 1 + L, C] the raw inputs u: W - 1 of earlier steps (zeros before position 0), then the step's L.
    `weight`: [C, W], the newest input's weight last (fastest if its transpose is contiguous). `bias`: [C]. Returns
    [b, L, C] fp32. The next step's state is `inputs[:, L:]`.
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
