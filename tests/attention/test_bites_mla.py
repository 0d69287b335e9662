"""Faults put into latent attention by hand: each must make `compare` fail, or the other tests prove nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention.test_bites import Fault, change_plan, change_spec, change_tokens

from allotrope.attention.check import Case, cases, compare
from allotrope.attention.dsa import DSA
from allotrope.attention.mla import MLA
from allotrope.attention.mla.plan import MlaPlan
from allotrope.attention.replay import Replay, Step, whole

MLA_CASE = dataclasses.replace(cases("mla")["released"], lengths=(40, 41, 90))
DSA_CASE = dataclasses.replace(cases("dsa")["picking"], lengths=(40, 41, 90))
REUSING_CASE = cases("dsa")["reusing"]


def steps_of(case: Case) -> list[Step]:
    """Prompts whole but for their last three tokens, which are decoded: both forms, and pages half full."""
    lengths = [n for n in case.lengths if n > 3]
    members = [i for i, n in enumerate(case.lengths) if n > 3]
    prompts = [(i, n - 3) for i, n in zip(members, lengths, strict=True)]
    return [sorted(prompts, key=lambda taken: taken[1] != 1), *([(i, 1) for i in members] for _ in range(3))]


def read_the_whole_last_page(plan: MlaPlan) -> MlaPlan:
    """Decodes read on to the end of their padded width, in whatever row comes next."""

    def unmasked(keys: Any) -> Any:
        rows = keys.rows.clone()
        for column in range(1, rows.shape[1]):
            rows[:, column] = torch.where(rows[:, column] == 0, rows[:, column - 1] + 1, rows[:, column])
        tiles = tuple(dataclasses.replace(tile, bias=None) for tile in keys.tiles)
        return dataclasses.replace(keys, rows=rows.clamp(max=rows.max()), tiles=tiles)

    def part(found: Any) -> Any:
        if found.queries > 1:
            return found
        return dataclasses.replace(found, slices=tuple(unmasked(keys) for keys in found.slices))

    return dataclasses.replace(plan, absorbed=tuple(part(found) for found in plan.absorbed))


def see_one_row_less(plan: MlaPlan) -> MlaPlan:
    """Queries do not see their own row."""

    def tile(found: Any) -> Any:
        if found.bias is None:
            return found
        later = torch.nn.functional.pad(found.bias, (0, 1), value=-1e30)
        return dataclasses.replace(found, bias=later)

    def part(found: Any) -> Any:
        slices = tuple(dataclasses.replace(keys, tiles=tuple(tile(one) for one in keys.tiles)) for keys in found.slices)
        return dataclasses.replace(found, slices=slices)

    return dataclasses.replace(plan, decompressed=tuple(part(found) for found in plan.decompressed))


def pick_for_another_request(plan: Any) -> Any:
    """The rows picked are looked up in the page table of the next request."""
    if plan.sparse_queries is None:
        return plan
    sparse_queries = plan.sparse_queries
    request = (sparse_queries.request + 1) % len(sparse_queries.pages.table)
    return dataclasses.replace(plan, sparse_queries=dataclasses.replace(sparse_queries, request=request))


def score_for_another_request(plan: Any) -> Any:
    """Queries are scored against the keys of the request before."""
    rows = [chunk.rows for chunk in plan.chunks]
    chunks = [
        dataclasses.replace(chunk, rows=rows[i - 1][:, : chunk.rows.shape[1]])
        if rows[i - 1].shape[1] >= chunk.rows.shape[1]
        else chunk
        for i, chunk in enumerate(plan.chunks)
    ]
    return dataclasses.replace(plan, chunks=tuple(chunks))


def see_the_future(plan: Any) -> Any:
    chunks = [
        dataclasses.replace(one, seen=torch.full_like(one.seen, one.rows.shape[1])) for one in plan.chunks
    ]  # fmt: skip
    return dataclasses.replace(plan, chunks=tuple(chunks))


def topk_of_another_request(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The picks that belong to the other end of the batch, clipped to what the query sees."""
    topk_indices = rows["topk_indices"].flip(0)
    return rows | {"topk_indices": topk_indices.clamp(max=int(rows["topk_indices"].max()))}


def make_gaps(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    topk_indices = rows["topk_indices"].clone()
    topk_indices[:, ::2] = -1
    return rows | {"topk_indices": topk_indices}


def read_gaps_as_entries(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """-1 taken for a position: the row it is clamped to."""
    return rows | {"topk_indices": make_gaps(rows)["topk_indices"].clamp(min=0)}


def clear_topk(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return rows | {"topk_indices": torch.full_like(rows["topk_indices"], -1)}


def drop_last_key(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The index keys of a step arrive one token late."""
    return rows | {"index_k": rows["index_k"].roll(1, 0)}


def stale_pages(replay: Replay) -> None:
    """New latent rows of single tokens are not written."""
    intact = replay.plan

    def plan(batch: Any, index: Any) -> Any:
        lost = {
            name: dataclasses.replace(pages, slots=torch.where(torch.arange(len(pages.slots)) < 1, -1, pages.slots))
            for name, pages in index.items()
        }
        return intact(batch, lost)

    replay.plan = plan  # type: ignore[method-assign]


MSCALE = 0.1 * 1.0 * 3.6888794541139363 + 1.0  # 0.1 m ln(40) + 1, as DeepSeek-V3 stretches its context

FAULTS: dict[str, tuple[Case, Fault]] = {
    "mla: scale without mscale squared": (MLA_CASE, change_spec(scale=MLA_CASE.spec.scale / MSCALE**2)),
    "mla: mscale once": (MLA_CASE, change_spec(scale=MLA_CASE.spec.scale / MSCALE)),
    "mla: scale of the nope part alone": (MLA_CASE, change_spec(scale=128**-0.5)),
    "mla: last page read to its end": (MLA_CASE, change_plan(read_the_whole_last_page)),
    "mla: causal off by one": (MLA_CASE, change_plan(see_one_row_less)),
    "mla: rows of decodes not written": (MLA_CASE, stale_pages),
    "dsa: picks read from another request's pages": (DSA_CASE, change_plan(pick_for_another_request)),
    "dsa: scored against another request": (DSA_CASE, change_plan(score_for_another_request)),
    "dsa: rows of the future may be picked": (DSA_CASE, change_plan(see_the_future)),
    "dsa: index keys one token late": (DSA_CASE, change_tokens(drop_last_key)),
    "dsa: one row too few": (DSA_CASE, change_spec(topk=DSA_CASE.spec.topk - 1)),
    "dsa: scale without mscale squared": (
        DSA_CASE,
        change_spec(mla=dataclasses.replace(DSA_CASE.spec.mla, scale=DSA_CASE.spec.mla.scale / MSCALE**2)),
    ),
    "dsa: picks of another request reused": (REUSING_CASE, change_tokens(topk_of_another_request)),
    "dsa: picks cleared by the layer that reuses them": (REUSING_CASE, change_tokens(clear_topk)),
}


def play(case: Case, fault: Fault | None = None, steps: list[Step] | None = None) -> torch.Tensor:
    replay = Replay(case, {"mla": MLA, "dsa": DSA}[case.spec.family].backends[-1])
    if fault is not None:
        fault(replay)
    return replay.play(steps_of(case) if steps is None else steps)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    case, fault = FAULTS[name]
    want = play(case)
    assert compare(want, want, "fp32")
    assert not compare(play(case, fault), want, "fp32"), f"{name} went unseen"


def test_a_missing_pick_that_is_dereferenced_is_seen() -> None:
    steps = whole(REUSING_CASE.lengths)
    want = play(REUSING_CASE, change_tokens(make_gaps), steps)
    assert want.isfinite().all()
    assert not compare(play(REUSING_CASE, change_tokens(read_gaps_as_entries), steps), want, "fp32")
