"""The all-reduce through peer memory: the sums of every protocol, on every rank the same, call after call."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from allotrope.attention.check import KINDS, compare
from allotrope.kernels.symmetric_memory import Communicator, Layout, Workspace, local_workspaces
from allotrope.ops.all_reduce import reference, triton_row
from allotrope.ops.all_reduce.protocol import Protocol, choose_protocol, fits
from allotrope.ops.all_reduce.triton import (
    Norm,
    all_reduce,
    all_reduce_add_rms_norm,
    launch,
    launch_phases,
    phase_count,
)
from allotrope.ops.rms_norm.reference import add_rms_norm

FLOOR = 0.1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON = torch.device(DEVICE)


def ranks_of(size: int, row: int, rows: int, programs: int = 5) -> list[Communicator]:
    """`size` ranks in this process, with room for `rows` rows of `row` fp32 numbers by every protocol."""
    made = local_workspaces(size, row * 4, ON, programs, size * rows * row * 4)
    return [Communicator(rank, size, workspace=one) for rank, one in enumerate(made)]


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=ON).to(dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("protocol", Protocol, ids=lambda one: one.value)
@pytest.mark.parametrize(
    ("size", "row", "dtype"),
    [*((2, 2880, dtype) for dtype in DTYPES), (3, 96, torch.float32), (4, 4096, torch.float16), (8, 7168, DTYPES[1])],
)
def test_sum_and_norms(size: int, row: int, protocol: Protocol, dtype: torch.dtype) -> None:
    """The sum to the bit, the norms within rounding, and all to the bit on every rank."""
    ranks = ranks_of(size, row, 9)
    for rows, scaled in ((1, False), (4, True), (5 if protocol is Protocol.LL else 9, False)):
        parts, residual = [drawn(dtype, rows, row) for _ in ranks], drawn(dtype, rows, 2 * row)[:, :row]
        weight, inner = (1 + drawn(torch.float32, row) for _ in range(2))
        factor = torch.full((1,), 0.37, device=ON).to(dtype) if scaled else None
        norm = Norm(residual, weight, FLOOR, inner if scaled else None, factor)
        results = launch(protocol, ranks, parts, row, norm)
        want = reference.all_reduce_add_rms_norm(ranks, parts, *norm, add_norm=add_rms_norm)[0]
        for got, exact in zip(results[0], want, strict=True):
            assert (found := compare(got, exact, KINDS[dtype])), str(found)
        assert scaled or torch.equal(results[0][0], want[0])
        assert all(torch.equal(a, b) for one in results[1:] for a, b in zip(one, results[0], strict=True))


def test_every_call_gets_what_was_sent_for_it() -> None:
    """Calls of all protocols, types and sizes in turn: one that reads what an earlier one left behind is found."""
    ranks = ranks_of(4, 256, 30)
    sizes = itertools.cycle([(1, 256), (5, 64), (4, 256), (3, 8), (29, 128), (2, 256), (5, 256)])
    for protocol, dtype in itertools.islice(itertools.cycle(itertools.product(Protocol, DTYPES)), 27):
        rows, row = next(sizes)
        rows = min(rows, 5) if protocol is Protocol.LL else rows
        parts = [drawn(dtype, rows, row) for _ in ranks]
        want = reference.all_reduce(ranks, parts)[0]
        assert all(torch.equal(got, want) for _, got in launch(protocol, ranks, parts, row))


@pytest.mark.parametrize("protocol", Protocol, ids=lambda one: one.value)
def test_a_rank_that_is_one_call_ahead_overwrites_nothing(protocol: Protocol) -> None:
    """Rank 0 sends the parts of its next call before rank 1 has read those of this one, time and again."""
    ahead, behind = (rank.workspace for rank in ranks_of(2, 64, 2000))
    assert ahead is not None and behind is not None
    # A wait that would never end is let go, with a wrong sum.
    ahead.abort()
    behind.abort()
    rows = 5 if protocol is Protocol.LL else 2 * ahead.layout.lanes * 2 + 7
    outs = [(made, made) for made in (torch.full((rows, 64), torch.nan, device=ON) for _ in range(2))]
    calls = [[drawn(torch.float32, rows, 64) for _ in range(2)] for _ in range(4)]
    phases = range(phase_count(protocol, ahead.layout, rows))
    assert len(phases) == (2 if protocol is not Protocol.TWO_SHOT else 2 * (3 + 2))

    steps = [(call, phase) for call in range(len(calls)) for phase in phases]

    def run(rank: int, step: int) -> None:
        call, phase = steps[step]
        workspace = (ahead, behind)[rank]
        launch_phases(protocol, workspace, calls[call][rank], outs[rank], 64, None, phases[phase : phase + 1])

    run(0, 0)
    for sends in range(0, len(steps), 2):
        run(1, sends)
        run(0, sends + 1)
        if sends + 2 < len(steps):
            run(0, sends + 2)
        run(1, sends + 1)
        call, phase = steps[sends]
        if phase == phases[-2]:
            assert all(torch.equal(out, calls[call][0] + calls[call][1]) for out, _ in outs)


def test_sizes_that_fill_no_row() -> None:
    ranks = ranks_of(2, 2048, 8)
    for dtype, shape in itertools.product(DTYPES, [(1, 2), (7, 1, 2), (3, 1000), (5, 2048)]):
        parts = [drawn(dtype, *shape) for _ in ranks]
        want = reference.all_reduce(ranks, parts)[0]
        assert all(torch.equal(got, want) for got in all_reduce(ranks, parts))


def test_calls_that_wait_for_a_dead_rank_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks only one calls, and the other never will."""
    if DEVICE == "cpu":
        # The interpreter polls some 1,000 times a second.
        monkeypatch.setattr(triton_row, "POLLS", tl.constexpr(64))
    (alive, _) = ranks_of(2, 32, 8)
    assert alive.workspace is not None
    alive.workspace.abort()
    started = time.monotonic()
    for protocol in Protocol:
        launch(protocol, [alive], [drawn(torch.float32, 1, 32)], 32)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_messages_lie_within_the_memory(ranks: int) -> None:
    """Every message that has a protocol also has room; of few bytes it is LL, of many two-shot."""
    for size, programs in itertools.product((5760, 8192, 14336), (8, 132, 304)):
        layout = Layout.of(ranks, size, programs)
        assert choose_protocol(layout, 1, size) is Protocol.LL
        assert choose_protocol(layout, (64 << 20) // size, size) is Protocol.TWO_SHOT
        assert choose_protocol(layout, 1 << 20, 2 * size) is None
        chosen = {choose_protocol(layout, rows, size) for rows in range(1, (8 << 20) // size)}
        assert chosen == ({Protocol.LL, Protocol.ONE_SHOT} if ranks == 2 else {*chosen, Protocol.LL, Protocol.TWO_SHOT})
        assert None not in chosen
        for rows in (1, programs, 4 * programs, (8 << 20) // size):
            last = rows * ranks * layout.chunk * 8 if 2 * size <= layout.chunk * 8 else 1 << 60
            assert not fits(Protocol.LL, layout, rows, size) or last <= layout.flags // 2
            count = -(-rows // programs)
            assert not fits(Protocol.ONE_SHOT, layout, rows, size) or ranks * count * size <= layout.arena
            assert fits(Protocol.TWO_SHOT, layout, rows, size)
        assert layout.flags <= layout.lane_flags <= layout.arenas <= layout.rows < layout.bytes
        assert layout.bytes < 512 << 20


def test_rows_that_are_not_aligned_are_copied() -> None:
    ranks = ranks_of(2, 64, 8)
    parts, residual, weight = [drawn(torch.bfloat16, 3, 33)[:, 1:] for _ in ranks], drawn(torch.bfloat16, 3, 32), None
    weight = drawn(torch.float32, 32)
    got = all_reduce_add_rms_norm(ranks, parts, residual, weight, FLOOR, None, None, add_rms_norm)
    want = reference.all_reduce_add_rms_norm(ranks, parts, residual, weight, FLOOR, None, None, add_rms_norm)
    assert all(torch.equal(a, b) for one, two in zip(got, want, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("protocol", Protocol, ids=lambda one: one.value)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_streams_wait_for_each_other(size: int, protocol: Protocol) -> None:
    """Whole launches, which poll: each rank on a stream of its own, eager and as graphs that are replayed in turn."""
    ranks, streams = ranks_of(size, 4096, 40, 8), [torch.cuda.Stream() for _ in range(size)]
    rows = 8 if protocol is Protocol.LL else 37
    parts = [drawn(torch.bfloat16, rows, 4096) for _ in ranks]
    residual, weight = drawn(torch.bfloat16, rows, 4096), drawn(torch.float32, 4096)
    norm = Norm(residual, weight, FLOOR, None, None)
    for stream in streams:
        with torch.cuda.stream(stream):
            # So that no stream asks the driver for memory while another one's launch waits.
            [torch.empty_like(residual) for _ in range(4)]
    torch.cuda.synchronize()

    def let_go() -> None:
        for rank in ranks:
            assert rank.workspace is not None
            rank.workspace.abort()

    # A wait that would never end is let go, with a wrong sum.
    timer = threading.Timer(60, let_go)
    timer.daemon = True
    timer.start()

    def run(rank: int, times: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [launch(protocol, [ranks[rank]], [parts[rank]], 4096, norm)[0] for _ in range(times)]

    def everywhere(times: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        found = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append(run(rank, times))
        torch.cuda.synchronize()
        return found

    want = launch(protocol, ranks, parts, 4096, norm)[0]
    torch.cuda.synchronize()
    everywhere(1)
    graphs = [torch.cuda.CUDAGraph() for _ in ranks]
    captured = []
    for rank, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
        with torch.cuda.graph(graph, stream=stream):
            captured.append(run(rank, 5))
    for _ in range(20):
        for results in captured:
            for one in results:
                one[0].zero_()
                one[1].zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for results in (*captured, *everywhere(1)):
            assert all(torch.equal(a, b) for one in results for a, b in zip(one, want, strict=True))
    timer.cancel()


def _workspace(rank: int, layout: Layout, buffers: list[torch.Tensor]) -> Workspace:
    return Workspace(rank, layout, buffers[rank], [buffer.data_ptr() for buffer in buffers])


def _calls(rank: int, layout: Layout, buffers: list[torch.Tensor]) -> None:
    """What each of two processes runs: calls that wait for the other one. Raises where a sum is wrong."""
    import interpreter  # noqa: F401

    torch.set_num_threads(1)
    torch.manual_seed(1)
    comm = Communicator(rank, 2, workspace=_workspace(rank, layout, buffers))
    for protocol, rows in itertools.islice(itertools.cycle(itertools.product(Protocol, (1, 4, 3))), 36):
        parts = [torch.randn(rows, 32).bfloat16() for _ in range(2)]
        want = reference.all_reduce([comm] * 2, parts)[0]
        ((_, got),) = launch(protocol, [comm], [parts[rank]], 32)
        assert torch.equal(got, want), (protocol, rows)
        if rank == rows % 2:
            # Now one process is ahead, now the other.
            time.sleep(0.01)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
def test_processes_wait_for_each_other() -> None:
    """Two processes over shared memory, each with addresses of its own, run whole launches."""
    layout = Layout.of(2, 128, 4, 2048)
    buffers = [torch.zeros(layout.bytes, dtype=torch.uint8).share_memory_() for _ in range(2)]
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_calls, args=(rank, layout, buffers)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    ended = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert ended == [0, 0]
