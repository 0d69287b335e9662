"""What a decode step costs its host beside the model's pass: of our engine, and of vLLM with the plugin.

    python bench/host_loop.py LlamaForCausalLM --engine allotrope
    PYTHONPATH=. path/to/vllm/bin/python bench/host_loop.py Qwen3NextForCausalLM

A tiny random model of the architecture runs on a CPU, in this process. The time of each step less that of the model's
pass is scheduling, metadata, sampling and output, much of it once for each block table that the caches need. Beside it
stands how many operations of PyTorch the step calls, the pass left out: on a GPU most launch a kernel or a copy.
With ALLOTROPE_VLLM=0 it is vLLM's own model, where vLLM has one that runs on a CPU. A GPU waits for a host whose step
takes longer than the pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.architectures.registry import find_architecture  # noqa: E402
from allotrope.verify.random_checkpoint import write_random  # noqa: E402

# Steps at either end of a run, in which requests begin and end.
EDGE = 5
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_MLA_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


class Operations(TorchDispatchMode):
    """Counts the operations that are called in it, views and bare memory left out, while it is `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.on = 0, True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.on and not function.is_view and "empty" not in function.name()
        return function(*args, **(kwargs or {}))


class Steps:
    """An engine's step and its model's pass, as the engine calls them.

    `seconds`: of each step, the time of it all and of the pass. `operations`: of each step that was counted, those
    beside the pass. `counts`: whether to count, which takes time of its own.
    """

    def __init__(self, step: Callable[..., Any], forward: Callable[..., Any]) -> None:
        self._step, self._forward = step, forward
        self._pass = 0.0
        self._mode = Operations()
        self.counts = False
        self.seconds: list[tuple[float, float]] = []
        self.operations: list[int] = []

    def step(self) -> Any:
        self._pass, self._mode.count, begun = 0.0, 0, time.perf_counter()
        with self._mode if self.counts else nullcontext():
            found = self._step()
        self.seconds.append((time.perf_counter() - begun, self._pass))
        self.operations.append(self._mode.count)
        return found

    def forward(self, *arguments: Any, **named: Any) -> Any:
        begun, self._mode.on = time.perf_counter(), False
        found = self._forward(*arguments, **named)
        self._pass, self._mode.on = time.perf_counter() - begun, True
        return found


@dataclass(frozen=True)
class Loaded:
    """An engine. `tables`: block tables that its caches need. `generate`: of prompts, all at once."""

    tables: int
    steps: Steps
    generate: Callable[[list[list[int]]], object]


def load_allotrope(path: Path, options: argparse.Namespace) -> Loaded:
    from allotrope import LLM, SamplingParams

    llm = LLM(
        str(path),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=max(options.requests),
        enable_prefix_caching=options.prefix_caching,
        async_scheduling="on",
    )
    engine: Any = llm.engine
    steps = Steps(engine.step, engine.model.forward)
    engine.step, engine.model.forward = steps.step, steps.forward
    wanted = SamplingParams(max_tokens=options.steps, temperature=0, ignore_eos=True)
    tables = sum(one.group.kind != "state" for one in engine.memory.groups)
    return Loaded(tables, steps, lambda prompts: llm.generate(prompts, wanted))


def load_vllm(path: Path, options: argparse.Namespace) -> Loaded:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=max(options.requests),
        enable_prefix_caching=options.prefix_caching,
    )
    core: Any = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    tables = len(core.scheduler.kv_cache_config.kv_cache_groups)
    steps = Steps(core.step_fn, runner.model.forward)
    core.step_fn, runner.model.forward = steps.step, steps.forward
    wanted = SamplingParams(max_tokens=options.steps, temperature=0, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> None:
        given: Any = [{"prompt_token_ids": ids} for ids in prompts]
        llm.generate(given, wanted, use_tqdm=False)

    return Loaded(tables, steps, generate)


def measure(loaded: Loaded, options: argparse.Namespace) -> Iterator[str]:
    """One line for each number of requests."""
    steps = loaded.steps
    for count in options.requests:
        prompts = [[5 + (i + j) % 90 for j in range(16)] for i in range(count)]
        for steps.counts in (True, False):
            steps.seconds.clear()
            steps.operations.clear()
            loaded.generate(prompts)
            if steps.counts:
                operations = statistics.median_low(steps.operations[EDGE:-EDGE])
        outside, passes = zip(*((whole - own, own) for whole, own in steps.seconds[EDGE:-EDGE]), strict=True)
        found = [f"{1e6 * statistics.median(each):.0f}" for each in (outside, passes)]
        yield (
            f"{loaded.tables} block tables, {count} requests: {found[0]} µs and {operations} operations beside a pass"
            f" of {found[1]} µs"
        )


LOADERS = {"allotrope": load_allotrope, "vllm": load_vllm}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", help="as config.json names it; each in a call of its own")
    parser.add_argument("--engine", choices=LOADERS, default="vllm")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="that decode together")
    parser.add_argument("--steps", type=int, default=60, help="of each request")
    parser.add_argument("--prefix-caching", action="store_true", help="share prefixes, for which pages stay short")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    names = {"architectures": [options.architecture]}
    with tempfile.TemporaryDirectory() as folder:
        write_random(find_architecture(names, options.architecture).tiny() | names, Path(folder), None, 0)
        for line in measure(LOADERS[options.engine](Path(folder), options), options):
            print(f"{options.architecture}: {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
