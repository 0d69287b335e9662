"""Rows that norms and gates quantize to e4m3 as they write them, for the products that read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.gated_activation.triton import gated_activation, sigmoid_gate
from allotrope.ops.matmul import pack_for_kernels
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.launch import Launch
from allotrope.ops.matmul.providers import multiply
from allotrope.ops.matmul.quantized_rows import quantized_rows
from allotrope.ops.matmul.triton_quantize import quantize_rows
from allotrope.ops.rms_norm.triton import add_rms_norm, gated_rms_norm, rms_norm

FLOOR = 0.1


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def _norm(tokens: int, width: int, quantized_from: int | None) -> torch.Tensor:
    return rms_norm(_random(tokens, width), torch.ones(width, device=DEVICE), FLOOR, quantized_from=quantized_from)


def _added(tokens: int, width: int, quantized_from: int | None) -> torch.Tensor:
    x, residual = _random(tokens, width), _random(tokens, width)
    return add_rms_norm(x, residual, torch.ones(width, device=DEVICE), FLOOR, quantized_from=quantized_from)[1]


def _gated_norm(tokens: int, width: int, quantized_from: int | None) -> torch.Tensor:
    x, gate = _random(tokens, 3, width), _random(tokens, 3 * width)
    return gated_rms_norm(x, torch.ones(width, device=DEVICE), FLOOR, gate, "silu", quantized_from=quantized_from)


def _gated(tokens: int, width: int, quantized_from: int | None) -> torch.Tensor:
    return gated_activation(_random(tokens, 2 * width), GatedActivation(), quantized_from=quantized_from)


def _sigmoid(tokens: int, width: int, quantized_from: int | None) -> torch.Tensor:
    return sigmoid_gate(_random(tokens, width), _random(tokens, width), quantized_from=quantized_from)


Write = Callable[[int, int, int | None], torch.Tensor]


@pytest.mark.parametrize(
    ("write", "width"),
    [
        (_norm, 200),
        (_norm, 1280),
        (_added, 72),
        (_added, 640),
        (_gated_norm, 128),
        (_gated_norm, 256),
        (_gated, 200),
        (_gated, 1300),
        (_sigmoid, 384),
    ],
)
@pytest.mark.parametrize("tokens", [3, 20])
def test_quantized_rows_are_those_of_a_launch_of_their_own(write: Write, width: int, tokens: int) -> None:
    torch.manual_seed(0)
    x = write(tokens, width, 1)
    kept = quantized_rows(x)
    assert kept is not None
    values, scales = quantize_rows(x.clone())
    own_values, own_scales = quantize_rows(x)
    assert own_values.data_ptr() == kept.values.data_ptr() and len(own_values) == len(own_scales) == tokens
    assert torch.equal(own_values.view(torch.uint8), values.view(torch.uint8)) and torch.equal(own_scales, scales)
    torch.manual_seed(0)
    assert torch.equal(x, write(tokens, width, None))


def test_few_rows_heads_of_no_whole_runs_and_what_is_made_of_rows_keep_none() -> None:
    assert quantized_rows(_norm(16, 256, 17)) is None and quantized_rows(_norm(17, 256, None)) is None
    assert quantized_rows(_gated_norm(20, 96, 1)) is None
    x = _norm(20, 256, 17)
    assert all(quantized_rows(one) is None for one in (x[:19], x.clone(), x + 0, x.view(-1)))


@pytest.mark.parametrize("swap_ab", [True, False])
def test_products_take_them(swap_ab: bool) -> None:
    torch.manual_seed(0)
    x = _norm(20, 256, 1)
    weight = Fp8(128, 128).quantize(torch.randn(128, 256, device=DEVICE), 128)
    launch = Launch(32, 64, swap_ab=swap_ab, quantize=False, num_stages=1)
    prepared = pack_for_kernels(weight)
    y = multiply(x, prepared, launch=launch)
    assert torch.equal(y, multiply(x.clone(), prepared, launch=launch)) and bool(y.any())
    kept = quantized_rows(x)
    assert kept is not None
    kept.scales.zero_()
    assert not bool(multiply(x, prepared, launch=launch).any())


def test_experts_take_those_of_their_tokens() -> None:
    torch.manual_seed(0)
    x = _norm(5, 256, 1)
    weight = Fp8(128, 128).quantize(torch.randn(3, 128, 256, device=DEVICE), 128)
    given = {
        "expert_offsets": torch.tensor([4, 4, 10], dtype=torch.int32, device=DEVICE),
        "sorted_token_ids": torch.tensor([0, 1, 3, 4, 0, 1, 2, 2, 3, 4], dtype=torch.int32, device=DEVICE),
        "weight": pack_for_kernels(weight),
        "gating": GatedActivation(),
        "launch": Launch(16, 32, quantize=False, num_stages=1),
    }
    y = multiply(x, **given)
    assert torch.equal(y, multiply(x.clone(), **given)) and bool(y.any())
    kept = quantized_rows(x)
    assert kept is not None
    kept.scales.zero_()
    assert not bool(multiply(x, **given).any())
