"""Taking one section out of a checkpoint tensor that holds several, group after group.

A tensor's rows come in equal groups, each [part 0 | part 1 | ...]. Loading gathers part i of every group into one
contiguous section, so that a forward pass splits its projection into views and copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """Part `index` of each of `groups` groups of rows, whose parts have `sizes` rows.

    As a rule's transform it takes the whole tensor; ranks cut their share from the section that comes out, which is the
    same as taking the part of a rank's share of the groups.
    """

    groups: int
    sizes: tuple[int, ...]
    index: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`: [groups * sum(sizes), ...]. Returns [groups * sizes[index], ...]. Raises ValueError otherwise."""
        rows = self.groups * sum(self.sizes)
        if tensor.shape[0] != rows:
            raise ValueError(
                f"{tensor.shape[0]} rows are not {self.groups} groups of {' + '.join(map(str, self.sizes))}"
            )
        first = sum(self.sizes[: self.index])
        grouped = tensor.unflatten(0, (self.groups, -1))
        return grouped[:, first : first + self.sizes[self.index]].flatten(0, 1)


def parts(groups: int, sizes: tuple[int, ...]) -> tuple[Part, ...]:
    """All parts, in order."""
    return tuple(Part(groups, sizes, index) for index in range(len(sizes)))
