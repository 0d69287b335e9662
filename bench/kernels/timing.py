"""How long device work takes: in a CUDA graph, from a cold L2, by events that are nodes of the graph.

Owns: capture, flushing, ceilings of the chip. Must not know: families and cases.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20
BUDGET_MS = 60.0
# About a millisecond: in it five runs can be launched.
ASLEEP_CYCLES = 2_000_000
Pairs = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one run. `low`, `high`: the tenth and ninetieth of a hundred. `graph`: False where the work could
    not be captured and was launched from Python; `why_not` says why."""

    median: float
    low: float
    high: float
    runs: int
    graph: bool
    why_not: str = ""


class Stopwatch:
    """Holds the buffer whose reading empties the L2: reading leaves clean lines, where writing would leave dirty ones
    that the measured kernel must first push out.

    `inside`: whether events can be nodes of a graph; if not, they stand around a graph's launch and include it.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self.scalar = torch.zeros((), dtype=torch.float32, device=device)
        self.inside = True
        try:
            self.empty()
        except Exception as error:  # torch raises several kinds for what a driver lacks
            torch.cuda.synchronize()
            self.inside = False
            print(f"events cannot be nodes of a graph here ({error}): times include a graph's launch", flush=True)

    def flush(self) -> None:
        torch.sum(self.buffer, dim=0, out=self.scalar)

    def time(self, run: Callable[[], Any], min_runs: int = 40) -> Timing:
        """Median time of `run` with a cold L2. Raises what `run` raises."""
        once = self._warm(run)
        count = max(4, min(20, int(BUDGET_MS / 2 / (once + 0.1))))
        try:
            graph, pairs = self._capture(run, count if self.inside else 0)
        except Exception as error:  # a peer may do anything on the host
            torch.cuda.synchronize()
            return _timing(self._around(run, max(5, 2 * count)), False, _first_line(error))
        if self.inside:
            samples = []
            for _ in range(max(2, -(-min_runs // count))):
                graph.replay()
                torch.cuda.synchronize()
                samples += _elapsed(pairs)
        else:
            samples = self._around(graph.replay, min_runs)
        graph.reset()
        return _timing(samples, True, "")

    def rough(self, run: Callable[[], Any]) -> float:
        """About how many microseconds one run takes with a cold L2, launched from Python while the GPU waits."""
        run()
        torch.cuda.synchronize()
        torch.cuda._sleep(ASLEEP_CYCLES)
        return min(self._around(run, 5))

    def kernels(self, run: Callable[[], Any], runs: int = 5) -> dict[str, float]:
        """Microseconds of one run by name of kernel, from a cold L2, as PyTorch's profiler sees them; longest first."""
        flushes, both = self._profiled(self.flush, runs), self._profiled(lambda: (self.flush(), run()), runs)
        own = {name: (both[name] - flushes.get(name, 0.0)) / runs for name in both}
        return {name: us for name, us in sorted(own.items(), key=lambda pair: -pair[1]) if us > 0.1}

    def _profiled(self, work: Callable[[], Any], runs: int) -> dict[str, float]:
        work()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(runs):
                work()
            torch.cuda.synchronize()
        return {event.key: event.self_device_time_total for event in found.key_averages()}

    def empty(self) -> float:
        """Microseconds between two events with nothing between them: part of every time that is reported."""
        if not self.inside:
            return statistics.median(self._around(lambda: None, 20))
        graph, pairs = self._capture(lambda: None, 20)
        graph.replay()
        torch.cuda.synchronize()
        return statistics.median(_elapsed(pairs))

    def _warm(self, run: Callable[[], Any]) -> float:
        """Compile, autotune, fill caches; returns milliseconds of one later run."""
        for _ in range(2):
            run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))

    def _capture(self, run: Callable[[], Any], count: int) -> tuple[torch.cuda.CUDAGraph, Pairs]:
        """A graph of `count` flushed and timed runs; with `count` 0, of one run and nothing else."""

        def event() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True, external=True)

        pairs = [(event(), event()) for _ in range(count)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            self.flush()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for start, end in pairs:
                self.flush()
                start.record()
                run()
                end.record()
            if not count:
                run()
        graph.replay()
        torch.cuda.synchronize()
        return graph, pairs

    def _around(self, run: Callable[[], Any], count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush()
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return _elapsed(pairs)


def _elapsed(pairs: Pairs) -> list[float]:
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _timing(samples: list[float], graph: bool, why: str) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[last // 10], ordered[last - last // 10], len(ordered), graph, why)


@dataclass(frozen=True)
class Ceilings:
    """What the chip does at best, by the stopwatch that times the cases. `copy`: bytes/s read plus written. `matmul`:
    type -> FLOP/s. `empty_us`: see `Stopwatch.empty`."""

    copy: float
    matmul: dict[str, float]
    empty_us: float

    def floor_us(self, moved: int, flops: int, rate: str) -> float:
        """The time below which no version can go."""
        return 1e6 * max(moved / self.copy, flops / self.matmul.get(rate, self.matmul["bf16"]))


def measure_ceilings(recorder: Stopwatch, device: torch.device) -> Ceilings:
    """The best tenth of the runs: a ceiling is what the chip can do, not what it does when warm."""
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    # By multiprocessors: in a graph, a plain copy is done by a copy engine, which is slower.
    copy = 2 * source.nbytes / recorder.time(functools.partial(torch.neg, source, out=target), 40).low * 1e6
    del source, target
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul = {"bf16": 2 * n**3 / recorder.time(lambda: torch.mm(a, b, out=out), 40).low * 1e6}
    try:
        low, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        product = recorder.time(lambda: torch._scaled_mm(low, right, one, one, out_dtype=torch.bfloat16), 40)
        matmul["fp8"] = 2 * n**3 / product.low * 1e6
    except (RuntimeError, AttributeError):
        matmul["fp8"] = float("nan")
    return Ceilings(copy, matmul, recorder.empty())
