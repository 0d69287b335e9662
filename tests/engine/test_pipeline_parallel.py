"""Pipeline stages give the tokens of one rank, several steps at a time, and each reads only its own layers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.static_ranks import start_static_ranks
from engine.static_reference import static_steps
from engine.watching import GREEDY, assert_idle, assert_same, drain, engine, request
from server.tiny_model import write_tiny_model
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture
from allotrope.cache.memory import Demand, make_plan
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.dequantize import dequantized
from allotrope.checkpoint.weights import Loader
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.pipeline_loop import PipelineLoop
from allotrope.errors import ConfigError, ModelError
from allotrope.layers.build import Build
from allotrope.layers.parallel import Parallel
from allotrope.layers.stage import Stage, cut
from allotrope.llm import LLM
from allotrope.loading.decoder import make_decoder
from allotrope.loading.kv_scales import WithoutKvScales
from allotrope.request import Grammar, Request, SamplingParams, SequenceOutput
from allotrope.verify.random_checkpoint import write_random

pytestmark = pytest.mark.usefixtures("kept_workers")

# One of each family, and one with layers that read the caches of others and inputs of their own.
FAMILIES = (
    "LlamaForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Qwen3NextForCausalLM",
)
SHARING = "Gemma4ForConditionalGeneration"
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "device": "cpu",
}


def write(name: str, directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(find_architecture({"architectures": [name]}, "").tiny()))
    return directory


def requests() -> list[Request]:
    """Greedy and drawn, with penalties and log-probabilities, long and short, some of which begin alike."""
    first, second, third, fourth, fifth = prompts((60, 17, 5, 1, 150))
    drawn = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9, seed=3, logprobs=2, n=2)
    punished = SamplingParams(max_tokens=7, ignore_eos=True, temperature=1.0, seed=4, top_p=0.9, frequency_penalty=0.6)
    scored = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, prompt_logprobs=1)
    return [
        request("long", first),
        request("drawn", second, drawn),
        request("punished", third, punished),
        request("one", fourth, dataclasses.replace(GREEDY, max_tokens=12)),
        request("scored", second + third, scored),
        request("longest", fifth),
        request("again", first + third),
        request("begins alike", fifth[:140] + second),
    ]


def answer(running: Engine) -> dict[str, list[SequenceOutput]]:
    """Outputs of every sequence. One request is aborted on its way, before and behind it everything else goes on."""
    aborted = request("aborted", prompts((33,))[0], dataclasses.replace(GREEDY, max_tokens=100))
    running.add(aborted)
    for one in requests():
        running.add(one)
    found: dict[str, list[SequenceOutput]] = {}
    steps = 0
    while running.has_work():
        steps += 1
        if steps == 9:
            running.abort(["aborted"])
        for output in running.step():
            found.setdefault(f"{output.request_id}#{output.index}", []).append(output)
    found.pop("aborted#0", None)
    return found


def tokens(found: dict[str, list[SequenceOutput]]) -> dict[str, list[int]]:
    return {name: [token for one in outputs for token in one.token_ids] for name, outputs in found.items()}


def logprobs(found: dict[str, list[SequenceOutput]]) -> torch.Tensor:
    """Those of tokens and prompts, in a fixed order."""
    numbers: list[float] = []
    for name in sorted(found):
        for one in found[name]:
            scored = [*(one.logprobs or ()), *(one.prompt_logprobs or ())]
            numbers += [entry.logprob for entry in scored if entry is not None]
    return torch.tensor(numbers)


def compare(model: Path, **layout: Any) -> None:
    torch.set_num_threads(1)
    alone = engine(model, **OPTIONS)
    want = answer(alone)
    several = engine(model, threads=1, **OPTIONS | layout)
    try:
        found = answer(several)
        assert_same(tokens(found), tokens(want))
        apart = (logprobs(found) - logprobs(want)).abs()
        if apart.max() > 2e-5:
            # Prompts are cut elsewhere, and the sums of a recurrence are made in other chunks. So they are on one rank
            # with other limits of a step, which shows how much each number depends on that.
            spread = torch.zeros_like(apart)
            for tokens_of_step in (12, 32, 64):
                cut = answer(engine(model, **OPTIONS | {"max_num_batched_tokens": tokens_of_step}))
                spread = spread.maximum((logprobs(cut) - logprobs(want)).abs())
            assert (apart <= 2e-5 + 2 * spread).all(), (apart, spread)
        # Once more, with what is cached.
        assert_same(tokens(answer(several)), tokens(want))
        assert several.stats().prefix_hits > 0 or not alone.stats().prefix_hits
        assert_idle(several)
    finally:
        several.close()


@pytest.mark.parametrize("name", [*FAMILIES, SHARING])
def test_two_stages_give_the_tokens_of_one_rank(name: str, tmp_path: Path) -> None:
    compare(write(name, tmp_path), pipeline_parallel_size=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_two_ranks_give_the_tokens_of_one_rank(name: str, tmp_path: Path) -> None:
    compare(write(name, tmp_path), pipeline_parallel_size=2, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "name",
    ["DeepseekV4ForCausalLM", *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES if "V4" not in one)],
)
def test_stages_of_data_parallel_ranks_give_the_tokens_of_one_rank(name: str, tmp_path: Path) -> None:
    experts = "Llama" not in name
    compare(write(name, tmp_path), pipeline_parallel_size=2, data_parallel_size=2, enable_expert_parallel=experts)


@pytest.mark.parametrize(
    ("name", "data"), [("LlamaForCausalLM", 2), ("DeepseekV4ForCausalLM", 1), ("Qwen3NextForCausalLM", 1), (SHARING, 1)]
)
def test_steps_on_static_buffers(name: str, data: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: decode steps read what a stage receives, and write what it sends, in buffers of a padded size."""
    torch.set_num_threads(1)
    model = write(name, tmp_path)
    want = answer(engine(model, **OPTIONS))
    start_static_ranks(tmp_path / "site", monkeypatch)
    several = engine(model, pipeline_parallel_size=2, data_parallel_size=data, threads=1, **OPTIONS)
    try:
        runner = static_steps(several)
        assert_same(tokens(answer(several)), tokens(want))
        assert_idle(several)
        assert runner.graphs is not None and runner.graphs.eager >= 10
    finally:
        several.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_as_many_stages_as_layers(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    compare(model, pipeline_parallel_size=layers)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_drafts_from_text_are_verified_exactly(name: str, tmp_path: Path) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    compare(write(name, tmp_path), pipeline_parallel_size=2, speculative_config=json.dumps(lookup))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV32ForCausalLM"])
def test_preempted_sequences_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    longer = dataclasses.replace(GREEDY, max_tokens=60)
    asked = [request(f"r{i}", ids, longer) for i, ids in enumerate(prompts((90,) * 4))]
    alone = engine(model, **OPTIONS)
    for one in asked:
        alone.add(one)
    want = drain(alone)
    layout = {"pipeline_parallel_size": 2, "threads": 1, "enable_prefix_caching": False}
    config = EngineConfig(model=str(model), dtype="float32", **OPTIONS | layout)
    demand = Demand(context=256, sequences=4, step_tokens=24, reuse=False)
    sizes = [
        make_plan(resolve_load_plan(config, Parallel.of(config.layout, rank)).groups, demand, 420).bytes
        for rank in range(2)
    ]
    tight = engine(model, **OPTIONS | layout, kv_cache_memory_bytes=max(sizes), scheduler_reserve_full_isl=False)
    try:
        for one in asked:
            tight.add(one)
        assert_same(drain(tight), want)
        assert tight.stats().preemptions > 0
        assert_idle(tight)
    finally:
        tight.close()


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "DeepseekV4ForCausalLM"])
def test_too_little_memory_is_refused_with_what_every_stage_needs(name: str, tmp_path: Path) -> None:
    """Of these models the second stage needs more than the first."""
    (tmp_path / "config.json").write_text(json.dumps(find_architecture({"architectures": [name]}, name).tiny()))
    options = {"load_format": "dummy", "max_model_len": 192, "threads": 1, "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError) as refused:
        engine(tmp_path, **options, kv_cache_memory_bytes=1)
    needed = int(str(refused.value).rpartition("--kv-cache-memory-bytes ")[2].rstrip("."))
    with pytest.raises(ConfigError, match=f"needs {needed} bytes; {needed - 1} bytes are given"):
        engine(tmp_path, **options, kv_cache_memory_bytes=needed - 1)
    engine(tmp_path, **options, kv_cache_memory_bytes=needed).close()


def test_grammars_hold_answers_of_every_step_in_flight(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = write_tiny_model(tmp_path)
    schema = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 5}
    held = SamplingParams(temperature=1.0, max_tokens=100, seed=1, grammar=Grammar("json_schema", json.dumps(schema)))
    free = SamplingParams(temperature=0.0, max_tokens=20)
    asked = [[9, 40, 41], [5, 6], [8], [9, 40, 41, 7]]
    params = [held, free, held, dataclasses.replace(held, seed=2)]
    found = []
    for stages in (1, 2):
        llm = LLM(str(model), load_format="dummy", dtype="float32", threads=1, pipeline_parallel_size=stages)
        try:
            found.append([one.outputs[0].text for one in llm.generate(asked, params)])
        finally:
            llm.close()
    assert found[0] == found[1]
    assert all(set(json.loads(found[1][i])) <= {1, 22, 333} for i in (0, 2, 3))


def test_steps_of_other_sequences_are_in_flight(tmp_path: Path) -> None:
    """When the tokens of one step are read, the next one has been launched, for all other sequences."""
    torch.set_num_threads(1)
    running = engine(write("LlamaForCausalLM", tmp_path), pipeline_parallel_size=2, threads=1, **OPTIONS)
    try:
        loop = running._loop
        assert isinstance(loop, PipelineLoop)
        for i, ids in enumerate(prompts((3, 4, 5, 6))):
            running.add(request(f"r{i}", ids, dataclasses.replace(GREEDY, max_tokens=20)))
        overlaps = 0
        while running.has_work():
            read = {output.request_id for output in running.step()}
            flying = {row.seq.request.request_id for step in loop.in_flight for row in step.rows}
            assert not read & flying
            overlaps += bool(read) and len(flying) == 2
        # Two of the four in each, from the first step to the last but one.
        assert overlaps >= 38
    finally:
        running.close()


def test_aborted_sequences_in_flight_leave_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = write("Qwen3NextForCausalLM", tmp_path)
    want = drain_after(engine(model, **OPTIONS))
    running = engine(model, pipeline_parallel_size=2, threads=1, **OPTIONS)
    try:
        for i, ids in enumerate(prompts((30, 40))):
            running.add(request(f"gone{i}", ids))
        running.step()
        running.abort(["gone0", "gone1"])
        assert_idle(running)
        assert_same(drain_after(running), want)
        assert_idle(running)
    finally:
        running.close()


def drain_after(running: Engine) -> dict[str, list[int]]:
    running.add(request("after", prompts((21,))[0]))
    return drain(running)


@pytest.mark.parametrize("name", [*FAMILIES, SHARING])
def test_each_stage_reads_its_own_layers(name: str, tmp_path: Path) -> None:
    """Together they read every tensor once, and fill all their parameters with it."""
    write_random(find_architecture({"architectures": [name]}, "").tiny(), tmp_path, None, 0)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", pipeline_parallel_size=2)
    checkpoint = open_checkpoint(str(tmp_path))
    plans = [resolve_load_plan(config, Parallel.of(config.layout, rank)) for rank in range(2)]
    whole = make_decoder(plans[0].architecture, plans[0].spec, Build())
    want = Loader(whole, plans[0].architecture.rules(plans[0].spec)).load(dequantized(WithoutKvScales(checkpoint)))
    expected, tensors, filled = dict(whole.named_parameters()), 0, 0
    for plan in plans:
        model = make_decoder(plan.architecture, plan.spec, dataclasses.replace(Build(), stage=plan.stage))
        loader = Loader(model, plan.architecture.rules(plan.spec), model.is_elsewhere)
        tensors += loader.load(dequantized(WithoutKvScales(checkpoint))).tensors
        for parameter, values in model.named_parameters():
            assert torch.equal(values, expected[parameter]), parameter
            filled += 1
    assert tensors == want.tensors
    assert filled == len(expected)


def test_stages_hold_equal_bytes_as_far_as_they_can() -> None:
    spec = spec_of("LlamaForCausalLM")
    layers = spec.layers * 4
    count = len(layers)
    assert cut(layers, [10] * count, 0, 2) == (Stage(0, count // 2, count), Stage(count // 2, count, count))
    # The embedding counts as three layers.
    first, second = cut(layers, [10] * count, 30, 2)
    assert len(second) - len(first) in (2, 3, 4)
    assert [len(one) for one in cut(layers, [10] * count, 0, count)] == [1] * count


def test_a_stage_keeps_layers_together_that_share_a_cache() -> None:
    spec = spec_of(SHARING)
    owners = [layer.mixer.shares_cache_of for layer in spec.layers]
    first_owner = min(owner for owner in owners if owner is not None)
    stages = cut(spec.layers, [10] * len(owners), 0, 2)
    assert all(owner is None or i in stages[0] or owner in stages[1] for i, owner in enumerate(owners))
    with pytest.raises(ValueError, match=rf"needs {first_owner + 1} or fewer.*reads the cache of layer {first_owner}"):
        cut(spec.layers, [10] * len(owners), 0, first_owner + 2)


def spec_of(name: str) -> Any:
    from allotrope.architectures.registry import read_spec

    return read_spec(find_architecture({"architectures": [name]}, "").tiny(), "tiny")[1]


def test_too_many_stages_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pipeline_parallel_size=9 \(needs \d or fewer: \d layers"):
        engine(write("LlamaForCausalLM", tmp_path), pipeline_parallel_size=9, **OPTIONS)


def test_options_that_stages_lack_are_refused_together(tmp_path: Path) -> None:
    model = write("LlamaForCausalLM", tmp_path)
    draft = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match=r"method='draft_model' \(needs ngram or suffix.*step_log_seconds"):
        engine(model, pipeline_parallel_size=2, speculative_config=draft, step_log_seconds=1.0, **OPTIONS)
