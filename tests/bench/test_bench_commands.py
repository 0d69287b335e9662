"""Every command of `bench/` starts from any folder, by its path, and says what it takes."""

from __future__ import annotations

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


def run(command: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """`COMMAND --help` with nothing of the repository on the path but the package."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    (folder / "allotrope").symlink_to(ROOT / "allotrope", target_is_directory=True)
    return subprocess.run(
        [sys.executable, str(ROOT / command), "--help"],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_entry_commands_keep_their_paths() -> None:
    assert {Path("bench/engine.py"), Path("bench/kernels.py"), Path("bench/random_weights.py")} <= set(COMMANDS)


def test_every_command_is_on_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [str(command) for command in COMMANDS if f"`{command}`" not in page] == []


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_explains_itself(command: Path, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("usage: ")
