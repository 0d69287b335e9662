"""Routing in one launch.

weights[t] = score(logits[t])[experts[t]], for the `topk` experts of the highest score + correction. A program owns a
token and holds its scores in registers; topk times it takes the best. Bytes moved: the logits once. Nothing asks the
device for a number, so that it can be captured.
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
from allotrope.kernels.tiles import next_power_of_2
from allotrope.ops.moe_route.spec import RouteSpec, Score

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
def _score(z, max_logit, exp_sum, SCORE: tl.constexpr):
    """`max_logit`, `exp_sum`: of the token's softmax."""
    if SCORE == 0:
        score = tl.div_rn(tl.exp(z - max_logit), exp_sum)
    elif SCORE == 1:
        score = tl.sigmoid(z)
    else:
        # Where 1 + e has lost digits of e, log(1 + e) is scaled by e over what 1 + e has kept of it.
        exp_z = tl.exp(at_most(z, 20.0))
        one_plus = 1.0 + exp_z
        recovered = one_plus - 1.0
        log1p = tl.log(one_plus) * tl.div_rn(exp_z, tl.where(recovered == 0, 1.0, recovered))
        score = tl.sqrt_rn(tl.where(z > 20.0, z, tl.where(recovered == 0, exp_z, log1p)))
    return score


@triton.jit
def _weigh(
    row, weights, experts, token, slot, topk_ids, max_logit, exp_sum, scale,
    TOPK: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store what was picked, and what it weighs; the scores are made again, which is less than to keep them."""
    mask = slot < TOPK
    z = tl.load(row + topk_ids, mask=mask, other=0.0)
    weight = tl.where(mask, _score(z, max_logit, exp_sum, SCORE), 0.0)
    if NORMALIZE:
        weight = tl.div_rn(weight, tl.sum(weight, axis=0) + 1e-20)
    tl.store(weights + token * TOPK + slot, weight * scale, mask=mask)
    tl.store(experts + token * TOPK + slot, topk_ids.to(tl.int64), mask=mask)


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
    mask = (group[:, None] < COUNT) & (member < size)
    z = tl.load(row + expert, mask=mask, other=-float("inf"))
    max_logit, exp_sum = 0.0, 1.0
    if SCORE == 0:
        max_logit = highest(z, None)
        exp_sum = tl.sum(tl.exp(z - max_logit))
    score = _score(z, max_logit, exp_sum, SCORE)
    if CORRECTED:
        score += tl.load(correction + expert, mask=mask, other=0.0)
    key = tl.where(mask, _key(score), _ABSENT)
    if TOP_COUNT < COUNT:
        remaining, group_score = key, tl.zeros((GROUPS,), tl.float32)
        for _ in range(BEST):
            best = tl.max(remaining, axis=1)
            group_score += _number(best)
            first = tl.min(tl.where(remaining == best[:, None], member, _NO_NUMBER), axis=1)
            remaining = tl.where(member == first[:, None], _ABSENT, remaining)
        rank = tl.where(group < COUNT, _key(group_score), _ABSENT)
        beats = (rank[None, :] > rank[:, None]) | ((rank[None, :] == rank[:, None]) & (group[None, :] < group[:, None]))
        key = tl.where((tl.sum(beats.to(tl.int32), axis=1) < TOP_COUNT)[:, None], key, _ABSENT)
    slot = tl.arange(0, SLOTS)
    topk_ids = tl.zeros((SLOTS,), tl.int32)
    for k in range(TOPK):
        best = tl.max(key)
        topk_id = tl.min(tl.where(key == best, expert, _NO_NUMBER))
        topk_ids = tl.where(slot == k, topk_id, topk_ids)
        key = tl.where(expert == topk_id, _ABSENT, key)
    _weigh(row, weights, experts, token, slot, topk_ids, max_logit, exp_sum, scale, TOPK, SCORE, NORMALIZE)


@pdl_jit
def hash_route_kernel(
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
    topk_ids = tl.load(table + tl.load(ids + token).to(tl.int64) * TOPK + slot, mask=slot < TOPK, other=0)
    max_logit, exp_sum = 0.0, 1.0
    if SCORE == 0:
        expert = tl.arange(0, EXPERTS)
        z = tl.load(row + expert, mask=expert < count, other=-float("inf"))
        max_logit = highest(z, None)
        exp_sum = tl.sum(tl.exp(z - max_logit))
    _weigh(row, weights, experts, token, slot, topk_ids, max_logit, exp_sum, scale, TOPK, SCORE, NORMALIZE)


def config(chip: Chip, cells: int) -> dict[str, int]:
    """`cells`: that a program of `route` holds. One wave as long as it can: it takes the best without a barrier."""
    return {"num_warps": max(1, cells // (_HELD * chip.warp_size)), "num_stages": 1}


def route(logits: torch.Tensor, correction: torch.Tensor | None, spec: RouteSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.route`; of experts with equal scores the first come first."""
    assert logits.stride(1) == 1
    tokens, count = logits.shape
    weights, experts = _outputs(logits, spec.topk)
    if not tokens:
        return weights, experts
    # All may be chosen from: then no group counts.
    groups = spec.groups if spec.top_groups < spec.groups else 1
    size = count // groups
    constants: dict[str, Any] = {"COUNT": groups, "TOP_COUNT": min(spec.top_groups, groups)}
    constants |= {"BEST": min(spec.group_best, size), "SCORE": _SCORES[spec.score]}
    constants |= {"GROUPS": next_power_of_2(groups), "MEMBERS": next_power_of_2(size)}
    constants |= {"TOPK": spec.topk, "SLOTS": next_power_of_2(spec.topk)}
    route_kernel[(tokens,)](
        logits,
        logits if correction is None else correction,
        weights,
        experts,
        logits.stride(0),
        size,
        spec.scale,
        NORMALIZE=spec.normalize,
        CORRECTED=correction is not None,
        **constants,
        **config(chip_of(logits.device), constants["GROUPS"] * constants["MEMBERS"]),
    )
    return weights, experts


def hash_route(
    logits: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, spec: RouteSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.hash_route`."""
    assert logits.stride(1) == 1 and table.is_contiguous() and ids.is_contiguous()
    (tokens, count), topk = logits.shape, table.shape[1]
    weights, experts = _outputs(logits, topk)
    if not tokens:
        return weights, experts
    cells = next_power_of_2(count)
    hash_route_kernel[(tokens,)](
        logits,
        table,
        ids,
        weights,
        experts,
        logits.stride(0),
        count,
        spec.scale,
        EXPERTS=cells,
        TOPK=topk,
        SLOTS=next_power_of_2(topk),
        SCORE=_SCORES[spec.score],
        NORMALIZE=spec.normalize,
        **config(chip_of(logits.device), cells),
    )
    return weights, experts


def _outputs(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for weights and experts."""
    shape = (len(logits), topk)
    return logits.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=logits.device)


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released routers, with and without groups and a table."""
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
        made.append(Specialization(name, hash_route_kernel, signature, constants, **config(chip, 512)))
    return made
