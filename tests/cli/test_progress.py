"""How far loading is, on a terminal and elsewhere, and what a server says of itself when it has loaded."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from command_run import read_terminal
from safetensors.torch import save_file
from tiny_model import write_tiny_model

from allotrope.progress import ProgressDisplay


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model with weights."""
    directory = write_tiny_model(tmp_path_factory.mktemp("weighted"))
    config = json.loads((directory / "config.json").read_text())
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, config.get("num_key_value_heads", heads) * dim
    shapes = dict.fromkeys(("model.embed_tokens", "lm_head"), (config["vocab_size"], hidden))
    shapes["model.norm"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        shapes |= {f"{attention}.q_proj": (q, hidden), f"{attention}.o_proj": (hidden, q)}
        shapes |= {f"{attention}.{name}_proj": (kv, hidden) for name in "kv"}
        shapes |= {
            f"{mlp}.gate_proj": (wide, hidden),
            f"{mlp}.up_proj": (wide, hidden),
            f"{mlp}.down_proj": (hidden, wide),
        }
        shapes |= {f"model.layers.{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that is set by hand."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def _shown(stream: io.StringIO, steps: list[tuple[float, int]], total: int) -> str:
    """What is shown where so many bytes are read at such seconds."""
    clock = Clock()
    display = ProgressDisplay(lambda: stream, clock)
    for seconds, done in steps:
        clock.seconds = 100.0 + seconds
        record = logging.makeLogRecord({"done": done, "total": total})
        display.emit(record)
    return stream.getvalue()


def test_elsewhere_there_is_a_line_every_ten_seconds() -> None:
    steps = [(0.5 * half, half * 10**9) for half in range(80)]
    lines = _shown(io.StringIO(), steps, 80 * 10**9).splitlines()
    assert lines == [
        "loading weights: 20.0 of 80.0 GB (25 %), 30 s left",
        "loading weights: 40.0 of 80.0 GB (50 %), 20 s left",
        "loading weights: 60.0 of 80.0 GB (75 %), 10 s left",
    ]
    assert _shown(io.StringIO(), [(0, 0), (9.9, 1), (9.95, 2)], 2) == "", "what is quick says nothing"


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    shown = _shown(
        Terminal(), [(0, 0), (0.05, 1_000_000), (2, 2_000_000), (200, 4_000_000), (400, 8_000_000)], 8_000_000
    )
    frames = shown.split("\r\x1b[K")
    assert frames == [
        "",
        "loading [........................] 0.0 of 8.0 MB (0 %)",
        "loading [######..................] 2.0 of 8.0 MB (25 %), 6 s left",
        "loading [############............] 4.0 of 8.0 MB (50 %), 3 min 20 s left",
        "",
    ]


def test_a_model_is_told_to_its_last_byte(weighted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from allotrope.config import EngineConfig
    from allotrope.engine.load import load_model
    from allotrope.engine.load_plan import resolve_load_plan

    seen: list[tuple[int, int]] = []
    monkeypatch.setattr("allotrope.checkpoint.weights.report_bytes", lambda done, total: seen.append((done, total)))
    load_model(resolve_load_plan(EngineConfig(model=str(weighted), device="cpu")), 0)
    stored = (weighted / "model.safetensors").stat().st_size
    header = 8 + int.from_bytes((weighted / "model.safetensors").read_bytes()[:8], "little")
    assert {total for _, total in seen} == {stored - header}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[0][0] == 0 and seen[-1][0] == stored - header


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_commands_show_it_on_a_terminal(weighted: Path, command: str) -> None:
    more = {"generate": ["-p", "the cat", "--max-tokens", "2"], "chat": [], "serve": ["--port", "0"]}[command]
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "allotrope", command, str(weighted), "--kv-cache-memory-bytes", "32MB", *more]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        if command == "serve":
            assert process.stdout is not None and process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        shown = read_terminal(ours)
    assert re.search(rb"loading \[\.+\] 0\.0 of \d+\.\d [kM]B \(0 %\)", shown), shown
    assert shown.split(b"loading [")[-1].count(b"\r\x1b[K") == 1, shown


def test_a_server_says_three_lines(dummy: list[str]) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "ALLOTROPE_LOGGING_LEVEL"}
    command = [
        sys.executable,
        "-m",
        "allotrope",
        "serve",
        *dummy,
        "--port",
        "0",
        "--served-model-name",
        "it's",
        "--threads",
        "1",
    ]
    with subprocess.Popen(command, env=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        model, memory, address = (process.stdout.readline() for _ in range(3))
        assert "LlamaForCausalLM" in model and "layers" in model
        assert re.fullmatch(
            r"memory: [\d.]+ \w+ of weights and [\d.]+ \w+ of caches, enough for .* at a time.*\n", memory
        )
        words = shlex.split(address[address.index("curl ") :])
        options = dict(zip(words[2::2], words[3::2], strict=True))
        name, _, value = options["-H"].partition(": ")
        answer = httpx.post(words[1], content=options["-d"], headers={name: value}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "it's"
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
        assert "INFO" not in process.stderr.read()
