"""Sparse latent attention against its definition in float64, on scattered, recycled and poisoned pages.

That every schedule of every case gives the definition is held by `test_naive.py`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.naive_output import naive_output, naive_results

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, index_pages
from allotrope.attention.cache_layout import row_bytes
from allotrope.attention.check import Case, Inputs, cases, compare
from allotrope.attention.dsa import DSA, DsaSpec, IndexerSpec, indexer
from allotrope.attention.dsa import plan as dsa_plan
from allotrope.attention.dsa import reference as dsa_reference
from allotrope.attention.dsa.cases import draw
from allotrope.attention.mla import MLA
from allotrope.attention.replay import Replay, Step, at_random, in_chunks, whole
from allotrope.kernels.backend import runs_anywhere

CPU = torch.device("cpu")
CASES = cases("dsa")
REFERENCE = DSA.backends[-1]


class PickingReplay(Replay):
    """Also keeps the picks of every step, by sequence."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.topk_indices: list[list[torch.Tensor]] = [[] for _ in case.lengths]
        super().__init__(case, AttentionBackend("keeping", runs_anywhere, self.run, plan=REFERENCE.plan), seed=seed)

    def run(self, *args: object, **tensors: torch.Tensor) -> torch.Tensor:
        out, self.last = dsa_reference.run(*args, **tensors)  # type: ignore[arg-type]
        return out

    def step(self, step: Step) -> torch.Tensor:
        out = super().step(step)
        for (i, _), part in zip(step, self.last.split([n for _, n in step]), strict=True):
            self.topk_indices[i].extend(part.unbind())
        return out


@pytest.mark.parametrize("name", ["picking_all", "reusing", "reusing_wide_values"])
def test_half_precision_where_rounding_cannot_change_the_topk(name: str) -> None:
    case = cases("dsa", torch.bfloat16)[name]
    assert (
        found := compare(Replay(case, REFERENCE).play(at_random(case.lengths, 3)), naive_output(case), case.kind)
    ), found


def test_topk_is_that_of_the_scores_whatever_the_schedule() -> None:
    case = CASES["picking"]
    lengths = case.lengths
    results = naive_results(case)
    for steps in (whole(lengths), in_chunks(lengths, 1), in_chunks(lengths, 5), at_random(lengths, 6)):
        replay = PickingReplay(case)
        replay.play(steps)
        for topk_indices, (_, indices) in zip(replay.topk_indices, results, strict=True):
            for found, row in zip(topk_indices, indices, strict=True):
                want = row[row >= 0].sort().values.tolist()
                assert found.tolist() == want + [-1] * (len(found) - len(want))


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["picking"]
    want = naive_output(case)
    monkeypatch.setattr(dsa_plan, "QUERY_BLOCK", 5)
    monkeypatch.setattr(indexer, "HEAD_SCORES", 1)
    monkeypatch.setattr(dsa_reference, "GATHERED_ROWS", 3 * case.spec.topk)
    for steps in (whole(case.lengths), in_chunks(case.lengths, 1), at_random(case.lengths, 7)):
        assert (found := compare(Replay(case, REFERENCE).play(steps), want, "fp32")), found


@pytest.mark.parametrize("name", ["picking", "picking_released", "reusing"])
def test_contexts_up_to_topk_are_dense_attention_bit_by_bit(name: str) -> None:
    sparse = CASES[name]
    spec = dataclasses.replace(sparse.spec, topk=max(sparse.lengths))
    steps = at_random(sparse.lengths, 8)
    found = Replay(dataclasses.replace(sparse, spec=spec), REFERENCE).play(steps)

    def same_inputs(*_: object) -> Inputs:
        inputs = sparse.inputs()
        kept = {key: t for key, t in inputs.tokens.items() if key in ("q_nope", "q_pe", "c", "k_pe")}
        return Inputs(kept, inputs.layer)

    dense = Replay(dataclasses.replace(sparse, spec=spec.mla, draw=same_inputs), MLA.backends[-1]).play(steps)
    assert torch.equal(found, dense)


def test_a_layer_that_reuses_topk_agrees_with_the_layer_that_selected_it() -> None:
    owner = CASES["picking"]
    first = PickingReplay(owner)
    want = first.play(at_random(owner.lengths, 9))
    width = max(len(row) for rows in first.topk_indices for row in rows)
    topk_indices = torch.full((sum(owner.lengths), width), -1)
    for i, rows in enumerate(first.topk_indices):
        for p, row in enumerate(rows):
            topk_indices[first.begin[i] + p, : len(row)] = row

    def with_topk(*_: object) -> Inputs:
        inputs = owner.inputs()
        kept = {key: t for key, t in inputs.tokens.items() if not key.startswith("index_")}
        return Inputs(kept | {"topk_indices": topk_indices}, inputs.layer)

    reader = dataclasses.replace(owner, spec=dataclasses.replace(owner.spec, indexer=None), draw=with_topk)
    found = compare(Replay(reader, REFERENCE).play(at_random(owner.lengths, 9)), want, "fp32")
    assert found, found


def test_a_reusing_layer_passes_the_topk_on_unchanged() -> None:
    replay = PickingReplay(CASES["reusing"])
    given = replay.inputs.tokens["topk_indices"]
    replay.play(whole(replay.case.lengths))
    assert torch.equal(torch.stack([row for rows in replay.topk_indices for row in rows]), given)


def test_missing_indices_are_read_as_nothing_even_where_the_memory_is_poison() -> None:
    """-1 in the list of a query that picks: that row is left out, and no row stands in for it."""
    case = CASES["reusing"]
    topk = case.spec.topk

    def with_gaps(*_: object) -> Inputs:
        inputs = draw(case.spec, sum(case.lengths), torch.Generator().manual_seed(3), torch.float32)
        topk_indices = inputs.tokens["topk_indices"]
        topk_indices[torch.rand(topk_indices.shape, generator=torch.Generator().manual_seed(4)) < 0.5] = -1
        return Inputs(inputs.tokens, inputs.layer)

    holed = dataclasses.replace(case, draw=with_gaps)
    found = Replay(holed, REFERENCE).play(whole(case.lengths))
    positions = torch.cat([torch.arange(n) for n in case.lengths])
    nothing = (holed.inputs().tokens["topk_indices"] < 0).all(1) & (positions >= topk)
    assert found[nothing].eq(0).all()
    inputs = holed.inputs()
    # A query that sees at most `topk` tokens attends to all of them, whatever its list says.
    inputs.tokens["topk_indices"][positions < topk] = case.inputs().tokens["topk_indices"][positions < topk]
    want = naive_output(holed, inputs=inputs)
    assert (same := compare(found, want, "fp32")), same


def test_equal_scores_pick_the_earliest_rows() -> None:
    """No head counts: every score is 0, on whatever page its row lies."""
    case = CASES["picking"]

    def no_weights(*_: object) -> Inputs:
        inputs = case.inputs()
        inputs.tokens["index_weights"].zero_()
        return inputs

    for steps in (whole(case.lengths), in_chunks(case.lengths, 1)):
        replay = PickingReplay(dataclasses.replace(case, draw=no_weights))
        replay.play(steps)
        for row in replay.topk_indices[-1][case.spec.topk :]:
            assert row.tolist() == list(range(case.spec.topk))


def test_both_caches_may_have_pages_of_their_own_size() -> None:
    case = dataclasses.replace(CASES["picking"])
    want = naive_output(case)
    replay = Replay(case, REFERENCE)
    replay.page_sizes["index"] = 8
    pages = 1 + sum(-(-n // 8) for n in case.lengths)
    replay.pools["index"]["k"] = torch.full((pages, 8, case.spec.indexer.head_dim), torch.nan)
    replay.pools["index"]["k"][0] = 0
    replay.free["index"] = list(range(1, pages))
    assert (found := compare(replay.play(at_random(case.lengths, 11)), want, "fp32")), found


def test_only_layers_with_an_indexer_keep_index_rows() -> None:
    owner, reader = CASES["picking_released"].spec, CASES["reusing"].spec
    assert set(owner.caches()) == {"latent", "index"}
    assert row_bytes(owner.caches()["index"]) == 128 * 4
    assert set(reader.caches()) == {"latent"}
    assert owner.plan_key != dataclasses.replace(owner, indexer=None).plan_key


def test_missing_tensors_are_refused() -> None:
    batch = BatchLayout((3,), (3,), CPU)
    for name, wanted in (("picking", "index_q"), ("reusing", "top-k indices of an earlier layer")):
        case = CASES[name]
        replay = Replay(case, REFERENCE)
        index = {cache: index_pages(batch, 16, [[1]]) for cache in replay.layouts}
        kept = ("q_nope", "q_pe", "c", "k_pe")
        tokens = {key: t[:3] for key, t in replay.inputs.tokens.items() if key in kept}
        with pytest.raises(ValueError, match=wanted):
            REFERENCE.run(
                case.spec,
                REFERENCE.plan(case.spec, batch, index),
                replay.pools,
                DSA.ready_inputs(case.spec, **tokens, **replay.layer),
            )


def test_spec_refuses_numbers_that_make_no_sense() -> None:
    sizes = CASES["picking"].spec.mla
    with pytest.raises(ValueError, match=r"topk=0; .*num_heads=0"):
        DsaSpec(mla=sizes, topk=0, indexer=IndexerSpec(num_heads=0, head_dim=32))
