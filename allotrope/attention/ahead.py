"""Kernels compiled without a device: what each Triton module offers for compilation, and what the compiler says of it.

Owns: which variants exist and how one is compiled for a named chip. Must not know: what a kernel computes.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allotrope.attention.dropped_nan import dropping
from allotrope.attention.early import OPTIONS, launched_early

SHARED_BYTES = {"sm_90": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
"""Shared memory that one program may take, by chip; its keys are the chips that every kernel is compiled for."""

MODULES: tuple[str, ...] = (
    "allotrope.attention.mha.triton",
    "allotrope.attention.mla.triton",
    "allotrope.attention.dsa.triton",
    "allotrope.attention.gdn.triton",
    "allotrope.attention.csa.triton",
    "allotrope.attention.rope_store_triton",
    "allotrope.attention.rope_triton",
)
"""Modules of attention with a function `variants(arch) -> list[Variant]`; those of layers are in `layers.ahead`."""


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    `name`: for people, unique. `kernel`: the `@triton.jit` or `@gluon.jit` function. `signature`: argument -> Triton
    type ("*bf16", "i32", ...; "*bf16:16", "i32:16" where the launcher will see a multiple of 16, as for rows that are
    loaded whole), "constexpr" for those in `constants`. `num_warps`, `num_stages`: as it is launched. `spills`:
    registers that may go to memory, where the kernel is known to be faster so.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    spills: int = 0


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant. `shared`: bytes. `spills`: to memory; registers (AMD) or bytes (NVIDIA).
    `early`: it is launched early, where chips know it. `orderly`: if so, it waits for its turn before it touches
    memory, else it does not wait. `dropped`: where it makes a number of what is none, though `extremes` does not say
    that it may.
    """

    arch: str
    name: str
    shared: int
    registers: int
    spills: int
    early: bool
    orderly: bool
    dropped: tuple[str, ...]


def variants(arch: str, modules: Sequence[str] = MODULES) -> list[Variant]:
    """Every variant of every module for a chip."""
    return [variant for name in modules for variant in importlib.import_module(name).variants(arch)]


def compile_variant(variant: Variant, arch: str) -> Compiled:
    """Compile for a chip that need not be here. Raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from allotrope.attention import gluon_extremes
    from allotrope.attention.extremes import PASS_OVER_NAN

    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    given = [variant.signature.get(name, "constexpr") for name in variant.kernel.arg_names]
    signature = {name: kind.removesuffix(":16") for name, kind in zip(variant.kernel.arg_names, given, strict=True)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(given) if kind.endswith(":16")}
    source = (GluonASTSource if variant.kernel.is_gluon() else ASTSource)(
        variant.kernel, signature, dict(variant.constants), aligned
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages} | OPTIONS
    made = triton.compile(source, target=target, options=options)
    nvidia = target.backend == "cuda"
    registers, spills = _nvidia(made.asm["cubin"]) if nvidia else _amd(made.asm["amdgcn"])
    early = launched_early(variant.kernel)
    orderly = not nvidia or (_waits_first if early else _never_waits)(made.asm["ptx"])
    may = (*PASS_OVER_NAN, *gluon_extremes.PASS_OVER_NAN)
    dropped = dropping(made.asm["ttgir"], made.asm["ptx" if nvidia else "amdgcn"], nvidia, may)
    return Compiled(arch, variant.name, made.metadata.shared, registers, spills, early, orderly, tuple(dropped))


def _waits_first(ptx: str) -> bool:
    """Whether the kernel waits for its turn, once, and no access to the device's memory stands above that."""
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
        raise RuntimeError(f"cuobjdump said nothing of registers: {text!r}")
    return int(registers[1]), int(stack[1])


def _amd(assembly: str) -> tuple[int, int]:
    """Vector registers, and how many of them go to memory; scalar ones that are too many stay in vector registers."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = [int(found) for found in re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly)]
    if registers is None or not spills:
        raise RuntimeError("the assembly says nothing of registers")
    return int(registers[1]), sum(spills)
