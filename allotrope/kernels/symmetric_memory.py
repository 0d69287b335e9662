"""Memory of one size on every rank that all ranks may write into, and what a collective over it keeps beside it.

Owns: where each thing lies in it, how the ranks map it, and why they cannot. Must not know: what is sent. All calls
that use a workspace follow one another, on one stream or in an order that streams wait for.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from allotrope.kernels import device_ipc
from allotrope.kernels.chip import chip_of, peer_access
from allotrope.kernels.tiles import cdiv, next_power_of_2

T = TypeVar("T")

MAX_RANKS = 8
MAX_BYTES = 8 << 20
"""Of a one-shot message of two ranks, at the most: beyond, links and not latencies count."""
PART_SLOTS, SUM_SLOTS = 3, 2
"""Chunks of a two-shot program whose parts, and whose sums, lie in its memory at once."""
# Two-shot programs of a multiprocessor at the most, bytes of rows that they have on their way at once, and of chunks.
_LANES, _BUSY, _CHUNKS = 8, 32 << 10, 64 << 10
# Of all LL messages of one call, to one peer.
_LL_BYTES = 1 << 20
_ALIGNMENT = 128


@dataclass(frozen=True)
class Layout:
    """Where each thing lies in a rank's memory; the same on all `ranks`.

    `slots`: rows of a call of the LL protocol. `chunk`: 64-bit words of one writer's row there. `programs`: of a
    one-shot call. `arena`: bytes of the rows of one of them. Slots and arenas exist twice. `row`: bytes of a row of a
    two-shot call, which has `lanes` programs.
    """

    ranks: int
    slots: int
    chunk: int
    programs: int
    arena: int
    row: int

    @staticmethod
    def of(ranks: int, row_bytes: int, programs: int, max_bytes: int = MAX_BYTES) -> Layout:
        """With room for one-shot messages of two ranks of `max_bytes`, in rows of `row_bytes`, and for two-shot ones of
        any size. `programs`: as many as stay resident."""
        row = _aligned(row_bytes)
        slots = max(1, min(programs, _LL_BYTES // (ranks - 1) // row))
        count = cdiv(cdiv(max_bytes, row), programs)
        return Layout(ranks, slots, 2 * row // 8, programs, 2 * count * row, row)

    @property
    def lanes(self) -> int:
        """Programs of a two-shot call: while one waits, others on its multiprocessor have rows on their way."""
        row = next_power_of_2(self.row)
        return self.programs * max(1, min(_LANES, _BUSY // row, _CHUNKS // (self.ranks * row)))

    @property
    def flags(self) -> int:
        """Bytes before the flags of one-shot programs, and then of two-shot ones: one from each rank."""
        return 2 * self.slots * self.ranks * self.chunk * 8

    @property
    def lane_flags(self) -> int:
        return self.flags + _aligned(self.programs * self.ranks * 4)

    @property
    def arenas(self) -> int:
        """Bytes before the arenas."""
        return self.lane_flags + _aligned(self.lanes * self.ranks * 4)

    @property
    def rows(self) -> int:
        """Bytes before the rows of two-shot programs: of each, slots of a row for each rank."""
        return self.arenas + 2 * self.programs * self.arena

    @property
    def bytes(self) -> int:
        """Of all."""
        return self.rows + self.lanes * (PART_SLOTS + SUM_SLOTS) * self.ranks * self.row


def _aligned(size: int) -> int:
    return cdiv(size, _ALIGNMENT) * _ALIGNMENT


class Workspace:
    """One rank's view of the memory of all ranks.

    `peers`: [ranks] int64 addresses of the ranks' memory, as this device sees them. `counters`: [3, programs] of LL and
    one-shot the calls of each program so far, of two-shot its steps. `abort`: [1] in the host's memory; not 0: no call
    waits any longer. `mappings`: what keeps the addresses good.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        buffer: torch.Tensor,
        addresses: Sequence[int],
        mappings: Sequence[device_ipc.Mapping] = (),
    ) -> None:
        device = buffer.device
        self.rank, self.layout, self.buffer, self.mappings = rank, layout, buffer, mappings
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.counters = torch.zeros(3, max(layout.slots, layout.lanes), dtype=torch.int32, device=device)
        self.abort_flag = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def abort(self) -> None:
        """Let go of every call that waits for a peer; the results of such a call mean nothing."""
        self.abort_flag.fill_(1)


@dataclass(frozen=True)
class Communicator:
    """`rank` of `size` processes that share each layer; `group` is their process group (None: the default one).

    `workspace`: their memory; None: they talk through the group alone. `unreachable`: why they cannot map one.
    `host_all_reduce`: the sum of a tensor over the ranks as their host makes it, also while it captures a graph; None:
    the group's.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    workspace: Workspace | None = field(default=None, compare=False)
    unreachable: tuple[str, ...] = ()
    host_all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)


def local_workspaces(
    ranks: int, row_bytes: int, device: torch.device, programs: int = 8, max_bytes: int = MAX_BYTES
) -> list[Workspace]:
    """Workspaces of ranks that are all in this process, on one device."""
    layout = Layout.of(ranks, row_bytes, programs, max_bytes)
    buffers = [torch.zeros(layout.bytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    return [Workspace(rank, layout, buffer, addresses) for rank, buffer in enumerate(buffers)]


def map_workspace(
    rank: int, size: int, group: dist.ProcessGroup | None, device: torch.device, row_bytes: int
) -> tuple[Workspace | None, tuple[str, ...]]:
    """The workspace of this rank, or None and the reasons of all ranks. Every rank calls it, and all get one or none.

    `row_bytes`: of the longest row of a message.
    """
    own = _Facts(device.index, chip_of(device).num_sms, tuple(symmetric_memory_reasons(size)), _host())
    facts: list[_Facts] = _exchange(own, size, group, device)
    reasons = [f"rank {i}: {reason}" for i, one in enumerate(facts) for reason in one.reasons]
    if (hosts := len({one.host for one in facts})) > 1:
        reasons.append(f"hosts={hosts} (needs 1: memory is mapped within a host)")
    if not reasons:
        others = [one.device for i, one in enumerate(facts) if i != rank]
        lost = [
            f"rank {rank}: cuda:{device.index} cannot access cuda:{i}" for i in others if not peer_access(device, i)
        ]
        reasons = _agreed(lost, size, group, device)
    if reasons:
        return None, tuple(reasons)
    layout = Layout.of(size, row_bytes, min(one.num_sms for one in facts))

    def together(what: Callable[[], T]) -> tuple[T | None, tuple[str, ...]]:
        """The result on this rank, or why any rank has none. Whatever the driver says, the group serves as well."""
        out, own = None, []
        try:
            out = what()
        except Exception as error:
            own.append(f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0])
        return out, tuple(_agreed(own, size, group, device))

    # A rank that has no memory left must not let the others wait for it in the exchange of handles.
    exported, failed = together(lambda: _exported(layout, device))
    if exported is None or failed:
        return None, failed
    buffer, handle = exported
    handles = _exchange(handle, size, group, device)
    workspace, failed = together(lambda: _mapped(rank, layout, buffer, handles))
    return (None, failed) if failed else (workspace, ())


def symmetric_memory_reasons(size: int) -> list[str]:
    """Why `size` ranks on GPUs cannot map each other's memory, as far as one of them knows."""
    return [f"ranks={size} (needs {MAX_RANKS} or fewer)"] if size > MAX_RANKS else []


@dataclass(frozen=True)
class _Facts:
    """What ranks tell each other: the index of a rank's device, its multiprocessors, why it can map no memory, and what
    only ranks of one host say alike."""

    device: int | None
    num_sms: int
    reasons: tuple[str, ...]
    host: str


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _exported(layout: Layout, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """This rank's memory, zeroed, and the handle by which its peers map it."""
    buffer = device_ipc.allocate(layout.bytes, device)
    torch.cuda.synchronize(device)
    return buffer, device_ipc.export(buffer)


def _mapped(rank: int, layout: Layout, buffer: torch.Tensor, handles: Sequence[bytes]) -> Workspace:
    others = {i: device_ipc.Mapping(handle, buffer.device) for i, handle in enumerate(handles) if i != rank}
    addresses = [others[i].address if i in others else buffer.data_ptr() for i in range(len(handles))]
    return Workspace(rank, layout, buffer, addresses, list(others.values()))


def _agreed(own: list[str], size: int, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """The reasons of all ranks."""
    return [reason for reasons in _exchange(own, size, group, device) for reason in reasons]


def _exchange(own: T, size: int, group: dist.ProcessGroup | None, device: torch.device) -> list[T]:
    """Every rank's `own`, in rank order."""
    found: list[T | None] = [None] * size
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(found, own, group=group)
    return [one for one in found if one is not None]
