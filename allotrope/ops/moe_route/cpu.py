"""Choosing and running experts, one C function each (`cpu.c`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from allotrope.kernels.c.compiler import CannotCompile, load
from allotrope.ops.gated_activation.spec import CGatedActivation

LANES = 16
SCORES = ("softmax", "sigmoid", "sqrt_softplus")
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class ExpertFunctions:
    """Functions of experts whose weights are of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises CannotCompile."""
        library = load(Path(__file__).with_name("cpu.c"), dtype)
        self._route, self._group = library.route, library.group
        self._mix, self._combine = library.mix_experts, library.combine
        self._route.argtypes = [_POINTER] * 4 + [_LONG] * 8 + [_FLOAT]
        self._group.argtypes = [_POINTER] * 5 + [_LONG] * 3
        self._mix.argtypes = [_POINTER] * 2 + [_LONG] + [_POINTER] * 7 + [_LONG] * 4 + [CGatedActivation]
        self._combine.argtypes = [_POINTER] * 6 + [_LONG] * 3
        for function in (self._route, self._group, self._mix, self._combine):
            function.restype = None

    def route(
        self, logits: torch.Tensor, correction: torch.Tensor | None, topk: int, groups: Sequence[int], score: str,
        normalize: bool, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Experts of the highest score + correction, and what they weigh.

        `logits`: [T, E] fp32. `correction`: [E] fp32. `groups`: how many there are, how many may be chosen from, and of
        how many experts a group's score is the sum. Returns weights [T, topk] fp32 and experts [T, topk] int64.
        """
        logits = logits.contiguous()
        tokens, experts = logits.shape
        weights = logits.new_empty(tokens, topk)
        chosen = torch.empty(tokens, topk, dtype=torch.int64)
        self._route(
            weights.data_ptr(), chosen.data_ptr(), logits.data_ptr(), _address(correction), tokens, experts, topk,
            *groups, SCORES.index(score), normalize, scale,
        )  # fmt: skip
        return weights, chosen

    def group(
        self, chosen: torch.Tensor, experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pairs of token and choice, sorted by expert. `chosen`: [T, k] int64.

        Returns ends [E] int32, where each expert's rows end; and of each row its token, its expert, and of each pair
        its row, [T * k] int64 each.
        """
        chosen = chosen.contiguous()
        pairs = chosen.numel()
        ends = torch.empty(experts, dtype=torch.int32)
        lists = torch.empty(3, pairs, dtype=torch.int64)
        source, owner, place = lists.unbind()
        self._group(
            ends.data_ptr(), source.data_ptr(), owner.data_ptr(), place.data_ptr(), chosen.data_ptr(), pairs, experts,
            chosen.shape[1],
        )  # fmt: skip
        return ends, source, owner, place

    def mix(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: tuple[torch.Tensor, torch.Tensor | None],
        down: tuple[torch.Tensor, torch.Tensor | None],
        how: CGatedActivation,
    ) -> torch.Tensor:
        """The sum over each token's experts, for few tokens: every expert's rows are read anew for each.

        `x`: [T, hidden]. `weights` fp32, `chosen` int64: [T, k]. `gate_up`: [E, 2 * width, hidden] and its bias
        [E, 2 * width]. `down`: [E, hidden, width] and its bias [E, hidden]. Returns [T, hidden] in `x`'s type.
        """
        x = x if x.stride(1) == 1 else x.contiguous()
        (tokens, hidden), (topk, width) = x.shape, (chosen.shape[1], down[0].shape[2])
        padded = -(-width // LANES) * LANES
        out = x.new_empty(tokens, hidden)
        scratch = torch.empty(2 * tokens * topk * padded + tokens * hidden, dtype=torch.float32)
        self._mix(
            out.data_ptr(), x.data_ptr(), x.stride(0), *map(_address, (*gate_up, *down)),
            weights.contiguous().data_ptr(), chosen.contiguous().data_ptr(), scratch.data_ptr(),
            tokens, topk, hidden, width, how,
        )  # fmt: skip
        return out

    def combine(
        self,
        results: torch.Tensor,
        weights: torch.Tensor,
        place: torch.Tensor,
        chosen: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Each token's weighted sum of results + bias. `results`: [T * k, hidden], of which `place` [T * k] is each
        pair's row. `weights` fp32, `chosen`: [T, k]. `bias`: [E, hidden]. Returns [T, hidden] in the results' type."""
        (tokens, topk), hidden = chosen.shape, results.shape[1]
        out = results.new_empty(tokens, hidden)
        self._combine(
            out.data_ptr(), results.contiguous().data_ptr(), weights.contiguous().data_ptr(), place.data_ptr(),
            chosen.contiguous().data_ptr(), _address(bias), tokens, topk, hidden,
        )  # fmt: skip
        return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def expert_functions(dtype: torch.dtype, device: torch.device) -> ExpertFunctions | None:
    """The functions for weights of a type on a device; None where there are none (`rows` says so)."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        return ExpertFunctions(dtype)
    except CannotCompile:
        return None
