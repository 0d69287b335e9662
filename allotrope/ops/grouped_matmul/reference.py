"""Products of rows with their experts' weights in PyTorch, in fp32: what all others are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from allotrope.kernels.backend import best_backend
from allotrope.ops.gated_activation import GATED_ACTIVATION, GatedActivation, GatedActivationSpec
from allotrope.ops.matmul.plain import PlainWeight
from allotrope.ops.matmul.tile_tables import TileTables
from allotrope.ops.matmul.weight import QuantizedWeight


def grouped_matmul(
    x: torch.Tensor,
    weight: PlainWeight | QuantizedWeight,
    expert_offsets: torch.Tensor,
    sorted_token_ids: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gating: GatedActivation | None = None,
    expert_ids: torch.Tensor | None = None,
    tile_tables: TileTables | None = None,
) -> torch.Tensor:
    """y_i = act(W_e x_i + b_e), rounded once.

    `x`: [T, inputs]. `expert_offsets`: [E] int32, where each expert's rows end. `sorted_token_ids`: [n] rows of x in
    the order of experts, None if x has that. `bias`: [E, outputs]. `gating`: of the first half of the outputs with the
    second. `expert_ids`: [n] each row's expert, where it is known. `tile_tables`: what products of the same offsets
    share, empty before the first. Returns [n, outputs]. Each expert's weight is dequantized for each call.
    """
    rows = x if sorted_token_ids is None else x.index_select(0, sorted_token_ids)
    activations = weight.format.activations(rows)
    y = activations.new_empty(len(rows), weight.shape[1])
    for expert, part in rows_by_expert(expert_offsets):
        expert_bias = None if bias is None else bias[expert].float()
        y[part] = F.linear(activations[part], weight[expert].dequantize(), expert_bias)
    return (y if gating is None else activated(y, gating)).to(x.dtype)


def rows_by_expert(expert_offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and which they are. Asks the device for `expert_offsets`."""
    start = 0
    for expert, end in enumerate(expert_offsets.tolist()):
        if end > start:
            yield expert, slice(start, end)
            start = end


def biased_and_gated(
    y: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    gating: GatedActivation | None,
    expert_ids: torch.Tensor | None,
) -> torch.Tensor:
    """What is left of `grouped_matmul` after products `y` [n, outputs], which it may write into."""
    if bias is not None:
        if expert_ids is None:
            rows = torch.arange(len(y), dtype=expert_offsets.dtype, device=y.device)
            expert_ids = torch.searchsorted(expert_offsets, rows, right=True)
        y += bias.index_select(0, expert_ids)
    return y if gating is None else activated(y, gating)


def activated(y: torch.Tensor, gating: GatedActivation) -> torch.Tensor:
    """act of gates and ups `y` [n, 2 * width], by the best backend of `gated_activation`."""
    backend = best_backend(GATED_ACTIVATION, GatedActivationSpec(gating, y.dtype), y.device)
    run: Callable[..., torch.Tensor] = backend.run
    return run(y, gating)
