"""Scores of the entries that a query sees, for the choice among them.

    score_t(e) = factor * sum_h weight_t,h relu(rope(q_t,h) . key_e)

A program owns ENTRIES entries of one query; all its heads share the keys, which are read once. Queries that attend to
all they see are not scored. Scores are written once, 4 bytes an entry.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from allotrope.attention.batch import PageIndex
from allotrope.attention.csa.spec import IndexerSpec
from allotrope.attention.csa.triton_store import pair_angles, turn
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2


@pdl_jit
def score_kernel(
    q, weights, keys, table, requests, seen, cos, sin, scores, first,
    q_token, q_head, weights_token, table_row, key_page, key_row, scores_token, topk, factor,
    ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the tokens from `first` on, whose scores begin at row 0. `seen`: [T] int32 entries that a query sees."""
    gdc_wait()
    gdc_launch_dependents()
    token = first + tl.program_id(0)
    n, begin = tl.load(seen + token), tl.program_id(1) * ENTRIES
    if (n <= topk) | (begin >= n):
        return
    head, lane = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (lane < D)[None, :]
    row = q + token.to(tl.int64) * q_token
    x = tl.load(row + head[:, None] * q_head + lane[None, :], mask=inside, other=0.0)
    c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
    x = turn(x.to(tl.float32), c, s, BLOCK_H, BLOCK_D).to(q.dtype.element_ty)
    entry = begin + tl.arange(0, ENTRIES)
    there = entry < n
    request = tl.load(requests + token)
    page = tl.load(table + request * table_row + entry // ROWS, mask=there, other=0).to(tl.int64)
    at = page * key_page + entry % ROWS * key_row
    k = tl.load(keys + at[:, None] + lane[None, :], mask=there[:, None] & (lane < D)[None, :], other=0.0)
    hits = tl.dot(k.to(x.dtype), tl.trans(x), input_precision=PRECISION)
    share = tl.load(weights + token.to(tl.int64) * weights_token + head, mask=head < HEADS, other=0.0)
    score = tl.sum(at_least(hits, 0.0) * (share.to(tl.float32) * factor)[None, :], axis=1)
    tl.store(scores + tl.program_id(0).to(tl.int64) * scores_token + entry, score, mask=there)


@pdl_jit
def resolve_kernel(
    picks, rows, table, requests, picks_token, rows_token, table_row, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers of entries to rows of their pool, -1 to -1. `picks`: [T, columns] int64. `rows`: [T, .] int32."""
    gdc_wait()
    gdc_launch_dependents()
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(picks + token * picks_token + column, mask=column < columns, other=-1)
    there = entry >= 0
    pages = table + tl.load(requests + token) * table_row
    page = tl.load(pages + entry // ROWS, mask=there, other=0)
    row = tl.where(there, page * ROWS + entry % ROWS, -1).to(tl.int32)
    tl.store(rows + token * rows_token + column, row, mask=column < rows_token)


def config(chip: Chip, exact: bool) -> dict[str, int]:
    """`exact`: products of fp32."""
    if chip.vendor == "cpu":
        return {"ENTRIES": 16, "num_warps": 4, "num_stages": 1}
    return {"ENTRIES": 32 if exact else 128, "num_warps": 4, "num_stages": 1}


def score(
    spec: IndexerSpec, rope_dim: int, chip: Chip, paged: PageIndex, keys: torch.Tensor, q: torch.Tensor,
    weights: torch.Tensor, requests: torch.Tensor, seen: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
    first: int, tokens: int, bound: int, precision: str,
) -> torch.Tensor:  # fmt: skip
    """Scores of `tokens` queries from `first` on: [tokens, bound] fp32; what a query does not see is not written.

    `paged`, `keys`: where index keys lie, and their pool [P, rows, d]. `q`: [T, heads, d], not rotated. `weights`:
    [T, heads]. `seen`: [T] int32. `angles`: [T, R] cos and sin. `bound`: of what they see.
    """
    launch = config(chip, q.dtype == torch.float32)
    scores = torch.empty(tokens, bound, dtype=torch.float32, device=q.device)
    score_kernel[(tokens, cdiv(bound, launch["ENTRIES"]))](
        q, weights, keys, paged.table, requests, seen, *angles, scores, first,
        q.stride(0), q.stride(1), weights.stride(0), paged.table.stride(0), keys.stride(0), keys.stride(1), bound,
        spec.topk, (spec.num_heads * spec.head_dim) ** -0.5, ROWS=keys.shape[1], HEADS=spec.num_heads, D=spec.head_dim,
        R=rope_dim, BLOCK_H=max(16, next_power_of_2(spec.num_heads)),
        BLOCK_D=max(16, next_power_of_2(spec.head_dim)), PRECISION=precision, **launch,
    )  # fmt: skip
    return scores


def resolve(paged: PageIndex, per_page: int, requests: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """[T, n] int32 rows of entries. `paged`: where they lie, `per_page` to a page. `requests`: [T] int64. `picks`:
    [T, K] int64 numbers of entries, or -1; n is K, filled up to 16 bytes."""
    tokens, columns = picks.shape
    rows = torch.empty(tokens, -(-columns // 4) * 4, dtype=torch.int32, device=picks.device)
    block = min(512, next_power_of_2(rows.shape[1]))
    resolve_kernel[(tokens, cdiv(rows.shape[1], block))](
        picks, rows, paged.table, requests, picks.stride(0), rows.stride(0), paged.table.stride(0), columns,
        ROWS=per_page, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return rows


@specializations
def released(chip: Chip) -> list[Specialization]:
    """64 heads of 128."""
    launch = config(chip, False)
    signature = dict.fromkeys(("q", "weights", "keys"), "*bf16:16") | dict.fromkeys(("table", "requests"), "*i64:16")
    signature |= {"seen": "*i32:16", "first": "i32", "table_row": "i32", "topk": "i32:16", "factor": "fp32"}
    signature |= dict.fromkeys(("cos", "sin", "scores"), "*fp32:16")
    signature |= dict.fromkeys(("q_token", "q_head", "weights_token", "key_page", "key_row"), "i32:16")
    signature["scores_token"] = "i32"
    constants = {"ROWS": 64, "HEADS": 64, "D": 128, "R": 64, "BLOCK_H": 64, "BLOCK_D": 128, "PRECISION": "ieee"}
    constants["ENTRIES"] = launch["ENTRIES"]
    made = [Specialization("csa scores", score_kernel, signature, constants, launch["num_warps"], 1)]
    signature = {"picks": "*i64:16", "rows": "*i32:16", "table": "*i64:16", "requests": "*i64:16"}
    signature |= dict.fromkeys(("picks_token", "rows_token", "columns"), "i32:16") | {"table_row": "i32"}
    constants = {"ROWS": 64, "BLOCK": 512}
    return [*made, Specialization("csa rows", resolve_kernel, signature, constants, 4, 1)]
