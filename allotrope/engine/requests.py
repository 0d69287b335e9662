"""Requests from their arrival to their end: which are refused, the sequences of each, and their removal.

Owns the table of open requests, and which data-parallel rank each of them goes to. Must not know how a step runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Iterable

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.engine.report import EngineLimits, EngineStats, RankStats, numbered
from allotrope.engine.sampling_batch import RowSampling
from allotrope.engine.scheduler import Row, Scheduler
from allotrope.engine.seeds import derive_seed
from allotrope.engine.sequence import Sequence
from allotrope.errors import InvalidRequest, Overloaded
from allotrope.grammars.constraint import Constraints
from allotrope.request import Request


class RequestTable:
    """`open`: the sequences of each request that has not ended, in order of arrival. `schedulers`: one for each
    data-parallel rank, with caches of its own.

    `step_tokens`: most of a rank's step. `copy_page(dp_rank, group, source, target)` copies a state slot on the devices
    of that rank. `max_decodes`, `lookahead`, `stages`: as in `Scheduler`.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        step_tokens: int,
        memory: MemoryPlan,
        copy_page: Callable[[int, int, int, int], None],
        *,
        max_decodes: int = 0,
        lookahead: int = 0,
        stages: int = 1,
    ) -> None:
        self.open: dict[str, list[Sequence]] = {}
        self.schedulers = tuple(
            Scheduler(
                KVCacheManager(memory, functools.partial(copy_page, dp_rank), reuse=config.enable_prefix_caching),
                max_sequences=limits.max_num_seqs // config.data_parallel_size,
                max_tokens=step_tokens,
                max_decodes=max_decodes,
                lookahead=lookahead,
                stages=stages,
                reserve_full_isl=config.scheduler_reserve_full_isl,
            )
            for dp_rank in range(config.data_parallel_size)
        )
        self._labels = numbered([group.label for group in self.kv_cache_manager.groups])
        # Requests that each rank got, and of these, those that found a part of their prompt in its cache.
        self._routed, self._routed_by_prefix = ([0] * len(self.schedulers) for _ in range(2))
        self._config, self._limits, self._step_tokens = config, limits, step_tokens
        self._num_accepted = 0
        self._prefix_queries = self._prefix_hits = 0
        self._prefix_lost: dict[str, int] = {}

    def check(self, request: Request, aside: int = 0) -> None:
        """Raise InvalidRequest if a request can never run, Overloaded if the queue is full. `aside`: requests that are
        yet to be queued.
        """
        limits, waiting = self._limits, self.num_waiting + aside
        request.check(limits.vocab_size, limits.max_model_len)
        if request.request_id in self.open:
            raise InvalidRequest(f"request_id={request.request_id!r} is already running.", "request_id")
        max_len = min(limits.max_model_len, len(request.prompt_ids) + (request.params.max_tokens or 2**62))
        if not self.kv_cache_manager.fits_alone(max_len, min(max_len, self._step_tokens)):
            raise InvalidRequest(
                f"prompt and max_tokens reach {max_len} tokens, more than the caches hold; ask for fewer.", "max_tokens"
            )
        if request.params.n > self._config.max_num_waiting:
            raise InvalidRequest(
                f"n={request.params.n} sequences are more than may wait (--max-num-waiting "
                f"{self._config.max_num_waiting}).",
                "n",
            )
        if waiting + request.params.n > self._config.max_num_waiting:
            raise Overloaded(
                f"{waiting} sequences are waiting (--max-num-waiting {self._config.max_num_waiting}). Try again later."
            )

    @property
    def num_waiting(self) -> int:
        """As `Engine.num_waiting`."""
        return sum(len(one.waiting) for one in self.schedulers)

    def add(self, request: Request, constraints: Constraints | None = None) -> None:
        """Queue a request. Raises as `check` does. `constraints`: its grammar, compiled."""
        self.check(request)
        self._num_accepted += 1
        siblings: list[Sequence] = []
        dp_rank = self._route(request)
        for index in range(request.params.n):
            siblings.append(self._sequence(request, index, siblings[0] if siblings else None, constraints, dp_rank))
        # All or none: what follows cannot fail.
        for seq in siblings:
            self.scheduler_of(seq).add(seq)
        self.open[request.request_id] = siblings

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once, in whatever phase they are. Unknown ids are ignored."""
        for request_id in request_ids:
            for seq in self.open.pop(request_id, ()):
                if not seq.done:
                    self.scheduler_of(seq).remove(seq)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence of a request at once; its siblings go on. Unknown ids are ignored."""
        for seq in self.open.get(request_id, ()):
            if seq.index == index and not seq.done:
                self.end(seq)

    def end(self, seq: Sequence, *, evict: bool = False) -> None:
        """End a sequence, and its request with the last one. `evict`: no later request may reuse its pages."""
        self.scheduler_of(seq).remove(seq, evict=evict)
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

    @property
    def scheduler(self) -> Scheduler:
        """That of the first data-parallel rank."""
        return self.schedulers[0]

    @property
    def kv_cache_manager(self) -> KVCacheManager:
        """That of the first data-parallel rank: all have equal groups, and as many pages."""
        return self.scheduler.kv_cache_manager

    def scheduler_of(self, seq: Sequence) -> Scheduler:
        """That of the data-parallel rank which a sequence is on."""
        return self.schedulers[seq.dp_rank]

    def plan(self, in_flight: Container[Sequence] = ()) -> list[Row]:
        """The next step: the rows of each data-parallel rank, one rank's after another's; empty if nothing can run.
        `in_flight`: as in `Scheduler.plan`."""
        return [row for scheduler in self.schedulers for row in scheduler.plan(in_flight)]

    @property
    def only_decodes(self) -> bool:
        """As `Scheduler.only_decodes`, of all data-parallel ranks."""
        return all(scheduler.only_decodes for scheduler in self.schedulers)

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return any(scheduler.running or scheduler.waiting for scheduler in self.schedulers)

    def evict_all(self) -> None:
        """Evict every cached page."""
        for scheduler in self.schedulers:
            scheduler.kv_cache_manager.evict_all()

    def _route(self, request: Request) -> int:
        """The data-parallel rank for a request: that with the longest cached part of its prompt, and among equals that
        with the least work."""
        if len(self.schedulers) == 1:
            return 0
        cached = [0] * len(self.schedulers)
        if self._config.enable_prefix_caching and request.params.prompt_logprobs is None:
            chain = self.kv_cache_manager.prefix.chain()
            cached = [one.kv_cache_manager.prefix.match(request.prompt_ids, chain).tokens for one in self.schedulers]
        ranks = range(len(self.schedulers))
        chosen = min(ranks, key=lambda dp_rank: (-cached[dp_rank], self.schedulers[dp_rank].load, dp_rank))
        self._routed[chosen] += 1
        self._routed_by_prefix[chosen] += cached[chosen] > 0
        return chosen

    def stats(self) -> EngineStats:
        """Counts of sequences, pages and prefix hits."""
        ranks = [self._rank_stats(dp_rank) for dp_rank in range(len(self.schedulers))]
        return EngineStats(
            running=sum(one.running for one in ranks),
            waiting=sum(one.waiting for one in ranks),
            pages_used=_added(one.pages_used for one in ranks),
            pages_total=_added(one.pages_total for one in ranks),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prefix_lost=dict(self._prefix_lost),
            preemptions=sum(one.preemptions for one in ranks),
            ranks=tuple(ranks) if len(ranks) > 1 else (),
        )

    def _rank_stats(self, dp_rank: int) -> RankStats:
        scheduler = self.schedulers[dp_rank]
        manager = scheduler.kv_cache_manager
        pools = dict(zip(self._labels, manager.pools, strict=True))
        return RankStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used={label: pool.used for label, pool in pools.items()},
            pages_total={label: pool.total for label, pool in pools.items()},
            preemptions=scheduler.preemptions,
            requests=self._routed[dp_rank],
            requests_by_prefix=self._routed_by_prefix[dp_rank],
        )

    def _sequence(
        self, request: Request, index: int, first: Sequence | None, constraints: Constraints | None, dp_rank: int
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
        chain = self.kv_cache_manager.prefix.chain()
        return Sequence(request, index, sampling, chain, max_output_len, parent, dp_rank)


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sums of equal keys."""
    found: dict[str, int] = {}
    for one in counts:
        for key, count in one.items():
            found[key] = found.get(key, 0) + count
    return found
