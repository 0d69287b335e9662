"""The all-reduce by peer memory, alone or with the residual sum and the norms that follow it, in one launch.

A rank writes its part into the memory of its peers (push): no rank reads over a link. Two protocols, named as in NCCL:

- *LL*: a word of 64 bits holds 32 bits of data and 32 bits of flag, the epoch. The receiver polls the data itself, so
  that no fence and no second message is waited for; twice the bytes cross the link. A program owns one row.
- *Simple*: whole rows, a fence, then one flag per program and peer. Programs are as many as stay resident, and each
  walks its rows. *One-shot*: every rank gets all parts of all rows. *Two-shot*: every rank sums some of the rows, and
  sends the sums around.

Each program counts its own calls: the epoch. Its counter lies on the device, so that a captured graph counts on as
eager steps do. Buffers are two, taken by turns by the epoch's parity, and no barrier ends a call. That is enough. A
program of rank A that writes for call n + 2 has ended call n + 1, for which it got what the same program of each peer
B sent in call n + 1. B sent that after its own call n had ended, as the launches of a stream follow one another. So
nobody reads the buffer of call n any more. Flags are compared with the epoch, which only grows: that of a peer that is
one call ahead counts as well. A stale LL word would have to outlive 2^32 calls of its program to be taken for a fresh
one.

Sums are in fp32 in rank order, rounded once to the type of the parts, on every rank from the same numbers: all ranks
get the same bits, whichever protocol runs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.symmetric_memory import Communicator, Workspace
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.all_reduce import reference
from allotrope.ops.all_reduce.protocol import FLAT_BYTES, Protocol, choose_protocol, fits
from allotrope.ops.all_reduce.reference import AddNorm

# Polls between two looks at the abort flag, a power of two: some 50 ms. It lies in the host's memory, where the reads
# of all threads of all programs take 2 ms: looks after 1 ms made ranks that were apart by as much stay apart.
POLLS = tl.constexpr(1 << 16)
# Numbers of a thread.
_PER_THREAD = 8
# Registers of a thread that loads are on their way into.
_IN_FLIGHT = 48


@triton.jit
def _peer(peers, rank, offset, dtype: tl.constexpr):
    """Pointer to `offset` bytes behind the start of a rank's buffer."""
    return tl.multiple_of((tl.load(peers + rank) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _given_up(abort, polls):
    """Whether a poll is the last one, for a rank has died."""
    stop = False
    if polls & (POLLS - 1) == POLLS - 1:
        stop = tl.load(abort, volatile=True) != 0
    return stop


@triton.jit
def _half(words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """The lower or upper 16 bits of each word, a number of DTYPE, in fp32."""
    return (words >> SHIFT).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _norm_operands(
    residual,
    inner,
    scale,
    weight,
    row,
    column,
    mask,
    residual_stride,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
):
    """All that a row's norms read beside its sum: a row of the residual, both weights, the factor."""
    r = 0.0
    inner_weight = 0.0
    factor = 1.0
    w = 0.0
    if NORM:
        r = tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=mask, other=0.0)
        w = tl.load(weight + column, mask=mask, other=0.0)
        if INNER:
            inner_weight = tl.load(inner + column, mask=mask, other=0.0)
        if SCALE:
            factor = tl.load(scale).to(tl.float32)
    return r, inner_weight, factor, w


@triton.jit
def _finish(
    value,
    operands,
    row,
    column,
    mask,
    residual_out,
    out,
    floor,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write one row from its sum `value` in fp32: as the norm's own kernel, which gets it rounded."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    r, inner_weight, factor, w = operands
    offset = row.to(tl.int64) * SIZE + column
    value = value.to(DTYPE)
    if NORM:
        value = value.to(tl.float32)
        if INNER:
            sum_sq = tl.sum(value * value, axis=0) + floor
            value = (value * tl.rsqrt(sum_sq) * inner_weight).to(DTYPE).to(tl.float32)
        rounded = (value + r.to(tl.float32)).to(DTYPE)
        if SCALE:
            rounded = (rounded.to(tl.float32) * factor).to(DTYPE)
        tl.store(residual_out + offset, rounded, mask=mask)
        value = rounded.to(tl.float32)
        sum_sq = tl.sum(value * value, axis=0) + floor
        value = (value * tl.rsqrt(sum_sq) * w).to(DTYPE)
    tl.store(out + offset, value, mask=mask)


@pdl_jit(do_not_specialize=["rank"])
def ll_kernel(
    x,
    residual,
    inner,
    scale,
    weight,
    residual_out,
    out,
    peers,
    counters,
    abort,
    rank,
    numbers,
    x_stride,
    residual_stride,
    floor,
    slots,
    chunk,
    RANKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    PUSH: tl.constexpr,
    FINISH: tl.constexpr,
):
    """One-shot, LL: program r sends, gets and finishes row r. `numbers`: of all rows together.

    `slots`: rows that there is room for. `chunk`: 64-bit words of one writer's row. `x_stride`: in words of 32 bits. A
    launch has both phases, unless one process runs all ranks. AT_ONCE: ranks whose parts are loaded together.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    # Numbers of a word.
    PACK: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    WORDS: tl.constexpr = BLOCK // PACK
    row = tl.program_id(0)
    epoch = tl.load(counters + row) + 1
    word = tl.arange(0, WORDS)
    word_mask = (word < SIZE // PACK) & (row.to(tl.int64) * (SIZE // PACK) + word < numbers // PACK)
    slot = ((epoch % 2) * slots + row).to(tl.int64) * (RANKS * 8) * chunk
    if PUSH:
        start = x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * x_stride
        data = tl.load(start + word, mask=word_mask, other=0)
        sent = (epoch.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
        for i in tl.static_range(RANKS):
            # Each rank begins with itself, so that no link is the first of all.
            to = _peer(peers, (rank + i) % RANKS, slot, tl.int64)
            tl.store(to + rank * chunk + word, sent, mask=word_mask, cache_modifier=".wt")
    if FINISH:
        column = tl.arange(0, BLOCK)
        mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
        # While the parts are on their way.
        operands = _norm_operands(
            residual, inner, scale, weight, row, column, mask, residual_stride, NORM, INNER, SCALE
        )
        mine = _peer(peers, rank, slot, tl.int64)
        low = tl.zeros((WORDS,), tl.float32)
        high = tl.zeros((WORDS,), tl.float32)
        pending = 1
        polls = 0
        while pending != 0:
            # Summed at each poll: the one that finds all parts complete has the sum.
            low = tl.zeros((WORDS,), tl.float32)
            high = tl.zeros((WORDS,), tl.float32)
            late = tl.zeros((WORDS,), tl.int32)
            for first in range(0, RANKS, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    got = tl.load(mine + (first + i) * chunk + word, mask=word_mask, other=0, volatile=True)
                    late |= tl.where(word_mask, (got >> 32).to(tl.int32) ^ epoch, 0)
                    if PACK == 1:
                        low += got.to(tl.int32).to(tl.float32, bitcast=True)
                    else:
                        low += _half(got, 0, DTYPE)
                        high += _half(got, 16, DTYPE)
            pending = tl.max((late != 0).to(tl.int32), axis=0)
            if _given_up(abort, polls):
                pending = 0
            polls += 1
        value = low
        if PACK == 2:
            value = tl.interleave(low, high)
        _finish(value, operands, row, column, mask, residual_out, out, floor, SIZE, NORM, INNER, SCALE)
        tl.store(counters + row, epoch)


@triton.jit
def _signal(peers, flags, rank, epoch, RANKS: tl.constexpr, RANKS_BLOCK: tl.constexpr):
    """Tell every peer that all that this program wrote so far is there. `flags`: bytes up to those of a phase."""
    tl.debug_barrier()
    r = tl.arange(0, RANKS_BLOCK)
    start = tl.load(peers + r, mask=r < RANKS, other=0)
    flag = (start + flags + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, tl.zeros((RANKS_BLOCK,), tl.int32) + epoch, mask=r < RANKS, sem="release", scope="sys")


@triton.jit
def _await(peers, flags, rank, epoch, abort, RANKS: tl.constexpr, RANKS_BLOCK: tl.constexpr):
    """Wait until every peer has signalled."""
    r = tl.arange(0, RANKS_BLOCK)
    mine = (tl.load(peers + rank) + flags).to(tl.pointer_type(tl.int32))
    pending = 1
    polls = 0
    while pending != 0:
        seen = tl.load(mine + r, mask=r < RANKS, other=0, volatile=True)
        pending = tl.max(((r < RANKS) & (seen - epoch < 0)).to(tl.int32), axis=0)
        if _given_up(abort, polls):
            pending = 0
        polls += 1
    # Loads that follow see all that was written before the flags.
    tl.atomic_add(mine, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()


@triton.jit
def _sum_of(start, mask, part, BLOCK: tl.constexpr, RANKS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of the parts of all ranks, `part` numbers apart, in fp32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, RANKS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            got = tl.load(start + (first + i) * part, mask=mask, other=0.0, cache_modifier=".cg")
            total += got.to(tl.float32)
    return total


@pdl_jit(do_not_specialize=["rank", "rows"])
def simple_kernel(
    x,
    residual,
    inner,
    scale,
    weight,
    residual_out,
    out,
    peers,
    counters,
    abort,
    rank,
    numbers,
    x_stride,
    residual_stride,
    floor,
    rows,
    step,
    flags,
    arenas,
    arena,
    part,
    RANKS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    INNER: tl.constexpr,
    SCALE: tl.constexpr,
    PUSH: tl.constexpr,
    SUM: tl.constexpr,
    FINISH: tl.constexpr,
):
    """One-shot or two-shot, Simple: program p has the rows p, p + `step`, ... `flags`, `arenas`: bytes up to them.

    `arena`: bytes of a program's rows; of one writer's parts in it `part` numbers, then, two-shot, the sums. A launch
    has all phases, unless one process runs all ranks. AT_ONCE: as in `ll_kernel`.
    """
    gdc_wait()
    gdc_launch_dependents()
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    count = (rows - program + step - 1) // step
    epoch = tl.load(counters + program) + 1
    own = arenas + ((epoch % 2) * step + program).to(tl.int64) * arena
    flags += program * (2 * RANKS * 4)
    column = tl.arange(0, BLOCK)
    mine = _peer(peers, rank, own, DTYPE)
    sums = RANKS * part
    if PUSH:
        for k in range(count):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=mask, other=0.0)
            if TWO_SHOT:
                to = _peer(peers, (program + k) % RANKS, own, DTYPE)
                tl.store(to + rank * part + (k // RANKS) * SIZE + column, value, mask=mask)
            else:
                for i in tl.static_range(RANKS):
                    to = _peer(peers, (rank + i) % RANKS, own, DTYPE)
                    tl.store(to + rank * part + k * SIZE + column, value, mask=mask)
        _signal(peers, flags, rank, epoch, RANKS, RANKS_BLOCK)
    if SUM and TWO_SHOT:
        _await(peers, flags, rank, epoch, abort, RANKS, RANKS_BLOCK)
        # The first of this program's rows that this rank sums.
        first = (rank - program % RANKS + RANKS) % RANKS
        for k in range(first, count, RANKS):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            total = _sum_of(mine + (k // RANKS) * SIZE + column, mask, part, BLOCK, RANKS, AT_ONCE)
            for i in tl.static_range(RANKS):
                to = _peer(peers, (rank + i) % RANKS, own, DTYPE)
                tl.store(to + sums + k * SIZE + column, total.to(DTYPE), mask=mask)
        _signal(peers, flags + RANKS * 4, rank, epoch, RANKS, RANKS_BLOCK)
    if FINISH:
        _await(peers, flags + (RANKS * 4 if TWO_SHOT else 0), rank, epoch, abort, RANKS, RANKS_BLOCK)
        for k in range(count):
            row = program + k * step
            mask = (column < SIZE) & (row.to(tl.int64) * SIZE + column < numbers)
            if TWO_SHOT:
                total = tl.load(mine + sums + k * SIZE + column, mask=mask, other=0.0, cache_modifier=".cg").to(
                    tl.float32
                )
            else:
                total = _sum_of(mine + k * SIZE + column, mask, part, BLOCK, RANKS, AT_ONCE)
            operands = _norm_operands(
                residual, inner, scale, weight, row, column, mask, residual_stride, NORM, INNER, SCALE
            )
            _finish(total, operands, row, column, mask, residual_out, out, floor, SIZE, NORM, INNER, SCALE)
        tl.store(counters + program, epoch)


PHASES = ("PUSH", "SUM", "FINISH")
"""Of a call: no rank waits in one for what another one sends in the same or a later one."""


class Norm(NamedTuple):
    """What follows the sum, as in `rms_norm.reference.add_rms_norm`."""

    residual: torch.Tensor
    weight: torch.Tensor
    floor: float
    inner: torch.Tensor | None
    scale: torch.Tensor | None


def all_reduce(ranks: Sequence[Communicator], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `reference.all_reduce`. The process group sums what is too large, and what ends within a word."""
    parts = [_aligned(one.flatten()).view(one.shape) for one in parts]
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
    parts, residual = [_aligned(one) for one in parts], _aligned(residual)
    protocol = _protocol(ranks, rows, size * residual.element_size())
    if protocol is None:
        return reference.all_reduce_add_rms_norm(ranks, parts, residual, weight, floor, inner, scale, add_norm)
    return launch(protocol, ranks, parts, size, Norm(residual, weight, floor, inner, scale))


def _aligned(rows: torch.Tensor) -> torch.Tensor:
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
    for phases in [(phase,) for phase in PHASES] if len(ranks) > 1 else [PHASES]:
        for rank, part, result in zip(ranks, parts, results, strict=True):
            assert rank.workspace is not None
            launch_phases(protocol, rank.workspace, part, result, size, norm, phases)
    return results


def launch_phases(
    protocol: Protocol,
    workspace: Workspace,
    x: torch.Tensor,
    result: tuple[torch.Tensor, torch.Tensor],
    size: int,
    norm: Norm | None,
    phases: Sequence[str],
) -> None:
    """Run some `phases` of one rank's call; a call is over when its FINISH has run. As `launch`, which says the rest.

    Absent tensors are passed as `x`, and never read.
    """
    layout, rows, chip = workspace.layout, cdiv(x.numel(), size), chip_of(x.device)
    assert fits(protocol, layout, rows, size * x.element_size()), f"no room for {rows} rows of {size}"
    launched = config(chip, size)
    constants: dict[str, Any] = {phase: phase in phases for phase in PHASES}
    constants |= {**launched, "RANKS": layout.ranks, "SIZE": size}
    threads = launched["num_warps"] * chip.warp_size
    constants["AT_ONCE"] = _at_once(protocol, layout.ranks, size * x.element_size(), threads)
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
        kernel, grid, counters = ll_kernel, rows, workspace.counters[0]
        x_stride = x_stride * x.element_size() // 4
        where = (layout.slots, layout.chunk)
        del constants["SUM"]
    else:
        kernel, grid, counters = simple_kernel, min(rows, layout.programs), workspace.counters[1]
        two_shot, count = protocol is Protocol.TWO_SHOT, cdiv(rows, layout.programs)
        part = size * (cdiv(count, layout.ranks) if two_shot else count)
        where = (rows, layout.programs, layout.flags, layout.arenas, layout.arena, part)
        constants |= {"TWO_SHOT": two_shot, "RANKS_BLOCK": next_power_of_2(layout.ranks)}
    kernel[(grid,)](
        x,
        *tensors,
        *result,
        workspace.peers,
        counters,
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


def _at_once(protocol: Protocol, ranks: int, row_bytes: int, threads: int) -> int:
    """A divisor of `ranks`: parts of so many are loaded together by `threads`."""
    registers = cdiv(next_power_of_2(row_bytes), 4 * threads) * (2 if protocol is Protocol.LL else 1)
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
            kernel = ll_kernel if protocol is Protocol.LL else simple_kernel
            constants: dict[str, Any] = {"NORM": False, "INNER": False, "SCALE": False, **flags}
            constants |= {"PUSH": True, "FINISH": True, "RANKS": ranks, "SIZE": size}
            launched = config(chip, size)
            constants["BLOCK"] = launched["BLOCK"]
            signature = dict.fromkeys(("x", "residual", "scale", "residual_out", "out"), f"{dtype}:16")
            signature |= dict.fromkeys(("inner", "weight"), "*fp32:16")
            signature |= {"peers": "*i64:16", "counters": "*i32:16", "abort": "*i32:16"}
            signature |= dict.fromkeys(("rank", "rows", "step", "slots"), "i32")
            signature |= dict.fromkeys(("numbers", "x_stride", "residual_stride", "part", "chunk", "arena"), "i32:16")
            signature |= dict.fromkeys(("flags", "arenas"), "i32:16") | {"floor": "fp32"}
            row_bytes = size * (4 if dtype == "*fp32" else 2)
            constants["AT_ONCE"] = _at_once(protocol, ranks, row_bytes, launched["num_warps"] * chip.warp_size)
            if protocol is not Protocol.LL:
                constants |= {"SUM": True, "TWO_SHOT": protocol is Protocol.TWO_SHOT}
                constants |= {"RANKS_BLOCK": next_power_of_2(ranks)}
            signature = {key: kind for key, kind in signature.items() if key in kernel.arg_names}
            made.append(
                Specialization(
                    f"all-reduce {protocol.value} {name}",
                    *(kernel, signature, constants, launched["num_warps"], launched["num_stages"]),
                )
            )
    return made
