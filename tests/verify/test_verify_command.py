"""`allotrope verify` as a user runs it: what it prints and writes, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from verify_fixtures import Spoil, Tiny

from allotrope.commands.app import build_app


def command(*args: object) -> Result:
    result = CliRunner().invoke(build_app(), ["verify", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_right_is_status_0_and_says_what_was_compared_with_what(stored: Path) -> None:
    done = command(stored, "--modes", "whole,chunked-3")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"{stored}: MistralForCausalLM"
    assert lines[1] == "engine:     float32 with float32 caches on cpu"
    assert any(line.startswith("backend:    attention of layers") for line in lines)
    assert any(line.startswith("backend:    operation rms_norm/") for line in lines)
    assert lines[2] == f"against:    outputs stored in {stored}, made by MistralForCausalLM"
    assert lines[3] == "prompts:    5, of 1 to 70 tokens, each followed by 6 tokens"
    assert lines[4] == "allowed:    no logit may be off by more than 0.0005 (the tolerance of manifest.json)"
    assert lines[-1].startswith("PASS: 2 of 2 modes agree with outputs stored in")
    for name in ("whole", "chunked-3"):
        (row,) = [line.split() for line in lines if line.split()[:1] == [name] and "pass" in line]
        assert row[5:7] == ["100.0%", "5/5"]


def test_wrong_is_status_1_and_names_the_layer(tiny: Tiny, spoil: Spoil, tmp_path: Path) -> None:
    source = tiny("llama").directory
    spoiled = spoil(source, "model.layers.1.self_attn.v_proj.weight", lambda weight: -weight)
    document, picture = tmp_path / "found.json", tmp_path / "found.png"
    done = command(
        *(spoiled, "--reference", source, "--lengths", "4,20", "--modes", "whole,cached"),
        *("--json", document, "--plot", picture),
    )
    assert done.exit_code == 1
    assert "wrong: layer 1 (mha) is the first that diverges" in done.stdout
    assert done.stdout.splitlines()[-1] == "WRONG in 2 of 2 modes: whole, cached"
    found = json.loads(document.read_text())
    assert (found["passed"], found["first_diverging_layer"]) == (False, 1)
    assert [mode["verdict"] for mode in found["modes"]] == ["wrong", "wrong"]
    assert [layer["error"] > layer["limit"] for layer in found["layers"]] == [False, True, True]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("NoSuchForCausalLM", "--random"), "NoSuchForCausalLM"),
        (("m", "--modes", "sideways"), "names sideways"),
        (("m", "--page-size", "3"), "a power of two is needed"),
    ],
)
def test_what_cannot_run_is_status_2(args: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = command(*args)
    assert done.exit_code == 2
    assert done.stderr.startswith("allotrope: error: ")
    assert text in done.stderr


def test_dummy_weights_are_refused(stored: Path) -> None:
    done = command(stored, "--load-format", "dummy")
    assert done.exit_code == 2
    assert "--random" in done.stderr
