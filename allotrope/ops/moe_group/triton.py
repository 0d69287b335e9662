"""Pairs (token, choice) sorted by their expert, and where that is equal as they come.

Few pairs, one launch: the row of a pair is how many pairs sort before it, and an expert's rows end behind as many as
there are pairs of it and of those before it. A program owns a few pairs or experts and compares them with every pair,
so that none waits for another. Bytes moved: all pairs once per program.

Many pairs, three launches. They are cut into runs:

    count    how many pairs of each expert a run has
    begin    where they begin: behind all pairs of experts before, and those of the expert in runs before
    place    a pair's row: behind that, as many of the expert as come before it in its run

Bytes moved: the pairs three times, and 4 bytes for each run and expert, which all programs of the second launch read.

All counts are integers, so that the order in which programs run cannot matter. Nothing asks the device for a number, so
that all can be captured.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2

_NO_NUMBER = tl.constexpr(0x7FFFFFFF)
# Pairs that one launch sorts: its comparisons grow with their square.
MOST_PAIRS = 4096
_MOST_PAIRS = tl.constexpr(MOST_PAIRS)
# Experts up to which their counts are held by one program.
MOST_EXPERTS = 1024
# Comparisons that a thread makes at once.
_COMPARED = 16
# Pairs of a run; experts whose rows one program begins, and the runs that it reads at once.
_RUN, _OWN, _READ = 512, 16, 64


@pdl_jit(do_not_specialize=["pairs"])
def group_kernel(
    experts,
    ends,
    source,
    owner,
    place,
    pairs,
    count,
    topk,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`experts`: [pairs], at most MOST_PAIRS. `ends`: [count]. An item is a pair, or behind all an expert's end."""
    gdc_wait()
    gdc_launch_dependents()
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    pair, end = item < pairs, (item >= pairs) & (item < pairs + count)
    expert = tl.load(experts + item, mask=pair, other=0).to(tl.int32)
    mine = tl.where(pair, expert * _MOST_PAIRS + item, (item - pairs + 1) * _MOST_PAIRS)
    before = tl.zeros((ITEMS, CHUNK), tl.int32)
    for start in range(0, pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < pairs
        key = tl.load(experts + other, mask=there, other=0).to(tl.int32) * _MOST_PAIRS + other
        key = tl.where(there, key, _NO_NUMBER)
        before += (key[None, :] < mine[:, None]).to(tl.int32)
    row = tl.sum(before, axis=1)
    tl.store(ends + (item - pairs), row, mask=end)
    tl.store(place + item, row, mask=pair)
    tl.store(source + row, item // topk, mask=pair)
    tl.store(owner + row, expert, mask=pair)


@pdl_jit(do_not_specialize=["pairs"])
def count_kernel(experts, counts, pairs, EXPERTS: tl.constexpr, RUN: tl.constexpr):
    """`counts`: [runs, EXPERTS]."""
    gdc_wait()
    gdc_launch_dependents()
    run = tl.program_id(0)
    pair = run * RUN + tl.arange(0, RUN)
    expert = tl.load(experts + pair, mask=pair < pairs, other=0).to(tl.int32)
    tl.store(counts + run * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(expert, EXPERTS, mask=pair < pairs))


@pdl_jit(do_not_specialize=["runs"])
def begin_kernel(
    counts, begins, ends, runs, count, EXPERTS: tl.constexpr, OWN: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """OWN experts. `begins`: as `counts`."""
    gdc_wait()
    gdc_launch_dependents()
    each, own = tl.arange(0, EXPERTS), tl.program_id(0) * OWN + tl.arange(0, OWN)
    totals = tl.zeros([EXPERTS], tl.int32)
    mine = tl.zeros([OWN], tl.int32)
    for first in range(0, runs, READ):
        run = first + tl.arange(0, READ)
        there = (run < runs)[:, None]
        totals += tl.sum(tl.load(counts + run[:, None] * EXPERTS + each[None, :], mask=there, other=0), 0)
        mine += tl.sum(tl.load(counts + run[:, None] * EXPERTS + own[None, :], mask=there, other=0), 0)
    end = tl.sum(tl.where(each < tl.program_id(0) * OWN, totals, 0), 0) + tl.cumsum(mine, 0)
    tl.store(ends + own, end, mask=own < count)
    begin = end - mine
    for first in range(0, runs, READ):
        run = first + tl.arange(0, READ)
        there = (run < runs)[:, None]
        at = run[:, None] * EXPERTS + own[None, :]
        found = tl.load(counts + at, mask=there, other=0)
        tl.store(begins + at, begin[None, :] + tl.cumsum(found, 0) - found, mask=there)
        begin += tl.sum(found, 0)


@pdl_jit(do_not_specialize=["pairs"])
def place_kernel(
    experts, begins, source, owner, place, pairs, topk, EXPERTS: tl.constexpr, RUN: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """One run of pairs, which it compares with each other, CHUNK at a time."""
    gdc_wait()
    gdc_launch_dependents()
    run = tl.program_id(0)
    pair = run * RUN + tl.arange(0, RUN)
    there = pair < pairs
    expert = tl.load(experts + pair, mask=there, other=0).to(tl.int32)
    before = tl.zeros((RUN, CHUNK), tl.int32)
    for start in range(0, RUN, CHUNK):
        other = run * RUN + start + tl.arange(0, CHUNK)
        theirs = tl.load(experts + other, mask=other < pairs, other=0).to(tl.int32)
        before += ((theirs[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32)
    row = tl.load(begins + run * EXPERTS + expert, mask=there, other=0) + tl.sum(before, 1)
    tl.store(place + pair, row, mask=there)
    tl.store(source + row, pair // topk, mask=there)
    tl.store(owner + row, expert, mask=there)


def config(chip: Chip, pairs: int) -> dict[str, int]:
    """Of few pairs. Two sizes, so that not every number of pairs is compiled anew."""
    chunk, warps = 64 if pairs <= 64 else 512, 4
    wave = 64 if chip.vendor == "amd" else 32
    return {"ITEMS": warps * wave * _COMPARED // chunk, "CHUNK": chunk, "num_warps": warps, "num_stages": 1}


def group(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of token and choice, sorted by expert and where that is equal as they come.

    `experts`: [T, k]. `count`: of experts, at most MOST_EXPERTS. Returns ends [count], where each expert's rows end; of
    each row its token and its expert, and of each pair its row, [T * k] each; all int32.
    """
    pairs, topk, device = experts.numel(), experts.shape[1], experts.device
    experts = experts.contiguous()
    ends = torch.empty(count, dtype=torch.int32, device=device)
    # Every list starts at a multiple of 16 bytes, whatever their length: kernels are compiled for either.
    lists = torch.empty((3, cdiv(pairs, 4) * 4), dtype=torch.int32, device=device)
    source, owner, place = lists[:, :pairs].unbind()
    if pairs <= MOST_PAIRS:
        launch = config(chip_of(device), pairs)
        group_kernel[(cdiv(pairs + count, launch["ITEMS"]),)](
            experts, ends, source, owner, place, pairs, count, topk, **launch
        )
        return ends, source, owner, place
    sizes, runs = _sizes(count), cdiv(pairs, _RUN)
    counts, begins = torch.empty((2, runs, sizes["EXPERTS"]), dtype=torch.int32, device=device).unbind()
    count_kernel[(runs,)](experts, counts, pairs, **sizes, RUN=_RUN, num_warps=4)
    begin_kernel[(cdiv(count, _OWN),)](counts, begins, ends, runs, count, **sizes, OWN=_OWN, READ=_READ, num_warps=16)
    place_kernel[(runs,)](
        experts, begins, source, owner, place, pairs, topk, **sizes, RUN=_RUN, CHUNK=_COMPARED, num_warps=8
    )
    return ends, source, owner, place


def _sizes(count: int) -> dict[str, int]:
    return {"EXPERTS": max(64, next_power_of_2(count))}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Few pairs in two sizes, and many."""
    made = []
    lists = dict.fromkeys(("ends", "source", "owner", "place"), "*i32:16")
    for pairs in (64, MOST_PAIRS):
        launch = config(chip, pairs)
        signature = {"experts": "*i64:16"} | lists | dict.fromkeys(("pairs", "count", "topk"), "i32")
        constants = {key: launch[key] for key in ("ITEMS", "CHUNK")}
        name = f"group {pairs} pairs"
        made.append(Specialization(name, group_kernel, signature, constants, launch["num_warps"], launch["num_stages"]))
    tables = {"counts": "*i32:16", "begins": "*i32:16"}
    of_all = {"RUN": _RUN, "OWN": _OWN, "READ": _READ, "CHUNK": _COMPARED} | _sizes(512)
    for kernel, warps in ((count_kernel, 4), (begin_kernel, 16), (place_kernel, 8)):
        kinds = {"experts": "*i64:16"} | lists | tables | dict.fromkeys(("pairs", "count", "runs", "topk"), "i32")
        signature = {name: kinds[name] for name in kernel.arg_names if name in kinds}
        constants = {name: of_all[name] for name in kernel.arg_names if name in of_all}
        made.append(Specialization(f"group many pairs, {kernel.__name__}", kernel, signature, constants, warps, 1))
    return made
