"""The engine: requests in, tokens out, one forward pass per `step`.

Owns the start of a model that generates, and what callers may ask of it. Must not know text, HTTP, or how a layer
computes.
"""

from __future__ import annotations

import atexit
import logging
from collections import abc
from concurrent.futures import Future
from dataclasses import replace

import torch

from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.config import EngineConfig
from allotrope.engine.async_scheduling import uses_async_scheduling
from allotrope.engine.drafting import make_drafting
from allotrope.engine.executor import Executor, OnDeath
from allotrope.engine.expert_load import expert_load, write_expert_load
from allotrope.engine.interrupts import interrupts_wait
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.observer import Observer
from allotrope.engine.pipeline_loop import PipelineLoop
from allotrope.engine.planning.plan_report import ModelReport, describe
from allotrope.engine.ranks.distributed_executor import DistributedExecutor
from allotrope.engine.report import EngineLimits, EngineStats
from allotrope.engine.requests import RequestTable
from allotrope.engine.sampling_defaults import Defaults, eos_ids, read_sampling_defaults, values_not_taken
from allotrope.engine.step_limits import GPU_TOKENS
from allotrope.engine.step_log import StepLog
from allotrope.engine.step_loop import PageCopy, StepLoop
from allotrope.errors import ConfigError, EngineDead, InvalidRequest, refuse_options
from allotrope.grammars.compiler import GrammarCompiler
from allotrope.grammars.constraint import Constraints
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.kernels import host_memory
from allotrope.kernels.c.waiting import Waiting
from allotrope.layers.decoder import Decoder
from allotrope.loading.vocabulary import load_vocabulary
from allotrope.output_files import file_reasons
from allotrope.request import Grammar, Request, SequenceOutput

log = logging.getLogger("allotrope.engine")


class Engine:
    """A loaded model that generates. Not safe to call from several threads."""

    def __init__(
        self,
        config: EngineConfig,
        on_death: OnDeath | None = None,
        observer: Observer | None = None,
        preferred_tokens: int = GPU_TOKENS,
    ) -> None:
        """Load the model and allocate its caches. Raises ModelError or ConfigError with every reason.

        `on_death(reason)` is called, perhaps from a thread, if a rank of several fails. Where it returns, or without
        it, `step` raises EngineDead. `observer`: sees the logits of every token and may replace sampled tokens.
        `preferred_tokens`: tokens of a step on a GPU, where the options name none and memory serves them.
        """
        refuse_options(file_reasons("expert_load_file", config.expert_load_file))
        self._config, self._closed = config, False
        self._executor: Executor = DistributedExecutor.start(config, on_death, preferred_tokens)
        load_plan, self.memory = self._executor.load_plan, self._executor.memory
        self._load_plan, self._device = load_plan, load_plan.build.device
        self.limits = _limits(config, load_plan)
        copies: list[PageCopy] = []
        self._requests = RequestTable(
            config,
            self.limits,
            load_plan.limits.step_tokens,
            self.memory,
            copy_page=lambda *copy: copies.append(copy),
            max_decodes=load_plan.max_decodes,
            lookahead=load_plan.lookahead,
            stages=self._executor.stages,
        )
        self._drafting = make_drafting(
            config.speculation,
            max_drafts=load_plan.max_drafts,
            max_decodes=load_plan.max_decodes * config.data_parallel_size,
            seed=config.seed,
            lookahead=load_plan.lookahead,
            on_gpu=self._device.type == "cuda",
        )
        seconds = config.step_log_seconds
        loop = StepLoop if self._executor.stages == 1 else PipelineLoop
        self._loop = loop(
            self._executor,
            self._requests,
            copies,
            load_plan.sampler(),
            self.limits.vocab_size,
            self._device,
            async_scheduling=uses_async_scheduling(config, self._device.type, observed=observer is not None),
            observer=observer,
            step_log=None if seconds is None else StepLog(self._executor, load_plan, seconds),
            drafting=self._drafting,
        )
        self._grammars = GrammarCompiler(config.structured_outputs_backend, self._vocabulary)
        self._thread_waiting = Waiting() if self._device.type == "cpu" else None
        self._log_start()
        if self._device.type == "cpu":
            host_memory.give_back()
        if config.expert_load_file is not None:
            # Who never closes it, such as a script that ends, wants the counts too.
            atexit.register(self.close)

    def _log_start(self) -> None:
        load_plan, run_length = self._load_plan, self._requests.kv_cache_manager.prefix.run_length
        layout = load_plan.build.parallel.layout
        if layout.size > 1:
            log.info("%d ranks: %s", layout.size, layout)
        log.info("%s%s", load_plan.limits, f", on each of {layout.data} data-parallel ranks" * (layout.data > 1))
        if log.isEnabledFor(logging.INFO):
            for line in self.report().lines():
                log.info("%s", line)
        if self._config.enable_prefix_caching and run_length >= load_plan.max_model_len:
            log.warning(
                "the prefix cache can never hit: prefixes are reused in steps of %d tokens, but max_model_len is %d",
                run_length,
                load_plan.max_model_len,
            )

    def add(self, request: Request, constraints: Constraints | None = None) -> None:
        """Queue a request. Raises InvalidRequest if it can never run, Overloaded if the queue is full, EngineDead after
        `close`.

        `constraints`: the request's grammar, compiled; without it `add` waits for that, as `compile_grammar` does not.
        """
        self._refuse_closed()
        grammar = request.params.grammar
        if grammar is not None and constraints is None:
            self.check(request)
            constraints = self.compile_grammar(grammar).result()
        with interrupts_wait():
            self._requests.add(request, constraints)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineDead("the engine is closed; make a new one")

    def check(self, request: Request, aside: int = 0) -> None:
        """Raise what `add` would raise at once. `aside`: requests that wait for their grammars outside the queue."""
        self._requests.check(request, aside)

    def compile_grammar(self, grammar: Grammar) -> Future[Constraints]:
        """The grammar of requests, compiled in a thread, for `add`.

        Raises InvalidRequest, here or in the result, if the grammar is not supported or too large.
        """
        return self._grammars.compile(grammar)

    def _vocabulary(self) -> Vocabulary:
        return load_vocabulary(self._config, self.checkpoint, self.limits.vocab_size, self.limits.eos_ids)

    def abort(self, request_ids: abc.Sequence[str]) -> None:
        """End requests at once, in whatever phase they are; no output follows. Unknown ids are ignored."""
        with interrupts_wait():
            self._requests.abort(request_ids)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence of a request at once; its siblings go on. Unknown ids are ignored."""
        with interrupts_wait():
            self._requests.abort_sequence(request_id, index)

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._requests.has_work

    @torch.inference_mode()
    def step(self) -> list[SequenceOutput]:
        """Run one forward pass and return new tokens; [] when there is nothing to run. See `StepLoop.step`.

        Raises EngineDead with the reason once a rank of several has failed, and after `close`.
        """
        self._refuse_closed()
        if self._thread_waiting is not None:
            self._thread_waiting.look()
        with interrupts_wait():
            try:
                with self._executor.step():
                    outputs = self._loop.step()
            except BaseException:
                # A state may have been noted as kept whose copy was never made.
                self.reset_prefix_cache()
                raise
        if self._device.type == "cpu" and not self.has_work():
            host_memory.give_back()
        return outputs

    def capture_next(self) -> bool:
        """Capture one more CUDA graph, where there are some to come. Returns whether there was one."""
        return self._executor.capture_next()

    def capture_all(self) -> None:
        """Capture every CUDA graph that is still to come, at once."""
        while self.capture_next():
            pass

    def always_spin(self) -> None:
        """Let CPU threads that wait for each other spin, however busy the machine is. Results stay the same."""
        if self._thread_waiting is not None:
            self._thread_waiting.close()
            self._thread_waiting = None

    def set_acceptance_length(self, length: float) -> None:
        """Force another `synthetic_acceptance_length` from now on, for benchmarks. Raises ConfigError where drafts are
        accepted for what they are."""
        if self._drafting is None:
            raise ConfigError("an acceptance length needs speculative decoding")
        self._drafting.set_acceptance_length(length)

    @property
    def graph_replays(self) -> int:
        """Steps that ran as captured graphs so far."""
        return self._executor.graph_replays

    @property
    def num_waiting(self) -> int:
        """Sequences that have no pages: new ones, and those that were preempted."""
        return self._requests.num_waiting

    @property
    def requests(self) -> list[str]:
        """The ids of the requests that have not ended, in order of arrival."""
        return list(self._requests.open)

    def stats(self) -> EngineStats:
        """Counts of sequences, pages, prefix hits and drafts."""
        stats = self._requests.stats()
        return stats if self._drafting is None else replace(stats, speculation=self._drafting.stats.summary())

    def report(self) -> ModelReport:
        """The model and the plan of its memory."""
        return describe(self._load_plan, self.memory, self._config)

    def process_ids(self) -> list[int]:
        """The processes that this engine started, one per further rank."""
        return self._executor.process_ids()

    def reset_prefix_cache(self) -> None:
        """Evict every page that ended sequences left for reuse."""
        self._requests.evict_all()

    def sleep(self) -> None:
        """Drop the prefix cache and, on a GPU, free its memory: weights go to host memory, caches and graphs go.

        No step may follow before `wake`. Raises `InvalidRequest`, with nothing freed, while requests are open, and
        where the device's memory cannot be freed.
        """
        if self._requests.open:
            raise InvalidRequest(f"{len(self._requests.open)} requests are open; the engine sleeps between them.")
        self._executor.sleep()
        self.reset_prefix_cache()

    def wake(self) -> None:
        """Fill the device's memory again, and capture its graphs anew."""
        self._executor.wake()
        self.capture_all()

    @property
    def device(self) -> torch.device:
        """Where the model's first rank runs."""
        return self._device

    @property
    def model(self) -> Decoder:
        """The model in this process (one rank's share of it), for whoever looks inside; see `Observer`."""
        return self._executor.model

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the model was loaded from."""
        return self._load_plan.checkpoint

    def close(self) -> None:
        """Let go of the model and its memory."""
        atexit.unregister(self.close)
        if self._thread_waiting is not None:
            self._thread_waiting.close()
        self._grammars.close()
        self._loop.close()
        loads = None if self._closed else self._expert_load()
        self._closed = True
        self._executor.close()
        if loads is not None and self._config.expert_load_file is not None:
            write_expert_load(loads, self._config.expert_load_file)

    def _expert_load(self) -> dict[str, list[int]] | None:
        """The tokens that experts got, where they are counted."""
        if self._config.expert_load_file is None:
            return None
        try:
            # A device whose ranks have failed may never be done.
            with self._executor.step():
                return expert_load(self.model)
        except EngineDead as error:
            log.warning("no counts of experts are written to %s: %s", self._config.expert_load_file, error)
            return None


def _limits(config: EngineConfig, load_plan: LoadPlan) -> EngineLimits:
    checkpoint = load_plan.checkpoint
    return EngineLimits(
        max_model_len=load_plan.max_model_len,
        vocab_size=load_plan.spec.vocab_size,
        max_num_seqs=load_plan.max_num_seqs * config.data_parallel_size,
        eos_ids=eos_ids(checkpoint.source, checkpoint.generation_config, checkpoint.config),
        model_dtype=str(load_plan.build.dtype).removeprefix("torch."),
        device_type=load_plan.build.device.type,
        sampling_defaults=_sampling_defaults(config, checkpoint),
    )


def _sampling_defaults(config: EngineConfig, checkpoint: Checkpoint) -> Defaults:
    """Sampling values of the checkpoint, where they are wanted. Raises ModelError for one out of its range."""
    if config.generation_config == "none":
        return {}
    if others := values_not_taken(checkpoint.generation_config):
        log.info("not taken from generation_config.json: %s", ", ".join(others))
    return read_sampling_defaults(checkpoint.generation_config, checkpoint.source)
