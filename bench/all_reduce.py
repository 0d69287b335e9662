"""How long the ranks take to sum their parts, with the residual sum and the norm that follow, or to exchange rows.

    python bench/all_reduce.py                                all GPUs of this machine
    python bench/all_reduce.py --ranks 2 --sizes 8,32         messages of 8 and 32 KiB between two
    python bench/all_reduce.py --collective reduce_scatter    8 to 65536 KiB to each rank

Ours, as it chooses and by each protocol, beside NCCL's and PyTorch's symmetric memory; sums are followed by our norm.
All results are first held against those in fp32. See docs/benchmarks.md for how to read the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.kernels.symmetric_memory import Communicator, map_workspace  # noqa: E402
from allotrope.kernels.tiles import cdiv  # noqa: E402
from allotrope.kernels.tolerance import KINDS, compare  # noqa: E402
from allotrope.ops.all_gather_reduce_scatter import reference as rows_reference  # noqa: E402
from allotrope.ops.all_reduce import reference  # noqa: E402
from allotrope.ops.all_reduce.protocol import (  # noqa: E402
    FLAT_BYTES,
    ROWS_PROTOCOLS,
    Protocol,
    choose_protocol,
    fits,
)
from allotrope.ops.rms_norm.reference import add_rms_norm as reference_norm  # noqa: E402
from bench.kernels.report import environment  # noqa: E402

RESULTS = ROOT / "bench" / "results"
# KiB of a message.
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DTYPE, FLOOR = torch.bfloat16, 1e-3
CALLS, REPLAYS = 50, 20
OURS = "ours"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
Run = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Message:
    """One rank's part of a sum, and what follows it. `y`, `residual`: [rows, hidden]."""

    rank: Communicator
    y: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor

    @property
    def norm(self) -> tuple[Any, ...]:
        return self.residual, self.weight, FLOOR, None, None


def ways(message: Message) -> dict[str, Callable[[], Run]]:
    """Name -> what prepares one run; it raises where it cannot."""
    from allotrope.ops.all_reduce import triton
    from allotrope.ops.rms_norm.triton import add_rms_norm

    rank, (rows, hidden) = message.rank, message.y.shape

    def chosen() -> Run:
        return lambda: triton.all_reduce_add_rms_norm([rank], [message.y], *message.norm, add_rms_norm)[0]

    def by(protocol: Protocol) -> Callable[[], Run]:
        def prepare() -> Run:
            assert rank.workspace is not None
            if not fits(protocol, rank.workspace.layout, rows, hidden * DTYPE.itemsize):
                raise ValueError("no room")
            norm = triton.Norm(*message.norm)
            return lambda: triton.launch(protocol, [rank], [message.y], hidden, norm)[0]

        return prepare

    def group() -> Run:
        return lambda: reference.all_reduce_add_rms_norm([rank], [message.y], *message.norm, add_rms_norm)[0]

    def symmetric(operation: str) -> Callable[[], Run]:
        def prepare() -> Run:
            from torch.distributed import _symmetric_memory

            world = dist.group.WORLD
            assert world is not None
            part = _symmetric_memory.empty(rows, hidden, dtype=DTYPE, device=message.y.device)
            _symmetric_memory.rendezvous(part, world)
            part.copy_(message.y)
            run = getattr(torch.ops.symm_mem, operation)
            return lambda: add_rms_norm(run(part, "sum", world.group_name), *message.norm)

        return prepare

    return {
        OURS: chosen,
        **{f"ours, {protocol.value}": by(protocol) for protocol in Protocol},
        "NCCL": group,
        "one_shot_all_reduce": symmetric("one_shot_all_reduce"),
        "two_shot_all_reduce_": symmetric("two_shot_all_reduce_"),
    }


def check_sum(run: Run, message: Message) -> list[str]:
    """What is wrong with the results of one run: they are held against fp32, and against those of the other ranks."""
    before = message.y.clone()
    summed, normed = (one.clone() for one in run())
    exact = before.float()
    dist.all_reduce(exact)
    want = reference_norm(exact, message.residual.float(), message.weight, FLOOR)
    found = [compare(got, one, KINDS[DTYPE]) for got, one in zip((summed, normed), want, strict=True)]
    wrong = [str(one) for one in found if not one]
    of_rank_0 = summed.clone()
    dist.broadcast(of_rank_0, 0)
    if not torch.equal(of_rank_0, summed):
        wrong.append("the ranks have different bits")
    message.y.copy_(before)
    return wrong


def ways_of_rows(collective: str, rank: Communicator, x: torch.Tensor) -> dict[str, Callable[[], Run]]:
    """As `ways`, of an exchange of rows: `x`, those that this rank sends."""
    from allotrope.ops.all_gather_reduce_scatter import triton

    reduce = collective == "reduce_scatter"

    def chosen() -> Run:
        run = triton.reduce_scatter if reduce else triton.all_gather
        return lambda: tuple(run([rank], [x]))

    def by(protocol: Protocol) -> Callable[[], Run]:
        def prepare() -> Run:
            assert rank.workspace is not None
            if not fits(protocol, rank.workspace.layout, blocks(rank, x, reduce), FLAT_BYTES):
                raise ValueError("no room")
            return lambda: tuple(triton.launch(protocol, [rank], [x], reduce=reduce))

        return prepare

    def group() -> Run:
        run = rows_reference.reduce_scatter if reduce else rows_reference.all_gather
        return lambda: tuple(run([rank], [x]))

    by_protocol = {f"ours, {protocol.value}": by(protocol) for protocol in ROWS_PROTOCOLS}
    return {OURS: chosen, **by_protocol, "NCCL": group}


def blocks(rank: Communicator, x: torch.Tensor, reduce: bool) -> int:
    """Of what is sent to each rank."""
    return cdiv(x.nbytes // (rank.size if reduce else 1), FLAT_BYTES)


def check_rows(run: Run, collective: str, rank: Communicator, x: torch.Tensor) -> list[str]:
    """As `check_sum`."""
    (got,) = run()
    if collective == "all_gather":
        (want,) = rows_reference.all_gather([rank], [x])
        return [] if torch.equal(got, want) else ["other rows than NCCL's"]
    exact = x.float()
    dist.all_reduce(exact)
    found = compare(got, exact.chunk(rank.size)[rank.rank], KINDS[DTYPE])
    return [] if found else [str(found)]


def time_of(run: Run, device: torch.device) -> float:
    """Microseconds of one run in a graph of many, the median of several replays, on the slowest rank."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            run()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize(device)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        found.append(start.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(statistics.median(found[2:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(collective: str, rank: Communicator, rows: int, hidden: int, device: torch.device) -> dict[str, Any]:
    """One row of the table. Every rank calls it. `rows`: of a sum, or to each rank."""
    draw = torch.Generator().manual_seed(rows)
    residual, weight = torch.randn(rows, hidden, generator=draw), torch.rand(hidden, generator=draw)
    # Small beside the residual, so that sums which NCCL rounds at every hop are within the tolerance on 8 ranks too.
    sent = rows * rank.size if collective == "reduce_scatter" else rows
    y = torch.randn(sent, hidden, generator=draw.manual_seed(rank.rank)) / 8
    x = y.to(device, DTYPE)
    if collective == "all_reduce":
        message = Message(rank, x, residual.to(device, DTYPE), weight.to(device))
        made, check = ways(message), partial(check_sum, message=message)
    else:
        made = ways_of_rows(collective, rank, x)
        check = partial(check_rows, collective=collective, rank=rank, x=x)
    times: dict[str, float] = {}
    absent: dict[str, str] = {}
    wrong: dict[str, list[str]] = {}
    for name, prepare in made.items():
        try:
            run = prepare()
        except Exception as error:
            # A peer's failure is a fact about the peer, and the same on every rank.
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        reasons: list[Any] = [None] * rank.size
        dist.all_gather_object(reasons, check(run))
        if any(reasons):
            wrong[name] = [reason for of_rank in reasons for reason in of_rank]
            continue
        # Sums in place would grow without end.
        x.zero_()
        times[name] = time_of(run, device)
        x.copy_(y)
    assert rank.workspace is not None
    layout = rank.workspace.layout
    if collective == "all_reduce":
        protocol = choose_protocol(layout, rows, hidden * DTYPE.itemsize)
    else:
        protocol = choose_protocol(layout, blocks(rank, x, collective == "reduce_scatter"), FLAT_BYTES, ROWS_PROTOCOLS)
    found = {"rows": rows, "bytes": rows * hidden * DTYPE.itemsize, "us": times, "absent": absent, "wrong": wrong}
    return {**found, "chosen": "NCCL" if protocol is None else protocol.value}


def run_rank(rank: int, options: argparse.Namespace, meeting: str, out: str) -> None:
    """One process."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks)
    row_bytes = options.hidden * DTYPE.itemsize
    workspace, reasons = map_workspace(rank, options.ranks, None, device, row_bytes)
    if workspace is None:
        raise SystemExit("; ".join(reasons))
    rows = []
    for size in options.sizes:
        with torch.inference_mode():
            communicator = Communicator(rank, options.ranks, workspace=workspace)
            count = max(1, size * 1024 // row_bytes)
            rows.append(measure(options.collective, communicator, count, options.hidden, device))
        if rank == 0:
            print(line(rows[-1]), flush=True)
            Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    times = "  ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    wrong = "".join(f"  WRONG {name}: {'; '.join(reasons)}" for name, reasons in row["wrong"].items())
    absent = "".join(f"  [{name}: {reason}]" for name, reason in row["absent"].items())
    return f"{row['bytes'] // 1024:6d} KiB  {row['chosen']:9s} {times}{wrong}{absent}"


def page(report: dict[str, Any]) -> str:
    """The stored report in Markdown."""
    env, rows = report["environment"], report["rows"]
    names = list(dict.fromkeys(name for row in rows for name in (*row["us"], *row["wrong"])))
    head = f"{report['ranks']} x {env['device']}, rows of {report['hidden']}, torch {env['torch']}, {env['date']}."
    collective = report.get("collective", "all_reduce")
    what = (
        "the sum, the residual sum and the norm" if collective == "all_reduce" else "one call, by message to each rank"
    )
    lines = [
        f"# {collective.replace('_', '-').capitalize()}",
        "",
        f"`{report['command']}`",
        "",
        f"{head} µs of {what}.",
        "",
        f"| message | chosen | {' | '.join(names)} |",
        f"|---|---|{'---:|' * len(names)}",
    ]
    for row in rows:
        cells = ["wrong" if name in row["wrong"] else _cell(row["us"].get(name)) for name in names]
        lines.append(f"| {row['bytes'] // 1024} KiB ({row['rows']}) | {row['chosen']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help="GPUs; default: all")
    parser.add_argument("--collective", choices=COLLECTIVES, default=COLLECTIVES[0])
    parser.add_argument("--hidden", type=int, default=4096, help="numbers of a row, of bfloat16")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="KiB of a message, with commas between")
    parser.add_argument("--out", type=Path, help="path of the report without its ending; default: under bench/results/")
    options = parser.parse_args(arguments)
    options.sizes = [int(size) for size in options.sizes.split(",")]
    if torch.cuda.device_count() < options.ranks:
        found = torch.cuda.device_count()
        print(f"{options.ranks} ranks need {options.ranks} GPUs; PyTorch sees {found}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        torch.multiprocessing.start_processes(
            run_rank, (options, f"{folder}/meeting", out), options.ranks, start_method="spawn"
        )
        rows = json.loads(Path(out).read_text())
    env = environment(torch.device("cuda"))
    command = " ".join(["python", "bench/all_reduce.py", *(sys.argv[1:] if arguments is None else arguments)])
    measured = {"collective": options.collective, "ranks": options.ranks, "hidden": options.hidden, "rows": rows}
    report = {"command": command, "environment": env, **measured}
    path = options.out or RESULTS / f"{options.collective}_x{options.ranks}_{env['slug']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_name(path.name + ".md").write_text(page(report))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
