"""The ranks of one model, as one of them sees them: joining, waiting for each other, leaving.

Owns the process groups. A model of one rank has a group of its own, in which nothing happens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from allotrope.layers.parallel import ProcessGroups
from allotrope.rank_layout import RankLayout, group_of

# Longer than any load or step should take; a rank that hangs that long is as good as dead.
_TIMEOUT = timedelta(minutes=30)
_LEAVE_SECONDS = 1.5
_ABORTING = threading.Lock()


@dataclass(frozen=True)
class RankGroup:
    """`store`: where the ranks meet; None for a model of one rank. `aborts`: called by `abort` before all else, none of
    them waits.
    """

    rank: int
    size: int
    store: TCPStore | None = None
    aborts: list[Callable[[], None]] = field(default_factory=list)

    @staticmethod
    def open(size: int) -> RankGroup:
        """The group as rank 0 sees it."""
        if size == 1:
            return RankGroup(0, 1)
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return RankGroup(0, size, store)

    @staticmethod
    def connect(rank: int, size: int, port: int) -> RankGroup:
        """The group as a further rank sees it. `port`: of rank 0's store."""
        return RankGroup(rank, size, TCPStore("127.0.0.1", port, size, is_master=False, timeout=_TIMEOUT))

    @property
    def port(self) -> int:
        """The port of rank 0's store."""
        assert self.store is not None, "a model of one rank has no store"
        return int(self.store.port)

    def join(self, device: torch.device, layout: RankLayout) -> ProcessGroups:
        """Wait until all ranks have joined. `device`: this rank's. Returns the groups that it is a part of."""
        if self.store is None:
            return ProcessGroups()
        if device.type == "cpu":
            # All ranks are on this machine; gloo would otherwise look the host's name up.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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
        )

    def _group(self, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """The one of disjoint `groups` of ranks that has this rank; None for all ranks, and for this one alone."""
        if len(groups) == 1 or len(groups[0]) == 1:
            return None
        # Every rank makes all of them, in one order.
        made = {ranks: dist.new_group(list(ranks), timeout=_TIMEOUT) for ranks in groups}
        return made[group_of(self.rank, groups)]

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

    def leave(self) -> None:
        """Let go of the process group, within seconds and without the other ranks. CUDA graphs must be gone: NCCL waits
        for those that hold its collectives.
        """
        if self._uses_nccl():
            # To destroy the group would wait for the other ranks. To abort it is quick, but that is not ours to say.
            start_thread(self.abort, "abort", _LEAVE_SECONDS)
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
