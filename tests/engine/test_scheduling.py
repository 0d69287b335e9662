"""The order of things: fairness, budgets, errors of one request, and random load against each request alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import GREEDY, assert_idle, assert_same, drain, engine, outputs, request, run
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.deepseek_v3 import tiny_deepseek_v3
from allotrope.architectures.deepseek_v4 import tiny_deepseek_v4
from allotrope.architectures.deepseek_v32 import tiny_deepseek_v32
from allotrope.architectures.llama import tiny_llama, tiny_mistral
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.errors import ConfigError, InvalidRequest, ModelError, Overloaded
from allotrope.request import SamplingParams

FAMILIES = (tiny_llama, tiny_mistral, tiny_deepseek_v3, tiny_deepseek_v32, tiny_qwen3_next, tiny_deepseek_v4)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.set_num_threads(1)
    config = {"llama": tiny_llama, "mistral": tiny_mistral}[request.param]()
    yield write_tiny(config, tmp_path_factory.mktemp("tiny")).directory


def test_a_long_prompt_holds_nobody_up(model: Path) -> None:
    """While a long prompt is computed, decoding goes on every step, and a short prompt behind it starts at once."""
    long, short, talker = prompts((300, 10, 5))
    running = engine(model, max_num_batched_tokens=32, max_num_seqs=4, enable_prefix_caching=False)
    running.add(request("talker", talker, replace(GREEDY, max_tokens=64)))
    running.step()
    running.add(request("long", long))
    running.add(request("short", short))
    steps: dict[str, list[int]] = {"talker": [], "long": [], "short": []}
    for step in range(40):
        for output in running.step():
            steps[output.request_id].append(step)
    assert steps["talker"][:20] == list(range(20))
    assert steps["short"][0] < steps["long"][0]
    assert steps["short"][0] <= 2


def test_a_prompt_with_logprobs_holds_nobody_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one with logprobs starts beside it, and so does what is behind that."""
    monkeypatch.setattr("allotrope.engine.scheduler.PROMPT_LOGPROBS_CHUNK", 16)
    long, second, short = prompts((300, 6, 5))
    running = engine(model, max_num_batched_tokens=128, max_num_seqs=4)
    scored = replace(GREEDY, prompt_logprobs=0)
    running.add(request("long", long, scored))
    running.step()
    for name, prompt, params in (("second", second, scored), ("third", second, scored), ("short", short, GREEDY)):
        running.add(request(name, prompt, params))
    found: dict[str, int] = {}
    for step in range(30):
        for output in running.step():
            found.setdefault(output.request_id, step)
    assert max(found[name] for name in ("second", "third", "short")) <= 2 < found["long"]
    drain(running)
    assert_idle(running)


@pytest.mark.parametrize("behind", ["full batch", "own prompt"])
def test_a_prompt_has_all_tokens_where_no_other_can_run(behind: str, model: Path) -> None:
    """One waits for a place in the batch, or for the prompt that it shares to be computed."""
    long, short = prompts((300, 10))
    running = engine(model, max_num_batched_tokens=32, max_num_seqs=1 if behind == "full batch" else 4)
    running.add(request("long", long, replace(GREEDY, n=1 if behind == "full batch" else 2)))
    if behind == "full batch":
        running.add(request("short", short))
    steps = 0
    while not any(output.request_id == "long" for output in running.step()):
        steps += 1
    assert steps < -(-300 // 32)


def test_budget_is_never_exceeded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine(model, max_num_batched_tokens=24, max_num_seqs=6)
    seen: list[tuple[int, int]] = []
    executor = running._executor
    inner = executor.run

    def counted(plan, prev_sampled=None):
        seen.append((len(plan.rows), sum(len(row.ids) for row in plan.rows)))
        return inner(plan, prev_sampled)

    monkeypatch.setattr(executor, "run", counted)
    run(running, [request(f"r{i}", ids) for i, ids in enumerate(prompts((5, 60, 7, 30, 2, 9, 11, 80)))])
    assert max(rows for rows, _ in seen) <= 6
    assert max(tokens for _, tokens in seen) <= 24
    assert max(tokens for _, tokens in seen) == 24, "the budget is used"


@pytest.mark.parametrize(("prompt", "output", "most"), [(100, 100, 2.0), (180, 8, 1.05)])
def test_little_is_computed_in_vain(
    prompt: int, output: int, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt begins, and begins again, once there is room for all of it beside the prompts that run."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama()))
    options = {"load_format": "dummy", "max_model_len": 256, "page_size": 4, "enable_prefix_caching": False}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    room = engine(tmp_path, **options).memory.bytes * 2 // 5
    running = engine(tmp_path, kv_cache_memory_bytes=room, **options)
    computed = 0
    inner = running._executor.run

    def counted(plan, prev_sampled=None):
        nonlocal computed
        computed += sum(len(row.ids) for row in plan.rows)
        return inner(plan, prev_sampled)

    monkeypatch.setattr(running._executor, "run", counted)
    asked = [request(f"r{i}", ids, replace(GREEDY, max_tokens=output)) for i, ids in enumerate(prompts((prompt,) * 6))]
    run(running, asked)
    assert (running.stats().preemptions > 0) == (output > prompt // 2)
    needed = sum(prompt + output - 1 for _ in asked)
    assert computed < most * needed, (computed, needed)


def test_a_waiting_prompt_seldom_looks_for_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look it walks over all that is cached of it, which is of no use before somebody gives pages back."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama()))
    options = {"load_format": "dummy", "max_model_len": 160, "page_size": 4}
    room = engine(tmp_path, max_num_seqs=1, **options).memory.bytes
    running = engine(tmp_path, kv_cache_memory_bytes=room, max_num_seqs=4, **options)
    long, talker = prompts((150, 40))
    run(running, [request("first", long[:100], replace(GREEDY, max_tokens=1))])
    prefix = running._requests.kv_cache_manager.prefix
    walks = 0
    inner = prefix.match

    def counted(ids, chain):
        nonlocal walks
        walks += 1
        return inner(ids, chain)

    monkeypatch.setattr(prefix, "match", counted)
    running.add(request("talker", talker, replace(GREEDY, max_tokens=50)))
    running.step()
    running.add(request("long", long))
    told = [[output.request_id for output in running.step()] for _ in range(50)]
    assert told[:49] == [["talker"]] * 49 and told[49] == ["long"]
    assert walks <= 1 + 49 // 16 + 2, walks
    drain(running)
    assert_idle(running)


def test_full_queue(model: Path) -> None:
    running = engine(model, max_num_waiting=2, max_num_seqs=1)
    for name in ("a", "b"):
        running.add(request(name, [9, 10]))
    with pytest.raises(Overloaded, match="max-num-waiting 2"):
        running.add(request("c", [9, 10]))
    assert set(run(running, [])) == {"a", "b"}
    assert_idle(running)


def test_what_cannot_run_is_refused_by_name(model: Path) -> None:
    running = engine(model, max_model_len=64)
    cases = {
        "prompt": request("x", []),
        "max_tokens": request("x", [9] * 60, replace(GREEDY, max_tokens=10)),
        "logit_bias": request("x", [9], replace(GREEDY, logit_bias={320: 1.0})),
        "stop_token_ids": request("x", [9], replace(GREEDY, stop_token_ids=(-1,))),
        "allowed_token_ids": request("x", [9], replace(GREEDY, allowed_token_ids=(5000,))),
        "temperature": request("x", [9], replace(GREEDY, temperature=float("nan"))),
    }
    for param, bad in cases.items():
        with pytest.raises(InvalidRequest) as caught:
            running.add(bad)
        assert caught.value.param == param
    assert not running.has_work()


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.__name__)
def test_a_request_without_numbers_ends_alone(config: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    """One token's embedding is broken: its request fails with a reason; its neighbour and the pages do not notice."""
    (tmp_path / "config.json").write_text(json.dumps(config()))
    running = engine(tmp_path, load_format="dummy", max_num_seqs=4, max_model_len=256)
    good = request("good", [9, 10, 11])
    alone = run(running, [good])
    running.model.embedding.weight.data[12] = torch.nan
    for _ in range(2):
        found = outputs(running, [request("bad", [12, *range(20, 60)]), good])
        ended = {o.request_id: o.finish_reason for o in found if o.finish_reason}
        assert ended == {"good": "length", "bad": "error"}
        assert "not numbers" in next(o.error for o in found if o.error)
        assert [t for o in found if o.request_id == "good" for t in o.token_ids] == alone["good"]
        assert max(o.cached_tokens for o in found) == 0, "what it computed is not reused"
        assert_idle(running)


def test_stop_ids_and_lengths(model: Path) -> None:
    running = engine(model, max_model_len=64)
    free = run(running, [request("free", [9, 10, 11])])["free"]
    stop = free[3]
    first = free.index(stop)
    params = replace(GREEDY, stop_token_ids=(stop,))
    found = outputs(running, [request("stopped", [9, 10, 11], params)])
    assert [t for o in found for t in o.token_ids] == free[: first + 1]
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", stop)
    eos = replace(GREEDY, ignore_eos=False, max_tokens=None)
    assert run(running, [request("eos", [9, 10, 11], eos, (stop,))])["eos"] == free[: first + 1]
    everything = run(running, [request("all", [9, 10, 11], replace(GREEDY, max_tokens=None))])["all"]
    assert len(everything) == 61, "up to the context's end"


def test_random_load_equals_each_request_alone(model: Path) -> None:
    """Arrivals, aborts, repeats, several sequences and preemption in one run; no token differs, no page stays."""
    chance = random.Random(5)
    base = prompts((3, 17, 33, 48, 60, 90), seed=11)
    alone = engine(model, max_model_len=128, enable_prefix_caching=False)
    roomy = engine(model, max_model_len=128, max_num_seqs=6, max_num_batched_tokens=40, page_size=4)
    needed = roomy.memory.bytes * 200 // roomy.memory.tokens if "paged" in roomy.stats().pages_total else 0
    tight = engine(
        model,
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        page_size=4,
        kv_cache_memory_bytes=needed or roomy.memory.bytes // 2,
        scheduler_reserve_full_isl=False,
    )
    wanted, got, aborted = {}, {}, set()
    for number in range(60):
        ids = chance.choice(base)[: chance.randint(1, 90)] + prompts((chance.randint(0, 5),), seed=number)[0]
        if not ids:
            ids = [9]
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.8]),
            top_k=chance.choice([0, 5]),
            seed=number,
            max_tokens=chance.randint(1, 12),
            ignore_eos=True,
            presence_penalty=chance.choice([0.0, 0.5]),
        )
        one = request(f"r{number}", ids, params)
        wanted[one.request_id] = run(alone, [one])[one.request_id]
        tight.add(one)
        for _ in range(chance.randint(0, 3)):
            for output in tight.step():
                got.setdefault(output.request_id, []).extend(output.token_ids)
        if chance.random() < 0.2:
            victim = f"r{chance.randint(0, number)}"
            aborted.add(victim)
            tight.abort([victim])
    while tight.has_work():
        for output in tight.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
    assert_same(
        {name: tokens for name, tokens in got.items() if name not in aborted},
        {name: tokens for name, tokens in wanted.items() if name not in aborted},
    )
    for name in aborted & set(got):
        assert got[name] == wanted[name][: len(got[name])]
    assert_idle(tight)
    assert tight.stats().prefix_hits > 0


def test_yarn_reaches_farther_than_the_config_says(model: Path) -> None:
    """As model cards add it: `max_position_embeddings` stays what it was."""
    overrides = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
    longer = {"rope_scaling": overrides["rope_scaling"], "max_position_embeddings": 1024}
    asked = [request("long", *prompts((700,)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))]
    told = {"max_num_seqs": 1, "max_model_len": 1024}
    reached, stated = (run(engine(model, hf_overrides=one, **told), asked) for one in (overrides, longer))
    assert_same(reached, stated)
    assert engine(model, max_num_seqs=1, hf_overrides=overrides).limits.max_model_len == 512


def test_same_requests_same_order_same_tokens(model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=2)
    asked = [request(f"r{i}", ids, params) for i, ids in enumerate(prompts((4, 20, 9)))]
    first, second = (run(engine(model, max_num_seqs=4, max_model_len=128), asked) for _ in range(2))
    assert_same(first, second)
    assert len({tuple(tokens) for tokens in first.values()}) == len(first), "sequences without a seed differ"


def test_bad_options_and_models_say_every_reason(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=9999 is more than the 512"):
        engine(model, max_model_len=9999)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300}
    with pytest.raises(ConfigError, match=r"max_model_len=1201 is more than the 1200"):
        engine(model, max_model_len=1201, hf_overrides={"rope_scaling": yarn})
    with pytest.raises(ConfigError, match=r"page_size=12.*max_num_batched_tokens=2 is below"):
        engine(model, page_size=12, max_num_batched_tokens=2, max_num_seqs=3)
    broken = tiny_llama() | {"hidden_act": "relu", "num_hidden_layers": "two", "surprise": 1}
    write_config(tmp_path, broken)
    with pytest.raises(ModelError) as caught:
        engine(tmp_path, load_format="dummy")
    assert all(word in str(caught.value) for word in ("hidden_act='relu'", "num_hidden_layers='two'", "surprise"))


def write_config(directory: Path, config: dict[str, object]) -> None:
    import json

    (directory / "config.json").write_text(json.dumps(config))
