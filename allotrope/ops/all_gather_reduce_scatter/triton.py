"""Gathers and reduce-scatters by peer memory, in one launch each.

A rank writes what a peer is to have into that peer's memory, as the all-reduce does: `all_reduce/triton.py` has the
protocols, and why two buffers taken by turns are enough. Both may share a workspace with the all-reduce, whose counters
go on from whatever the call before was. What lies one after another in memory is sent as blocks of `FLAT_BYTES`, for
each peer a message of its own: rows mean nothing here.

Sums are in fp32 in rank order, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.symmetric_memory import Communicator, Workspace
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.all_gather_reduce_scatter import reference
from allotrope.ops.all_gather_reduce_scatter.triton_ll import ll_kernel
from allotrope.ops.all_gather_reduce_scatter.triton_one_shot import one_shot_kernel
from allotrope.ops.all_reduce.protocol import FLAT_BYTES, ROWS_PROTOCOLS, Protocol, choose_protocol
from allotrope.ops.all_reduce.triton import aligned, at_once, config


def all_gather(ranks: Sequence[Communicator], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `reference.all_gather`. The process group sends what is too large, and what ends within a word."""
    protocol = _protocol(ranks, parts[0].nbytes)
    return reference.all_gather(ranks, parts) if protocol is None else launch(protocol, ranks, parts, reduce=False)


def reduce_scatter(ranks: Sequence[Communicator], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `reference.reduce_scatter`, and as `all_gather` in what the process group does."""
    protocol = _protocol(ranks, parts[0].nbytes // ranks[0].size)
    return reference.reduce_scatter(ranks, parts) if protocol is None else launch(protocol, ranks, parts, reduce=True)


def _protocol(ranks: Sequence[Communicator], size: int) -> Protocol | None:
    """Of a message of `size` bytes to each peer."""
    workspace = ranks[0].workspace
    if workspace is None or not size or size % 4:
        return None
    return choose_protocol(workspace.layout, cdiv(size, FLAT_BYTES), FLAT_BYTES, ROWS_PROTOCOLS)


def launch(
    protocol: Protocol, ranks: Sequence[Communicator], parts: Sequence[torch.Tensor], *, reduce: bool
) -> list[torch.Tensor]:
    """Run `ranks`, those of this process: all of them send before any one waits, if they are all here."""
    results = []
    for part in parts:
        rows = len(part) // ranks[0].size if reduce else len(part) * ranks[0].size
        results.append(part.new_empty(rows, *part.shape[1:]))
    for some in ((0, 1), (1, 2)) if len(ranks) > 1 else ((0, 2),):
        for rank, part, result in zip(ranks, parts, results, strict=True):
            assert rank.workspace is not None
            launch_phases(protocol, rank.workspace, part, result, range(*some), reduce=reduce)
    return results


def launch_phases(
    protocol: Protocol, workspace: Workspace, x: torch.Tensor, out: torch.Tensor, phases: range, *, reduce: bool
) -> None:
    """Run the sends (0), the rest (1) or all of one rank's call. `x`, `out`: as `launch` has them."""
    # A part of another tensor may begin within a word.
    x, layout, chip = aligned(x.flatten()), workspace.layout, chip_of(x.device)
    if not reduce:
        # Whatever the numbers are, they are copied as words.
        x, out = x.view(torch.int32), out.view(-1).view(torch.int32)
    numbers = x.numel() // layout.ranks if reduce else x.numel()
    size = FLAT_BYTES // x.element_size()
    blocks = cdiv(numbers, size)
    launched = config(chip, size)
    threads = launched["num_warps"] * chip.warp_size
    constants: dict[str, Any] = {**launched, "RANKS": layout.ranks, "REDUCE": reduce}
    constants |= {"PUSH": 0 in phases, "FINISH": 1 in phases}
    constants["AT_ONCE"] = at_once(protocol, layout.ranks, FLAT_BYTES, threads)
    where: tuple[int, ...]
    if protocol is Protocol.LL:
        programs = blocks
        constants["BLOCK"] = FLAT_BYTES // 4
        where = (numbers * x.element_size() // 4, layout.slots, layout.chunk)
    else:
        programs = layout.programs
        constants["RANKS_BLOCK"] = next_power_of_2(layout.ranks)
        flags = (layout.flags, layout.arenas, layout.arena)
        where = (numbers, blocks, programs, *flags, size * cdiv(blocks, programs))
    _KERNELS[protocol][(min(blocks, programs),)](
        x,
        out,
        workspace.peers,
        workspace.counters[list(Protocol).index(protocol)],
        workspace.abort_flag,
        workspace.rank,
        *where,
        **constants,
    )


_KERNELS = {Protocol.LL: ll_kernel, Protocol.ONE_SHOT: one_shot_kernel}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Both, of each protocol, for ranks of each number that models are served with."""
    made = []
    for reduce, dtype, ranks in ((False, "*i32", 2), (False, "*i32", 8), (True, "*bf16", 8), (True, "*fp32", 2)):
        for protocol, kernel in _KERNELS.items():
            size = FLAT_BYTES // (2 if dtype == "*bf16" else 4)
            launched = config(chip, size)
            threads = launched["num_warps"] * chip.warp_size
            constants: dict[str, Any] = {"RANKS": ranks, "REDUCE": reduce, "PUSH": True, "FINISH": True}
            constants["AT_ONCE"] = at_once(protocol, ranks, FLAT_BYTES, threads)
            constants["BLOCK"] = FLAT_BYTES // 4 if protocol is Protocol.LL else launched["BLOCK"]
            if protocol is not Protocol.LL:
                constants["RANKS_BLOCK"] = next_power_of_2(ranks)
            signature = dict.fromkeys(("x", "out"), f"{dtype}:16")
            signature |= {"peers": "*i64:16", "counters": "*i32:16", "abort": "*i32:16"}
            signature |= dict.fromkeys(("rank", "blocks", "step", "slots"), "i32")
            signature |= dict.fromkeys(("words", "numbers", "chunk", "flags", "arenas", "arena", "part"), "i32:16")
            signature = {key: kind for key, kind in signature.items() if key in kernel.arg_names}
            name = f"{'reduce-scatter' if reduce else 'all-gather'} {protocol.value} {dtype[1:]} of {ranks}"
            made.append(
                Specialization(name, kernel, signature, constants, launched["num_warps"], launched["num_stages"])
            )
    return made
