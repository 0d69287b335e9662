"""Bugs that other engines had: each, put into a copy of the package, turns a cell of `allotrope eval` red.

A cell is a model in a type and an execution mode, held to the fp32 run of the whole package in the mode "cold". Without
the fault the same cell is green. `-s` prints the figures.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from typer.testing import CliRunner

from allotrope.commands.app import build_app
from allotrope.eval.tasks import make, task_rng

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).with_name("faults")
MODELS = ROOT / "train" / "models"


@dataclass(frozen=True)
class Text:
    """`chunks` times `length` bytes: solved lines of `task`, or "letters", random ones of which each half is repeated.
    Their bits vary less than those of prose."""

    task: str
    chunks: int
    length: int

    def __str__(self) -> str:
        if self.task != "letters":
            return "".join(_lines(self.task, index, self.length) for index in range(self.chunks))
        rng, count = random.Random("repeat"), self.length // 2 - 1
        return "".join(2 * ("".join(rng.choices(ascii_lowercase, k=count)) + "\n") for _ in range(self.chunks))


def _lines(task: str, index: int, length: int) -> str:
    """Solved lines of exactly `length` bytes."""
    for size in range(length - 2, 0, -1):
        example = make(task, task_rng("eval", task, index, seed=7), size)
        if len(example.text) == length:
            return example.text.decode()
    raise AssertionError(f"no example of {task} has {length} bytes")


@dataclass(frozen=True)
class Fault:
    """`name`: of the patch. `asked`: a text, or options that say what is asked. `cell`: options that say how. `red`:
    figures of which each must be outside. `green`: modes and figures that stay inside with the fault.
    """

    name: str
    model: str
    asked: Text | tuple[str, ...]
    red: tuple[str, ...]
    mode: str = "cold"
    cell: tuple[str, ...] = ()
    green: tuple[tuple[str, str], ...] = ()

    @property
    def modes(self) -> str:
        """The mode of the cell, and those that stay green."""
        return ",".join(dict.fromkeys([self.mode, *(mode for mode, _ in self.green)]))

    def __str__(self) -> str:
        return self.name


# As few items as keep what a fault changes well outside of the interval, which widens as they become fewer.
RECALL = ("--tasks", "recall", "--items", "32", "--lengths", "320")
# Whose plans and masks every CPU runs, whatever it can compile.
REFERENCE = ("--attention-backend", "mha=reference")
# All drafts of every step: their number must not depend on the time that they take.
DRAFTS = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3, "adaptive": false}')
RESIDUES = tuple(f"recall, tokens = {residue} mod 4" for residue in range(4))


FAULTS = (
    Fault("compressed_rope_position", "deepseek_v4", Text("letters", 12, 512), ("text",)),
    Fault("window_off_by_one", "llama_window", Text("arithmetic", 12, 512), ("text",), cell=REFERENCE),
    Fault("sink_dropped", "gpt_oss", Text("letters", 24, 512), ("text",)),
    Fault(
        "length_3_mod_4",
        "qwen3_moe",
        RECALL,
        ("recall", RESIDUES[3]),
        cell=REFERENCE,
        green=tuple(("cold", name) for name in RESIDUES[:3]),
    ),
    Fault("swapped_b_a", "qwen3_next", Text("copy", 12, 256), ("text",)),
    Fault(
        "stale_state_after_preemption",
        "qwen3_next",
        ("--tasks", "json", "--items", "64", "--lengths", "48"),
        ("json",),
        mode="preempted",
    ),
    Fault(
        "indexer_without_scale",
        "deepseek_v32",
        ("--tasks", "recall", "--items", "6", "--lengths", "1024"),
        ("recall",),
    ),
    Fault(
        "topk_ties_by_rank",
        "qwen3_moe",
        Text("arithmetic", 24, 1024),
        ("text",),
        mode="two-ranks",
        green=(("cold", "text"),),
    ),
    Fault("fp8_scale_of_wrong_block", "deepseek_v3", Text("letters", 12, 128), ("text",)),
    Fault(
        "recycled_target_hidden",
        "qwen3_next",
        # The fault is in passes that are not captured.
        ("--tasks", "copy,sort,json", "--items", "64", "--lengths", "48", *DRAFTS, "--device", "cpu"),
        ("acceptance length", "accepted, draft 2"),
        # Verification keeps the answers right, and the first pass reads what it should.
        green=tuple(("cold", name) for name in ("copy", "sort", "json", "accepted, draft 1")),
    ),
)


def _model(name: str) -> Path:
    folder = MODELS / name
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"no model: {folder} is absent (python train/all.py makes it)")
    return folder


def evaluate(package: Path, model: Path, out: Path, *options: str) -> dict[str, Any]:
    """The report of `allotrope eval` by the package in the folder `package`, in a process of its own unless it is the
    one that is imported here."""
    arguments = ["eval", str(model), "--threads", "1", "--dtype", "float32", *options, "--json", str(out)]
    if package == ROOT:
        result = CliRunner().invoke(build_app(), arguments)
        code, output = result.exit_code, result.output
    else:
        environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "allotrope", *arguments]
        done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
        code, output = done.returncode, done.stdout + done.stderr
    assert code in (0, 1) and out.exists(), f"allotrope {' '.join(arguments)} ended with {code}:\n{output}"
    report: dict[str, Any] = json.loads(out.read_text())
    assert not report["skipped"], report["skipped"]
    return report


class Bench:
    """Runs of the package as it is, each made once. `folder`: of texts and reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reports: dict[tuple[str, ...], dict[str, Any]] = {}

    def whole(self, fault: Fault) -> dict[str, dict[str, Any]]:
        """Figures of the cell of `fault` without the fault, held to the reference; none where it is the reference."""
        if fault.mode == "cold" and not fault.cell:
            return {}
        options = (*self.items(fault), *fault.cell, "--modes", fault.mode, *self.baseline(fault))
        return _figures(self._once(fault.model, options), fault.mode)

    def baseline(self, fault: Fault) -> tuple[str, ...]:
        """The option that holds a run to the reference: the package as it is, in fp32, in the mode "cold"."""
        reference = self._once(fault.model, self.items(fault))
        return ("--baseline", reference["file"])

    def items(self, fault: Fault) -> tuple[str, ...]:
        """Options that say what is asked."""
        if not isinstance(fault.asked, Text):
            return fault.asked
        path = self.folder / f"{fault.name}.txt"
        if not path.exists():
            path.write_text(str(fault.asked))
        sizes = ("--items", str(fault.asked.chunks), "--text-length", str(fault.asked.length))
        return ("--tasks", "text", *sizes, "--text", str(path))

    def _once(self, model: str, options: tuple[str, ...]) -> dict[str, Any]:
        if (key := (model, *options)) not in self._reports:
            out = self.folder / f"{len(self._reports)}.json"
            self._reports[key] = evaluate(ROOT, _model(model), out, *options) | {"file": str(out)}
        return self._reports[key]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def copy_with(patch: Path, folder: Path) -> Path:
    """A folder with a copy of the package into which `patch` is put."""
    shutil.copytree(ROOT / "allotrope", folder / "allotrope", ignore=shutil.ignore_patterns("__pycache__"))
    if shutil.which("git"):
        command = ["git", "apply", str(patch)]
    elif shutil.which("patch"):
        command = ["patch", "-p1", "--batch", "--fuzz=0", f"--input={patch}"]
    else:
        pytest.skip("neither git nor patch is installed")
    # The folder may lie in a repository: git would look for the files from its root on.
    ceiling = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=ceiling, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(
            f"{patch.name} does not apply to the package any more; write it anew for the code as it is now:\n"
            f"{done.stdout}{done.stderr}"
        )
    return folder


def _figures(report: dict[str, Any], mode: str) -> dict[str, dict[str, Any]]:
    """The figures of a mode by name, each with whether it is inside."""
    (found,) = [one for one in report["modes"] if one["name"] == mode]
    inside = {one["figure"]: one["inside"] for one in report["differences"] if one["mode"] == mode}
    return {figure["name"]: figure | {"inside": inside[figure["name"]]} for figure in found["figures"]}


def _row(fault: Fault, name: str, figure: dict[str, Any], wanted: dict[str, Any]) -> str:
    """A row of the table in docs/accuracy.md."""
    value, low, high = (
        f"{number:.1%}" if figure["unit"] == "share" else f"{number:.3f}"
        for number in (figure["value"], wanted["low"], wanted["high"])
    )
    how = ", ".join((fault.model, " ".join(fault.cell), fault.mode)).replace(", ,", ",")
    return f"| {fault.name} | {how} | {name} | {value} | {low} to {high} |"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_fault_turns_its_cell_red(fault: Fault, bench: Bench, tmp_path: Path) -> None:
    package = copy_with(PATCHES / f"{fault.name}.patch", tmp_path)
    outside = [name for name, figure in bench.whole(fault).items() if not figure["inside"]]
    assert not outside, f"without the fault, these are outside: {outside}"
    options = (*bench.items(fault), *fault.cell, "--modes", fault.modes, *bench.baseline(fault))
    broken = evaluate(package, _model(fault.model), tmp_path / "broken.json", *options)
    figures = _figures(broken, fault.mode)
    wanted = {figure["name"]: figure for figure in broken["baseline"]["figures"]}
    print()
    for name in fault.red:
        print(_row(fault, name, figures[name], wanted[name]))
    assert not broken["passed"]
    still_inside = [name for name in fault.red if figures[name]["inside"]]
    assert not still_inside, f"with the fault, these are inside: {still_inside}; of {figures}"
    wrong = [(mode, name) for mode, name in fault.green if not _figures(broken, mode)[name]["inside"]]
    assert not wrong, f"with the fault, these are outside, and not for the reason that it shows: {wrong}"


def test_every_patch_has_a_test() -> None:
    assert {fault.name for fault in FAULTS} == {path.stem for path in PATCHES.glob("*.patch")}


def test_a_patch_that_does_not_apply_says_so(tmp_path: Path) -> None:
    patch = tmp_path / "old.patch"
    patch.write_text("Old.\n\n--- a/allotrope/errors.py\n+++ b/allotrope/errors.py\n@@ -1 +1 @@\n-gone\n+here\n")
    (tmp_path / "copy").mkdir()
    with pytest.raises(pytest.fail.Exception, match=r"old\.patch does not apply to the package any more"):
        copy_with(patch, tmp_path / "copy")
