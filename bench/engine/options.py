"""What `bench/engine.py` can be asked for, and what that means for the process of an engine."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shlex
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from allotrope.rank_layout import RankLayout
from bench.engine.report import HOSTED, OURS, Column, Speculation

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("vllm", "sglang", *HOSTED)
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
# Ours and vLLM's, in the order of the fields of a layout.
LAYOUT_OPTIONS = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
# Sequences at once that every engine takes at least, whatever the cases.
MAX_SEQUENCES = 128


def parse(arguments: list[str], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
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
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[1], help="ranks, each on a GPU")
    text = "of ranks, each on a GPU, such as TP1, TP2, DP2, TP2+EP or TP2+DP2+EP (DP: of attention; EP: whole experts)"
    ranks.add_argument("--layouts", nargs="+", default=[], metavar="LAYOUT", help=text)
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
    text = "seconds until an engine's first token; default: --limit"
    parser.add_argument("--start-limit", type=float, metavar="SECONDS", help=text)
    parser.add_argument("--signal", type=Path, help="before its cases an engine leaves SIGNAL.NAME and awaits SIGNAL")
    text = "load all engines at once, and let them make each run in turn; their options say what memory each takes"
    parser.add_argument("--interleave", action="store_true", help=text)
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
    options.layouts = layouts_of(parser, options)
    check_speculation(parser, options)
    names = [directory.name for directory in options.models]
    if len(set(names)) < len(names) or not (names or options.merge):
        parser.error(f"models {names}: give directories of different names, or files to --merge")
    if options.roofline and (len(names) != 1 or min(options.runs, options.requests, options.context) < 1):
        parser.error("--roofline: give one directory, and at least one run, request and token of context")
    if options.roofline and options.prefill < 2:
        parser.error(f"--prefill {options.prefill}: give at least 2")
    return options


def layouts_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[RankLayout]:
    """Those asked for by either option. Ends with an error where they do not fit the other options."""
    sizes, names = options.tensor_parallel_size, options.layouts
    given = f"--layouts {' '.join(names)}" if names else f"--tensor-parallel-size {sizes}"
    try:
        found = [RankLayout.named(name.replace("+", " ")) for name in names] or [RankLayout(size) for size in sizes]
    except ValueError as error:
        parser.error(f"{given}: {error}, with + for each space")
    if min(sizes) < 1 or len(set(found)) < len(found):
        parser.error(f"{given}: give different layouts, of at least 1 rank")
    if options.roofline and found != [RankLayout()]:
        parser.error(f"{given}: --roofline measures one rank")
    shared = [layout.name for layout in found if layout != RankLayout(layout.tensor)]
    hosts, multiprocessing = {host_of(engine) for engine in options.engines}, os.environ.get(MULTIPROCESSING, "0")
    if shared and "sglang" in hosts:
        parser.error(f"{given}: SGLang is measured with tensor-parallel ranks alone, not as {', '.join(shared)}")
    if "vllm" in hosts and multiprocessing != "0" and any(layout.data > 1 for layout in found):
        parser.error(f"{given}: vLLM's data-parallel engines would go on to a 32nd step; unset {MULTIPROCESSING}")
    for flag, peers in (("--our-options", [options.our_options]), ("--peer-options", options.peer_options.values())):
        if asked := sorted({name for own in peers for name in own} & {*LAYOUT_OPTIONS}):
            parser.error(f"{flag} {', '.join(asked)}: ask for them by --layouts, so that columns are named after them")
    return found


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
    if drafts and (options.roofline or any(host_of(engine) == "sglang" for engine in options.engines)):
        parser.error("--speculate: neither SGLang nor --roofline is measured with drafts")


def host_of(engine: str) -> str:
    """The engine, or the one that our plugin runs in."""
    return HOSTED.get(engine, engine)


def of_peer(given: dict[str | None, Any], engine: str) -> Any:
    """What an option gives a peer: what names it, for a host with our plugin what names the host, else what names no
    peer. None if there is nothing."""
    return next((given[name] for name in (engine, host_of(engine), None) if name in given), None)


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


def environment_of(engine: str, options: argparse.Namespace) -> dict[str, str]:
    """Environment variables of an engine's process."""
    paths = [str(ROOT)] if engine == OURS else [of_peer(options.peer_path, engine)]
    if engine in HOSTED:
        paths += [str(ROOT), entry_points()]
    paths.append(os.environ.get("PYTHONPATH"))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        # All in one process, as ours: with several ranks, the first one's. With 1, its engine has another, which is
        # asked for the class of its model.
        MULTIPROCESSING: os.environ.get(MULTIPROCESSING, "0"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # Products are compiled when they are needed, and not for every number of tokens at the start.
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": os.environ.get("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0"),
        # Its own models, even where our plugin is installed, unless the plugin is what is measured.
        "ALLOTROPE_VLLM": str(int(engine == "vllm+allotrope")),
        "ALLOTROPE_SGLANG": str(int(engine == "sglang+allotrope")),
    }


@functools.cache
def entry_points() -> str:
    """A folder where hosts find this checkout's plugins, as if it were installed; kept as long as this process."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = Path(_kept_folder().name) / f"{OURS}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {OURS}\nVersion: {project['version']}\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {where}" for name, where in points.items())])
        for group, points in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return str(info.parent)


@functools.cache
def _kept_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="allotrope-entry-points-")


def engine_options(column: Column, options: argparse.Namespace, draft_model: str | None) -> dict[str, Any]:
    """Arguments of the engine's class: equal limits for all of them, then what the caller wants."""
    engine, layout = column.engine, column.layout
    # A data-parallel rank has its share of the requests.
    requests = max(-(-int(case.rpartition("/")[2]) // layout.data) for case in options.cases)
    sequences = max(MAX_SEQUENCES, requests)
    if host_of(engine) == "sglang":
        # Its own watchdog would take kernels that are compiled for a step that hangs; --limit ends the process.
        limits = {"context_length": 16384, "max_running_requests": sequences, "watchdog_timeout": 3600}
        memory = {"mem_fraction_static": 0.85, "skip_tokenizer_init": True}
        common = {"tp_size": layout.tensor, "disable_radix_cache": not options.prefix_caching}
        return {**limits, **memory, **common, **(of_peer(options.peer_options, engine) or {})}
    shared: dict[str, Any] = {
        "max_model_len": 16384,
        "max_num_seqs": sequences,
        "enable_prefix_caching": options.prefix_caching,
        **layout_options(layout),
    }
    drafts = None if column.speculation is None else speculative_config(column.speculation, draft_model)
    if engine == OURS:
        if drafts is not None:
            shared["speculative_config"] = drafts | {"adaptive": options.adaptive}
        return {**shared, "memory_utilization": 0.85, **options.our_options}
    own = of_peer(options.peer_options, engine) or {}
    # It counts drafts only where it keeps statistics.
    counted = {} if drafts is None else {"speculative_config": drafts, "disable_log_stats": False}
    return {**shared, "gpu_memory_utilization": 0.85, "skip_tokenizer_init": True, **counted, **own}


def layout_options(layout: RankLayout) -> dict[str, Any]:
    """Ours and vLLM's, where they are not those of one rank."""
    pairs = zip(LAYOUT_OPTIONS, astuple(layout), astuple(RankLayout()), strict=True)
    return {name: value for name, value, one in pairs if value != one}


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
