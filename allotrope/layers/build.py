"""What every layer is built with: its name, the rank's share, the types, the device, the backends asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from allotrope.kernels.backend import Chooser
from allotrope.kernels.chip import NONE, chip_of
from allotrope.layers.expert_placement import ExpertPlacement, ExpertPlacements
from allotrope.layers.parallel import Parallel, Placement, parameter
from allotrope.layers.stage import Stage
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.weight import Format

Formats = Mapping[tuple[str, str], Format]
"""Full name of a weight and section of it -> its quantized format."""

# Stands for a chooser of the device's own chip.
_OF_DEVICE = Chooser(NONE)


@dataclass(frozen=True)
class Build:
    """`dtype`: weights and activations. `kv_dtype`: KV cache. `chooser`: of backends; default: one for `device`'s chip.
    `row_format`: "plain", or "scaled" for an FP8 cache with scales of its own. `state_dtype`: recurrent states.
    `max_drafts`: draft tokens of a sequence in one step (speculative decoding). `formats`: of the weights that stay
    quantized. `draft_head`: format that the head of a draft model is quantized to on load. `expert_placements`: who
    holds which experts, where these do not lie in runs. `counts_experts`: count the tokens of each. `name`: of the
    module that is built, dots between its parts. `stage`: the layers of the model that this rank holds; None: all.
    """

    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: Parallel = Parallel()
    chooser: Chooser = _OF_DEVICE
    row_format: str = "plain"
    state_dtype: torch.dtype = torch.float32
    max_drafts: int = 0
    formats: Formats = field(default_factory=dict)
    draft_head: Format = PLAIN
    expert_placements: ExpertPlacements = field(default_factory=dict)
    counts_experts: bool = False
    name: str = ""
    stage: Stage | None = None

    def __post_init__(self) -> None:
        if self.chooser is _OF_DEVICE:
            object.__setattr__(self, "chooser", Chooser(chip_of(self.device)))

    def at(self, part: object) -> Build:
        """The same for the submodule `part`."""
        return dataclasses.replace(self, name=f"{self.name}.{part}" if self.name else str(part))

    def at_stage(self, part: object) -> Build:
        """As `at`, for a submodule that all ranks of a pipeline stage share."""
        return dataclasses.replace(self.at(part), parallel=self.parallel.of_stage)

    def parameter(
        self, shape: Sequence[int], placement: Placement, dtype: torch.dtype | None = None
    ) -> torch.nn.Parameter:
        """An uninitialised parameter of this rank. `dtype`: default: that of the build."""
        return parameter(shape, placement, dtype or self.dtype, self.device, self.parallel)

    def expert_placement(self, count: int) -> ExpertPlacement | None:
        """Who holds which of the `count` experts that are built; None where ranks share the width of each.

        Raises ValueError for fewer experts than ranks.
        """
        ranks = self.parallel.size
        if ranks == 1 or not self.parallel.layout.expert_parallel:
            return None
        return self.expert_placements.get(self.name) or ExpertPlacement.contiguous(count, ranks)

    def format(self, weight: str, section: str) -> Format | None:
        """Format of a section of the weight `weight` of the module that is built; None for a plain one."""
        return self.formats.get((f"{self.name}.{weight}", section))

    def exact(self) -> Build:
        """The same with plain weights in fp32."""
        return dataclasses.replace(self, dtype=torch.float32, formats={})
