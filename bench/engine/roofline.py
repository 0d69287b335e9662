"""A decode step and a prefill step of our engine under the profiler, by class of kernel, beside the chip's ceilings.

Owns what `bench/engine.py --roofline` measures. Must not know how it is shown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.engine.launches import classes_of, decoding, lengths_of, micros_by_class, our_kernels, record
from bench.engine.offline_worker import environment
from bench.engine.report import Report
from bench.engine.roofline_report import roofline_classes
from bench.kernels.timing import Stopwatch, measure_ceilings

Prompts = Callable[[str, int, int], list[list[int]]]
"""A name, a number of prompts and their length to prompts that are different for each name."""
# Most tokens in one step, if the prompt of the prefill step is not longer.
STEP_TOKENS = 8192


@dataclass(frozen=True)
class Sizes:
    """`requests` decode at once, each after a prompt of `context` tokens; a step reads a prompt of `prefill` tokens.
    `runs`: profiled steps of each kind, of which that of median time counts."""

    requests: int
    context: int
    prefill: int
    runs: int


def measure(model: str, sizes: Sizes, prompts: Prompts, options: dict[str, Any]) -> Report:
    """Ceilings, then both steps. `options`: more fields of the engine's config. Needs a GPU."""
    import allotrope

    device = torch.device("cuda")
    ceilings = measure_ceilings(Stopwatch(device), device)
    # The engine takes what is free.
    torch.cuda.empty_cache()
    rates = {kind: rate for kind, rate in ceilings.matmul.items() if not math.isnan(rate)}
    limits = {"copy": ceilings.copy, "matmul": rates}
    steps = {}
    for name, step in profile_steps(model, sizes, prompts, options).items():
        shape = {"requests": len(step.new), "tokens": sum(step.new), "seen": sum(step.seen)}
        steps[name] = shape | {"classes": roofline_classes(step.work, step.micros, limits)}
    version = getattr(allotrope, "__version__", "checkout")
    return {"environment": environment(version), "ceilings": limits, "steps": steps}


@dataclass(frozen=True)
class Profiled:
    """`new`, `seen`: per request, new and visible tokens. `work`, `micros`: by class, the least work and the time."""

    new: tuple[int, ...]
    seen: tuple[int, ...]
    work: dict[str, dict[str, int]]
    micros: dict[str, float]


def profile_steps(model: str, sizes: Sizes, prompts: Prompts, options: dict[str, Any]) -> dict[str, Profiled]:
    """A step of each kind. Raises RuntimeError if fewer requests decode at once than are asked for."""
    from allotrope import SamplingParams
    from allotrope.config import EngineConfig
    from allotrope.engine.load_plan import resolve_load_plan

    at_once = max(STEP_TOKENS, sizes.prefill, sizes.requests)
    # The first requests decode while the last are read.
    tokens = 2 * -(-sizes.requests * sizes.context // at_once) + sizes.runs + 16
    given: dict[str, Any] = {
        "model": model, "device": "cuda", "cuda_graphs": False, "enable_prefix_caching": False,
        "max_model_len": max(sizes.context + tokens, sizes.prefill + 1), "max_num_seqs": sizes.requests,
        "max_num_batched_tokens": at_once,
    }  # fmt: skip
    config = EngineConfig(**given | options)
    load_plan, ours = resolve_load_plan(config), our_kernels()
    # Drawn, not greedy: random weights would soon repeat one token, and its experts.
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    engine = decoding(config, prompts("context", sizes.requests, sizes.context), params)
    decode = _median([_profile(engine, ours) for _ in range(sizes.runs)])
    if decode.new != (1,) * sizes.requests:
        raise RuntimeError(f"requests={sizes.requests}, of which {len(decode.new)} decode at once. Give fewer.")
    engine.abort(engine.requests)
    engine.step()
    reads = []
    # The first is not counted: kernels are compiled in it.
    for ids in prompts("prefill", sizes.runs + 1, sizes.prefill):
        add(engine, str(len(reads)), ids)
        reads.append(_profile(engine, ours))
        while engine.has_work():
            engine.step()
    engine.close()
    return {
        name: dataclasses.replace(step, work=least(load_plan, step.new, step.seen))
        for name, step in (("decode", decode), ("prefill", _median(reads[1:])))
    }


def add(engine: Any, name: str, ids: Sequence[int]) -> None:
    """Queue a prompt that wants one token."""
    from allotrope import SamplingParams
    from allotrope.request import Request

    params = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True)
    engine.add(Request(request_id=f"prefill {name}", prompt_ids=tuple(ids), params=params))


def least(load_plan: Any, new: Sequence[int], seen: Sequence[int]) -> dict[str, dict[str, int]]:
    """The work of a step as plain data."""
    from allotrope.engine.planning.step_cost import step_cost

    return {kind: dataclasses.asdict(work) for kind, work in step_cost(load_plan, new, seen).items()}


def _profile(engine: Any, ours: frozenset[str]) -> Profiled:
    with lengths_of(engine._executor.worker.model_runner._layers) as passes:
        launches, spans = record(engine, classes_of)
    # There is none where all requests have ended.
    new, seen = passes[0] if passes else ((), ())
    return Profiled(new, seen, {}, micros_by_class(launches, spans, ours))


def _median(steps: Sequence[Profiled]) -> Profiled:
    return sorted(steps, key=lambda step: sum(step.micros.values()))[len(steps) // 2]
