"""Packed weights read as plain ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.checkpoint.dequantize import QuantizedView, dequantized, scaled, unpack_mxfp4
from allotrope.errors import ModelError
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.mxfp4 import FP4_VALUES
from allotrope.ops.matmul.weight import QuantizedWeight


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def checkpoint(directory: Path, quantization: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, directory / "model.safetensors")
    return open_checkpoint(str(directory))


def test_every_code_and_scale_of_mxfp4() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.tensor([0, 1, 100, 120, 126, 127, 128, 130, 200, 250, 251, 1, 2, 3, 4, 127], dtype=torch.uint8)
    got = unpack_mxfp4(codes.view(1, 16, 16), scales.view(1, 16)).view(16, 32)
    for run in range(16):
        for byte in range(16):
            code = int(codes[run, byte])
            for half, nibble in enumerate((code & 15, code >> 4)):
                want = FP4_VALUES[nibble] * 2.0 ** (int(scales[run]) - 127)
                assert float(got[run, 2 * byte + half]) == want, (run, byte, half)


def test_mxfp4_pairs_become_one_tensor_with_inputs_first(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 6, 3), dtype=torch.uint8)
    plain = dequantized(
        checkpoint(
            tmp_path, {"quant_method": "mxfp4"}, {"e.w_blocks": blocks, "e.w_scales": scales, "n": torch.ones(2)}
        )
    )
    assert {name: header.shape for name, header in plain.headers().items()} == {"e.w": (2, 96, 6), "n": (2,)}
    assert plain.headers()["e.w"].stored_bytes == blocks.numel() + scales.numel()
    assert torch.equal(plain.read("e.w").transpose(1, 2), unpack_mxfp4(blocks, scales))
    assert torch.equal(plain.read("n"), torch.ones(2))


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_fp8_blocks_with_ragged_edges(tmp_path: Path, suffix: str) -> None:
    weight = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2)
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {"a.weight": weight, f"a.{suffix}": scale, "a.input_scale": torch.ones(1), "router.scale": torch.ones(3)}
    plain = dequantized(checkpoint(tmp_path, stated, tensors))
    assert set(plain.headers()) == {"a.weight", "router.scale"}
    got = plain.read("a.weight")
    for i, j in ((0, 0), (127, 127), (127, 128), (128, 127), (199, 129)):
        assert float(got[i, j]) == float(weight[i, j].float() * scale[i // 128, j // 128])


@pytest.mark.parametrize("kind", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_other_types_of_fp8_are_read_as_what_they_are_worth(tmp_path: Path, kind: torch.dtype) -> None:
    """No product multiplies them as they are stored: each of their codes has its own worth, times its scale."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(kind)
    tensors = {"a.weight": codes, "a.weight_scale": torch.rand(16, 1)}
    view = dequantized(checkpoint(tmp_path, {"quant_method": "fbgemm_fp8"}, tensors))
    assert isinstance(view, QuantizedView)
    assert set(view.headers()) == {"a.weight"} and view.format("a.weight") is None
    want = codes.float() * tensors["a.weight_scale"]
    torch.testing.assert_close(view.read("a.weight"), want, rtol=0.0, atol=0.0, equal_nan=True)


def test_fp8_per_tensor_and_per_row() -> None:
    weight = torch.randn(6, 4).to(torch.float8_e4m3fn)
    assert torch.equal(scaled(weight, torch.tensor(2.0), ()), weight.float() * 2)
    rows = torch.rand(6)
    for scale in (rows, rows[:, None]):
        assert torch.equal(scaled(weight, scale, ()), weight.float() * rows[:, None])
    # Of stacked experts, whose number is that of the rows, neither is meant for sure.
    with pytest.raises(ValueError, match=r"shape \[6\] for a weight of \[6, 6, 4\]"):
        scaled(weight.expand(6, 6, 4), rows, ())
    with pytest.raises(ValueError, match=r"shape \[3, 2\] for a weight of \[6, 4\]"):
        scaled(weight, torch.ones(3, 2), (4, 4))


def test_a_weight_of_one_block_is_kept_like_its_neighbours(tmp_path: Path) -> None:
    """Its one scale is of a block, as are the two of a higher one: both can go into one product."""
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {}
    for name, rows in (("a", 128), ("b", 256), ("c", 64)):
        tensors[f"{name}.weight"] = torch.randn(rows, 128).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.rand(-(-rows // 128), 1)
    view = dequantized(checkpoint(tmp_path, stated, tensors))
    assert isinstance(view, QuantizedView)
    assert {name: view.format(f"{name}.weight") for name in "abc"} == dict.fromkeys("abc", Fp8(128, rows=128))
    codes, scales = view.packed("b.weight")
    assert torch.equal(QuantizedWeight(Fp8(128), codes, scales).dequantize(), view.read("b.weight"))


def test_packed_experts_among_fp8_weights(tmp_path: Path) -> None:
    """As DeepSeek V4 is released: 4-bit experts in int8 with a power of two for every 32, in one of two types."""
    bytes_ = torch.randint(0, 256, (6, 48), dtype=torch.uint8)
    exponents = torch.randint(120, 130, (6, 3), dtype=torch.uint8)
    want = unpack_mxfp4(bytes_.view(6, 3, 16), exponents).float()
    tensors = {
        "a.weight": bytes_.view(torch.int8),
        "a.scale": exponents.view(torch.float8_e8m0fnu),
        "b.weight": bytes_.clone(),
        "b.weight_scale_inv": exponents.clone(),
        "c.gate_up": torch.randn(2, 130, 6).to(torch.float8_e4m3fn),
        "c.gate_up_scale_inv": torch.rand(2, 2, 1),
        "table": torch.arange(4),
    }
    plain = dequantized(checkpoint(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]}, tensors))
    assert {name: header.shape for name, header in plain.headers().items()} == {
        "a.weight": (6, 96),
        "b.weight": (6, 96),
        "c.gate_up": (2, 130, 6),
        "table": (4,),
    }
    assert torch.equal(plain.read("a.weight"), want)
    assert torch.equal(plain.read("b.weight"), want)
    factor = tensors["c.gate_up_scale_inv"][1, 1, 0]
    assert torch.equal(plain.read("c.gate_up")[1, 129], tensors["c.gate_up"][1, 129].float() * factor)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"quant_method='gptq' is not supported \(allowed: fp8, .*mxfp4\)"):
        dequantized(checkpoint(tmp_path, {"quant_method": "gptq"}, {"n": torch.ones(2)}))
    bare = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    with pytest.raises(ModelError, match=r"a\.weight is float8 without a scale"):
        dequantized(checkpoint(tmp_path, {"quant_method": "fp8"}, bare))
    with pytest.raises(ModelError, match="w_blocks has no w_scales"):
        dequantized(checkpoint(tmp_path, {"quant_method": "mxfp4"}, {"w_blocks": torch.ones(1, dtype=torch.uint8)}))


def test_a_plain_checkpoint_is_itself(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path, None, {"n": torch.ones(2)})
    assert dequantized(plain) is plain
