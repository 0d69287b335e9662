"""Every architecture inside vLLM: its tokens and their log-probabilities are Transformers' and our engine's, in fp32.

Prompts are sent together, in chunks, a second time from cached blocks, and with so few blocks that requests are sent
back. Each time vLLM's own objects show that it was our model and our backend that ran.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from plugins.hosting import Answer, Hosted, assert_matches, hosted
from quantized_twins import write_twin
from tiny_checkpoints import prompts

from allotrope import LLM, SamplingParams
from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.verify.random_checkpoint import write_random
from allotrope.verify.transformers_model import TransformersModel, load_transformers

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

# Alone, within a block, and with answers that reach over the end of one.
LENGTHS = (1, 5, 13, 29, 45, 61, 64, 150)
GROWING = slice(2, 7)
COUNT = 8
BLOCK = 16
# With norms without weights, mixed streams, states: what is kept in fp32 beside bf16.
BFLOAT16 = ("DeepseekV4", "Gemma4", "GptOss", "KimiLinear", "Qwen3Next")
# Transformers from which an architecture is its own measure; before, our engine alone is. (5.19 gives MiMo's windows
# other logits than 5.23.)
RIGHT_SINCE = {"MiMoV2FlashForCausalLM": "5.23"}


class Checkpoint:
    """A random checkpoint of one architecture and what others make of it."""

    def __init__(self, architecture: str, directory: Path) -> None:
        config = find_architecture({"architectures": [architecture]}, architecture).tiny()
        write_random(config | {"architectures": [architecture]}, directory, None, 0)
        self.directory = directory

    @cached_property
    def transformers(self) -> TransformersModel:
        import json

        config = json.loads((self.directory / "config.json").read_text())
        _, spec = read_spec(config, str(self.directory))
        return load_transformers(self.directory, config, torch.float32, len(spec.layers))

    def ours(self, asked: list[list[int]]) -> list[list[int]]:
        """What our own engine answers."""
        llm = LLM(str(self.directory), dtype="float32", max_model_len=256)
        found = llm.generate(asked, SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in found]

    def bf16(self, asked: list[list[int]]) -> list[Answer]:
        """What our own engine answers in bf16."""
        llm = LLM(str(self.directory), dtype="bfloat16", max_model_len=256)
        wanted = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
        found = [output.outputs[0] for output in llm.generate(asked, wanted)]
        return [
            Answer(list(one.token_ids), torch.tensor([step.logprob for step in one.logprobs or ()]), 0) for one in found
        ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture(architecture: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(architecture, tmp_path)
    asked = prompts(LENGTHS, vocab_size=300)
    with hosted(tmp_path, block_size=BLOCK, enable_prefix_caching=True, max_num_batched_tokens=64) as running:
        first = running.answers(asked, COUNT)
        again = running.answers(list(reversed(asked)), COUNT)[::-1]
        running.assert_ours()
        _assert_one_table(running)
        longest_run = _shared_run(running)
        one = running.blocks_for_one()
    if Version(transformers.__version__) >= Version(RIGHT_SINCE.get(architecture, "5")):
        assert_matches(first, asked, checkpoint.transformers.logits)
    assert [answer.ids for answer in first] == checkpoint.ours(asked)
    _assert_same(again, first)
    assert sum(answer.cached for answer in first) == 0
    # Whole runs can always be reused; where sizes of blocks have no small common multiple, vLLM finds shorter ones.
    assert again[-1].cached > 0 or longest_run >= LENGTHS[-1], f"prefixes are shared in runs of {longest_run}"
    _sent_back(tmp_path, one, asked, first)
    if architecture.removesuffix("ForCausalLM") in BFLOAT16:
        # What our own engine keeps in fp32 stays so where all of vLLM is in bf16.
        with hosted(tmp_path, block_size=BLOCK, dtype="bfloat16") as running:
            found = running.answers(asked, COUNT)
        # The median: where an expert is chosen by a hair, rounding chooses another one, in our own engine as well.
        far, usual = (
            apart(one, asked, checkpoint.transformers.logits).median() for one in (found, checkpoint.bf16(asked))
        )
        assert far < 2 * usual + 0.01, f"{far:.3f} from fp32; our own engine {usual:.3f}"


def test_pages_of_one_token(tmp_path: Path) -> None:
    checkpoint = Checkpoint("DeepseekV3ForCausalLM", tmp_path)
    asked = prompts((1, 5, 45), vocab_size=300)
    with hosted(tmp_path, block_size=1) as running:
        assert [answer.ids for answer in running.answers(asked, COUNT)] == checkpoint.ours(asked)


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "GptOssForCausalLM"])
def test_weights_stay_quantized(architecture: str, tmp_path: Path) -> None:
    """As in our own engine, from the codes and scales that vLLM hands over one by one."""
    import json

    Checkpoint(architecture, tmp_path / "plain")
    path = write_twin(tmp_path / "plain", tmp_path / "twin", mxfp4=architecture == "GptOssForCausalLM")
    config = json.loads((path / "config.json").read_text())
    # Of FP8, vLLM wants to know this.
    config["quantization_config"]["activation_scheme"] = "dynamic"
    (path / "config.json").write_text(json.dumps(config))
    asked = prompts((5, 45), vocab_size=300)
    llm = LLM(str(path), dtype="bfloat16", max_model_len=256, quantized_weights="keep")
    wanted = llm.generate(asked, SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True))
    options = {"dtype": "bfloat16", "additional_config": {"allotrope": {"quantized_weights": "keep"}}}
    with hosted(path, **options) as running:
        assert running.runner.model.build.formats
        found = running.answers(asked, COUNT)
    assert [answer.ids for answer in found] == [list(output.outputs[0].token_ids) for output in wanted]


def apart(answers: list[Answer], asked: list[list[int]], logits: Any) -> torch.Tensor:
    """How far the log-probability of each answered token is from that of `logits`."""
    found = []
    for prompt, answer in zip(asked, answers, strict=True):
        want = torch.log_softmax(logits([*prompt, *answer.ids[:-1]])[len(prompt) - 1 :].float(), -1)
        found.append(answer.logprobs - want.gather(1, torch.tensor(answer.ids)[:, None]).squeeze(1))
    return torch.cat(found).abs()


def _assert_one_table(running: Hosted) -> None:
    """One group of caches where one block table does, of equally many tokens a page."""
    from allotrope.plugins.vllm.translate import one_table

    layers = running.runner.compilation_config.static_forward_context
    if one_table([cache.layout for cache in layers.values()]):
        assert [spec.block_size for spec in running.groups] == [BLOCK]


def _shared_run(running: Hosted) -> int:
    """Tokens in which vLLM shares prefixes: the least common multiple of its block sizes."""
    import math

    return math.lcm(*(spec.block_size for spec in running.groups))


def _sent_back(path: Path, one: int, asked: list[list[int]], want: list[Answer]) -> None:
    """With blocks for little more than one request of full length, requests end others and are computed again."""
    few = {"num_gpu_blocks_override": one + 3, "enable_prefix_caching": False, "max_num_batched_tokens": 64}
    with hosted(path, block_size=BLOCK, **few) as running:
        _assert_same(running.answers(asked[GROWING] * 3, COUNT), want[GROWING] * 3)
        running.assert_ours()
        # Where a block holds a whole request, nobody can run out of blocks after the start.
        grows = any(spec.block_size == BLOCK for spec in running.groups)
        assert not grows or running.metric("vllm:num_preemptions") > 0


def _assert_same(found: list[Answer], want: list[Answer]) -> None:
    assert [answer.ids for answer in found] == [answer.ids for answer in want]
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=5e-4, rtol=0.0)
