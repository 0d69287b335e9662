"""SGLang on a GPU: its tokens with decodes in CUDA graphs, without graphs, and our own engine's.

Needs no pytest. As a script, `python -m plugins.on_gpu_sglang CASE LIMIT CHECKPOINT` runs one of `CASES` and prints
PASS, or ends with 1 and says why. With LIMIT 0 it writes the checkpoint alone, for which the Transformers that SGLang
runs with may be too old.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from plugins.hosting_sglang import Asked, Round, ask, assert_ours, ours, write
from tiny_checkpoints import prompts

# Architecture, type of the caches' entries, and options of SGLang. States have pages of one token with the radix cache.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GptOss": ("GptOssForCausalLM", "auto", {}),
    "Qwen3Next": ("Qwen3NextForCausalLM", "auto", {"disable_radix_cache": True}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", "auto", {}),
    "DeepseekV32": ("DeepseekV32ForCausalLM", "auto", {}),
    "Gemma4": ("Gemma4ForCausalLM", "auto", {}),
    "Qwen3": ("Qwen3ForCausalLM", "auto", {}),
    "DeepseekV4": ("DeepseekV4ForCausalLM", "auto", {}),
    "Qwen3Next-radix": ("Qwen3NextForCausalLM", "auto", {}),
    "GptOss-fp8": ("GptOssForCausalLM", "fp8", {}),
    "Qwen3Next-fp8": ("Qwen3NextForCausalLM", "fp8", {"disable_radix_cache": True}),
}
LENGTHS = (1, 5, 45, 150)
COUNT = 8
# The second has cached prefixes; steps of a size run, are captured, and are replayed.
ROUNDS = 4
# Logprobs of chosen tokens in bf16, between batches of other sizes.
ATOL = 0.1
PLAIN: dict[str, Any] = {
    "dtype": "bfloat16",
    "page_size": None,
    "chunked_prefill_size": 128,
    "max_total_tokens": 8192,
    # Of the memory that is free: others may run beside it.
    "mem_fraction_static": 0.5,
    "sampling_backend": "pytorch",
    "schedule_conservativeness": None,
    "watchdog_timeout": 3600,
}


def check(case: str, path: Path, limit: float = 400) -> None:
    """Raises AssertionError for other tokens. `path`: of the checkpoint. `limit`: seconds until SGLang is ended."""
    _, kv_cache_dtype, options = CASES[case]
    first = Round(prompts(LENGTHS, vocab_size=300), COUNT)
    types = {"kv_cache_dtype": {"fp8": "fp8_e4m3"}.get(kv_cache_dtype, kv_cache_dtype)}
    asked = PLAIN | types | options
    with ThreadPoolExecutor(2) as both:
        runs = [
            both.submit(ask, path, [first] * ROUNDS, limit=limit, disable_cuda_graph=eager, **asked)
            for eager in (False, True)
        ]
        own = ours(path, first, device="cuda", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    graphs, eager = (run.result() for run in runs)
    for one, what in ((graphs, "with graphs"), (eager, "without graphs")):
        assert one.code == 0 and one.answers, f"{what}, exit status {one.code}: {_tail(one)}"
        assert_ours(one)
    # SGLang captures decodes, and ours is what it has of steps with prompts.
    for captured in ("decode CUDA graph end", "allotrope: captured steps with prompts of"):
        assert captured in graphs.log and captured not in eager.log, (captured, _tail(graphs))
    assert "prefill CUDA graph end" not in graphs.log, _tail(graphs)
    for found, plain in zip(graphs.answers, eager.answers, strict=True):
        for ids, logprobs, others, their, mine, own_logprobs in zip(
            found.ids, found.logprobs, plain.ids, plain.logprobs, own.ids, own.logprobs, strict=True
        ):
            # Near ties may fall either way; up to the first of them, all is one.
            same = next((i for i, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b), COUNT)
            assert same > 0 and ids[0] == mine[0], (ids, others, mine)
            assert abs(logprobs[0] - own_logprobs[0]) < ATOL, (logprobs, own_logprobs)
            torch.testing.assert_close(torch.tensor(logprobs[:same]), torch.tensor(their[:same]), atol=ATOL, rtol=0.0)
            print("equal tokens with graphs and without:", same, "and ours:", _equal(ids, mine), flush=True)


def _equal(ids: list[int], others: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b), COUNT)


def _tail(asked: Asked) -> str:
    """What it said last, and the first error."""
    first = asked.log.find("Traceback")
    return f"{asked.log[first : first + 5000] if first >= 0 else ''}\n...\n{asked.log[-2500:]}"


def _main(case: str, limit: float, path: Path) -> None:
    began = time.monotonic()
    if not (path / "config.json").exists():
        write(CASES[case][0], path)
    if limit:
        check(case, path, limit)
    print(f"PASS {case} {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
