"""Latent attention against its definition in float64, on scattered, recycled and poisoned pages.

That every schedule of every case gives the definition is held by `test_naive.py`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.naive_output import naive_output

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, index_pages
from allotrope.attention.cache_layout import page_bytes, pool_bytes, row_bytes, views
from allotrope.attention.check import cases, compare
from allotrope.attention.mla import MLA, MlaSpec
from allotrope.attention.mla import plan as mla_plan
from allotrope.attention.mla.plan import MlaPlan
from allotrope.attention.replay import Replay, Step, at_random, in_chunks, in_order, whole
from allotrope.kernels.chip import CPU as CPU_CHIP

CPU = torch.device("cpu")
CASES = cases("mla")
REFERENCE = MLA.backends[-1]
BACKENDS = [
    pytest.param(backend, id=backend.name)
    for backend in MLA.backends
    if not backend.rejects(CASES["released"].spec, CPU_CHIP)
]


def plan_of(spec: MlaSpec, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> MlaPlan:
    batch = BatchLayout(query_lens, seq_lens, CPU)
    pages, free = [], iter(range(1, 10_000))
    for n in seq_lens:
        pages.append([next(free) for _ in range(-(-n // 16))])
    return MLA.backends[-1].plan(spec, batch, {"latent": index_pages(batch, 16, pages)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_half_precision(name: str, backend: AttentionBackend, dtype: torch.dtype) -> None:
    case = cases("mla", dtype)[name]
    if reasons := backend.rejects(case.spec, CPU_CHIP):
        pytest.skip("; ".join(reasons))
    assert (found := compare(Replay(case, backend).play(at_random(case.lengths, 3)), naive_output(case), case.kind)), (
        found
    )


@pytest.mark.parametrize("name", ["released", "small"])
def test_slices_and_tiles_of_any_size_are_merged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so small that every request takes several slices, some of which a query block does not see."""
    case = CASES[name]
    want = naive_output(case)
    for keys, queries, decode_rows in ((16, 8, 16), (7, 5, 40), (24, 64, 1)):
        monkeypatch.setattr(mla_plan, "KEY_SLICE", keys)
        monkeypatch.setattr(mla_plan, "QUERY_BLOCK", queries)
        monkeypatch.setattr(mla_plan, "DECODE_ROWS", decode_rows)
        lengths = case.lengths
        for steps in (whole(lengths), in_chunks(lengths, 1), in_chunks(lengths, 23), at_random(lengths, 4)):
            assert (found := compare(Replay(case, REFERENCE).play(steps), want, "fp32")), found


@pytest.mark.parametrize("backend", BACKENDS)
def test_longer_than_a_slice_and_a_block(backend: AttentionBackend) -> None:
    lengths = (mla_plan.KEY_SLICE + 90, 5)
    case = dataclasses.replace(CASES["released"], lengths=lengths)
    want = naive_output(case)
    then_decoded: list[Step] = [[(0, lengths[0] - 2), (1, 3)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]]
    for steps in (whole(lengths), in_chunks(lengths, 700), then_decoded):
        assert (found := compare(Replay(case, backend).play(steps), want, "fp32")), found


@pytest.mark.parametrize("name", ["released", "small"])
def test_equal_prompts_share_a_part(name: str) -> None:
    lengths = (40, 40, 40, 7, 7)
    plan = plan_of(CASES[name].spec, lengths, lengths)
    assert [len(part.slices[0].rows) for part in (*plan.absorbed, *plan.decompressed)] == [3, 2]
    case = dataclasses.replace(CASES[name], lengths=lengths)
    for steps in (whole(lengths), in_chunks(lengths, 20)):
        assert (found := compare(Replay(case, REFERENCE).play(steps), naive_output(case), "fp32")), found


def test_each_part_takes_the_cheaper_form() -> None:
    spec = CASES["released"].spec
    decode = plan_of(spec, (1, 1), (5, 900))
    assert not decode.decompressed
    assert [part.queries for part in decode.absorbed] == [1, 1]
    prompt = plan_of(spec, (500,), (500,))
    assert len(prompt.decompressed) == 1
    assert not prompt.absorbed
    few_after_many, many_after_many = plan_of(spec, (8,), (900,)), plan_of(spec, (400,), (900,))
    assert few_after_many.absorbed
    assert not few_after_many.decompressed
    assert many_after_many.decompressed
    # A latent no larger than a head has nothing to gain from expansion.
    assert not plan_of(CASES["small"].spec, (500,), (500,)).decompressed


def test_memory_of_a_step_does_not_grow_with_the_context() -> None:
    plan = plan_of(CASES["released"].spec, (1, 1, 600), (40_000, 1_000, 30_000))
    for part in (*plan.absorbed, *plan.decompressed):
        for keys in part.slices:
            bound = mla_plan.KEY_SLICE if part.queries > 1 else mla_plan.DECODE_ROWS
            assert keys.rows.numel() <= bound
            assert all(tile.queries.stop - tile.queries.start <= mla_plan.QUERY_BLOCK for tile in keys.tiles)


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_and_their_order_do_not_matter(backend: AttentionBackend) -> None:
    case = CASES["released"]
    chunks = in_chunks(case.lengths, 24)
    together = Replay(case, backend).play(chunks)
    for steps in ([in_order(reversed(step)) for step in chunks], [[taken] for step in chunks for taken in step]):
        assert (found := compare(Replay(case, backend).play(steps), together, "fp32")), found


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_the_pages_lie_changes_no_bit(backend: AttentionBackend) -> None:
    case = CASES["uneven"]
    first, second = Replay(case, backend), Replay(case, backend)
    second.free["latent"].reverse()
    steps = at_random(case.lengths, 5)
    assert torch.equal(first.play(steps), second.play(steps))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_tokens_are_not_written_and_stay_finite(backend: AttentionBackend) -> None:
    case = CASES["small"]
    layout = case.spec.caches()["latent"]
    buffer = torch.full((pool_bytes(layout, 16, 4),), 0xFF, dtype=torch.uint8)
    pools = {"latent": views(layout, 16, 4, buffer)}
    for view in pools["latent"].values():
        view[0] = 0
    batch = BatchLayout((1, 1, 3), (1, 1, 3), CPU)
    plan = backend.plan(case.spec, batch, {"latent": index_pages(batch, 16, [[2], [-1], [3]])})
    inputs = case.inputs()
    tokens = {name: t[:5] for name, t in inputs.tokens.items()}
    out = backend.run(case.spec, plan, pools, MLA.ready_inputs(case.spec, **tokens, **inputs.layer))
    assert out.isfinite().all()
    want = torch.zeros(64, dtype=torch.bool)
    want[:17] = want[32:33] = want[48:51] = True
    want[16:17] = False
    for name, view in pools["latent"].items():
        assert torch.equal(view.flatten(0, 1).isfinite().all(1), want), name
        assert not view[0].any()


def test_a_step_reads_rows_that_another_request_computed() -> None:
    """A prefix hit: the second request's table points at the first one's pages."""
    case = dataclasses.replace(CASES["released"], lengths=(40, 40))
    replay = Replay(case, REFERENCE)
    for t in replay.inputs.tokens.values():
        t[40:] = t[:40]
    replay.step([(0, 32)])
    replay.held["latent"][1] = replay.held["latent"][0][:2]
    replay.done[1] = 32
    step: Step = [(0, 8), (1, 8)]
    out = replay.step(step)
    assert torch.equal(out[:8], out[8:])


def test_one_row_per_token_whatever_the_heads() -> None:
    layout = CASES["released"].spec.caches()["latent"]
    assert row_bytes(layout) == (512 + 64) * 4
    assert page_bytes(layout, 64) == 64 * row_bytes(layout)
    half = dataclasses.replace(CASES["released"].spec, kv_dtype=torch.bfloat16, num_heads=128)
    assert row_bytes(half.caches()["latent"]) == 1152


def test_spec_names_every_wrong_number_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_heads=0; .*rope_dim=-1; .*scale=0"):
        dataclasses.replace(CASES["small"].spec, num_heads=0, rope_dim=-1, scale=0.0)
