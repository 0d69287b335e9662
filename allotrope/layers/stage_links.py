"""A rank's links to the pipeline stages before and behind its own: what is sent and received, step after step.

Owns the point-to-point calls. Hidden states go forward in one process group and back to the first stage in another: of
two messages between the same ranks in opposite directions, none waits for the other. Must not know what a step is.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from allotrope.kernels.warmup import warming_up
from allotrope.rank_layout import RankLayout, group_of


class StageLinks:
    """Those of rank `rank`, which meets the ranks of its own position in each stage. `forward`, `back`: their process
    groups, one for each direction.

    A GPU sends and receives on the streams of these groups: what is received is there for whatever runs next on the
    current stream, and what is sent was computed on it before. In a warm-up nothing is sent, and zeros are received.
    """

    def __init__(
        self, layout: RankLayout, rank: int, forward: dist.ProcessGroup | None, back: dist.ProcessGroup | None
    ) -> None:
        peers, stage = group_of(rank, layout.pipeline_groups()), layout.position(rank).stage
        self._forward, self._back, self._stages = forward, back, layout.pipeline
        self._before = peers[stage - 1] if stage else None
        self._behind = peers[stage + 1] if stage + 1 < layout.pipeline else None
        self._first, self._last = peers[0], peers[-1]
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        """Send to the stage behind. `x` is not to be written to any more."""
        assert self._behind is not None, "this is the last stage"
        self._send(x, self._behind, self._forward)

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with what the stage before sent."""
        assert self._before is not None, "this is the first stage"
        return self._receive(out, self._before, self._forward)

    def send_back(self, x: torch.Tensor) -> None:
        """From the last stage to the first."""
        self._send(x, self._first, self._back)

    def receive_back(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with what the last stage sent to this one, the first."""
        return self._receive(out, self._last, self._back)

    def _send(self, x: torch.Tensor, to: int, group: dist.ProcessGroup | None) -> None:
        if warming_up() or not len(x):
            return
        x = x.contiguous()
        self._sent.append((dist.isend(x, to, group=group), x))
        if len(self._sent) > self._stages:
            # So many steps later it has arrived: no more are under way.
            self._sent.popleft()[0].wait()

    def _receive(self, out: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        if warming_up():
            return out.zero_()
        if len(out):
            dist.recv(out, source, group=group)
        return out
