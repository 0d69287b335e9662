"""The ranks of one model, as one of them sees them: joining, waiting for each other, leaving.

Owns the process groups. A model of one rank has a group of its own, in which nothing happens.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from allotrope.errors import ConfigError
from allotrope.layers.parallel import ProcessGroups
from allotrope.rank_layout import RankLayout, group_of

# Longer than any load or step should take; a rank that hangs that long is as good as dead.
_TIMEOUT = timedelta(minutes=30)
_LEAVE_SECONDS = 1.5
# What leaving may take in the background, where all processors are busy: for the next group, and for the process's end.
_SETTLE_SECONDS, _EXIT_SECONDS = 60.0, 3.0
_ABORTING = threading.Lock()
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
# Variables of the environment that this process has set: those of the user stay.
_INTERFACES: dict[str, str] = {}


@dataclass(frozen=True)
class RankGroup:
    """`store`: where the ranks meet; None for a model of one rank. `address`: at which the others reach this rank.
    `aborts`: called by `abort` before all else, none of them waits.
    """

    rank: int
    size: int
    store: TCPStore | None = None
    address: str = LOOPBACK
    aborts: list[Callable[[], None]] = field(default_factory=list)

    @staticmethod
    def open(size: int, address: str = LOOPBACK) -> RankGroup:
        """The group as rank 0 sees it. `address`: the one at which its store listens, and no other. Raises ConfigError
        where this host does not have it."""
        if size == 1:
            return RankGroup(0, 1)
        try:
            # The store would listen at every address of the host.
            with socket.create_server((address, 0), family=_family(address)) as listening:
                port, descriptor = listening.getsockname()[1], os.dup(listening.fileno())
        except OSError as error:
            raise ConfigError(
                f"distributed_address={address}: ranks cannot meet there ({error}). Give an address of this host."
            ) from error
        store = TCPStore(
            address,
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=descriptor,
        )
        return RankGroup(0, size, store, address)

    @staticmethod
    def connect(rank: int, size: int, meeting: str, port: int, address: str | None = None) -> RankGroup:
        """The group as a further rank sees it. `meeting`, `port`: of rank 0's store. `address`: of this rank, where
        that is not the same."""
        store = TCPStore(meeting, port, size, is_master=False, timeout=_TIMEOUT)
        return RankGroup(rank, size, store, address or meeting)

    @property
    def port(self) -> int:
        """The port of rank 0's store."""
        assert self.store is not None, "a model of one rank has no store"
        return int(self.store.port)

    def join(self, device: torch.device, layout: RankLayout) -> ProcessGroups:
        """Wait until all ranks have joined. `device`: this rank's. Returns the groups that it is a part of."""
        if self.store is None:
            return ProcessGroups()
        # Gloo would otherwise look the host's name up; NCCL takes any interface that is up.
        if device.type == "cpu" or not _is_loopback(self.address):
            _use_interface("GLOO_SOCKET_IFNAME" if device.type == "cpu" else "NCCL_SOCKET_IFNAME", self.address)
        # A rank that fails is found by `RankMonitor`; NCCL's own watchdog would end the process with a core dump.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
            # NCCL connects the ranks here, and not in the first collective.
            device_id=device if on_gpu else None,
        )
        return ProcessGroups(
            tensor=self._group(layout.tensor_groups()),
            data=self._group(layout.data_groups()),
            stage=self._group(layout.stage_groups()),
            forward=self._link(layout),
            back=self._link(layout),
        )

    def _group(self, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """The one of disjoint `groups` of ranks that has this rank; None for all ranks, and for this one alone."""
        if len(groups) == 1 or len(groups[0]) == 1:
            return None
        # Every rank makes all of them, in one order.
        made = {ranks: dist.new_group(list(ranks), timeout=_TIMEOUT) for ranks in groups}
        return made[group_of(self.rank, groups)]

    def _link(self, layout: RankLayout) -> dist.ProcessGroup | None:
        """A group of its own for the ranks that stand alike in each pipeline stage; None where there is one stage."""
        if layout.pipeline == 1:
            return None
        made = {ranks: dist.new_group(list(ranks), timeout=_TIMEOUT) for ranks in layout.pipeline_groups()}
        return made[group_of(self.rank, layout.pipeline_groups())]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.store is not None:
            dist.barrier()

    def min(self, value: int) -> int:
        """The smallest `value` of the ranks."""
        if self.store is None:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        values = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values)

    def abort(self) -> None:
        """End the collectives that wait for ranks which are gone, from any thread. May be called again."""
        for abort in self.aborts:
            abort()
        # Those of gloo end by themselves: the connection to a process that has ended is closed.
        with _ABORTING:
            if self._uses_nccl():
                distributed_c10d._abort_process_group()

    @staticmethod
    def settled(seconds: float = _SETTLE_SECONDS) -> bool:
        """Whether this process is in no process group. Waits as long for one that is being left."""
        if _ABORTING.acquire(timeout=seconds):
            _ABORTING.release()
        return not dist.is_initialized()

    def leave(self) -> None:
        """Let go of the process group, within seconds and without the other ranks; what takes longer goes on in the
        background. CUDA graphs must be gone: NCCL waits for those that hold its collectives.
        """
        if self._uses_nccl():
            # To destroy the group would wait for the other ranks. To abort it is quick, but that is not ours to say.
            start_thread(self.abort, "abort", _LEAVE_SECONDS)
            if dist.is_initialized():
                # An abort that meets the end of CUDA's driver would end the process with a core dump.
                atexit.register(RankGroup.settled, _EXIT_SECONDS)
        elif self.store is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _uses_nccl(self) -> bool:
        return self.store is not None and dist.is_initialized() and dist.get_backend() == "nccl"


def start_thread(run: Callable[[], None], name: str, seconds: float = 0.0) -> None:
    """Run in a thread of its own, and wait for it as long. At the end of the process, when no thread can be started any
    more, run here.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        run()
        return
    if seconds:
        thread.join(seconds)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1")


def _use_interface(variable: str, address: str) -> None:
    """Let a library talk through the interface that has `address`, unless the user has named one."""
    if (name := _interface_of(address)) is not None and os.environ.get(variable) == _INTERFACES.get(variable):
        os.environ[variable] = _INTERFACES[variable] = name


def _interface_of(address: str) -> str | None:
    """The network interface with an address; None where it is not found."""
    if _is_loopback(address):
        return "lo" if sys.platform.startswith("linux") else "lo0"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
