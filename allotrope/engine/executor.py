"""Who carries out step plans: one model in this process. (Several ranks follow the same plans, see `ranks`.)"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import torch

from allotrope.cache.arena import Arena
from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load import LoadPlan, load_model, plan_caches
from allotrope.engine.profile import measure_peak, plan_device
from allotrope.engine.step import Runner, decode_shape
from allotrope.engine.warmup import warm_up
from allotrope.kernels.chip import free_memory
from allotrope.layers.decoder import Decoder

log = logging.getLogger("allotrope.engine")


class Executor(Protocol):
    """Runs plans in the order given."""

    @property
    def model(self) -> Decoder:
        """The model in this process, or its share of it."""
        ...

    @property
    def graph_replays(self) -> int:
        """Decode steps that ran as captured graphs so far."""
        ...

    def run(self, plan: StepPlan, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the plan's scored tokens: [n, vocabulary] fp32. `chosen`: tokens of the step before, see `Runner`.

        May return before the device has computed them.
        """
        ...

    def capture_next(self) -> bool:
        """Capture one more CUDA graph of decode steps. Returns whether there was one to capture."""
        ...

    def process_ids(self) -> list[int]:
        """The processes that were started for it."""
        ...

    def close(self) -> None:
        """Let go of processes and memory."""
        ...


class InProcess:
    """The whole model, or one rank's share of it, in the calling process. It runs once it has its caches."""

    def __init__(self, load_plan: LoadPlan, config: EngineConfig) -> None:
        self._blueprint, self._config = load_plan, config
        self._device = load_plan.build.device
        self._free = _free(self._device)
        self._model = load_model(load_plan, config.seed, config.quantized_weights)
        self._decode = decode_shape(
            self._model, load_plan.max_num_seqs, load_plan.max_model_len, self._device, capture=config.cuda_graphs
        )
        self._runner: Runner | None = None

    @property
    def model(self) -> Decoder:
        return self._model

    @property
    def graph_replays(self) -> int:
        return 0 if self.runner.graphs is None else self.runner.graphs.replays

    @property
    def runner(self) -> Runner:
        """What runs the steps."""
        assert self._runner is not None, "no caches were allocated"
        return self._runner

    def plan(self) -> MemoryPlan:
        """The memory plan on a GPU, by what is left beside the weights and the largest step, which is run to see.

        Steps are rehearsed before, so that their kernels are there.
        """
        config, load_plan = self._config, self._blueprint
        warm_up(self._model, load_plan, config, self._decode)
        if config.kv_cache_memory_bytes is not None:
            return plan_caches(load_plan, config)
        started = time.monotonic()
        peak = measure_peak(self._model, load_plan, config)
        log.info("measured the largest step in %.1f s", time.monotonic() - started)
        return plan_device(load_plan, config, self._free, peak)

    def allocate(self, memory: MemoryPlan) -> None:
        """Make the caches."""
        load_plan, device = self._blueprint, self._device
        started = time.monotonic()
        arena = Arena(memory, len(load_plan.specs), load_plan.shares, device)
        groups = [entry.group for entry in memory.groups]
        self._runner = Runner(self._model, load_plan.specs, groups, arena, load_plan.shares, device, self._decode)
        static = 0 if self._runner.buffers is None else self._runner.buffers.bytes
        seconds = time.monotonic() - started
        log.info(
            "made caches of %.1f MB, decode buffers of %.1f MB in %.1f s", arena.bytes / 1e6, static / 1e6, seconds
        )

    def run(self, plan: StepPlan, chosen: torch.Tensor | None = None) -> torch.Tensor:
        return self.runner.run(plan, chosen)

    def capture_next(self) -> bool:
        return self.runner.capture_next()

    def process_ids(self) -> list[int]:
        return []

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        del self._runner, self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _free(device: torch.device) -> int:
    """Bytes that are free on a GPU before anything of ours is there; 0 for a CPU, whose plan is made before loading."""
    return free_memory(device) if device.type == "cuda" else 0
