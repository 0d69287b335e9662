"""`allotrope eval` as a user runs it, on tiny random checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_fixtures import add_byte_tokenizer, likely_text
from tiny_checkpoints import TinyCheckpoint, write_tiny
from typer.testing import CliRunner, Result

from allotrope.architectures.llama import tiny_mistral
from allotrope.commands.app import build_app


def command(*args: object) -> Result:
    result = CliRunner().invoke(build_app(), ["eval", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Layers with a window of 16 tokens, which are bytes."""
    made = write_tiny(
        tiny_mistral() | {"sliding_window": 16, "max_position_embeddings": 2048}, tmp_path_factory.mktemp("windowed")
    )
    add_byte_tokenizer(made.directory)
    return made


@pytest.fixture(scope="module")
def text(windowed: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model itself would write: another model finds it less likely."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(likely_text(windowed, 800))
    return file


SMALL = ("--dtype", "float32", "--threads", 1, "--items", 8, "--lengths", 160, "--text-length", 96)


def _figures(mode: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in mode["figures"]}


def test_every_mode_answers_as_transformers_does(windowed: TinyCheckpoint, text: Path, tmp_path: Path) -> None:
    document, picture = tmp_path / "found.json", tmp_path / "found.png"
    done = command(
        *(windowed.directory, *SMALL, "--text", text, "--modes", "cold,warm,chunked,preempted"),
        *("--tasks", "text,recall,tool_call", "--baseline", "transformers", "--json", document, "--plot", picture),
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith("INSIDE: all ")
    found = json.loads(document.read_text())
    assert found["passed"] and not found["skipped"]
    assert [mode["name"] for mode in found["modes"]] == ["cold", "warm", "chunked", "preempted"]
    expected = _figures(found["baseline"])
    # Drawn from the model, printable characters alone: far likelier than another model's.
    assert 0 < expected["text"]["value"] < 6 and expected["text"]["unit"] == "bits per byte"
    for mode in found["modes"]:
        assert found["unequal_answers"][mode["name"]] == {"recall": [0, 8], "tool_call": [0, 8]}
        figures = _figures(mode)
        assert figures.keys() == expected.keys() >= {"text", "recall", "tool_call, valid", "recall, tokens = 3 mod 4"}
        for name, figure in figures.items():
            assert figure["low"] <= figure["value"] <= figure["high"], name
            assert figure["value"] == pytest.approx(expected[name]["value"], abs=1e-5), name
    assert all(abs(one["difference"]) < 1e-5 and one["inside"] for one in found["differences"])
    remarks = {mode["name"]: mode["remark"] for mode in found["modes"]}
    assert "prompt tokens reused" in remarks["warm"] and "preemptions" in remarks["preempted"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_window_is_outside(windowed: TinyCheckpoint, text: Path, tmp_path: Path) -> None:
    document = tmp_path / "found.json"
    options = (windowed.directory, *SMALL, "--text", text, "--tasks", "text,copy")
    fault = ("--hf-overrides", '{"sliding_window": 8}')
    against = ("--baseline", "transformers", "--reference", windowed.directory)
    done = command(*options, *fault, *against, "--json", document)
    assert done.exit_code == 1
    assert "outside in cold: text is" in done.stdout
    found = json.loads(document.read_text())
    (one,) = [one for one in found["differences"] if one["figure"] == "text"]
    assert not one["inside"] and one["difference"] > 0.1
    assert found["unequal_answers"]["cold"]["copy"][0] > 0
    # Its own figures serve as a baseline too; the right model is outside of what the wrong one reached.
    again = command(*options, *fault, "--baseline", document)
    assert again.exit_code == 0 and "found.json (cold)" in again.stdout
    assert command(*options, "--baseline", document).exit_code == 1
    other = command(windowed.directory, *SMALL, "--tasks", "copy", "--baseline", document)
    assert other.exit_code == 2 and "measured other items" in other.stderr


def test_two_ranks_answer_as_one(windowed: TinyCheckpoint, text: Path) -> None:
    done = command(*(windowed.directory, *SMALL, "--text", text, "--tasks", "text,copy", "--modes", "cold,two-ranks"))
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert "two-ranks: answers other than of cold: none" in lines
    assert lines[-1] == "INSIDE: all 2 figures are in the 95 % interval of cold"


def test_drafts_change_no_answer(windowed: TinyCheckpoint, text: Path, tmp_path: Path) -> None:
    document = tmp_path / "found.json"
    options = ("--text", text, "--tasks", "text,copy", "--modes", "cold,speculated", "--json", document)
    done = command(windowed.directory, *SMALL, *options)
    assert done.exit_code == 0, done.stdout
    assert "speculated: answers other than of cold: none" in done.stdout.splitlines()
    cold, speculated = (_figures(mode) for mode in json.loads(document.read_text())["modes"])
    assert "acceptance length" not in cold and speculated["acceptance length"]["count"] > 0
    assert speculated["text"]["value"] == pytest.approx(cold["text"]["value"], abs=1e-4)
    # Where drafts depend on time or memory, they are told, and held to nothing.
    lookup = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "adaptive": False})
    options = ("--tasks", "copy", "--modes", "cold,preempted", "--json", document, "--speculative-config", lookup)
    assert command(windowed.directory, *SMALL, *options).exit_code == 0
    cold, preempted = json.loads(document.read_text())["modes"]
    assert "acceptance length" in _figures(cold) and "acceptance length" not in _figures(preempted)
    assert "drafts of ngram accepted" in preempted["remark"]
    lookup = '{"method": "ngram", "num_speculative_tokens": 2}'
    done = command(windowed.directory, *SMALL, "--tasks", "copy", "--speculative-config", lookup)
    assert done.exit_code == 0 and "accepted, draft" not in done.stdout
    assert "drafts of ngram accepted" in done.stdout


def test_the_default_text_is_on_every_machine(windowed: TinyCheckpoint) -> None:
    done = command(windowed.directory, *SMALL, "--tasks", "text")
    assert done.exit_code == 0
    assert "8 chunks of 96 tokens of help topics of Python's pydoc" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("measured; --baseline")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--tasks", "sums"), "names sums; allowed: text, recall, copy"),
        (("--tasks", ","), "names nothing"),
        (("--modes", "hot"), "names hot; allowed: cold, warm"),
        (("--items", "1"), "items=1; at least 2 are needed"),
        (("--lengths", "0"), "numbers of bytes above 0"),
        (("--lengths", "8"), "recall has prompts of at least 11 bytes, not of 8"),
        (("--lengths", "100000"), "and the model a context of 2048"),
        (("--text", "/no/such/file"), "is no file"),
        (("--text-length", "16"), "at least 32 tokens"),
        (("--text-length", "4096"), "text_length=4096; the model has a context of 2048"),
        (("--baseline", "vllm"), "'transformers' or a file that --json wrote"),
        (("--baseline", "{model}/config.json"), "is no report of this command"),
        (("--text", "{model}/config.json"), "needs 1022 for two chunks; give a longer --text"),
        (("--reference", "x"), "needs --baseline transformers"),
        (("--load-format", "dummy", "--baseline", "transformers"), "no weights that Transformers could read"),
        (("--modes", "all", "-tp", "2"), "sets tensor_parallel_size itself"),
    ],
)
def test_what_cannot_be_measured_is_status_2(windowed: TinyCheckpoint, args: tuple[str, ...], text: str) -> None:
    model = str(windowed.directory)
    done = command(model, *(arg.replace("{model}", model) for arg in args))
    assert done.exit_code == 2
    assert done.stderr.startswith("allotrope: error: ") and text in done.stderr


def test_a_model_without_tokenizer_is_status_2(tmp_path: Path) -> None:
    write_tiny(tiny_mistral(), tmp_path / "bare")
    done = command(tmp_path / "bare")
    assert done.exit_code == 2
    assert "it brings no tokenizer; give one with --tokenizer" in done.stderr


def test_a_plot_says_what_it_needs(windowed: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = command(windowed.directory, "--plot", tmp_path / "p.png")
    assert done.exit_code == 2
    assert "pip install 'allotrope[bench]'" in done.stderr


def test_an_engine_that_fails_in_every_mode_is_status_1(
    windowed: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("allotrope.eval.run.ask_engine", fail)
    done = command(windowed.directory, *SMALL, "--tasks", "copy")
    assert done.exit_code == 1
    assert done.stderr.startswith("allotrope: error: nothing was measured: cold: RuntimeError: no kernel image.")
