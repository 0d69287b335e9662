"""Ranks that hold whole experts give the tokens of one rank, wherever the experts lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.test_multiprocess_executor import compare, write
from engine.watching import engine

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.errors import ModelError
from allotrope.layers.moe import MoeSpec
from allotrope.layers.parallel import Parallel
from allotrope.rank_layout import RankLayout

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


def test_fewer_experts_than_ranks_are_refused(tmp_path: Path) -> None:
    layout = RankLayout(1, 64, 1, expert_parallel=True)
    config = EngineConfig(model=str(write("GptOssForCausalLM", tmp_path)), load_format="dummy", device="cpu")
    with pytest.raises(ModelError, match=r"num_experts=\d+ is less than the 64 ranks that hold whole experts"):
        resolve_load_plan(config, Parallel.of(layout))
