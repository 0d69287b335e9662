"""The all-reduce by peer memory, alone or with the residual sum and the norms that follow it, in one launch.

A rank writes its part into the memory of its peers (push): no rank reads over a link. Two protocols, named as in NCCL:

- *LL*: a word of 64 bits holds 32 bits of data and 32 bits of flag, the epoch. The receiver polls the data itself, so
  that no fence and no second message is waited for; twice the bytes cross the link. A program owns one row.
- *Simple*: whole rows, a fence, then one flag per program and peer. Programs are as many as stay resident, and each
  walks its rows. *One-shot*: every rank gets all parts of all rows. *Two-shot*: every rank sums some of the rows, and
  sends the sums around.

Each program counts its own calls, or the steps of two-shot: the epoch. Its counter lies on the device, so that a
captured graph counts on as eager steps do. No barrier ends a call. Buffers of LL and one-shot are two, taken by turns
by the epoch's parity; of two-shot see `triton_two_shot.py`. Two are enough. A program of rank A that writes for call
n + 2 has ended call n + 1, for which it got what the same program of each peer B sent in call n + 1. B sent that after
its own call n had ended, as the launches of a stream follow one another. So nobody reads the buffer of call n any more.
Flags are compared with the epoch, which only grows: that of a peer that is one call ahead counts as well. A stale LL
word would have to outlive 2^32 calls of its program to be taken for a fresh one.

Sums are in fp32 in rank order, rounded once to the type of the parts, on every rank from the same numbers: all ranks
get the same bits, whichever protocol runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.symmetric_memory import PART_SLOTS, SUM_SLOTS, Communicator, Layout, Workspace
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.all_reduce import reference
from allotrope.ops.all_reduce.protocol import FLAT_BYTES, Protocol, choose_protocol, fits
from allotrope.ops.all_reduce.reference import AddNorm
from allotrope.ops.all_reduce.triton_ll import ll_kernel
from allotrope.ops.all_reduce.triton_one_shot import one_shot_kernel
from allotrope.ops.all_reduce.triton_two_shot import two_shot_kernel

# Numbers of a thread.
_PER_THREAD = 8
# Registers of a thread that loads are on their way into.
_IN_FLIGHT = 48

# Bytes of a row up to which all lanes are to be resident, each with 16 bytes of a row in a thread.
_FULL_ROW = 8192

_KERNELS = {Protocol.LL: ll_kernel, Protocol.ONE_SHOT: one_shot_kernel, Protocol.TWO_SHOT: two_shot_kernel}
_SLOTS = {"PARTS": PART_SLOTS, "SUMS": SUM_SLOTS}


class Norm(NamedTuple):
    """What follows the sum, as in `rms_norm.reference.add_rms_norm`."""

    residual: torch.Tensor
    weight: torch.Tensor
    floor: float
    inner: torch.Tensor | None
    scale: torch.Tensor | None


def all_reduce(ranks: Sequence[Communicator], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `reference.all_reduce`. The process group sums what is too large, and what ends within a word."""
    parts = [aligned(one.flatten()).view(one.shape) for one in parts]
    x = parts[0]
    size = FLAT_BYTES // x.element_size()
    protocol = None
    if x.nbytes % 4 == 0:
        protocol = _protocol(ranks, cdiv(x.numel(), size), size * x.element_size())
    if protocol is None:
        return reference.all_reduce(ranks, parts)
    return [y for _, y in launch(protocol, ranks, parts, size)]


def all_reduce_add_rms_norm(
    ranks: Sequence[Communicator],
    parts: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    floor: float,
    inner: torch.Tensor | None,
    scale: torch.Tensor | None,
    add_norm: AddNorm,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As `reference.all_reduce_add_rms_norm`, with `add_norm` where the sum is the process group's."""
    rows, size = residual.shape
    parts, residual = [aligned(one) for one in parts], aligned(residual)
    protocol = _protocol(ranks, rows, size * residual.element_size())
    if protocol is None:
        return reference.all_reduce_add_rms_norm(ranks, parts, residual, weight, floor, inner, scale, add_norm)
    return launch(protocol, ranks, parts, size, Norm(residual, weight, floor, inner, scale))


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """The same, or a copy, with rows that can be read in vectors of 16 bytes."""
    steps = [stride * rows.element_size() for stride in rows.stride()[:-1]]
    if rows.stride(-1) == 1 and not any(step % 16 for step in steps) and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _protocol(ranks: Sequence[Communicator], rows: int, row_bytes: int) -> Protocol | None:
    workspace = ranks[0].workspace
    return None if workspace is None or not rows else choose_protocol(workspace.layout, rows, row_bytes)


def launch(
    protocol: Protocol,
    ranks: Sequence[Communicator],
    parts: Sequence[torch.Tensor],
    size: int,
    norm: Norm | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run `ranks`, those of this process, on their `parts`, in rows of `size`: of each the residual sum and its norm,
    or twice the sum without `norm`.

    If they are all here, and not each in a process of its own, one phase of all comes before the next phase of any:
    none waits for a launch that is behind its own.
    """
    results = []
    for part in parts:
        summed = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        results.append((summed, torch.empty_like(summed) if norm else summed))
    assert ranks[0].workspace is not None
    phases = range(phase_count(protocol, ranks[0].workspace.layout, cdiv(parts[0].numel(), size)))
    for some in [phases[i : i + 1] for i in phases] if len(ranks) > 1 else [phases]:
        for rank, part, result in zip(ranks, parts, results, strict=True):
            assert rank.workspace is not None
            launch_phases(protocol, rank.workspace, part, result, size, norm, some)
    return results


def phase_count(protocol: Protocol, layout: Layout, rows: int) -> int:
    """Phases of a call: no rank waits in one for what another one sends in the same or a later one. They are the sends
    of a step and the rest of it, by turns."""
    return 2 if protocol is not Protocol.TWO_SHOT else 2 * _two_shot_steps(layout, rows)


def _two_shot_steps(layout: Layout, rows: int) -> int:
    # The last chunk is sent two steps before it is finished.
    return cdiv(cdiv(rows, layout.lanes), layout.ranks) + 2


def launch_phases(
    protocol: Protocol,
    workspace: Workspace,
    x: torch.Tensor,
    result: tuple[torch.Tensor, torch.Tensor],
    size: int,
    norm: Norm | None,
    phases: range,
) -> None:
    """Run one of the phases of one rank's call, or all. As `launch`, which says the rest.

    Absent tensors are passed as `x`, and never read.
    """
    layout, rows, chip = workspace.layout, cdiv(x.numel(), size), chip_of(x.device)
    assert fits(protocol, layout, rows, size * x.element_size()), f"no room for {rows} rows of {size}"
    launched = config(chip, size)
    whole = len(phases) > 1
    constants: dict[str, Any] = {"PUSH": whole or phases[0] % 2 == 0, "FINISH": whole or phases[0] % 2 == 1}
    constants |= {**launched, "RANKS": layout.ranks, "SIZE": size}
    threads = launched["num_warps"] * chip.warp_size
    constants["AT_ONCE"] = at_once(protocol, layout.ranks, size * x.element_size(), threads)
    if norm is None:
        tensors, x_stride, residual_stride, floor = (x,) * 4, size, 0, 0.0
        constants |= {"NORM": False, "INNER": False, "SCALE": False}
    else:
        inner, scale = (x if one is None else one for one in (norm.inner, norm.scale))
        tensors = (norm.residual, inner, scale, norm.weight)
        x_stride, residual_stride, floor = x.stride(0), norm.residual.stride(0), norm.floor
        constants |= {"NORM": True, "INNER": norm.inner is not None, "SCALE": norm.scale is not None}
    where: tuple[int, ...]
    if protocol is Protocol.LL:
        programs = rows
        x_stride = x_stride * x.element_size() // 4
        where = (layout.slots, layout.chunk)
    elif protocol is Protocol.ONE_SHOT:
        programs = layout.programs
        where = (rows, programs, layout.flags, layout.arenas, layout.arena, size * cdiv(rows, programs))
    else:
        constants |= _SLOTS
        if chip.vendor == "nvidia" and launched["BLOCK"] * x.element_size() <= _FULL_ROW:
            constants["maxnreg"] = 32
        programs, steps = layout.lanes, (phases[0] // 2, phases[-1] // 2 + 1)
        where = (rows, programs, layout.lane_flags, layout.rows, layout.row, *steps)
    if protocol is not Protocol.LL:
        constants["RANKS_BLOCK"] = next_power_of_2(layout.ranks)
    _KERNELS[protocol][(min(rows, programs),)](
        x,
        *tensors,
        *result,
        workspace.peers,
        workspace.counters[list(Protocol).index(protocol)],
        workspace.abort_flag,
        workspace.rank,
        x.numel(),
        x_stride,
        residual_stride,
        floor,
        *where,
        **constants,
    )


def config(chip: Chip, size: int) -> dict[str, int]:
    """Launch parameters by row size alone, so that a row's norm does not depend on the number of rows."""
    block = next_power_of_2(size)
    num_warps = max(1, min(16 * 32, block // _PER_THREAD) // chip.warp_size)
    return {"BLOCK": block, "num_warps": num_warps, "num_stages": 1}


def at_once(protocol: Protocol, ranks: int, row_bytes: int, threads: int) -> int:
    """A divisor of `ranks`: parts of so many are loaded together by `threads`."""
    # Words of LL are twice as long, and two-shot's programs are to have few registers.
    registers = cdiv(next_power_of_2(row_bytes), 4 * threads) * (1 if protocol is Protocol.ONE_SHOT else 2)
    return max(one for one in range(1, ranks + 1) if ranks % one == 0 and (one == 1 or one * registers <= _IN_FLIGHT))


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes, ranks of each number that models are served with, each protocol with and without the norms."""
    made = []
    for name, size, dtype, ranks, flags in (
        ("4096 of 2", 4096, "*bf16", 2, {"NORM": True}),
        ("7168 of 8", 7168, "*bf16", 8, {"NORM": True}),
        ("2880 of 4", 2880, "*fp16", 4, {"NORM": True}),
        ("4096 fp32 of 2", 4096, "*fp32", 2, {"NORM": True}),
        ("sandwich 5376 of 2", 5376, "*bf16", 2, {"NORM": True, "INNER": True, "SCALE": True}),
        ("sum of 8", FLAT_BYTES // 2, "*bf16", 8, {}),
    ):
        for protocol in Protocol:
            kernel = _KERNELS[protocol]
            constants: dict[str, Any] = {"NORM": False, "INNER": False, "SCALE": False, **flags}
            constants |= {"PUSH": True, "FINISH": True, "RANKS": ranks, "SIZE": size}
            launched = config(chip, size)
            constants["BLOCK"] = launched["BLOCK"]
            signature = dict.fromkeys(("x", "residual", "scale", "residual_out", "out"), f"{dtype}:16")
            signature |= dict.fromkeys(("inner", "weight"), "*fp32:16")
            signature |= {"peers": "*i64:16", "counters": "*i32:16", "abort": "*i32:16"}
            signature |= dict.fromkeys(("rank", "rows", "step", "slots", "first", "last"), "i32")
            signature |= dict.fromkeys(("numbers", "x_stride", "residual_stride", "part", "chunk", "arena"), "i32:16")
            signature |= dict.fromkeys(("flags", "arenas", "lanes", "row_bytes"), "i32:16") | {"floor": "fp32"}
            row_bytes = size * (4 if dtype == "*fp32" else 2)
            constants["AT_ONCE"] = at_once(protocol, ranks, row_bytes, launched["num_warps"] * chip.warp_size)
            if protocol is not Protocol.LL:
                constants["RANKS_BLOCK"] = next_power_of_2(ranks)
            if protocol is Protocol.TWO_SHOT:
                constants |= _SLOTS
            signature = {key: kind for key, kind in signature.items() if key in kernel.arg_names}
            made.append(
                Specialization(
                    f"all-reduce {protocol.value} {name}",
                    *(kernel, signature, constants, launched["num_warps"], launched["num_stages"]),
                )
            )
    return made
