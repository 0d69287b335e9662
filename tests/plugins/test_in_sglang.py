"""Every architecture inside SGLang: its tokens and their log-probabilities are our engine's, in fp32.

Prompts are sent together, in chunks, a second time from cached prefixes, and with so little memory that requests are
sent back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plugins.hosting_sglang import Round, ask, assert_equal, assert_ours, ours, write
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec

pytestmark = [pytest.mark.usefixtures("in_sglang"), pytest.mark.timeout(900)]

# Alone, within a page, and with answers that reach over the end of one.
LENGTHS = (1, 5, 13, 29, 45, 61, 64, 150)
# A page further after a few tokens, whatever the page: all of them do not fit.
GROWING = tuple(range(117, 129))
# Two ranks, by what they share out: heads of one and of several sizes, experts, states, latents.
SHARED = (
    "LlamaForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    "DeepseekV32ForCausalLM",
)


def options_of(architecture: str) -> dict[str, int | None]:
    """Pages and chunks of the sizes that the model's caches need."""
    names = {"architectures": [architecture]}
    config = find_architecture(names, architecture).tiny() | names
    _, spec = read_spec(config, architecture)
    from allotrope.plugins.sglang.memory import CacheMemory, planned_layouts

    memory = CacheMemory(planned_layouts(spec, architecture))
    if memory.state_bytes:
        return {"page_size": None}
    return {"page_size": None, "chunked_prefill_size": 128} if memory.row_stride > 16 else {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture(architecture: str, tmp_path: Path) -> None:
    path = write(architecture, tmp_path)
    first = Round(prompts(LENGTHS, vocab_size=300))
    growing = Round(prompts(GROWING, vocab_size=300), 48, ignore_eos=False)
    again = Round(first.prompts[::-1])
    asked = ask(path, [first, again, growing], fork=True, **options_of(architecture))
    assert_ours(asked)
    cold, warm, sent_back = asked.answers
    want = ours(path, first)
    assert_equal(cold, want)
    assert_equal(warm, type(want)(want.ids[::-1], want.logprobs[::-1], [], []))
    assert_equal(sent_back, ours(path, growing))
    assert sum(cold.cached) == 0 and warm.cached[0] > 0, warm.cached
    assert sum(sent_back.retracted) > 0


@pytest.mark.parametrize("architecture", SHARED)
def test_two_ranks_answer_as_one(architecture: str, tmp_path: Path) -> None:
    path, first = write(architecture, tmp_path), Round(prompts((1, 45, 90), vocab_size=300), 6)
    # The first starts processes as SGLang does.
    fork = architecture != SHARED[0]
    asked = ask(path, [first, first], tp_size=2, fork=fork, **options_of(architecture))
    assert_ours(asked)
    assert "TP1] allotrope: caches in SGLang's pools" in asked.log
    want = ours(path, first)
    for found in asked.answers:
        assert_equal(found, want)
    assert asked.answers[1].cached[-1] > 0


@pytest.mark.parametrize(
    ("architecture", "options", "of_ours"),
    [
        ("GptOssForCausalLM", {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        # Our engine keeps states inside a prompt for its prefix cache, and rounds there.
        (
            "Qwen3NextForCausalLM",
            {"mamba_ssm_dtype": "bfloat16"},
            {"state_dtype": "bfloat16", "enable_prefix_caching": False},
        ),
    ],
    ids=["FP8 entries", "bfloat16 states"],
)
def test_types_of_caches(architecture: str, options: dict[str, Any], of_ours: dict[str, Any], tmp_path: Path) -> None:
    path, first = write(architecture, tmp_path), Round(prompts((5, 45), vocab_size=300))
    asked = ask(path, [first], fork=True, **(options_of(architecture) | options))
    assert_ours(asked)
    assert_equal(asked.answers[0], ours(path, first, **of_ours))


def test_embeddings_answer_as_their_ids(tmp_path: Path) -> None:
    """In chunks and beside each other, and the server goes on behind them."""
    path, given = write("Qwen3ForCausalLM", tmp_path), prompts((5, 90, 17), vocab_size=300)
    weights = load_file(path / "model.safetensors")
    # SGLang rounds embeddings, whatever type the model has.
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].bfloat16().float()
    save_file(weights, path / "model.safetensors")
    first, embedded = Round(given), Round(given, embedded=True)
    asked = ask(path, [first, embedded, first], fork=True, disable_radix_cache=True)
    assert_ours(asked)
    want = ours(path, first)
    for found in asked.answers:
        assert_equal(found, want)
