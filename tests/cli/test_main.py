"""The program as a user runs it: exit status, one line per error, quick help."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_run import read_terminal
from typer.testing import CliRunner

import allotrope
from allotrope.architectures.registry import ARCHITECTURES
from allotrope.attention.registry import FAMILIES
from allotrope.commands.app import BENCHMARKS, COMMANDS, build_app
from allotrope.commands.help_text import EXAMPLES, GROUPS
from allotrope.config import EngineConfig


def allotrope_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "allotrope", *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )


def test_version() -> None:
    done = allotrope_command("version")
    assert (done.returncode, done.stdout) == (0, allotrope.__version__ + "\n")


HEAVY = frozenset(
    "torch transformers triton numpy fastapi uvicorn httpx matplotlib safetensors tokenizers vllm".split()
)


def loaded_by(*args: str, **environment: str) -> tuple[str, set[str]]:
    """What a command prints, and the heavy modules that are there when it has ended with status 0."""
    script = (
        "import sys; from allotrope.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, set(ast.literal_eval(done.stderr.splitlines()[-1]))


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    shown, loaded = loaded_by("--help")
    assert not loaded
    for name in [*COMMANDS, "bench"]:
        assert f"\n  {name} " in shown


@pytest.mark.parametrize("command", [*COMMANDS, "bench", *(f"bench {name}" for name in BENCHMARKS)])
def test_help_of_a_command_loads_nothing_heavy(command: str) -> None:
    """Both spellings say the same."""
    short, loaded = loaded_by(*command.split(), "-h")
    assert not loaded
    assert short == allotrope_command(*command.split(), "--help").stdout


def test_the_version_has_a_flag() -> None:
    for flag in ("-V", "--version"):
        done = allotrope_command(flag)
        assert (done.returncode, done.stdout, done.stderr) == (0, allotrope.__version__ + "\n", "")


def test_options_are_in_groups_and_groups_name_existing_options() -> None:
    shown = allotrope_command("serve", "--help").stdout
    headings = re.findall(r"^(\S[^\n]*):$", shown, re.MULTILINE)
    assert headings == ["Arguments", *GROUPS, "Server", "General", "Examples"]
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    named = [name for group in GROUPS.values() for name in group]
    assert set(named) <= fields and len(named) == len(set(named))
    for heading, group in GROUPS.items():
        part = shown.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert [name for name in group if f"--{name.replace('_', '-')}" not in part] == []


def test_examples_can_be_read() -> None:
    """Every flag of an example is one of its command."""
    for lines in EXAMPLES.values():
        for line in lines:
            command, shown = shlex.split(line)[1:], allotrope_command(*shlex.split(line)[1:2], "--help").stdout
            if command[0] == "bench":
                shown = allotrope_command(*command[:2], "--help").stdout
            assert [
                word for word in command if word.startswith("-") and f"{word} " not in shown.replace(",", " ")
            ] == []


@pytest.mark.parametrize(
    ("environment", "coloured"), [({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_terminal_has_colours_unless_disabled(environment: dict[str, str], coloured: bool) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")} | {"TERM": "xterm"}
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "allotrope", "-h"], env=plain | environment, stdout=theirs):
        os.close(theirs)
        shown = read_terminal(ours)
    assert (b"\x1b[1mCommands:" in shown, b"\x1b" in shown) == (coloured, coloured)
    assert "\x1b" not in allotrope_command("-h").stdout


def test_the_log_is_shown_with_verbose(tiny: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "ALLOTROPE_LOGGING_LEVEL"}
    command = [sys.executable, "-m", "allotrope", "generate", str(tiny), "--load-format", "dummy", "--max-tokens", "1"]
    said = {}
    for flag in ("-v", "--verbose", ""):
        words = [*command, "--kv-cache-memory-bytes", "32MB", "-p", "x", *([flag] if flag else [])]
        said[flag] = subprocess.run(words, env=plain, capture_output=True, text=True, check=True, timeout=60).stderr
    assert "INFO allotrope.engine: " in said["-v"] and "INFO allotrope.engine: " in said["--verbose"]
    assert "INFO" not in said[""]


def test_an_unknown_level_of_the_log_is_refused() -> None:
    environment = os.environ | {"ALLOTROPE_LOGGING_LEVEL": "loud"}
    words = [sys.executable, "-m", "allotrope", "version"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == (
        "allotrope: error: ALLOTROPE_LOGGING_LEVEL='LOUD' is not known; "
        "allowed: DEBUG, INFO, WARNING, ERROR, CRITICAL.\n"
    )


@pytest.mark.parametrize("command", [*COMMANDS, *(f"bench {name}" for name in BENCHMARKS)])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(build_app(), [*command.split(), "--help"])
    assert result.exit_code == 0
    function = BENCHMARKS[command.removeprefix("bench ")] if command.startswith("bench ") else COMMANDS[command]
    assert (function.__doc__ or "").split(".")[0] in " ".join(result.output.split())


def test_a_typed_error_is_one_line_and_status_1() -> None:
    done = allotrope_command("serve", "some-model", "--page-size", "3")
    assert done.returncode == 1
    assert done.stderr == "allotrope: error: bad options: page_size=3; a power of two is needed.\n"
    assert done.stdout == ""


@pytest.mark.parametrize("args", [("--debug", "serve", "m"), ("serve", "--debug", "m"), ("serve", "m", "--debug")])
def test_debug_shows_the_traceback(args: tuple[str, ...]) -> None:
    done = allotrope_command(*args, "--page-size", "3")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_unsupported_and_unknown_flags_are_status_2() -> None:
    done = allotrope_command("serve", "m", "--enable-auto-tool-choice")
    assert done.returncode == 2
    assert done.stderr.startswith("allotrope: error: --enable-auto-tool-choice is not an option of allotrope: ")
    assert done.stderr.count("\n") == 1
    refused = (("serve", "m", "--zork"), ("serve",), ("zork",), ("serve", "m", "--port", "x"), ("bench", "zork"))
    for args in refused:
        done = allotrope_command(*args)
        assert done.returncode == 2
        assert done.stderr.startswith("allotrope: error: ") and done.stderr.endswith(" --help\n"), done.stderr
        assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert allotrope_command().returncode == 2


def test_chat_needs_a_model_or_a_url() -> None:
    for args in ((), ("some-model", "--url", "http://127.0.0.1:1")):
        done = allotrope_command("chat", *args)
        assert done.returncode == 1
        assert done.stderr == "allotrope: error: chat needs either MODEL or --url. Run: allotrope chat MODEL\n"


@pytest.mark.parametrize("command", [("chat",), ("bench", "serve")])
def test_no_server_is_one_line(command: tuple[str, ...]) -> None:
    done = allotrope_command(*command, "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("allotrope: error: cannot reach http://127.0.0.1:1: ")
    assert done.stderr.endswith("Is the server running?\n")


def test_families_lists_each_family_and_architecture() -> None:
    done = allotrope_command("families")
    assert done.returncode == 0, done.stderr
    assert [name for name in (*FAMILIES, *ARCHITECTURES) if name not in done.stdout] == []
    assert "reference" in done.stdout


def test_the_cached_catalogue_is_listed_without_torch(tmp_path: Path) -> None:
    """And as it was the first time; a damaged or older copy is made anew."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    first, loaded = loaded_by("families", **environment)
    assert "torch" in loaded
    kept = tmp_path / "allotrope" / "catalogue.json"
    whole = kept.read_text()
    assert list(kept.parent.iterdir()) == [kept]
    for command in (("families",), ("compat",), ("compat", "--json")):
        shown, loaded = loaded_by(*command, **environment)
        # An installed host is looked into, and loads what it needs.
        assert not loaded or "vllm" in loaded, f"{command} loaded {loaded}"
        assert command != ("families",) or shown == first
    older = json.loads(whole)
    older["sources"], older["families"] = "of other files", []
    damaged = [json.dumps(older), whole[: len(whole) // 2], "[]", "null"]
    code = (
        "import json, sys; from pathlib import Path; from allotrope.commands.catalogue import catalogue\n"
        "for text in json.load(sys.stdin):\n"
        "    Path(sys.argv[1]).write_text(text); catalogue(); print(Path(sys.argv[1]).read_text())"
    )
    words = [sys.executable, "-c", code, str(kept)]
    given = {"input": json.dumps(damaged), "env": os.environ | environment}
    done = subprocess.run(words, **given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [whole] * len(damaged)


def test_the_catalogue_is_listed_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown, _ = loaded_by("families", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert "LlamaForCausalLM" in shown
