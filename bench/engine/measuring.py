"""The columns of a model, each engine's in turn: the same prompts, seconds of each case, and the tokens.

Must not know: how a command line or a table looks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.engine.options import engine_options, environment_of, of_peer
from bench.engine.report import OURS, Column, Report
from bench.engine.worker_process import EngineFailed, Worker

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


def measure_case(worker: Worker, case: str, vocabulary: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """One number a run of each measure. `case`: input / output / requests at once."""
    length, tokens, count = map(int, case.split("/"))

    def run(what: str, made: int) -> dict[str, Any]:
        return worker.run(random_prompts(f"{options.seed} {case} {what}", count, length, vocabulary), made)

    # As long as what is timed: graphs of every batch size on the way are captured here.
    run("warm-up", tokens)
    run("warm-up of one", 1)
    prefill, total, distinct, accepted = [], [], [], []
    for turn in range(options.runs):
        prefill.append(float(run(f"prefill {turn}", 1)["seconds"]))
        whole = run(f"total {turn}", tokens)
        total.append(float(whole["seconds"]))
        distinct.append(distinct_share(whole["ids"]))
        if whole["drafts"] is not None and whole["drafts"]["verified"]:
            accepted.append(1 + whole["drafts"]["accepted"] / whole["drafts"]["verified"])
    found = {
        "prefill_s": prefill,
        "total_s": total,
        "tpot_ms": [(t - p) / (tokens - 1) * 1e3 for p, t in zip(prefill, total, strict=True)],
        "tokens_per_s": [count * (length + tokens) / t for t in total],
        "distinct": distinct,
    }
    return found | {"accepted": accepted} if accepted else found


def distinct_share(ids: list[list[int]]) -> float:
    """Of the requests' tokens in a step, how many differ: 1 where all do, in the mean of all steps."""
    return statistics.fmean(len(set(step)) / len(step) for step in zip(*ids, strict=True))


def measure_engine(
    names: list[str], directory: Path, options: argparse.Namespace, engines: Report, save: Callable[[], object]
) -> None:
    """Fill in the columns `names` of `engines`, which one process measures, saving after each step, up to the first
    failure, which is named."""
    vocabulary, engine = vocabulary_of(directory), engines[names[0]]["engine"]
    for name in names:
        engines[name]["error"] = None
    python = sys.executable if engine == OURS else of_peer(options.peer_python, engine) or sys.executable
    worker = Worker(engine, python, environment_of(engine, options), options.limit, options.verbose)
    left = list(names)
    try:
        start_engine(worker, names, directory, options, engines)
        for name in names:
            found, speculation = engines[name], Column.of(name).speculation
            if name != names[0]:
                assert speculation is not None
                worker.ask(accept={"length": speculation.length})
            for case in options.cases:
                found["cases"][case] = numbers = measure_case(worker, case, vocabulary, options)
                found["memory"] = worker.ask(memory={})
                save()
                shown = ", ".join(f"{key} {min(values):.4g}-{max(values):.4g}" for key, values in numbers.items())
                print(f"{directory.name}, {name}, {case}: {shown}", flush=True)
            left.remove(name)
    except EngineFailed as error:
        for name in left:
            engines[name]["error"] = str(error)
        print(f"{directory.name}, {', '.join(left)}: FAILED: {error}", flush=True)
    finally:
        worker.close()
        save()


def start_engine(
    worker: Worker, names: list[str], directory: Path, options: argparse.Namespace, engines: Report
) -> None:
    """Load an engine for its first column, up to its first token and, where it awaits one, the signal."""
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
    if options.signal is not None:
        await_signal(options.signal, re.sub(r"\W", "_", f"{directory.name} {names[0]}"), worker)


def compare_tokens(worker: Worker, vocabulary: int, options: argparse.Namespace, found: Report) -> None:
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


def await_signal(signal: Path, name: str, worker: Worker) -> None:
    """Say that `name` is ready to be measured, and wait for the file `signal`: several GPUs of a host can be measured
    when nothing is compiled on it any more. Raises EngineFailed once it is late.
    """
    signal.with_name(f"{signal.name}.{name}").touch()
    while not signal.exists():
        if worker.late:
            raise EngineFailed(f"killed after --limit {worker.limit:g} s, waiting for {signal.name}")
        time.sleep(0.1)


def vocabulary_of(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])
