"""One rank's share of a model: its shard of each weight, and the collectives over partial results.

Owns: cutting full tensors, the collectives, and by which backend the ranks sum. Must not know: which model or layer a
tensor belongs to.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from allotrope.kernels.backend import Chooser
from allotrope.kernels.symmetric_memory import Communicator, Workspace, map_workspace
from allotrope.kernels.tiles import cdiv
from allotrope.kernels.warmup import warming_up
from allotrope.layers.stage_links import StageLinks
from allotrope.ops.all_gather_reduce_scatter import ALL_GATHER, REDUCE_SCATTER
from allotrope.ops.all_gather_reduce_scatter import reference as rows_reference
from allotrope.ops.all_reduce import ALL_REDUCE, AllReduceSpec, reference
from allotrope.ops.all_reduce.protocol import FLAT_BYTES
from allotrope.rank_layout import RankLayout, RankPosition

log = logging.getLogger("allotrope.layers")


# Stands for the layout of ranks that share each layer, and nothing else.
_SHARE_LAYERS = RankLayout(tensor=0)


@dataclass(frozen=True)
class ProcessGroups:
    """A rank's process groups, each None where it is all ranks, or this one alone."""

    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None
    forward: dist.ProcessGroup | None = None
    back: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Parallel(Communicator):
    """A rank that cuts its shards and sums its parts. A warm-up enters no collective: each rank warms up by itself.

    As a rank of a model it stands for its tensor-parallel group, which shares attention. `all_ranks_sample`:
    whether every rank needs the logits whole, or only rank 0. `sum`, `gather`, `scatter`: the backends of
    `ALL_REDUCE`, `ALL_GATHER` and `REDUCE_SCATTER`. `layout`: of all ranks; default: these alone. `world_rank`:
    this one's number among all; default: `rank`. `stage`: the ranks that share its feed-forward blocks and
    vocabulary, None where they are the same. `data`: those with the same share of attention, for other requests;
    None where there are none. `sized_by`: the options that set `size`, for errors. `links`: to the other pipeline
    stages, once the ranks have joined; None where there are none.
    """

    all_ranks_sample: bool = False
    sum: Callable[..., list[torch.Tensor]] = field(default=reference.all_reduce, compare=False)
    gather: Callable[..., list[torch.Tensor]] = field(default=rows_reference.all_gather, compare=False)
    scatter: Callable[..., list[torch.Tensor]] = field(default=rows_reference.reduce_scatter, compare=False)
    layout: RankLayout = _SHARE_LAYERS
    world_rank: int = -1
    stage: Parallel | None = None
    data: Parallel | None = None
    sized_by: str = "tensor_parallel_size"
    links: StageLinks | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.layout is _SHARE_LAYERS:
            object.__setattr__(self, "layout", RankLayout(self.size))
        if self.world_rank < 0:
            object.__setattr__(self, "world_rank", self.rank)

    @staticmethod
    def of(layout: RankLayout, rank: int = 0) -> Parallel:
        """Rank number `rank` of `layout`, before the ranks have joined."""
        position = layout.position(rank)
        own = Parallel(position.tp_rank, layout.tensor, layout=layout, world_rank=rank)
        if layout.data == 1:
            return own
        in_stage = position.dp_rank * layout.tensor + position.tp_rank
        sized_by = "data_parallel_size * tensor_parallel_size"
        stage = Parallel(in_stage, layout.stage_size, layout=layout, world_rank=rank, sized_by=sized_by)
        data = Parallel(position.dp_rank, layout.data, layout=layout, world_rank=rank)
        return dataclasses.replace(own, stage=stage, data=data)

    def joined(self, groups: ProcessGroups) -> Parallel:
        """The same rank once the ranks have joined."""
        stage = None if self.stage is None else dataclasses.replace(self.stage, group=groups.stage)
        data = None if self.data is None else dataclasses.replace(self.data, group=groups.data)
        links = None
        if self.layout.pipeline > 1:
            links = StageLinks(self.layout, self.world_rank, groups.forward, groups.back)
        return dataclasses.replace(self, group=groups.tensor, stage=stage, data=data, links=links)

    @property
    def position(self) -> RankPosition:
        """Where this rank stands among all."""
        return self.layout.position(self.world_rank)

    @property
    def of_stage(self) -> Parallel:
        """This rank among those that share its feed-forward blocks and vocabulary."""
        return self if self.stage is None else self.stage

    def all_reduce_spec(self, size: int, dtype: torch.dtype) -> AllReduceSpec:
        """What the ranks sum, in numbers."""
        return AllReduceSpec(size, dtype, self.size, self.unreachable)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks, perhaps in place: `x` is not to be used any more."""
        return x if self.size == 1 else self.sum((self,), (x,))[0]

    def all_reduce_each(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As `all_reduce`, of several tensors of one shape by one collective."""
        return parts if self.size == 1 else self.all_reduce(torch.stack(parts)).unbind()

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' `x`, element by element (in place)."""
        if self.size > 1 and not warming_up():
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The ranks' `logits` [n, tokens of the rank] side by side on every rank that samples, unchanged elsewhere."""
        if self.size == 1:
            return logits
        logits, receives = logits.contiguous(), self.rank == 0 or self.all_ranks_sample
        parts = [torch.empty_like(logits) for _ in range(self.size)] if receives else None
        if not warming_up():
            if self.all_ranks_sample:
                dist.all_gather(parts, logits, group=self.group)
            else:
                dist.gather(logits, parts, group=self.group, group_dst=0)
        return logits if parts is None else torch.cat(parts, dim=-1)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [T, ...], as many rows on every rank. Returns those of all ranks [size * T, ...], in their order."""
        return x if self.size == 1 else self.gather((self,), (x,))[0]

    def reduce_scatter(self, y: torch.Tensor) -> torch.Tensor:
        """`y`: [size * T, ...], this rank's part of a sum over the ranks. Returns the sum of this rank's rows."""
        return y if self.size == 1 else self.scatter((self,), (y,))[0]

    def broadcast(self, x: torch.Tensor) -> None:
        """Make `x` that of rank 0 on every rank."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=0)

    @property
    def groups(self) -> list[Parallel]:
        """This rank in each of its groups of a stage."""
        return [one for one in (self, self.stage, self.data) if one is not None]

    @property
    def workspaces(self) -> list[Workspace]:
        """The memory of its groups."""
        return list(dict.fromkeys(one.workspace for one in self.groups if one.workspace is not None))

    def split(self, what: str, units: int) -> int:
        """Units (heads, columns) per rank; raises ValueError where `units` cannot be shared or replicated evenly."""
        if units % self.size == 0:
            return units // self.size
        if self.size % units == 0:
            return 1
        raise ValueError(
            f"{what}={units} cannot be shared by {self.sized_by}={self.size}: one must be a multiple of the other"
        )

    def shard(self, what: str, units: int) -> int:
        """As `split`, where replication is no option (sums over ranks would count it twice)."""
        if units % self.size:
            raise ValueError(f"{what}={units} is not a multiple of {self.sized_by}={self.size}")
        return units // self.size


def map_peers(parallel: Parallel, chooser: Chooser, dtype: torch.dtype, size: int, device: torch.device) -> Parallel:
    """The same rank with memory that its peers write into, where the chip has it; says in the log what sums the parts.

    Every rank calls it once the process groups are there. `dtype`, `size`: of the rows of hidden states.
    """
    # The other groups have no sums that a norm follows, which is made of whole rows.
    mapped = _map_group(parallel, chooser, dtype, size, device, max(size * dtype.itemsize, FLAT_BYTES))
    if mapped.data is None or mapped.stage is None:
        return mapped
    data = _map_group(mapped.data, chooser, dtype, size, device, FLAT_BYTES)
    if data.size < mapped.stage.size:
        stage = _map_group(mapped.stage, chooser, dtype, size, device, FLAT_BYTES)
    else:
        # The same ranks in the same order.
        stage = dataclasses.replace(mapped.stage, workspace=data.workspace, unreachable=data.unreachable, sum=data.sum)
    return dataclasses.replace(mapped, stage=stage, data=data)


def _map_group(
    group: Parallel, chooser: Chooser, dtype: torch.dtype, size: int, device: torch.device, row_bytes: int
) -> Parallel:
    """As `map_peers`, of the ranks of one group. `row_bytes`: of the longest row of a message."""
    if group.size == 1:
        return group
    spec = group.all_reduce_spec(size, dtype)
    chosen = chooser.choose(ALL_REDUCE, spec)
    if ALL_REDUCE.name in chooser.wanted and chosen.name != "triton":
        return dataclasses.replace(group, unreachable=(f"{ALL_REDUCE.name}={chosen.name} was asked for",))
    if chosen.name != "triton":
        return group
    workspace, reasons = map_workspace(group.rank, group.size, group.group, device, row_bytes)
    if workspace is None:
        log.warning("parts are summed by the process group: %s", "; ".join(reasons))
        return dataclasses.replace(group, unreachable=reasons)
    log.info("parts are summed through %.1f MB of peer memory", workspace.layout.bytes / 1e6)
    # The layers that exchange rows or gather top-k indices say so in the log.
    silent = Chooser(chooser.chip, chooser.wanted)
    gather, scatter = (silent.choose(one, spec).run for one in (ALL_GATHER, REDUCE_SCATTER))
    return dataclasses.replace(group, workspace=workspace, sum=chosen.run, gather=gather, scatter=scatter)


@dataclass(frozen=True)
class Section:
    """A run of rows (or columns) of a parameter that comes from one checkpoint tensor.

    `size`: rows of the full tensor. `unit`: rows that stay together (a head, a quantization group); 0 means every rank
    holds all of it. `room`: rows that each rank's parameter has for its share, which need not be as long as that of
    another rank, and zeros behind it; 0: shares are equal.
    """

    name: str
    size: int
    unit: int = 0
    room: int = 0

    def bounds(self, parallel: Parallel) -> tuple[int, int]:
        """First and last row (exclusive) that this rank holds."""
        if not self.unit or parallel.size == 1:
            return 0, self.size
        if self.room:
            units = cdiv(self.size, self.unit)
            first, last = (units * rank // parallel.size * self.unit for rank in (parallel.rank, parallel.rank + 1))
            return first, min(last, self.size)
        units = self.size // self.unit
        count = parallel.split(self.name or "units", units)
        first = parallel.rank * count if units >= parallel.size else parallel.rank * units // parallel.size
        return first * self.unit, (first + count) * self.unit

    def local(self, parallel: Parallel) -> int:
        """Rows of this rank's parameter."""
        return self.room if self.room and parallel.size > 1 else self.filled(parallel)

    def filled(self, parallel: Parallel) -> int:
        """Rows of them that come from the tensor."""
        start, end = self.bounds(parallel)
        return end - start

    def is_cut(self, parallel: Parallel) -> bool:
        """Whether this rank holds a part of it."""
        return self.filled(parallel) < self.size


@dataclass(frozen=True)
class Placement:
    """The layout of one rank's parameter from checkpoint tensors: `sections` one after another along `dim`.

    `experts`: of a stacked parameter, its leading dimension; 0 for none. Each expert is placed on its own, and `dim`
    counts within one expert's tensor. `held`: those of them that the rank has, one after another; None: all. `below`:
    of a parameter of indices, the number that all of them are below. `derived`: no checkpoint tensor fills it, other
    weights do once they are loaded.
    """

    sections: tuple[Section, ...]
    dim: int = 0
    experts: int = 0
    held: tuple[int, ...] | None = None
    below: int = 0
    derived: bool = False

    def section(self, name: str) -> tuple[Section, int]:
        """The section `name`, and its index. Raises KeyError if there is none."""
        for index, section in enumerate(self.sections):
            if section.name == name:
                return section, index
        raise KeyError(name)

    def fill(self, target: torch.Tensor, full: torch.Tensor, name: str, parallel: Parallel) -> None:
        """Copy this rank's share of `full` into its section of `target` (of one expert, if stacked)."""
        section, index = self.section(name)
        start, end = section.bounds(parallel)
        offset = sum(before.local(parallel) for before in self.sections[:index])
        target.narrow(self.dim, offset, end - start).copy_(full.narrow(self.dim, start, end - start))

    @functools.cached_property
    def slots(self) -> dict[int, int]:
        """Where each expert that the rank has lies in its parameter; -1, with slot -1, for one that is not stacked."""
        if not self.experts:
            return {-1: -1}
        return {expert: slot for slot, expert in enumerate(range(self.experts) if self.held is None else self.held)}

    def local(self, parallel: Parallel) -> int:
        """Size of this rank's parameter along `dim`."""
        return sum(section.local(parallel) for section in self.sections)


def parameter(
    shape: Sequence[int], placement: Placement, dtype: torch.dtype, device: torch.device, parallel: Parallel
) -> torch.nn.Parameter:
    """A parameter that remembers its placement, and `parallel`: among which ranks it is cut. Uninitialised, but for
    zeros where there is more room than any tensor fills."""
    spare = any(section.local(parallel) > section.filled(parallel) for section in placement.sections)
    make = torch.zeros if spare else torch.empty
    result = torch.nn.Parameter(make(tuple(shape), dtype=dtype, device=device), requires_grad=False)
    setattr(result, "placement", placement)  # noqa: B010
    setattr(result, "parallel", parallel)  # noqa: B010
    return result


def placement_of(parameter: torch.nn.Parameter) -> Placement:
    """The placement of a parameter; one without is a single unnamed section that every rank holds."""
    placement = getattr(parameter, "placement", None)
    return placement if isinstance(placement, Placement) else Placement((Section("", parameter.shape[0]),))


def parallel_of(parameter: torch.nn.Parameter) -> Parallel:
    """Among which ranks a parameter is cut; one that does not say is on every rank."""
    parallel = getattr(parameter, "parallel", None)
    return parallel if isinstance(parallel, Parallel) else Parallel()
