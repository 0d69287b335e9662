"""y_i = act(W_e x_i + b_e) for rows that are sorted by their expert e.

`run(x, weight, expert_offsets, sorted_token_ids, bias, gating, expert_ids, tile_tables)`; see `reference`.
"""

from __future__ import annotations

from allotrope.kernels.backend import Op, lazily, runs_anywhere
from allotrope.ops.grouped_matmul import cpu, cpu_blocks, onednn, pytorch, reference
from allotrope.ops.matmul import MatmulBackend, kernel_rejects, kernels_quantized_from, pack_for_kernels
from allotrope.ops.matmul.cpu import pack, panel_bytes, rejects_experts
from allotrope.ops.matmul.cpu_blocks import pack as pack_blocks
from allotrope.ops.matmul.cpu_blocks import packed_bytes as bytes_of_blocks
from allotrope.ops.matmul.cpu_blocks import rejects as rejects_blocks

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
