"""vLLM's speculative decoding with our models: the tokens are those without it, or the start is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import scripted_drafts
from plugins.hosting import ATOL, Answer, hosted
from plugins.test_fp8_rows import write
from safetensors.torch import save_file
from tiny_checkpoints import prompts

from allotrope import LLM, SamplingParams
from allotrope.architectures.registry import find_architecture
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.dequantize import dequantized

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

MODELS = Path(__file__).parents[2] / "train" / "models"
COUNT = 24
# The longest is computed in chunks, the shortest in steps of as many tokens as a step with drafts has.
ASKED = prompts((1, 3, 13, 45, 64, 150), vocab_size=300)
DRAFTS = 3
SCRIPTED = {
    "method": "custom_class",
    "model": "plugins.scripted_drafts.ScriptedDrafts",
    "num_speculative_tokens": DRAFTS,
}


def plain(path: Path, asked: list[list[int]]) -> list[list[int]]:
    """What our own engine answers without drafts, which is what vLLM does (test_in_vllm)."""
    llm = LLM(str(path), dtype="float32", max_model_len=256)
    wanted = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, wanted)]


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        # Windows of several sizes, sinks.
        "GptOssForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
    ],
)
def test_drafts_change_no_token(architecture: str, tmp_path: Path) -> None:
    """Right and wrong drafts, in chunks with others, from cached prefixes that hold rows of accepted drafts."""
    path = write(architecture, tmp_path)
    want = plain(path, ASKED)
    scripted_drafts.TEXTS[:] = [[*prompt, *ids] for prompt, ids in zip(ASKED, want, strict=True)]
    options: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": True, "max_num_batched_tokens": 64}
    with hosted(path, **options, speculative_config=SCRIPTED) as running:
        first = running.answers(ASKED, COUNT)
        drafted, accepted = (running.metric(f"vllm:spec_decode_num_{of}_tokens") for of in ("draft", "accepted"))
        grown = [[*prompt, *answer.ids[:-4]] for prompt, answer in zip(ASKED, first, strict=True)]
        again = running.answers(grown, 4)
        running.assert_ours()
    assert [answer.ids for answer in first] == want
    assert [answer.ids for answer in again] == [ids[-4:] for ids in want]
    _assert_same_logprobs(first, again)
    # Four of five drafts are right, and those behind a wrong one are not counted.
    assert 0.3 * drafted < accepted < 0.8 * drafted
    assert drafted > len(ASKED) * COUNT / 2


def _assert_same_logprobs(first: list[Answer], again: list[Answer]) -> None:
    for one, other in zip(first, again, strict=True):
        assert (one.logprobs[-4:] - other.logprobs).abs().max() < ATOL


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_draft_model(architecture: str, tmp_path: Path) -> None:
    """A model drafts for itself, so that every draft is right, and for a model of another family, where hardly any is.
    Both share one block table."""
    path, target = write("LlamaForCausalLM", tmp_path / "draft"), tmp_path / "target"
    own = architecture == "LlamaForCausalLM"
    target = path if own else write(architecture, target, vocab_size=_vocabulary(path))
    config = {"method": "draft_model", "model": str(path), "num_speculative_tokens": DRAFTS}
    with hosted(target, block_size=16, max_num_batched_tokens=64, speculative_config=config) as running:
        answers = running.answers(ASKED, COUNT)
        drafted, accepted = (running.metric(f"vllm:spec_decode_num_{of}_tokens") for of in ("draft", "accepted"))
        running.assert_ours()
    assert [answer.ids for answer in answers] == plain(target, ASKED)
    assert drafted > len(ASKED) * COUNT / 2
    assert accepted == drafted if own else accepted < drafted / 2


def _vocabulary(path: Path) -> int:
    size: int = json.loads((path / "config.json").read_text())["vocab_size"]
    return size


def test_our_draft_heads(tmp_path: Path) -> None:
    """The trained head of DeepSeek V3: tokens are those without drafts, and drafts those of our own engine."""
    text = list((MODELS / "held_out.txt").read_bytes()[:400])
    asked = [text[:n] for n in (1, 3, 17, 60, 150)]
    _assert_drafts_as_ours(_dequantized(MODELS / "deepseek_v3", tmp_path), asked, accepted=0.4)


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Glm4MoeForCausalLM"])
def test_our_draft_heads_of_other_models(architecture: str, tmp_path: Path) -> None:
    """Layers with index keys of their own, and with keys and values. Random heads are seldom right.

    Inside vLLM, which runs one draft's pass like another, each of GLM-5's selects its tokens.
    """
    made = find_architecture({"architectures": [architecture]}, architecture).tiny_draft
    assert made is not None
    config = {key: value for key, value in made().items() if key != "index_share_for_mtp_iteration"}
    _assert_drafts_as_ours(write(architecture, tmp_path, **config), ASKED, accepted=0.0)


def _dequantized(path: Path, directory: Path) -> Path:
    """The same checkpoint for fp32, in which vLLM takes no FP8 weights."""
    stored = dequantized(open_checkpoint(str(path)))
    save_file(
        {name: stored.read(name).float().contiguous() for name in stored.headers()}, directory / "model.safetensors"
    )
    config = json.loads((path / "config.json").read_text()) | {"torch_dtype": "float32"}
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _assert_drafts_as_ours(path: Path, asked: list[list[int]], accepted: float) -> None:
    """`accepted`: so much of all drafts at least.

    Drafts are compared of the last prompt but one, which is one chunk. At the end of a chunk of a longer prompt, vLLM
    gives a draft head the prompt's last token for the next one.
    """
    want = plain(path, asked)
    drafts = own_drafts(path, asked[-2])
    config = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    options: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": True, "max_num_batched_tokens": 64}
    with hosted(path, **options, speculative_config=config) as running:
        found: list[list[int]] = []
        propose = running.runner.drafter.propose

        def record(*args: Any, **kwargs: Any) -> torch.Tensor:
            proposed: torch.Tensor = propose(*args, **kwargs)
            found.extend(proposed.tolist())
            return proposed

        running.runner.drafter.propose = record
        alone = running.answers(asked[-2:-1], COUNT)
        running.runner.drafter.propose = propose
        together = running.answers(asked, COUNT)
        again = running.answers(asked, COUNT)
        drafted, right = (running.metric(f"vllm:spec_decode_num_{of}_tokens") for of in ("draft", "accepted"))
        running.assert_ours()
    assert [answer.ids for answer in together] == [answer.ids for answer in again] == want
    assert alone[0].ids == want[-2]
    assert drafted > 0 and right >= accepted * drafted
    # Our engine makes no drafts behind the last token that is asked for.
    assert len(drafts) >= COUNT // (1 + DRAFTS)
    assert [step[: len(ours)] for step, ours in zip(found, drafts, strict=False)] == drafts


def own_drafts(path: Path, prompt: list[int]) -> list[list[int]]:
    """What our own engine drafts behind `prompt`, by step."""
    config = json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS, "adaptive": False})
    llm = LLM(str(path), dtype="float32", max_model_len=256, speculative_config=config)
    executor = llm.engine._executor
    run_drafts: Any = executor.run_drafts
    found: list[list[int]] = []

    def record(token_ids: torch.Tensor, *, shared: bool) -> Any:
        drafted = run_drafts(token_ids, shared=shared)
        # Behind the last token of the sequence.
        found.append(drafted.next_tokens[1:].tolist())
        return drafted

    executor.run_drafts = record  # type: ignore[method-assign]
    llm.generate([prompt], SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True))
    return [drafts for drafts in found if drafts]
