"""Weights in blocks, packed for this CPU, and `blocks_main.c` compiled for a processor of another kind, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from allotrope.kernels.c.compiler import HEADERS
from allotrope.kernels.chip import chip_of
from allotrope.ops.matmul import MatmulSpec, cpu_blocks
from allotrope.ops.matmul.weight import QuantizedWeight

HERE = Path(__file__).parent
_FACTS = Path("/proc/cpuinfo")
FEATURES = frozenset(_FACTS.read_text().split() if _FACTS.exists() else ())
"""Of this processor, as Linux names them."""
MATRIX_UNITS = "amx_bf16" in FEATURES
"""Whether this processor has them (AMX)."""
USUAL_FLAGS = ("-O2", "-std=gnu11", "-fopenmp", "-Wno-psabi")
WITH_TILES = ("-march=native", "-mamx-tile", "-mamx-bf16")
EMULATED_TILES = ("-include", str(HERE / "emulated_tiles.h"))
PROCESSORS = {
    "no vectors": (("sse2",), "-march=x86-64"),
    "AVX2": (("avx2", "fma", "f16c"), "-march=haswell"),
    "AVX-512 without look-ups of bytes": (("avx512_vnni",), "-march=cascadelake"),
}
"""Lesser than this one may be: what they need of it, and flags of a compiler."""


def packed(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> cpu_blocks.BlockWeight:
    """Skips where this CPU has no products of that type with such weights."""
    reasons = cpu_blocks.rejects(MatmulSpec(weight.format, dtype, *weight.shape[-2:]), chip_of(torch.device("cpu")))
    if reasons:
        pytest.skip("; ".join(reasons))
    return cpu_blocks.pack(weight)


def off(y: torch.Tensor, wanted: torch.Tensor) -> float:
    """The difference relative to the whole."""
    return float((y.double() - wanted.double()).norm() / wanted.double().norm())


def compile_blocks(
    defines: Mapping[str, int], folder: Path, compiler: str, flags: Sequence[str], dtype: torch.dtype = torch.float32
) -> Path:
    """The program in `folder`. `defines`: as `cpu_blocks.defines` has them."""
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    macros.append(f"-DELEMENT_BFLOAT16={int(dtype == torch.bfloat16)}")
    folders = [f"-I{HEADERS}", f"-I{cpu_blocks.SOURCE.parent}"]
    program = folder / "program"
    command = [compiler, *USUAL_FLAGS, "-static", *flags, *folders, *macros]
    subprocess.run([*command, str(HERE / "blocks_main.c"), "-o", str(program)], check=True, capture_output=True)
    return program


def compile_for_tiles(defines: Mapping[str, int], folder: Path) -> Path:
    """The program with emulated matrix units, of bf16 activations. Skips where a processor lacks what these need."""
    compiler = need("avx512_bf16", "avx512vbmi", "avx512_vnni")
    return compile_blocks(defines, folder, compiler, [*WITH_TILES, *EMULATED_TILES], torch.bfloat16)


def compile_for_arm(
    defines: Mapping[str, int], folder: Path, architecture: str, dtype: torch.dtype = torch.float32
) -> list[str]:
    """The program for Arm64, and the emulator that runs it. Skips where there is none."""
    compiler, emulator = (shutil.which(name) for name in ("aarch64-linux-gnu-gcc", "qemu-aarch64"))
    if compiler is None or emulator is None:
        pytest.skip("needs Debian's gcc-aarch64-linux-gnu and qemu-user")
    return [emulator, str(compile_blocks(defines, folder, compiler, [f"-march={architecture}"], dtype))]


def need(*features: str) -> str:
    """The C compiler. Skips where there is none, or a processor that lacks `features`."""
    compiler = shutil.which("cc")
    lacking = [name for name in features if name not in FEATURES]
    if compiler is None or lacking:
        pytest.skip("needs a C compiler" if compiler is None else f"the processor lacks {', '.join(lacking)}")
    return compiler


def run_blocks(
    command: Sequence[str], folder: Path, blocks: torch.Tensor, x: torch.Tensor, threads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products and the unpacked weight, both in fp32. `command`: that runs the program. `blocks`: uint8
    [outputs, bytes]."""
    outputs, (rows, inputs) = len(blocks), x.shape
    (folder / "in").write_bytes(blocks.numpy().tobytes() + x.contiguous().view(torch.uint8).numpy().tobytes())
    sizes = [str(number) for number in (outputs, inputs, rows)]
    given = [*command, str(folder / "in"), str(folder / "out"), *sizes]
    subprocess.run(given, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    found = torch.from_numpy(np.fromfile(folder / "out", np.float32))
    return found[: rows * outputs].view(rows, outputs), found[rows * outputs :].view(outputs, inputs)
