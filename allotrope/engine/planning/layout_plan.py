"""Which layouts of N GPUs serve a model, how fast each is expected to be, and which one is proposed.

Owns the comparison: which layouts are tried, which are refused and why, and by what the best one is chosen. What a rank
holds and does is counted in `layout_cost`, times are those of `step_time` and `exchange`. Asks no device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from allotrope.cache.memory import Demand, make_plan
from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.config import MAX_RANKS, EngineConfig
from allotrope.engine.host_bound import runs_in_pieces
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.memory import utilization
from allotrope.engine.planning.exchange import Exchange, total_seconds, total_sent
from allotrope.engine.planning.layout_cost import HostLayout, RankModel, StageCost, StepRows, host_layout
from allotrope.engine.planning.rank_report import KINDS
from allotrope.engine.planning.report_text import size_text
from allotrope.engine.planning.step_time import StepTime
from allotrope.engine.report import numbered
from allotrope.engine.step_limits import GPU_TOKENS, MIN_TOKENS, StepRoom
from allotrope.errors import ConfigError, LayoutRefused, ModelError
from allotrope.graphs.piecewise_graphs import MOST_TOKENS
from allotrope.kernels.chip_figures import ChipFigures
from allotrope.layers.parallel import Parallel
from allotrope.rank_layout import RankLayout

REQUESTS = (4, 16, 64, 256)
"""Requests that decode at once, in the tables of a plan."""
CONTEXT = 8192
"""Tokens that each of them sees, where the model has so long sequences."""

EXCHANGES, STEP, STAGES = "exchanges", "a step beside kernels", "waiting for other stages"
# Times that differ by less are called equal: the model is not that exact.
_EQUAL = 0.01


@dataclass(frozen=True)
class Machines:
    """`gpus` GPUs of a chip on `hosts` hosts."""

    figures: ChipFigures
    gpus: int
    hosts: int

    @property
    def per_host(self) -> int:
        return self.gpus // self.hosts


@dataclass(frozen=True)
class DecodeTime:
    """A decode step of `requests` requests. `tpot`: expected seconds per token of a request. `least`: what the chip's
    ceilings and links allow. `parts`: of `tpot`, by what takes it. `link_bytes`, `network_bytes`: that the rank which
    sends most sends in a step, within its host and between hosts."""

    requests: int
    tpot: float
    least: float
    parts: dict[str, float]
    link_bytes: int
    network_bytes: int


@dataclass(frozen=True)
class PromptTime:
    """A step that reads `tokens` tokens of prompts. `seconds`: expected, of the slowest stage. The rest as in
    `DecodeTime`."""

    tokens: int
    seconds: float
    least: float
    link_bytes: int
    network_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """With a step in every stage."""
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """One layout. `weights`: bytes by kind, of the rank that holds most. `entries`: of its caches, by group: bytes of
    one entry (or state) of all its layers. `dequantized`: kinds of weights that one rank keeps quantized and these do
    not, for a rank's share of their inputs is no whole number of groups or blocks. `tokens`: of context that fit, over
    all data-parallel ranks, in sequences of the plan's context. `refusal`: why it cannot serve even one; then there are
    no times. `decode`: of the numbers of requests whose caches fit. `exchanges`: of a decode step of the most of them.
    """

    layout: RankLayout
    weights: dict[str, int]
    entries: dict[str, int] = field(default_factory=dict)
    dequantized: tuple[str, ...] = ()
    tokens: int = 0
    refusal: str | None = None
    decode: tuple[DecodeTime, ...] = ()
    prompts: PromptTime | None = None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    def at(self, requests: int) -> DecodeTime | None:
        """The step of so many requests; None where their caches do not fit."""
        return next((one for one in self.decode if one.requests == requests), None)


def layouts(gpus: int) -> list[RankLayout]:
    """Every layout of `gpus` ranks, tensor parallel alone first."""
    sizes = [
        (tensor, data, gpus // tensor // data)
        for tensor in range(gpus, 0, -1)
        if gpus % tensor == 0
        for data in range(1, gpus // tensor + 1)
        if gpus // tensor % data == 0
    ]
    sizes.sort(key=lambda one: (one[2], one[1]))
    return [
        RankLayout(*one, expert_parallel) for one in sizes for expert_parallel in (False, True)
        if not expert_parallel or one[0] * one[1] > 1
    ]  # fmt: skip


class LayoutPlanner:
    """Plans a model on some machines, layout by layout. `context`: tokens that each request sees; default: `CONTEXT`,
    or the longest sequence, where that is shorter."""

    def __init__(
        self, config: EngineConfig, machines: Machines, context: int | None = None, requests: Sequence[int] = REQUESTS
    ) -> None:
        self._config, self._machines, self._requests = config, machines, tuple(requests)
        self._time = StepTime(machines.figures)
        self._memory = int(machines.figures.memory.value)
        self._checkpoint: Checkpoint | None = None
        # Layouts that differ in stages alone share a model.
        self._models: dict[RankLayout, RankModel] = {}
        self.context = min(CONTEXT, self.max_model_len) if context is None else context

    @property
    def max_model_len(self) -> int:
        """The longest sequence. Raises ModelError for a model that cannot be served at all."""
        return self._model(RankLayout()).load_plan.max_model_len

    def heading(self) -> str:
        """The model and its types, for people. Raises ModelError for a model that cannot be served at all."""
        load_plan = self._model(RankLayout()).load_plan
        architecture = next(iter(load_plan.checkpoint.config.get("architectures") or ["?"]))
        types = (str(one).removeprefix("torch.") for one in (load_plan.build.dtype, load_plan.build.kv_dtype))
        formats = sorted({format.name for format in load_plan.build.formats.values()})
        kept = f", weights that stay quantized: {', '.join(formats)}" if formats else ""
        text = f"{self._config.model}: {architecture}, {len(load_plan.spec.layers)} layers"
        return f"{text}, {' with '.join(types)} caches{kept}"

    def plan(self, layout: RankLayout) -> LayoutReport:
        """What the ranks of a layout hold and how long their steps take. Where the model does not allow the layout, or
        one request does not fit, the report says why."""
        try:
            hosts = host_layout(layout, self._machines.per_host)
            stages = self.stages(layout)
        except (LayoutRefused, ModelError, ValueError) as error:
            reason = "; ".join(error.reasons) if isinstance(error, ModelError) else str(error)
            return LayoutReport(layout=layout, weights={}, refusal=reason)
        most = max(stages, key=lambda stage: stage.weight_bytes)
        labels = numbered([group.label for group in most.groups])
        entries = {label: group.row_bytes for label, group in zip(labels, most.groups, strict=True)}
        alone, here = self._model(RankLayout()).quantized, self._model(layout).quantized
        lost = {kind for name, kind in alone.items() if name not in here}
        plain = tuple(kind for kind in KINDS if kind in lost)
        found = LayoutReport(layout=layout, weights=most.weights, entries=entries, dequantized=plain)
        rooms = [self._room(layout, stage) for stage in stages]
        if (refusal := self._refusal(stages, rooms)) is not None:
            return dataclasses.replace(found, refusal=refusal)
        decode = tuple(
            self._decode(stages, hosts, requests, self.context)
            for requests in self._requests
            if self._fit(stages, rooms, -(-requests // layout.data) * self.context)
        )
        limit = decode[-1].requests if decode else 1
        rows = _rows_in_flight(layout, limit, self.context)
        busiest = max(stages, key=lambda stage: total_seconds(stage.exchanges(rows, hosts), self._machines.figures))
        return dataclasses.replace(
            found,
            tokens=layout.data * self._tokens(stages, rooms),
            decode=decode,
            prompts=self._prompts(stages, hosts, self._step_tokens(layout), self.context),
            exchanges=busiest.exchanges(rows, hosts),
        )

    def stages(self, layout: RankLayout) -> list[StageCost]:
        """What a rank of each stage holds and does. Raises ModelError or ValueError for a layout that cannot be."""
        model = self._model(layout)
        # Ranks cut the model by the bytes that one rank would hold.
        runs = self._model(RankLayout()).stages(layout.pipeline)
        return [StageCost(model, layers, layout, self._config.page_size) for layers in runs]

    def _model(self, layout: RankLayout) -> RankModel:
        """With all layers, of the last rank: of experts that cannot be shared out evenly, it has most."""
        stage = dataclasses.replace(layout, pipeline=1)
        if stage not in self._models:
            load_plan = resolve_load_plan(
                self._configured(stage),
                Parallel.of(stage, stage.size - 1),
                available=self._memory,
                chip=self._machines.figures.chip,
                checkpoint=self._checkpoint,
            )
            self._checkpoint = load_plan.checkpoint
            self._models[stage] = RankModel(load_plan)
        return self._models[stage]

    def _configured(self, layout: RankLayout) -> EngineConfig:
        """The options, with the sizes of a layout."""
        config = self._config
        if not layout.expert_parallel:
            config = dataclasses.replace(
                config, enable_expert_parallel=False, expert_placement=None, num_redundant_experts=0
            )
        return dataclasses.replace(
            config,
            tensor_parallel_size=layout.tensor,
            data_parallel_size=layout.data,
            pipeline_parallel_size=layout.pipeline,
            enable_expert_parallel=layout.expert_parallel,
        )

    @property
    def usable(self) -> int:
        """Bytes of a GPU for weights, steps and caches."""
        return int(self._memory * utilization(self._config, torch.device("cuda")))

    def _step_tokens(self, layout: RankLayout) -> int:
        """Most tokens of a step, over all data-parallel ranks: feed-forward blocks have the rows of all of them."""
        own = self._config.max_num_batched_tokens or max(GPU_TOKENS // layout.data, MIN_TOKENS)
        return own * layout.data

    def _room(self, layout: RankLayout, stage: StageCost) -> int:
        """Bytes for the caches of a rank, beside its weights and the largest step."""
        load_plan = self._model(layout).load_plan
        room = StepRoom(
            bytes=self.usable - stage.weight_bytes,
            hidden=load_plan.spec.hidden * load_plan.build.dtype.itemsize,
            vocabulary=load_plan.spec.vocab_size if stage.first else 0,
            context=self.context,
            groups=stage.groups,
        )
        left = room.bytes - room.workspace(max(self._requests), self._step_tokens(layout))
        return min(left, self._config.kv_cache_memory_bytes or left)

    def _fit(self, stages: Sequence[StageCost], rooms: Sequence[int], tokens: int) -> bool:
        """Whether every stage has room for `tokens` tokens of one data-parallel rank, in sequences of the context."""
        sequences = max(1, -(-tokens // self.context))
        demand = Demand(context=self.context, sequences=sequences, step_tokens=GPU_TOKENS, reuse=False)
        return all(
            make_plan(stage.groups, demand, tokens, sequences).bytes <= room
            for stage, room in zip(stages, rooms, strict=True)
        )

    def _tokens(self, stages: Sequence[StageCost], rooms: Sequence[int]) -> int:
        """The most tokens of a data-parallel rank that fit."""
        low, high = self.context, 2 * self.context
        while self._fit(stages, rooms, high) and high < 1 << 40:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fit(stages, rooms, middle) else (low, middle)
        return low

    def _refusal(self, stages: Sequence[StageCost], rooms: Sequence[int]) -> str | None:
        usable = self.usable
        most = max(stage.weight_bytes for stage in stages)
        if most > usable:
            return f"does not fit: {size_text(most)} of weights on a rank, of {size_text(usable)}"
        if min(rooms) <= 0 or not self._fit(stages, rooms, self.context):
            left = f"{size_text(max(min(rooms), 0))} are left for caches beside {size_text(most)} of weights and a step"
            return f"does not fit: one request of {self.context} tokens, for {left}, of {size_text(usable)}"
        return None

    def decode(self, layout: RankLayout, requests: int, context: int) -> DecodeTime:
        """A decode step of a layout, whether the caches hold it or not. Raises ModelError or ValueError for a layout
        that cannot be."""
        return self._decode(self.stages(layout), host_layout(layout, self._machines.per_host), requests, context)

    def prompts(self, layout: RankLayout, tokens: int, context: int) -> PromptTime:
        """A step that reads `tokens` tokens of prompts of `context` tokens, over all data-parallel ranks."""
        return self._prompts(self.stages(layout), host_layout(layout, self._machines.per_host), tokens, context)

    def _decode(self, stages: Sequence[StageCost], hosts: HostLayout, requests: int, context: int) -> DecodeTime:
        """With P stages, P steps of a P-th of the requests are in flight: a request's token takes a turn of all stages,
        and at least as long as the slowest stage takes for all of these steps."""
        figures, layout = self._machines.figures, stages[0].layout
        rows = _rows_in_flight(layout, requests, context)
        parts: dict[str, float] = {}
        turns, least, sent = [], [], []
        for stage in stages:
            work, exchanges = stage.work(rows), stage.exchanges(rows, hosts)
            exchanging = total_seconds(exchanges, figures)
            own = self._time.parts(work) | {EXCHANGES: exchanging, STEP: self._time.fitted.step if stage.first else 0.0}
            for name, seconds in own.items():
                parts[name] = parts.get(name, 0.0) + seconds
            turns.append(sum(own.values()))
            least.append(self._time.least(work.classes) + exchanging)
            sent.append(total_sent(exchanges))
        in_flight = min(layout.pipeline, requests)
        tpot = max(sum(turns), in_flight * max(turns))
        if layout.pipeline > 1:
            parts[STAGES] = tpot - sum(turns)
        links, network = max(sent, key=sum)
        return DecodeTime(requests, tpot, max(sum(least), in_flight * max(least)), parts, links, network)

    def _prompts(self, stages: Sequence[StageCost], hosts: HostLayout, tokens: int, context: int) -> PromptTime:
        rows, figures = StepRows.prompts(tokens, context, stages[0].layout.data), self._machines.figures
        works = [(stage.work(rows), stage.exchanges(rows, hosts)) for stage in stages]
        graphs = runs_in_pieces(stages[0].layout) and rows.gathered <= MOST_TOKENS
        seconds = max(
            self._time.prompt_step(work, graphs=graphs) + total_seconds(found, figures) for work, found in works
        )
        least = max(self._time.least(work.classes) + total_seconds(found, figures) for work, found in works)
        links, network = max((total_sent(found) for _, found in works), key=sum)
        return PromptTime(rows.gathered, seconds, least, links, network)


def _rows_in_flight(layout: RankLayout, requests: int, context: int) -> StepRows:
    """The rows of one of the steps in flight."""
    return StepRows.decode(-(-requests // min(layout.pipeline, requests)), context, layout.data)


def best(reports: Sequence[LayoutReport], requests: int) -> LayoutReport | None:
    """The layout with the least time per token for so many requests; of nearly equal ones that which reads prompts
    fastest; None where none holds them."""
    found = [(report, one) for report in reports if (one := report.at(requests)) is not None]
    if not found:
        return None
    least = min(one.tpot for _, one in found)
    near = [report for report, one in found if one.tpot <= least * (1 + _EQUAL)]
    return max(near, key=lambda report: report.prompts.tokens_per_second if report.prompts else 0.0)


def proposed(reports: Sequence[LayoutReport], requests: Sequence[int]) -> LayoutReport | None:
    """The layout for all of `requests` alike: of those that hold the most requests that any holds, the one whose times
    per token are in the geometric mean the least times those of the best. None where no layout fits."""
    served = [count for count in requests if any(report.at(count) for report in reports)]
    if not served:
        fits = [report for report in reports if report.refusal is None]
        return max(fits, key=lambda report: report.tokens, default=None)
    able = [report for report in reports if report.at(served[-1]) is not None]
    least = {count: min(one.tpot for report in reports if (one := report.at(count))) for count in served}

    def behind(report: LayoutReport) -> float:
        """Mean of log(time / least time)."""
        times = ((report.at(count), least[count]) for count in served)
        return sum(math.log(one.tpot / floor) for one, floor in times if one is not None) / len(served)

    floor = min(behind(report) for report in able)
    near = [report for report in able if behind(report) <= floor + math.log(1 + _EQUAL)]
    return max(near, key=lambda report: report.prompts.tokens_per_second if report.prompts else 0.0)


def _fewest_hosts(gpus: int, most: int) -> int:
    """Hosts with equally many GPUs, at most `most` each."""
    return next((count for count in range(max(1, -(-gpus // most)), gpus + 1) if gpus % count == 0), 1)


def check_machines(figures: ChipFigures, gpus: int, hosts: int | None) -> Machines:
    """The machines of a plan. Raises ConfigError for numbers that cannot be."""
    reasons = []
    if gpus < 1:
        reasons.append(f"gpus={gpus}; at least 1 is needed")
    if gpus > MAX_RANKS:
        reasons.append(f"gpus={gpus}; at most {MAX_RANKS} are compared")
    count = _fewest_hosts(gpus, figures.host) if hosts is None else hosts
    if count < 1 or gpus % max(count, 1):
        reasons.append(f"hosts={count} do not share gpus={gpus} evenly")
    if count > 1 and figures.network is None:
        reasons.append(f"hosts={count}; nothing is known of a network between hosts of {figures.name}")
    if reasons:
        raise ConfigError(f"bad machines: {'; '.join(reasons)}.")
    return Machines(figures, gpus, count)
