"""The program as a user runs it: exit status, one line per error, quick help."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import allotrope
from allotrope.attention.registry import FAMILIES
from allotrope.commands.app import BENCHMARKS, COMMANDS, build_app
from allotrope.models.registry import ARCHITECTURES


def allotrope_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "allotrope", *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )


def test_version() -> None:
    done = allotrope_command("version")
    assert (done.returncode, done.stdout) == (0, allotrope.__version__ + "\n")


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['allotrope', '--help']\n"
        "from allotrope.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'httpx', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'help loaded {heavy}' if heavy else 0)"
    )
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        seconds.append(time.perf_counter() - begin)
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 0.5
    for name in [*COMMANDS, "bench"]:
        assert f"\n  {name} " in done.stdout


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
    done = allotrope_command("serve", "m", "--tool-call-parser", "hermes")
    assert done.returncode == 2
    assert done.stderr.startswith("allotrope: error: --tool-call-parser is not an option of allotrope: ")
    assert done.stderr.count("\n") == 1
    assert allotrope_command("serve", "m", "--zork").returncode == 2
    assert allotrope_command("serve").returncode == 2
    assert allotrope_command("zork").returncode == 2


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
