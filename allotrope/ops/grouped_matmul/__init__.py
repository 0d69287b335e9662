"""y_i = act(W_e x_i + b_e) for rows that are sorted by their expert e.

`run(x, weight, expert_offsets, sorted_token_ids, bias, gating, expert_ids, tile_tables)`; see `reference`.
"""

from __future__ import annotations

from typing import Any

from allotrope.kernels.backend import Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.ops.grouped_matmul import cpu, cpu_blocks, onednn, pytorch, reference
from allotrope.ops.matmul import MatmulBackend, kernel_rejects, pack_for_kernels, quantize_themselves
from allotrope.ops.matmul.cpu import pack, panel_bytes, rejects_experts
from allotrope.ops.matmul.cpu_blocks import pack as pack_blocks
from allotrope.ops.matmul.cpu_blocks import packed_bytes as bytes_of_blocks
from allotrope.ops.matmul.cpu_blocks import rejects as rejects_blocks
from allotrope.ops.matmul.launch import Shape


def kernels_quantized_from(spec: Any, chip: Chip) -> int | None:
    """`MatmulBackend.quantized_from` of our kernels, of an expert's first product, gates and ups: those of FP8 that
    quantize rows themselves are few."""
    if spec.format.name != "fp8":
        return None
    gated = Shape("fp8", spec.experts_of_layer or spec.experts, spec.outputs // 2, spec.inputs, True)
    return None if quantize_themselves(gated, (64, 512), chip) else 1


GROUPED_MATMUL = Op(
    "grouped_matmul",
    "y = act(x W_e^T + b_e), rows sorted by expert",
    (
        MatmulBackend(
            "triton",
            kernel_rejects,
            lazily("allotrope.ops.grouped_matmul.on_gpu", "grouped_matmul"),
            pack_for_kernels,
            own_layout=True,
            quantized_from=kernels_quantized_from,
        ),
        MatmulBackend(
            "cpu_blocks",
            rejects_blocks,
            cpu_blocks.grouped_matmul,
            pack_blocks,
            own_layout=True,
            packed_bytes=bytes_of_blocks,
        ),
        MatmulBackend("cpu", rejects_experts, cpu.grouped_matmul, pack, copy_bytes=panel_bytes),
        MatmulBackend("onednn", onednn.rejects, onednn.grouped_matmul, onednn.pack),
        MatmulBackend("pytorch", pytorch.rejects, pytorch.grouped_matmul),
        MatmulBackend("reference", runs_anywhere, reference.grouped_matmul),
    ),
)
