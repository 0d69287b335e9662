"""`gather_logprobs` for a GPU: log-probability, rank and best tokens of a row, without sorting the vocabulary.

A row is read in segments by many programs, which keep their best, then put together by one. Memory traffic: the logits
once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.logprobs.spec import LogprobsTensors

SEGMENT = 4096
NOTHING = tl.constexpr(-0x8000000000000000)
"""Below every token, as `key * 2^32 + (vocab - 1 - id)`, which sorts as ranks do."""
_NO_NUMBER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(z):
    """int32 that sorts as the float does; equal floats have equal keys, and NaN is above all."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(z == z, ordered, _NO_NUMBER)


@triton.jit
def logit_of(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@pdl_jit
def segment_scores_kernel(
    logits, token_ids, peaks, sums, ranks, tops, count, vocab, row_stride, segments, SEGMENT: tl.constexpr
):  # fmt: skip
    """Of each segment: largest logit, sum of exponentials below it, tokens above the scored one, the best `count`."""
    gdc_wait()
    gdc_launch_dependents()
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    mask = column < vocab
    z = tl.load(logits + row * row_stride + column, mask=mask, other=-float("inf")).to(tl.float32)
    scored = tl.load(logits + row * row_stride + tl.maximum(tl.load(token_ids + row), 0)).to(tl.float32)
    max_logit = highest(z, 0)
    base = tl.where(max_logit == -float("inf"), 0.0, max_logit)
    index = row * segments + segment
    tl.store(peaks + index, max_logit)
    tl.store(sums + index, tl.sum(tl.exp(z - base), axis=0))
    tl.store(ranks + index, tl.sum((z > scored).to(tl.int32), axis=0))
    packed = tl.where(mask, key_of(z).to(tl.int64) * 4294967296 + (vocab - 1 - column), NOTHING)
    for i in range(count):
        best = tl.max(packed, axis=0)
        tl.store(tops + index * count + i, best)
        packed = tl.where(packed == best, NOTHING, packed)


@pdl_jit
def scores_kernel(
    logits, token_ids, peaks, sums, ranks, tops, logprobs, rank, top_ids, top_logprobs,
    count, vocab, row_stride, segments, SEGMENTS: tl.constexpr, TOPS: tl.constexpr,
):  # fmt: skip
    """Put the segments of a row together."""
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    mask, index = segment < segments, row * segments + segment
    segment_max = tl.load(peaks + index, mask=mask, other=-float("inf"))
    max_logit = highest(segment_max, 0)
    total = tl.sum(tl.load(sums + index, mask=mask, other=0.0) * tl.exp(segment_max - max_logit), axis=0)
    norm = tl.log(total)
    scored = tl.load(logits + row * row_stride + tl.maximum(tl.load(token_ids + row), 0)).to(tl.float32)
    tl.store(logprobs + row, scored - max_logit - norm)
    tl.store(rank + row, (tl.sum(tl.load(ranks + index, mask=mask, other=0), axis=0) + 1).to(tl.int64))
    if TOPS > 0:
        each = tl.arange(0, TOPS)
        packed = tl.load(tops + row * segments * count + each, mask=each < segments * count, other=NOTHING)
        for i in range(count):
            best = tl.max(packed, axis=0)
            tl.store(top_ids + row * count + i, vocab - 1 - (best & 0xFFFFFFFF))
            tl.store(top_logprobs + row * count + i, logit_of((best >> 32).to(tl.int32)) - max_logit - norm)
            packed = tl.where(packed == best, NOTHING, packed)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobsTensors:
    """As `reference.gather_logprobs`."""
    size, vocab = logits.shape
    count = min(count, vocab)
    segments = cdiv(vocab, SEGMENT)
    peaks, sums = (logits.new_empty((size, segments), dtype=torch.float32) for _ in range(2))
    ranks = logits.new_empty((size, segments), dtype=torch.int32)
    tops = logits.new_empty((size, segments, count), dtype=torch.int64)
    out = LogprobsTensors.unfilled(logits, token_ids, count)
    row = (count, vocab, logits.stride(0), segments)
    if size:
        segment_scores_kernel[(size, segments)](
            logits, token_ids, peaks, sums, ranks, tops, *row, SEGMENT=SEGMENT, num_warps=8
        )
        scores_kernel[(size,)](
            logits, token_ids, peaks, sums, ranks, tops, out.logprobs, out.ranks, out.top_ids, out.top_logprobs, *row,
            SEGMENTS=next_power_of_2(segments),
            TOPS=next_power_of_2(segments * count) if count else 0, num_warps=4,
        )  # fmt: skip
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Of a vocabulary of 128k."""
    kinds = dict.fromkeys(("logits", "peaks", "sums", "logprobs", "top_logprobs"), "*fp32") | {"ranks": "*i32"}
    kinds |= dict.fromkeys(("vocab", "row_stride", "segments", "count"), "i32")
    sizes = {"SEGMENT": SEGMENT, "SEGMENTS": 32, "TOPS": 256}
    made = []
    for kernel, warps in ((segment_scores_kernel, 8), (scores_kernel, 4)):
        constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
        signature = {name: kinds.get(name, "*i64") for name in kernel.arg_names if name not in sizes}
        made.append(Specialization(kernel.__name__.removesuffix("_kernel"), kernel, signature, constants, warps, 1))
    return made
