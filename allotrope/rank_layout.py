"""How the ranks of one model share it: which rank has which place, and which ranks work together on what.

Owns the order of the ranks. Must not know layers, processes or devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPosition:
    """Where a rank stands: its pipeline stage, its data-parallel rank in that, its tensor-parallel rank in that."""

    stage: int = 0
    dp_rank: int = 0
    tp_rank: int = 0


@dataclass(frozen=True)
class RankLayout:
    """`tensor`: ranks that share the heads of an attention layer. `data`: groups of these, each with requests of its
    own, which share feed-forward blocks, experts and the vocabulary. `pipeline`: stages, each with a run of the layers.
    `expert_parallel`: whether the ranks of a stage hold whole experts, or a share of the width of each.

    rank = (stage * data + dp_rank) * tensor + tp_rank.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    expert_parallel: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.tensor

    @property
    def name(self) -> str:
        """For tables: the sizes above one, and whether ranks hold whole experts, such as "TP2 DP4 EP"."""
        sizes = {"TP": self.tensor, "DP": self.data, "PP": self.pipeline}
        parts = [f"{short}{size}" for short, size in sizes.items() if size > 1]
        return " ".join([*(parts or ["TP1"]), *(["EP"] if self.expert_parallel else [])])

    @classmethod
    def named(cls, name: str) -> RankLayout:
        """The layout with that name. Raises ValueError if there is none."""
        sizes = {part[:2]: int(part[2:]) for part in name.split() if part[2:].isdecimal()}
        found = cls(sizes.get("TP", 1), sizes.get("DP", 1), sizes.get("PP", 1), name.endswith(" EP"))
        if found.name != name:
            raise ValueError(f"no layout is named {name!r}; names are such as TP1, TP2, DP2, TP2 DP4 PP2 and TP2 EP")
        return found

    def position(self, rank: int) -> RankPosition:
        """Where `rank` stands."""
        stage, in_stage = divmod(rank, self.stage_size)
        return RankPosition(stage, *divmod(in_stage, self.tensor))

    def rank(self, position: RankPosition) -> int:
        """The rank that stands there."""
        return (position.stage * self.data + position.dp_rank) * self.tensor + position.tp_rank

    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share the heads of the same layers for the same requests."""
        size = self.tensor
        return tuple(tuple(range(first, first + size)) for first in range(0, self.size, size))

    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks with the same share of the same attention layers, each for requests of its own."""
        size = self.stage_size
        return tuple(
            tuple(range(stage + tp_rank, stage + size, self.tensor))
            for stage in range(0, self.size, size)
            for tp_rank in range(self.tensor)
        )

    def stage_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each pipeline stage: they share its feed-forward blocks and experts, and the first one the
        vocabulary."""
        size = self.stage_size
        return tuple(tuple(range(first, first + size)) for first in range(0, self.size, size))

    def pipeline_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the same position in each stage, the first stage first: hidden states pass from one to the next."""
        size = self.stage_size
        return tuple(tuple(range(first, self.size, size)) for first in range(size))

    def __str__(self) -> str:
        """The options that ask for it, for people."""
        sizes = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        asked = [f"{name}_parallel_size={size}" for name, size in sizes.items() if size > 1 or name == "tensor"]
        return ", ".join([*asked, "enable_expert_parallel"] if self.expert_parallel else asked)


def group_of(rank: int, groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The one of disjoint `groups` that has `rank`."""
    return next(group for group in groups if rank in group)
