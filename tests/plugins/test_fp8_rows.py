"""FP8 rows inside vLLM: those of our own engine, with its scales, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.hosting import Answer, Hosted, hosted, run_apart
from quantized_twins import write_twin
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts

from allotrope import LLM, SamplingParams
from allotrope.architectures.registry import find_architecture
from allotrope.attention.cache_layout import StateSlots
from allotrope.attention.registry import FAMILIES
from allotrope.verify.random_checkpoint import write_random

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

COUNT = 8
ASKED = prompts((1, 5, 13, 45, 150), vocab_size=300)
# Where sums come in another order, a number may fall on the other side of a border of FP8. Rows that are wrong as a
# whole, by a scale or a place, are further off.
ATOL = 0.02
# vLLM registers configs of its own with Transformers, which then makes no models of these: checkpoints come first.
LATENT = """
from pathlib import Path
from plugins.test_fp8_rows import assert_as_ours, write
cases = {cases!r}
paths = [write(case["architecture"], Path({path!r}) / str(i), **case["config"]) for i, case in enumerate(cases)]
for case, path in zip(cases, paths):
    assert_as_ours(path, case["named"], case["ours"])
    print("AS OURS", case)
"""


def write(architecture: str, directory: Path, /, **changed: Any) -> Path:
    config = find_architecture({"architectures": [architecture]}, architecture).tiny() | changed
    write_random(config | {"architectures": [architecture]}, directory, None, 0)
    return directory


def add_scales(path: Path, scales: dict[str, float]) -> Path:
    """One more number a layer for each of `scales`; the first layer's is half the others'."""
    tensors = load_file(path / "model.safetensors")
    for layer in range(json.loads((path / "config.json").read_text())["num_hidden_layers"]):
        for name, value in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value / (2 if layer == 0 else 1))
    save_file(tensors, path / "model.safetensors")
    return path


def ours(path: Path, **options: Any) -> list[Answer]:
    """What our own engine answers."""
    llm = LLM(str(path), max_model_len=256, **options)
    wanted = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
    outputs = [output.outputs[0] for output in llm.generate(ASKED, wanted)]
    return [Answer(list(one.token_ids), torch.tensor([of.logprob for of in one.logprobs or ()]), 0) for one in outputs]


def assert_same(found: Sequence[Answer], want: Sequence[Answer]) -> None:
    assert [answer.ids for answer in found] == [answer.ids for answer in want]
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=ATOL, rtol=0.0)


def assert_as_ours(path: Path, named: str, kv_cache_dtype: str) -> list[dict[str, float]]:
    """vLLM with `named` as type of its caches answers as our engine does with `kv_cache_dtype`. Returns the scales."""
    want = ours(path, dtype="float32", kv_cache_dtype=kv_cache_dtype)
    with hosted(path, block_size=16, enable_prefix_caching=True, kv_cache_dtype=named) as running:
        first, again = running.answers(ASKED, COUNT), running.answers(ASKED, COUNT)
        running.assert_ours()
        _assert_small_rows(running)
        scales = [layer.mixer.kv_scales for layer in _with_rows(running)]
    assert_same(first, want)
    assert_same(again, want)
    return scales


def _with_rows(running: Hosted) -> list[Any]:
    return [layer for layer in running.runner.model.decoder.layers if hasattr(layer.mixer, "kv_scales")]


def _assert_small_rows(running: Hosted) -> None:
    """Rows of attention have a byte for a number (or are bytes already), in vLLM's pages as in ours."""
    config = running.llm.llm_engine.vllm_config
    for cache in running.runner.compilation_config.static_forward_context.values():
        kept = [field for field in cache.layout.fields if field.dtype.itemsize == 1]
        if not isinstance(cache.layout, StateSlots) and kept:
            factors = sum(field.bytes for field in cache.layout.fields if field not in kept)
            spec = cache.get_kv_cache_spec(config)
            assert spec.head_size == sum(math.prod(field.shape) for field in kept) + factors
        else:
            assert "kv" not in cache.name and "latent" not in cache.name, cache.name


@pytest.mark.parametrize(
    ("architecture", "named", "scales"),
    [
        # No powers of two, which would change few numbers.
        ("GptOssForCausalLM", "fp8", {"k_scale": 0.3, "v_scale": 0.11}),
        ("Gemma4ForCausalLM", "fp8_e4m3", {}),
        ("Qwen3NextForCausalLM", "fp8", {"kv_scale": 0.7, "q_scale": 1.0}),
    ],
)
def test_heads(architecture: str, named: str, scales: dict[str, float], tmp_path: Path) -> None:
    found = assert_as_ours(add_scales(write(architecture, tmp_path), scales), named, "fp8")
    both = scales.get("kv_scale", 1.0)
    want = {name: pytest.approx(scales.get(name, both)) for name in ("k_scale", "v_scale")}
    assert found[-1] == want


def test_latent_and_compressed_rows(tmp_path: Path) -> None:
    """Plain FP8, and rows with factors of their own under vLLM's name for them; vLLM's log says which."""
    sparse = {"architecture": "DeepseekV32ForCausalLM", "config": {"kv_lora_rank": 128}}
    compressed = {"architecture": "DeepseekV4ForCausalLM", "config": {"head_dim": 80}}
    scaled, plain = {"named": "fp8_ds_mla", "ours": "fp8_ds_mla"}, {"named": "fp8", "ours": "fp8"}
    cases = [sparse | scaled, compressed | scaled, sparse | plain, compressed | plain]
    ended = run_apart(LATENT.format(cases=cases, path=str(tmp_path)), fork=True)
    text = ended.stdout + ended.stderr
    assert ended.stdout.count("AS OURS") == len(cases), text[-4000:]
    for line in ("FP8 rows carry factors of their own", "scale 1, as the checkpoint brings none"):
        assert sum("allotrope: FP8 rows" in said and line in said for said in text.splitlines()) == 2, text[-4000:]


def test_scales_of_quantized_weights(tmp_path: Path) -> None:
    """They are nobody's parameters, whatever else the checkpoint holds; and they are left out where rows are plain."""
    plain = write("Qwen3NextForCausalLM", tmp_path / "plain")
    path = add_scales(write_twin(plain, tmp_path / "twin"), {"k_scale": 0.3, "v_scale": 0.11})
    config = json.loads((path / "config.json").read_text())
    # Of FP8, vLLM wants to know this.
    config["quantization_config"]["activation_scheme"] = "dynamic"
    (path / "config.json").write_text(json.dumps(config))
    options = {"dtype": "bfloat16", "additional_config": {"allotrope": {"quantized_weights": "keep"}}}
    for kind in ("fp8", "auto"):
        want = ours(path, dtype="bfloat16", quantized_weights="keep", kv_cache_dtype=kind)
        with hosted(path, kv_cache_dtype=kind, **options) as running:
            assert running.runner.model.build.formats
            found = running.answers(ASKED, COUNT)
            scales = _with_rows(running)[-1].mixer.kv_scales
        assert [answer.ids for answer in found] == [answer.ids for answer in want]
        assert scales == (pytest.approx({"k_scale": 0.3, "v_scale": 0.11}) if kind == "fp8" else {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' is not supported by Allotrope's models"),
        ({"kv_cache_dtype": "nvfp4"}, "(allowed: auto, bfloat16, float16, float32, fp8, fp8_e4m3, fp8_ds_mla)"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "mha: kv_cache_dtype=fp8_ds_mla is for latents"),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            "another type of cache for some layers is not supported by Allotrope's models",
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_refusals(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert_refused(write("LlamaForCausalLM", tmp_path), options, reason)


def test_families_without_fp8_rows_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(FAMILIES, "mha", dataclasses.replace(FAMILIES["mha"], scale_names=()))
    path = write("LlamaForCausalLM", tmp_path)
    assert_refused(path, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': mha stores no FP8 rows")


def assert_refused(path: Path, options: dict[str, Any], reason: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    from allotrope.errors import AllotropeError

    try:
        with pytest.raises(AllotropeError) as raised, hosted(path, **options):
            pass
    finally:
        cleanup_dist_env_and_memory()
    assert reason in str(raised.value)
