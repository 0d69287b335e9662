"""Inside vLLM with two ranks: layers share work in its group, and answers are those of our engine alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plugins.hosting import ATOL, run_apart
from tiny_checkpoints import prompts

from allotrope import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(600)]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "Qwen3NextForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
)
COUNT = 6
# The checkpoint is written before vLLM is imported, which teaches Transformers other classes of configs.
CODE = """
import json
from pathlib import Path
if __name__ == "__main__":
    from allotrope.architectures.registry import find_architecture
    from allotrope.verify.random_checkpoint import write_random
    given = json.loads({given!r})
    names = dict(architectures=[given["architecture"]])
    write_random(find_architecture(names, "").tiny() | names, Path(given["path"]), None, 0)
    from vllm import LLM, SamplingParams
    from plugins.hosting import model_of
    llm = LLM(
        given["path"], tensor_parallel_size=2, distributed_executor_backend="mp", skip_tokenizer_init=True,
        enforce_eager=True, dtype="float32", max_model_len=256, max_num_seqs=8,
    )
    wanted = SamplingParams(max_tokens=given["count"], temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
    asked = [dict(prompt_token_ids=prompt) for prompt in given["prompts"]]
    answers = [output.outputs[0] for output in llm.generate(asked, wanted, use_tqdm=False)]
    found = dict(
        ids=[list(answer.token_ids) for answer in answers],
        logprobs=[[step[id].logprob for step, id in zip(answer.logprobs, answer.token_ids)] for answer in answers],
        models=llm.collective_rpc(model_of),
    )
    print("FOUND" + json.dumps(found), flush=True)
"""
# A core for each rank is not asked for; functions may be sent to the ranks.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_answer_as_one(architecture: str, tmp_path: Path) -> None:
    asked = prompts((1, 45, 90), vocab_size=300)
    named = {"architecture": architecture, "path": str(tmp_path)}
    given = json.dumps(named | {"prompts": [list(prompt) for prompt in asked], "count": COUNT})
    done = run_apart(CODE.format(given=given), ENVIRONMENT)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), None)
    assert line is not None, done.stderr[-3000:]
    found = json.loads(line.removeprefix("FOUND"))
    # Rank by rank.
    assert [module for module, _, _ in found["models"]] == ["allotrope.plugins.vllm.model"] * 2
    assert [(rank, size) for _, rank, size in found["models"]] == [(0, 2), (1, 2)]
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 26)
    try:
        wanted = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
        engine = [output.outputs[0] for output in llm.generate(asked, wanted)]
    finally:
        llm.close()
    assert found["ids"] == [list(one.token_ids) for one in engine]
    for got, one in zip(found["logprobs"], engine, strict=True):
        want = torch.tensor([step.logprob for step in one.logprobs or ()])
        torch.testing.assert_close(torch.tensor(got), want, atol=ATOL, rtol=0.0)
