"""Two ranks on a CPU give the tokens of one; a rank that ends takes the engine with it, in one line.

Weights are the reproducible random ones, which are the same numbers at every parallel size.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from engine.watching import assert_same, engine, request, run
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.errors import EngineDead, ModelError

# One of each family here, all others when slow; wrappers have the decoder of what they wrap.
QUICK = ("LlamaForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "Qwen3NextForCausalLM")
ASKED = [request(f"r{i}", ids) for i, ids in enumerate(prompts((3, 17, 40, 1)))]


def write(name: str, directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(find_architecture({"architectures": [name]}, "").tiny()))
    return directory


def compare(name: str, directory: Path, size: int = 2) -> None:
    torch.set_num_threads(1)
    options = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    model = write(name, directory)
    want = run(engine(model, **options), ASKED)
    several = engine(model, tensor_parallel_size=size, threads=1, **options)
    try:
        assert_same(run(several, ASKED), want)
    finally:
        several.close()


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", pytest.param("MiniMaxM2ForCausalLM", marks=pytest.mark.slow)])
def test_more_ranks_than_kv_heads_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    """Pairs of ranks hold copies of a head; the second pair those of the second head."""
    compare(name, tmp_path, size=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(QUICK)))
def test_two_ranks_give_the_tokens_of_one_everywhere(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path)


def test_heads_that_cannot_be_shared_are_refused_with_the_numbers(tmp_path: Path) -> None:
    model = write("LlamaForCausalLM", tmp_path)
    with pytest.raises(ModelError, match=r"num_attention_heads=4 is not a multiple of tensor_parallel_size=3"):
        engine(model, load_format="dummy", tensor_parallel_size=3)


def test_a_dead_rank_is_named_at_the_next_step(tmp_path: Path) -> None:
    two = engine(
        write("LlamaForCausalLM", tmp_path), load_format="dummy", tensor_parallel_size=2, threads=1, max_model_len=128
    )
    try:
        run(two, ASKED)
        os.kill(two.process_ids()[0], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
            run(two, [request("again", [9, 10])])
    finally:
        two.close()
