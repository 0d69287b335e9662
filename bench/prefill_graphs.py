"""Seconds to the first tokens of short prompts, prefill steps as piecewise CUDA graphs and without them.

    python bench/prefill_graphs.py bench/configs/qwen3_next_80b_fp8 --layers 24

Weights are random, prompts too, and nothing is cached. Each engine runs in this process, one after the other. A time is
the median of `--runs` calls of `LLM.generate` for one token.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch

if __name__ == "__main__":
    # The script's own folder is not where `allotrope` lies.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from allotrope.engine import worker
from allotrope.llm import LLM
from allotrope.request import SamplingParams

# Prompts of a step, and tokens of each.
STEPS = ((1, 30), (1, 200), (1, 1000), (1, 2000), (4, 1000))
_FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a folder with config.json")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.layers:
        given = {"hf_overrides": json.dumps({"num_hidden_layers": options.layers})}
    else:
        given = {}
    print(f"{'prefill steps':16s}" + "".join(f"{count} x {tokens:<8d}" for count, tokens in STEPS) + "capture")
    usual = worker.host_bound_tokens
    for name, most in (("plain", lambda plan: 0), ("piecewise graphs", usual)):
        worker.host_bound_tokens = most
        llm = LLM(
            options.model,
            load_format="dummy",
            max_model_len=8192,
            kv_cache_memory_bytes=4 << 30,
            enable_prefix_caching=False,
            tensor_parallel_size=options.tensor_parallel_size,
            **given,
        )
        begun = time.monotonic()
        llm.engine.capture_all()
        seconds = time.monotonic() - begun
        times = [measured(llm, count, tokens, options.runs) for count, tokens in STEPS]
        print(f"{name:16s}" + "".join(f"{1e3 * one:8.1f} ms" for one in times) + f"{seconds:8.1f} s", flush=True)
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def measured(llm: LLM, count: int, tokens: int, runs: int) -> float:
    """Seconds of a step of `count` prompts. The first call is not counted."""
    times = []
    for _ in range(1 + runs):
        prompts = torch.randint(10, 50_000, (count, tokens)).tolist()
        begun = time.perf_counter()
        llm.generate(prompts, _FIRST)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
