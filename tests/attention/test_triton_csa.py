"""The kernels of compressed sparse attention against the reference, on scattered, recycled and poisoned pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from device_under_test import DEVICE

from allotrope.attention.batch import BatchLayout, BatchTensors, PageIndex
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.csa import CSA, CsaSpec, IndexerSpec
from allotrope.attention.csa.triton import CsaTritonPlan, split_count
from allotrope.attention.csa.triton_index import resolve
from allotrope.attention.csa.triton_plan import make_lists
from allotrope.attention.replay import Replay, Step, at_random, in_order, whole
from allotrope.kernels.chip import CHIPS

TRITON, REFERENCE = CSA.backends[0], CSA.backends[-1]
FP8 = torch.float8_e4m3fn
# (case, dtype, sequences): around entries, the window and where the indexer starts to choose.
SELECTED = [
    ("window_only", torch.float32, (1, 17)),
    ("window_only", torch.bfloat16, (3, 18)),
    ("chosen", torch.float32, (3, 5, 39)),
    ("chosen_one", torch.float32, (2, 9)),
    ("chosen_without_overlap", torch.float32, (37,)),
    ("all_overlapping", torch.float16, (7, 8, 25)),
    ("all_of_128", torch.bfloat16, (2, 130)),
    ("wide", torch.float32, (5, 10)),
    ("narrow_window", torch.float32, (4, 13)),
]


def case_of(name: str, dtype: torch.dtype, lengths: tuple[int, ...], **changes: Any) -> Case:
    case = cases("csa", dtype)[name]
    return dataclasses.replace(case, lengths=lengths, spec=dataclasses.replace(case.spec, **changes))


def prefill_then_decode(lengths: tuple[int, ...]) -> list[Step]:
    """All but the last two tokens of each, then one by one, beside prefills of sequences that start later."""
    heads = in_order((i, n - 2) for i, n in enumerate(lengths) if n > 3)
    rest = [(i, n) for i, n in enumerate(lengths) if n <= 3]
    one = [(i, 1) for i, n in enumerate(lengths) if n > 3]
    return [step for step in (heads, in_order([*one, *rest]), one) if step]


@pytest.mark.parametrize(("name", "dtype", "lengths"), SELECTED)
def test_equals_the_reference(name: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    case = case_of(name, dtype, lengths)
    steps = prefill_then_decode(lengths)
    want = Replay(case, REFERENCE).play(steps)
    got = Replay(case, TRITON, device=DEVICE).play(steps).cpu()
    assert (found := compare(got, want, case.kind)), found


@pytest.mark.parametrize(("heads", "parts"), [(4, 1), (40, 1), (64, 1), (128, 1), (40, 2), (128, 2)])
def test_heads_beyond_one_program(heads: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs own 16 heads in the interpreter, 64 on a GPU: each head has its own queries and sink."""
    monkeypatch.setattr("allotrope.attention.csa.triton.split_count", lambda *sizes: parts)
    case = case_of("all_overlapping", torch.float32, (9,), num_heads=heads, head_dim=32)
    steps = [[(0, 8)], [(0, 1)]]
    want = Replay(case, REFERENCE).play(steps)
    got = Replay(case, TRITON, device=DEVICE).play(steps).cpu()
    assert (found := compare(got, want, "fp32")), found


@pytest.mark.parametrize("topk", [1, 5])
def test_lists_are_filled_up_to_sixteen_bytes(topk: int) -> None:
    """Lists of every step begin at multiples of 16 bytes, whatever their lengths, and name nothing behind the last
    row."""
    case = case_of("chosen", torch.float32, (27,), indexer=IndexerSpec(num_heads=2, head_dim=16, topk=topk), window=5)
    replay = Replay(case, TRITON, device=DEVICE)
    replay.step([(0, 26)])
    plans: list[CsaTritonPlan] = []
    make = replay.plan
    replay.plan = lambda batch, index: plans.append(make(batch, index)) or plans[-1]  # type: ignore[method-assign,func-returns-value]
    replay.step([(0, 1)])
    (plan,) = plans
    topk_indices = torch.arange(topk, device=DEVICE)[None]
    entries = plan.paged["compressed"]
    rows = resolve(entries, entries.page_size // case.spec.ratio, plan.tensors.request_of_token, topk_indices)
    whole_plan = make_lists(case.spec, plan.tensors, plan.paged["window"], entries, 27, listed=True)
    assert whole_plan.entry_list is not None
    for lists, used in ((plan.lists.window_list, 5), (whole_plan.entry_list, 6), (rows, topk)):
        assert lists.stride(0) * lists.element_size() % 16 == 0
        assert (lists[:, :used] >= 0).all()
        assert (lists[:, used:] == -1).all()


@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize(("name", "lengths"), [("window_only", (3, 18)), ("chosen", (5, 39)), ("all_of_128", (2, 130))])
def test_lists_in_parts(name: str, lengths: tuple[int, ...], parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are tiles, or more, so that some are empty."""
    monkeypatch.setattr("allotrope.attention.csa.triton.split_count", lambda *sizes: parts)
    case = case_of(name, torch.float32, lengths)
    want = Replay(case, REFERENCE).play(whole(lengths))
    got = Replay(case, TRITON, device=DEVICE).play(prefill_then_decode(lengths)).cpu()
    assert (found := compare(got, want, case.kind)), found


def test_few_programs_share_lists() -> None:
    assert split_count(64, 10, 132) == 2
    assert split_count(4, 10, 132) == 10
    assert split_count(8192, 10, 132) == split_count(64, 1, 132) == 1


def test_any_schedule() -> None:
    case = case_of("chosen", torch.float32, (4, 19, 41))
    want = Replay(case, REFERENCE).play(whole(case.lengths))
    got = Replay(case, TRITON, device=DEVICE).play(at_random(case.lengths, 5, sizes=(1, 2, 3, 17))).cpu()
    assert (found := compare(got, want, "fp32")), found


@pytest.mark.parametrize("row_format", ["plain", "scaled"])
@pytest.mark.parametrize(
    ("name", "lengths"),
    [("all_overlapping", (9, 27)), ("window_only", (9, 27)), ("chosen", (9, 39)), ("all_of_128", (130,))],
)
def test_fp8_rows(name: str, lengths: tuple[int, ...], row_format: str) -> None:
    """Outputs differ by their own rounding only, and are near those of rows that are not FP8."""
    scale = {"kv_scale": 0.02} if row_format == "plain" else {}
    changes = {"kv_dtype": FP8, "row_format": row_format, "head_dim": 80}
    case = case_of(name, torch.bfloat16, lengths, **changes)
    steps = prefill_then_decode(case.lengths)
    played = []
    for backend, device in ((REFERENCE, "cpu"), (TRITON, DEVICE)):
        replay = Replay(case, backend, device=device)
        replay.layer |= scale  # type: ignore[arg-type]
        played.append((replay.play(steps).cpu(), replay.pools))
    (want, _), (got, _) = played
    assert (found := compare(got, want, "bf16")), found
    exact = Replay(case_of(name, torch.bfloat16, lengths, head_dim=80), REFERENCE).play(steps)
    error = (got.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt()
    assert 2e-3 < error < 6e-2


def test_scaled_rows_are_those_of_the_reference() -> None:
    case = case_of("all_overlapping", torch.bfloat16, (16,), kv_dtype=FP8, row_format="scaled", head_dim=144)
    for tokens in Replay(case, REFERENCE).inputs.tokens.values():
        assert len(tokens) == 16
    pools = []
    for backend, device in ((REFERENCE, "cpu"), (TRITON, DEVICE)):
        replay = Replay(case, backend, device=device)
        for name in ("kv", "kv_score"):
            replay.inputs.tokens[name][3:5] = 0
        replay.play(whole(case.lengths))
        pools.append(replay.pools)
    for cache in ("window", "compressed"):
        for field, bytes_ in pools[0][cache].items():
            # A pooled value may round to the neighbouring code where the order of a sum differs.
            same = (bytes_ == pools[1][cache][field].cpu()).float().mean()
            assert same > 0.999, (cache, field, same)


@pytest.mark.parametrize("name", ["chosen", "all_overlapping"])
def test_fillers_of_a_captured_size(name: str) -> None:
    """Requests of length 0 among decodes whose host lengths are bounds: zeros, nothing stored, neighbours unmoved."""
    case = case_of(name, torch.float32, (40, 39))
    replays = [Replay(case, TRITON, device=DEVICE) for _ in range(2)]
    for replay in replays:
        replay.step([(0, 39), (1, 38)])
    plain, padded = replays
    want = plain.step([(0, 1), (1, 1)])
    padded._take_pages(0, 40)
    padded._take_pages(1, 39)
    device = torch.device(DEVICE)
    made = BatchLayout((1, 1), (40, 39), device)
    index = {key: padded.index(key, made, [0, 1]) for key in padded.layouts}
    filled = {}
    for key, entry in index.items():
        assert isinstance(entry, PageIndex)
        table = torch.cat((entry.table, torch.full_like(entry.table, -1)))
        filled[key] = PageIndex(entry.page_size, table, torch.cat((entry.slots, torch.full_like(entry.slots, -1))))
    given = BatchTensors(
        torch.tensor([40, 39, 0, 0], dtype=torch.int32, device=device),
        torch.arange(5, dtype=torch.int32, device=device),
        torch.tensor([39, 38, 0, 0], device=device),
        torch.arange(4, device=device),
    )
    batch = BatchLayout((1,) * 4, (64,) * 4, device, given)
    before = {key: {f: t.clone() for f, t in fields.items()} for key, fields in padded.pools.items()}
    plan = TRITON.plan(case.spec, batch, filled)
    tokens = {key: torch.cat((t, torch.full_like(t, torch.nan))) for key, t in padded.tokens([(0, 1), (1, 1)]).items()}
    out = TRITON.run(case.spec, plan, padded.pools, CSA.ready_inputs(case.spec, **tokens, **padded.layer))
    assert not out[2:].any()
    assert (found := compare(out[:2].cpu(), want.cpu(), "fp32")), found
    for key, fields in padded.pools.items():
        for field, pool in fields.items():
            changed = ~((pool == before[key][field]) | (pool.isnan() & before[key][field].isnan()))
            assert int(changed.flatten(2).any(-1).sum()) <= 2, (key, field)
            assert not changed[0].any()


def test_queries_as_views_of_one_projection() -> None:
    case = case_of("chosen", torch.float32, (38,))
    plain, strided = (Replay(case, TRITON, device=DEVICE) for _ in range(2))
    taken = strided.tokens

    def views(step: Step) -> dict[str, torch.Tensor]:
        """Every input as the middle of rows twice as wide."""
        found = {}
        for name, t in taken(step).items():
            wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 8), torch.nan, device=t.device)
            wide[..., 4 : 4 + t.shape[-1]] = t
            found[name] = wide[..., 4 : 4 + t.shape[-1]]
        return found

    strided.tokens = views  # type: ignore[method-assign]
    assert torch.equal(plain.play(whole(case.lengths)), strided.play(whole(case.lengths)))


def test_refusals_name_the_value() -> None:
    spec = cases("csa")["window_only"].spec
    assert isinstance(spec, CsaSpec)
    spec = dataclasses.replace(spec, kv_dtype=torch.float64, rope=dataclasses.replace(spec.rope, interleaved=False))
    reasons = "; ".join(TRITON.rejects(spec, CHIPS["sm_90"]))
    assert "kv_dtype=torch.float64" in reasons
    assert "rope.interleaved=False" in reasons
