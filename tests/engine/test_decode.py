"""Decode steps on static buffers, run eagerly on a CPU: refreshed and padded; and async scheduling."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.device_only_mha import static
from engine.watching import GREEDY, Watch, assert_idle, assert_same, drain, engine, outputs, request, run
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.llama import tiny_llama, tiny_mistral
from allotrope.architectures.qwen3_moe import tiny_qwen3_moe
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.cache.groups import CacheGroup
from allotrope.engine.decode_buffers import DecodeBuffers
from allotrope.engine.expert_load import expert_load
from allotrope.engine.inputs import StepFacts, StepPlan, StepRow, pack, unpack
from allotrope.graphs.captured import decode_sizes
from allotrope.graphs.piecewise_graphs import prefill_sizes
from allotrope.ops.draft_rows.reference import advance_rows
from allotrope.request import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.set_num_threads(1)
    config = {"llama": tiny_llama, "mistral": tiny_mistral}[request.param]()
    yield write_tiny(config, tmp_path_factory.mktemp("tiny")).directory


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(tiny_qwen3_next(), tmp_path_factory.mktemp("hybrid")).directory


def test_static_steps_equal_exact_ones(model: Path) -> None:
    """Same logits everywhere, however many padding rows a step has; and nothing is ever written for these."""
    options = {"device": "cpu", "max_num_seqs": 7, "max_num_batched_tokens": 64, "page_size": 4, "max_model_len": 96}
    requests = [request(f"r{i}", ids) for i, ids in enumerate(prompts((5, 33, 7, 30, 2, 9, 11, 70, 1)))]
    want, got = Watch(), Watch()
    tokens = run(engine(model, want, **options), requests)
    running = engine(model, got, **options)
    model_runner = static(running, 7)
    # Memory that nobody wrote must not be read; page 0 stays zero.
    for views in model_runner.arena.layers:
        for view in views["kv"].values():
            view[1:] = torch.nan
    # Where groups share a pool, the null page of a field lies among pages of others.
    for views in model_runner.arena.layers:
        for view in views["kv"].values():
            view[0] = 0
    assert_same(run(running, requests), tokens)
    assert model_runner.graphs is not None and model_runner.graphs.eager > 8
    assert model_runner.prefill_graphs is not None and model_runner.prefill_graphs.eager
    for name, positions in want.seen.items():
        for position, logits in positions.items():
            assert torch.allclose(got.seen[name][position], logits, atol=1e-4, rtol=0), (name, position)
    assert all(not view[0].any() for views in model_runner.arena.layers for view in views["kv"].values())
    assert_idle(running)


def test_padding_rows_of_a_prefill_step_are_not_counted(tmp_path: Path) -> None:
    """Nor the row of the step that a capture is prepared with."""
    options = {"device": "cpu", "max_num_seqs": 2, "expert_load_file": str(tmp_path / "load.json")}
    running = engine(write_tiny(tiny_qwen3_moe(), tmp_path).directory, **options)
    runner = static(running, 2)
    run(running, [request("r", prompts((21,))[0], SamplingParams(temperature=0.0, max_tokens=1))])
    counted = expert_load(runner.model)
    topk = tiny_qwen3_moe()["num_experts_per_tok"]
    assert counted and all(sum(loads) == 21 * topk for loads in counted.values())
    graphs = runner.prefill_graphs
    assert graphs is not None and graphs.eager == 1
    with torch.inference_mode():
        graphs._body(32, graphs._attending(32, graphs._idle()))
    assert expert_load(runner.model) == counted


def test_sizes() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert decode_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]


def test_prefill_sizes() -> None:
    assert prefill_sizes(1) == [16]
    assert prefill_sizes(40) == [16, 32, 48]
    assert prefill_sizes(200) == [16, 32, 48, 64, 96, 128, 160, 192, 208]
    longest = prefill_sizes(100_000)
    assert longest[-1] == 4096 and not any(size % 16 for size in longest)
    # However long a step is, little of it is padding.
    assert all(larger <= 1.25 * smaller for smaller, larger in itertools.pairwise(longest) if smaller >= 128)


def pages(*of_groups: list[int]) -> list[array[int]]:
    return [array("q", own) for own in of_groups]


def test_refresh_forgets_the_step_before() -> None:
    """Stale rows, pages and slots of a larger step never show in a smaller one."""
    groups = [CacheGroup("paged", 4, None, ()), CacheGroup("state", 1, None, ()), CacheGroup("window", 2, 6, ())]
    buffers = DecodeBuffers(groups, 5, 32, 8, torch.float32, CPU)
    long_pages = pages([1, 2, 3, 4, 5, 6], [], [-1] * 8 + [7, 8, 9])
    long = [StepRow((i,), 20, long_pages, [0, i + 1, 0], 1) for i in range(5)]
    short = [StepRow((3,), 4, pages([9, 8], [], [1, 2, 3]), [0, 4, 0], 1, prev_sampled_index=2)]
    buffers.refresh(buffers.pack(long, None), len(long), None, buffers.size)
    buffers.refresh(buffers.pack(short, None), len(short), torch.tensor([5, 6, 7]), buffers.size)
    inputs, prev_sampled = buffers.inputs(4)
    plan = StepPlan(tuple(short))
    facts = StepFacts.of(plan)
    exact = unpack(pack(plan, facts, groups, pinned=False), facts, groups, CPU)
    assert inputs.batch.query_lens == (1,) * 4 and inputs.batch.seq_lens == (32,) * 4
    assert inputs.batch.tensors.seq_lens.tolist() == [5, 0, 0, 0]
    assert inputs.batch.tensors.positions.tolist() == [4, 0, 0, 0]
    assert inputs.batch.tensors.query_start.tolist() == [0, 1, 2, 3, 4]
    assert inputs.prev_sampled_indices is not None and inputs.prev_sampled_indices.tolist() == [2, -1, -1, -1]
    assert prev_sampled[:3].tolist() == [5, 6, 7]
    for g in (0, 2):
        table, want = inputs.index[g].table, exact.index[g].table
        assert table[0, : want.shape[1]].tolist() == want[0].tolist()
        assert (table[0, want.shape[1] :] == -1).all() and (table[1:] == -1).all()
        assert inputs.index[g].slots.tolist() == [exact.index[g].slots.item(), -1, -1, -1]
    assert inputs.index[1].slots.tolist() == [4, 0, 0, 0]


def test_rows_behind_unread_drafts_are_those_of_a_host_that_has_read_them() -> None:
    """Two sequences, of which the step before accepted two drafts and none, and one that it did not have."""
    groups = [CacheGroup("paged", 4, None, ()), CacheGroup("state", 1, None, ())]
    kinds = {"verify": True, "max_sampled": 9, "sequences": 3}
    unread, known = (DecodeBuffers(groups, 8, 32, 8, torch.float32, CPU, **kinds) for _ in range(2))
    of_sequences = [pages([3, 4, 5], []), pages([6, 7], []), pages([8], [])]

    def rows(
        seq: int, ids: Sequence[int], context: int, first: int = -1, prev: int = -1, replay: int = 0
    ) -> list[StepRow]:
        indices = [first, *([-1] * (len(ids) - 1))]
        return [
            StepRow(
                (token,), context + i, of_sequences[seq], [0, seq + 1], 1, indices[i], i, 0 if i else replay, -1, prev
            )
            for i, token in enumerate(ids)
        ]

    before = rows(0, (-1, 21), 3, first=0, prev=0) + rows(1, (-1,), 5, first=1, prev=1) + rows(2, (9,), 2)
    after = rows(0, (11, 21), 5, replay=2) + rows(1, (12,), 5) + rows(2, (9,), 2)
    for buffers, step in ((unread, before), (known, after)):
        buffers.refresh(buffers.pack(step, None), len(step), torch.tensor([11, 12, 30, 31]), 8)
        buffers.accepted[:2] = torch.tensor([2, 0])
        advance_rows(buffers.rows(8), buffers.prev_sampled, buffers.accepted)
    found, want = (buffers.inputs(8)[0] for buffers in (unread, known))
    assert found.ids.equal(want.ids) and found.ids[:4].tolist() == [11, 21, 12, 9]
    for name in ("positions", "seq_lens"):
        assert getattr(found.batch.tensors, name).equal(getattr(want.batch.tensors, name)), name
    assert found.batch.tensors.positions.tolist() == [5, 6, 5, 2, 0, 0, 0, 0]
    for one, other in zip(
        vars(found.batch.static_verify).values(), vars(want.batch.static_verify).values(), strict=True
    ):
        assert one.equal(other)
    assert found.index[0].slots.equal(want.index[0].slots)
    assert found.index[0].slots.tolist() == [4 * 4 + 1, 4 * 4 + 2, 7 * 4 + 1, 8 * 4 + 2, -1, -1, -1, -1]


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=7, seed=3, logprobs=2),
    SamplingParams(temperature=1.1, top_p=0.9, max_tokens=12, seed=4, min_tokens=5, stop_token_ids=(11, 12, 13, 14)),
    SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=0.8, top_k=5, max_tokens=5, seed=9, n=3),
    SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1),
]


@pytest.mark.parametrize("kind", ["exact", "static"])
def test_async_scheduling_gives_the_same(model: Path, kind: str) -> None:
    """Tokens, reasons and log-probabilities of every kind of request, under memory that sends sequences back."""
    options = {"device": "cpu", "max_num_seqs": 5, "max_num_batched_tokens": 48, "page_size": 4, "max_model_len": 96}
    asked = [
        request(f"r{i}", ids, MIXED[i % len(MIXED)], eos_ids=tuple(range(20, 40)))
        for i, ids in enumerate(prompts((5, 33, 7, 30, 2, 9, 11, 70, 1, 12, 64, 8, 3)))
    ]
    want = outputs(engine(model, async_scheduling="off", **options), asked)
    roomy = engine(model, async_scheduling="on", **options)
    less = {"kv_cache_memory_bytes": roomy.memory.bytes // 3, "scheduler_reserve_full_isl": False}
    tight = engine(model, async_scheduling="on", **less, **options)
    for running in (roomy, tight):
        if kind == "static":
            static(running, 5)
        found = outputs(running, asked)
        for one in asked:
            for index in range(one.params.n):
                got, story = (_story(told, one.request_id, index) for told in (found, want))
                assert got[0] == story[0]
                assert got[1] == pytest.approx(story[1], abs=1e-4)
        assert_idle(running)
    # A window takes no more as its sequence grows.
    assert tight.stats().preemptions or "paged" not in tight.stats().pages_total


def _story(found: list[Any], name: str, index: int) -> tuple[list[Any], list[float]]:
    """What a sequence was told, as far as it may not depend on when it ran; and its log-probabilities."""
    told = [one for one in found if (one.request_id, one.index) == (name, index)]
    facts = [
        (one.token_ids, one.finish_reason, one.stop_reason, one.prompt_logprobs and len(one.prompt_logprobs))
        for one in told
    ]
    return facts, [p for one in told for record in one.logprobs or () for _, p in record.top]


def test_async_scheduling_with_aborts_and_states(hybrid: Path) -> None:
    """A request that is aborted while its token is on its way leaves nothing; the others do not notice."""
    ids = prompts((5, 20, 7, 40))
    want = run(engine(hybrid, async_scheduling="off"), [request(f"r{i}", one) for i, one in enumerate(ids)])
    running = engine(hybrid, async_scheduling="on", page_size=4)
    for i, one in enumerate(ids):
        running.add(request(f"r{i}", one))
    tokens: dict[str, list[int]] = {}
    for step in range(4):
        for output in running.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if step == 2:
            running.abort(["r1"])
    for name, rest in drain(running).items():
        tokens.setdefault(name, []).extend(rest)
    del want["r1"], tokens["r1"]
    assert_same(tokens, want)
    assert_idle(running)
    # What was aborted can be asked for again, from the prefix cache.
    assert len(run(running, [request("r1", ids[1])])["r1"]) == GREEDY.max_tokens


def test_an_ending_learnt_late_is_not_passed(model: Path) -> None:
    """The token computed behind a stop token is dropped: not returned, not cached, its page freed."""
    (ids,) = prompts((14,))
    plain = run(engine(model), [request("plain", ids)])["plain"]
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(plain[3],))
    running = engine(model, async_scheduling="on", page_size=2)
    found = outputs(running, [request("late", ids, params)])
    stop = plain.index(plain[3])
    assert [token for one in found for token in one.token_ids] == plain[: stop + 1]
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", plain[3])
    assert_idle(running)
    assert_same(run(running, [request("again", ids)]), {"again": plain})
