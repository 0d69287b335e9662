"""What stands around the products of experts, in one launch each: choosing them, and adding up what they make.

route: weights[t] = s(logits[t])[experts[t]], for the `topk` experts of the highest s + correction. A program owns a
token and holds its scores in registers; topk times it takes the best. Bytes moved: the logits once.

combine: y[t] = sum over k of weights[t, k] * results[place[t, k]], in fp32, rounded once. A program owns a run of one
token's columns. Bytes moved: results and y.

Neither asks the device for a number, so that both can be captured.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_most, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.layers.router import Score

_SCORES: dict[Score, int] = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
_NO_NUMBER = tl.constexpr(0x7FFFFFFF)
_ABSENT = tl.constexpr(-0x80000000)
# Scores of a token that a thread holds.
_HELD = 32


@triton.jit
def _key(score):
    """int32 that sorts as the float does; equal floats have equal keys, and NaN is above all."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score == score, bits ^ ((bits >> 31) & _NO_NUMBER), _NO_NUMBER)


@triton.jit
def _number(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & _NO_NUMBER)).to(tl.float32, bitcast=True)


@triton.jit
def _score(z, peak, total, SCORE: tl.constexpr):
    """`peak`, `total`: of the token's softmax."""
    if SCORE == 0:
        score = tl.div_rn(tl.exp(z - peak), total)
    elif SCORE == 1:
        score = tl.sigmoid(z)
    else:
        # log(1 + e), where 1 + e has lost digits of e, is mended by the part that it has kept of it.
        grown = tl.exp(at_most(z, 20.0))
        above = 1.0 + grown
        kept = above - 1.0
        mended = tl.log(above) * tl.div_rn(grown, tl.where(kept == 0, 1.0, kept))
        score = tl.sqrt_rn(tl.where(z > 20.0, z, tl.where(kept == 0, grown, mended)))
    return score


@triton.jit
def _weigh(
    row, weights, experts, token, slot, picks, peak, total, scale,
    TOPK: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store what was picked, and what it weighs; the scores are made again, which is less than to keep them."""
    there = slot < TOPK
    z = tl.load(row + picks, mask=there, other=0.0)
    weight = tl.where(there, _score(z, peak, total, SCORE), 0.0)
    if NORMALIZE:
        weight = tl.div_rn(weight, tl.sum(weight, axis=0) + 1e-20)
    tl.store(weights + token * TOPK + slot, weight * scale, mask=there)
    tl.store(experts + token * TOPK + slot, picks.to(tl.int64), mask=there)


@pdl_jit
def route_kernel(
    logits,
    correction,
    weights,
    experts,
    row_stride,
    size,
    scale,
    COUNT: tl.constexpr,
    TOP_COUNT: tl.constexpr,
    BEST: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    """A token's scores as COUNT groups of `size` experts, of which the TOP_COUNT of the best BEST experts remain.

    `logits`: [T, COUNT * size], any row stride. `weights`, `experts`: [T, TOPK], contiguous.
    """
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    group, member = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)[None, :]
    expert = group[:, None] * size + member
    there = (group[:, None] < COUNT) & (member < size)
    z = tl.load(row + expert, mask=there, other=-float("inf"))
    peak, total = 0.0, 1.0
    if SCORE == 0:
        peak = highest(z, None)
        total = tl.sum(tl.exp(z - peak))
    score = _score(z, peak, total, SCORE)
    if CORRECTED:
        score += tl.load(correction + expert, mask=there, other=0.0)
    key = tl.where(there, _key(score), _ABSENT)
    if TOP_COUNT < COUNT:
        left, worth = key, tl.zeros((GROUPS,), tl.float32)
        for _ in range(BEST):
            best = tl.max(left, axis=1)
            worth += _number(best)
            first = tl.min(tl.where(left == best[:, None], member, _NO_NUMBER), axis=1)
            left = tl.where(member == first[:, None], _ABSENT, left)
        rank = tl.where(group < COUNT, _key(worth), _ABSENT)
        ahead = (rank[None, :] > rank[:, None]) | ((rank[None, :] == rank[:, None]) & (group[None, :] < group[:, None]))
        key = tl.where((tl.sum(ahead.to(tl.int32), axis=1) < TOP_COUNT)[:, None], key, _ABSENT)
    slot = tl.arange(0, SLOTS)
    picks = tl.zeros((SLOTS,), tl.int32)
    for k in range(TOPK):
        best = tl.max(key)
        pick = tl.min(tl.where(key == best, expert, _NO_NUMBER))
        picks = tl.where(slot == k, pick, picks)
        key = tl.where(expert == pick, _ABSENT, key)
    _weigh(row, weights, experts, token, slot, picks, peak, total, scale, TOPK, SCORE, NORMALIZE)


@pdl_jit
def looked_up_kernel(
    logits,
    table,
    ids,
    weights,
    experts,
    row_stride,
    count,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """As `route_kernel`, with the experts of each token in `table`: [V, TOPK], contiguous."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    slot = tl.arange(0, SLOTS)
    picks = tl.load(table + tl.load(ids + token).to(tl.int64) * TOPK + slot, mask=slot < TOPK, other=0)
    peak, total = 0.0, 1.0
    if SCORE == 0:
        expert = tl.arange(0, EXPERTS)
        z = tl.load(row + expert, mask=expert < count, other=-float("inf"))
        peak = highest(z, None)
        total = tl.sum(tl.exp(z - peak))
    _weigh(row, weights, experts, token, slot, picks, peak, total, scale, TOPK, SCORE, NORMALIZE)


@pdl_jit
def combine_kernel(
    results,
    weights,
    place,
    shared,
    gate,
    bias,
    experts,
    out,
    hidden,
    result_stride,
    shared_stride,
    gate_stride,
    bias_stride,
    TOPK: tl.constexpr,
    ABREAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """`weights`, `place`, `experts`: [T, TOPK], contiguous. `out`: [T, hidden], contiguous. ABREAST rows are read at
    once.
    """
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, TOPK, ABREAST):
        for step in tl.static_range(ABREAST):
            pair = token * TOPK + first + step
            here = first + step < TOPK
            weight = tl.load(weights + pair, mask=here, other=0.0)
            row = tl.load(place + pair, mask=here, other=0).to(tl.int64) * result_stride
            total += weight * tl.load(results + row + column, mask=there & here, other=0.0).to(tl.float32)
            if BIAS:
                row = tl.load(experts + pair, mask=here, other=0).to(tl.int64) * bias_stride
                total += weight * tl.load(bias + row + column, mask=there & here, other=0.0).to(tl.float32)
    if SHARED:
        more = tl.load(shared + token * shared_stride + column, mask=there, other=0.0).to(tl.float32)
        if GATED:
            more *= tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        total += more
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=there)


def config(chip: Chip, cells: int) -> dict[str, int]:
    """`cells`: that a program of `route` holds. One wave as long as it can: it takes the best without a barrier."""
    return {"num_warps": max(1, cells // (_HELD * _wave(chip))), "num_stages": 1}


def combine_config(chip: Chip, tokens: int, topk: int, hidden: int, element_size: int) -> dict[str, int]:
    """One 16-byte load a thread; where tokens are few, columns are shared out to as many programs as can be."""
    run = _wave(chip) * 16 // element_size
    block = min(run if tokens <= 64 else 4 * run, max(128, next_power_of_2(hidden)))
    abreast = topk if topk <= 12 else 8
    return {"ABREAST": abreast, "BLOCK": block, "num_warps": max(1, block // run), "num_stages": 1}


def _wave(chip: Chip) -> int:
    return 64 if chip.vendor == "amd" else 32


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    topk: int,
    groups: tuple[int, int, int],
    score: Score,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of the highest score + correction, the best first and of equals the first, and what they weigh.

    `logits`: [T, E] fp32. `correction`: [E] fp32. `groups`: how many there are, how many may be chosen from, and of
    how many experts a group's score is the sum. `normalize`: weights are divided by their sum. `scale`: their factor.
    Returns weights [T, topk] fp32 and experts [T, topk] int64.
    """
    assert logits.stride(1) == 1
    tokens, count = logits.shape
    weights, experts = _chosen(logits, topk)
    if not tokens:
        return weights, experts
    # All may be chosen from: then no group counts.
    parts = groups[0] if groups[1] < groups[0] else 1
    size = count // parts
    constants: dict[str, Any] = {"COUNT": parts, "TOP_COUNT": min(groups[1], parts), "BEST": min(groups[2], size)}
    constants |= {"GROUPS": next_power_of_2(parts), "MEMBERS": next_power_of_2(size)}
    constants |= {"TOPK": topk, "SLOTS": next_power_of_2(topk), "SCORE": _SCORES[score]}
    route_kernel[(tokens,)](
        logits,
        logits if correction is None else correction,
        weights,
        experts,
        logits.stride(0),
        size,
        scale,
        NORMALIZE=normalize,
        CORRECTED=correction is not None,
        **constants,
        **config(chip_of(logits.device), constants["GROUPS"] * constants["MEMBERS"]),
    )
    return weights, experts


def looked_up(
    logits: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, score: Score, normalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`, with experts looked up by token id. `table`: [V, topk] int64. `ids`: [T]."""
    assert logits.stride(1) == 1 and table.is_contiguous() and ids.is_contiguous()
    (tokens, count), topk = logits.shape, table.shape[1]
    weights, experts = _chosen(logits, topk)
    if not tokens:
        return weights, experts
    cells = next_power_of_2(count)
    looked_up_kernel[(tokens,)](
        logits,
        table,
        ids,
        weights,
        experts,
        logits.stride(0),
        count,
        scale,
        EXPERTS=cells,
        TOPK=topk,
        SLOTS=next_power_of_2(topk),
        SCORE=_SCORES[score],
        NORMALIZE=normalize,
        **config(chip_of(logits.device), cells),
    )
    return weights, experts


def _chosen(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for weights and experts."""
    shape = (len(logits), topk)
    return logits.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=logits.device)


def combine(
    results: torch.Tensor,
    weights: torch.Tensor,
    place: torch.Tensor,
    dtype: torch.dtype,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t] = sum over k of w[t, k] * (results[place[t * K + k]] + bias[experts[t, k]]) + shared[t] * sigmoid(gate[t]).

    `results`: [n, hidden]. `weights`: [T, K] fp32. `place`: [T * K]. `dtype`: of y. `shared`: [T, hidden]. `gate`:
    [T, 1]; without it shared counts whole. `bias`: [E, hidden], with `experts`: [T, K]. Rows have any stride. Returns
    y [T, hidden].
    """
    assert all(rows is None or rows.stride(1) == 1 for rows in (results, shared, bias))
    assert (bias is None or experts is not None) and place.is_contiguous()
    (tokens, topk), hidden = weights.shape, results.shape[1]
    out = torch.empty((tokens, hidden), dtype=dtype, device=results.device)
    if not out.numel():
        return out
    launch = combine_config(chip_of(results.device), tokens, topk, hidden, results.element_size())
    # Absent tensors are passed as another, and never read.
    combine_kernel[(tokens, cdiv(hidden, launch["BLOCK"]))](
        results,
        weights.contiguous(),
        place,
        results if shared is None else shared,
        results if gate is None else gate,
        results if bias is None else bias,
        place if experts is None else experts.contiguous(),
        out,
        hidden,
        results.stride(0),
        0 if shared is None else shared.stride(0),
        0 if gate is None else gate.stride(0),
        0 if bias is None else bias.stride(0),
        TOPK=topk,
        SHARED=shared is not None,
        GATED=shared is not None and gate is not None,
        BIAS=bias is not None,
        **launch,
    )
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released routers, with and without groups and a table; sums with all that may join them."""
    return [*_route_specializations(chip), *_combine_specializations(chip)]


def _route_specializations(chip: Chip) -> list[Specialization]:
    made = []
    score: Score
    for name, score, shape, topk, corrected in (
        ("route 256 in groups", "sigmoid", (8, 4, 2, 32), 8, True),
        ("route 160 in groups", "softmax", (8, 3, 1, 20), 6, False),
        ("route 512", "softmax", (1, 1, 1, 512), 10, False),
        ("route 256 softplus", "sqrt_softplus", (1, 1, 1, 256), 6, True),
        ("route 1024", "sigmoid", (1, 1, 1, 1024), 32, True),
    ):
        count, top_count, best, size = shape
        constants: dict[str, Any] = {"COUNT": count, "TOP_COUNT": top_count, "BEST": best}
        constants |= {"GROUPS": count, "MEMBERS": next_power_of_2(size), "CORRECTED": corrected}
        constants |= {"TOPK": topk, "SLOTS": next_power_of_2(topk), "SCORE": _SCORES[score], "NORMALIZE": True}
        signature = dict.fromkeys(("logits", "correction", "weights"), "*fp32:16") | {"experts": "*i64:16"}
        signature |= {"row_stride": "i32:16", "size": "i32", "scale": "fp32"}
        launch = config(chip, count * constants["MEMBERS"])
        made.append(Specialization(name, route_kernel, signature, constants, **launch))
    for name, score in (("look up 384 softplus", "sqrt_softplus"), ("look up 384 softmax", "softmax")):
        constants = {"EXPERTS": 512, "TOPK": 6, "SLOTS": 8, "SCORE": _SCORES[score], "NORMALIZE": True}
        signature = dict.fromkeys(("logits", "weights"), "*fp32:16")
        signature |= dict.fromkeys(("table", "ids", "experts"), "*i64:16")
        signature |= {"row_stride": "i32:16", "count": "i32:16", "scale": "fp32"}
        made.append(Specialization(name, looked_up_kernel, signature, constants, **config(chip, 512)))
    return made


def _combine_specializations(chip: Chip) -> list[Specialization]:
    made = []
    for name, kind, tokens, topk, flags in (
        ("combine decode bf16", "*bf16", 1, 8, (False, False, False)),
        ("combine prefill bf16", "*bf16", 8192, 10, (True, True, False)),
        ("combine bias fp16", "*fp16", 8192, 4, (False, False, True)),
        ("combine fp32", "*fp32", 8192, 32, (True, False, True)),
    ):
        launch = combine_config(chip, tokens, topk, 4096, 4 if kind == "*fp32" else 2)
        signature = dict.fromkeys(("results", "shared", "gate", "bias", "out"), f"{kind}:16")
        signature |= {"weights": "*fp32:16", "place": "*i32:16", "experts": "*i64:16"}
        signature |= dict.fromkeys(("hidden", "result_stride", "shared_stride", "bias_stride"), "i32:16")
        signature |= {"gate_stride": "i32"}
        constants: dict[str, Any] = dict(zip(("SHARED", "GATED", "BIAS"), flags, strict=True))
        constants |= {"TOPK": topk, "ABREAST": launch["ABREAST"], "BLOCK": launch["BLOCK"]}
        made.append(
            Specialization(name, combine_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return made
