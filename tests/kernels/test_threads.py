"""How threads wait and how many there are: what the OpenMP runtime says of itself, and control groups as files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allotrope.env import SPIN_COUNT, cpu_quota, thread_count

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def _spin_counts(code: str, *arguments: str, **setting: str) -> list[str]:
    """What GCC's OpenMP runtime prints of its spin count, in every process that `code` starts and that loads it."""
    plain = {name: value for name, value in os.environ.items() if name not in WAITING}
    shown = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=plain | {"OMP_DISPLAY_ENV": "VERBOSE"} | setting,
        capture_output=True,
        text=True,
    ).stderr
    counts = [line.split("'")[1] for line in shown.splitlines() if "GOMP_SPINCOUNT" in line]
    if not counts and "OPENMP DISPLAY ENVIRONMENT" not in shown:
        pytest.skip("torch does not use GCC's OpenMP runtime here")
    return counts


COMMAND = "import sys; from allotrope.cli import main; sys.argv[0] = 'allotrope'; main()"


def test_offline_use_spins_briefly_and_leaves_the_environment_alone() -> None:
    code = (
        "import os; before = dict(os.environ); from allotrope import LLM; "
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    assert _spin_counts(code) == [str(SPIN_COUNT)]
    assert _spin_counts("import torch") == ["300000"], "what the runtime does by itself is no longer what we replace"


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("serve", "--port", "0")])
def test_commands_and_their_processes_spin_briefly(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A model that is not there is missed only by who would compute with it."""
    found = _spin_counts(COMMAND, command[0], str(tmp_path / "absent"), *command[1:])
    assert found and set(found) == {str(SPIN_COUNT)}


def test_an_engine_process_of_another_server_spins_briefly() -> None:
    code = (
        "import asyncio; from allotrope.config import EngineConfig; from allotrope.engine.client import EngineClient\n"
        "async def run():\n"
        "    try: await EngineClient(EngineConfig(model='/absent')).start()\n"
        "    except Exception: pass\n"
        "asyncio.run(run())"
    )
    assert str(SPIN_COUNT) in _spin_counts(code)


@pytest.mark.parametrize(
    ("name", "value", "count"), [("GOMP_SPINCOUNT", "77", "77"), ("OMP_WAIT_POLICY", "passive", "0")]
)
def test_what_the_user_sets_is_kept(name: str, value: str, count: str) -> None:
    assert _spin_counts("from allotrope import LLM", **{name: value}) == [count]


def _groups(root: Path, membership: str, **files: str) -> Path:
    """A system whose process is in control groups. `files`: path below /sys/fs/cgroup -> content."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


SYSTEMS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "no groups": ("", {}, None),
    "version 2": ("0::/a/b\n", {"a/b/cpu.max": "150000 100000"}, 1.5),
    "version 2, above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3.0),
    "version 2, the smallest": ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "20000 10000"}, 2.0),
    "version 2, a container": ("0::/docker/4bdb\n", {"cpu.max": "50000 100000"}, 0.5),
    "version 2, no limit": ("0::/\n", {"cpu.max": "max 100000"}, None),
    "version 1": (
        "4:memory:/m\n2:cpu,cpuacct:/x\n",
        {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
        2.5,
    ),
    "version 1, a container": (
        "2:cpuacct,cpu:/x\n",
        {"cpu/cpu.cfs_quota_us": "90000", "cpu/cpu.cfs_period_us": "100000"},
        0.9,
    ),
    "version 1, no limit": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "both versions": (
        "1:cpu:/\n0::/s\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "unified/s/cpu.max": "200000 100000"},
        2.0,
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_quota_of_control_groups(tmp_path: Path, system: str) -> None:
    membership, files, quota = SYSTEMS[system]
    assert cpu_quota(_groups(tmp_path, membership, **files)) == quota


def test_threads_keep_to_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_count(8, tmp_path / "no groups") == 8
    for quota, threads in ((0.5, 1), (1.5, 2), (2.0, 2), (64.0, 8)):
        system = _groups(tmp_path / str(quota), "0::/\n", **{"cpu.max": f"{int(quota * 100000)} 100000"})
        assert thread_count(8, system) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert thread_count(8, tmp_path / "0.5") == 8
