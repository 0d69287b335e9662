"""Rows of steps with draft tokens: moving them on by accepted drafts, and counting these, on the device."""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.draft_rows import reference
from allotrope.ops.draft_rows.reference import known_ids
from allotrope.ops.draft_rows.spec import AcceptedDrafts, ChainRows, DraftRowsSpec, MovedRows, PagedSlots

__all__ = [
    "ADVANCE_CHAIN",
    "ADVANCE_ROWS",
    "COUNT_ACCEPTED",
    "PLACE_SAMPLED",
    "AcceptedDrafts",
    "ChainRows",
    "DraftRowsSpec",
    "MovedRows",
    "PagedSlots",
    "known_ids",
]


def _op(name: str, summary: str) -> Op:
    return Op(
        name,
        summary,
        (
            Backend("triton", needs_triton, lazily("allotrope.ops.draft_rows.triton", name)),
            Backend("reference", runs_anywhere, getattr(reference, name)),
        ),
    )


ADVANCE_ROWS = _op("advance_rows", "position += drafts that the step before accepted; its tokens for placeholders")
PLACE_SAMPLED = _op("place_sampled", "sampled tokens in the place of unknown ones, in order")
COUNT_ACCEPTED = _op("count_accepted", "the first drafts of each sequence that are what was sampled")
ADVANCE_CHAIN = _op("advance_chain", "position and slot of a chain's next draft, as far as it has pages")
