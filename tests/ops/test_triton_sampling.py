"""Choice and scores of tokens by kernels: the very tokens that the sampler chooses by sorting."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.ops.logprobs import triton as logprobs_triton
from allotrope.ops.logprobs.reference import gather_logprobs
from allotrope.ops.sampling import reference
from allotrope.ops.sampling import triton as sampling_triton
from allotrope.ops.sampling.spec import RandomRows, SamplingStep

VOCAB = 777


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several segments and chunks of a small vocabulary, and little room for candidates."""
    monkeypatch.setattr(sampling_triton, "SEGMENT", 256)
    monkeypatch.setattr(logprobs_triton, "SEGMENT", 256)
    monkeypatch.setattr(sampling_triton, "ROOM", 128)
    monkeypatch.setattr(sampling_triton, "CHUNK", 64)


def _rows(
    rows: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: Sequence[int] | int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    seed: int = 0,
) -> RandomRows:
    """On the CPU; `_on_device` moves them."""
    count = len(rows)
    top_ks = tuple(top_k) if isinstance(top_k, Sequence) else (top_k,) * count

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count, 1), value, dtype=dtype)

    return RandomRows(
        rows=torch.tensor(rows),
        temperature=column(temperature, torch.float32),
        min_p=None if min_p is None else column(min_p, torch.float64),
        top_p=column(top_p, torch.float64),
        top_k=torch.tensor(top_ks)[:, None],
        uniform=torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),
        top_ks=top_ks,
    )


def _on_device(random: RandomRows | None) -> RandomRows | None:
    if random is None:
        return None
    moved = {name: value.to(DEVICE) for name, value in vars(random).items() if isinstance(value, torch.Tensor)}
    return RandomRows(**vars(random) | moved)


def _agree(logits: torch.Tensor, **groups: RandomRows) -> list[int]:
    """Both samplers' tokens, which are the same."""
    named = torch.cat([random.rows for random in groups.values()]) if groups else torch.tensor([], dtype=torch.int64)
    greedy = torch.tensor([i for i in range(len(logits)) if i not in named.tolist()], dtype=torch.int64)
    want = reference.choose(logits, SamplingStep(greedy=greedy, **groups))
    moved = {name: _on_device(random) for name, random in groups.items()}
    got = sampling_triton.choose(logits.to(DEVICE), SamplingStep(greedy=greedy, **moved)).cpu()
    assert got.tolist() == want.tolist()
    return got.tolist()


def _logits(rows: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def test_the_best_token_and_the_lowest_of_equals() -> None:
    logits = _logits(4)
    logits[1, [5, 700]] = 50.0
    logits[2] = -3.0
    # Minus zero is zero.
    logits[3] = -1.0
    logits[3, 100], logits[3, 99] = 0.0, -0.0
    assert _agree(logits)[1:] == [5, 0, 99]


def test_rows_without_a_distribution_have_no_token() -> None:
    logits = _logits(8)
    for row, wrong in enumerate((torch.nan, -torch.nan, torch.inf)):
        logits[row, 600] = wrong
        logits[4 + row, 600] = wrong
    logits[3] = logits[7] = -torch.inf
    found = _agree(logits, untruncated=_rows([4, 5]), truncated=_rows([6, 7], top_k=3))
    assert found == [-1] * 8


@pytest.mark.parametrize("temperature", [1e-30, 0.05, 1.0, 40.0])
def test_draws_from_all_tokens(temperature: float) -> None:
    logits = _logits(6)
    logits[3, 100:] = -torch.inf
    _agree(logits, untruncated=_rows([0, 1, 3, 5], temperature=temperature))


def test_draws_above_a_least_probability() -> None:
    logits = _logits(4)
    _agree(logits, untruncated=_rows([0, 2], min_p=0.05), truncated=_rows([1, 3], top_p=0.95, min_p=0.2))


@pytest.mark.parametrize("top_p", [1.0, 0.9, 1e-9])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_draws_from_the_first_k(temperature: float, top_p: float) -> None:
    """Of fewer tokens than there are, of as many, and of more than weigh anything."""
    top_k = (1, 2, 50, VOCAB - 1, VOCAB)
    rows = range(5) if top_p == 0.9 else range(2, 4)
    top_k = [top_k[row] for row in rows]
    _agree(_logits(5), truncated=_rows(rows, top_k=top_k, top_p=top_p, temperature=temperature))


@pytest.mark.parametrize(
    ("spread", "top_p"), [(0.1, 0.5), (0.1, 0.9999), (1.0, 0.95), (3.0, 0.1), (6.0, 0.9999)], ids=str
)
def test_draws_from_a_nucleus(spread: float, top_p: float) -> None:
    """A flat row's nucleus has more candidates than there is room for."""
    _agree(_logits(2, spread), truncated=_rows(range(2), top_p=top_p))


def test_equal_logits_are_cut_by_id() -> None:
    """Few distinct logits, so that every cut falls among equals."""
    logits = _logits(6, 2.0).round()
    _agree(logits, truncated=_rows(range(6), top_k=(3, 17, 100, 0, 0, 250), top_p=0.7))
    flat = torch.zeros(2, VOCAB)
    assert all(token < 5 for token in _agree(flat, truncated=_rows([0, 1], top_k=5)))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = _logits(3)
    together = _agree(logits, truncated=_rows([0, 1, 2], top_p=0.8))
    step = _rows([0], top_p=0.8)
    for row in (0, 2):
        uniform = _rows([0, 1, 2], top_p=0.8).uniform[row : row + 1]
        alone = RandomRows(**vars(step) | {"uniform": uniform})
        assert _agree(logits[row : row + 1], truncated=alone) == [together[row]]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_scores(count: int) -> None:
    logits = _logits(5)
    logits[1] = logits[1].round()
    logits[2, 400:] = -torch.inf
    logits[3, 3], logits[4, 3] = torch.nan, torch.inf
    ids = torch.tensor([5, 130, 399, 7, 8])
    want = gather_logprobs(logits, ids, count)
    got = logprobs_triton.gather_logprobs(logits.to(DEVICE), ids.to(DEVICE), count)
    assert torch.allclose(got.logprobs.cpu(), want.logprobs, rtol=0, atol=1e-5, equal_nan=True)
    assert got.ranks.tolist()[:3] == want.ranks.tolist()[:3]
    assert got.top_ids.tolist()[:3] == want.top_ids.tolist()[:3]
    assert torch.allclose(got.top_logprobs.cpu()[:3], want.top_logprobs[:3], rtol=0, atol=1e-5)
    assert got.top_logprobs[3:].isnan().all()
