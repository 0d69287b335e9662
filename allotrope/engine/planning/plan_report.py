"""The report on a model's memory, from its config alone: weights per rank, each cache group, and whether it fits.

Owns the figures that `allotrope plan` shows and the server logs at its start. Sizes come from the cache layouts and
the model's own parameters (made without memory), never from a formula of its own. Must not read a weight.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allotrope.attention.cache_layout import page_bytes
from allotrope.cache.memory import SHORT_CONTEXT, GroupPlan, MemoryPlan
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import CPU_TOKENS, free_of_rank, plan_caches, wants_few_tokens
from allotrope.engine.load_plan import LoadPlan, LoadPlans, resolve_dtype
from allotrope.engine.memory import weight_bytes_of
from allotrope.engine.planning.decode_report import DecodeReport, report_decode
from allotrope.engine.planning.rank_report import RankReport, rank_sizes, report_ranks
from allotrope.engine.planning.report_text import size_text, table
from allotrope.engine.report import CacheGroupSummary, ModelSummary, numbered
from allotrope.errors import AllotropeError, ConfigError, ModelError
from allotrope.kernels.chip import Chip
from allotrope.kernels.chip_figures import ChipFigures
from allotrope.loading.kv_scales import attention_specs
from allotrope.rank_layout import RankLayout

_MAX_RANKS = 64


@dataclass(frozen=True)
class GroupReport:
    """One cache group. `row_bytes`: one row (or state) of all its layers together. `page_tokens`: 1 for states.
    `draft_layers`: those of a draft model among `layers`. `draft_page_bytes`: what speculative decoding adds to a page:
    rows of these layers, and inputs of drafts beside states.

    `pages`, `bytes` and `tokens` (those that its pages cover) are None where the caches do not fit. `unit_pages`: pages
    in a unit of the shared pool, 0 outside of it. `pages` are the most then, and `bytes` 0: they are the pool's.
    """

    kind: str
    label: str
    layers: int
    row_bytes: int
    page_tokens: int
    page_bytes: int
    draft_layers: int = 0
    draft_page_bytes: int = 0
    pages: int | None = None
    bytes: int | None = None
    tokens: int | None = None
    unit_pages: int = 0


@dataclass(frozen=True)
class SharedReport:
    """The pool that some groups share. `units`: with the null unit."""

    unit_bytes: int
    units: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """The plan of one rank. `memory_bytes`: what the device has for all of it, None if nobody asked whether it fits.
    `tokens`: context tokens that fit at once over all sequences. `sequences`: how many of them have room for their
    windows and states. `refusal`: why it does not fit and what would. `draft_weight_bytes`: of `weight_bytes`, those
    of the draft model.
    `formats_from`: who says which weights are quantized. `quantized`: whether any stay so. `tensor_parallel`: what each
    rank has, and which numbers of ranks are allowed; None if nobody asked. `dtype_reason`: why the type is not the
    checkpoint's. `few_tokens`: whether the caches are for a few requests, as is usual on a CPU."""

    model: str
    architecture: str
    layers: int
    dtype: str
    kv_cache_dtype: str
    ranks: int
    max_model_len: int
    max_num_seqs: int
    memory_bytes: int | None
    weight_bytes: int
    draft_weight_bytes: int
    cache_bytes: int | None
    tokens: int | None
    sequences: int | None
    density: tuple[tuple[int, float, float], ...]
    groups: tuple[GroupReport, ...]
    decode: DecodeReport
    formats_from: str
    quantized: bool
    dtype_reason: str = ""
    few_tokens: bool = False
    refusal: str | None = None
    shared: SharedReport | None = None
    tensor_parallel: RankReport | None = None

    def as_json(self) -> dict[str, Any]:
        """The same as plain data, with `fits`."""
        return {**asdict(self), "fits": self.refusal is None}

    @property
    def full_length_sequences(self) -> int | None:
        """How many sequences of `max_model_len` tokens fit at once; None where the caches do not fit."""
        if self.tokens is None or self.sequences is None:
            return None
        return min(self.sequences, self.tokens // self.max_model_len)

    @property
    def draft_bytes(self) -> int:
        """What speculative decoding takes of weights and caches; of weights alone where the caches do not fit. Of a
        shared pool it is the most that it may take."""
        own = sum(group.draft_page_bytes * (group.pages or 0) for group in self.groups if not group.unit_pages)
        if self.shared is None:
            return self.draft_weight_bytes + own
        share = max(group.draft_page_bytes / group.page_bytes for group in self.groups if group.unit_pages)
        return self.draft_weight_bytes + own + int(share * self.shared.bytes)

    def summary(self) -> tuple[str, str]:
        """The model and its memory, for readers who know nothing of caches."""
        memory = f"memory: {size_text(self.weight_bytes)} of weights on each of {self.ranks} rank(s)"
        if self.tokens is not None and self.cache_bytes is not None:
            memory += (
                f" and {size_text(self.cache_bytes)} of caches, enough for {self.tokens} tokens, which is "
                f"{self.full_length_sequences} request(s) of {self.max_model_len} at a time "
                f"(at most {self.max_num_seqs} requests)"
            )
            if self.draft_bytes:
                memory += f"; {size_text(self.draft_bytes)} of all this is for speculative decoding"
        return f"model: {self._heading()}", memory.replace(" on each of 1 rank(s)", "")

    def model_summary(self) -> ModelSummary:
        """The same as `summary`, with each cache group, as plain data. Raises `ValueError` if the caches do not fit."""
        sequences = self.full_length_sequences
        if self.cache_bytes is None or self.tokens is None or sequences is None:
            raise ValueError("a model whose caches do not fit has no summary")
        labels = numbered([group.label for group in self.groups])
        return ModelSummary(
            architecture=self.architecture,
            layers=self.layers,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            ranks=self.ranks,
            weight_bytes=self.weight_bytes,
            cache_bytes=self.cache_bytes,
            draft_bytes=self.draft_bytes,
            tokens=self.tokens,
            sequences=sequences,
            groups=tuple(
                CacheGroupSummary(
                    label=label,
                    layers=group.layers,
                    page_tokens=group.page_tokens,
                    page_bytes=group.page_bytes,
                    pages=group.pages or 0,
                    bytes=group.bytes or 0,
                )
                for label, group in zip(labels, self.groups, strict=True)
            ),
            shared_bytes=0 if self.shared is None else self.shared.bytes,
        )

    def _heading(self) -> str:
        caches = f"{self.kv_cache_dtype} caches"
        why = f" ({self.dtype_reason})" if self.dtype_reason else ""
        return f"{self.model}: {self.architecture}, {self.layers} layers, {self.dtype}{why} with {caches}"

    def lines(self) -> list[str]:
        """The same for people, one line each."""
        of_memory = "" if self.memory_bytes is None else f", of {size_text(self.memory_bytes)} memory"
        text = [
            self._heading(),
            f"weights {size_text(self.weight_bytes)} on each of {self.ranks} rank(s){of_memory}",
        ]
        if self.quantized:
            text.append(f"weights that stay quantized: as {self.formats_from} says")
        rows = [("caches", "layers", "row", "page tokens", "page", "pages", "bytes")]
        for group in self.groups:
            pages = "-" if group.pages is None else str(group.pages)
            total = "-" if group.bytes is None else size_text(group.bytes)
            if group.unit_pages and group.pages is not None:
                pages, total = f"up to {pages}", "shared"
            sizes = (size_text(group.row_bytes), str(group.page_tokens), size_text(group.page_bytes))
            rows.append((group.label, str(group.layers), *sizes, pages, total))
        if self.shared is not None:
            pool = self.shared
            rows.append(("shared pool", "", "", "", size_text(pool.unit_bytes), str(pool.units), size_text(pool.bytes)))
        text += table(rows)
        if self.shared is not None:
            parts = [f"{group.unit_pages} of {group.label}" for group in self.groups if group.unit_pages]
            text.append(
                f"each {size_text(self.shared.unit_bytes)} of the shared pool hold pages of one group, as sequences "
                f"need them: {' or '.join(parts)}"
            )
        text += self._draft_lines()
        if self.tokens is not None and self.cache_bytes is not None:
            text.append(
                f"caches {size_text(self.cache_bytes)}: {self.tokens} tokens of context, that is "
                f"{self.tokens / self.max_model_len:.1f} sequences of {self.max_model_len}, at most "
                f"{self.full_length_sequences} of full length at a time (--max-num-seqs {self.max_num_seqs})"
            )
            if self.shared is not None:
                short = min(SHORT_CONTEXT, self.max_model_len)
                text.append(f"or, of the same caches, {self.sequences} sequences of {short} tokens at a time")
            if self.few_tokens:
                text.append(
                    f"caches on a CPU have room for one sequence of full length and {CPU_TOKENS} tokens of others; "
                    "--memory-utilization or --kv-cache-memory-bytes gives them more"
                )
        for length, own, padded in self.density:
            text.append(
                f"a sequence of {length} tokens: {own:.0f} tokens per GiB; "
                f"{padded:.0f} if all caches had one common, padded page size"
            )
        if self.tensor_parallel is not None:
            text += self.tensor_parallel.lines()
        text += self.decode.lines()
        if self.memory_bytes is not None:
            text.append("fits" if self.refusal is None else f"does not fit: {self.refusal}")
        return text

    def _draft_lines(self) -> list[str]:
        """What speculative decoding adds to weights and caches."""
        parts = [f"{size_text(self.draft_weight_bytes)} of the weights"] if self.draft_weight_bytes else []
        for group in self.groups:
            if group.draft_page_bytes:
                layers = f", {group.draft_layers} of its layers" if group.draft_layers else ""
                parts.append(f"{size_text(group.draft_page_bytes)} of each page of {group.label}{layers}")
        return [f"of these for speculative decoding: {'; '.join(parts)}"] if parts else []


def report_memory(config: EngineConfig, memory: int | None = None, figures: ChipFigures | None = None) -> ModelReport:
    """The memory that `config` takes on a device with `memory` bytes; default: what is free on the device now.
    `figures`: plan for this chip, and by default for its memory; no device is asked then.

    Raises ModelError or ConfigError if the model cannot be served at all, whatever the memory.
    """
    config, memory = _as_planned(config, memory, figures)
    return _try(config, config.layout, LoadPlans(config, memory, _chip_of(figures)), memory, figures)


def report_model(config: EngineConfig, memory: int | None = None, figures: ChipFigures | None = None) -> ModelReport:
    """As `report_memory`, with what the ranks share, and how many the model can have. Where it cannot have so many, the
    error says so; where it does not fit, the refusal names a number that does."""
    config, memory = _as_planned(config, memory, figures)
    load_plans = LoadPlans(config, memory, _chip_of(figures))
    try:
        report = _try(config, config.layout, load_plans, memory, figures)
    except ModelError as error:
        if config.layout.size == 1:
            raise
        allowed = ", ".join(str(one.ranks) for one in rank_sizes(config, load_plans)[0])
        advice = f"numbers of ranks that the model allows: {allowed}"
        raise ModelError(config.model, [*error.reasons, advice]) from error
    report = dataclasses.replace(report, tensor_parallel=report_ranks(config, load_plans))
    if report.refusal is None:
        return report
    ranks = config.tensor_parallel_size * 2
    while ranks * config.layout.size // config.tensor_parallel_size <= _MAX_RANKS:
        try:
            layout = dataclasses.replace(config.layout, tensor=ranks)
            more = _try(config, layout, load_plans, memory, figures)
        except AllotropeError:
            # Its heads cannot be shared by so many; there is nothing to advise.
            break
        if more.refusal is None:
            either = "Or" if "Try" in report.refusal else "Try"
            return dataclasses.replace(report, refusal=f"{report.refusal} {either} --tensor-parallel-size {ranks}.")
        ranks *= 2
    return report


def _as_planned(
    config: EngineConfig, memory: int | None, figures: ChipFigures | None
) -> tuple[EngineConfig, int | None]:
    """`config` and `memory` of a plan, which needs no weights."""
    if not has_weights(config):
        # Those of a hub id need not be downloaded for this.
        config = dataclasses.replace(config, load_format="dummy")
    if figures is not None and memory is None:
        memory = int(figures.memory.value)
    return config, memory


def _formats_from(load_plan: LoadPlan, config: EngineConfig) -> str:
    if config.quantization is not None:
        return f"--quantization {config.quantization}"
    return "the checkpoint" if load_plan.checkpoint.has_weights else "config.json"


def has_weights(config: EngineConfig) -> bool:
    """Whether the weights lie on this machine, all of them, so that their headers say how they are stored."""
    if not Path(config.model).expanduser().exists():
        return False
    try:
        return bool(open_checkpoint(config.model, load_format=config.load_format).headers())
    except ModelError:
        # Loading says what is wrong with them; their config is enough for a plan.
        return False


def describe(
    load_plan: LoadPlan,
    memory: MemoryPlan | None,
    config: EngineConfig,
    available: int | None = None,
    figures: ChipFigures | None = None,
) -> ModelReport:
    """The report of a model whose caches are planned already; `memory` None: they do not fit `available` bytes.
    `figures`: of the chip that it is planned for, if one was named."""
    plans = {id(plan.group): plan for plan in memory.groups} if memory else {}
    groups = [(group, plans.get(id(group))) for group in load_plan.groups]
    shared = memory.shared if memory else None
    unit_pages = {} if shared is None else {id(load_plan.groups[one.group]): one.count for one in shared.layout.groups}
    draft = load_plan.meta_draft()
    return ModelReport(
        model=config.model,
        architecture=next(iter(load_plan.checkpoint.config.get("architectures") or ["?"])),
        layers=len(load_plan.spec.layers),
        dtype=str(load_plan.build.dtype).removeprefix("torch."),
        kv_cache_dtype=str(load_plan.build.kv_dtype).removeprefix("torch."),
        ranks=load_plan.build.parallel.layout.size,
        max_model_len=load_plan.max_model_len,
        max_num_seqs=load_plan.max_num_seqs,
        memory_bytes=available,
        weight_bytes=load_plan.weight_bytes,
        draft_weight_bytes=0 if draft is None else weight_bytes_of(draft),
        cache_bytes=memory.bytes if memory else None,
        tokens=memory.tokens if memory else None,
        sequences=memory.sequences if memory else None,
        density=tuple(_density(load_plan, length) for length in _lengths(load_plan.max_model_len)),
        groups=tuple(
            GroupReport(
                kind=group.kind,
                label=group.label,
                layers=len(group.layers),
                row_bytes=group.row_bytes,
                page_tokens=group.page_size,
                page_bytes=group.page_bytes,
                draft_layers=sum(layer >= len(load_plan.specs) for layer in group.layers),
                draft_page_bytes=group.page_bytes - without,
                unit_pages=unit_pages.get(id(group), 0),
                **_sizes(plan),
            )
            for (group, plan), without in zip(groups, _without_drafts(load_plan), strict=True)
        ),
        decode=report_decode(load_plan, figures),
        dtype_reason=resolve_dtype(config.dtype, load_plan.checkpoint, on_gpu=load_plan.build.chooser.chip.is_gpu)[1],
        few_tokens=wants_few_tokens(load_plan, config),
        formats_from=_formats_from(load_plan, config),
        quantized=bool(load_plan.build.formats),
        shared=None if shared is None else SharedReport(shared.layout.bytes, shared.units, shared.bytes),
    )


def _without_drafts(load_plan: LoadPlan) -> list[int]:
    """Bytes of a page of each group without speculative decoding."""
    plain = dataclasses.replace(load_plan.build, max_drafts=0)
    caches = [spec.caches() for spec in attention_specs(load_plan.spec, plain, load_plan.checkpoint.source)]
    return [
        sum(
            page_bytes(caches[member.layer][member.name], group.page_size)
            for member in group.members
            if member.layer < len(caches)
        )
        for group in load_plan.groups
    ]


def _sizes(plan: GroupPlan | None) -> dict[str, int | None]:
    if plan is None:
        return {"pages": None, "bytes": None, "tokens": None}
    # The null page holds no tokens.
    return {"pages": plan.pages, "bytes": plan.bytes, "tokens": (plan.pages - 1) * plan.group.page_size}


def _lengths(longest: int) -> list[int]:
    """Lengths to compare at: a short sequence pays most for padding, a long one least."""
    return sorted({min(1024, longest), min(8192, longest), longest})


def _density(load_plan: LoadPlan, length: int) -> tuple[int, float, float]:
    """`length`, and how many tokens a GiB serves in sequences of that length: as it is, and padded."""
    own = sum(group.live_pages(length, 1) * group.page_bytes for group in load_plan.groups)
    return length, length * 2**30 / own, length * 2**30 / _padded_bytes(load_plan, length)


def _padded_bytes(load_plan: LoadPlan, length: int) -> int:
    """Bytes of a sequence if every page had those of the largest: smaller ones take more tokens a page, and padding."""
    largest = max(group.page_bytes for group in load_plan.groups)
    pages = 0
    for group in load_plan.groups:
        wider = group.page_size if group.kind == "state" else group.page_size * (largest // group.page_bytes)
        pages += dataclasses.replace(group, page_size=wider).live_pages(length, 1)
    return pages * largest


def _chip_of(figures: ChipFigures | None) -> Chip | None:
    return None if figures is None else figures.chip


def _try(
    config: EngineConfig,
    layout: RankLayout,
    load_plans: LoadPlans,
    memory: int | None,
    figures: ChipFigures | None,
) -> ModelReport:
    """The report for the ranks of a layout, with the reason if it does not fit."""
    load_plan = load_plans.of(layout)
    available = free_of_rank(load_plan, config) if memory is None else memory
    try:
        plan = plan_caches(load_plan, config, available)
    except ConfigError as error:
        reason = str(error).removeprefix("the caches do not fit: ")
        return dataclasses.replace(describe(load_plan, None, config, available, figures), refusal=reason)
    report = describe(load_plan, plan, config, available, figures)
    room = available - load_plan.weight_bytes
    if plan.bytes <= room:
        return report
    text = f"weights and caches take {size_text(load_plan.weight_bytes + plan.bytes)} of {size_text(available)}."
    # Weights that do not fit by themselves fit beside no cache.
    advice = f" Try --kv-cache-memory-bytes {room}." if room > 0 else ""
    return dataclasses.replace(report, refusal=text + advice)
