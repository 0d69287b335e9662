"""The roofline cost of compressed sparse attention."""

from __future__ import annotations

import torch

from allotrope.attention.cache_layout import row_bytes
from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.csa.spec import CsaSpec

MATMUL_SHARE = 0.15
"""Of the rate of a large matrix product, what prompts reach on an H200: 0.11 with all entries, 0.22 with the top-k
(`python bench/kernels.py --family csa --case prefill`)."""


def gathered(spec: CsaSpec, lengths: Lengths) -> int:
    """Bytes of the top-k indices of the queries of prompts that the ranks share."""
    if spec.indexer is None or spec.indexer.ranks == 1:
        return 0
    topk = spec.indexer.topk
    return int((lengths.visible // spec.ratio > topk)[lengths.of_prompts].sum()) * topk * torch.int32.itemsize


def cost(spec: CsaSpec, lengths: Lengths) -> StepCost:
    """The cost of one step. Window entries and visible or top-k compressed entries are read once each. Index keys are
    read where more entries exist than the top-k; queries of prompts are scored on one of the ranks that share them.
    Each token writes its compressor states."""
    new, visible, caches, heads = lengths.new, lengths.visible, spec.caches(), spec.num_heads
    rows, pairs = lengths.within(spec.window), int(visible.clamp(max=spec.window).sum())
    total = StepCost(2 * lengths.tokens * heads * spec.head_dim * lengths.itemsize)
    if spec.ratio:
        states = row_bytes(caches["state"]) + (row_bytes(caches["index_state"]) if spec.indexer else 0)
        total += StepCost(lengths.tokens * states)
        entries, existing = visible // spec.ratio, lengths.kv // spec.ratio
        max_entries = int(existing.max()) if spec.indexer is None else spec.indexer.topk
        rows += int(existing.minimum(max_entries * new).sum())
        pairs += int(entries.clamp(max=max_entries).sum())
        if spec.indexer is not None:
            width, scored = spec.indexer.num_heads * spec.indexer.head_dim, entries > max_entries
            keys = int(existing[existing > max_entries].sum()) * row_bytes(caches["index"])
            index_pairs = int(entries[scored & ~lengths.of_prompts].sum())
            index_pairs += int(entries[scored & lengths.of_prompts].sum()) // spec.indexer.ranks
            total += StepCost(keys + int(scored.sum()) * width * lengths.itemsize, 2 * width * index_pairs)
    return total + StepCost(rows * row_bytes(caches["window"]), 4 * heads * spec.head_dim * pairs)
