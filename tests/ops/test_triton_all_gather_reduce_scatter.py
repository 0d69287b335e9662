"""The exchange of rows through peer memory: what every rank gets, by either protocol, call after call."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from allotrope.kernels.backend import choose
from allotrope.kernels.chip_figures import figures_of
from allotrope.kernels.symmetric_memory import Communicator, Layout, Workspace, local_workspaces
from allotrope.ops.all_gather_reduce_scatter import ALL_GATHER, REDUCE_SCATTER, reference
from allotrope.ops.all_gather_reduce_scatter.triton import all_gather, launch, launch_phases, reduce_scatter
from allotrope.ops.all_reduce import ALL_REDUCE, AllReduceSpec, triton_row
from allotrope.ops.all_reduce import reference as sums
from allotrope.ops.all_reduce.protocol import FLAT_BYTES, ROWS_PROTOCOLS, Protocol
from allotrope.ops.all_reduce.triton import all_reduce

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON = torch.device(DEVICE)


def ranks_of(size: int, blocks: int, programs: int = 5) -> list[Communicator]:
    """`size` ranks in this process, with room for messages of `blocks` blocks one-shot."""
    made = local_workspaces(size, FLAT_BYTES, ON, programs, size * blocks * FLAT_BYTES)
    return [Communicator(rank, size, workspace=one) for rank, one in enumerate(made)]


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype in DTYPES:
        return torch.randn(shape, device=ON).to(dtype)
    return torch.randint(-100, 100, shape, device=ON).to(dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("protocol", ROWS_PROTOCOLS, ids=lambda one: one.value)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_gets_its_rows(size: int, protocol: Protocol) -> None:
    """Rows of all types that ids, counts and hidden states have, which end a block or do not."""
    ranks = ranks_of(size, 9)
    for dtype, rows, row in ((torch.bfloat16, 5, 2048), (torch.int64, 3, 1), (torch.float32, 2, 700)):
        parts = [drawn(dtype, rows, row) for _ in ranks]
        whole = torch.cat(parts)
        assert all(torch.equal(got, whole) for got in launch(protocol, ranks, parts, reduce=False))
    for dtype, (rows, row) in itertools.product(DTYPES, ((5, 1024), (1, 6))):
        parts = [drawn(dtype, size * rows, row) for _ in ranks]
        want = reference.reduce_scatter(ranks, parts)
        got = launch(protocol, ranks, parts, reduce=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(torch.cat(got), sums.all_reduce(ranks, parts)[0])


@pytest.mark.parametrize("protocol", ROWS_PROTOCOLS, ids=lambda one: one.value)
def test_parts_that_begin_within_a_word(protocol: Protocol) -> None:
    """And parts that do not lie one row after another."""
    ranks = ranks_of(2, 2)
    for kind in (torch.bfloat16, torch.int64):
        for parts in (
            [drawn(kind, 4 * 6 + 1)[1:].view(4, 6) for _ in ranks],
            [drawn(kind, 4, 8)[:, 1:7] for _ in ranks],
        ):
            assert torch.equal(launch(protocol, ranks, parts, reduce=False)[0], torch.cat(parts))
            if kind == torch.bfloat16:
                want = reference.reduce_scatter(ranks, parts)
                assert torch.equal(launch(protocol, ranks, parts, reduce=True)[1], want[1])


def test_calls_take_turns_with_sums() -> None:
    """Over one workspace: one that reads what an earlier call left behind is found."""
    ranks = ranks_of(2, 12)
    for i, rows in enumerate((1, 7, 2, 12, 3, 1, 9, 4)):
        parts = [drawn(DTYPES[i % 3], 2 * rows, 1000) for _ in ranks]
        for run, exact in ((all_gather, reference.all_gather), (reduce_scatter, reference.reduce_scatter)):
            for got, want in zip(run(ranks, parts), exact(ranks, parts), strict=True):
                assert torch.equal(got, want), (i, rows)
        assert torch.equal(all_reduce(ranks, parts)[1], sums.all_reduce(ranks, parts)[1])


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce-scatter"])
@pytest.mark.parametrize("protocol", ROWS_PROTOCOLS, ids=lambda one: one.value)
def test_a_rank_that_is_one_call_ahead_overwrites_nothing(protocol: Protocol, *, reduce: bool) -> None:
    ranks = ranks_of(2, 6)
    workspaces = [rank.workspace for rank in ranks]
    for one in workspaces:
        assert one is not None
        # A wait that would never end is let go, with wrong rows.
        one.abort()
    calls = [[drawn(torch.float32, 4, 300) for _ in ranks] for _ in range(4)]
    outs = [torch.empty(2 if reduce else 8, 300, device=ON) for _ in ranks]
    exact = reference.reduce_scatter if reduce else reference.all_gather

    def run(rank: int, call: int, phase: int) -> None:
        workspace = workspaces[rank]
        assert workspace is not None
        launch_phases(protocol, workspace, calls[call][rank], outs[rank], range(phase, phase + 1), reduce=reduce)

    run(0, 0, 0)
    for call in range(len(calls)):
        want = exact(ranks, calls[call])
        run(1, call, 0)
        run(0, call, 1)
        assert torch.equal(outs[0], want[0])
        if call + 1 < len(calls):
            run(0, call + 1, 0)
        run(1, call, 1)
        assert torch.equal(outs[1], want[1])


def test_what_has_no_room_is_left_to_the_group() -> None:
    """All of it, as what ends within a word: here the group is this process."""
    ranks = ranks_of(2, 2)
    for parts in ([drawn(torch.float32, 200, 2048) for _ in ranks], [drawn(torch.bfloat16, 2, 1)[1:] for _ in ranks]):
        assert torch.equal(all_gather(ranks, parts)[0], torch.cat(parts))
    parts = [drawn(torch.float32, 400, 2048) for _ in ranks]
    assert torch.equal(reduce_scatter(ranks, parts)[1], (parts[0] + parts[1])[200:])
    assert not any(rank.workspace is None or rank.workspace.counters.any() for rank in ranks)


def test_rows_for_which_no_memory_is_mapped_are_left_to_the_group() -> None:
    """Of models whose parts no kernel sums."""
    h200 = figures_of("h200")
    assert h200 is not None
    for size, name in ((8192, "triton"), (16384, "reference")):
        spec = AllReduceSpec(size, torch.bfloat16, 2)
        assert {choose(op, spec, h200.chip).backend.name for op in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)} == {name}


def test_calls_that_wait_for_a_dead_rank_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        # The interpreter polls some 1,000 times a second.
        monkeypatch.setattr(triton_row, "POLLS", tl.constexpr(64))
    (alive, _) = ranks_of(2, 2)
    assert alive.workspace is not None
    alive.workspace.abort()
    started = time.monotonic()
    for protocol, reduce in itertools.product(ROWS_PROTOCOLS, (False, True)):
        launch(protocol, [alive], [drawn(torch.float32, 2, 32)], reduce=reduce)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert time.monotonic() - started < 60


def _calls(rank: int, layout: Layout, buffers: list[torch.Tensor]) -> None:
    """What each of two processes runs: calls that wait for the other one. Raises where a row is wrong."""
    import interpreter  # noqa: F401

    torch.set_num_threads(1)
    torch.manual_seed(1)
    workspace = Workspace(rank, layout, buffers[rank], [buffer.data_ptr() for buffer in buffers])
    comm = Communicator(rank, 2, workspace=workspace)
    for protocol, rows in itertools.islice(itertools.cycle(itertools.product(ROWS_PROTOCOLS, (2, 8, 6))), 24):
        parts = [torch.randn(rows, 32).bfloat16() for _ in range(2)]
        for reduce, exact in ((False, reference.all_gather), (True, reference.reduce_scatter)):
            want = exact([comm, Communicator(1 - rank, 2)], parts)[0]
            (got,) = launch(protocol, [comm], [parts[rank]], reduce=reduce)
            assert torch.equal(got, want), (protocol, rows)
        if rank == rows % 4 // 2:
            # Now one process is ahead, now the other.
            time.sleep(0.01)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs where there is no GPU")
def test_processes_wait_for_each_other() -> None:
    """Two processes over shared memory, each with addresses of its own, run whole launches."""
    layout = Layout.of(2, FLAT_BYTES, 4, 4 * FLAT_BYTES)
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
