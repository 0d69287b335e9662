"""Every architecture from a GGUF file as llama.cpp writes it, against the checkpoint that was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import Watch, engine, request, run
from gguf_tiny import CONFIGS, write_checkpoint
from gguf_twins import ARCHITECTURES, write_gguf_twin
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES as KNOWN
from allotrope.checkpoint.gguf_architectures import ARCHITECTURES as READ
from allotrope.checkpoint.gguf_architectures import REFUSED

LENGTHS = (1, 3, 40)
# Of logits up to 40, unless the checkpoint itself has others in steps of other lengths: positions differ in how far
# they carry a rounding, and processors in how they round.
ATOL = 2e-4


def seen_logits(model: str, ids: dict[str, list[int]], **options: Any) -> dict[str, torch.Tensor]:
    """Name -> [L, vocabulary]: the logits that the engine computes at every position of each prompt."""
    watch = Watch()
    running = engine(model, watch, max_model_len=64, max_num_seqs=4, enable_prefix_caching=False, **options)
    run(running, [request(name, prompt) for name, prompt in ids.items()])
    return {name: torch.stack([watch.seen[name][i] for i in range(len(prompt))]) for name, prompt in ids.items()}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_converted_checkpoint_has_the_same_logits(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    directory = write_checkpoint(CONFIGS[name](), tmp_path / "model")
    file = write_gguf_twin(directory, tmp_path / "model.gguf")
    ids = {f"p{len(one)}": one for one in prompts(LENGTHS)}
    want, got = seen_logits(str(directory), ids), seen_logits(file, ids)
    in_chunks = seen_logits(str(directory), ids, max_num_batched_tokens=9)
    for prompt in ids:
        by_position = [(one[prompt] - want[prompt]).abs().amax(1) for one in (got, in_chunks)]
        differs, rounds = by_position
        assert (differs <= rounds.clamp(min=ATOL)).all(), by_position


def test_every_architecture_has_a_file_or_a_reason() -> None:
    converted = {name for name in KNOWN if name in ARCHITECTURES}
    # Text parts of multimodal models are files of the text model; Kimi-K2.5's is a DeepSeek V3.
    inside = {name for name in KNOWN if name.endswith("ForConditionalGeneration")}
    assert set(KNOWN) - converted - inside == {"DeepseekV4ForCausalLM"}
    assert set(READ) - set(ARCHITECTURES.values()) == {"mistral3"}
    assert set(REFUSED) == {"deepseek4"}
