"""De-interleaves a checkpoint tensor whose row groups each hold several parts.

The tensor's rows are equal groups, each [part 0 | part 1 | ...]. Loading gathers part i of every group into one
contiguous section, so that a forward pass splits its projection into views without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """Selects part `index` of each row group. `groups`: number of groups. `sizes`: rows of each part of a group.

    As the transform of a `Rule` it reads the whole tensor, and each rank cuts its share from the resulting section.
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
    """All parts of a group, in order."""
    return tuple(Part(groups, sizes, index) for index in range(len(sizes)))
