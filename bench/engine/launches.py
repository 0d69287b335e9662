"""How many kernels a decode step launches on a GPU, layer by layer and kind by kind.

    python bench/engine/launches.py MODEL                       a directory or hub id
    python bench/engine/launches.py MODEL --load-format dummy --requests 64 --context 1000 --out found.json
    python bench/engine/launches.py MODEL --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'

The step is run without a graph, under torch's profiler; a graph replays the same kernels. With drafts it verifies some
and makes the next.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# What a kernel's name tells, the first that fits; one of ours goes by its own name.
KINDS = (
    ("matrix product", r"gemm|nvjet|cutlass|xmma|cublas|splitk|gemv"),
    ("copy", r"memcpy|copy|CatArray|memset|fill"),
    ("gather, scatter", r"index|gather|scatter|embedding"),
    ("sort, top-k", r"sort|topk|radix"),
    ("reduction", r"reduce|softmax|norm|cumsum|scan"),
    ("elementwise", r"elementwise|vectorized"),
)

# Before the name of a part of the model, in the profiler's records.
PART = "part:"


@dataclass(frozen=True)
class Launch:
    """One kernel. `when`: host time of its launch. `micros`: time on the device."""

    name: str
    when: int
    micros: float


@dataclass(frozen=True)
class Span:
    """A part of the model at work on the host. `begin`, `end`: host times."""

    name: str
    begin: int
    end: int


def kind_of(name: str, ours: frozenset[str]) -> str:
    """The class that a kernel is counted in."""
    if name in ours:
        return name
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), name[:40])


def attribute(launches: Sequence[Launch], spans: Sequence[Span]) -> list[tuple[str, Launch]]:
    """Each launch with the innermost span around it, "" for none. Spans nest."""
    ordered = sorted(spans, key=lambda span: (span.begin, -span.end))
    begins = [span.begin for span in ordered]
    found = []
    for launch in launches:
        around = ordered[: bisect.bisect_right(begins, launch.when)]
        inner = next((span.name for span in reversed(around) if span.end >= launch.when), "")
        found.append((inner, launch))
    return found


def our_kernels() -> frozenset[str]:
    """Names of the kernels that this package compiles."""
    from allotrope.kernels.chip import CHIPS
    from allotrope.kernels.registry import every_specialization

    return frozenset(one.kernel.__name__ for one in every_specialization(CHIPS["sm_90"]))


@contextlib.contextmanager
def spans_around(named: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """Name modules at work in the profiler's records."""
    handles, open_spans = [], []

    def enter(name: str) -> Any:
        def hook(*_: Any) -> None:
            open_spans.append(torch.profiler.record_function(f"{PART}{name}").__enter__())

        return hook

    def leave(*_: Any) -> None:
        open_spans.pop().__exit__(None, None, None)

    for name, module in named:
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def spans_of(model: Any) -> contextlib.AbstractContextManager[None]:
    """Name the parts of every layer."""
    named = [(f"layer {i}", layer) for i, layer in enumerate(model.layers)]
    named += [(f"{name} {part}", child) for name, layer in named for part, child in layer.named_children()]
    return spans_around(named)


@contextlib.contextmanager
def classes_of(model: Any) -> Iterator[None]:
    """Name what runs by its class of work: projections, experts and the head, and what attention's backends run."""
    from allotrope.engine.planning.step_cost import DENSE, EXPERTS, HEAD, modules_by_class

    def named(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(f"{PART}{kind}"):
                return run(*args, **kwargs)

        return call

    spans = [(kind, module) for module, kind in modules_by_class(model) if kind in (DENSE, EXPERTS, HEAD)]
    before = [(layer.mixer, layer.mixer.backend) for layer in model.layers]
    for mixer, backend in before:
        mixer.backend = dataclasses.replace(backend, run=named(mixer.spec.family, backend.run))
    try:
        with spans_around(spans):
            yield
    finally:
        for mixer, backend in before:
            mixer.backend = backend


def micros_by_class(launches: Sequence[Launch], spans: Sequence[Span], ours: frozenset[str]) -> dict[str, float]:
    """Time on the device by class of work, of what `classes_of` named. A product that stands alone is dense as well."""
    from allotrope.engine.planning.step_cost import DENSE, REST

    found: dict[str, float] = collections.defaultdict(float)
    for kind, launch in attribute(launches, spans):
        alone = DENSE if kind_of(launch.name, ours) == "matrix product" else REST
        found[kind or alone] += launch.micros
    return dict(found)


@contextlib.contextmanager
def lengths_of(layers: Any) -> Iterator[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Per pass, as the device has them in the end: new and visible tokens of each request. `layers`: the `LayerPlans`
    that make the steps of a model."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    passes = []
    step = layers.step

    def kept(ids: Any, inputs: Any, *rest: Any) -> Any:
        passes.append(inputs.batch.tensors)
        return step(ids, inputs, *rest)

    layers.step = kept
    try:
        yield found
    finally:
        del layers.step
        for tensors in passes:
            starts, seen = tensors.query_start.tolist(), tensors.seq_lens.tolist()
            # Requests that see nothing only fill up a captured size.
            rows = [(end - start, n) for start, end, n in zip(starts, starts[1:], seen, strict=False) if n]
            found.append((tuple(new for new, _ in rows), tuple(n for _, n in rows)))


def record(
    engine: Any, spans: Callable[[Any], contextlib.AbstractContextManager[None]] = spans_of
) -> tuple[list[Launch], list[Span]]:
    """Profile one step of an engine. `spans`: names what is at work in its model."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with spans(engine.model), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        engine.step()
        torch.cuda.synchronize()
    events = profiled.profiler.kineto_results.events()
    on_device = [event for event in events if str(event.device_type()).endswith("CUDA")]
    on_host = [event for event in events if str(event.device_type()).endswith("CPU")]
    launched = {event.correlation_id(): event.start_ns() for event in on_host if "aunch" in event.name()}
    launches = [
        Launch(event.name(), launched[event.correlation_id()], event.duration_ns() / 1e3)
        for event in on_device
        # Names of parts are put on the device's time line as well.
        if event.correlation_id() in launched and not event.name().startswith(PART)
    ]
    return launches, named_spans(on_host)


def named_spans(on_host: Sequence[Any]) -> list[Span]:
    """Those of the profiler's records that we named."""
    return [
        Span(event.name().removeprefix(PART), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in on_host
        if event.name().startswith(PART)
    ]


def config_of(options: argparse.Namespace) -> Any:
    """The engine that the command line asks for."""
    from allotrope.config import EngineConfig

    return EngineConfig(
        model=options.model, device="cuda", dtype="bfloat16", load_format=options.load_format, cuda_graphs=False,
        max_model_len=options.context + 64, max_num_seqs=options.requests, hf_overrides=options.hf_overrides,
        speculative_config=options.speculative_config,
    )  # fmt: skip


def decoding(config: Any, prompts: Sequence[Sequence[int]], params: Any) -> Any:
    """An engine whose requests have all been read and decode."""
    from allotrope.engine.engine import Engine
    from allotrope.request import Request

    engine = Engine(config)
    for i, ids in enumerate(prompts):
        engine.add(Request(request_id=str(i), prompt_ids=tuple(ids), params=params))
    received: set[str] = set()
    while len(received) < len(prompts):
        received |= {output.request_id for output in engine.step()}
    for _ in range(4):
        engine.step()
    return engine


def summary(attributed: Sequence[tuple[str, Launch]], classes: Sequence[str], ours: frozenset[str]) -> str:
    """Tables: per class of layer the mean number and time of each kind, then what is outside of layers."""
    of_class: dict[str, list[tuple[str, Launch]]] = collections.defaultdict(list)
    for place, launch in attributed:
        number = re.match(r"layer (\d+)", place)
        of_class[classes[int(number[1])] if number else "outside"].append((place, launch))
    lines = [f"{len(attributed)} kernels, {sum(launch.micros for _, launch in attributed):.0f} us on the device"]
    for name in sorted(of_class):
        count = max(1, sum(one == name for one in classes))
        rows: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        for place, launch in of_class[name]:
            rows[re.sub(r"^layer \d+ ?", "", place), kind_of(launch.name, ours)].append(launch.micros)
        total = sum(len(times) for times in rows.values())
        lines += ["", f"{name} ({count}): {total / count:.1f} kernels each", "| part | kind | launches | us |"]
        lines.append("|---|---|---:|---:|")
        for (part, kind), times in sorted(rows.items(), key=lambda item: -sum(item[1])):
            lines.append(f"| {part or 'layer'} | {kind} | {len(times) / count:.1f} | {sum(times) / count:.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto", help="as of the engine; dummy: random weights")
    parser.add_argument("--hf-overrides", help="as of the engine: JSON that overrides the model's config")
    parser.add_argument("--speculative-config", help="as of the engine: JSON; default: no drafts")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--out", type=Path, help="JSON of every kernel of the step")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU to count launches on", file=sys.stderr)
        return 2
    from allotrope import SamplingParams

    prompts = [[(7 * i + j) % 1000 for j in range(options.context)] for i in range(options.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    engine = decoding(config_of(options), prompts, params)
    launches, spans = record(engine)
    attributed, ours = attribute(launches, spans), our_kernels()
    mixers = [layer.mixer for layer in engine.model.layers]
    classes = [f"{mixer.spec.family}/{mixer.backend.name} + {type(layer.ffn).__name__}" for mixer, layer in
               zip(mixers, engine.model.layers, strict=True)]  # fmt: skip
    print(summary(attributed, classes, ours))
    if options.out is not None:
        found = [{"part": place, **vars(launch), "kind": kind_of(launch.name, ours)} for place, launch in attributed]
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
