"""What an engine does in a slower way than it could is said in its log, with every reason."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import GREEDY, Watch, engine, request, run
from quantized_twins import write_twin
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.llama import tiny_llama
from allotrope.layers import weights

OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config, for random weights."""
    torch.set_num_threads(1)
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama()))
    return tmp_path


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 matrices, and those of one layer with numbers of a type that no product takes."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("quantized")
    return write_twin(write_tiny(tiny_llama(), folder / "plain").directory, folder / "fp8")


def said(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [message for message in caplog.messages if message.startswith(start)]


@pytest.mark.parametrize(
    ("options", "watched", "reasons"),
    [
        ({"async_scheduling": "off"}, False, ["--async-scheduling off was asked for"]),
        ({"async_scheduling": "auto"}, False, ["device=cpu (auto schedules the steps of a GPU asynchronously)"]),
        ({"async_scheduling": "on"}, True, ["an observer may replace tokens"]),
        (
            {"async_scheduling": "off"},
            True,
            ["--async-scheduling off was asked for", "an observer may replace tokens"],
        ),
    ],
)
def test_steps_without_async_scheduling_say_why(
    options: dict[str, Any], watched: bool, reasons: list[str], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "allotrope"):
        engine(model, Watch() if watched else None, load_format="dummy", **OPTIONS, **options).close()
    (line,) = said(caplog, "async scheduling is off")
    assert all(reason in line for reason in reasons) and line.count(";") == len(reasons) - 1
    assert not said(caplog, "async scheduling is on")


def test_penalties_are_said_once_to_pause_async_scheduling(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    penalized = dataclasses.replace(GREEDY, repetition_penalty=1.2)
    with caplog.at_level(logging.INFO, "allotrope"):
        running = engine(model, load_format="dummy", async_scheduling="on", **OPTIONS)
        run(running, [request("plain", prompts((5,))[0])])
        assert said(caplog, "async scheduling is on") and not said(caplog, "async scheduling pauses")
        for name in ("one", "two"):
            run(running, [request(name, prompts((5,))[0], penalized)])
    assert len(said(caplog, "async scheduling pauses while a request with penalties runs")) == 1


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("auto", "group_size=16 (needs multiples of 32)"),
        ("dequantize", "quantized_weights=dequantize"),
    ],
)
def test_weights_that_are_dequantized_on_load_say_why(
    asked: str, reason: str, quantized: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "allotrope"):
        engine(quantized, quantized_weights=asked, **OPTIONS)
    (line,) = said(caplog, "dequantized on load")
    assert line.endswith(reason) and "layers.*.mixer.qkv.weight" in line


def test_weights_that_are_kept_say_that_each_product_dequantizes_them(
    quantized: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights._warn.cache_clear()
    with caplog.at_level(logging.INFO, "allotrope"):
        engine(quantized, quantized_weights="keep", **OPTIONS)
    assert not said(caplog, "dequantized on load")
    (line,) = said(caplog, "fp8 weights are dequantized anew for every product")
    assert "chip=cpu (needs a GPU)" in line


def test_weights_that_cannot_be_kept_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers of a type that no product takes are read all the same; the others stay as they are."""
    twin = write_twin(write_tiny(tiny_llama(), tmp_path / "plain").directory, tmp_path / "fp8")
    _retype(twin / "model.safetensors", "o_proj.weight", torch.float8_e5m2)
    with caplog.at_level(logging.INFO, "allotrope"):
        engine(twin, quantized_weights="keep", **OPTIONS)
    (line,) = said(caplog, "dequantized on load")
    assert "layers.*.mixer.out.weight" in line and "qkv" not in line
    assert line.endswith("their layers or their formats cannot be kept quantized")


def _retype(path: Path, ending: str, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    changed = {name: t.float().to(dtype) for name, t in tensors.items() if name.endswith(ending)}
    assert changed
    save_file(tensors | changed, path)
