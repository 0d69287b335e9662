"""C and PyTorch as on processors with fewer instructions than this one: the same tests hold there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent
# For each kind of processor: what torch.cpu must report here, what PyTorch and oneDNN are told to use at most.
KINDS = {
    "x86-64-v3": ("_is_avx2_supported", "avx2", "AVX2"),
    "x86-64-v4": ("_is_avx512_supported", "avx512", "AVX512_CORE"),
}
FILES = ("kernels/test_c_kernels.py", "attention/test_naive.py", "ops/test_gguf_blocks.py")
# Stands in for the C compiler, and leaves `native` out.
COMPILER = """#!/bin/sh
for word; do
    shift
    [ "$word" = -march=native ] && word=-march={kind}
    set -- "$@" "$word"
done
exec {cc} "$@"
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code(kind: str, tmp_path: Path) -> None:
    """Rows, products and attention, against their equations; only what is compiled is asked."""
    needed, torch_level, onednn_level = KINDS[kind]
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"this processor is of another kind: {platform.machine()}")
    if not getattr(torch.cpu, needed)():
        pytest.skip(f"this processor cannot run {kind}: torch.cpu.{needed}() is False")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(kind=kind, cc=os.environ.get("ALLOTROPE_CC", "cc")))
    compiler.chmod(0o755)
    env = os.environ | {
        "ALLOTROPE_CC": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "ATEN_CPU_CAPABILITY": torch_level,
        "ONEDNN_MAX_CPU_ISA": onednn_level,
    }
    files = [str(TESTS / name) for name in FILES]
    chosen = (
        "test_c_kernels or (any_schedule and mha and (grouped_8-compiled or window_and_sinks-compiled))"
        " or (test_gguf_blocks and (q4_k or q6_k or tie) and not processor and not units)"
    )
    command = [sys.executable, "-m", "pytest", *files, "-k", chosen, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=880, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for name in ("prefill", "blocks"):
        assert list((tmp_path / "cache").rglob(f"{name}-*.so"))
