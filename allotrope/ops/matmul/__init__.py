"""y = x W^T + b, and the same with a weight for each expert, of weights in every format.

A backend packs a whole weight once and multiplies with what it made: `run(x, weight, bias, out)`. The weight of a layer
that has loaded is that packed `Weight`, which still tells its shape, format, bytes and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import triton_reasons
from allotrope.ops.matmul import cpu, cpu_blocks, onednn, pytorch, reference
from allotrope.ops.matmul.launch import Shape, launch_for, tuned_name
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format, QuantizedWeight, Weight

StoredWeight = PlainWeight | QuantizedWeight


@dataclass(frozen=True)
class MatmulSpec:
    """`format`: of the weight. `dtype`: of activations, and of a plain weight. `experts`: 0 for one weight.
    `experts_of_layer`: those that its tokens choose among, where ranks hold some of them each; 0: `experts`.
    """

    format: Format
    dtype: torch.dtype
    outputs: int
    inputs: int
    experts: int = 0
    experts_of_layer: int = 0


def _copies_nothing(shape: Sequence[int], dtype: torch.dtype) -> int:
    return 0


def _never_quantized(spec: Any, chip: Chip) -> int | None:
    return None


def _bytes_of_kernels(format: Format, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
    return format.packed_bytes(shape, shared)


@dataclass(frozen=True)
class MatmulBackend(Backend):
    """`pack`: a whole stored weight (`PlainWeight` or `QuantizedWeight`), as `run` reads it. `own_layout`: whether
    `run` multiplies quantized weights as that is, which takes `packed_bytes` (of a format, a shape, and whether blocks
    of rows share scales). `fp32_out`: whether `out` may be fp32, for sums that are not rounded. `copy_bytes`: shape and
    dtype of a plain weight -> bytes that `pack` takes beside the memory it is given, 0 where it takes that over.
    `quantized_from`: the number of rows from which `run` is faster if these were quantized to e4m3 as they were written
    (`quantized_rows.py`); None: never.
    """

    pack: Callable[[Any], Weight] = reference.pack
    own_layout: bool = False
    fp32_out: bool = False
    copy_bytes: Callable[[Sequence[int], torch.dtype], int] = _copies_nothing
    packed_bytes: Callable[[Format, tuple[int, ...], bool], tuple[int, int]] = _bytes_of_kernels
    quantized_from: Callable[[Any, Chip], int | None] = _never_quantized


def kernel_rejects(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects` of our kernels of both operations."""
    reasons = triton_reasons(chip) or spec.format.kernel_reasons(chip)
    if spec.format is PLAIN and not spec.experts and spec.dtype not in (torch.bfloat16, torch.float16):
        reasons = [*reasons, f"plain weights of dtype={spec.dtype} (needs bfloat16 or float16)"]
    return reasons


def pack_for_kernels(weight: StoredWeight) -> Weight:
    """`MatmulBackend.pack` of our kernels of both operations."""
    stored = weight if isinstance(weight, QuantizedWeight) else QuantizedWeight(PLAIN, weight.values, weight.values)
    return weight.format.pack(stored)


def kernels_quantized_from(spec: Any, chip: Chip) -> int | None:
    """`MatmulBackend.quantized_from` of our kernels for one weight: hardly any FP8 product quantizes more than 16 rows
    itself, and some do not quantize fewer."""
    if spec.format.name != "fp8":
        return None
    return 17 if quantize_themselves(Shape("fp8", 0, spec.outputs, spec.inputs, False), (1, 16), chip) else 1


def quantize_themselves(shape: Shape, rows: Sequence[int], chip: Chip) -> bool:
    """Whether FP8 products of so many rows quantize these as they read them."""
    return all(launch_for(shape, count, tuned_name(chip)).quantize for count in rows)


MATMUL = Op(
    "matmul",
    "y = x W^T + b",
    (
        MatmulBackend(
            "triton",
            kernel_rejects,
            lazily("allotrope.ops.matmul.providers", "matmul"),
            pack_for_kernels,
            own_layout=True,
            fp32_out=True,
            quantized_from=kernels_quantized_from,
        ),
        MatmulBackend(
            "cpu_blocks",
            cpu_blocks.rejects,
            cpu_blocks.matmul,
            cpu_blocks.pack,
            own_layout=True,
            fp32_out=True,
            packed_bytes=cpu_blocks.packed_bytes,
        ),
        MatmulBackend("cpu", cpu.rejects, cpu.matmul, cpu.pack, copy_bytes=cpu.panel_bytes),
        MatmulBackend("onednn", onednn.rejects, onednn.matmul, onednn.pack, copy_bytes=onednn.reordered_bytes),
        MatmulBackend("pytorch", pytorch.rejects, pytorch.matmul),
        MatmulBackend("reference", runs_anywhere, reference.matmul),
    ),
)


def unstored_reasons(format: Format, dtype: torch.dtype, chip: Chip) -> list[str]:
    """Why no backend for a chip multiplies weights of a format without dequantizing them for each product; empty where
    one does."""
    spec = MatmulSpec(format, dtype, 256, 256)
    backends = [one for one in MATMUL.backends if isinstance(one, MatmulBackend) and one.own_layout]
    rejected = {one.name: one.rejects(spec, chip) for one in backends}
    if not all(rejected.values()):
        return []
    return [f"{name}: {', '.join(reasons)}" for name, reasons in rejected.items()]


def multiplied_as_stored(format: Format, dtype: torch.dtype, chip: Chip) -> bool:
    """Whether some backend multiplies weights of a format without dequantizing them for each product."""
    return not unstored_reasons(format, dtype, chip)
