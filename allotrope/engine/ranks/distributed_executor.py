"""The executor: rank 0 in the engine's process, each further rank in a process of its own.

Rank 0 decides everything. Another rank gets each step as plain integers, runs the same pass on its share of the
weights, and decides nothing: the tokens that rank 0 samples reach it over the device, so that rank 0's host may be
steps ahead. A rank that fails takes the engine with it (`Workers`). The others are worker processes on this host, or
actors that Ray places on several. Tensor parallel size 1 is the case without them.
"""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Self

import torch

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_caches, refuse_small_caches
from allotrope.engine.executor import DraftedTokens, Executor, OnDeath
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.engine.ranks.multiprocess_workers import MultiprocessWorkers
from allotrope.engine.ranks.rank_group import LOOPBACK, RankGroup
from allotrope.engine.ranks.step_channel import Command
from allotrope.engine.ranks.workers import Workers
from allotrope.engine.worker import Worker, prepare_rank
from allotrope.errors import ConfigError, InvalidRequest
from allotrope.kernels.chip import gpu_count
from allotrope.layers.decoder import Decoder
from allotrope.layers.parallel import Parallel


class DistributedExecutor(Executor):
    """`worker`: rank 0."""

    @classmethod
    def start(cls, config: EngineConfig, on_death: OnDeath | None, preferred_tokens: int) -> Self:
        size = config.layout.size
        if size > 1 and not RankGroup.settled():
            raise ConfigError(f"{config.layout} needs a process of its own, but torch.distributed is in use here.")
        refuse_layout(config)
        if config.distributed_executor_backend == "ray":
            return cls._start_on_ray(config, on_death, preferred_tokens)
        refuse_devices(config)
        # Every rank can be planned before any process is: a head count that does not divide is refused at once.
        load_plan = prepare_rank(config, 0, preferred_tokens)
        _refuse_small_stages(config, load_plan, preferred_tokens)
        return cls._start(config, load_plan, lambda shared: MultiprocessWorkers(shared, size, on_death), LOOPBACK)

    @classmethod
    def _start_on_ray(cls, config: EngineConfig, on_death: OnDeath | None, preferred_tokens: int) -> Self:
        from allotrope.engine.ranks.ray_placement import RayPlacement
        from allotrope.engine.ranks.ray_workers import RayWorkers

        placement = RayPlacement.reserve(config, config.layout.size)
        try:
            own = replace(config, device=placement.device)
            load_plan = prepare_rank(own, 0, preferred_tokens)
            _refuse_small_stages(own, load_plan, preferred_tokens)
            return cls._start(
                config, load_plan, lambda shared: RayWorkers(shared, placement, on_death), placement.address
            )
        except BaseException:
            placement.release()
            raise

    @classmethod
    def _start(
        cls, config: EngineConfig, load_plan: LoadPlan, make_workers: Callable[[EngineConfig], Workers], address: str
    ) -> Self:
        """`address`: at which the ranks meet, where no option names one."""
        on_gpu = load_plan.build.device.type == "cuda"
        # A CPU's memory is planned while it is still free, a GPU's when it is known what a step takes of it.
        planned = None if on_gpu else plan_caches(load_plan, config)
        # The other ranks take the limits of a step from here: each would choose by the memory of its own GPU.
        limits = load_plan.limits
        shared = replace(config, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.step_tokens)
        if load_plan.build.parallel.layout.size == 1:
            shared = config
        return cls(load_plan, shared, planned, make_workers(shared), config.distributed_address or address)

    def __init__(
        self, load_plan: LoadPlan, config: EngineConfig, planned: MemoryPlan | None, workers: Workers, address: str
    ) -> None:
        """Start the other ranks and rank 0. `planned`: the memory plan, where it is made before loading. `address`: at
        which the ranks meet."""
        self.load_plan = load_plan
        self._workers = workers
        try:
            self._ranks = RankGroup.open(workers.size, address)
        except BaseException:
            workers.close()
            raise
        self._workers.aborts.append(self._ranks.abort)
        try:
            with self._workers.loading():
                self._workers.start(config, self._ranks)
                self._workers.wait_until_joining()
                self.worker = Worker.start(load_plan, config, self._ranks, self._share_memory_plan, planned)
        except BaseException:
            self._ranks.leave()
            raise
        self._closed = False
        if config.layout.size > 1:
            # Libraries would wait for the other ranks when the interpreter ends.
            atexit.register(_close_at_exit, weakref.ref(self), os.getpid())

    def _share_memory_plan(self, memory: MemoryPlan | None) -> MemoryPlan:
        assert memory is not None, "rank 0 plans the memory"
        self.memory = memory
        self._workers.share_memory_plan(memory)
        return memory

    @property
    def model(self) -> Decoder:
        return self.worker.model

    @property
    def ranks(self) -> int:
        return self.load_plan.build.parallel.layout.size

    @property
    def graph_replays(self) -> int:
        return self.worker.graph_replays

    def step(self) -> AbstractContextManager[None]:
        return self._workers.step()

    def run(self, plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        packed = self.worker.pack(plan)
        self._workers.send(packed)
        return self.worker.run(packed, prev_sampled)

    @property
    def stages(self) -> int:
        return self.load_plan.build.parallel.layout.pipeline

    def launch(self, plan: StepPlan) -> None:
        packed = self.worker.pack(plan)
        self._workers.send(packed)
        self.worker.launch(packed)

    def finish(self) -> torch.Tensor:
        self._workers.command(Command.FINISH)
        return self.worker.finish()

    def share_sampled(self, token_ids: torch.Tensor) -> None:
        self.worker.share_sampled(token_ids)

    def run_drafts(self, token_ids: torch.Tensor, *, shared: bool) -> DraftedTokens:
        if not shared and len(token_ids):
            self.worker.share_sampled(token_ids)
        return self.worker.run_drafts(token_ids)

    @property
    def static_decodes(self) -> bool:
        return self.worker.static_decodes

    def capture_next(self) -> bool:
        with self._workers.step():
            if self.worker.captures:
                self._workers.command(Command.CAPTURE)
            return self.worker.capture_next()

    def sleep(self) -> None:
        if self.ranks > 1 and self.load_plan.build.device.type == "cuda":
            raise InvalidRequest(
                f"{self.ranks} ranks cannot sleep: they hold addresses of each other's memory. Stop the server.",
                "level",
            )
        self.worker.sleep()

    def wake(self) -> None:
        self.worker.wake()

    def process_ids(self) -> list[int]:
        return self._workers.process_ids

    def close(self) -> None:
        """End the other ranks and let go of the model. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        self.worker.close()
        self._ranks.leave()


def _refuse_small_stages(config: EngineConfig, first: LoadPlan, preferred_tokens: int) -> None:
    """Raise ConfigError where a pipeline stage needs more memory for its caches than is given to each. `first`: of rank
    0, in the first stage."""
    layout = config.layout
    if layout.pipeline > 1:
        step = layout.size // layout.pipeline
        ranks = (Parallel.of(layout, rank) for rank in range(step, layout.size, step))
        others = (resolve_load_plan(config, rank, preferred_tokens=preferred_tokens) for rank in ranks)
        refuse_small_caches(itertools.chain([first], others), config)


def _close_at_exit(executor: weakref.ref[DistributedExecutor], process: int) -> None:
    found = executor()
    # The processes are not those of a process that was forked from this one.
    if found is not None and os.getpid() == process:
        found.close()


def refuse_layout(config: EngineConfig) -> None:
    """Raise ConfigError, with every reason, for options that do not go with several pipeline stages."""
    if config.layout.pipeline == 1:
        return
    reasons = []
    if config.speculation is not None and not config.speculation.drafts_from_text:
        reasons.append(
            f"speculative_config: method={config.speculation.method!r} (needs ngram or suffix: a draft model reads "
            f"what the last stage computes)"
        )
    if config.expert_load_file is not None:
        reasons.append("expert_load_file (needs to be absent: the first stage sees its own layers alone)")
    if config.step_log_seconds is not None:
        reasons.append("step_log_seconds (needs to be absent: several steps run at a time)")
    if reasons:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size} does not go with " + "; ".join(reasons) + "."
        )


def refuse_devices(config: EngineConfig) -> None:
    """Raise ConfigError where the ranks cannot have a GPU each."""
    size, device = config.layout.size, config.device
    if size > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f"device={device!r} names one GPU, but {config.layout} takes GPUs 0 to {size - 1}. Give "
            f"--device cuda, and set CUDA_VISIBLE_DEVICES to choose among the GPUs."
        )
    gpus = gpu_count()
    if device != "cpu" and 0 < gpus < size:
        raise ConfigError(
            f"{config.layout} needs a GPU for each of {size} ranks, but PyTorch sees {gpus}. Try fewer ranks or "
            f"--device cpu."
        )
