"""The border between the engine, which decides, and the ranks, which run: every member that the engine uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

import torch

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import LoadPlan
from allotrope.layers.decoder import Decoder

OnDeath = Callable[[str], None]


@dataclass(frozen=True)
class DraftedTokens:
    """What a draft model made of a step, on the device. `next_tokens`: [S + passes * S] the last token of each of its
    sequences, then their drafts, pass by pass. `accepted`: [S] drafts that the step accepted."""

    next_tokens: torch.Tensor
    accepted: torch.Tensor


class Executor(ABC):
    """Runs step plans in the order in which they come. `load_plan`, `memory`: those of rank 0."""

    load_plan: LoadPlan
    memory: MemoryPlan

    @classmethod
    @abstractmethod
    def start(cls, config: EngineConfig, on_death: OnDeath | None, preferred_tokens: int) -> Self:
        """Load the model on every rank and allocate the caches. Raises ModelError or ConfigError with every reason.

        `on_death(reason)` is called, perhaps from a thread, if a rank fails once there are several. `preferred_tokens`:
        tokens of a step on a GPU, where the options name none and memory serves them.
        """

    @property
    @abstractmethod
    def model(self) -> Decoder:
        """The model in this process, or its share of it."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Processes that share the model."""

    @property
    @abstractmethod
    def graph_replays(self) -> int:
        """Steps that ran as captured graphs so far."""

    @abstractmethod
    def step(self) -> AbstractContextManager[None]:
        """Inside, a step runs and its tokens are read. Where a rank fails before or meanwhile, raises EngineDead."""

    @abstractmethod
    def run(self, plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Logits at the plan's `logits_indices`: [n, vocabulary] fp32; or [n] int64 tokens of a greedy plan.

        `prev_sampled`: [m] tokens that the step before sampled, see `ModelRunner`. May return before the device has
        computed the logits.
        """

    @property
    @abstractmethod
    def stages(self) -> int:
        """Pipeline stages, each with a run of the layers; as many steps of different sequences may be under way."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """With several stages, begin a step: run the layers of the first one. Rows with placeholders, and tokens for
        every rank, are for models of one stage alone."""

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """As `run`, of the first step that was launched and is yet to be finished."""

    @abstractmethod
    def share_sampled(self, token_ids: torch.Tensor) -> None:
        """Let every rank have the tokens [m] that rank 0 sampled by the last plan, which announced them. Does not wait
        for them."""

    @abstractmethod
    def run_drafts(self, token_ids: torch.Tensor, *, shared: bool) -> DraftedTokens:
        """The passes of the draft model that the last plan asks for. `token_ids`: [m] tokens that came of that plan,
        which announced them. `shared`: every rank has them. Does not wait for the device."""

    @property
    @abstractmethod
    def static_decodes(self) -> bool:
        """Whether decode steps run on static buffers, whose positions the device may know before the host."""

    @abstractmethod
    def capture_next(self) -> bool:
        """Capture the CUDA graphs of one more size of steps. Returns whether there was one to capture."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the device's memory until `wake`. Raises `InvalidRequest` where that cannot be done."""

    @abstractmethod
    def wake(self) -> None:
        """Fill the device's memory again."""

    @abstractmethod
    def process_ids(self) -> list[int]:
        """The processes that were started for it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of processes and memory, within seconds."""
