"""The products to tune are those that models run: merged projections, shares of ranks, experts with their gates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.ops.matmul.launch import Shape
from bench.kernels import tune_products
from bench.kernels.model_shapes import shapes_of

CONFIGS = Path(__file__).resolve().parents[2] / "bench" / "configs"


def test_shapes_of_one_rank_and_of_two() -> None:
    one, two = (dict(shapes_of(CONFIGS / "deepseek_v32", ranks, "h200")) for ranks in (1, 2))
    # Latents of queries and of keys, and the index key; queries of 128 heads, and index queries of 64.
    assert one[Shape("fp8", 0, 1536 + 576 + 128, 7168, False)] == 1
    assert {Shape("fp8", 0, heads * 192 + 64 * 128, 1536, False) for heads in (128, 64)} <= {*one, *two}
    assert one[Shape("fp8", 256, 2048, 7168, True)] == 8 and one[Shape("fp8", 256, 7168, 2048, False)] == 8
    assert two[Shape("fp8", 256, 1024, 7168, True)] == 8 and two[Shape("fp8", 256, 7168, 1024, False)] == 8
    # The head is cut, and not quantized.
    assert Shape("plain", 0, 129280, 7168, False) in one and Shape("plain", 0, 129280 // 2, 7168, False) in two
    four_bits = dict(shapes_of(CONFIGS / "gpt_oss_120b", 1, "h200"))
    assert four_bits[Shape("mxfp4", 128, 2880, 2880, True)] == four_bits[Shape("mxfp4", 128, 2880, 2880, False)] == 4


def test_all_models_of_the_benches_by_default() -> None:
    found = dict(tune_products.shapes([], [1, 2], "h200"))
    assert {*shapes_of(CONFIGS / "gemma4_31b", 2, "h200"), *tune_products.others()} <= {*found.items()}
    only = dict(tune_products.shapes([CONFIGS / "gpt_oss_120b"], [1], "h200"))
    assert only == dict(shapes_of(CONFIGS / "gpt_oss_120b", 1, "h200"))
