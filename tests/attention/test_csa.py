"""Compressed sparse attention against its definition in float64, however its tokens arrive.

That every schedule of every case gives the definition is held by `test_naive.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch
from attention.naive_output import naive_output

from allotrope.attention.batch import BatchLayout, PageIndex
from allotrope.attention.check import Case, Inputs, cases, compare
from allotrope.attention.csa import CSA, CsaSpec, IndexerSpec, naive
from allotrope.attention.csa.cases import MAIN, PAGE, draw
from allotrope.attention.csa.reference import attend
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, Step, alone, at_random, in_chunks, in_order, whole
from allotrope.kernels.backend import choose
from allotrope.kernels.chip import CPU as CPU_CHIP

BACKEND = choose(FAMILIES["csa"], cases("csa")["chosen"].spec, CPU_CHIP).backend
# Every border of entries, of window and choice, and of the entries of 128.
LENGTHS = (1, 3, 4, 5, 7, 8, 127, 128, 129, 255, 256, 257, 300)
KINDS = {
    name: dataclasses.replace(cases("csa")[name], lengths=LENGTHS) for name in ("window_only", "chosen", "all_of_128")
}
SCHEDULES = {
    "whole": whole(LENGTHS),
    "alone": alone(LENGTHS),
    "random": at_random(LENGTHS, seed=5),
    **{f"chunks_{size}": in_chunks(LENGTHS, size) for size in (1, 3, 64, 100)},
}
Fault = Callable[[Case, Inputs, pytest.MonkeyPatch], Case]
"""Puts a known fault into the definition, or into what it is given; returns the case to compute."""


@cache
def definition_of_kind(kind: str) -> torch.Tensor:
    return naive_output(KINDS[kind])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition_however_tokens_arrive(kind: str, schedule: str) -> None:
    got = Replay(KINDS[kind], BACKEND).play(SCHEDULES[schedule])
    assert (verdict := compare(got, definition_of_kind(kind), "fp32")), verdict


def test_bf16_rounds_rows_and_output_only() -> None:
    for name in ("window_only", "chosen_without_overlap", "all_of_128"):
        case = cases("csa", torch.bfloat16)[name]
        # What the cache rounds may flip a near-tied choice: take an indexer that need not choose.
        if case.spec.indexer is not None:
            case = dataclasses.replace(
                case, spec=dataclasses.replace(case.spec, indexer=dataclasses.replace(case.spec.indexer, topk=64))
            )
        got = Replay(case, BACKEND).play(in_chunks(case.lengths, 3))
        assert (verdict := compare(got, naive_output(case), "bf16")), verdict


def rotated_on(tokens: Callable[[CsaSpec, torch.Tensor], torch.Tensor | int]) -> Fault:
    """Every entry is rotated at a position that many tokens later."""

    def put_in(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
        right = naive.compressor

        def compressor(spec: CsaSpec, *given: torch.Tensor) -> torch.Tensor:
            entries = right(spec, *given)
            return naive.rope(spec, entries, torch.zeros(len(entries)) + tokens(spec, torch.arange(len(entries))))

        patch.setattr(naive, "compressor", compressor)
        return case

    return put_in


def first_block_scored_zero(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
    """The first entry pools, beside its own block, a block of zeros whose scores are 0 and not -inf."""
    right = naive.compressor

    def compressor(spec: CsaSpec, kv_score: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        before = torch.cat((torch.zeros_like(bias), -bias), dim=-1)
        entries = right(spec, torch.cat((before, kv_score)), bias, norm)[1:]
        return naive.rope(spec, entries, torch.full((len(entries),), -spec.ratio))

    patch.setattr(naive, "compressor", compressor)
    return case


def streams_swapped(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
    for given, prefix in ((inputs.tokens, "kv_score"), (inputs.layer, "position_bias")):
        for name in (prefix, f"index_{prefix}"):
            streams = given[name].unflatten(-1, (-1, 2, len(inputs.layer[name.replace(prefix, "entry_norm")])))
            given[name] = streams.flip(-2).flatten(-3)
    return case


def bias_off_by_one(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
    inputs.layer["position_bias"] = inputs.layer["position_bias"].roll(-1, 0)
    return case


def no_sink(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
    inputs.layer["sinks"] = torch.full_like(inputs.layer["sinks"], -torch.inf)
    return case


def window_longer(tokens: int) -> Fault:
    return lambda case, inputs, patch: dataclasses.replace(
        case, spec=dataclasses.replace(case.spec, window=case.spec.window + tokens)
    )


def visible_later(tokens: int) -> Fault:
    def put_in(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
        right = naive.select
        patch.setattr(naive, "select", lambda spec, scores, position: right(spec, scores, position - tokens))
        return case

    return put_in


def not_rotated_back(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
    right = naive.rope
    patch.setattr(naive, "rope", lambda spec, x, p: x if p.sum() < 0 else right(spec, x, p))
    return case


def one_entry_more(case: Case, inputs: Inputs, patch: pytest.MonkeyPatch) -> Case:
    indexer = dataclasses.replace(case.spec.indexer, topk=case.spec.indexer.topk + 1)
    return dataclasses.replace(case, spec=dataclasses.replace(case.spec, indexer=indexer))


FAULTS: dict[str, tuple[str, Fault]] = {
    "rope at the last token of an entry": ("chosen", rotated_on(lambda spec, entry: spec.ratio - 1)),
    "rope at the last token of an entry of 128": ("all_of_128", rotated_on(lambda spec, entry: spec.ratio - 1)),
    "rope at the number of an entry": ("chosen", rotated_on(lambda spec, entry: entry - entry * spec.ratio)),
    "streams swapped": ("chosen", streams_swapped),
    "score 0 before the first token": ("chosen", first_block_scored_zero),
    "position bias off by one": ("all_of_128", bias_off_by_one),
    "sink dropped": ("window_only", no_sink),
    "window one longer": ("window_only", window_longer(1)),
    "window one shorter": ("chosen", window_longer(-1)),
    "entry visible one token late": ("all_of_128", visible_later(1)),
    "entry visible one token early": ("all_of_128", visible_later(-1)),
    "output not rotated back": ("window_only", not_rotated_back),
    "one entry too many selected": ("chosen", one_entry_more),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that are known from other implementations, put into the definition: then nothing agrees with it."""
    kind, put_in = FAULTS[fault]
    lengths = (8, 70) if kind != "all_of_128" else (129, 150)
    case = dataclasses.replace(KINDS[kind], lengths=lengths)
    got, inputs = Replay(case, BACKEND).play(whole(lengths)), case.inputs()
    assert compare(got, naive_output(case), "fp32")
    wrong = put_in(case, inputs, monkeypatch)
    assert not compare(got, naive_output(wrong, inputs=inputs), "fp32")


@pytest.mark.parametrize("kind", ["chosen", "all_of_128"])
def test_pages_of_a_shared_beginning_serve_another_sequence(kind: str) -> None:
    """The second sequence computes only what follows its 128 or 64 shared tokens, from the first one's pages."""
    shared = 128
    case = dataclasses.replace(KINDS[kind], lengths=(280, 280))
    replay = Replay(case, BACKEND)
    for tensor in replay.inputs.tokens.values():
        tensor[280 : 280 + shared] = tensor[:shared]
    # The first stops at the border, so that the window before it is still held.
    replay.step([(0, shared)])
    for name in replay.held:
        replay.held[name][1] = list(replay.held[name][0])
    replay.done[1] = shared
    for n in (1, 60, 91):
        replay.step([(1, n)])
    want = naive_output(case, inputs=replay.inputs)[280 + shared :]
    assert (verdict := compare(torch.cat(replay.outputs[1]), want, "fp32")), verdict


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_starts_again_ignores_what_it_left(kind: str) -> None:
    case = dataclasses.replace(KINDS[kind], lengths=(150, 20))
    replay = Replay(case, BACKEND)
    replay.step([(0, 131)])
    replay.done[0], replay.outputs[0] = 0, []
    for name, held in replay.held.items():
        replay.free[name].extend(page for page in held[0] if page >= 0)
        held[0] = []
    got = replay.play(at_random(case.lengths, seed=3))
    assert (verdict := compare(got, naive_output(case), "fp32")), verdict


@pytest.mark.parametrize("kind", KINDS)
def test_padding_writes_nothing_and_is_finite(kind: str) -> None:
    """Two requests of padding, without pages, beside a real one: as a captured batch has."""
    case = dataclasses.replace(KINDS[kind], lengths=(130, 1, 3))
    replay, lonely = Replay(case, BACKEND), Replay(case, BACKEND)
    for step in ([(0, 129)],):
        replay.step(step)
        lonely.step(step)
    want = lonely.step([(0, 1)])
    batch = BatchLayout((1, 1, 3), (130, 1, 3), torch.device("cpu"))
    index = {}
    for name in replay.held:
        real = replay.index(name, BatchLayout((1,), (130,), torch.device("cpu")), [0])
        assert isinstance(real, PageIndex)
        table = torch.full((3, real.table.shape[1]), -1)
        table[0] = real.table[0]
        index[name] = PageIndex(real.page_size, table, torch.cat((real.slots, torch.full((4,), -1))))
    out = BACKEND.run(
        case.spec,
        replay.plan(batch, index),
        replay.pools,
        CSA.ready_inputs(case.spec, **_step_of_five(replay), **replay.layer),
    )
    assert torch.equal(out[:1], want)
    assert out.isfinite().all()
    for name, fields in replay.pools.items():
        for field, pool in fields.items():
            assert torch.equal(pool.isnan(), lonely.pools[name][field].isnan())
            assert not pool[0].any()


def _step_of_five(replay: Replay) -> dict[str, torch.Tensor]:
    return {name: t[[129, 130, 131, 132, 133]] for name, t in replay.inputs.tokens.items()}


def test_order_of_requests_changes_nothing() -> None:
    case = dataclasses.replace(KINDS["chosen"], lengths=(40, 1, 70, 33))
    orders: list[list[Step]] = [
        [in_order([(2, 69), (0, 40), (3, 33), (1, 1)]), [(2, 1)]],
        [in_order([(1, 1), (3, 33), (2, 69), (0, 40)]), [(2, 1)]],
    ]
    first, second = (Replay(case, BACKEND).play(steps) for steps in orders)
    assert torch.equal(first, second)


def test_one_plan_serves_every_layer_of_a_kind() -> None:
    """A plan holds positions and pages only: another layer's tensors and pools give that layer's own answer."""
    case = dataclasses.replace(KINDS["chosen"], lengths=(45,))
    first, second = Replay(case, BACKEND), Replay(case, BACKEND)
    second.inputs = case.inputs(seed=9)
    second.layer = dict(second.inputs.layer)
    second.plan = lambda batch, index: plan  # type: ignore[method-assign]
    plans = []
    make = first.plan
    first.plan = lambda batch, index: plans.append(make(batch, index)) or plans[-1]  # type: ignore[method-assign]
    for n in (40, 5):
        first.step([(0, n)])
        plan = plans[-1]
        second.step([(0, n)])
    for layer in (first, second):
        want = naive_output(case, inputs=layer.inputs)
        assert (verdict := compare(torch.cat(layer.outputs[0]), want, "fp32")), verdict


def test_nothing_to_see_is_zero_and_a_sink_alone_takes_all() -> None:
    generator = torch.Generator().manual_seed(0)
    q, rows = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(1, 4, 8, generator=generator)
    bias = torch.full((1, 2, 4), -torch.inf)
    for sink in (-torch.inf, 0.0, 30.0):
        assert torch.equal(attend(q, [rows], bias, torch.full((3,), sink), 1.0), torch.zeros_like(q))
    bias[0, 1] = 0.0
    out = attend(q, [rows], bias, torch.full((3,), -torch.inf), 1.0)
    assert torch.allclose(out[0, 1], torch.softmax(q[0, 1] @ rows[0].T, -1) @ rows[0], atol=1e-6)
    assert out[0, 1].abs().sum() > 0
    assert attend(q, [rows * torch.nan], bias, torch.zeros(3), 1.0)[0, 1].isnan().all()


def test_tied_scores_select_equally_in_every_schedule() -> None:
    """One scoring head leaves most scores at exactly 0: the choice must not hang on how a step is cut or padded."""
    spec = dataclasses.replace(KINDS["chosen"].spec, indexer=IndexerSpec(num_heads=1, head_dim=16, topk=8))
    case = Case("tied", spec, (100, 61), draw, torch.float32, PAGE)
    want = naive_output(case)
    for steps in (whole(case.lengths), in_chunks(case.lengths, 1), at_random(case.lengths, seed=2)):
        assert (verdict := compare(Replay(case, BACKEND).play(steps), want, "fp32")), verdict


def test_a_spec_names_everything_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"num_heads=0.*window=0.*ratio=1.*head_dim=8"):
        CsaSpec(num_heads=0, head_dim=8, scale=1.0, window=0, rope=MAIN, kv_dtype=torch.float32, ratio=1)
    with pytest.raises(ValueError, match="ratio=0 has no entries"):
        CsaSpec(num_heads=1, head_dim=64, scale=1.0, window=4, rope=MAIN, kv_dtype=torch.float32, overlap=True)
    with pytest.raises(ValueError, match=r"indexer\.head_dim=1024"):
        CsaSpec(
            num_heads=1,
            head_dim=64,
            scale=1.0,
            window=4,
            rope=MAIN,
            kv_dtype=torch.float32,
            ratio=4,
            indexer=IndexerSpec(num_heads=4, head_dim=1024, topk=8),
        )
