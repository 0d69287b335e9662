"""Products with weights of few bits on this CPU, beside PyTorch's own.

    python bench/cpu/blocks.py [KIND ...] [--shape 2048x4096] [--rows 1,8,128,512]

A KIND is a type of GGUF blocks (`q4_k`), `fp8` (128 x 128 numbers share a scale), `panels` (bf16 by our own product),
or a product of PyTorch: `bf16` by oneDNN, `int4pack` (`_weight_int4pack_mm_for_cpu`, bf16 activations, groups of 32),
`int8pack` (`_weight_int8pack_mm`, a scale for each row), `int_mm` (`_int_mm`, integers alone, without the rounding of
activations). Figures are the least CPU time of the calling thread over calls that take turns, each with a copy of the
weight that is in no near cache: run it with OMP_NUM_THREADS=1, and other load hardly counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from allotrope.ops.matmul import cpu, cpu_blocks, onednn
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import GGUF_BLOCKS
from allotrope.ops.matmul.plain import PlainWeight

TURNS, COPIES = 6, 6
OF_PYTORCH = ("bf16", "int4pack", "int8pack", "int_mm")
Product = Callable[[torch.Tensor], torch.Tensor]


def product(kind: str, plain: torch.Tensor) -> tuple[Product, int]:
    """One product with a weight of its own, and the weight's bytes. `plain`: [outputs, inputs] fp32."""
    outputs, inputs = plain.shape
    if kind == "bf16":
        reordered = onednn.pack(PlainWeight(plain.bfloat16()))
        return lambda x: onednn.matmul(x, reordered), reordered.nbytes
    if kind == "panels":
        in_panels = cpu.pack(PlainWeight(plain.bfloat16()))
        return lambda x: cpu.matmul(x, in_panels), in_panels.nbytes
    if kind == "int4pack":
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.rand(inputs // 32, outputs, 2).bfloat16()
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return lambda x: multiply(x, packed, 32, scales), packed.nbytes + scales.nbytes
    if kind == "int8pack":
        bytes_, of_rows = torch.randint(-127, 128, plain.shape, dtype=torch.int8), torch.rand(outputs).bfloat16()
        return lambda x: torch.ops.aten._weight_int8pack_mm(x, bytes_, of_rows), bytes_.nbytes
    if kind == "int_mm":
        columns = torch.randint(-127, 128, plain.shape, dtype=torch.int8).t()
        return lambda x: torch._int_mm(x.to(torch.int8), columns), columns.nbytes
    fp8 = Fp8(128, rows=128, fp8_activations=False)
    weight = cpu_blocks.pack(fp8.quantize(plain, 128) if kind == "fp8" else GGUF_BLOCKS[kind].quantize(plain))
    return lambda x: cpu_blocks.matmul(x, weight), weight.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=[*OF_PYTORCH, "q4_k", "q6_k", "q8_0"])
    parser.add_argument("--shape", default="2048x4096", help="outputs x inputs")
    parser.add_argument("--rows", default="1,8,128,512")
    given = parser.parse_args()
    outputs, inputs = (int(size) for size in given.shape.split("x"))
    rows = [int(count) for count in given.rows.split(",")]
    plain = torch.randn(outputs, inputs) / inputs**0.5
    made = {kind: [product(kind, plain) for _ in range(COPIES)] for kind in given.kinds}
    best = {(kind, count): float("inf") for kind in made for count in rows}
    for _ in range(TURNS):
        for count in rows:
            x = torch.randn(count, inputs).bfloat16()
            for kind, copies in made.items():
                for run, _ in copies:
                    started = time.thread_time()
                    run(x)
                    best[kind, count] = min(best[kind, count], time.thread_time() - started)
    print(f"{'':10}" + "".join(f"{f'{count} rows':>12}" for count in rows) + f"{'bits':>8}")
    for kind, copies in made.items():
        figures = "".join(f"{best[kind, count] * 1e6:9.0f} us" for count in rows)
        print(f"{kind:10}{figures}{copies[0][1] * 8 / outputs / inputs:8.2f}")


if __name__ == "__main__":
    main()
