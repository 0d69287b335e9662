"""Softmax attention against its definition in float64, on scattered, recycled and poisoned pages.

That every schedule of every case gives the definition is held by `test_naive.py`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.naive_output import naive_output

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, index_pages
from allotrope.attention.cache_layout import pool_bytes, views
from allotrope.attention.check import cases, compare
from allotrope.attention.mha import MHA, MhaSpec
from allotrope.attention.mha.plan import QUERY_BLOCK
from allotrope.attention.replay import Replay, Step, at_random, in_chunks, in_order, whole
from allotrope.kernels.backend import choose
from allotrope.kernels.chip import CPU as CPU_CHIP

CPU = torch.device("cpu")
CASES = cases("mha")
RUNS = [
    pytest.param(name, backend, id=f"{name}-{backend.name}")
    for name, case in CASES.items()
    for backend in MHA.backends
    if not backend.rejects(case.spec, CPU_CHIP)
]


BACKENDS = [
    pytest.param(backend, id=backend.name)
    for backend in MHA.backends
    if not backend.rejects(CASES["multi_head"].spec, CPU_CHIP)
]

FIRST = choose(MHA, CASES["multi_head"].spec, CPU_CHIP).backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_half_precision(name: str, backend: AttentionBackend, dtype: torch.dtype) -> None:
    case = cases("mha", dtype)[name]
    if reasons := backend.rejects(case.spec, CPU_CHIP):
        pytest.skip("; ".join(reasons))
    assert (found := compare(Replay(case, backend).play(at_random(case.lengths, 3)), naive_output(case), case.kind)), (
        found
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_longer_than_a_block_of_queries(backend: AttentionBackend, window: int | None) -> None:
    short = CASES["multi_head"]
    case = dataclasses.replace(
        short, spec=dataclasses.replace(short.spec, window=window), lengths=(3, QUERY_BLOCK + 61, QUERY_BLOCK)
    )
    want = naive_output(case)
    for steps in (whole(case.lengths), in_chunks(case.lengths, 300), at_random(case.lengths, 4)):
        assert (found := compare(Replay(case, backend).play(steps), want, "fp32")), found


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_neighbours_and_their_order_change_no_bit(name: str, backend: AttentionBackend) -> None:
    case = CASES[name]
    chunks = in_chunks(case.lengths, 24)
    together = Replay(case, backend).play(chunks)
    reversed_order = Replay(case, backend, seed=0).play([in_order(reversed(step)) for step in chunks])
    apart = Replay(case, backend).play([[taken] for step in chunks for taken in step])
    assert torch.equal(together, reversed_order)
    assert torch.equal(together, apart)


def test_where_the_pages_lie_changes_no_bit() -> None:
    case = CASES["window_and_sinks"]
    first, second = Replay(case, FIRST), Replay(case, FIRST)
    second.free["kv"].reverse()
    steps = at_random(case.lengths, 5)
    assert torch.equal(first.play(steps), second.play(steps))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_tokens_are_not_written_and_stay_finite(backend: AttentionBackend) -> None:
    case = CASES["grouped_4"]
    layout = case.spec.caches()["kv"]
    buffer = torch.full((pool_bytes(layout, 16, 4),), 0xFF, dtype=torch.uint8)
    pools = {"kv": views(layout, 16, 4, buffer)}
    for view in pools["kv"].values():
        view[0] = 0
    batch = BatchLayout((1, 1, 3), (1, 1, 3), CPU)
    plan = backend.plan(case.spec, batch, {"kv": index_pages(batch, 16, [[2], [-1], [3]])})
    tokens = {name: t[:5] for name, t in case.inputs().tokens.items()}
    out = backend.run(case.spec, plan, pools, MHA.ready_inputs(case.spec, **tokens, sinks=None))
    assert out.isfinite().all()
    written = {name: view.flatten(0, 1).isfinite().flatten(1).all(1) for name, view in pools["kv"].items()}
    rows = {0: 16, 32: 1, 48: 3}
    for name, finite in written.items():
        want = torch.zeros(64, dtype=torch.bool)
        for begin, count in rows.items():
            want[begin : begin + count] = True
        assert torch.equal(finite, want), name
        assert not pools["kv"][name][0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_without_keys_reads_what_another_stored(backend: AttentionBackend) -> None:
    case = CASES["grouped_4"]
    owner = Replay(case, backend)
    want = owner.play(whole(case.lengths))
    reader = Replay(case, backend)
    for name, view in owner.pools["kv"].items():
        reader.pools["kv"][name].copy_(view)
    nothing = {"k": None, "v": None}
    reader.tokens = lambda step: Replay.tokens(reader, step) | nothing  # type: ignore[method-assign]
    assert torch.equal(reader.play(whole(case.lengths)), want)


def test_a_step_reads_rows_that_another_request_computed() -> None:
    """A prefix hit: the second request's table points at the first one's pages."""
    case = dataclasses.replace(CASES["grouped_4"], lengths=(40, 40))
    replay = Replay(case, FIRST)
    for t in replay.inputs.tokens.values():
        t[40:] = t[:40]
    replay.step([(0, 32)])
    replay.held["kv"][1] = replay.held["kv"][0][:2]
    replay.done[1] = 32
    step: Step = [(0, 8), (1, 8)]
    out = replay.step(step)
    assert torch.equal(out[:8], out[8:])


def test_spec_names_every_wrong_number_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_heads=6 .* num_kv_heads=4.*head_dim=1024.*window=0.*softcap=-1"):
        MhaSpec(num_heads=6, num_kv_heads=4, head_dim=1024, scale=1.0, kv_dtype=torch.float32, window=0, softcap=-1.0)
    with pytest.raises(ValueError, match="values_are_keys"):
        MhaSpec(
            num_heads=4, num_kv_heads=4, head_dim=64, v_head_dim=32, scale=1.0,
            kv_dtype=torch.float32, values_are_keys=True,
        )  # fmt: skip


def test_layers_of_one_window_share_a_plan() -> None:
    spec = CASES["grouped_4"].spec
    assert spec.plan_key == CASES["wide"].spec.plan_key
    assert spec.plan_key != CASES["window_1"].spec.plan_key
