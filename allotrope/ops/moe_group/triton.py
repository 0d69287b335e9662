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
from allotrope.ops.moe_group.spec import TokenGroups

_NO_NUMBER = tl.constexpr(0x7FFFFFFF)
# Pairs that one launch sorts: its comparisons grow with their square.
MAX_PAIRS = 4096
_MAX_PAIRS = tl.constexpr(MAX_PAIRS)
# Comparisons that a thread makes at once.
_COMPARED = 16
# Pairs of a run; experts whose rows one program begins, and the runs that it reads at once.
_RUN, _OWN, _READ = 512, 16, 64


@pdl_jit(do_not_specialize=["pairs"])
def group_kernel(
    experts,
    expert_offsets,
    sorted_token_ids,
    expert_ids,
    inverse,
    pairs,
    count,
    topk,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`experts`: [pairs], at most MAX_PAIRS. `expert_offsets`: [count]. An item is a pair, or behind all pairs an
    expert's end."""
    gdc_wait()
    gdc_launch_dependents()
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    pair, end = item < pairs, (item >= pairs) & (item < pairs + count)
    expert = tl.load(experts + item, mask=pair, other=0).to(tl.int32)
    mine = tl.where(pair, expert * _MAX_PAIRS + item, (item - pairs + 1) * _MAX_PAIRS)
    before = tl.zeros((ITEMS, CHUNK), tl.int32)
    for start in range(0, pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        mask = other < pairs
        key = tl.load(experts + other, mask=mask, other=0).to(tl.int32) * _MAX_PAIRS + other
        key = tl.where(mask, key, _NO_NUMBER)
        before += (key[None, :] < mine[:, None]).to(tl.int32)
    row = tl.sum(before, axis=1)
    tl.store(expert_offsets + (item - pairs), row, mask=end)
    tl.store(inverse + item, row, mask=pair)
    tl.store(sorted_token_ids + row, item // topk, mask=pair)
    tl.store(expert_ids + row, expert, mask=pair)


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
    counts, begins, expert_offsets, runs, count, EXPERTS: tl.constexpr, OWN: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """OWN experts. `begins`: as `counts`."""
    gdc_wait()
    gdc_launch_dependents()
    each, own = tl.arange(0, EXPERTS), tl.program_id(0) * OWN + tl.arange(0, OWN)
    totals = tl.zeros([EXPERTS], tl.int32)
    mine = tl.zeros([OWN], tl.int32)
    for first in range(0, runs, READ):
        run = first + tl.arange(0, READ)
        mask = (run < runs)[:, None]
        totals += tl.sum(tl.load(counts + run[:, None] * EXPERTS + each[None, :], mask=mask, other=0), 0)
        mine += tl.sum(tl.load(counts + run[:, None] * EXPERTS + own[None, :], mask=mask, other=0), 0)
    end = tl.sum(tl.where(each < tl.program_id(0) * OWN, totals, 0), 0) + tl.cumsum(mine, 0)
    tl.store(expert_offsets + own, end, mask=own < count)
    begin = end - mine
    for first in range(0, runs, READ):
        run = first + tl.arange(0, READ)
        mask = (run < runs)[:, None]
        at = run[:, None] * EXPERTS + own[None, :]
        found = tl.load(counts + at, mask=mask, other=0)
        tl.store(begins + at, begin[None, :] + tl.cumsum(found, 0) - found, mask=mask)
        begin += tl.sum(found, 0)


@pdl_jit(do_not_specialize=["pairs"])
def place_kernel(
    experts, begins, sorted_token_ids, expert_ids, inverse, pairs, topk,
    EXPERTS: tl.constexpr, RUN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One run of pairs, which it compares with each other, CHUNK at a time."""
    gdc_wait()
    gdc_launch_dependents()
    run = tl.program_id(0)
    pair = run * RUN + tl.arange(0, RUN)
    mask = pair < pairs
    expert = tl.load(experts + pair, mask=mask, other=0).to(tl.int32)
    before = tl.zeros((RUN, CHUNK), tl.int32)
    for start in range(0, RUN, CHUNK):
        other = run * RUN + start + tl.arange(0, CHUNK)
        theirs = tl.load(experts + other, mask=other < pairs, other=0).to(tl.int32)
        before += ((theirs[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32)
    row = tl.load(begins + run * EXPERTS + expert, mask=mask, other=0) + tl.sum(before, 1)
    tl.store(inverse + pair, row, mask=mask)
    tl.store(sorted_token_ids + row, pair // topk, mask=mask)
    tl.store(expert_ids + row, expert, mask=mask)


def config(chip: Chip, pairs: int) -> dict[str, int]:
    """Of few pairs. Two sizes, so that not every number of pairs is compiled anew."""
    chunk, warps = 64 if pairs <= 64 else 512, 4
    wave = 64 if chip.vendor == "amd" else 32
    return {"ITEMS": warps * wave * _COMPARED // chunk, "CHUNK": chunk, "num_warps": warps, "num_stages": 1}


def group(experts: torch.Tensor, count: int) -> TokenGroups:
    """As `reference.group`, all int32; `count`: at most MAX_EXPERTS."""
    pairs, topk, device = experts.numel(), experts.shape[1], experts.device
    experts = experts.contiguous()
    expert_offsets = torch.empty(count, dtype=torch.int32, device=device)
    # Every list starts at a multiple of 16 bytes, whatever their length: kernels are compiled for either.
    lists = torch.empty((3, cdiv(pairs, 4) * 4), dtype=torch.int32, device=device)
    sorted_token_ids, expert_ids, inverse = lists[:, :pairs].unbind()
    if pairs <= MAX_PAIRS:
        launch = config(chip_of(device), pairs)
        group_kernel[(cdiv(pairs + count, launch["ITEMS"]),)](
            experts, expert_offsets, sorted_token_ids, expert_ids, inverse, pairs, count, topk, **launch
        )
        return TokenGroups(expert_offsets, sorted_token_ids, expert_ids, inverse)
    sizes, runs = _sizes(count), cdiv(pairs, _RUN)
    counts, begins = torch.empty((2, runs, sizes["EXPERTS"]), dtype=torch.int32, device=device).unbind()
    count_kernel[(runs,)](experts, counts, pairs, **sizes, RUN=_RUN, num_warps=4)
    begin_kernel[(cdiv(count, _OWN),)](
        counts, begins, expert_offsets, runs, count, **sizes, OWN=_OWN, READ=_READ, num_warps=16
    )
    place_kernel[(runs,)](
        experts,
        begins,
        sorted_token_ids,
        expert_ids,
        inverse,
        pairs,
        topk,
        **sizes,
        RUN=_RUN,
        CHUNK=_COMPARED,
        num_warps=8,
    )
    return TokenGroups(expert_offsets, sorted_token_ids, expert_ids, inverse)


def _sizes(count: int) -> dict[str, int]:
    return {"EXPERTS": max(64, next_power_of_2(count))}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Few pairs in two sizes, and many."""
    made = []
    lists = dict.fromkeys(("expert_offsets", "sorted_token_ids", "expert_ids", "inverse"), "*i32:16")
    for pairs in (64, MAX_PAIRS):
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
