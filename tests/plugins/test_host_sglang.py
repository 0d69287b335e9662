"""What SGLang is when the plugin is there: switched off, unknown or broken hosts, options that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plugins.hosting_sglang import Round, ask, assert_equal, assert_ours, ours, write
from tiny_checkpoints import prompts

pytestmark = [pytest.mark.usefixtures("in_sglang"), pytest.mark.timeout(600)]

FIRST = Round(prompts((3, 40), vocab_size=300), 4)
UNKNOWN = """
import importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: "99.0.0" if name == "sglang" else known(name)
"""
REMOVED = """
import importlib, types
known = importlib.import_module
def import_module(name, package=None):
    found = known(name, package)
    return types.SimpleNamespace() if name == "sglang.srt.server_args" else found
importlib.import_module = import_module
"""


@pytest.mark.parametrize(
    ("environment", "before", "line"),
    [
        ({"ALLOTROPE_SGLANG": "0", "SGLANG_PLATFORM": "allotrope"}, "", None),
        ({}, UNKNOWN, "SGLang 99.0.0 is not known (known: 0.5.16, 0.5.17, 0.5.21, 0.5.22, 0.5.23)"),
        ({}, REMOVED, "has no attribute 'add_attention_backend_choices'"),
    ],
    ids=["switched off", "unknown version", "removed symbol"],
)
def test_sglang_runs_its_own_model(environment: dict[str, str], before: str, line: str | None, tmp_path: Path) -> None:
    """One line in the log of each process, and right answers of SGLang's own model."""
    path = write("LlamaForCausalLM", tmp_path)
    asked = ask(path, [FIRST], environment, before)
    assert asked.code == 0 and asked.answers, asked.log[-4000:]
    said = [one for one in asked.log.splitlines() if "allotrope:" in one]
    assert all("plugin off, SGLang runs its own models" in one and (line or "!") in one for one in said), said
    assert bool(said) == (line is not None)
    assert_equal(asked.answers[0], ours(path, FIRST))


def test_what_is_refused(tmp_path: Path) -> None:
    """Every reason at once."""
    options = {"cpu_offload_gb": 1, "enable_two_batch_overlap": True, "kv_cache_dtype": "fp8_e5m2"}
    options |= {"load_format": "presharded", "enable_memory_saver": True, "model_impl": "transformers"}
    unread = ("kv_cache_dtype=fp8_e5m2 is not", "load_format=presharded is not", "model_impl=transformers is not")
    unseen = {
        "offload_group_size": 1,
        "kt_weight_path": "weights",
        "ep_num_redundant_experts": 2,
        "enable_return_routed_experts": True,
        "enable_int8_mamba_checkpoint": True,
        "quantization_param_path": "scales.json",
    }
    asked = ask(write("LlamaForCausalLM", tmp_path), [FIRST], fork=True, **options, **unseen)
    assert asked.code != 0
    for reason in ("offloading weights is not supported", "two batches at once", "releasing weights without", *unread):
        assert reason in asked.log
    for option in unseen:
        assert f"({option}) is not supported by Allotrope's models" in asked.log, option
    assert "ALLOTROPE_SGLANG=0 gives SGLang's own models" in asked.log


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("DeepseekV4ForCausalLM", {"page_size": 64}, "page_size=64 is not a multiple of 128"),
        ("LlamaForCausalLM", {"json_model_override_args": '{"allotrope": {"speed": 1}}'}, "'speed' (allowed:"),
    ],
)
def test_what_does_not_fit(architecture: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    asked = ask(write(architecture, tmp_path), [FIRST], fork=True, **options)
    assert asked.code != 0 and reason in asked.log, asked.log[-2000:]


def test_overrides_of_a_text_model_inside(tmp_path: Path) -> None:
    path, inside = write("Qwen3_5ForConditionalGeneration", tmp_path), {"text_config": {"rms_norm_eps": 0.5}}
    asked = ask(path, [FIRST], fork=True, page_size=None, json_model_override_args=json.dumps(inside))
    assert_ours(asked)
    want = ours(path, FIRST, hf_overrides=inside)
    assert_equal(asked.answers[0], want)
    assert want.logprobs != ours(path, FIRST).logprobs


def test_overrides_leave_pools_alone(tmp_path: Path) -> None:
    """SGLang would make a pool for each layer of the model, and each would hold all of its caches."""
    from allotrope.plugins.sglang.config import hosted_config

    config = hosted_config(str(write("LlamaForCausalLM", tmp_path)), None)
    before = config.num_attention_heads, config.head_dim
    config.update({"num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 32, "vocab_size": 7})
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (1, *before)
    config.text_config = {"num_hidden_layers": 4, "max_position_embeddings": 99}
    assert (config.num_hidden_layers, config.max_position_embeddings, config.vocab_size) == (1, 99, 7)


def test_weights_come_once(tmp_path: Path) -> None:
    """Updating them is refused, and SGLang answers as before."""
    path = write("LlamaForCausalLM", tmp_path)
    asked = ask(path, [FIRST, FIRST], updates=True)
    assert_ours(asked)
    (said,) = asked.updated
    assert f"{path}: weights cannot be loaded a second time; start SGLang anew" in said
    for found in asked.answers:
        assert_equal(found, ours(path, FIRST))


def test_its_command_starts_our_server() -> None:
    """`sglang serve --model-type allotrope` hands its arguments to our command."""
    pytest.importorskip("sglang.cli.serve_backends", reason="SGLang 0.5.16 starts no servers but its own")
    command = [str(Path(sys.executable).with_name("sglang")), "serve", "model", "--model-type", "allotrope", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Serve MODEL over HTTP with the OpenAI API." in ended.stdout
