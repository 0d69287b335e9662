"""`verify` of GGUF files: those that Transformers reads, those that it does not, and blocks that stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_tiny import CONFIGS, write_blocks
from gguf_twins import write_gguf_twin
from tiny_checkpoints import write_tiny

from allotrope.architectures.glm4_moe import tiny_glm4_moe
from allotrope.architectures.llama import tiny_llama
from allotrope.config import EngineConfig
from allotrope.gguf_file import GgufFile
from allotrope.ops.matmul import cpu_blocks
from allotrope.ops.matmul.cpu_blocks import BlockWeight
from allotrope.verify.options import VerifyOptions
from allotrope.verify.run import verify

OPTIONS = VerifyOptions(modes="whole,chunked-3", lengths="3,17", new_tokens=3)


def test_a_file_of_an_architecture_that_transformers_reads(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = tiny_llama()
    # Its reader overlooks the rope factors of a file.
    del config["rope_scaling"]
    write_tiny(config, tmp_path / "model")
    report = verify(EngineConfig(model=write_gguf_twin(tmp_path / "model", tmp_path / "m.gguf")), OPTIONS)
    assert report.passed and "written out plain" not in report.origin


# Of architectures that others stand for.
VARIANTS = ("Gemma4 with experts", "Gemma4 that shares", "DeepSeek V2-Lite")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in (*CONFIGS, "mistral3")]
)
def test_every_architecture_passes(name: str, tmp_path: Path, write_gguf: Callable[..., str]) -> None:
    torch.set_num_threads(1)
    config = CONFIGS["MistralForCausalLM" if name == "mistral3" else name]()
    file = write_blocks(config, tmp_path, write_gguf, named="mistral3" if name == "mistral3" else "")
    report = verify(EngineConfig(model=file, device="cpu"), OPTIONS)
    assert report.passed, report
    assert any(line.startswith("activations in int8 put logits off by") for line in report.remarks)


def test_another_file_is_written_out_and_its_blocks_are_measured(
    tmp_path: Path, write_gguf: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    write_tiny(tiny_glm4_moe(), tmp_path / "model")
    plain = GgufFile(write_gguf_twin(tmp_path / "model", tmp_path / "plain.gguf"))
    tensors = {one.name: np.array(one.data) for one in gguf.GGUFReader(plain.path).tensors}
    kinds = {name: "Q8_0" for name, one in tensors.items() if one.ndim > 1 and "gate_inp" not in name}
    metadata = {key: value for key, value in plain.metadata.items() if key != "general.architecture"}
    file = write_gguf(tmp_path / "blocks.gguf", "glm4moe", metadata, tensors, kinds)
    report = verify(EngineConfig(model=file, device="cpu"), OPTIONS)
    assert report.passed and "written out plain" in report.origin
    assert any(line.startswith("activations in int8 put logits off by") for line in report.remarks)

    run = cpu_blocks.multiply

    def without_numbers(x: torch.Tensor, weight: BlockWeight, *rest: Any) -> torch.Tensor:
        y = run(x, weight, *rest)
        return y.fill_(torch.nan) if weight.int8_activations else y

    monkeypatch.setattr(cpu_blocks, "multiply", without_numbers)
    report = verify(EngineConfig(model=file, device="cpu"), OPTIONS)
    assert [mode.name for mode in report.modes if mode.verdict == "wrong"] == ["activations in int8"]


@pytest.mark.parametrize("factor", [torch.nan, -3.0])
def test_quantized_weights_that_say_nothing_are_wrong(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    write_tiny(tiny_llama(), tmp_path)
    run = cpu_blocks.multiply
    monkeypatch.setattr(cpu_blocks, "multiply", lambda *given: run(*given).mul_(factor))
    assert not verify(EngineConfig(model=str(tmp_path), device="cpu", quantization="int8"), OPTIONS).passed
