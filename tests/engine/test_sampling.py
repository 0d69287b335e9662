"""The sampler at its edges: frequencies, determinism, extreme parameters, bad rows, what a step costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from allotrope.engine.sampling_batch import RowSampling, SamplingBatch, read_logprobs
from allotrope.engine.seeds import derive_seed, stream_keys, uniforms
from allotrope.ops.logprobs.reference import largest, score_tokens
from allotrope.ops.sampling.reference import RandomRows, SamplingStep, sample
from allotrope.request import SamplingParams, TokenLogprobs

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
ALMOST_ONE = 1 - 2.0**-53


def row(
    seed: int = 0, prompt: Sequence[int] = (0,), output: Sequence[int] = (), eos: Sequence[int] = (), **params: Any
) -> RowSampling:
    return RowSampling(
        params=SamplingParams(**params), eos_ids=eos, seed=seed, prompt_ids=prompt, output_ids=list(output)
    )


def choose(logits: Any, *rows: RowSampling) -> list[int]:
    """Token ids of one step; `logits`: [B, V], or [V] for all rows alike."""
    tensor = torch.as_tensor(logits, dtype=torch.float32)
    tensor = tensor.expand(len(rows), -1).clone() if tensor.ndim == 1 else tensor.clone()
    batch = SamplingBatch(rows, tensor.shape[1], CPU)
    return batch.read(sample(tensor, batch.step()))[0]


def random_rows(
    count: int, uniform: Any, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> RandomRows:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count, 1), value, dtype=dtype)

    numbers = torch.as_tensor(uniform, dtype=torch.float64).reshape(-1, 1).expand(count, 1)
    return RandomRows(
        torch.arange(count), column(temperature, torch.float32), column(min_p, torch.float64),
        column(top_p, torch.float64), column(top_k, torch.int64), numbers, (top_k,) * count,
    )  # fmt: skip


# Random numbers


def test_uniforms_are_those_of_splitmix64() -> None:
    # The first outputs of SplitMix64 from state 0, as its authors' C program prints them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    found = uniforms(np.zeros(3, dtype=np.uint64), np.arange(3, dtype=np.uint64))
    assert found.tolist() == [(bits >> 11) / 2**53 for bits in published]


@pytest.mark.parametrize("seeds,steps", [([7], range(40_000)), (range(40_000), [3]), (range(-200, 0), range(200))])
def test_uniforms_are_uniform_along_steps_and_along_seeds(seeds: Sequence[int], steps: Sequence[int]) -> None:
    keys, at = np.meshgrid(stream_keys(list(seeds)), np.array(list(steps), dtype=np.uint64))
    numbers = uniforms(keys.ravel(), at.ravel())
    assert numbers.min() >= 0 and numbers.max() < 1
    assert len(set(numbers.tolist())) == len(numbers)
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    # 99.9 % of chi-square with 63 degrees of freedom.
    assert ((counts - len(numbers) / 64) ** 2 / (len(numbers) / 64)).sum() < 103.4
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_sequences_of_one_request_get_seeds_of_their_own() -> None:
    assert derive_seed(42, 0) == 42
    seeds = [derive_seed(base, index) for base in (-1, 0, 1, 42, 2**63 - 1) for index in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert len({int(key) for key in stream_keys(seeds)}) == len(seeds)


# Drawing


CASES = {
    "whole": ({}, [0, 1, 2, 3, 4, 5]),
    "temperature": ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5]),
    "min_p": ({"min_p": 0.3}, [1, 3, 4]),
    "top_k": ({"top_k": 2}, [1, 4]),
    "top_p": ({"top_p": 0.75}, [1, 3, 4]),
    "top_k then top_p": ({"top_k": 3, "top_p": 0.75}, [1, 4]),
    "top_k then min_p": ({"top_k": 5, "min_p": 0.3}, [1, 3, 4]),
    "top_p then min_p": ({"top_p": 0.95, "min_p": 0.5}, [1, 4]),
}
SHARES = [0.05, 0.4, 0.08, 0.15, 0.25, 0.07]


@pytest.mark.parametrize("name", CASES)
def test_tokens_come_as_often_as_their_probability_says(name: str) -> None:
    params, kept = CASES[name]
    draws = 20_000
    keys = stream_keys([1234])
    numbers = uniforms(keys, np.arange(draws, dtype=np.uint64))
    random = random_rows(draws, numbers, **params)
    truncated = "top_k" in params or "top_p" in params
    step = SamplingStep(greedy=None, **{"truncated" if truncated else "whole": random})
    found = sample(torch.tensor(SHARES).log().repeat(draws, 1), step).token_ids.bincount(minlength=6).numpy()
    wanted = np.array([share if i in kept else 0.0 for i, share in enumerate(SHARES)])
    wanted = wanted ** (1 / params.get("temperature", 1.0))
    wanted *= draws / wanted.sum()
    assert found[wanted == 0].sum() == 0
    chi_square = ((found - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()
    # 99.9 % points of chi-square by degrees of freedom.
    assert chi_square < {1: 10.8, 2: 13.8, 5: 20.5}[len(kept) - 1]


@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}, {"top_p": 0.999999}, {"top_k": 4, "top_p": 0.9999999}])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
def test_no_number_draws_an_impossible_token(truncation: dict[str, Any], uniform: float) -> None:
    logits = torch.tensor([[-INF, -INF, 1.0, -INF, 2.0, 1.0, -INF]])
    random = random_rows(1, uniform, **truncation)
    step = SamplingStep(greedy=None, **{"truncated" if truncation else "whole": random})
    assert sample(logits, step).token_ids.item() in (2, 4, 5)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0])
def test_the_largest_number_still_draws_within_the_row(spread: float) -> None:
    for vocab in (3, 1000, 262_208):
        logits = torch.linspace(-spread, spread, vocab)[None]
        drawn = [
            sample(logits.clone(), SamplingStep(greedy=None, whole=random_rows(1, u))).token_ids.item()
            for u in (0.0, 0.5, ALMOST_ONE)
        ]
        assert drawn == sorted(drawn) and drawn[0] >= 0 and drawn[-1] < vocab
        if spread < 1:
            assert drawn[0] == 0 and drawn[1] == pytest.approx(vocab / 2, abs=1 + vocab * spread)
            assert drawn[-1] == vocab - 1


@pytest.mark.parametrize("vocab", [5000, 70_001])
def test_a_nucleus_is_the_same_at_every_search_width(vocab: int) -> None:
    generator = torch.Generator().manual_seed(5)
    # Coarse and nearly flat: nuclei of thousands of tokens, with ties across every width.
    wide = (torch.randn(vocab, generator=generator) * 4).round() / 16
    narrow = torch.randn(vocab, generator=generator) * 6
    exact = wide.double().numpy()
    ranked = sorted(range(vocab), key=lambda token: (-exact[token], token))
    mass = np.cumsum(np.exp(exact[ranked]))
    for top_p in (0.002, 0.05, 0.4, 0.97):
        for seed in range(2):
            size = int(np.searchsorted(mass, top_p * mass[-1])) + 1
            target = uniforms(stream_keys([seed]), np.zeros(1, dtype=np.uint64))[0] * mass[size - 1]
            by_hand = ranked[int(np.searchsorted(mass, target, side="right"))]
            alone = choose(wide, row(seed, top_p=top_p))
            crowd = choose(
                torch.stack([narrow, wide, narrow]),
                row(1, top_p=0.9), row(seed, top_p=top_p), row(2, top_k=300, top_p=0.5),
            )  # fmt: skip
            assert alone == [by_hand] and crowd[1] == by_hand


def test_a_seed_and_a_place_decide_the_token_whatever_came_before() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3000, generator=generator)
    kinds: list[dict[str, Any]] = [
        {}, {"top_p": 0.8}, {"top_k": 40}, {"min_p": 0.1}, {"frequency_penalty": 1.5, "top_p": 0.9}, {"temperature": 0}
    ]  # fmt: skip
    kept = [row(seed=i // 2, prompt=(5, 6), **kind) for i, kind in enumerate(kinds)]
    batch = SamplingBatch(kept, 3000, CPU)
    for step in range(12):
        now = logits[step].repeat(len(kept), 1)
        tokens = batch.read(sample(now.clone(), batch.step()))[0]
        # A sequence that was preempted, moved and rebuilt from its tokens.
        rebuilt = [row(seed=i // 2, prompt=(5, 6), output=kept[i].output_ids, **kinds[i]) for i in range(len(kept))]
        assert choose(logits[step], *reversed(rebuilt)) == tokens[::-1]
        for sequence, token in zip(kept, tokens, strict=True):
            sequence.output_ids.append(token)
    assert len({tuple(sequence.output_ids) for sequence in kept}) == len(kept)


def test_other_seeds_give_other_tokens() -> None:
    logits = torch.zeros(100_000)
    assert len(set(choose(logits, *(row(seed) for seed in range(20))))) == 20
    assert len(set(choose(logits, *(row(1, output=[0] * step) for step in range(20))))) == 20
    assert len(set(choose(logits, *(row(derive_seed(1, index)) for index in range(20))))) == 20


# Edges of the parameters


LOGITS = [1.0, 4.0, 2.0, 4.0, -3.0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 1e-12},
        {"top_p": 1e-300, "top_k": 4},
        {"top_k": 1, "min_p": 1.0, "temperature": 100.0},
    ],
)
def test_the_narrowest_choice_is_the_lowest_id_of_the_best(params: dict[str, Any]) -> None:
    assert choose(LOGITS, *(row(seed, **params) for seed in range(10))) == [1] * 10


@pytest.mark.parametrize("params", [{"min_p": 1.0}, {"temperature": 1e-3}, {"temperature": 1e-50}, {"top_k": 2}])
def test_ties_for_the_best_share_the_draws(params: dict[str, Any]) -> None:
    drawn = choose(LOGITS, *(row(seed, **params) for seed in range(60)))
    assert set(drawn) == {1, 3} and 15 < drawn.count(1) < 45


def test_a_cold_or_large_row_does_not_overflow() -> None:
    for scale in (1e4, 1e38, 3e38):
        logits = torch.tensor([-1.0, 0.9, 1.0]) * scale
        assert choose(logits, row(temperature=1e-3), row(temperature=0.01, top_p=0.9), row(temperature=0)) == [2] * 3


def test_top_p_takes_the_smallest_set_that_reaches_it() -> None:
    logits = torch.zeros(4)
    for top_p, size in ((0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.9, 4), (1.0, 4)):
        drawn = choose(logits, *(row(seed, top_p=top_p) for seed in range(80)))
        assert set(drawn) == set(range(size))


def test_the_mass_of_a_nucleus_is_that_of_its_own_row_and_top_k() -> None:
    logits = torch.tensor(SHARES).log()
    # 0.4 of 0.65 is more than 0.6; 0.65 of 1 is not more than 0.7.
    rows = [
        row(seed, top_k=top_k, top_p=top_p) for seed in range(60) for top_k, top_p in ((2, 0.6), (0, 0.7), (2, 1.0))
    ]
    drawn = choose(logits, *rows)
    assert set(drawn[::3]) == {1}
    assert set(drawn[1::3]) == {1, 3, 4}
    assert set(drawn[2::3]) == {1, 4}


def test_a_large_top_k_ends_where_it_says() -> None:
    # Sums of so many weights, small ones among them, no longer fit the 53 bits of a float.
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(2)) / 64
    logits[0, 16_000:] -= 12
    ranked = logits[0].sort(descending=True, stable=True).indices.tolist()
    top_ks = tuple(range(16_001, 19_000, 137))
    random = replace(random_rows(len(top_ks), ALMOST_ONE), top_k=torch.tensor(top_ks)[:, None], top_ks=top_ks)
    drawn = sample(logits.repeat(len(top_ks), 1), SamplingStep(greedy=None, truncated=random)).token_ids
    assert drawn.tolist() == [ranked[top_k - 1] for top_k in top_ks]


def test_top_k_of_the_vocabulary_or_more_cuts_nothing() -> None:
    rows = [row(seed) for seed in range(50)]
    cut = [row(seed, top_k=top_k) for top_k in (5, 6, 2**31 - 1) for seed in range(50)]
    assert choose(LOGITS, *cut) == choose(LOGITS, *rows) * 3


def test_bias_moves_the_best_token() -> None:
    assert choose(LOGITS, row(temperature=0, logit_bias={1: -100.0})) == [3]
    assert choose(LOGITS, row(temperature=0, logit_bias={4: 100.0})) == [4]
    assert choose(LOGITS, row(logit_bias={4: 100.0}), row(), row(temperature=0))[0] == 4


def test_allowed_tokens_are_all_there_is() -> None:
    drawn = choose(LOGITS, *(row(seed, temperature=100.0, allowed_token_ids=(4, 0, 4)) for seed in range(40)))
    assert set(drawn) == {0, 4}


def test_a_sequence_cannot_end_before_its_least_length() -> None:
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (3,)}
    for length, token in ((0, 2), (1, 2), (2, 1)):
        assert choose(LOGITS, row(output=[0] * length, eos=(1, 999), **params)) == [token]
    assert choose(LOGITS, row(**params)) == [1]


def test_penalties_count_the_output_and_repetition_also_the_prompt() -> None:
    def chosen(logits: list[float], **params: Any) -> int:
        return choose(logits, row(prompt=(0, 0, 2), output=(1, 1, 1), temperature=0, **params))[0]

    assert chosen([3.0, 3.2, 1.0], presence_penalty=0.5) == 0
    assert chosen([3.0, 3.8, 1.0], presence_penalty=0.5) == 1
    assert chosen([3.0, 3.8, 1.0], frequency_penalty=0.3) == 0
    assert chosen([3.0, 3.8, 1.9], repetition_penalty=2.0) == 1
    assert chosen([3.0, 3.8, 1.9, 1.95], repetition_penalty=2.0) == 3
    assert chosen([-1.0, -1.2, -3.0, -1.9], repetition_penalty=2.0) == 3


def test_half_precision_logits_choose_as_their_fp32_values() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 500, generator=generator) * 2).to(torch.bfloat16)
    rows = [
        row(1), row(2, top_p=0.9), row(3, top_k=9, logprobs=3), row(4, temperature=0), row(5, min_p=0.2),
        row(6, frequency_penalty=1.0, output=[4, 5, 5], logprobs=1),
    ]  # fmt: skip
    batch = SamplingBatch(rows, 500, CPU)
    exact, half = (batch.read(sample(x, batch.step())) for x in (logits.float(), logits.clone()))
    assert exact == half
    assert all(token >= 0 for token in half[0])


# Rows that have no distribution


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"allowed_token_ids": (0, 1)}]
)
def test_a_bad_row_fails_alone(value: float, params: dict[str, Any]) -> None:
    good = torch.tensor(LOGITS)
    bad = good.clone()
    bad[2] = value
    rows = [row(1, **params, logprobs=2), row(2, **params, logprobs=2), row(3, top_p=0.9), row(4, temperature=0)]
    batch = SamplingBatch(rows, 5, CPU)
    result = sample(torch.stack([good, bad, good, good]), batch.step())
    tokens, logprobs = batch.read(result)
    assert result.bad.tolist() == [False, True, False, False]
    assert tokens == [*choose(good, rows[0]), -1, *choose(good, *rows[2:])]
    assert logprobs[0] is not None and logprobs[1] is None


def test_a_row_with_every_token_masked_is_bad() -> None:
    nothing = torch.full((5,), -INF)
    assert choose(nothing, row(temperature=0), row(), row(top_p=0.3), row(top_k=2)) == [-1] * 4
    for temperature in (0.0, 1.0):
        masked = row(temperature=temperature, min_tokens=1, allowed_token_ids=(1, 2), stop_token_ids=(1,), eos=(2,))
        assert choose(LOGITS, masked, row(temperature=0)) == [-1, 1]


def test_an_overflowing_penalty_is_bad_not_garbage() -> None:
    assert choose(LOGITS, row(repetition_penalty=1e-39, prompt=(1,)), row(temperature=0)) == [-1, 1]


# Log-probabilities


def test_logprobs_are_of_the_raw_model() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(3, 50, generator=generator)
    raw = logits.log_softmax(-1)
    rows = [
        row(temperature=0, logit_bias={7: 100.0}, logprobs=0),
        row(temperature=0),
        row(3, temperature=5.0, allowed_token_ids=(8,), repetition_penalty=3.0, logprobs=4),
    ]
    batch = SamplingBatch(rows, 50, CPU)
    tokens, (first, second, third) = batch.read(sample(logits.clone(), batch.step()))
    assert tokens == [7, int(logits[1].argmax()), 8] and second is None
    assert first is not None and third is not None
    assert first == TokenLogprobs(7, raw[0, 7].item(), 1 + int((raw[0] > raw[0, 7]).sum()), ())
    assert third.logprob == raw[2, 8].item()
    assert third.top == tuple(zip(raw[2].topk(4).indices.tolist(), raw[2].topk(4).values.tolist(), strict=True))


def test_prompt_scores_many_rows_and_ties_by_id() -> None:
    logits = torch.tensor([2.0, 5.0, 5.0, -0.0, 0.0, 1.0]).repeat(9, 1)
    records = read_logprobs(score_tokens(logits, torch.arange(9) % 6, 20), [20] * 9)
    assert [record.token_id for record in records] == [i % 6 for i in range(9)]
    assert [record.rank for record in records] == [3, 1, 1, 5, 5, 4, 3, 1, 1]
    assert all([token for token, _ in record.top] == [1, 2, 0, 5, 3, 4] for record in records)
    assert math.fsum(math.exp(value) for _, value in records[0].top) == pytest.approx(1, abs=1e-6)


def test_largest_orders_by_value_then_id() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(7, 4000, generator=generator) * 4).round() / 2
    logits[0, :100] = -INF
    wanted = logits.sort(dim=-1, descending=True, stable=True)
    for count in (1, 2, 63, 1000, 4000):
        values, ids = largest(logits, count)
        assert ids.equal(wanted.indices[:, :count]) and values.equal(wanted.values[:, :count])


# What a step costs


def operations(**params: Any) -> set[str]:
    """Names of the tensor operations that choosing tokens runs."""
    batch = SamplingBatch([row(seed, **params) for seed in range(4)], 1000, CPU)
    step = batch.step()
    with torch.autograd.profiler.profile() as seen:
        sample(torch.zeros(4, 1000), step)
    return {event.name.removeprefix("aten::") for event in seen.function_events}


def test_greedy_rows_cost_an_argmax_and_plain_draws_no_sort() -> None:
    greedy = operations(temperature=0)
    assert "argmax" in greedy and not greedy & {
        "amax",
        "exp_",
        "exp",
        "sort",
        "topk",
        "cumsum",
        "_log_softmax",
        "clone",
    }
    assert not operations() & {"sort", "topk", "argsort", "argmax", "_log_softmax"}
    assert "topk" in operations(top_k=5) and not operations(top_k=5) & {"sort", "argsort"}


def test_a_batch_serves_the_same_rows_in_the_same_order_only() -> None:
    first, second = row(1), row(1)
    batch = SamplingBatch([first, second], 5, CPU)
    assert batch.serves([first, second])
    assert not batch.serves([second, first]) and not batch.serves([first]) and not batch.serves([first, row(1)])
