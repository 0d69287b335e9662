"""Our kernels of sparse latent attention against the reference: on the GPU, or in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, BatchTensors, PageIndex
from allotrope.attention.cache_layout import pool_bytes, views
from allotrope.attention.check import Case, Inputs, cases, compare
from allotrope.attention.dsa import DSA, IndexerSpec, indexer, triton, triton_index, triton_topk
from allotrope.attention.dsa import cases as small
from allotrope.attention.mla.triton_decode import Queries
from allotrope.attention.replay import Replay, Step, alone, at_random, whole
from allotrope.attention.topk import top_indices
from allotrope.kernels.chip import CHIPS, chip_of

REFERENCE = DSA.backends[-1]
TRITON = AttentionBackend("triton", lambda spec, chip: [], plan=triton.build_plan, run=triton.run, in_graphs=True)
FP8 = torch.float8_e4m3fn
GPU = torch.cuda.is_available()
CHIP = chip_of(torch.device(DEVICE))


class Keeping(Replay):
    """Also keeps the picks of every step, by sequence."""

    def __init__(self, case: Case, backend: AttentionBackend) -> None:
        self.topk_indices: list[list[torch.Tensor]] = [[] for _ in case.lengths]
        super().__init__(case, dataclasses.replace(backend, run=self.run), DEVICE)
        self.backend_run = backend.run

    def run(self, *args: object, **tensors: torch.Tensor) -> torch.Tensor:
        out, self.last = self.backend_run(*args, **tensors)
        return out

    def step(self, step: Step) -> torch.Tensor:
        out = super().step(step)
        for (i, _), part in zip(step, self.last.split([n for _, n in step]), strict=True):
            self.topk_indices[i].extend(row[row >= 0] for row in part.unbind())
        return out


FP32 = list(cases("dsa")) if GPU else ["picking", "picking_released", "picking_all", "reusing"]
RUNS = [(name, torch.float32) for name in FP32] + [("reusing_wide_values", torch.bfloat16)]
if GPU:
    RUNS += [("picking_all", torch.bfloat16), ("reusing", torch.bfloat16), ("reusing", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_any_schedule_gives_the_reference(name: str, dtype: torch.dtype) -> None:
    case = cases("dsa", dtype)[name]
    if not GPU and case.spec.indexer is not None:
        case = dataclasses.replace(case, lengths=(7, 9, 40))
    wanted = Keeping(case, REFERENCE)
    if dtype != torch.float32:
        kept = dataclasses.replace(case.spec.mla, kv_dtype=torch.float32)
        wanted = Keeping(dataclasses.replace(case, spec=dataclasses.replace(case.spec, mla=kept)), REFERENCE)
        wanted.inputs.tokens.update({n: t.float() for n, t in wanted.inputs.tokens.items() if n != "topk_indices"})
    want = wanted.play(alone(case.lengths))
    for steps in [whole(case.lengths), at_random(case.lengths, 1)][: 2 if GPU else 1]:
        replay = Keeping(case, TRITON)
        found = compare(replay.play(steps), want, case.kind)
        assert found, f"{found}, steps {steps}"
        for got, exact in zip(replay.topk_indices, wanted.topk_indices, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))


def whole_numbers(spec: object, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Small whole numbers in the indexer, and many equal scores: sums are exact in whatever order they are made."""
    inputs = small.draw(spec, tokens, generator, dtype)  # type: ignore[arg-type]
    for name, most in (("index_q", 3), ("index_k", 3), ("index_weights", 4)):
        given = inputs.tokens[name]
        inputs.tokens[name] = torch.randint(-most, most + 1, given.shape, generator=generator).to(dtype)
    return inputs


@pytest.mark.parametrize("key_format", ["plain", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_topk_is_the_references_bit_for_bit(key_format: str, dtype: torch.dtype) -> None:
    """Prompts, chunks and decodes, where d^-1/2 is a power of two; scaled keys of whole numbers are exact as well."""
    case = cases("dsa", dtype)["picking"]
    spec = dataclasses.replace(case.spec, indexer=IndexerSpec(num_heads=8, head_dim=64, key_format=key_format))
    case = dataclasses.replace(case, spec=spec, draw=whole_numbers, lengths=(7, 9, 40) if not GPU else (9, 70, 300))
    steps: list[Step] = [[(0, 5), (1, 6), (2, 30)], [(2, 1), (0, 2), (1, 2)], [(i, 1) for i in (1, 2)]]
    replays = [Keeping(case, backend) for backend in (REFERENCE, TRITON)]
    for step in steps:
        for replay in replays:
            replay.step(step)
    for want, got in zip(*(replay.topk_indices for replay in replays), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_format", ["plain", "scaled"])
def test_scores(key_format: str, dtype: torch.dtype) -> None:
    heads, dim, page_size = (64, 128, 16) if GPU else (5, 24, 4)
    lens = [1, 40, 0, 131]
    spec = IndexerSpec(num_heads=heads, head_dim=dim, key_format=key_format)
    case = cases("dsa", dtype)["picking"].spec
    layout = dataclasses.replace(case, indexer=spec).caches()["index"]
    generator = torch.Generator().manual_seed(2)
    pages = 1 + 4 * -(-max(lens) // page_size)
    pools = views(
        layout, page_size, pages, torch.full((pool_bytes(layout, page_size, pages),), 0xFF, dtype=torch.uint8)
    )
    pools = {name: view.to(DEVICE) for name, view in pools.items()}
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(4, -1)
    keys = torch.randn(4, max(lens), dim, generator=generator).to(dtype)
    for b, n in enumerate(lens):
        slots = [int(table[b, p // page_size]) * page_size + p % page_size for p in range(n)]
        triton_index.store(spec, pools, torch.tensor(slots, dtype=torch.int64, device=DEVICE), keys[b, :n].to(DEVICE))
    q = torch.randn(4, heads, dim, generator=generator).to(dtype)
    weights = torch.randn(4, heads, generator=generator)
    paged = PageIndex(page_size, table.to(DEVICE), torch.empty(0))
    seen = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    queries = Queries(torch.arange(4, device=DEVICE), seen, 200)
    got = triton_index.score_decodes(spec, pools, paged, queries, 30, q.to(DEVICE), weights.to(DEVICE)).cpu()
    stored = indexer.encode_keys(spec, dtype, keys)
    k = stored["k"].float() * stored.get("factor", torch.ones(1))
    wide = q.float()
    if key_format == "scaled":
        codes, factor = indexer.scaled(wide)
        wide = codes.float() * factor
    want = torch.einsum("bh,bhs->bs", weights, torch.einsum("bhd,bsd->bhs", wide, k).relu()) * dim**-0.5
    # FP8 products are summed up by the chip with fewer digits than fp32 has.
    limit = 1e-3 if GPU and key_format == "scaled" else 2e-6
    for b in (1, 3):
        error = (got[b, : lens[b]] - want[b, : lens[b]]).square().mean().sqrt()
        assert error <= limit * want[b, : lens[b]].square().mean().sqrt()


# Rows of one block, of several, and of blocks whose picks fill several again.
@pytest.mark.parametrize(
    ("width", "topk"), [(60, 8), (300, 20), (1500, 16)] if not GPU else [(8192, 2048), (131072, 2048)]
)
def test_top_rows_are_exact(width: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(5, width, generator=generator)
    scores[1] = torch.randint(-2, 3, (width,), generator=generator).float() * 0.0 ** (torch.arange(width) % 2)
    scores[2, ::3] = -0.0
    scores[2, 1::3] = 0.0
    seen = torch.tensor([width, width - 1, width, topk, 3], dtype=torch.int32)
    scores[torch.arange(width) >= seen[:, None]] = torch.nan
    topk_indices = torch.full((9, topk), 77, dtype=torch.int64, device=DEVICE)
    rows = torch.tensor([4, 0, 8, 2, 3])
    triton_topk.top_rows(scores.to(DEVICE), seen.to(DEVICE), topk, CHIP, topk_indices, rows.to(DEVICE))
    want = top_indices(scores.masked_fill(torch.arange(width) >= seen[:, None], -torch.inf), topk)
    assert torch.equal(topk_indices.cpu()[rows], want)
    assert (topk_indices.cpu()[[1, 5, 6, 7]] == 77).all()


def test_a_captured_step_scores_by_what_the_device_knows() -> None:
    """Bounds far above, a request that fills up, one that sees few rows, and one that picks."""
    case = dataclasses.replace(cases("dsa")["picking"], lengths=(48, 48))
    spec, replay = case.spec, Replay(case, REFERENCE, DEVICE)
    replay.step([(0, 40), (1, 5)])
    step: Step = [(0, 1), (1, 1)]
    tables = {name: torch.tensor([[*held[0]], [*held[1], -1, -1]], device=DEVICE) for name, held in replay.held.items()}
    tokens = {name: torch.cat((t[:1], t[:1], t[1:])) for name, t in replay.tokens(step).items()}
    pools = {name: {field: view.clone() for field, view in own.items()} for name, own in replay.pools.items()}
    want = replay.step(step)
    index = {}
    for name, table in tables.items():
        slots = torch.tensor([int(table[0, 2]) * 16 + 8, -1, int(table[1, 0]) * 16 + 5], device=DEVICE)
        wide = torch.full((3, 32), -1, device=DEVICE)
        wide[0, :3], wide[2, :3] = table[0], table[1]
        index[name] = PageIndex(16, wide, slots)
    given = BatchTensors(
        torch.tensor([41, 0, 6], dtype=torch.int32, device=DEVICE), torch.arange(4, dtype=torch.int32, device=DEVICE),
        torch.tensor([40, 0, 5], device=DEVICE), torch.arange(3, device=DEVICE),
    )  # fmt: skip
    batch = BatchLayout((1,) * 3, (512,) * 3, torch.device(DEVICE), given)
    out, topk_indices = triton.run(
        spec, triton.build_plan(spec, batch, index), pools, DSA.ready_inputs(spec, **tokens, **replay.layer)
    )
    assert not out[1].any()
    assert (topk_indices[1] == -1).all()
    assert topk_indices[2].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert (found := compare(out[[0, 2]], want, "fp32")), found


def test_missing_indices_are_read_as_nothing() -> None:
    """-1 in the list of a query that picks: that row is left out, and no row stands in for it."""
    case = cases("dsa")["reusing"]

    def with_gaps(*_: object) -> Inputs:
        inputs = small.draw(case.spec, sum(case.lengths), torch.Generator().manual_seed(3), torch.float32)
        topk_indices = inputs.tokens["topk_indices"]
        topk_indices[torch.rand(topk_indices.shape, generator=torch.Generator().manual_seed(4)) < 0.5] = -1
        return Inputs(inputs.tokens, inputs.layer)

    holed = dataclasses.replace(case, draw=with_gaps)
    found, want = (Replay(holed, backend, DEVICE).play(whole(case.lengths)) for backend in (TRITON, REFERENCE))
    assert (same := compare(found, want, "fp32")), same


@pytest.mark.skipif(not GPU, reason="64 heads of the released sizes: minutes in the interpreter")
@pytest.mark.parametrize("row_format", ["plain", "scaled"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_released_sizes(heads: int, row_format: str) -> None:
    dtype = torch.bfloat16
    case = cases("dsa", dtype)["picking_released"]
    kv_dtype = FP8 if row_format == "scaled" else dtype
    latent = dataclasses.replace(case.spec.mla, num_heads=heads, row_format=row_format, kv_dtype=kv_dtype)
    spec = dataclasses.replace(case.spec, mla=latent, topk=200)
    spec = dataclasses.replace(spec, indexer=IndexerSpec(num_heads=64, head_dim=64))
    case = dataclasses.replace(case, spec=spec, draw=whole_numbers, lengths=(150, 300, 1000))
    steps: list[Step] = [[(0, 149), (1, 290), (2, 990)], [(0, 1), (1, 1), (2, 1)], [(1, 1), (2, 9)]]
    found, want = (Replay(case, backend, DEVICE) for backend in (TRITON, REFERENCE))
    for step in steps:
        same = compare(found.step(step), want.step(step).float(), "bf16")
        assert same, f"{same}, step {step}"


def test_what_does_not_fit_is_refused_with_its_value() -> None:
    spec = cases("dsa")["picking"].spec
    wide = dataclasses.replace(spec, topk=5000, mla=dataclasses.replace(spec.mla, latent_dim=1024))
    reasons = DSA.backends[0].rejects(wide, CHIPS["sm_90"])
    assert "topk=5000 (needs at most 4096)" in reasons
    assert "latent_dim=1024 (needs at most 512)" in reasons
