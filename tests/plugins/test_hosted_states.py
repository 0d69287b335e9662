"""Types of recurrent states inside vLLM: that of our own engine by default, else the one asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plugins.hosting import hosted
from plugins.test_fp8_rows import ASKED, COUNT, assert_refused, assert_same, ours, write

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]


def test_states_are_what_is_asked_for(tmp_path: Path) -> None:
    path = write("Qwen3NextForCausalLM", tmp_path)
    for named, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        want = ours(path, dtype="float32", state_dtype=named)
        with hosted(path, block_size=16, mamba_ssm_cache_dtype=named) as running:
            assert_same(running.answers(ASKED, COUNT), want)
            running.assert_ours()
            views = [cache.views for cache in running.runner.compilation_config.static_forward_context.values()]
            assert {view["ssm"].dtype for view in views if "ssm" in view} == {dtype}


def test_refusals(tmp_path: Path) -> None:
    hybrid = write("Qwen3NextForCausalLM", tmp_path / "hybrid")
    refused = "a type for a convolution's cached inputs (mamba_cache_dtype) is not supported by Allotrope's models"
    assert_refused(hybrid, {"mamba_cache_dtype": "float16"}, refused)
    plain = write("LlamaForCausalLM", tmp_path / "plain")
    assert_refused(plain, {"mamba_ssm_cache_dtype": "bfloat16"}, "state_dtype: mha keeps no recurrent state")
