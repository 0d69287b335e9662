"""One engine in a process of its own, told by lines of JSON on stdin what to load and run; answers on stdout.

Runs in the Python of the engine that it stands for: at the top it may import nothing but the standard library.

    {"load": {"directory": ..., "dtype": ..., "sequences": ..., "length": ...}}  ->  {} or {"error": ...}
    {"run": {"prompts": [[ids], ...], "tokens": n}}                  ->  {"seconds": ..., "ids": [[...], ...]}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""Prompts and a number of tokens to that many greedy tokens of each prompt, past any end token."""


def load_allotrope(job: dict[str, Any]) -> tuple[Generate, Callable[[], None]]:
    from allotrope import LLM, SamplingParams

    llm = LLM(
        job["directory"],
        dtype=job["dtype"],
        max_model_len=job["length"],
        max_num_seqs=job["sequences"],
        enable_prefix_caching=False,
        threads=job["threads"],
    )

    def generate(prompts: Prompts, tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    return generate, llm.close


def load_transformers(job: dict[str, Any]) -> tuple[Generate, Callable[[], None]]:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(job["directory"])
    cls = transformers.AutoModelForCausalLM
    if type(config) not in cls._model_mapping:
        cls = transformers.AutoModelForImageTextToText
    model = cls.from_pretrained(job["directory"], dtype=getattr(torch, job["dtype"])).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        return [row[len(prompts[0]) :] for row in found.tolist()]

    return generate, lambda: None


def load_vllm(job: dict[str, Any]) -> tuple[Generate, Callable[[], None]]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    # Its own rotary kernel is wrong on CPUs for queries of several heads, which DeepSeek's models give it.
    wrong_rotary = "kv_lora_rank" in json.dumps(job["config"])
    llm = LLM(
        job["directory"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=not job["compile"],
        max_model_len=job["length"],
        max_num_seqs=job["sequences"],
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
        compilation_config={"custom_ops": ["-rotary_embedding"]} if wrong_rotary else {},
    )

    def generate(prompts: Prompts, tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, cleanup_dist_env_and_memory


LOADERS = {"allotrope": load_allotrope, "transformers": load_transformers, "vllm": load_vllm}


def main() -> None:
    # Libraries print: only answers may go where the parent reads.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Scripts of this folder must not pass for packages that the engines look for by name.
    sys.path.pop(0)
    load = LOADERS[sys.argv[1]]
    loaded: tuple[Generate, Callable[[], None]] | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "load" in command:
                if loaded is not None:
                    loaded[1]()
                loaded = None
                gc.collect()
                loaded = load(command["load"])
                answer: dict[str, Any] = {}
            else:
                assert loaded is not None
                begin = time.perf_counter()
                ids = loaded[0](command["run"]["prompts"], command["run"]["tokens"])
                answer = {"seconds": time.perf_counter() - begin, "ids": ids}
        except Exception as error:
            # The border of the process: an engine that cannot run a model is a result.
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
