"""Every command of `bench/` starts from any folder, by its path, and says what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "bench").rglob("*.py")
    if "__main__" in (text := path.read_text()) and "argparse" in text
)


# Runs commands one by one, each in a process that has imported torch already, and writes what came of them.
RUN_ALL = """
import json, os, runpy, sys, tempfile, traceback
import torch

def run(command):
    sys.argv, sys.path[0] = [command, "--help"], os.path.dirname(command)
    try:
        runpy.run_path(command, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

found = {}
for command in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = run(command)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        found[command] = code, said.read()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What `COMMAND --help` ends with and says, with nothing of the repository on the path but the package."""
    folder = tmp_path_factory.mktemp("helps")
    (folder / "allotrope").symlink_to(ROOT / "allotrope", target_is_directory=True)
    script = folder / "run_all.py"
    script.write_text(RUN_ALL)
    done = subprocess.run(
        [sys.executable, str(script), *(str(ROOT / command) for command in COMMANDS)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_entry_commands_keep_their_paths() -> None:
    assert {Path("bench/engine.py"), Path("bench/kernels.py"), Path("bench/random_weights.py")} <= set(COMMANDS)


def test_every_command_is_on_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [str(command) for command in COMMANDS if f"`{command}`" not in page] == []


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_explains_itself(command: Path, helps: dict[str, tuple[int, str]]) -> None:
    code, said = helps[str(ROOT / command)]
    assert code == 0, said
    assert said.startswith("usage: ")
