"""Which rank holds which experts of a layer, and which of its holders an expert's tokens go to.

Owns both choices, which every rank makes alike. Must not know what experts compute, or how loads were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertPlacement:
    """`experts`: of the layer. `held`: per rank, the experts that it holds, in the order of its slots: each expert on
    one rank at least, on a rank once."""

    experts: int
    held: tuple[tuple[int, ...], ...]

    @staticmethod
    def contiguous(experts: int, ranks: int) -> ExpertPlacement:
        """Runs of equal length, or nearly. Raises ValueError for fewer experts than ranks."""
        if experts < ranks:
            raise ValueError(f"num_experts={experts} is less than the {ranks} ranks that hold whole experts")
        ends = [experts * rank // ranks for rank in range(ranks + 1)]
        return ExpertPlacement(experts, tuple(tuple(range(ends[rank], ends[rank + 1])) for rank in range(ranks)))

    @staticmethod
    def balanced(loads: Sequence[int], ranks: int, copies: int = 0) -> ExpertPlacement:
        """Spread experts so that the ranks get about as many tokens. `loads`: tokens of each expert. `copies`: of the
        most loaded ones, beside one of each; an expert's tokens are shared among its copies.

        Raises ValueError for fewer experts than ranks, and for more copies than ranks have a use for.
        """
        experts = len(loads)
        ExpertPlacement.contiguous(experts, ranks)
        if copies > experts * (ranks - 1):
            raise ValueError(
                f"num_redundant_experts={copies} (needs {experts * (ranks - 1)} or fewer: one on each rank)"
            )
        counts = [1] * experts
        for _ in range(copies):
            hottest = max(
                (one for one in range(experts) if counts[one] < ranks), key=lambda e: (loads[e] / counts[e], -e)
            )
            counts[hottest] += 1
        slots = experts + copies
        room = [slots // ranks + (rank < slots % ranks) for rank in range(ranks)]
        held: list[set[int]] = [set() for _ in range(ranks)]
        total = [0.0] * ranks
        each = [load / count for load, count in zip(loads, counts, strict=True)]
        for expert in sorted(range(experts), key=lambda e: (-each[e], e)):
            for _ in range(counts[expert]):
                rank = _make_room(expert, held, room, total, each)
                held[rank].add(expert)
                total[rank] += each[expert]
        return ExpertPlacement(experts, tuple(tuple(sorted(one)) for one in held))

    def holders(self) -> list[list[int]]:
        """The ranks that hold each expert, in ascending order."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for rank, held in enumerate(self.held):
            for expert in held:
                found[expert].append(rank)
        return found

    def slots(self, rank: int) -> torch.Tensor:
        """[P, E] the slot of each expert that `rank` serves the tokens at positions t of, t mod P being the row; the
        number of slots where another rank serves them.

        A token's holder depends on its position in the batch and the expert alone, so that exactly one rank serves
        each choice.
        """
        holders, held = self.holders(), self.held[rank]
        turns = max(map(len, holders))
        table = torch.full((turns, self.experts), len(held), dtype=torch.int64)
        for slot, expert in enumerate(held):
            of = holders[expert]
            for turn in range(turns):
                if of[turn % len(of)] == rank:
                    table[turn, expert] = slot
        return table


def _make_room(
    expert: int, held: list[set[int]], room: Sequence[int], total: list[float], each: Sequence[float]
) -> int:
    """The least loaded rank with a slot for another copy of `expert`."""
    free = [rank for rank in range(len(held)) if len(held[rank]) < room[rank]]
    without = [rank for rank in free if expert not in held[rank]]
    if without:
        return min(without, key=lambda rank: (total[rank], rank))
    # All ranks with a free slot hold one already: one of them takes another expert over. As slots differ by one at
    # most, a full rank has an expert that it lacks.
    taker = free[0]
    for rank in range(len(held)):
        movable = held[rank] - held[taker]
        if expert not in held[rank] and movable:
            moved = min(movable, key=lambda one: (each[one], one))
            held[rank].remove(moved)
            held[taker].add(moved)
            total[rank] -= each[moved]
            total[taker] += each[moved]
            return rank
    raise AssertionError("there are as many slots as copies")


ExpertPlacements = Mapping[str, ExpertPlacement]
"""Full name of a module of experts -> who holds them."""
