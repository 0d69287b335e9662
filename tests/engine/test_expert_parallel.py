"""Ranks that hold whole experts give the tokens of one rank, wherever the experts lie."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_distributed_executor import ASKED, compare, write
from engine.watching import assert_same, engine, run
from quantized_twins import write_int4_twin, write_twin

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.errors import ConfigError, ModelError
from allotrope.layers.moe import Experts, Moe, MoeSpec
from allotrope.layers.parallel import Parallel
from allotrope.rank_layout import RankLayout
from allotrope.verify.random_checkpoint import write_random

pytestmark = pytest.mark.usefixtures("kept_workers")

QUICK = ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM")


def has_experts(name: str) -> bool:
    config = find_architecture({"architectures": [name]}, "").tiny()
    layers = read_spec(config, name)[1].layers
    return any(isinstance(one.ffn, MoeSpec) or getattr(one.extra, "experts", None) is not None for one in layers)


WITH_EXPERTS = sorted(name for name in ARCHITECTURES if has_experts(name))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WITH_EXPERTS]
)
def test_two_ranks_with_whole_experts_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, enable_expert_parallel=True)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    model = write("LlamaForCausalLM", tmp_path)
    with pytest.raises(ModelError, match="enable_expert_parallel needs experts, and it has none"):
        engine(model, load_format="dummy", tensor_parallel_size=2, enable_expert_parallel=True)


def test_counts_that_could_not_be_written_are_refused_before_loading(tmp_path: Path) -> None:
    dense = write("Qwen3ForCausalLM", tmp_path)
    with pytest.raises(ModelError, match="expert_load_file needs experts, and it has none"):
        engine(dense, load_format="dummy", expert_load_file=str(tmp_path / "counts.json"))
    for file, reason in ((tmp_path / "none" / "counts.json", "there is no directory"), (tmp_path, "is a directory")):
        # A model that is not there would be refused next.
        with pytest.raises(ConfigError, match=f"bad options: expert_load_file=.*{reason}"):
            engine(tmp_path / "no_model", expert_load_file=str(file))


def test_fewer_experts_than_ranks_are_refused(tmp_path: Path) -> None:
    layout = RankLayout(1, 64, 1, expert_parallel=True)
    config = EngineConfig(model=str(write("GptOssForCausalLM", tmp_path)), load_format="dummy", device="cpu")
    with pytest.raises(ModelError, match=r"num_experts=\d+ is less than the 64 ranks that hold whole experts"):
        resolve_load_plan(config, Parallel.of(layout))


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "DeepseekV4ForCausalLM"])
def test_experts_placed_by_load_with_copies_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    """One rank counts; its counts place experts on two, with copies of the hottest."""
    torch.set_num_threads(1)
    model, counts = write(name, tmp_path), tmp_path / "counts.json"
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 128, "max_num_batched_tokens": 24}
    one = engine(model, expert_load_file=str(counts), **options)
    want = run(one, ASKED)
    topks = {name: module.router.spec.topk for name, module in one.model.named_modules() if isinstance(module, Moe)}
    one.close()
    loads = json.loads(counts.read_text())
    # Every token that ran chose as many experts; the last one of each request never runs.
    tokens = sum(len(one.prompt_ids) for one in ASKED) + sum(len(tokens) - 1 for tokens in want.values())
    assert {name: sum(load) for name, load in loads.items()} == {
        f"{name}.experts": tokens * topk for name, topk in topks.items()
    }
    by_load = {"enable_expert_parallel": True, "expert_placement": str(counts), "num_redundant_experts": 3}
    for layout in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2, "expert_load_file": str(counts)}):
        two = engine(model, threads=1, **layout, **by_load, **options)
        try:
            held = [one.count for one in two.model.modules() if isinstance(one, Experts)]
            assert {2 * count for count in held} <= {len(load) + copies for load in loads.values() for copies in (3, 4)}
            assert_same(run(two, ASKED), want)
        finally:
            two.close()
    # Ranks that were without requests for most of the steps have counted nothing in them.
    assert json.loads(counts.read_text()) == loads


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[" * 200_000, "cannot be read"),
        ("[1]", "it is no list of counts"),
        ('{"layers.0.ffn.experts": [true, true]}', "layers.0.ffn.experts is no list of counts"),
        (f'{{"layers.0.ffn.experts": [{10**400}]}}', "layers.0.ffn.experts is no list of counts"),
        ('{"layers.0.ffn.experts": [1, -1]}', "layers.0.ffn.experts is no list of counts"),
        ('{"layers.9.ffn.experts": [1, 1]}', "layers.9.ffn.experts has no experts; layers.0.ffn.experts is missing"),
    ],
)
def test_a_file_that_is_not_of_the_model_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    file.write_text(text)
    config = EngineConfig(
        model=str(write("GptOssForCausalLM", tmp_path)),
        load_format="dummy",
        device="cpu",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        expert_placement=str(file),
    )
    with pytest.raises(ConfigError, match=reason):
        resolve_load_plan(config, Parallel.of(config.layout))


def test_a_script_that_ends_without_close_has_the_counts(tmp_path: Path) -> None:
    counts, model = tmp_path / "counts.json", write("GptOssForCausalLM", tmp_path)
    script = (
        "import sys, allotrope\n"
        "model, file = sys.argv[1:]\n"
        "llm = allotrope.LLM(model, load_format='dummy', device='cpu', max_model_len=64, expert_load_file=file)\n"
        "llm.generate([[5, 6]], allotrope.SamplingParams(max_tokens=3, ignore_eos=True))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(model), str(counts)], check=True, timeout=120)
    assert all(sum(load) for load in json.loads(counts.read_text()).values())


def test_options_that_need_each_other(tmp_path: Path) -> None:
    model = str(write("GptOssForCausalLM", tmp_path))
    for options, reason in (
        ({"expert_placement": "f"}, "expert_placement needs enable_expert_parallel"),
        ({"num_redundant_experts": 1}, "num_redundant_experts needs expert_placement"),
    ):
        with pytest.raises(ConfigError, match=reason):
            resolve_load_plan(EngineConfig(model=model, load_format="dummy", device="cpu", **options))


@pytest.mark.parametrize("format", ["plain", "fp8", "mxfp4", "int4"])
def test_stored_weights_of_every_format(format: str, tmp_path: Path) -> None:
    """Read from files, and kept as they are stored: a rank multiplies whole experts, as one rank does. Products of FP8
    round activations, so that the order of a sum decides tokens: those weights are read plain.
    """
    torch.set_num_threads(1)
    name = "GptOssForCausalLM" if format == "mxfp4" else "Qwen3MoeForCausalLM"
    plain, model = tmp_path / "plain", tmp_path / "twin"
    write_random(find_architecture({"architectures": [name]}, "").tiny(), plain, None, 0)
    if format == "int4":
        write_int4_twin(plain, model)
    elif format != "plain":
        write_twin(plain, model, mxfp4=format == "mxfp4")
    else:
        model = plain
    options: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 24}
    options["quantized_weights"] = "dequantize" if format == "fp8" else "keep"
    one = engine(model, **options)
    kept = [module.formats[0].name for module in one.model.modules() if isinstance(module, Experts)]
    assert set(kept) == {"plain" if format == "fp8" else format}
    want = run(one, ASKED)
    two = engine(model, threads=1, tensor_parallel_size=2, enable_expert_parallel=True, **options)
    try:
        assert [module.formats[0].name for module in two.model.modules() if isinstance(module, Experts)] == kept
        assert_same(run(two, ASKED), want)
    finally:
        two.close()
