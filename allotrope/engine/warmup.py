"""The steps of the warm-up: their kernels are compiled several at once, before the first step runs."""

from __future__ import annotations

import functools
import gc
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from allotrope.cache.arena import Arena
from allotrope.cache.groups import CacheGroup
from allotrope.cache.memory import GroupPlan, MemoryPlan, group_bytes
from allotrope.config import EngineConfig
from allotrope.engine.inputs import SampledSequence, StepPlan, StepRow
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.model_runner import GraphShapes, ModelRunner
from allotrope.engine.profile import largest_sampling_step, longest_prompts
from allotrope.grammars.backend import words
from allotrope.graphs.captured import decode_sizes
from allotrope.kernels.warmup import warm_up_steps
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.ops.sampling.spec import LogitsProcessors
from allotrope.ops.token_mask import BitMask

log = logging.getLogger("allotrope.engine")

# Tokens of a chunk, and of the context before it: the number of keys decides the width of the tiles of their scores.
_CHUNK = 1000
_PREFIXES = (3000, 7000, 15000, 100_000)
# Context of a decoding sequence: short ones are attended to at once, long ones in KV splits.
_CONTEXTS = (1000, 100)


def warm_up(
    model: Decoder,
    draft_model: DraftModel | None,
    load_plan: LoadPlan,
    config: EngineConfig,
    shapes: GraphShapes | None,
) -> None:
    """Compile the kernels of prompts, decode steps, draft passes and sampling; nothing else remains.

    `shapes`: how decode and prefill steps will run.
    """
    device, ranks = load_plan.build.device, load_plan.build.parallel.layout.size
    warm_up_steps(functools.partial(_warm_up, model, draft_model, load_plan, config, shapes), device, ranks, log)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@torch.inference_mode()
def _warm_up(
    model: Decoder,
    draft_model: DraftModel | None,
    load_plan: LoadPlan,
    config: EngineConfig,
    shapes: GraphShapes | None,
) -> None:
    device, groups, data_ranks = load_plan.build.device, load_plan.groups, load_plan.build.parallel.layout.data
    # Beside the null page, one that all rows share.
    memory = MemoryPlan(tuple(GroupPlan(group, 2, group_bytes(group, 2)) for group in groups), 0, 0)
    arena = Arena(memory, load_plan.num_layers, load_plan.shares, device)
    model_runner = ModelRunner(model, load_plan, groups, arena, shapes, draft_model=draft_model)
    for step in _prompts(load_plan, 0 if shapes is None else shapes.prefill_tokens):
        model_runner.run_on_all_ranks(StepPlan(tuple(_row(groups, *lengths) for lengths in step)))
        if draft_model is not None:
            model_runner.run_drafts(torch.zeros(len(step) * data_ranks, dtype=torch.int64, device=device))
    token = _row(groups, 1, min(_CONTEXTS[0], load_plan.max_model_len - 1))
    for size in _launched_differently(decode_sizes(load_plan.max_decodes)):
        sequences = tuple(SampledSequence(i, 0, token.context + 1) for i in range(min(size, load_plan.max_num_seqs)))
        plan = StepPlan((token,) * size, sequences=sequences, passes=load_plan.max_drafts)
        logits = model_runner.run_on_all_ranks(plan)
        if draft_model is not None:
            model_runner.run_drafts(torch.zeros(size * data_ranks, dtype=torch.int64, device=device))
        if load_plan.build.parallel.layout.size > 1:
            model_runner.run_on_all_ranks(StepPlan((token,) * size, greedy=True))
    if draft_model is not None:
        # Passes that store alone rotate keys without queries.
        for row in (token, _row(groups, min(_CHUNK, load_plan.step_tokens, load_plan.max_model_len), 0)):
            model_runner.run_on_all_ranks(StepPlan((row,)))
            model_runner.run_drafts(torch.zeros(data_ranks, dtype=torch.int64, device=device))
    if not model.stage.is_first:
        # Sampling is the first stage's.
        return
    truncated = largest_sampling_step(load_plan.max_num_seqs, device)
    processors = LogitsProcessors(bits=_mask(logits))
    load_plan.sampler()(logits, replace(truncated, untruncated=truncated.truncated, processors=processors))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompts(load_plan: LoadPlan, prefill_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """The largest step, the largest of those that are padded, shorter prompts, late chunks of a long one, and prompts
    beside decoding sequences: tokens and context of each row. `prefill_tokens`: as in `GraphShapes`.
    """
    longest = load_plan.max_model_len
    largest = longest_prompts(load_plan.step_tokens, longest)
    yield [(tokens, 0) for tokens in sorted(largest, key=lambda tokens: tokens > 1)]
    max_tokens = largest[0]
    if 0 < prefill_tokens < max_tokens:
        yield [(prefill_tokens, 0)]
    yield from ([(tokens, 0)] for tokens in _shorter(max_tokens))
    chunk = min(_CHUNK, max_tokens)
    yield from ([(chunk, prefix)] for prefix in _PREFIXES if prefix + chunk <= longest)
    if max_tokens > 16:
        # Side by side, so that queries of both share a launch.
        yield [(max_tokens // 2 - 3, 0), (max_tokens // 2 - 5, 0)]
    contexts = [context for context in _CONTEXTS if context < longest and max_tokens > 1]
    for first in range(len(contexts)):
        yield [*((1, context) for context in contexts[first:]), (chunk, 0)]


def _shorter(max_tokens: int) -> list[int]:
    """A length just below each power of two from 8 to `max_tokens`, longest first.

    Launches are chosen by power of two, and an odd length stands for all that are no multiples of 16.
    """
    return [2**power - 3 for power in range(max_tokens.bit_length(), 2, -1) if 2**power - 3 < max_tokens]


def _row(groups: Sequence[CacheGroup], tokens: int, context: int) -> StepRow:
    """`tokens` tokens after `context` others, all in page 1."""
    pages = [array("q", (1,)) * group.pages_for(context + tokens) for group in groups]
    return StepRow((0,) * tokens, context, pages, [1] * len(groups), num_logits=1)


def _mask(logits: torch.Tensor) -> BitMask:
    """A grammar's mask of the first of `logits` [B, V], which allows all."""
    device = logits.device
    bits = torch.full((1, words(logits.shape[1])), -1, dtype=torch.int32, device=device)
    return BitMask(torch.zeros(1, dtype=torch.int64, device=device), bits)


def _launched_differently(sizes: Sequence[int]) -> list[int]:
    """The largest of those sizes whose kernels are launched alike: of one power of two, multiples of 16 or not."""
    return list({((size - 1).bit_length(), size % 16 == 0): size for size in sizes}.values())
