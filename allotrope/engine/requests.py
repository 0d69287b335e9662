"""Requests from their arrival to their end: which are refused, the sequences of each, and their removal.

Owns the table of open requests. Must not know how a step runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.kv_cache_manager import CopyPage, KVCacheManager
from allotrope.engine.report import EngineLimits, EngineStats, numbered
from allotrope.engine.sampling_batch import RowSampling
from allotrope.engine.scheduler import Scheduler
from allotrope.engine.seeds import derive_seed
from allotrope.engine.sequence import Sequence
from allotrope.errors import InvalidRequest, Overloaded
from allotrope.grammars.constraint import Constraints
from allotrope.request import Request


class RequestTable:
    """`open`: the sequences of each request that has not ended, in order of arrival. `step_tokens`: most of a step.
    `max_decodes`, `lookahead`, `stages`: as in `Scheduler`.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        step_tokens: int,
        memory: MemoryPlan,
        copy_page: CopyPage,
        *,
        max_decodes: int = 0,
        lookahead: int = 0,
        stages: int = 1,
    ) -> None:
        self.open: dict[str, list[Sequence]] = {}
        self.kv_cache_manager = KVCacheManager(memory, copy_page, reuse=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv_cache_manager,
            max_sequences=limits.max_num_seqs,
            max_tokens=step_tokens,
            max_decodes=max_decodes,
            lookahead=lookahead,
            stages=stages,
        )
        self._config, self._limits, self._step_tokens = config, limits, step_tokens
        self._num_accepted = 0
        self._prefix_queries = self._prefix_hits = 0
        self._prefix_lost: dict[str, int] = {}

    def check(self, request: Request, aside: int = 0) -> None:
        """Raise InvalidRequest if a request can never run, Overloaded if the queue is full. `aside`: requests that are
        yet to be queued.
        """
        limits, waiting = self._limits, len(self.scheduler.waiting) + aside
        request.check(limits.vocab_size, limits.max_model_len)
        if request.request_id in self.open:
            raise InvalidRequest(f"request_id={request.request_id!r} is already running.", "request_id")
        max_len = min(limits.max_model_len, len(request.prompt_ids) + (request.params.max_tokens or 2**62))
        if not self.kv_cache_manager.fits_alone(max_len, min(max_len, self._step_tokens)):
            raise InvalidRequest(
                f"prompt and max_tokens reach {max_len} tokens, more than the caches hold; ask for fewer.", "max_tokens"
            )
        if waiting + request.params.n > self._config.max_num_waiting:
            raise Overloaded(
                f"{waiting} sequences are waiting (--max-num-waiting {self._config.max_num_waiting}). Try again later."
            )

    def add(self, request: Request, constraints: Constraints | None = None) -> None:
        """Queue a request. Raises as `check` does. `constraints`: its grammar, compiled."""
        self.check(request)
        self._num_accepted += 1
        siblings: list[Sequence] = []
        for index in range(request.params.n):
            siblings.append(self._sequence(request, index, siblings[0] if siblings else None, constraints))
            self.scheduler.add(siblings[-1])
        self.open[request.request_id] = siblings

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once, in whatever phase they are. Unknown ids are ignored."""
        for request_id in request_ids:
            for seq in self.open.pop(request_id, ()):
                if not seq.done:
                    self.scheduler.remove(seq)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence of a request at once; its siblings go on. Unknown ids are ignored."""
        for seq in self.open.get(request_id, ()):
            if seq.index == index and not seq.done:
                self.end(seq)

    def end(self, seq: Sequence, *, evict: bool = False) -> None:
        """End a sequence, and its request with the last one. `evict`: no later request may reuse its pages."""
        self.scheduler.remove(seq, evict=evict)
        request_id = seq.request.request_id
        if all(one.done for one in self.open.get(request_id, ())):
            self.open.pop(request_id, None)

    def start(self, seq: Sequence) -> None:
        """Record the time that a sequence waited and its prefix hits, in its first step."""
        if seq.started:
            return
        seq.started = True
        seq.queued_seconds = max(0.0, time.monotonic() - seq.request.arrival)
        if not seq.wants_prompt_logprobs and self._config.enable_prefix_caching:
            self._prefix_queries += seq.prompt_len
            self._prefix_hits += seq.cached_tokens
            for reason, tokens in seq.cache_lost.items():
                self._prefix_lost[reason] = self._prefix_lost.get(reason, 0) + tokens

    def stats(self) -> EngineStats:
        """Counts of sequences, pages and prefix hits."""
        manager, scheduler = self.kv_cache_manager, self.scheduler
        labels = numbered([group.label for group in manager.groups])
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used={label: pool.used for label, pool in zip(labels, manager.pools, strict=True)},
            pages_total={label: pool.total for label, pool in zip(labels, manager.pools, strict=True)},
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prefix_lost=dict(self._prefix_lost),
            preemptions=scheduler.preemptions,
        )

    def _sequence(
        self, request: Request, index: int, first: Sequence | None, constraints: Constraints | None
    ) -> Sequence:
        params = request.params
        seed = derive_seed(self._config.seed, self._num_accepted + 1) if params.seed is None else params.seed
        eos_ids = () if params.ignore_eos else request.eos_ids
        sampling = RowSampling(
            params=params,
            eos_ids=eos_ids,
            seed=derive_seed(seed, index),
            prompt_ids=request.prompt_ids,
            output_ids=[],
            constraint=None if constraints is None else constraints.constraint(),
        )
        # The first sibling leaves the prompt's pages to the others, and returns the prompt's log-probabilities.
        goes_first = self._config.enable_prefix_caching or params.prompt_logprobs is not None
        parent = first if goes_first else None
        limit = self._limits.max_model_len - len(request.prompt_ids)
        max_output_len = min(limit, params.max_tokens or limit)
        return Sequence(request, index, sampling, self.kv_cache_manager.prefix.chain(), max_output_len, parent)
