"""The columns of a model: the same prompts for each engine, seconds of each case, and the tokens.

Must not know: how a command line or a table looks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from allotrope.rank_layout import RankLayout
from bench.engine.data_parallel import DataParallelWorker
from bench.engine.options import engine_options, environment_of, host_of, of_peer
from bench.engine.report import OURS, Column, Report
from bench.engine.worker_process import EngineFailed, Worker

AnyWorker = Worker | DataParallelWorker
START_PROMPT = 8
PARITY_PROMPTS, PARITY_TOKENS = (24, 57), 16
# Leaves room for ids that tokenizers keep for themselves, on both sides.
LEAST_ID, MOST_ID = 8, 50000


def processes(names: Iterable[str]) -> list[list[str]]:
    """The columns that one process measures each: they differ in the acceptance that is forced alone."""
    found: dict[Column, list[str]] = {}
    for name in names:
        column = Column.of(name)
        if not column.has_own_tokens:
            assert column.speculation is not None
            # Any length stands for all that are forced.
            column = replace(column, speculation=replace(column.speculation, length=1.0))
        found.setdefault(column, []).append(name)
    return list(found.values())


def random_prompts(seed: str, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Token ids, the same for every engine and different for every `seed`."""
    generator = random.Random(seed)
    most = min(vocabulary, MOST_ID)
    return [[generator.randrange(LEAST_ID, most) for _ in range(length)] for _ in range(count)]


class CaseRuns:
    """The runs of one case in one column. `case`: input / output / requests at once."""

    def __init__(self, worker: AnyWorker, case: str, vocabulary: int, seed: int) -> None:
        self._length, self._tokens, self._count = map(int, case.split("/"))
        self._worker, self._seed, self._vocabulary = worker, f"{seed} {case}", vocabulary
        self._prefill: list[float] = []
        self._total: list[float] = []
        self._distinct: list[float] = []
        self._accepted: list[float] = []

    def warm_up(self) -> None:
        """As long as what is timed: graphs of every batch size on the way are captured here."""
        self._run("warm-up", self._tokens)
        self._run("warm-up of one", 1)

    def measure(self, turn: int) -> None:
        """One run more."""
        self._prefill.append(float(self._run(f"prefill {turn}", 1)["seconds"]))
        whole = self._run(f"total {turn}", self._tokens)
        self._total.append(float(whole["seconds"]))
        self._distinct.append(distinct_share(whole["ids"]))
        if whole["drafts"] is not None and whole["drafts"]["verified"]:
            self._accepted.append(1 + whole["drafts"]["accepted"] / whole["drafts"]["verified"])

    def numbers(self) -> dict[str, list[float]]:
        """One number a run of each measure."""
        both = zip(self._prefill, self._total, strict=True)
        found = {
            "prefill_s": self._prefill,
            "total_s": self._total,
            "tpot_ms": [(total - prefill) / (self._tokens - 1) * 1e3 for prefill, total in both],
            "tokens_per_s": [self._count * (self._length + self._tokens) / total for total in self._total],
            "distinct": self._distinct,
        }
        return found | {"accepted": self._accepted} if self._accepted else found

    def _run(self, what: str, made: int) -> dict[str, Any]:
        prompts = random_prompts(f"{self._seed} {what}", self._count, self._length, self._vocabulary)
        return self._worker.run(prompts, made)


def distinct_share(ids: list[list[int]]) -> float:
    """Of the requests' tokens in a step, how many differ: 1 where all do, in the mean of all steps."""
    return statistics.fmean(len(set(step)) / len(step) for step in zip(*ids, strict=True))


class Session:
    """One engine's process and the columns of `engines` that it measures, up to the first failure, which is named."""

    def __init__(self, names: list[str], directory: Path, options: argparse.Namespace, engines: Report) -> None:
        self.names, self.directory, self.options, self.engines = names, directory, options, engines
        self.vocabulary, engine = vocabulary_of(directory), engines[names[0]]["engine"]
        self.failed = False
        self._left = list(names)
        for name in names:
            engines[name]["error"] = None
        self.worker = start_worker(engine, Column.of(names[0]).layout, options)

    def attempt(self, step: Callable[[], object]) -> None:
        """Take a step, unless one before it failed."""
        if self.failed:
            return
        try:
            step()
        except EngineFailed as error:
            self.failed = True
            for name in self._left:
                self.engines[name]["error"] = str(error)
            print(f"{self.directory.name}, {', '.join(self._left)}: FAILED: {error}", flush=True)

    def start(self) -> None:
        """Up to the first token and, where it awaits one, the signal. An engine that fails leaves its word too: nobody
        is to wait for it."""
        self.attempt(self._load)
        if self.options.signal is not None:
            leave_word(self.options.signal, self.directory, self.names[0])
            self.attempt(lambda: await_signal(self.options.signal, self.worker))

    def _load(self) -> None:
        start_engine(self.worker, self.names, self.directory, self.options, self.engines)
        self.worker.started()

    def runs_of(self, case: str) -> CaseRuns:
        return CaseRuns(self.worker, case, self.vocabulary, self.options.seed)

    def begin(self, name: str) -> None:
        """What a further column of the process forces from here on."""
        if name != self.names[0]:
            speculation = Column.of(name).speculation
            assert speculation is not None
            self.worker.ask(accept={"length": speculation.length})

    def take(self, name: str, case: str, runs: CaseRuns) -> None:
        """Fill in a case."""
        found = self.engines[name]
        found["cases"][case] = numbers = runs.numbers()
        found["memory"] = self.worker.ask(memory={})
        shown = ", ".join(f"{key} {min(values):.4g}-{max(values):.4g}" for key, values in numbers.items())
        print(f"{self.directory.name}, {name}, {case}: {shown}", flush=True)

    def end(self, name: str) -> None:
        self._left.remove(name)


def measure_engines(
    processes: Sequence[list[str]],
    directory: Path,
    options: argparse.Namespace,
    engines: Report,
    save: Callable[[], object],
) -> None:
    """Fill in columns of `engines`, those of each process by one engine, saving after each case.

    All engines of `processes` are loaded at once, and each run of a case is made by each of them in turn, so that what
    changes on the machine meanwhile changes all of them.
    """
    sessions = [Session(names, directory, options, engines) for names in processes]
    try:
        with ThreadPoolExecutor(len(sessions)) as starts:
            list(starts.map(Session.start, sessions))
        for columns in itertools.zip_longest(*processes):
            _measure_columns([pair for pair in zip(sessions, columns, strict=True) if pair[1]], options, save)
    finally:
        for session in sessions:
            session.worker.close()
        save()


def _measure_columns(
    columns: Sequence[tuple[Session, str]], options: argparse.Namespace, save: Callable[[], object]
) -> None:
    """One column of each session."""
    for session, name in columns:
        session.attempt(functools.partial(session.begin, name))
    for case in options.cases:
        runs = [session.runs_of(case) for session, _ in columns]
        for (session, _), own in zip(columns, runs, strict=True):
            session.attempt(own.warm_up)
        for turn in range(options.runs):
            for (session, _), own in zip(columns, runs, strict=True):
                session.attempt(functools.partial(own.measure, turn))
        for (session, name), own in zip(columns, runs, strict=True):
            session.attempt(functools.partial(session.take, name, case, own))
        save()
    for session, name in columns:
        session.attempt(functools.partial(session.end, name))


def start_worker(engine: str, layout: RankLayout, options: argparse.Namespace) -> AnyWorker:
    """The process of an engine; those of its data-parallel ranks, where it has no process for all of them."""
    python = sys.executable if engine == OURS else of_peer(options.peer_python, engine) or sys.executable
    environment = environment_of(engine, options)

    def start(more: Mapping[str, str]) -> Worker:
        given = (engine, python, environment | more, options.limit, options.verbose)
        return Worker(*given, start_limit=options.start_limit)

    if layout.data > 1 and host_of(engine) == "vllm":
        return DataParallelWorker(start, layout.data)
    return start({})


def start_engine(
    worker: AnyWorker, names: list[str], directory: Path, options: argparse.Namespace, engines: Report
) -> None:
    """Load an engine for its first column, up to its first token and what is compared with other engines."""
    vocabulary, first = vocabulary_of(directory), engines[names[0]]
    head = None if options.draft_model is None else str(options.draft_model.resolve())
    load_options = engine_options(Column.of(names[0]), options, head)
    loaded = worker.ask(load={"directory": str(directory), "options": load_options})
    for name in names:
        engines[name].update(loaded)
    worker.run(random_prompts(f"{options.seed} start", 1, START_PROMPT, vocabulary), 1)
    first["start_s"].append(time.perf_counter() - worker.began)
    print(f"{directory.name}, {names[0]}: first token after {first['start_s'][-1]:.1f} s", flush=True)
    if Column.of(names[0]).has_own_tokens:
        compare_tokens(worker, vocabulary, options, first)


def compare_tokens(worker: AnyWorker, vocabulary: int, options: argparse.Namespace, found: Report) -> None:
    """Fill in the tokens and logprobs that are compared with those of other engines."""
    for length in PARITY_PROMPTS:
        prompts = random_prompts(f"{options.seed} parity", 1, length, vocabulary)
        found["parity_ids"] += worker.run(prompts, PARITY_TOKENS)["ids"]
    prompts = [random_prompts(f"{options.seed} forced", 1, length, vocabulary)[0] for length in options.forced]
    found["forced"] = worker.ask(forced={"prompts": prompts, "tokens": PARITY_TOKENS})["logprobs"]
    if found["engine"] == OURS:
        # How far the company of others changes them says what a difference between engines means.
        alone = [worker.ask(forced={"prompts": [one], "tokens": PARITY_TOKENS}) for one in prompts]
        found["forced_alone"] = [logprobs for answer in alone for logprobs in answer["logprobs"]]


def leave_word(signal: Path, directory: Path, name: str) -> None:
    """Say that a column is ready to be measured, or never will be."""
    column = re.sub(r"\W", "_", f"{directory.name} {name}")
    signal.with_name(f"{signal.name}.{column}").touch()


def await_signal(signal: Path, worker: AnyWorker) -> None:
    """Wait for the file `signal`, such as until nothing is compiled on the host any more. Raises EngineFailed once the
    engine is late."""
    while not signal.exists():
        if worker.late:
            raise EngineFailed(f"{worker.late}, waiting for {signal.name}")
        time.sleep(0.1)


def vocabulary_of(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])
