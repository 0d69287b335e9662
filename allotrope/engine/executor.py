"""Who carries out step plans: one model in this process. (Several ranks follow the same plans, see `ranks`.)"""

from __future__ import annotations

from typing import Protocol

import torch

from allotrope.cache.arena import Arena
from allotrope.cache.memory import MemoryPlan
from allotrope.engine.load import Blueprint, load_model
from allotrope.engine.step import Runner, StepPlan
from allotrope.models.decoder import Decoder


class Executor(Protocol):
    """Runs plans in the order given."""

    @property
    def model(self) -> Decoder:
        """The model in this process, or its share of it."""
        ...

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits of the plan's scored tokens: [n, vocabulary] fp32."""
        ...

    def process_ids(self) -> list[int]:
        """The processes that were started for it."""
        ...

    def close(self) -> None:
        """Let go of processes and memory."""
        ...


class InProcess:
    """The whole model in the calling process."""

    def __init__(self, blueprint: Blueprint, memory: MemoryPlan, seed: int) -> None:
        device = blueprint.build.device
        model = load_model(blueprint, seed)
        arena = Arena(memory, len(blueprint.specs), blueprint.shares, device)
        groups = [entry.group for entry in memory.groups]
        self._runner = Runner(model, blueprint.specs, groups, arena, blueprint.shares)
        self._device = device

    @property
    def model(self) -> Decoder:
        return self._runner.model

    def run(self, plan: StepPlan) -> torch.Tensor:
        return self._runner.run(plan, self._device)

    def process_ids(self) -> list[int]:
        return []

    def close(self) -> None:
        del self._runner
