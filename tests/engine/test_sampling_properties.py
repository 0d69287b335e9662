"""The batched sampler against one written row by row, token by token, over random parameters and batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.engine.sampling_batch import RowSampling, SamplingBatch
from allotrope.kernels.backend import Chooser
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.ops.sampling.sampler import Sampler
from allotrope.ops.sampling.spec import Sampled, SamplingStep
from allotrope.request import SamplingParams

CPU = torch.device("cpu")
MASK = 2**64 - 1
# Where a decision hangs on less than this share of the mass, fp32 and fp64 may differ about it.
MARGIN = 1e-5


def sample(logits: torch.Tensor, step: SamplingStep) -> Sampled:
    """As an engine on a CPU does."""
    return Sampler(Chooser(CPU_CHIP), logits.shape[1])(logits, step)


@dataclass
class Expected:
    """`token`: what must come out, None for a bad row. `sure`: False where rounding may decide otherwise."""

    token: int | None
    sure: bool = True


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, step: int) -> float:
    key = mixed(seed & MASK)
    return (mixed((key + (step + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def edited(logits: np.ndarray, row: RowSampling) -> list[np.float32]:
    """The logits after penalties, bias and masks, each token by itself, in fp32 as the model gives them."""
    p = row.params
    counts = Counter(row.output_ids)
    z = [np.float32(v) for v in logits]
    for token in {*row.prompt_ids, *row.output_ids}:
        r = np.float32(p.repetition_penalty)
        z[token] = z[token] / r if z[token] > 0 else z[token] * r
    for token, count in counts.items():
        z[token] = z[token] - np.float32(p.frequency_penalty) * np.float32(count) - np.float32(p.presence_penalty)
    for token, bias in p.logit_bias.items():
        z[token] = z[token] + np.float32(bias)
    for token in range(len(z)):
        outside = p.allowed_token_ids is not None and token not in p.allowed_token_ids
        early = len(row.output_ids) < p.min_tokens and token in (*row.eos_ids, *p.stop_token_ids)
        if outside or early:
            z[token] = np.float32(-math.inf)
    return z


def expected(logits: np.ndarray, row: RowSampling) -> Expected:
    p = row.params
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return Expected(None)
    z = edited(logits, row)
    best = max(z)
    if not math.isfinite(best):
        return Expected(None)
    ranked = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if p.temperature == 0:
        return Expected(ranked[0])
    mass = {token: math.exp((float(z[token]) - float(best)) / p.temperature) for token in ranked}
    sure = True
    kept = ranked[: p.top_k] if p.top_k else ranked
    if p.top_p < 1:
        total, reached, nucleus = sum(mass[token] for token in kept), 0.0, []
        for token in kept:
            if nucleus and reached >= p.top_p * total:
                break
            nucleus.append(token)
            reached += mass[token]
            sure &= abs(reached / total - p.top_p) > MARGIN
        kept = nucleus
    sure &= all(mass[token] == 1.0 or abs(mass[token] - p.min_p) > MARGIN for token in kept)
    kept = [token for token in kept if mass[token] >= p.min_p]
    truncated = 0 < p.top_k < len(z) or p.top_p < 1
    kept = kept if truncated else sorted(kept)
    target = uniform(row.seed, len(row.output_ids)) * sum(mass[token] for token in kept)
    reached, chosen = 0.0, None
    for token in kept:
        reached += mass[token]
        sure &= abs(reached - target) > MARGIN
        if chosen is None and reached > target:
            chosen = token
    return Expected(chosen, sure and chosen is not None)


@st.composite
def sampling_params(draw: Any, vocab: int) -> SamplingParams:
    def sometimes(strategy: Any, default: Any) -> Any:
        return draw(st.one_of(st.just(default), st.just(default), strategy))

    tokens = st.integers(0, vocab - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1.0, 2.5, 100.0])),
        top_k=sometimes(st.integers(1, vocab + 2), 0),
        top_p=sometimes(st.sampled_from([1e-9, 0.1, 0.37, 0.8, 0.95, 0.9999]), 1.0),
        min_p=sometimes(st.sampled_from([0.01, 0.21, 0.7, 1.0]), 0.0),
        presence_penalty=sometimes(st.floats(-2, 2), 0.0),
        frequency_penalty=sometimes(st.floats(-2, 2), 0.0),
        repetition_penalty=sometimes(st.floats(0.25, 4), 1.0),
        logit_bias=sometimes(st.dictionaries(tokens, st.floats(-100, 100), max_size=4), {}),
        allowed_token_ids=sometimes(st.lists(tokens, min_size=1, max_size=5).map(tuple), None),
        min_tokens=sometimes(st.integers(0, 6), 0),
        stop_token_ids=sometimes(st.lists(tokens, max_size=2).map(tuple), ()),
        max_tokens=64,
        logprobs=sometimes(st.integers(0, vocab + 2), None),
    )


@st.composite
def batches(draw: Any) -> tuple[list[RowSampling], np.ndarray]:
    vocab = draw(st.integers(3, 24))
    size = draw(st.integers(1, 6))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=8)
    rows = [
        RowSampling(
            params=draw(sampling_params(vocab)),
            eos_ids=draw(st.sampled_from([(), (0,), (1, 2), (2, vocab + 5)])),
            seed=draw(st.integers(-(2**63), 2**64)),
            prompt_ids=draw(tokens),
            output_ids=draw(tokens),
        )
        for _ in range(size)
    ]
    # Coarse logits, so that ties are common.
    logits = np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=(size, vocab)) * draw(st.floats(0.1, 8))
    logits = (np.round(logits * 2) / 2).astype(np.float32)
    for row, value in draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.sampled_from([math.nan, math.inf, -math.inf])), max_size=2)
    ):
        logits[row, draw(st.integers(0, vocab - 1))] = value
    return rows, logits


@settings(max_examples=120, deadline=None, derandomize=True)
@given(batches())
def test_every_row_is_sampled_as_if_it_were_alone_and_by_hand(batch: tuple[list[RowSampling], np.ndarray]) -> None:
    rows, logits = batch
    sampling = SamplingBatch(rows, logits.shape[1], CPU)
    result = sample(torch.from_numpy(logits.copy()), sampling.step())
    token_ids, logprobs = sampling.read(result)
    for i, row in enumerate(rows):
        wanted = expected(logits[i], row)
        if wanted.token is None:
            assert token_ids[i] == -1 and bool(result.nan_rows[i])
            assert logprobs[i] is None
            continue
        assert not result.nan_rows[i]
        if wanted.sure:
            assert token_ids[i] == wanted.token
        assert (logprobs[i] is not None) == (row.params.logprobs is not None)
        if (record := logprobs[i]) is not None:
            raw = logits[i].astype(np.float64)
            exact = raw - raw.max() - math.log(np.exp(raw - raw.max()).sum())
            assert record.token_id == token_ids[i]
            np.testing.assert_allclose(record.logprob, exact[token_ids[i]], atol=1e-5)
            assert record.rank == 1 + int((raw > raw[token_ids[i]]).sum())
            best = sorted(range(len(raw)), key=lambda token: (-raw[token], token))[: row.params.logprobs]
            assert [token for token, _ in record.top] == best
            np.testing.assert_allclose([value for _, value in record.top], exact[best], atol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches(), st.randoms(use_true_random=False))
def test_neighbours_and_places_change_nothing(batch: tuple[list[RowSampling], np.ndarray], random: Any) -> None:
    rows, logits = batch
    order = list(range(len(rows)))
    random.shuffle(order)

    def run(indices: list[int]) -> list[Any]:
        sampling = SamplingBatch([rows[i] for i in indices], logits.shape[1], CPU)
        read = sampling.read(sample(torch.from_numpy(logits[indices]), sampling.step()))
        return list(zip(*read, strict=True))

    together = run(order)
    assert together == [run([i])[0] for i in order]
    assert together[: len(order) // 2] == (run(order[: len(order) // 2]) if len(order) > 1 else [])
