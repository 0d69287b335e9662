"""Offline speed of engines side by side: the same safetensors, prompts and GPUs, one model after another.

    python bench/random_weights.py bench/configs/gpt_oss_120b /tmp/gpt_oss --layers 12
    python bench/engine.py /tmp/gpt_oss --peers vllm vllm+allotrope --peer-python python3 --peer-path SITE
    python bench/engine.py /tmp/gpt_oss --peers vllm sglang --peer-path vllm=SITE sglang=OTHER_SITE
    python bench/engine.py /tmp/gpt_oss --tensor-parallel-size 1 2
    python bench/engine.py /tmp/gpt_oss --roofline
    python bench/engine.py /tmp/qwen3_next --peers vllm --speculate 1 3 --accept 1.8 2.8

Each engine has a process of its own, ours first; the GPUs are free again before the next one. Columns that differ in
the acceptance that is forced share one, one after the other: no engine is compiled for it. `vllm+allotrope` is the
peer's vLLM with our plugin, which has to be installed beside it. With several numbers of ranks each engine is measured
with each of them; "vllm TP2" is vLLM with two. start: seconds from starting the process to the first
token after a prompt of 8. prefill: seconds until all prompts of a batch have one token. TPOT: (seconds for all tokens -
prefill) / (tokens - 1). Prompts are random and never come twice.

How many of the requests' tokens differ in a step is told beside TPOT: equal tokens choose the same experts, and then
fewer weights are read.

Greedy tokens and logprobs are compared first, and only reported: random weights in bf16 or FP8 part at near-ties.
Logprobs are those of the best ids at each step of decoding a text that is forced, so that all engines see the same one;
SGLang's are those of the prefill of that text.

--speculate measures each engine once more for each number of draft tokens, beside itself without them. --accept forces
how many tokens a step yields in the mean: random weights accept hardly a draft, and so all engines accept as many. The
drafts come from the checkpoint's own multi-token-prediction layer (bench/random_weights.py --mtp), or from the EAGLE3
head in --draft-model. Tokens of forced acceptance mean nothing: they are not compared.

--roofline times nothing side by side: it profiles a decode step and a prefill step of ours, and holds each class of
kernels against what it must at least move and compute at the chip's ceilings.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from bench.engine.report import (  # noqa: E402
    HOSTED,
    OURS,
    Column,
    Report,
    Speculation,
    merged,
    write_json,
    write_report,
    write_roofline,
)

PEERS = ("vllm", HOSTED, "sglang")
START_PROMPT = 8
PARITY_PROMPTS, PARITY_TOKENS = (24, 57), 16
# Leaves room for ids that tokenizers keep for themselves, on both sides.
LEAST_ID, MOST_ID = 8, 50000
TAIL = 12


class EngineFailed(Exception):
    """An engine could not do what it was asked, died, or took too long."""


class Worker:
    """An engine's process, in a process group of its own that is killed after `limit` seconds."""

    def __init__(self, engine: str, python: str, environment: dict[str, str], limit: float, verbose: bool) -> None:
        self.engine, self.limit, self.late = engine, limit, False
        self.log = None if verbose else tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [python, str(ROOT / "bench" / "engine" / "offline_worker.py"), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self.timer = threading.Timer(limit, self._end_late)
        self.timer.daemon = True
        self.timer.start()

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to a command. Raises EngineFailed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if self.late:
            raise EngineFailed(f"killed after --limit {self.limit:g} s")
        if not line:
            raise EngineFailed(f"ended with code {self.process.wait()}; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._last_words()
            raise EngineFailed(answer["error"])
        return answer

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        return self.ask(run={"prompts": prompts, "tokens": tokens})

    def close(self) -> None:
        """End the process and all that it started."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        self.timer.cancel()
        self._kill()
        self.process.wait()
        if self.log is not None:
            self.log.close()

    def _end_late(self) -> None:
        self.late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        """The last line that it printed; the lines before it are shown here."""
        if self.log is None:
            return "see above"
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()][-TAIL:]
        for line in lines:
            print(f"  {self.engine}: {line}", file=sys.stderr)
        return f"it said last: {lines[-1].strip()}" if lines else "it said nothing"


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


def environment_of(engine: str, options: argparse.Namespace) -> dict[str, str]:
    """Environment variables of an engine's process."""
    paths = [str(ROOT) if engine == OURS else of_peer(options.peer_path, engine), os.environ.get("PYTHONPATH")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        # All in one process, as ours: with several ranks, the first one's. With 1, its engine has another, which is
        # asked for the class of its model.
        "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # Products are compiled when they are needed, and not for every number of tokens at the start.
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": os.environ.get("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0"),
        # Its own models, even where our plugin is installed, unless the plugin is what is measured.
        "ALLOTROPE_VLLM": str(int(engine == "vllm+allotrope")),
    }


def engine_options(column: Column, options: argparse.Namespace, draft_model: str | None) -> dict[str, Any]:
    """Arguments of the engine's class: equal limits for all of them, then what the caller wants."""
    engine, ranks = column.engine, column.ranks
    if engine == "sglang":
        # Its own watchdog would take kernels that are compiled for a step that hangs; --limit ends the process.
        limits = {"context_length": 16384, "max_running_requests": 128, "watchdog_timeout": 3600}
        memory = {"mem_fraction_static": 0.85, "skip_tokenizer_init": True}
        common = {"tp_size": ranks, "disable_radix_cache": not options.prefix_caching}
        return {**limits, **memory, **common, **(of_peer(options.peer_options, engine) or {})}
    shared: dict[str, Any] = {
        "max_model_len": 16384,
        "max_num_seqs": 128,
        "enable_prefix_caching": options.prefix_caching,
    }
    if ranks > 1:
        shared["tensor_parallel_size"] = ranks
    drafts = None if column.speculation is None else speculative_config(column.speculation, draft_model)
    if engine == OURS:
        if drafts is not None:
            shared["speculative_config"] = drafts | {"adaptive": options.adaptive}
        return {**shared, "memory_utilization": 0.85, **options.our_options}
    own = of_peer(options.peer_options, engine) or {}
    # It counts drafts only where it keeps statistics.
    counted = {} if drafts is None else {"speculative_config": drafts, "disable_log_stats": False}
    return {**shared, "gpu_memory_utilization": 0.85, "skip_tokenizer_init": True, **counted, **own}


def speculative_config(speculation: Speculation, draft_model: str | None) -> dict[str, Any]:
    """Ours and vLLM's."""
    drafts: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.drafts}
    if draft_model is not None:
        drafts["model"] = draft_model
    if speculation.length is None:
        return drafts
    return drafts | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": speculation.length}


def speculations(
    method: str, drafts: Sequence[int], lengths: Sequence[float], *, only: bool = False
) -> list[Speculation | None]:
    """None, which is decoding without drafts, then every number of `drafts` with every length that it can have.
    `only`: without the first."""
    pairs = itertools.product(drafts, lengths or (None,))
    found = [Speculation(method, count, length) for count, length in pairs if (length or 1) <= count + 1]
    return [*found] if only else [None, *found]


def of_peer(given: dict[str | None, Any], engine: str) -> Any:
    """What an option gives a peer: what names it, for vLLM with our plugin what names vLLM, else what names no peer.
    None if there is nothing."""
    names = (engine, "vllm", None) if engine == HOSTED else (engine, None)
    return next((given[name] for name in names if name in given), None)


class OfPeers(argparse.Action):
    """Collects PEER=VALUE by the peer, and a VALUE for all others under None. `read`: of a value."""

    def __init__(self, *args: Any, read: Callable[[str], Any] = str, **kwargs: Any) -> None:
        super().__init__(*args, nargs="+", default={}, **kwargs)
        self.read = read

    def __call__(
        self, parser: argparse.ArgumentParser, into: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        found = dict(getattr(into, self.dest))
        for text in values:
            peer, named, value = text.partition("=")
            peer, value = (peer, value) if named and peer in PEERS else (None, text)
            if peer in found:
                parser.error(f"{flag} is given twice for {peer or 'all peers'}: {found[peer]!r} and {value!r}")
            try:
                found[peer] = self.read(value)
            except ValueError as error:
                parser.error(f"{flag} {text}: {error}")
        setattr(into, self.dest, found)


def run_roofline(directory: Path, options: argparse.Namespace, command: str) -> int:
    """Measure, print and write. Returns the command's exit status."""
    import torch

    if not torch.cuda.is_available():
        print("there is no GPU to measure a roofline on", file=sys.stderr)
        return 2
    from bench.engine import roofline

    def prompts(what: str, count: int, length: int) -> list[list[int]]:
        return random_prompts(f"{options.seed} {what}", count, length, vocabulary_of(directory))

    sizes = {key: getattr(options, key) for key in ("requests", "context", "prefill", "runs")}
    report: Report = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "model": directory.name,
        "described": describe(directory)["described"],
        "settings": sizes | {"seed": options.seed, "options": options.our_options},
        **roofline.measure(str(directory), roofline.Sizes(**sizes), prompts, options.our_options),
    }
    paths = write_roofline(options.out, report)
    print(paths[-1].read_text())
    for path in paths:
        print(f"wrote {path}")
    return 0


def vocabulary_of(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def describe(directory: Path) -> Report:
    """What the checkpoint is: a line for people, and a digest of its config and of its files' names and sizes."""
    text = (directory / "config.json").read_text()
    files = sorted((file.name, file.stat().st_size) for file in directory.glob("*.safetensors"))
    config = json.loads(text)
    inner, size = config.get("text_config", config), sum(size for _, size in files)
    method = (config.get("quantization_config") or {}).get("quant_method", "not quantized")
    architecture = (config.get("architectures") or ["?"])[0]
    return {
        "digest": hashlib.sha256((text + json.dumps(files)).encode()).hexdigest()[:16],
        "described": f"{architecture}, {inner.get('num_hidden_layers')} layers, {method}, {size / 1e9:.1f} GB.",
    }


def command_line(arguments: list[str]) -> str:
    """The command, without where things lie on this machine."""

    def here(text: str) -> str:
        return Path(text).name if text.startswith(("/", "~", "..")) else text

    parts = [one.partition("=") for one in arguments]
    kept = [
        f"{peer}={here(value)}" if named and peer in PEERS else here(peer + named + value)
        for peer, named, value in parts
    ]
    return "python bench/engine.py " + shlex.join(kept)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="*", help="directories with safetensors; none: only join --merge")
    parser.add_argument(
        "--cases", default="1024/128/4,1024/128/16,1024/128/64,8192/128/16", help="input/output/requests"
    )
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each case")
    parser.add_argument("--seed", type=int, default=0, help="of prompts")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["vllm"])
    for name, metavar, read, text in (
        ("python", "PYTHON", str, "Python that the peers run in"),
        ("path", "PATH", str, "put before the peers' PYTHONPATH: where their packages lie"),
        ("options", "JSON", json.loads, "more arguments of the peers' LLM or Engine"),
    ):
        text += f"; PEER={metavar} for one of them"
        parser.add_argument(f"--peer-{name}", action=OfPeers, read=read, metavar=metavar, help=text)
    parser.add_argument("--our-options", type=json.loads, default={}, help="JSON: more arguments of our LLM")
    parser.add_argument("--engines", nargs="+", choices=(OURS, *PEERS), help="default: ours, then --peers")
    parser.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[1], help="ranks, each on a GPU")
    parser.add_argument("--forced", default="17,64,200,333", help="lengths of prompts whose logprobs are compared")
    parser.add_argument("--speculate", type=int, nargs="+", default=[], metavar="K", help="draft tokens of a step")
    text = "with --speculate: mean tokens of a request in a step, forced, 1 to K + 1; default: drafts that are right"
    parser.add_argument("--accept", type=float, nargs="+", default=[], metavar="LENGTH", help=text)
    parser.add_argument(
        "--adaptive", action="store_true", help="with --speculate: ours drafts fewer where that is faster"
    )
    parser.add_argument("--drafts-only", action="store_true", help="with --speculate: no column without drafts")
    parser.add_argument("--draft-model", type=Path, help="with --speculate: an EAGLE3 head's directory; default: MTP")
    parser.add_argument("--prefix-caching", action="store_true", help="prefix caches on, in all of them")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that an engine's process may take")
    parser.add_argument("--signal", type=Path, help="before its cases an engine leaves SIGNAL.NAME and awaits SIGNAL")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="JSON of earlier runs to join")
    parser.add_argument("--roofline", action="store_true", help="ours alone, by class of kernel, beside the ceilings")
    parser.add_argument("--requests", type=int, default=64, help="with --roofline: that decode at once")
    parser.add_argument("--context", type=int, default=1024, help="with --roofline: tokens of each of their prompts")
    parser.add_argument("--prefill", type=int, default=8192, help="with --roofline: tokens of the prompt of a step")
    parser.add_argument("--out", type=Path, help="path without its suffix; default: under bench/results")
    parser.add_argument("--verbose", action="store_true", help="show what the engines say")
    options = parser.parse_args(arguments)
    options.out = options.out or ROOT / "bench" / "results" / ("roofline" if options.roofline else "engine")
    options.engines = options.engines or [OURS, *options.peers]
    options.cases = options.cases.split(",")
    options.forced = [int(length) for length in options.forced.split(",")]
    for case in options.cases:
        numbers = case.split("/")
        if len(numbers) != 3 or not all(one.isdigit() and int(one) > 0 for one in numbers) or int(numbers[1]) < 2:
            parser.error(f"--cases {case}: give input/output/requests, all positive, with an output of 2 or more")
    sizes = options.tensor_parallel_size
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        parser.error(f"--tensor-parallel-size {sizes}: give different numbers of at least 1")
    if options.roofline and sizes != [1]:
        parser.error(f"--tensor-parallel-size {sizes}: --roofline measures one rank")
    check_speculation(parser, options)
    names = [directory.name for directory in options.models]
    if len(set(names)) < len(names) or not (names or options.merge):
        parser.error(f"models {names}: give directories of different names, or files to --merge")
    if options.roofline and (len(names) != 1 or min(options.runs, options.requests, options.context) < 1):
        parser.error("--roofline: give one directory, and at least one run, request and token of context")
    if options.roofline and options.prefill < 2:
        parser.error(f"--prefill {options.prefill}: give at least 2")
    return options


def check_speculation(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error where the options of speculative decoding do not fit each other."""
    drafts, lengths = options.speculate, options.accept
    if drafts and (min(drafts) < 1 or len(set(drafts)) < len(drafts)):
        parser.error(f"--speculate {drafts}: give different numbers of at least 1")
    if not drafts and (lengths or options.draft_model or options.drafts_only):
        parser.error("--accept, --drafts-only and --draft-model need --speculate")
    idle = [length for length in lengths if not 1 <= length <= max(drafts) + 1]
    if idle or len(set(lengths)) < len(lengths):
        parser.error(f"--accept {lengths}: give different lengths from 1 to {max(drafts) + 1}")
    if drafts and ("sglang" in options.engines or options.roofline):
        parser.error("--speculate: neither SGLang nor --roofline is measured with drafts")


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    if options.roofline:
        return run_roofline(options.models[0].resolve(), options, command_line(given))
    report: Report = {
        "commands": [command_line(given)],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "settings": {
            "runs": options.runs,
            "seed": options.seed,
            "prefix_caching": options.prefix_caching,
            "parity_tokens": PARITY_TOKENS,
        },
        "models": {directory.name: describe(directory) | {"engines": {}} for directory in options.models},
    }
    for directory in options.models:
        head = options.draft_model
        method = "mtp" if head is None else "eagle3"
        measured = speculations(method, options.speculate, options.accept, only=options.drafts_only)
        for ranks, speculation, engine in itertools.product(options.tensor_parallel_size, measured, options.engines):
            column = Column(engine, ranks, speculation)
            shown = engine_options(column, options, None if head is None else head.name)
            found: Report = {"engine": engine, "ranks": ranks, "options": shown}
            found |= {"environment": {}, "kv_tokens": None, "start_s": [], "parity_ids": [], "forced": []}
            found |= {"cases": {}, "memory": {}, "error": "not run yet"}
            report["models"][directory.name]["engines"][str(column)] = found
    reports = [json.loads(file.read_text()) for file in options.merge] + [report] * bool(options.models)

    def joined() -> Report:
        return functools.reduce(merged, reports)

    try:
        joined()
    except ValueError as error:
        sys.exit(f"--merge: {error}")
    for directory in options.models:
        engines = report["models"][directory.name]["engines"]
        for names in processes(engines):
            measure_engine(names, directory.resolve(), options, engines, lambda: write_json(options.out, joined()))
    for path in write_report(options.out, joined()):
        print(f"wrote {path}")
    columns = [found for model in report["models"].values() for found in model["engines"].values()]
    return int(any(found["error"] for found in columns))


if __name__ == "__main__":
    sys.exit(main())
