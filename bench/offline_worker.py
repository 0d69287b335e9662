"""One engine's offline API in a process of its own, told by lines of JSON on stdin what to do; answers on stdout.

Runs in the Python of the engine that it stands for: at the top it may import nothing but the standard library.

    {"load": {"directory": ..., "options": {...}}}     ->  {"environment": {...}, "kv_tokens": n or null}
    {"run": {"prompts": [[ids], ...], "tokens": n}}    ->  {"seconds": s, "ids": [[...], ...]}
    {"memory": {}}                                     ->  {"device_used_gb": ..., "peak_reserved_gb": ...} or {}

A command that fails is answered by {"error": ...}.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""Prompts and a number of tokens to that many greedy tokens of each prompt, past any end token."""


def load_allotrope(directory: str, options: dict[str, Any]) -> tuple[Generate, int | None, str]:
    import allotrope
    from allotrope import LLM, SamplingParams

    llm = LLM(directory, **options)

    def generate(prompts: Prompts, tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    return generate, llm.engine.memory.tokens, getattr(allotrope, "__version__", "checkout")


def load_vllm(directory: str, options: dict[str, Any]) -> tuple[Generate, int | None, str]:
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(directory, **options)
    cache = llm.llm_engine.vllm_config.cache_config
    blocks = getattr(cache, "num_gpu_blocks", None)

    def generate(prompts: Prompts, tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, blocks * cache.block_size if blocks else None, vllm.__version__


LOADERS = {"allotrope": load_allotrope, "vllm": load_vllm}


def environment(version: str) -> dict[str, str]:
    """What a reader needs to run it again."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"version": version, "torch": torch.__version__, "python": platform.python_version(), "device": device}


def gpu_memory() -> dict[str, float]:
    """Of the whole device, now, and of this process's allocator at its peak."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"device_used_gb": (total - free) / 1e9, "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9}


def run(generate: Generate, prompts: Prompts, tokens: int) -> dict[str, Any]:
    """Time one batch. Raises RuntimeError if a prompt did not get all of its tokens."""
    begin = time.perf_counter()
    ids = generate(prompts, tokens)
    seconds = time.perf_counter() - begin
    wrong = [len(one) for one in ids if len(one) != tokens]
    if wrong or len(ids) != len(prompts):
        raise RuntimeError(f"{len(ids)} continuations of {len(prompts)} prompts, {wrong[:5]} tokens of {tokens}")
    return {"seconds": seconds, "ids": ids}


def main() -> None:
    # Libraries print: only answers may go where the parent reads.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Scripts of this folder must not pass for packages that the engines look for by name.
    sys.path.pop(0)
    generate: Generate | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "load" in command:
                generate, kv_tokens, version = LOADERS[sys.argv[1]](**command["load"])
                answer: dict[str, Any] = {"environment": environment(version), "kv_tokens": kv_tokens}
            elif "memory" in command:
                answer = gpu_memory()
            else:
                assert generate is not None
                answer = run(generate, **command["run"])
        except Exception as error:
            # The border of the process: an engine that cannot run a model is a result.
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
