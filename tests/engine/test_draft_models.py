"""A whole model drafts for another: the tokens are those without drafts, and drafts are what it would go on with."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.speculating import LOADED, directory, families, models, speculating, speculative_config
from engine.static_reference import static_steps
from engine.test_speculation import poison, settings, tokens_of, told
from engine.watching import engine, request
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.plan_report import report_model
from allotrope.engine.planning.step_cost import ModelCost
from allotrope.errors import AllotropeError
from allotrope.request import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("kept_workers")

TRAINED = Path(__file__).parents[2] / "train" / "models"
READ = {"load_format": "auto", "max_model_len": 512}


def greedy(lengths: tuple[int, ...], count: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [request(f"r{i}", ids, params) for i, ids in enumerate(prompts(lengths))]


def drafting(target: Path, draft: Path, k: int, **options: Any) -> Engine:
    wanted = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k, "adaptive": False}
    return engine(target, speculative_config=json.dumps(wanted), **{**LOADED, **options})


@pytest.mark.parametrize("name", [name for name in models() if not families(name) & {"csa", "gdn"}])
@pytest.mark.parametrize("mode", ["chunked", "async"])
def test_the_drafts_of_a_model_for_itself_are_all_accepted(name: str, mode: str) -> None:
    torch.set_num_threads(1)
    # One token behind the prompt, then 4 a step.
    asked = greedy((3, 30, 41), 33)
    want = tokens_of(told(engine(directory(name), **LOADED), asked))
    running = drafting(directory(name), directory(name), 3, **settings(name, "draft_model", 3, mode))
    if mode == "async":
        static_steps(running)
    poison(running)
    for _ in range(2):
        # The second time prompts are in the prefix cache, with the draft model's rows.
        assert tokens_of(told(running, asked)) == want
    assert running.stats().prefix_hits
    counts = running.stats().speculation
    # Where chunks of prompts fill a step, it has room for fewer drafts.
    assert counts is not None and counts.accepted_tokens == counts.draft_tokens > 2 * 60
    assert mode == "chunked" or counts.draft_tokens == 2 * 3 * 24
    running.close()


@pytest.mark.parametrize("name", ["MistralForCausalLM", "MiMoV2FlashForCausalLM"])
def test_drafts_are_how_the_draft_model_goes_on(name: str) -> None:
    torch.set_num_threads(1)
    running = speculating(directory(name), "draft_model", 3, {}, max_num_batched_tokens=16)
    (one,) = greedy((37,), 9)
    (tokens,) = tokens_of(told(running, [one])).values()
    drafted: dict[tuple[str, int], list[int]] = running.head.drafted  # type: ignore[attr-defined]
    assert max(map(len, drafted.values())) == 3
    alone = engine(directory(name) / "draft_model", **LOADED)
    for (_, count), found in drafted.items():
        params = SamplingParams(temperature=0.0, max_tokens=len(found), ignore_eos=True)
        asked = request("r", [*one.prompt_ids, *tokens[:count]], params)
        assert [found] == ([*tokens_of(told(alone, [asked])).values()] if found else [[]])
    running.close()


@pytest.mark.parametrize(("name", "draft"), [("qwen3_next", "gpt_oss"), ("deepseek_v32", "qwen3_moe")])
def test_drafts_of_another_trained_model_are_accepted(name: str, draft: str) -> None:
    torch.set_num_threads(1)
    text = list((TRAINED / "held_out.txt").read_bytes()[:200])
    asked = [request("a", text, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))]
    want = tokens_of(told(engine(TRAINED / name, **{**LOADED, **READ}), asked))
    running = drafting(TRAINED / name, TRAINED / draft, 3, **READ)
    assert tokens_of(told(running, asked)) == want
    counts = running.stats().speculation
    assert counts is not None
    # 13 of 23 first drafts are accepted, or 17 of 17; one of 320 tokens is right by chance.
    assert counts.accepted_per_position[0] > 0.5 * counts.drafts
    running.close()


def test_a_draft_model_costs_a_pass_for_each_draft() -> None:
    folder = directory("MistralForCausalLM")
    wanted = speculative_config(folder, "draft_model", 2)
    config = EngineConfig(model=str(folder), dtype="float32", speculative_config=wanted, **LOADED)
    plain = resolve_load_plan(EngineConfig(model=str(folder), dtype="float32", **LOADED))
    load_plan = resolve_load_plan(config)
    draft = load_plan.meta_draft()
    assert draft is not None and (load_plan.lookahead, plain.lookahead) == (2, 0)
    weights = sum(parameter.nbytes for parameter in draft.parameters())
    assert load_plan.weight_bytes - plain.weight_bytes == weights
    assert load_plan.num_layers == len(plain.specs) + len(draft.layers)
    # Besides one pass over the rows of the step, whose head is not read.
    one, two = (ModelCost(load_plan).drafted(40, (count,))["draft"].bytes for count in (1, 2))
    assert 1.5 * weights < one < 2.5 * weights
    assert 0.9 * weights < two - one < 1.5 * weights
    report = report_model(config, 1 << 30)
    assert report.draft_weight_bytes == weights and report.model_summary().draft_bytes > weights


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    target = directory("MistralForCausalLM")
    numbers = itertools.count()

    def refused(name: str, changed: dict[str, Any], **options: Any) -> str:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        config = find_architecture({"architectures": [name]}, "").tiny()
        vocab = {"vocab_size": json.loads((target / "config.json").read_text())["vocab_size"]}
        (folder / "config.json").write_text(json.dumps(config | vocab | changed))
        with pytest.raises(AllotropeError) as error:
            drafting(target, folder, 2, **options)
        assert str(folder) in str(error.value)
        return str(error.value)

    assert "vocab_size=96 differs from the" in refused("LlamaForCausalLM", {"vocab_size": 96})
    assert "gdn: recurrent states and compressed rows" in refused("Qwen3NextForCausalLM", {})
    assert "csa: recurrent states and compressed rows" in refused("DeepseekV4ForCausalLM", {})
    assert "Give --max-model-len 128 or less" in refused("LlamaForCausalLM", {"max_position_embeddings": 128})
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    assert "tensor_parallel_size=2" in refused("LlamaForCausalLM", heads, tensor_parallel_size=2)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    name = "MistralForCausalLM"
    shutil.copytree(directory(name), tmp_path / "target")
    draft = tmp_path / "target" / "draft_model"

    def write(folder: Path, vocab: dict[str, int], added: int) -> None:
        tokens = [{"id": added, "content": "<end>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))

    write(tmp_path / "target", {"a": 0, "b": 1}, 7)
    write(draft, {"a": 0, "b": 2}, 7)
    with pytest.raises(AllotropeError, match="1 texts have other ids, such as 'b' is 2 and 1"):
        drafting(tmp_path / "target", draft, 2)
