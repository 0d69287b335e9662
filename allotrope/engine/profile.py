"""The memory that a step takes of a GPU beside weights and caches, measured by running the largest step there is."""

from __future__ import annotations

import gc
import logging
from array import array
from collections.abc import Callable

import torch

from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.cache.memory import GroupPlan, MemoryPlan, group_bytes
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_within
from allotrope.engine.inputs import StepPlan, StepRow
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.memory import utilization
from allotrope.engine.model_runner import ModelRunner
from allotrope.engine.scheduler import PROMPT_LOGPROBS_CHUNK
from allotrope.kernels.chip import free_memory
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.ops.sampling.spec import RandomRows, SamplingStep

log = logging.getLogger("allotrope.engine")


@torch.inference_mode()
def measure_peak(model: Decoder, draft_model: DraftModel | None, load_plan: LoadPlan, config: EngineConfig) -> int:
    """Peak bytes of two steps beside weights and caches: one of the most tokens, and one that samples a full batch."""
    device, data_ranks = load_plan.build.device, load_plan.build.parallel.layout.data
    lengths = longest_prompts(load_plan.step_tokens, load_plan.max_model_len)
    rows, memory = _rows(load_plan.groups, lengths)
    arena = Arena(memory, load_plan.num_layers, load_plan.shares, device)
    model_runner = ModelRunner(model, load_plan, load_plan.groups, arena, draft_model=draft_model)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model_runner.run_on_all_ranks(StepPlan(rows))
    if draft_model is not None:
        model_runner.run_drafts(torch.zeros(len(rows) * data_ranks, dtype=torch.int64, device=device))
    # Every rank computes its part of the logits of all data-parallel ranks.
    sampled = load_plan.max_decodes * data_ranks
    hidden = torch.zeros(sampled, model.spec.hidden, dtype=model.dtype, device=device)
    if model.stage.is_first:
        load_plan.sampler()(model.logits(hidden), largest_sampling_step(sampled, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del model_runner, arena, hidden
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def plan_device(
    load_plan: LoadPlan, config: EngineConfig, free: int, peak: int, graphs: int, min_of_ranks: Callable[[int], int]
) -> MemoryPlan:
    """The memory plan of a GPU that had `free` bytes before the model was loaded; `peak`: see `measure_peak`. `graphs`:
    bytes that steps need again in CUDA graphs.

    `min_of_ranks`: the smallest of the numbers that the ranks call it with. Raises ConfigError where no sequence of
    full length fits.
    """
    device = load_plan.build.device
    free_now = free_memory(device)
    share = utilization(config, device)
    used = free - free_now
    room = int(free * share) - used - peak - graphs
    log.info(
        "memory of %s: %.2f GB were free, of which %.0f%% may be used; weights and libraries take %.2f GB, the largest "
        "step %.2f GB for a while, CUDA graphs of prefill steps %.2f GB; %.2f GB are left for caches",
        *(device, free / 1e9, 100 * share, used / 1e9, peak / 1e9, graphs / 1e9, max(0, room) / 1e9),
    )
    return plan_within(load_plan, config, min_of_ranks(room), free)


def longest_prompts(tokens: int, longest: int) -> list[int]:
    """Prompts of `tokens` tokens together, none longer than a sequence may be; the short rest is last."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + [rest] * bool(rest)


def _rows(groups: tuple[CacheGroup, ...], lengths: list[int]) -> tuple[tuple[StepRow, ...], MemoryPlan]:
    """Whole prompts with pages of their own, and the plan of just these pages."""
    plans = []
    tables: list[list[range]] = []
    for group in groups:
        counts = [group.pages_for(length) for length in lengths]
        starts = [1 + sum(counts[:i]) for i in range(len(counts))]
        tables.append([range(start, start + count) for start, count in zip(starts, counts, strict=True)])
        pages = 1 + sum(counts)
        plans.append(GroupPlan(group, pages, group_bytes(group, pages)))
    rows = [
        StepRow(
            ids=(0,) * length,
            context=0,
            pages=[array("q", table[i]) for table in tables],
            slots=[i + 1] * len(groups),
            # As many as a step computes log-probabilities of, though of one prompt.
            num_logits=min(length, PROMPT_LOGPROBS_CHUNK) if i == 0 else 1,
        )
        for i, length in enumerate(lengths)
    ]
    ordered = sorted(rows, key=lambda row: len(row.ids) > 1)
    return tuple(ordered), MemoryPlan(tuple(plans), sum(lengths), len(lengths))


def largest_sampling_step(rows: int, device: torch.device) -> SamplingStep:
    """The sampling step that takes the most memory: every row sorts the whole vocabulary."""

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows, 1), value, dtype=dtype, device=device)

    random = RandomRows(
        rows=torch.arange(rows, device=device),
        temperature=column(1.0, torch.float32),
        min_p=None,
        top_p=column(0.9, torch.float64),
        top_k=column(0, torch.int64),
        uniform=column(0.5, torch.float64),
        top_ks=(0,) * rows,
    )
    return SamplingStep(greedy=None, truncated=random)
