"""One rank: its share of the model, its caches, and the steps that it runs. Every rank starts by `Worker.start`.

Owns the order of a rank's start. Must not know who decides what runs, or how ranks talk to each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from allotrope.cache.arena import Arena
from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import equal_pages, plan_caches
from allotrope.engine.executor import DraftedTokens
from allotrope.engine.expert_load import reset_expert_load
from allotrope.engine.host_bound import host_bound_tokens, runs_in_pieces
from allotrope.engine.inputs import StepFacts, StepPlan
from allotrope.engine.load import load_draft_model, load_model
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.engine.model_runner import ModelRunner, graph_shapes
from allotrope.engine.packed_step import PackedStep
from allotrope.engine.profile import measure_peak, plan_device
from allotrope.engine.ranks.rank_group import RankGroup
from allotrope.engine.ranks.step_channel import Command
from allotrope.engine.sleep import SleepingMemory, tensors_of
from allotrope.engine.warmup import warm_up
from allotrope.env import cpu_quota, keep_freed_memory, thread_count
from allotrope.graphs.piecewise_graphs import expected_bytes
from allotrope.kernels.chip import free_memory
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.parallel import Parallel

log = logging.getLogger("allotrope.engine")

AgreeOnMemory = Callable[[MemoryPlan | None], MemoryPlan]


def prepare_rank(config: EngineConfig, rank: int, preferred_tokens: int) -> LoadPlan:
    """Set up this process for one rank and resolve the rank's load plan. Raises ModelError or ConfigError."""
    keep_freed_memory()
    _share_threads(config)
    return resolve_load_plan(config, Parallel.of(config.layout, rank), preferred_tokens=preferred_tokens)


class Worker:
    """The whole model, or one rank's share of it, in the calling process. It runs once it has its caches."""

    @classmethod
    def start(
        cls,
        load_plan: LoadPlan,
        config: EngineConfig,
        ranks: RankGroup,
        agree: AgreeOnMemory,
        planned: MemoryPlan | None = None,
    ) -> Worker:
        """Join the other ranks, load the weights, agree on a memory plan, allocate the caches.

        `agree`: takes this rank's memory plan, if it made one, and returns that of rank 0. `planned`: rank 0's plan of
        a CPU's memory. A GPU's is planned here, once the largest step has run.
        """
        device = load_plan.build.device
        if device.type == "cuda":
            # Triton launches on the current device, whatever device its arguments are on.
            torch.cuda.set_device(device)
        layout = load_plan.build.parallel.layout
        load_plan = load_plan.with_peers(ranks.join(device, layout))
        ranks.aborts.extend(workspace.abort for workspace in load_plan.build.parallel.workspaces)
        if layout.pipeline > 1 and device.type == "cpu" and planned is None:
            # Each stage has caches of its own.
            planned = plan_caches(load_plan, config)
        worker = cls(load_plan, config, ranks)
        if device.type == "cuda":
            # The step by which rank 0 plans takes every rank.
            planned = worker.plan_memory()
        if layout.pipeline > 1:
            assert planned is not None
            planned = equal_pages(load_plan, config, planned, ranks.min)
        agreed = agree(planned)
        worker.allocate(agreed if planned is None or layout.pipeline == 1 else planned)
        reset_expert_load(worker.model)
        ranks.barrier()
        return worker

    def __init__(self, load_plan: LoadPlan, config: EngineConfig, ranks: RankGroup) -> None:
        self.load_plan, self.config, self._ranks = load_plan, config, ranks
        self._device = load_plan.build.device
        self._free = _free(self._device)
        self.model: Decoder = load_model(load_plan, config.seed, config.quantized_weights)
        self.draft_model = load_draft_model(load_plan, self.model, config.seed, config.quantized_weights)
        models: list[Decoder | DraftModel] = [self.model]
        if self.draft_model is not None:
            models.append(self.draft_model)
        prefill_tokens = 0
        if self._device.type == "cuda" and runs_in_pieces(load_plan.build.parallel.layout):
            # Shares of unequal ranks cost unequal times, and all ranks run one size.
            prefill_tokens = ranks.min(host_bound_tokens(load_plan))
        self._shapes = graph_shapes(models, load_plan, capture=config.cuda_graphs, prefill_tokens=prefill_tokens)
        self._model_runner: ModelRunner | None = None
        self._prev_sampled: torch.Tensor | None = None
        self._sleeping: SleepingMemory | None = None

    @property
    def graph_replays(self) -> int:
        """Steps that ran as captured graphs so far."""
        return self.model_runner.graph_replays

    @property
    def model_runner(self) -> ModelRunner:
        """The runner of the steps."""
        assert self._model_runner is not None, "no caches were allocated"
        return self._model_runner

    @model_runner.setter
    def model_runner(self, model_runner: ModelRunner) -> None:
        self._model_runner = model_runner

    def plan_memory(self) -> MemoryPlan:
        """The memory plan on a GPU, by the bytes that are left beside the weights and the largest step, which runs, on
        the GPU where they are fewest.

        The warm-up comes first, so that the kernels of that step are compiled.
        """
        config, load_plan = self.config, self.load_plan
        warm_up(self.model, self.draft_model, load_plan, config, self._shapes)
        if config.kv_cache_memory_bytes is not None:
            return plan_caches(load_plan, config)
        started = time.monotonic()
        peak = measure_peak(self.model, self.draft_model, load_plan, config)
        log.info("measured the largest step in %.1f s", time.monotonic() - started)
        graphs = 0
        if self._shapes is not None and self._shapes.capture:
            # Their memory is not shared with steps that no graph holds.
            tokens = self._shapes.prefill_tokens
            graphs = expected_bytes(peak * tokens // load_plan.step_tokens, tokens, load_plan.num_layers)
        return plan_device(load_plan, config, self._free, peak, graphs, self._ranks.min)

    def allocate(self, memory: MemoryPlan) -> None:
        """Make the caches."""
        load_plan, device = self.load_plan, self._device
        started = time.monotonic()
        arena = Arena(memory, load_plan.num_layers, load_plan.shares, device)
        groups = [entry.group for entry in memory.groups]
        self._model_runner = ModelRunner(
            self.model,
            load_plan,
            groups,
            arena,
            self._shapes,
            draft_model=self.draft_model,
            record=self.config.cuda_graphs,
        )
        static = 0 if self._model_runner.buffers is None else self._model_runner.buffers.bytes
        seconds = time.monotonic() - started
        log.info(
            "made caches of %.1f MB, decode buffers of %.1f MB in %.1f s", arena.bytes / 1e6, static / 1e6, seconds
        )

    def pack(self, plan: StepPlan) -> PackedStep:
        """The plan as integers for every rank."""
        return self.model_runner.pack(plan)

    def run(self, packed: PackedStep, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        """As `Executor.run`, on rank 0."""
        return self.model_runner.run(self._own(packed), prev_sampled)

    def _own(self, packed: PackedStep) -> PackedStep:
        """The part of a step that this rank runs."""
        data = self.load_plan.build.parallel.data
        return packed if data is None else packed.part(data.rank)

    def launch(self, packed: PackedStep) -> None:
        """As `Executor.launch`, on this rank's stage."""
        self.model_runner.launch(self._own(packed))

    def finish(self) -> torch.Tensor:
        """As `Executor.finish`, on the first stage."""
        return self.model_runner.finish()

    @torch.inference_mode()
    def follow(self, sent: PackedStep | Command) -> None:
        """Do what rank 0 does, on another rank."""
        if sent is Command.CAPTURE:
            self.capture_next()
        elif sent is Command.FINISH:
            if self.load_plan.stage.is_first:
                self.finish()
        else:
            assert isinstance(sent, PackedStep)
            self._follow_step(sent)

    def _follow_step(self, packed: PackedStep) -> None:
        """Run a step, and keep the tokens that come of it where the next step may need them."""
        if self.load_plan.build.parallel.layout.pipeline > 1:
            self.launch(packed)
            return
        packed = self._own(packed)
        out, facts = self.model_runner.run(packed, self._prev_sampled), StepFacts.read(packed)
        sampled = out if facts.greedy else torch.empty(facts.sampled, dtype=torch.int64, device=self._device)
        if facts.sampled and not facts.greedy:
            self.share_sampled(sampled)
        if self.draft_model is not None:
            self.model_runner.run_drafts(sampled)
        elif facts.sampled:
            self._prev_sampled = sampled

    def share_sampled(self, token_ids: torch.Tensor) -> None:
        """Make `token_ids` [m] those of rank 0 on every rank."""
        self.load_plan.build.parallel.of_stage.broadcast(token_ids)

    def run_drafts(self, sampled: torch.Tensor) -> DraftedTokens:
        """As `Executor.run_drafts`, on rank 0."""
        self.model_runner.run_drafts(sampled)
        drafts = self.model_runner.drafts
        assert drafts is not None and drafts.next_tokens is not None and drafts.accepted is not None
        return DraftedTokens(drafts.next_tokens, drafts.accepted)

    @property
    def static_decodes(self) -> bool:
        """As `Executor.static_decodes`."""
        return self.model_runner.buffers is not None

    @property
    def captures(self) -> bool:
        """Whether there is a graph left to capture."""
        return self.model_runner.pending

    def capture_next(self) -> bool:
        """As `Executor.capture_next`, for this rank. Where one rank fails, all end capturing."""
        if not self.captures:
            # The other ranks were not asked to.
            return False
        captured = self.model_runner.capture_next()
        if not self._ranks.min(captured):
            self.model_runner.stop_capturing()
        return captured

    def sleep(self) -> None:
        """Free a GPU's memory until `wake`: weights go to host memory, caches and graphs are dropped.

        Nothing may be running. On a CPU there is nothing to free: the model stays where it is. Raises `InvalidRequest`
        if host memory lacks room.
        """
        if self._device.type != "cuda" or self._sleeping is not None:
            return
        torch.cuda.synchronize(self._device)
        arena = self.model_runner.arena
        modules = [self.model] if self.draft_model is None else [self.model, self.draft_model]
        on_device = (one for module in modules for one in tensors_of(module) if one.device.type == "cuda")
        self._sleeping = SleepingMemory(on_device, arena.tensors())
        self.model_runner.reset_graphs()
        torch.cuda.empty_cache()
        log.info("asleep: %.2f GB of the GPU are free again", self._sleeping.bytes / 1e9)

    def wake(self) -> None:
        """Fill the memory again after `sleep`."""
        if self._sleeping is not None:
            self._sleeping.restore()
            self._sleeping = None
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Let go of the model and its memory."""
        if self._model_runner is not None:
            self._model_runner.close()
        del self._model_runner, self.model, self.draft_model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _free(device: torch.device) -> int:
    """Bytes that are free on a GPU before the weights are there; 0 for a CPU, whose plan is made before loading."""
    return free_memory(device) if device.type == "cuda" else 0


@dataclass
class _Threads:
    """Compute threads of this process: `chosen` by an engine, and how many there were `before`."""

    before: int = 0
    chosen: int = 0


_threads = _Threads()


def _share_threads(config: EngineConfig) -> None:
    """Give each rank on a CPU its part of the cores that this process may use, or the number that the options give."""
    current = torch.get_num_threads()
    if current != _threads.chosen:
        # Of the process, or set by its user since; an engine before this one has taken its part of them.
        _threads.before = current
    available, threads = _threads.before, config.threads
    if threads is None:
        threads = max(1, thread_count(available) // config.layout.size)
        if thread_count(available) < available:
            log.info("%d threads, not %d: the control group may use %.3g CPUs", threads, available, cpu_quota())
    _threads.chosen = threads
    if threads != current:
        torch.set_num_threads(threads)
