"""Our kernels of latent attention against the reference: on the GPU, or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, BatchTensors, PageIndex, index_pages
from allotrope.attention.cache_layout import pool_bytes, row_bytes, views
from allotrope.attention.check import Case, Inputs, cases, compare
from allotrope.attention.mla import (
    MLA,
    MlaSpec,
    rows,
    triton,
    triton_cudnn,
    triton_decode,
    triton_prefill,
    triton_store,
)
from allotrope.attention.mla.cases import draw
from allotrope.attention.mla.plan import Span
from allotrope.attention.replay import Replay, Step, alone, at_random, whole
from allotrope.kernels.backend import choose
from allotrope.kernels.chip import CHIPS
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.kernels.triton_version import triton_reasons

REFERENCE = MLA.backends[-1]
TRITON = AttentionBackend("triton", lambda spec, chip: [], plan=triton.build_plan, run=triton.run, in_graphs=True)
FP8 = torch.float8_e4m3fn
GPU = torch.cuda.is_available()
# The interpreter takes seconds for what the GPU does at once.
SHORT = (1, 16, 17, 40)
LENGTHS = None if GPU else SHORT


def taken(name: str, dtype: torch.dtype, **spec: object) -> Case:
    case = cases("mla", dtype)[name]
    return dataclasses.replace(case, lengths=LENGTHS or case.lengths, spec=dataclasses.replace(case.spec, **spec))


def reference(case: Case) -> torch.Tensor:
    """What the case's sequences give in fp32, inputs and cached rows being of the case's types."""
    wide = case.spec.kv_dtype if case.spec.kv_dtype == FP8 else torch.float32
    replay = Replay(dataclasses.replace(case, spec=dataclasses.replace(case.spec, kv_dtype=wide)), REFERENCE, DEVICE)
    replay.inputs.tokens.update({name: t.float() for name, t in replay.inputs.tokens.items()})
    return replay.play(alone(case.lengths))


RUNS = [(name, torch.float32) for name in cases("mla")] + [("released", torch.bfloat16), ("uneven", torch.float16)]
if GPU:
    RUNS = [(name, dtype) for name in cases("mla") for dtype in (torch.float32, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_any_schedule_gives_the_reference(name: str, dtype: torch.dtype) -> None:
    case = taken(name, dtype)
    want = reference(case)
    schedules = [whole(case.lengths), at_random(case.lengths, 1)] if GPU else [at_random(case.lengths, 3)]
    for steps in schedules:
        assert (found := compare(Replay(case, TRITON, DEVICE).play(steps), want, case.kind)), f"{found}, steps {steps}"


# Heads that fill several programs, part of one, and the released numbers of a rank.
@pytest.mark.parametrize("heads", [16, 20, 64, 72, 128] if GPU else [20, 72])
def test_many_heads(heads: int) -> None:
    dtype = torch.bfloat16 if GPU else torch.float32
    lengths = (3, 129, 200, 700) if GPU else (3, 19)
    case = dataclasses.replace(taken("released" if GPU else "small", dtype, num_heads=heads), lengths=lengths)
    # All but the last token at once, then one by one: a prompt, and queries that are absorbed.
    steps: list[Step] = [[(i, n - 1) for i, n in enumerate(lengths)], [(i, 1) for i in range(len(lengths))]]
    found = compare(Replay(case, TRITON, DEVICE).play(steps), reference(case), case.kind)
    assert found, found


def rounded(spec: MlaSpec, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Rows that FP8 holds exactly, so that no code depends on how a division is rounded."""
    inputs = draw(spec, tokens, generator, dtype)
    for name in ("c", "k_pe"):
        x = inputs.tokens[name]
        inputs.tokens[name] = (x * 8).to(FP8).to(dtype) / 8
        # The largest number of every 128 makes their factor a power of two.
        inputs.tokens[name][:, ::128] = 14.0
    return inputs


@pytest.mark.parametrize(
    ("name", "row_format", "kv_scale"),
    [("released", "scaled", 1.0), ("small", "plain", 0.25), ("released", "plain", 1.0)],
)
def test_rows_in_fp8(name: str, row_format: str, kv_scale: float) -> None:
    """Against the reference over rows quantised alike: what remains is the error of the type of the products."""
    case = taken(name, torch.bfloat16, kv_dtype=FP8, row_format=row_format)
    case = dataclasses.replace(case, draw=rounded)

    def scaled(backend: AttentionBackend) -> AttentionBackend:
        def run(spec: Any, plan: Any, caches: Any, inputs: Any) -> torch.Tensor:
            return backend.run(spec, plan, caches, dataclasses.replace(inputs, kv_scale=kv_scale))

        return dataclasses.replace(backend, run=run)

    wide = Replay(case, scaled(REFERENCE), DEVICE)
    wide.inputs.tokens.update({name: t.float() for name, t in wide.inputs.tokens.items()})
    want = wide.play(alone(case.lengths))
    assert (found := compare(Replay(case, scaled(TRITON), DEVICE).play(at_random(case.lengths, 3)), want, "bf16")), (
        found
    )


def test_scaled_rows_are_the_bytes_of_the_reference() -> None:
    spec = dataclasses.replace(cases("mla")["released"].spec, kv_dtype=FP8, row_format="scaled")
    layout = spec.caches()["latent"]
    assert row_bytes(layout) == 656
    generator = torch.Generator().manual_seed(0)
    c, k_pe = torch.randn(5, 512, generator=generator), torch.randn(5, 64, generator=generator)
    c[1, 128:256] = 0.0
    c[2] *= 1e4
    pools = views(layout, 4, 3, torch.zeros(pool_bytes(layout, 4, 3), dtype=torch.uint8, device=DEVICE))
    slots = torch.tensor([4, 11, -1, 5, 8], device=DEVICE)
    triton_store.store(spec, pools, slots, c.to(DEVICE), k_pe.to(DEVICE), 1.0)
    want = rows.encode("scaled", FP8, c, k_pe, 1.0)["row"]
    got = pools["row"].flatten(0, 1).cpu()
    # A code next to the other is as near, where a division ends in the middle.
    codes = (got[[4, 11, 5, 8], :512].int() - want[[0, 1, 3, 4], :512].int()).abs()
    assert codes.max() <= 1
    assert (codes != 0).float().mean() < 1e-3
    factors = [r[:, 512:528].contiguous().view(torch.float32) for r in (got[[4, 11, 5, 8]], want[[0, 1, 3, 4]])]
    torch.testing.assert_close(*factors, rtol=1e-6, atol=0)
    assert torch.equal(got[[4, 11, 5, 8], 528:], want[[0, 1, 3, 4], 528:])
    assert not got[[0, 1, 2, 3, 6, 7, 9, 10]].any()


@pytest.mark.parametrize("page_size", [4, 32])
def test_pages_of_any_size(page_size: int) -> None:
    case = dataclasses.replace(taken("small", torch.float32), page_size=page_size)
    found = compare(Replay(case, TRITON, DEVICE).play(at_random(case.lengths, 3)), reference(case), "fp32")
    assert found, found


def test_keys_of_a_prompt_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little scratch that every request takes several slices, and slices of several requests share a chunk."""
    case = dataclasses.replace(taken("released", torch.float32), lengths=(150, 30, 210))
    size = case.spec.num_heads * (case.spec.nope_dim + case.spec.v_head_dim) * 4
    plan = triton_prefill.plan_decompressed
    monkeypatch.setattr(triton, "plan_decompressed", lambda *given: plan(*given, scratch=64 * size))
    steps: list[Step] = [[(0, 100), (2, 90)], [(1, 30), (0, 50), (2, 120)]]
    found = compare(Replay(case, TRITON, DEVICE).play(steps), reference(case), "fp32")
    assert found, found


def test_scratch_of_a_prompt_does_not_grow_with_the_context() -> None:
    spec = cases("mla")["released"].spec
    made = triton_prefill.plan_decompressed(
        spec, [Span(0, 0, 5000, 300), Span(1, 300, 0, 200)], torch.device("cpu"), 1 << 22
    )
    most = (1 << 22) // (spec.num_heads * 256 * 4)
    assert len(made.chunks) > 5
    assert all(chunk.rows <= most for chunk in made.chunks)


def test_prompts_of_one_padded_length_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN runs them: four that are padded alike together, while one with context and a short one go the usual
    way."""
    monkeypatch.setattr(triton_cudnn, "MIN_TOKENS", 32)
    monkeypatch.setattr(triton_cudnn, "TOKEN_MULTIPLE", 32)
    if not GPU:
        attention = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(triton_cudnn, "supports", lambda spec, device: True)
        monkeypatch.setattr(
            triton_cudnn, "_causal_attention", lambda q, k, v, scale: attention(q, k, v, is_causal=True, scale=scale)
        )
    dtype = torch.bfloat16 if GPU else torch.float32
    case = dataclasses.replace(taken("released", dtype), lengths=(40, 50, 33, 64, 80, 20))
    sizes = []
    batches_of = triton_cudnn.batches_of

    def seen(*given: Any) -> list[triton_cudnn.CudnnBatch]:
        found = list(batches_of(*given))
        sizes.append([(len(batch.prompts), batch.length, batch.padded) for batch in found])
        return found

    monkeypatch.setattr(triton_cudnn, "batches_of", seen)
    steps: list[Step] = [[(4, 45)], [(0, 40), (5, 20), (1, 50), (4, 35), (2, 33), (3, 64)]]
    found = compare(Replay(case, TRITON, DEVICE).play(steps), reference(case), case.kind)
    assert found, found
    assert sizes[-1] == [(4, 64, True)] and sizes[0] == [(1, 64, True)]
    spans = [Span(i, 0, 0, tokens) for i, tokens in enumerate((64, 50, 64, 96, 33))]
    most = list(batches_of(spans, 256, torch.device("cpu")))
    assert [(len(batch.prompts), batch.length) for batch in most] == [(4, 64), (1, 96)]
    fewer = list(batches_of(spans, 192, torch.device("cpu")))
    assert [(len(batch.prompts), batch.length) for batch in fewer] == [(2, 64), (2, 64), (1, 96)]


def test_requests_that_fill_up_a_captured_size_touch_nothing() -> None:
    """Lengths on the device, bounds on the host: as a captured step has them."""
    case = dataclasses.replace(taken("small", torch.float32), lengths=(110,))
    spec, inputs = case.spec, case.inputs()
    layout = spec.caches()["latent"]
    pools = {
        "latent": views(layout, 16, 9, torch.full((pool_bytes(layout, 16, 9),), 0xFF, dtype=torch.uint8).to(DEVICE))
    }
    for view in pools["latent"].values():
        view[0] = 0
    lens, bound = [40, 0, 17, 0], 128
    table = torch.tensor([[3, 5, 8, -1], [-1] * 4, [2, 7, -1, -1], [-1] * 4], device=DEVICE)
    tokens = {name: t.to(DEVICE) for name, t in inputs.tokens.items()}
    layer = {name: t.to(DEVICE) for name, t in inputs.layer.items()}
    stored = {0: slice(0, 39), 2: slice(39, 55)}
    for request, own in stored.items():
        slots = torch.tensor([int(table[request, p // 16]) * 16 + p % 16 for p in range(own.stop - own.start)])
        triton_store.store(spec, pools["latent"], slots.to(DEVICE), tokens["c"][own], tokens["k_pe"][own], 1.0)
    before = {name: view.clone() for name, view in pools["latent"].items()}
    slots = torch.tensor([8 * 16 + 7, -1, 7 * 16, -1], device=DEVICE)
    given = BatchTensors(
        torch.tensor(lens, dtype=torch.int32, device=DEVICE), torch.arange(5, dtype=torch.int32, device=DEVICE),
        torch.tensor([39, 0, 16, 0], device=DEVICE), torch.arange(4, device=DEVICE),
    )  # fmt: skip
    batch = BatchLayout((1,) * 4, (bound,) * 4, torch.device(DEVICE), given)
    new = {name: t[100:104] for name, t in tokens.items()}
    out = triton.run(
        spec,
        triton.build_plan(spec, batch, {"latent": PageIndex(16, table, slots)}),
        pools,
        MLA.ready_inputs(spec, **new, **layer),
    )
    assert not out[[1, 3]].any()
    changed = {
        name: (view != before[name]) & ~(view.isnan() & before[name].isnan()) for name, view in pools["latent"].items()
    }
    for differs in changed.values():
        assert set(differs.flatten(0, 1).any(1).nonzero().flatten().tolist()) == {8 * 16 + 7, 7 * 16}
    plain = BatchLayout((1, 1), (40, 17), torch.device(DEVICE))
    index = {"latent": PageIndex(16, table[[0, 2]], torch.full((2,), -1, device=DEVICE))}
    pair = {name: t[[0, 2]] for name, t in new.items()}
    want = REFERENCE.run(spec, REFERENCE.plan(spec, plain, index), pools, MLA.ready_inputs(spec, **pair, **layer))
    assert (found := compare(out[[0, 2]], want, "fp32")), found


def test_strided_inputs_and_pools_of_another_host() -> None:
    """Queries that are parts of a larger tensor, and rows of both fields side by side in one."""
    case = taken("uneven", torch.float32)
    spec, inputs = case.spec, case.inputs()
    n, tokens = 40, {name: t[:40].to(DEVICE) for name, t in inputs.tokens.items()}
    layer = {name: t.to(DEVICE) for name, t in inputs.layer.items()}
    rows_of = torch.full((4, 16, spec.latent_dim + spec.rope_dim), torch.nan, device=DEVICE)
    pools = {"latent": {"c": rows_of[..., : spec.latent_dim], "k_pe": rows_of[..., spec.latent_dim :]}}
    q = torch.cat((tokens["q_nope"], tokens["q_pe"]), dim=-1)
    row = torch.cat((tokens["k_pe"], tokens["c"]), dim=-1)
    strided = {
        "q_nope": q[..., : spec.nope_dim], "q_pe": q[..., spec.nope_dim :],
        "k_pe": row[:, : spec.rope_dim], "c": row[:, spec.rope_dim :],
    }  # fmt: skip
    batch = BatchLayout((n,), (n,), torch.device(DEVICE))
    index = {"latent": index_pages(batch, 16, [[2, 1, 3]])}
    got = triton.store_and_attend(spec, triton.build_plan(spec, batch, index), pools, **strided, **layer)
    layout = spec.caches()["latent"]
    own = {"latent": views(layout, 16, 4, torch.zeros(pool_bytes(layout, 16, 4), dtype=torch.uint8, device=DEVICE))}
    want = REFERENCE.run(spec, REFERENCE.plan(spec, batch, index), own, MLA.ready_inputs(spec, **tokens, **layer))
    assert (found := compare(got, want, "fp32")), found


@pytest.mark.parametrize(("queries", "groups", "steps", "slots"), [(64, 2, 64, 132), (4, 2, 64, 132), (1, 1, 2, 132)])
def test_splits_fill_the_chip_and_no_more(queries: int, groups: int, steps: int, slots: int) -> None:
    splits = triton_decode.split_count(queries, groups, steps, slots)
    assert 1 <= splits <= max(1, steps // 2)
    assert queries * groups * splits <= 2 * slots


def test_what_does_not_fit_is_refused_with_its_value() -> None:
    spec = dataclasses.replace(cases("mla")["small"].spec, latent_dim=1024)
    reasons = MLA.backends[0].rejects(spec, CHIPS["sm_90"])
    assert "latent_dim=1024 (needs at most 512)" in reasons
    assert choose(MLA, spec, CPU_CHIP).backend.name != "triton"
    assert triton_reasons(CPU_CHIP)
