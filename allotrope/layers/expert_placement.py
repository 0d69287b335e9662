"""Which rank holds which experts of a layer, and which of its holders an expert's tokens go to.

Owns both choices, which every rank makes alike. Must not know what experts compute, or how loads were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
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


ExpertPlacements = Mapping[str, ExpertPlacement]
"""Full name of a module of experts -> who holds them."""
