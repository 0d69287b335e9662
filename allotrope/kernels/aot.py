"""AOT compilation of kernels for a chip that need not be present, and the compiler's report on each.

Must not know: which kernels there are, or what one computes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allotrope.kernels.chip import Chip
from allotrope.kernels.dropped_nan import dropping
from allotrope.kernels.pdl import OPTIONS, uses_pdl
from allotrope.kernels.registry import Specialization


@dataclass(frozen=True)
class Compiled:
    """A compiled specialization, as the compiler reports it.

    `shared`: bytes. `spills`: to memory; registers (AMD) or bytes (NVIDIA). `pdl`: the kernel is launched with PDL
    where chips have it. `waits_first`: if so, it waits before it touches memory, else it does not wait.
    `dropped`: source lines that make a number of NaN, though `propagate_nan` does not allow them to.
    """

    arch: str
    name: str
    shared: int
    registers: int
    spills: int
    pdl: bool
    waits_first: bool
    dropped: tuple[str, ...]


def target_of(chip: Chip) -> Any:
    """Triton's name of a chip."""
    from triton.backends.compiler import GPUTarget

    if chip.vendor == "nvidia":
        major, minor = chip.capability
        return GPUTarget("cuda", major * 10 + minor, chip.warp_size)
    return GPUTarget("hip", chip.arch, chip.warp_size)


def compile_for_chip(one: Specialization, chip: Chip) -> Any:
    """Triton's compiled kernel, for a chip that need not be present. Raises the compiler's errors."""
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    types = [one.signature.get(name, "constexpr") for name in one.kernel.arg_names]
    signature = {name: kind.removesuffix(":16") for name, kind in zip(one.kernel.arg_names, types, strict=True)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.endswith(":16")}
    source = (GluonASTSource if one.kernel.is_gluon() else ASTSource)(
        one.kernel, signature, dict(one.constants), aligned
    )
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages} | OPTIONS
    return triton.compile(source, target=target_of(chip), options=options)


def examine(one: Specialization, chip: Chip) -> Compiled:
    """Compile a specialization, and read resources, PDL order and dropped NaN from its code."""
    from allotrope.kernels.gluon import propagate_nan as in_gluon
    from allotrope.kernels.propagate_nan import PASS_OVER_NAN

    made = compile_for_chip(one, chip)
    nvidia = chip.vendor == "nvidia"
    registers, spills = _nvidia(made.asm["cubin"]) if nvidia else _amd(made.asm["amdgcn"])
    pdl = uses_pdl(one.kernel)
    waits_first = not nvidia or (_waits_first if pdl and chip.has_pdl else _never_waits)(made.asm["ptx"])
    may = (*PASS_OVER_NAN, *in_gluon.PASS_OVER_NAN)
    dropped = dropping(made.asm["ttgir"], made.asm["ptx" if nvidia else "amdgcn"], nvidia, may)
    return Compiled(chip.arch, one.name, made.metadata.shared, registers, spills, pdl, waits_first, tuple(dropped))


def _waits_first(ptx: str) -> bool:
    """Whether the kernel waits for the one before it, once, and no access to the device's memory stands above that."""
    # Triton 3.9 writes a space before the semicolon.
    above, *below = re.split(r"griddepcontrol\.wait\s*;", ptx)
    return len(below) == 1 and re.search(r"\b(ld|st|atom|red)\.\S*global|cp\.async", above) is None


def _never_waits(ptx: str) -> bool:
    return "griddepcontrol" not in ptx


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, by the disassembler that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump reports no registers: {text!r}")
    return int(registers[1]), int(stack[1])


def _amd(assembly: str) -> tuple[int, int]:
    """Vector registers, and how many of them go to memory; scalar ones that are too many stay in vector registers."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = [int(found) for found in re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly)]
    if registers is None or not spills:
        raise RuntimeError("the assembly states no registers")
    return int(registers[1]), sum(spills)
