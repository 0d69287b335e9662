"""`allotrope bench latency|throughput|serve`.

Owns the options and the progress bar of each benchmark. `allotrope.bench` measures and shows the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allotrope.config import EngineConfig, option
from allotrope.errors import AllotropeError, ConfigError, refuse_options
from allotrope.output_files import file_reasons, plot_reasons

if TYPE_CHECKING:
    from allotrope.bench.record import RequestRecord


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Files to which results are written."""

    output_json: Path | None = option("Also write settings, summary and every request's figures to this file.", None)
    plot: Path | None = option("Also draw the distribution of each latency to this PNG file.", None)

    def __post_init__(self) -> None:
        refuse_options(file_reasons("output_json", self.output_json) + plot_reasons("plot", self.plot))


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """Batches that run one after the other, to measure the time of a single batch."""

    batch_size: int = option("Requests that run together.", 1)
    input_len: int = option("Tokens of each prompt.", 256)
    output_len: int = option("Tokens generated for each prompt.", 64)
    iterations: int = option("Batches that are timed.", 5)
    warmup: int = option("Batches before those that are timed.", 1)

    def __post_init__(self) -> None:
        _at_least_one(self, "batch_size", "input_len", "output_len", "iterations")
        if self.warmup < 0:
            raise ConfigError(f"bad options: warmup={self.warmup}; at least 0 is needed.")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """Requests that are all added at once, to keep the engine full."""

    num_prompts: int = option("Number of requests.", 32)
    input_len: int = option("Tokens of each prompt.", 256)
    output_len: int = option("Tokens generated for each prompt.", 64)

    def __post_init__(self) -> None:
        _at_least_one(self, "num_prompts", "input_len", "output_len")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Requests over HTTP to a running server."""

    url: str = option("Address of the server.", "http://127.0.0.1:8000")
    model_name: str | None = option("Model to ask for; default: the first that the server lists.", None)
    api_key: str | None = option("Key that the server asks for.", None)
    num_prompts: int = option("Number of requests.", 64)
    input_len: int = option("Tokens of each prompt.", 256)
    output_len: int = option("Tokens generated for each prompt.", 64)
    request_rate: float = option(
        "Requests a second on average, at random times; 'inf' sends all at once.", float("inf")
    )
    max_concurrency: int | None = option("Most requests under way at a time; default: no limit.", None)
    token_id_limit: int = option("Prompts are random token ids below this.", 1000)
    seed: int = option("Seed of prompts and sending times.", 0)

    def __post_init__(self) -> None:
        _at_least_one(self, "num_prompts", "input_len", "output_len", "max_concurrency", "token_id_limit")
        if not self.request_rate > 0:
            raise ConfigError(f"bad options: request_rate={self.request_rate}; it must be above 0 (or inf).")


def _at_least_one(options: Any, *names: str) -> None:
    values = {name: getattr(options, name) for name in names}
    wrong = [
        f"{name}={value}; at least 1 is needed" for name, value in values.items() if value is not None and value < 1
    ]
    refuse_options(wrong)


def bench_latency(engine: EngineConfig, options: LatencyOptions, report: ReportOptions) -> None:
    """Time batches of random prompts, one batch after the other, in this process."""
    from allotrope.bench.offline import run_batch
    from allotrope.bench.record import random_prompts
    from allotrope.engine.engine import Engine

    runner = Engine(engine)
    size = options.batch_size
    prompts = random_prompts(
        size * (options.warmup + options.iterations), options.input_len, runner.limits.vocab_size, engine.seed
    )
    records: list[RequestRecord] = []
    duration = 0.0
    with _progress("batches", options.warmup + options.iterations) as advance:
        for number in range(options.warmup + options.iterations):
            batch = prompts[number * size : (number + 1) * size]
            batch_records, seconds = run_batch(runner, batch, options.output_len, size, lambda record: None)
            if number >= options.warmup:
                records += batch_records
                duration += seconds
            advance()
    title = f"latency: batch {size}, {options.input_len} tokens in, {options.output_len} out"
    _show(title, {**_settings(engine), **_settings(options)}, records, duration, report)


def bench_throughput(engine: EngineConfig, options: ThroughputOptions, report: ReportOptions) -> None:
    """Run many random prompts at once in this process. TTFT and E2E include the time in the queue."""
    from allotrope.bench.offline import run_batch
    from allotrope.bench.record import random_prompts
    from allotrope.engine.engine import Engine

    runner = Engine(engine)
    warmup, *prompts = random_prompts(options.num_prompts + 1, options.input_len, runner.limits.vocab_size, engine.seed)
    run_batch(runner, [warmup], 2, 1, lambda record: None)
    with _progress("requests", options.num_prompts) as advance:
        records, duration = run_batch(
            runner, prompts, options.output_len, engine.max_num_waiting, lambda record: advance()
        )
    title = f"throughput: {options.num_prompts} requests, {options.input_len} tokens in, {options.output_len} out"
    _show(title, {**_settings(engine), **_settings(options)}, records, duration, report)


def bench_serve(options: LoadOptions, report: ReportOptions) -> None:
    """Send random prompts to a running server and time what its clients see."""
    import asyncio

    from allotrope.bench.load import Target, Traffic, run_load
    from allotrope.bench.record import random_prompts
    from allotrope.commands.remote import served_model, server_root

    name = options.model_name or served_model(options.url, options.api_key)
    target = Target(url=server_root(options.url), model=name, api_key=options.api_key)
    traffic = Traffic(options.output_len, options.request_rate, options.max_concurrency, options.seed)
    prompts = random_prompts(options.num_prompts, options.input_len, options.token_id_limit, options.seed)
    with _progress("requests", options.num_prompts) as advance:
        records, duration = asyncio.run(run_load(target, prompts, traffic, lambda record: advance()))
    title = (
        f"{name}: {options.num_prompts} requests, {options.input_len} tokens in, {options.output_len} out,\n"
        f"{options.request_rate:g} requests/s, at most {options.max_concurrency or options.num_prompts} at a time"
    )
    _show(title, {**_settings(options), "model_name": name}, records, duration, report)


def _settings(options: Any) -> dict[str, Any]:
    """The options as plain data for the JSON file, without the API key."""
    plain = {name: value for name, value in dataclasses.asdict(options).items() if name != "api_key"}
    return {name: str(value) if value == float("inf") else value for name, value in plain.items()}


@contextmanager
def _progress(noun: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr. Yields a function that advances it by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(noun), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(noun, total=total)
        yield lambda: bar.advance(task)


def _show(
    title: str, settings: dict[str, Any], records: list[RequestRecord], duration: float, report: ReportOptions
) -> None:
    """Print the tables and write the requested files. Raises `AllotropeError` if every request failed."""
    from rich.console import Console

    from allotrope.bench.record import summarize
    from allotrope.bench.report import tables, write_json, write_plot

    summary = summarize(records, duration)
    console = Console()
    console.print(title, highlight=False, markup=False)
    for table in tables(summary):
        console.print(table)
    for reason in summary.errors:
        console.print(f"failed: {reason}", highlight=False, markup=False)
    if report.output_json is not None:
        write_json(report.output_json, settings, summary, records)
        print(f"wrote {report.output_json}")
    if not summary.completed:
        raise AllotropeError(f"all {summary.failed} requests failed; the first reason: {summary.errors[0]}")
    if report.plot is not None:
        write_plot(report.plot, title, records)
        print(f"wrote {report.plot}")
