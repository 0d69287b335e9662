"""Attention data parallel: each rank has the rows of its own requests, and feed-forward blocks see those of all ranks.

    y = sum over the ranks of a stage of ffn(rows of all ranks), each rank keeping its own rows

Owns the exchange of rows before and after what the ranks of a stage share. Must not know requests, or what is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from allotrope.layers.parallel import Parallel


@dataclass(frozen=True)
class RankRows:
    """The rows of a step on each data-parallel rank. `data`: these ranks. `counts`: rows of each, at least one.
    `padding`: whether those of this rank are of no sequence.

    All of it is known to every host: nothing asks a device, and rows of equal counts are exchanged where they lie, so
    that a captured step can do it.
    """

    data: Parallel
    counts: tuple[int, ...]
    padding: bool = False

    @property
    def own(self) -> int:
        """Rows of this rank."""
        return self.counts[self.data.rank]

    def own_of(self, x: torch.Tensor) -> torch.Tensor:
        """Of what `gather` returns, the rows of this rank."""
        start = sum(self.counts[: self.data.rank])
        return x[start : start + self.own]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [own, ...]. Returns the rows of all ranks [sum of counts, ...], in the order of the ranks."""
        most = max(self.counts)
        out = self.data.all_gather(_padded(x, most))
        if min(self.counts) == most:
            return out
        return torch.cat([part[:count] for part, count in zip(out.split(most), self.counts, strict=True)])

    def reduce_scatter(self, y: torch.Tensor) -> torch.Tensor:
        """`y`: [sum of counts, ...], this rank's part of a sum over the ranks, which may be overwritten. Returns the
        sum of this rank's rows [own, ...]."""
        most = max(self.counts)
        if min(self.counts) < most:
            y = torch.cat([_padded(part, most) for part in y.split(list(self.counts))])
        return self.data.reduce_scatter(y)[: self.own]


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with rows of zeros behind."""
    if len(x) == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def gather_selected(data: Parallel, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """As `RankRows.gather`, of ranks that may have no rows."""
    if not sum(counts):
        return x
    most = max(counts)
    whole = RankRows(data, (most,) * len(counts)).gather(_padded(x, most))
    starts = itertools.count(0, most)
    return torch.cat([whole[start : start + count] for start, count in zip(starts, counts, strict=False)])
