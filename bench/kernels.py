"""How far each kernel is from the chip's limit and from the best peer.

    python bench/kernels.py                            every case of every family
    python bench/kernels.py --family mha --case decode
    python bench/kernels.py --device cpu --tiny        checks only, no time

Every case is first held against its reference: one that differs prints no speed, and the command ends with 1. See
docs/benchmarks.md for how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from bench.kernels import cases  # noqa: E402
from bench.kernels.cases.case import KernelCase  # noqa: E402
from bench.kernels.report import Row, environment, line, write_report  # noqa: E402
from bench.kernels.timing import Ceilings, Stopwatch, measure_ceilings  # noqa: E402

RESULTS = ROOT / "bench" / "results"


def families() -> list[str]:
    """Names of the files with cases."""
    return sorted(found.name for found in pkgutil.iter_modules(cases.__path__) if found.name != "case")


def select(wanted: Sequence[str], parts: Sequence[str], tiny: bool) -> Iterator[KernelCase]:
    """The cases of the `wanted` families (all if empty) whose name has each of `parts`. Raises KeyError for a family
    without a file."""
    known = families()
    for family in wanted or known:
        if family not in known:
            raise KeyError(f"no cases for {family!r}; there are: {', '.join(known)}")
        for case in importlib.import_module(f"{cases.__name__}.{family}").cases():
            if all(part in case.name for part in parts) and (case.tiny or not tiny):
                yield case


def run_case(case: KernelCase, device: torch.device, recorder: Stopwatch | None, ceilings: Ceilings | None) -> Row:
    """Check, then time ours and every peer. Without a `watch` (no GPU) it only checks."""
    row = Row(case)
    try:
        torch.manual_seed(0)
        inputs = case.make(device)
        timed = case.ours(inputs)
        found = case.check(inputs, timed)
        row.parity = [str(one) for one in found]
        row.right = bool(found) and all(found)
        if row.right and recorder is not None and ceilings is not None:
            row.ours = recorder.time(timed)
            row.kernels = recorder.kernels(timed)
            row.floor_us = ceilings.floor_us(case.bytes, case.flops, case.rate)
    except Exception as error:  # one broken case must not hide the others
        row.error = f"{type(error).__name__}: {error}"
        row.trace = traceback.format_exc()
        return row
    if row.ours is not None and recorder is not None:
        for name, prepare in case.peers.items():
            _time_peer(row, name, prepare, inputs, recorder)
        row.absent.update(case.absent)
    return row


def _time_peer(row: Row, name: str, prepare: Any, inputs: Any, recorder: Stopwatch) -> None:
    try:
        row.peers[name] = recorder.time(prepare(inputs))
    except ImportError as error:
        row.absent[name] = str(error)
    except Exception as error:  # a peer's failure is a fact about the peer
        row.absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="", help=f"families, with commas between; {', '.join(families())}")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name has this; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="only cases small enough for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-peers", action="store_true", help="time ours only")
    parser.add_argument("--out", type=Path, help="path of the report without its ending; default: under bench/results/")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cpu":
        # Before the first case imports Triton.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # Where faults of Triton's interpreter are mended.
        sys.path.append(str(ROOT / "tests"))
        importlib.import_module("interpreter_loops")
    recorder = Stopwatch(device) if device.type == "cuda" else None
    ceilings = measure_ceilings(recorder, device) if recorder is not None else None
    print(line(None, ceilings), flush=True)
    rows = []
    for case in select([name for name in options.family.split(",") if name], options.case, options.tiny):
        if options.no_peers:
            case = dataclasses.replace(case, peers={})
        row = run_case(case, device, recorder, ceilings)
        print(line(row, ceilings), flush=True)
        rows.append(row)
        gc.collect()
        if recorder is not None:
            torch.cuda.empty_cache()
    if not rows:
        print("no case has that name", file=sys.stderr)
        return 2
    command = " ".join(["python", "bench/kernels.py", *(sys.argv[1:] if arguments is None else arguments)])
    env = environment(device)
    what = options.family.replace(",", "_") or "all"
    write_report(options.out or RESULTS / f"kernels_{what}_{env['slug']}", rows, ceilings, env, command)
    return 0 if all(row.right and not row.error for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
