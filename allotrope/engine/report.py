"""Limits and counts of an engine, as plain data that may cross a process border.

Must not import torch: the server's process reads these without loading a model library.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The limits of the loaded model and its caches; fixed from start to end.

    `max_num_seqs`: most sequences of a step, on all data-parallel ranks. `vocab_size`: ids that the output layer
    scores. `eos_ids`: ids that end a sequence by the checkpoint's word.
    `device_type`: kind of device, such as "cpu" or "cuda".
    `sampling_defaults`: fields of `SamplingParams` for requests that do not set them.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    eos_ids: tuple[int, ...] = ()
    model_dtype: str = ""
    device_type: str = ""
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CacheGroupSummary:
    """One cache group of a rank. `label`: as in `EngineStats.pages_used`. `page_tokens`: 1 for states. `pages`: with
    the null page. `bytes`: of all pages. In a shared pool `pages` are the most, and `bytes` is 0."""

    label: str
    layers: int
    page_tokens: int
    page_bytes: int
    pages: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """The loaded model and the plan of one rank's memory.

    `tokens`: context tokens that the caches hold at once, over all sequences. `sequences`: how many of full length.
    `draft_bytes`: what speculative decoding takes of weights and caches. `shared_bytes`: of the pool that groups share.
    """

    architecture: str
    layers: int
    dtype: str
    kv_cache_dtype: str
    ranks: int
    weight_bytes: int
    cache_bytes: int
    draft_bytes: int
    tokens: int
    sequences: int
    groups: tuple[CacheGroupSummary, ...]
    shared_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """Counts of speculative decoding since the start.

    `drafts`: times that a sequence's drafts were verified. `draft_tokens`: tokens of them. `accepted_tokens`: those
    that were accepted. `accepted_per_position`: the same by position in the draft. `reached_per_position`: drafts whose
    former ones were all accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    reached_per_position: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """The counts of one data-parallel rank. `requests`: that it got since the start, and `requests_by_prefix` those
    which it got for the longest cached part of their prompt. The rest as in `EngineStats`."""

    running: int = 0
    waiting: int = 0
    pages_used: dict[str, int] = field(default_factory=dict)
    pages_total: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    requests: int = 0
    requests_by_prefix: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The counts of an engine after a step. Counts with no unit in the name are requests or events since the start.

    `pages_used`, `pages_total`: pages per cache group. Pages that only the prefix cache holds count as free. Where
    groups share a pool, the total of a group is what it uses and what it could get now.
    `prefix_queries`, `prefix_hits`: prompt tokens looked up in the prefix cache, and those it had.
    `prefix_lost`: prompt tokens that were computed again although they had been cached, by reason.
    `speculation`: counts of speculative decoding; None where it is off. `ranks`: of each data-parallel rank, none where
    there is one.
    """

    running: int = 0
    waiting: int = 0
    pages_used: dict[str, int] = field(default_factory=dict)
    pages_total: dict[str, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_lost: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    speculation: SpeculationStats | None = None
    ranks: tuple[RankStats, ...] = ()


def numbered(names: list[str]) -> list[str]:
    """The names, with numbers where two are equal."""
    return [name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}" for i, name in enumerate(names)]
