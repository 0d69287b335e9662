"""Types of recurrent states inside vLLM: that of our own engine by default, else the one asked for.

vLLM's CPU platform resets the type on processors with AVX-512 BF16, so tests set what the processor reports.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from plugins.hosting import Hosted, hosted
from plugins.test_fp8_rows import ASKED, COUNT, assert_refused, assert_same, ours, write

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]


def report_bf16(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    """Let PyTorch report a processor with or without AVX-512 BF16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the plugin's model logs."""
    from allotrope.plugins.vllm import model

    lines: list[str] = []
    monkeypatch.setattr(model.log, "info", lambda text, *values: lines.append(text % values))
    return lines


def states_of(running: Hosted) -> set[torch.dtype]:
    """Types of the states in vLLM's memory, which are those that vLLM was told before the model was built."""
    from allotrope.plugins.vllm.model import HostedHybridModel

    caches = running.runner.compilation_config.static_forward_context.values()
    views = [views["ssm"] for cache in caches for views in cache.views if "ssm" in views]
    config = running.llm.llm_engine.vllm_config
    shapes = HostedHybridModel.get_mamba_state_shape_from_config(config)
    dtypes = HostedHybridModel.get_mamba_state_dtype_from_config(config)
    assert (shapes[1], dtypes[1]) == (views[0].shape[1:], views[0].dtype) and len(shapes) == len(dtypes) == 2
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    assert size == max(spec.state_content_size_bytes for spec in running.groups if hasattr(spec, "shapes"))
    return {view.dtype for view in views}


@pytest.mark.parametrize(
    ("has_bf16", "asked", "dtype"),
    [
        (False, "auto", torch.float32),
        (True, "auto", torch.float32),
        (False, "bfloat16", torch.bfloat16),
        (True, "bfloat16", torch.bfloat16),
        (True, "float16", torch.float16),
    ],
)
def test_states_are_what_is_asked_for(
    has_bf16: bool, asked: str, dtype: torch.dtype, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report_bf16(monkeypatch, has_bf16)
    path = write("Qwen3NextForCausalLM", tmp_path)
    want = ours(path, dtype="float32", state_dtype=asked)
    with hosted(path, block_size=16, mamba_ssm_cache_dtype=asked) as running:
        assert_same(running.answers(ASKED, COUNT), want)
        running.assert_ours()
        assert states_of(running) == {dtype}
    # vLLM sets its own default there.
    assert any("recurrent states are float32" in line for line in said) == (has_bf16 and asked == "auto")


@pytest.mark.parametrize("has_bf16", [False, True])
def test_what_vllm_resets_is_said(
    has_bf16: bool, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's own config of Kimi-Linear has no layer types, by which its CPU platform knows recurrent layers."""
    report_bf16(monkeypatch, has_bf16)
    with hosted(write("KimiLinearForCausalLM", tmp_path), block_size=16, mamba_ssm_cache_dtype="bfloat16") as running:
        assert states_of(running) == {torch.float32 if has_bf16 else torch.bfloat16}
    assert sum("recurrent states are float32" in line for line in said) == has_bf16


def test_models_without_states(said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A type for states is refused where vLLM hands it on, and said to mean nothing where vLLM resets it."""
    path = write("LlamaForCausalLM", tmp_path)
    report_bf16(monkeypatch, False)
    assert_refused(path, {"mamba_ssm_cache_dtype": "bfloat16"}, "state_dtype: mha keeps no recurrent state")
    report_bf16(monkeypatch, True)
    with hosted(path, block_size=16, mamba_ssm_cache_dtype="bfloat16"):
        assert sum("the model keeps no recurrent states" in line for line in said) == 1


def test_a_type_for_convolutions_is_refused(tmp_path: Path) -> None:
    refused = "a type for a convolution's cached inputs (mamba_cache_dtype) is not supported by Allotrope's models"
    assert_refused(write("Qwen3NextForCausalLM", tmp_path), {"mamba_cache_dtype": "float16"}, refused)
