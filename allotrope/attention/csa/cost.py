"""The roofline cost of compressed sparse attention."""

from __future__ import annotations

from allotrope.attention.cache_layout import row_bytes
from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.csa.spec import CsaSpec


def cost(spec: CsaSpec, lengths: Lengths) -> StepCost:
    """Entries of the window, and the compressed entries that are visible or chosen, are read once each. Index keys are
    read where more entries exist than are chosen. Each token writes what its compressed entry is made from."""
    new, visible, caches, heads = lengths.new, lengths.visible, spec.caches(), spec.num_heads
    rows, pairs = lengths.within(spec.window), int(visible.clamp(max=spec.window).sum())
    found = StepCost(2 * lengths.tokens * heads * spec.head_dim * lengths.itemsize)
    if spec.ratio:
        states = row_bytes(caches["state"]) + (row_bytes(caches["index_state"]) if spec.indexer else 0)
        found += StepCost(lengths.tokens * states)
        entries, existing = visible // spec.ratio, lengths.kv // spec.ratio
        max_entries = int(existing.max()) if spec.indexer is None else spec.indexer.topk
        rows += int(existing.minimum(max_entries * new).sum())
        pairs += int(entries.clamp(max=max_entries).sum())
        if spec.indexer is not None:
            width, scored = spec.indexer.num_heads * spec.indexer.head_dim, entries[entries > max_entries]
            keys = int(existing[existing > max_entries].sum()) * row_bytes(caches["index"])
            found += StepCost(keys + len(scored) * width * lengths.itemsize, 2 * width * int(scored.sum()))
    return found + StepCost(rows * row_bytes(caches["window"]), 4 * heads * spec.head_dim * pairs)
