"""Every command of `bench/` starts from any folder, by its path, and says what it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forks import Forks

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "bench").rglob("*.py")
    if "__main__" in (text := path.read_text()) and "argparse" in text
)


# As where Python is given a command's path.
CODE = """
import os, runpy, sys
os.chdir({folder!r})
sys.argv, sys.path[0] = [{command!r}, "--help"], os.path.dirname({command!r})
runpy.run_path({command!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("empty")
    (made / "allotrope").symlink_to(ROOT / "allotrope", target_is_directory=True)
    return made


@pytest.fixture(scope="module")
def forks(folder: Path) -> Forks:
    """With nothing of the repository on the path but the package."""
    return Forks(["torch"], os.environ | {"PYTHONPATH": str(folder)})


def test_entry_commands_keep_their_paths() -> None:
    assert {Path("bench/engine.py"), Path("bench/kernels.py"), Path("bench/random_weights.py")} <= set(COMMANDS)


def test_every_command_is_on_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [str(command) for command in COMMANDS if f"`{command}`" not in page] == []


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_explains_itself(command: Path, forks: Forks, folder: Path) -> None:
    done = forks.run(CODE.format(command=str(ROOT / command), folder=str(folder)), {}, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("usage: ")
