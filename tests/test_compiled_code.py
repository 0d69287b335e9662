"""The comparison of compiled code: blind to names and lines, not to arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.kernels.registry import Specialization

COMMAND = Path(__file__).parent.parent / "bench" / "compiled_code.py"
CHIPS = ("sm_90", "gfx942")

MODULE = f"""
import triton
import triton.language as tl

from {Specialization.__module__} import Specialization, specializations


@triton.jit(noinline=True)
def power(x, n):
    for _ in range(n):
        x = x * 1.5 + 1.0
    return x


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    total = tl.sum(x, 0) + power(tl.load(x_ptr), n)
    tl.store(out_ptr + offsets, x * total, mask=offsets < n)


@specializations
def released(chip):
    signature = {{"x_ptr": "*fp32:16", "out_ptr": "*fp32:16", "n": "i32"}}
    return [Specialization("scale", scale_kernel, signature, {{"BLOCK": 256}}, num_warps=4, num_stages=1)]
"""


def renamed(text: str) -> str:
    """Other names for functions, arguments and locals, and other line numbers."""
    names = {"scale_kernel": "weighted", "power": "grow", "x_ptr": "source", "BLOCK": "TILE", "offsets": "at", "x": "y"}
    text = re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[0]], text)
    return text.replace("    total =", "    # The sum counts masked entries.\n\n    total =").replace(
        '"scale"', '"weighted"'
    )


def compare(before: Path, after: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, COMMAND, "--compare", before, after]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dump of the kernel as it stands, one with other names, and one with another constant."""
    texts = {"before": MODULE, "names": renamed(MODULE), "constant": MODULE.replace("1.5", "2.5")}
    root = tmp_path_factory.mktemp("compiled")
    for name, text in texts.items():
        assert (text == MODULE) == (name == "before")
        (root / name).mkdir()
        (root / name / f"{name}_kernels.py").write_text(text)
    running = {}
    for name in texts:
        path = os.pathsep.join([str(root / name), *filter(None, sys.path)])
        command = [sys.executable, COMMAND, "--module", f"{name}_kernels", "--processes", "1", root / name / "dump"]
        command += [word for chip in CHIPS for word in ("--chip", chip)]
        running[name] = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for process in running.values():
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
    return {name: root / name / "dump" for name in texts}


def test_names_and_lines_make_no_difference(dumps: dict[str, Path]) -> None:
    done = compare(dumps["before"], dumps["names"])
    assert done.returncode == 0, done.stdout + done.stderr
    for chip in CHIPS:
        assert f"{chip}: 1 equal (1 of them under another name), 0 changed" in done.stdout


def test_a_constant_makes_a_difference(dumps: dict[str, Path]) -> None:
    done = compare(dumps["before"], dumps["constant"])
    assert done.returncode == 1, done.stdout + done.stderr
    for chip in CHIPS:
        assert f"{chip}: 0 equal (0 of them under another name), 1 changed, 0 only before, 0 only after" in done.stdout


def test_a_dump_holds_the_code(dumps: dict[str, Path]) -> None:
    """An empty file would equal every other."""
    for chip, instruction in zip(CHIPS, ("st.global", "global_store"), strict=True):
        (code,) = (dumps["before"] / chip).glob("*.txt")
        text = code.read_text()
        assert instruction in text and "shared: " in text
        assert not re.search(r"scale_kernel|power|debug|\.loc\b|_kernels\b", text)
