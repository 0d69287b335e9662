"""The kernel bench without a GPU: it checks, times nothing, and a wrong kernel neither passes nor gets a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scripts import BENCH, load_script


@pytest.fixture
def bench() -> Any:
    return load_script("kernels")


def test_checks_a_case_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, BENCH / "kernels.py", "--device", "cpu", "--tiny", "--family", "fusions"]
    done = subprocess.run([*command, "--out", tmp_path / "found"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["ceilings"] is None
    assert all(row["right"] and "us" not in row for row in report["rows"]) and report["rows"]


@pytest.mark.parametrize("broken", ["wrong", "raises", "checks nothing"])
def test_a_red_check_prints_no_speed(
    broken: str, bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.kernels.cases.case import KernelCase, same

    def timed() -> torch.Tensor:
        if broken == "raises":
            raise RuntimeError("no such kernel")
        return torch.ones(2, 3)

    def check(inputs: Any, run: Any) -> Any:
        return [] if broken == "checks nothing" else same(lambda _: torch.arange(6.0).view(2, 3), "fp32")(inputs, run)

    case = KernelCase(
        family="f", name="one", make=lambda device: None, ours=lambda inputs: timed, check=check, bytes=24
    )
    monkeypatch.setattr(bench, "select", lambda *_: [case])
    assert bench.main(["--device", "cpu", "--out", str(tmp_path / "found")]) == 1
    assert " us " not in capsys.readouterr().out
    row = json.loads((tmp_path / "found.json").read_text())["rows"][0]
    assert not row["right"] and "us" not in row and (row["error"] != "") == (broken == "raises")


def test_every_family_file_lists_its_cases(bench: Any) -> None:
    """Listing needs no GPU, no Triton and no peer; names are unique."""
    names = [(case.family, case.name) for case in bench.select([], [], False)]
    assert len(set(names)) == len(names) > 0
    assert all(case.bytes > 0 for case in bench.select([], [], False))


def test_an_unknown_family_is_named(bench: Any) -> None:
    with pytest.raises(KeyError, match="no cases for 'nonsense'"):
        list(bench.select(["nonsense"], [], False))


def test_launches_go_to_the_innermost_part() -> None:
    from bench.engine import launches

    spans = [
        launches.Span(name, begin, end)
        for name, begin, end in (("layer 0", 10, 50), ("layer 0 mixer", 12, 30), ("layer 1", 60, 90))
    ]
    found = launches.attribute([launches.Launch("k", when, 1.0) for when in (5, 11, 20, 40, 55, 60)], spans)
    assert [place for place, _ in found] == ["", "layer 0", "layer 0 mixer", "layer 0", "", "layer 1"]
    ours = frozenset({"norm_kernel"})
    named = ("norm_kernel", "void nvjet_tst_64x8", "Memcpy DtoD", "vectorized_elementwise_kernel", "puzzling")
    assert [launches.kind_of(name, ours) for name in named] == [
        "norm_kernel",
        "matrix product",
        "copy",
        "elementwise",
        "puzzling",
    ]
    text = launches.summary(found, ["mha/triton + Mlp"] * 2, ours)
    assert "6 kernels" in text and "mha/triton + Mlp (2): 2.0 kernels each" in text
