"""FP8 rows of the caches: whose scales they take, and who refuses them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import Watch, engine, request, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, prompts, write_tiny

from allotrope.architectures.deepseek_v32 import tiny_deepseek_v32
from allotrope.architectures.llama import tiny_llama
from allotrope.attention.registry import FAMILIES
from allotrope.engine.engine import Engine
from allotrope.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    torch.set_num_threads(1)
    return write_tiny(tiny_llama(), tmp_path_factory.mktemp("tiny"))


def with_scales(tiny: TinyCheckpoint, directory: Path, scales: dict[str, float]) -> Path:
    """The checkpoint with one more number a layer for each of `scales`; the first layer's is half the others'."""
    tensors = load_file(tiny.directory / "model.safetensors")
    config = json.loads((tiny.directory / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for name, value in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value / (2 if layer == 0 else 1))
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def scales_of(running: Engine) -> list[dict[str, float]]:
    layers: list[Any] = list(running.model.layers)
    return [layer.mixer.kv_scales for layer in layers]


def test_scales_of_the_checkpoint(tiny: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = with_scales(tiny, tmp_path, {"k_scale": 0.5, "v_scale": 0.25, "q_scale": 1.0})
    with caplog.at_level(logging.INFO, "allotrope"):
        running = engine(path, kv_cache_dtype="fp8")
    assert scales_of(running)[:2] == [{"k_scale": 0.25, "v_scale": 0.125}, {"k_scale": 0.5, "v_scale": 0.25}]
    assert "scales 0.125 to 0.5, from the checkpoint" in caplog.text
    with caplog.at_level(logging.INFO, "allotrope"):
        plain = engine(path)
    assert scales_of(plain) == [{}] * len(scales_of(running))
    assert "scales of FP8 rows are not used" in caplog.text


def test_scales_of_projections_outputs(tiny: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Quark names them; where a layer has both names, the plain one counts."""
    names = {f"{kind}_proj.output_scale": value for kind, value in (("q", 1.0), ("k", 0.5), ("v", 0.25))}
    with caplog.at_level(logging.INFO, "allotrope"):
        running = engine(with_scales(tiny, tmp_path, names | {"v_scale": 0.75}), kv_cache_dtype="fp8")
    assert scales_of(running)[1] == {"k_scale": 0.5, "v_scale": 0.75}
    assert "from the checkpoint" in caplog.text


def test_one_scale_for_both(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    running = engine(with_scales(tiny, tmp_path, {"kv_scale": 2.0}), kv_cache_dtype="fp8")
    assert scales_of(running)[1] == {"k_scale": 2.0, "v_scale": 2.0}


def test_a_scale_brings_large_rows_into_range(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Rows a thousandth of FP8's smallest number vanish without a scale, and keep three bits with one."""
    (ids,) = prompts((40,))
    want, lost, kept = Watch(), Watch(), Watch()
    run(engine(tiny.directory, want), [request("r", ids)])
    shrunk = tmp_path / "shrunk"
    shrunk.mkdir()
    with_scales(tiny, shrunk, {"k_scale": 1.0, "v_scale": 2e-5})
    tensors = load_file(shrunk / "model.safetensors")
    for name in tensors:
        # What values lose, the output projection gives back: the model is the same.
        if "v_proj" in name:
            tensors[name] *= 2e-5
        if "o_proj" in name:
            tensors[name] /= 2e-5
    save_file(tensors, shrunk / "model.safetensors")
    run(engine(shrunk, kept, kv_cache_dtype="fp8"), [request("r", ids)])
    for name in [name for name in tensors if name.endswith("v_scale")]:
        del tensors[name]
    save_file(tensors, shrunk / "model.safetensors")
    run(engine(shrunk, lost, kv_cache_dtype="fp8"), [request("r", ids)])

    def error(watch: Watch) -> float:
        rows = [watch.seen["r"][i] - want.seen["r"][i] for i in range(len(ids))]
        return float(torch.stack(rows).square().mean().sqrt())

    assert error(kept) < 0.3 < 1.0 < error(lost)


def test_a_scale_must_be_a_number_to_divide_by(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    path = with_scales(tiny, tmp_path, {"k_scale": 0.0})
    with pytest.raises(ModelError, match=r"k_scale is \[0.0\]; one number above 0 is needed"):
        engine(path, kv_cache_dtype="fp8")


def test_rows_with_factors_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Small latent rows keep their digits by a factor for each block, and lose them to one scale for all."""
    config = tiny_deepseek_v32() | {"kv_lora_rank": 128, "num_hidden_layers": 2}
    path = write_tiny(config, tmp_path).directory
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        # What latents lose, the projection behind them gives back: the model is the same.
        if "kv_a_layernorm" in name:
            tensors[name] *= 2e-4
        if "kv_b_proj" in name:
            tensors[name] /= 2e-4
    save_file(tensors, path / "model.safetensors")
    (ids,) = prompts((40,))
    seen = {}
    for kind in ("auto", "fp8", "fp8_ds_mla"):
        watch = Watch()
        with caplog.at_level(logging.INFO, "allotrope"):
            running = engine(path, watch, kv_cache_dtype=kind)
        run(running, [request("r", ids)])
        seen[kind] = torch.stack([watch.seen["r"][i] for i in range(len(ids))])
    assert "FP8 rows carry factors of their own" in caplog.text
    errors = [float((seen[kind] - seen["auto"]).abs().median()) for kind in ("fp8", "fp8_ds_mla")]
    assert 0 < errors[1] < 0.4 < errors[0], errors


def test_plain_rows_have_no_factors(tiny: TinyCheckpoint) -> None:
    with pytest.raises(ModelError, match="mha: kv_cache_dtype=fp8_ds_mla is for latents"):
        engine(tiny.directory, kv_cache_dtype="fp8_ds_mla")


def test_families_without_fp8_rows_refuse(monkeypatch: pytest.MonkeyPatch, tiny: TinyCheckpoint) -> None:
    monkeypatch.setattr(FAMILIES["mha"], "scale_names", ())
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8': mha stores no FP8 rows"):
        engine(tiny.directory, kv_cache_dtype="fp8")
