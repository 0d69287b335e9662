"""The indexer's scores of the entries that a query sees, and the cache slots of the selected ones.

    I_t,e = scale * sum_h w_t,h relu(rope(q_t,h) . k_e)

A program owns BLOCK_N entries of one query; all heads share the keys, which are loaded once. Queries that see at most
`topk` entries are not scored. A score takes 4 bytes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from allotrope.attention.batch import PageIndex
from allotrope.attention.csa.spec import IndexerSpec
from allotrope.attention.csa.triton_store import apply_rope, pair_angles
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2


@pdl_jit
def score_kernel(
    q, weights, keys, table, requests, num_visible, cos, sin, scores, first,
    q_token, q_head, weights_token, table_row, key_page, key_row, scores_token, topk, scale,
    ENTRIES_PER_PAGE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Score tokens from `first` on, whose scores begin at row 0. `num_visible`: [T] int32 entries of each query."""
    gdc_wait()
    gdc_launch_dependents()
    token = first + tl.program_id(0)
    visible, begin = tl.load(num_visible + token), tl.program_id(1) * BLOCK_N
    if (visible <= topk) | (begin >= visible):
        return
    head, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask_hd = (head < H)[:, None] & (offs_d < D)[None, :]
    q_ptr = q + token.to(tl.int64) * q_token
    q_tile = tl.load(q_ptr + head[:, None] * q_head + offs_d[None, :], mask=mask_hd, other=0.0)
    c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
    q_tile = apply_rope(q_tile.to(tl.float32), c, s, BLOCK_H, BLOCK_D).to(q.dtype.element_ty)
    entry = begin + tl.arange(0, BLOCK_N)
    mask_n = entry < visible
    request = tl.load(requests + token)
    page = tl.load(table + request * table_row + entry // ENTRIES_PER_PAGE, mask=mask_n, other=0).to(tl.int64)
    k_offset = page * key_page + entry % ENTRIES_PER_PAGE * key_row
    k = tl.load(keys + k_offset[:, None] + offs_d[None, :], mask=mask_n[:, None] & (offs_d < D)[None, :], other=0.0)
    logits = tl.dot(k.to(q_tile.dtype), tl.trans(q_tile), input_precision=PRECISION)
    w = tl.load(weights + token.to(tl.int64) * weights_token + head, mask=head < H, other=0.0)
    score = tl.sum(at_least(logits, 0.0) * (w.to(tl.float32) * scale)[None, :], axis=1)
    tl.store(scores + tl.program_id(0).to(tl.int64) * scores_token + entry, score, mask=mask_n)


@pdl_jit
def resolve_kernel(
    topk_indices, slots, table, requests, topk_token, slots_token, table_row, columns,
    ENTRIES_PER_PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Map entries to their cache slots, -1 to -1. `topk_indices`: [T, columns] int64. `slots`: [T, .] int32."""
    gdc_wait()
    gdc_launch_dependents()
    token, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(topk_indices + token * topk_token + offs, mask=offs < columns, other=-1)
    mask = entry >= 0
    pages = table + tl.load(requests + token) * table_row
    page = tl.load(pages + entry // ENTRIES_PER_PAGE, mask=mask, other=0)
    slot = tl.where(mask, page * ENTRIES_PER_PAGE + entry % ENTRIES_PER_PAGE, -1).to(tl.int32)
    tl.store(slots + token * slots_token + offs, slot, mask=offs < slots_token)


def config(chip: Chip, is_fp32: bool) -> dict[str, int]:
    """Launch parameters. `is_fp32`: products of fp32."""
    if chip.vendor == "cpu":
        return {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    return {"BLOCK_N": 32 if is_fp32 else 128, "num_warps": 4, "num_stages": 1}


def score(
    spec: IndexerSpec, rope_dim: int, chip: Chip, paged: PageIndex, keys: torch.Tensor, q: torch.Tensor,
    weights: torch.Tensor, requests: torch.Tensor, num_visible: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
    first: int, tokens: int, bound: int, precision: str,
) -> torch.Tensor:  # fmt: skip
    """Scores [tokens, bound] fp32 of `tokens` queries from `first` on; entries that a query does not see are unwritten.

    `paged`, `keys`: page table of the index keys, and their pool [P, rows, d]. `q`: [T, heads, d], not rotated.
    `weights`: [T, heads]. `num_visible`: [T] int32. `angles`: [T, R] cos and sin. `bound`: an upper bound of
    `num_visible`.
    """
    launch = config(chip, q.dtype == torch.float32)
    scores = torch.empty(tokens, bound, dtype=torch.float32, device=q.device)
    score_kernel[(tokens, cdiv(bound, launch["BLOCK_N"]))](
        q, weights, keys, paged.table, requests, num_visible, *angles, scores, first,
        q.stride(0), q.stride(1), weights.stride(0), paged.table.stride(0), keys.stride(0), keys.stride(1), bound,
        spec.topk, (spec.num_heads * spec.head_dim) ** -0.5, ENTRIES_PER_PAGE=keys.shape[1], H=spec.num_heads,
        D=spec.head_dim, R=rope_dim, BLOCK_H=max(16, next_power_of_2(spec.num_heads)),
        BLOCK_D=max(16, next_power_of_2(spec.head_dim)), PRECISION=precision, **launch,
    )  # fmt: skip
    return scores


def resolve(paged: PageIndex, per_page: int, requests: torch.Tensor, topk_indices: torch.Tensor) -> torch.Tensor:
    """[T, n] int32 slots of entries. `paged`: their page table, with `per_page` entries to a page. `requests`: [T]
    int64. `topk_indices`: [T, K] int64 entries, -1 for none; n is K, padded to 16 bytes."""
    tokens, columns = topk_indices.shape
    slots = torch.empty(tokens, -(-columns // 4) * 4, dtype=torch.int32, device=topk_indices.device)
    block = min(512, next_power_of_2(slots.shape[1]))
    resolve_kernel[(tokens, cdiv(slots.shape[1], block))](
        topk_indices, slots, paged.table, requests, topk_indices.stride(0), slots.stride(0), paged.table.stride(0),
        columns, ENTRIES_PER_PAGE=per_page, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return slots


@specializations
def released(chip: Chip) -> list[Specialization]:
    """64 index heads of 128."""
    launch = config(chip, False)
    signature = dict.fromkeys(("q", "weights", "keys"), "*bf16:16") | dict.fromkeys(("table", "requests"), "*i64:16")
    signature |= {"num_visible": "*i32:16", "first": "i32", "table_row": "i32", "topk": "i32:16", "scale": "fp32"}
    signature |= dict.fromkeys(("cos", "sin", "scores"), "*fp32:16")
    signature |= dict.fromkeys(("q_token", "q_head", "weights_token", "key_page", "key_row"), "i32:16")
    signature["scores_token"] = "i32"
    constants = {"ENTRIES_PER_PAGE": 64, "H": 64, "D": 128, "R": 64, "BLOCK_H": 64, "BLOCK_D": 128, "PRECISION": "ieee"}
    constants["BLOCK_N"] = launch["BLOCK_N"]
    made = [Specialization("csa scores", score_kernel, signature, constants, launch["num_warps"], 1)]
    signature = {"topk_indices": "*i64:16", "slots": "*i32:16", "table": "*i64:16", "requests": "*i64:16"}
    signature |= dict.fromkeys(("topk_token", "slots_token", "columns"), "i32:16") | {"table_row": "i32"}
    constants = {"ENTRIES_PER_PAGE": 64, "BLOCK": 512}
    return [*made, Specialization("csa slots", resolve_kernel, signature, constants, 4, 1)]
