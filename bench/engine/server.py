"""What clients of a server see: engines side by side on one GPU, each started with its default settings.

    python bench/random_weights.py bench/configs/gpt_oss_120b /tmp/gpt_oss --layers 16
    python bench/engine/server.py /tmp/gpt_oss --engines allotrope vllm --peer-python python3 --peer-path SITE

One server after the other, ours first; both read the same safetensors and a tokenizer of one word per id, which is
written beside them. start: seconds from starting the process until /health answers 200. Then one cell after the other,
in the order given, so that the first is what a server does in its first minute: so many clients, each sending its next
request when its last one has ended (closed loop), prompts of random ids that never come twice, streamed answers.
Clients are spread over processes, so that they do not wait for one another.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from allotrope.bench.load import Target, Traffic, run_load  # noqa: E402
from allotrope.bench.record import RequestRecord, Summary, random_prompts, summarize  # noqa: E402

OURS, PEER = "allotrope", "vllm"
# More clients than this in one process would wait for each other, not for the server.
CLIENTS_PER_PROCESS = 16
TAIL = 15
CELLS = "4:400:1024/128,128:1280:1024/128"
# Ids that tokenizers keep for themselves lie at the ends.
MOST_ID = 50000


@dataclasses.dataclass(frozen=True)
class Cell:
    """`clients` at a time, `requests` in all, of `input` tokens that ask for `output`."""

    clients: int
    requests: int
    input: int
    output: int


class ServerFailed(Exception):
    """A server ended, or took too long to start."""


class Server:
    """An engine's server in a process group of its own."""

    def __init__(self, engine: str, directory: Path, options: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.engine, self.log = engine, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.command = [*_command(engine, directory, self.port, options)]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            self.command, stdout=self.log, stderr=self.log, env=_environment(engine, options), start_new_session=True
        )

    def wait(self, limit: float) -> float:
        """Seconds from the start until /health answers 200. Raises ServerFailed."""
        import httpx

        while time.perf_counter() - self.began < limit:
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.engine} ended with code {self.process.returncode}\n{self.tail()}")
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200:
                    return time.perf_counter() - self.began
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise ServerFailed(f"{self.engine} was not ready after {limit:g} s\n{self.tail()}")

    def tail(self, lines: int = TAIL) -> str:
        """The end of what it printed."""
        self.log.seek(0)
        return "\n".join(f"  {self.engine}: {line}" for line in self.log.read().splitlines()[-lines:])

    def close(self) -> None:
        """End it and all that it started."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sent)
                self.process.wait(timeout=30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.log.close()


def _command(engine: str, directory: Path, port: int, options: argparse.Namespace) -> list[str]:
    shared = [str(directory), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    if engine == OURS:
        return [sys.executable, "-m", "allotrope", "serve", *shared, *options.our_options]
    return [options.peer_python, "-m", "vllm.entrypoints.cli.main", "serve", *shared, *options.peer_options]


def _environment(engine: str, options: argparse.Namespace) -> dict[str, str]:
    paths = [options.peer_path if engine == PEER else str(ROOT), os.environ.get("PYTHONPATH")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer's sampler is compiled on first use, for minutes.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "ALLOTROPE_VLLM": "0",
    }


def write_tokenizer(directory: Path) -> None:
    """A tokenizer with a word of its own for every id, where the directory has none."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    if (directory / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(vocabulary_of(directory))}, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)


def vocabulary_of(directory: Path) -> int:
    config = json.loads((directory / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def _clients(port: int, prompts: list[list[int]], clients: int, output: int) -> list[RequestRecord]:
    """One process's clients."""
    target = Target(url=f"http://127.0.0.1:{port}", model="model")
    traffic = Traffic(output, float("inf"), clients)
    records, _ = asyncio.run(run_load(target, prompts, traffic, lambda record: None))
    return records


def run_cell(port: int, cell: Cell, prompts: Sequence[list[int]]) -> Summary:
    """Send all prompts and sum up what came back."""
    count = -(-cell.clients // CLIENTS_PER_PROCESS)
    shares = [len(range(i, cell.clients, count)) for i in range(count)]
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        # Started before anything is timed.
        list(pool.map(time.sleep, [0.2] * count))
        began = time.perf_counter()
        futures = [
            pool.submit(_clients, port, list(prompts[i::count]), share, cell.output) for i, share in enumerate(shares)
        ]
        records = [record for future in futures for record in future.result()]
    return summarize(records, time.perf_counter() - began)


def measure(engine: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start one engine's server and run all cells."""
    server = Server(engine, directory, options)
    found: dict[str, Any] = {"engine": engine, "cells": [], "error": None}
    shown = [Path(one).name if one.startswith("/") else one for one in server.command]
    found["command"] = shlex.join(shown).replace(str(server.port), "PORT")
    try:
        found["start_s"] = server.wait(options.limit)
        print(f"{engine}: ready after {found['start_s']:.1f} s", flush=True)
        for number, cell in enumerate(options.cells):
            vocabulary = min(vocabulary_of(directory), MOST_ID)
            prompts = random_prompts(cell.requests, cell.input, vocabulary, options.seed + number)
            summary = run_cell(server.port, cell, prompts)
            found["cells"].append({**dataclasses.asdict(cell), **summary.as_json()})
            print(f"{engine}: {row(found['cells'][-1])}", flush=True)
            if summary.failed:
                print(server.tail(), flush=True)
    except ServerFailed as error:
        found["error"] = str(error)
        print(error, flush=True)
    finally:
        if options.logs:
            (options.logs / f"{engine}.log").write_text(server.tail(100_000))
        server.close()
    return found


def row(cell: dict[str, Any]) -> str:
    """A cell's figures in one line of a table."""
    ttft, tpot = cell["latency"].get("TTFT"), cell["latency"].get("TPOT")
    if not ttft or not tpot:
        return f"{cell['clients']} clients: {cell['failed']} failed: {cell['errors'][:1]}"
    named = f"{cell['clients']} clients, {cell['input']}/{cell['output']}, {cell['completed']} requests"
    return (
        f"{named} | {ttft['p50_ms']:.0f} | {ttft['p99_ms']:.0f} | {ttft['p99_ms'] / ttft['p50_ms']:.1f} | "
        f"{tpot['p50_ms']:.2f} | {cell['output_tokens_per_s']:.0f}"
    )


def report(found: dict[str, Any]) -> str:
    """The tables of a run."""
    lines = [f"# {found['model']}, over HTTP, default settings", ""]
    lines += [f"{found['date']}, {found['device']}. `{found['command']}`", ""]
    for engine in found["engines"]:
        start = f"ready after {engine['start_s']:.1f} s" if "start_s" in engine else engine["error"]
        lines += [f"## {engine['engine']}: {start}", "", f"`{engine['command']}`", ""]
        lines += ["| | TTFT p50 ms | p99 | p99/p50 | TPOT p50 ms | tokens/s |", "|---|---|---|---|---|---|"]
        lines += [f"| {row(cell)} |" for cell in engine["cells"]] + [""]
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory with safetensors")
    parser.add_argument("--engines", nargs="+", choices=(OURS, PEER), default=[OURS])
    parser.add_argument("--cells", default=CELLS, help="clients:requests:input/output, in this order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a start may take")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that the peer runs in")
    parser.add_argument("--peer-path", help="put before the peer's PYTHONPATH: where its packages lie")
    parser.add_argument("--our-options", type=shlex.split, default=[], help="more flags of our server")
    parser.add_argument("--peer-options", type=shlex.split, default=[], help="more flags of the peer's")
    parser.add_argument("--logs", type=Path, help="directory for what the servers print")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results" / "server", help="path without its suffix"
    )
    options = parser.parse_args(arguments)
    cells = []
    for text in options.cells.split(","):
        clients, requests, sizes = text.split(":")
        cells.append(Cell(int(clients), int(requests), *map(int, sizes.split("/"))))
    options.cells = cells
    return options


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    directory = options.model.resolve()
    write_tokenizer(directory)
    import torch

    shown = [Path(one).name if one.startswith(("/", "~", "..")) else one for one in given]
    found = {
        "model": directory.name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "command": f"python bench/engine/server.py {shlex.join(shown)}",
        "engines": [measure(engine, directory, options) for engine in options.engines],
    }
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(report(found))
    print(report(found))
    return int(any(engine["error"] for engine in found["engines"]))


if __name__ == "__main__":
    sys.exit(main())
