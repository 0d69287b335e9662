"""The engine: requests in, tokens out, one forward pass per `step`.

Owns the life of every sequence from `add` to its last token. Must not know text, HTTP, or how a layer computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Many

import torch

from allotrope.checkpoint.checkpoint import Checkpoint, locate
from allotrope.config import EngineConfig
from allotrope.engine.executor import Executor, InProcess
from allotrope.engine.in_flight import Flight, send_off
from allotrope.engine.inputs import StepPlan, StepRow
from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.engine.load import eos_ids, plan_caches, resolve_load_plan
from allotrope.engine.multiprocess_executor import OnDeath, Ranks, share_threads
from allotrope.engine.observer import Observer
from allotrope.engine.plan_report import ModelReport, describe
from allotrope.engine.report import EngineLimits, EngineStats, numbered
from allotrope.engine.sampling_batch import RowSampling, SamplingBatch, read_logprobs
from allotrope.engine.sampling_defaults import Defaults, read_sampling_defaults, values_not_taken
from allotrope.engine.scheduler import Row, Scheduler
from allotrope.engine.seeds import derive_seed
from allotrope.engine.sequence import Sequence
from allotrope.engine.step_limits import GPU_TOKENS
from allotrope.engine.step_log import StepLog
from allotrope.env import keep_freed_memory
from allotrope.errors import InvalidRequest, ModelError, Overloaded
from allotrope.kernels.c.waiting import Waiting
from allotrope.layers.decoder import Decoder
from allotrope.request import FinishReason, Request, SequenceOutput, TokenLogprobs

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

        `on_death(reason)` is called, from a thread, if a process that the engine needs ends. Without it the next
        `step` raises EngineDead. `observer`: sees the logits of every token and may replace chosen tokens.
        `preferred_tokens`: most tokens of a step on a GPU, where the options name none and memory serves them.
        """
        self._observer = observer
        keep_freed_memory()
        share_threads(config)
        self._config = config
        self._executor: Executor
        if config.tensor_parallel_size > 1:
            self._executor = Ranks(config, on_death, preferred_tokens)
            load_plan, memory = self._executor.load_plan, self._executor.memory
        else:
            load_plan = resolve_load_plan(config, preferred_tokens=preferred_tokens)
            on_gpu = load_plan.build.device.type == "cuda"
            # A CPU's memory is planned while it is still free, a GPU's when it is known what a step takes of it.
            planned = None if on_gpu else plan_caches(load_plan, config)
            local = InProcess(load_plan, config)
            memory = local.plan() if planned is None else planned
            local.allocate(memory)
            self._executor = local
        asked = config.step_log_seconds
        self._step_log = None if asked is None else StepLog(self._executor, load_plan, asked)
        self._pending_copies: list[tuple[int, int, int]] = []
        self._keeper = KVCacheManager(memory, self._copy_page, reuse=config.enable_prefix_caching)
        limits = load_plan.limits
        self._scheduler = Scheduler(self._keeper, max_sequences=limits.max_num_seqs, max_tokens=limits.step_tokens)
        self._requests: dict[str, list[Sequence]] = {}
        self._sampling: SamplingBatch | None = None
        self._device, self._step_tokens = load_plan.build.device, limits.step_tokens
        self._waiting = Waiting() if self._device.type == "cpu" else None
        self._flight: Flight | None = None
        self._overlap, self._said_wait = self._may_overlap(config), False
        self._accepted = 0
        self._prefix_queries = self._prefix_hits = 0
        self._prefix_lost: dict[str, int] = {}
        self.memory = memory
        log.info("%s", limits)
        self._blueprint = load_plan
        self._sampler = load_plan.sampler()
        if log.isEnabledFor(logging.INFO):
            for line in self.report().lines():
                log.info("%s", line)
        unit = self._keeper.prefix.unit
        if config.enable_prefix_caching and unit >= load_plan.max_model_len:
            log.warning(
                "the prefix cache can never hit: prefixes are reused in steps of %d tokens, but max_model_len is %d",
                unit,
                load_plan.max_model_len,
            )
        self._checkpoint = load_plan.checkpoint
        self.limits = EngineLimits(
            max_model_len=load_plan.max_model_len,
            vocab_size=load_plan.spec.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            eos_ids=eos_ids(load_plan.checkpoint.generation_config, load_plan.checkpoint.config),
            model_dtype=str(load_plan.build.dtype).removeprefix("torch."),
            device_type=load_plan.build.device.type,
            sampling_defaults=_sampling_defaults(config, load_plan.checkpoint),
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it can never run, Overloaded if the queue is full."""
        request.check(self.limits.vocab_size, self.limits.max_model_len)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request_id={request.request_id!r} is already running.", "request_id")
        longest = min(self.limits.max_model_len, len(request.prompt_ids) + (request.params.max_tokens or 2**62))
        if not self._keeper.fits_alone(longest, min(longest, self._step_tokens)):
            raise InvalidRequest(
                f"prompt and max_tokens reach {longest} tokens, more than the caches hold; ask for fewer.", "max_tokens"
            )
        if len(self._scheduler.waiting) + request.params.n > self._config.max_num_waiting:
            raise Overloaded(
                f"{len(self._scheduler.waiting)} sequences are waiting (--max-num-waiting "
                f"{self._config.max_num_waiting}). Try again later."
            )
        self._accepted += 1
        siblings: list[Sequence] = []
        for index in range(request.params.n):
            siblings.append(self._sequence(request, index, siblings[0] if siblings else None))
            self._scheduler.add(siblings[-1])
        self._requests[request.request_id] = siblings

    def abort(self, request_ids: Many[str]) -> None:
        """End requests at once, wherever they are; nothing more comes from them. Unknown ids are ignored."""
        for request_id in request_ids:
            for seq in self._requests.pop(request_id, ()):
                if not seq.done:
                    self._scheduler.remove(seq)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence of a request at once; its siblings go on. Unknown ids are ignored."""
        for seq in self._requests.get(request_id, ()):
            if seq.index == index and not seq.done:
                self._end(seq)

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[SequenceOutput]:
        """Run one forward pass and return what was added; [] when there is nothing to run.

        Where steps overlap, that is what the pass before it chose, read while the device runs this one.
        """
        if self._waiting is not None:
            self._waiting.look()
        before = self._flight
        if before is not None and any(seq.reads_output for seq in before.seqs):
            self._flight = None
            self._say_that_steps_wait()
            return self._land(before)
        rows = self._scheduler.plan()
        if not rows:
            self._flight = None
            return [] if before is None else self._land(before)
        logits, parts = self._run(rows, before)
        self._look_at_prompts(rows, parts)
        for row in rows:
            self._start(row.seq)
        flight = self._choose(rows, parts, logits)
        outputs = []
        if self._overlap:
            self._flight = flight
            flight = before
        else:
            self._advance(rows)
        if flight is not None:
            outputs = self._land(flight)
        if self._overlap:
            # What a page holds can be told only now that the tokens before this pass are known.
            self._advance(rows)
        self.capture_next()
        return outputs

    def capture_next(self) -> bool:
        """Capture one more CUDA graph, where there are some to come. Returns whether there was one."""
        return self._executor.capture_next()

    def capture_all(self) -> None:
        """Capture every CUDA graph that is still to come, at once."""
        while self.capture_next():
            pass

    @property
    def graph_replays(self) -> int:
        """Decode steps that ran as captured graphs so far."""
        return self._executor.graph_replays

    def _may_overlap(self, config: EngineConfig) -> bool:
        """Whether the tokens of a step may be read while the next one runs; said with every reason against it."""
        reasons = []
        if config.overlap == "off":
            reasons.append("--overlap off was asked for")
        if config.overlap == "auto" and self._device.type != "cuda":
            reasons.append(f"device={self._device.type} (auto overlaps the steps of a GPU)")
        if self._observer is not None:
            reasons.append("an observer may replace tokens")
        if config.tensor_parallel_size > 1:
            reasons.append(
                f"tensor_parallel_size={config.tensor_parallel_size} (needs 1: rank 0 alone knows the sampled tokens)"
            )
        if reasons:
            log.info("steps do not overlap (no async scheduling): %s", "; ".join(reasons))
        else:
            log.info(
                "steps overlap (async scheduling): the next one is launched before the tokens of this one are read"
            )
        return not reasons

    def _say_that_steps_wait(self) -> None:
        if not self._said_wait:
            self._said_wait = True
            log.info("steps wait for each other while a request with penalties runs: these need the tokens before")

    def _run(self, rows: Many[Row], before: Flight | None) -> tuple[torch.Tensor, Many[torch.Tensor]]:
        """Start the pass. Returns the logits of all scored tokens, and row by row."""
        copies = tuple(self._pending_copies)
        self._pending_copies.clear()
        scored = [self._scored(row) for row in rows]
        places = {} if before is None else before.rows
        steps = [_step_row(row, count, places.get(row.seq, -1)) for row, count in zip(rows, scored, strict=True)]
        chosen = None if before is None else before.chosen
        run = self._executor.run if self._step_log is None else self._step_log.run
        logits = run(StepPlan(tuple(steps), copies), chosen)
        return logits, logits.split(scored)

    def _advance(self, rows: Many[Row]) -> None:
        for row in rows:
            if not row.seq.done:
                self._keeper.advance(row.seq, row.tokens)

    def tokenizer_path(self) -> str:
        """Where the model's tokenizer is. Raises ModelError if it brings none and none was given."""
        if self._config.tokenizer is not None:
            return str(locate(self._config.tokenizer, with_weights=False))
        if self._checkpoint.tokenizer_path is None:
            raise ModelError(self._checkpoint.source, ["it brings no tokenizer; give one with --tokenizer"])
        return self._checkpoint.tokenizer_path

    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer, the model's own or a given one."""
        return self._config.tokenizer is not None or self._checkpoint.tokenizer_path is not None

    @property
    def requests(self) -> list[str]:
        """The ids of the requests that have not ended, in order of arrival."""
        return list(self._requests)

    def stats(self) -> EngineStats:
        """Where the engine stands."""
        labels = numbered([group.label for group in self._keeper.groups])
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_used={label: pool.used for label, pool in zip(labels, self._keeper.pools, strict=True)},
            pages_total={label: pool.total for label, pool in zip(labels, self._keeper.pools, strict=True)},
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prefix_lost=dict(self._prefix_lost),
            preemptions=self._scheduler.preemptions,
        )

    def report(self) -> ModelReport:
        """The model and the plan of its memory."""
        return describe(self._blueprint, self.memory, self._config)

    def process_ids(self) -> list[int]:
        """The processes that this engine started, one per further rank."""
        return self._executor.process_ids()

    def reset_prefix_cache(self) -> None:
        """Forget all that ended sequences left for reuse."""
        self._keeper.forget_all()

    @property
    def device(self) -> torch.device:
        """Where the model's first rank runs."""
        return self._device

    @property
    def model(self) -> Decoder:
        """The model in this process (one rank's share of it), for whoever looks inside; see `Observer`."""
        return self._executor.model

    def close(self) -> None:
        """Let go of the model and its memory."""
        if self._waiting is not None:
            self._waiting.close()
        self._executor.close()

    def _copy_page(self, group: int, source: int, target: int) -> None:
        self._pending_copies.append((group, source, target))

    def _sequence(self, request: Request, index: int, first: Sequence | None) -> Sequence:
        params = request.params
        seed = derive_seed(self._config.seed, self._accepted + 1) if params.seed is None else params.seed
        eos_ids = () if params.ignore_eos else request.eos_ids
        sampling = RowSampling(
            params=params,
            eos_ids=eos_ids,
            seed=derive_seed(seed, index),
            prompt_ids=request.prompt_ids,
            output_ids=[],
        )
        # Siblings find the prompt's pages ready, and its scores told: the first of them speaks first.
        goes_first = self._config.enable_prefix_caching or params.prompt_logprobs is not None
        parent = first if goes_first else None
        limit = self.limits.max_model_len - len(request.prompt_ids)
        most = min(limit, params.max_tokens or limit)
        return Sequence(request, index, sampling, self._keeper.prefix.chain(), most, parent)

    def _start(self, seq: Sequence) -> None:
        if seq.started:
            return
        seq.started = True
        seq.queued_seconds = max(0.0, time.monotonic() - seq.request.arrival)
        if not seq.wants_prompt_logprobs and self._config.enable_prefix_caching:
            self._prefix_queries += seq.prompt_len
            self._prefix_hits += seq.cached_tokens
            for reason, tokens in seq.cache_lost.items():
                self._prefix_lost[reason] = self._prefix_lost.get(reason, 0) + tokens

    def _scored(self, row: Row) -> int:
        """Trailing tokens of a row whose logits are wanted."""
        wants_prompt = row.seq.wants_prompt_logprobs and row.seq.output_len == 0
        if self._observer is not None or wants_prompt:
            return row.tokens
        return int(row.end == len(row.seq.ids))

    def _look_at_prompts(self, rows: Many[Row], parts: Many[torch.Tensor]) -> None:
        """Show logits to the observer, and record prompt log-probabilities for the sequences that ask for them."""
        for row, logits in zip(rows, parts, strict=True):
            seq = row.seq
            if self._observer is not None:
                self._observer.logits(seq.request.request_id, seq.index, seq.computed, logits)
            start = seq.computed + 1
            targets = seq.ids[start : min(start + len(logits), seq.prompt_len)]
            if seq.wants_prompt_logprobs and targets:
                count = seq.request.params.prompt_logprobs or 0
                of = torch.tensor(targets, device=logits.device)
                scores = self._sampler.gather_logprobs(logits[: len(targets)], of, count)
                seq.prompt_logprobs.update(enumerate(read_logprobs(scores, [count] * len(targets)), start))

    def _choose(self, rows: Many[Row], parts: Many[torch.Tensor], logits: torch.Tensor) -> Flight | None:
        """Sample a token for every sequence whose tokens are all computed. `parts`: `logits`, row by row."""
        ready = [(row.seq, part[-1:]) for row, part in zip(rows, parts, strict=True) if row.end == len(row.seq.ids)]
        if not ready:
            return None
        records = [seq.sampling for seq, _ in ready]
        if self._sampling is None or not self._sampling.serves(records):
            self._sampling = SamplingBatch(records, self.limits.vocab_size, self._device)
        if len(logits) != len(ready):
            logits = torch.cat([last for _, last in ready])
        sampled = self._sampler(logits, self._sampling.step())
        return send_off([seq for seq, _ in ready], self._sampling, sampled)

    def _land(self, flight: Flight) -> list[SequenceOutput]:
        """Read what a step chose. Sequences that ended since are passed over."""
        outputs = []
        tokens, logprobs = flight.read()
        for seq, place, token, record in zip(flight.seqs, flight.places, tokens, logprobs, strict=True):
            if seq.done:
                continue
            if self._observer is not None:
                token = self._observer.token(seq.request.request_id, seq.index, token)
            outputs.append(self._take(seq, place, token, record))
        return outputs

    def _take(self, seq: Sequence, place: int, token: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """Fill in a sampled token, end the sequence if it is its last, and say what happened."""
        if token < 0:
            self._end(seq, forget=True)
            return SequenceOutput(
                seq.request.request_id,
                seq.index,
                finish_reason="error",
                cached_tokens=seq.cached_tokens,
                error="the model's scores for the next token are not numbers, or every token is masked",
            )
        first = place == 0
        seq.settle(place, token)
        reason, stopped_by = self._finish(seq, place + 1, token)
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        if first and seq.wants_prompt_logprobs:
            prompt_logprobs = (None, *(seq.prompt_logprobs[i] for i in range(1, seq.prompt_len)))
        if reason is not None:
            seq.cut_off(place + 1)
            self._end(seq)
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            (token,),
            reason,
            stopped_by,
            None if logprobs is None else (logprobs,),
            prompt_logprobs,
            seq.cached_tokens,
            cache_lost=dict(seq.cache_lost.items()) if first else {},
            queued_seconds=seq.queued_seconds if first else 0.0,
        )

    def _finish(self, seq: Sequence, count: int, token: int) -> tuple[FinishReason | None, int | None]:
        """Whether `token`, output token number `count`, is the last one of `seq`, and the stop id that says so."""
        params = seq.request.params
        if count > params.min_tokens:
            if token in seq.sampling.stop_ids:
                return "stop", token
            if token in seq.sampling.eos_ids:
                return "stop", None
        return ("length", None) if count >= seq.most_output else (None, None)

    def _end(self, seq: Sequence, *, forget: bool = False) -> None:
        self._scheduler.remove(seq, forget=forget)
        request_id = seq.request.request_id
        if all(one.done for one in self._requests.get(request_id, ())):
            self._requests.pop(request_id, None)


def _sampling_defaults(config: EngineConfig, checkpoint: Checkpoint) -> Defaults:
    """Sampling values of the checkpoint, where they are wanted. Raises ModelError for one out of its range."""
    if config.generation_config == "none":
        return {}
    if others := values_not_taken(checkpoint.generation_config):
        log.info("not taken from generation_config.json: %s", ", ".join(others))
    return read_sampling_defaults(checkpoint.generation_config, checkpoint.source)


def _step_row(row: Row, scored: int, follows: int) -> StepRow:
    """`follows`: where the step before chose the last token of the sequence, -1 if it did not."""
    seq = row.seq
    ids = tuple(seq.ids[seq.computed : row.end])
    return StepRow(ids, seq.computed, seq.pages, seq.slots, scored, follows)
