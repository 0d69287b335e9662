"""Cases of rows with drafts: padding rows, rows that stay, sequences without drafts, pages that end, forced counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.draft_rows.spec import DraftRowsSpec, MovedRows, PagedSlots

_CONTEXT = 64


def _spec(drafts: int, dtype: torch.dtype) -> DraftRowsSpec:
    return DraftRowsSpec(drafts)


def _paged(draw: Draw, rows: int, sizes: tuple[int, ...]) -> list[PagedSlots]:
    """Tables with some pages that are not there, in rows wider than what is read."""
    found = []
    for size in sizes:
        width = _CONTEXT // size
        table = draw.integers(-1, 50, rows, width + 3)[:, :width]
        found.append(PagedSlots(size, table, draw.integers(-1, 9, rows)))
    return found


def _advance_rows(rows: int, sizes: tuple[int, ...], generator: torch.Generator, dtype: Any, device: Any) -> Any:
    draw = Draw(generator, device)
    moved = MovedRows(
        ids=draw.integers(0, 100, rows),
        prev_sampled_indices=draw.integers(-1, 20, rows),
        prev_sequence=draw.integers(-1, 7, rows),
        positions=draw.integers(0, _CONTEXT - 8, rows),
        seq_lens=draw.integers(0, _CONTEXT - 8, rows, dtype=torch.int32),
        num_rows=draw.integers(0, 4, rows, dtype=torch.int32),
        replay=draw.integers(0, 4, rows, dtype=torch.int32),
        paged=_paged(draw, rows, sizes),
    )
    return moved, draw.integers(-1, 100, 20), draw.integers(0, 8, 7)


def _place_sampled(rows: int, generator: torch.Generator, dtype: Any, device: Any) -> Any:
    draw = Draw(generator, device)
    next_ids = torch.where(draw.integers(0, 3, rows) > 0, -1, draw.integers(0, 90, rows))
    return next_ids, draw.integers(-1, 100, int((next_ids < 0).sum()))


def _count_accepted(sequences: int, drafts: int, generator: torch.Generator, dtype: Any, device: Any) -> Any:
    draw = Draw(generator, device)
    num_drafts = draw.integers(0, drafts + 1, sequences)
    first = (1 + num_drafts).cumsum(0) - (1 + num_drafts)
    first[-2:] = -1
    tokens = int((1 + num_drafts).sum()) + 3
    ids = draw.integers(0, 2, tokens)
    next_ids = torch.where(draw.integers(0, 6, tokens) > 0, draw.integers(0, 2, tokens), -1)
    forced = torch.where(draw.integers(0, 3, sequences) > 0, -1, draw.integers(0, drafts + 2, sequences))
    table = torch.stack([first, num_drafts, draw.integers(0, 9, sequences), forced])
    # Columns of a wider array.
    wide = torch.cat([table, table], 1)[:, :sequences]
    return ids, next_ids, wide, drafts


def _advance_chain(rows: int, sizes: tuple[int, ...], generator: torch.Generator, dtype: Any, device: Any) -> Any:
    draw = Draw(generator, device)
    positions = draw.integers(0, _CONTEXT - 8, rows)
    seq_lens = torch.where(draw.integers(0, 5, rows) > 0, positions + 1, 0).to(torch.int32)
    return positions, seq_lens, draw.integers(0, 5, rows), 2, _paged(draw, rows, sizes)


def _cases(made: dict[str, Any], drafts: int = 3) -> dict[str, OpCase]:
    return {name: OpCase(partial(_spec, drafts), make, dtypes=(torch.float32,)) for name, make in made.items()}


_SIZES = {"one group": (16,), "two groups": (16, 4), "no pages": ()}

CASES: Cases = {
    "advance_rows": _cases(
        {
            f"{rows} rows, {name}": partial(_advance_rows, rows, sizes)
            for name, sizes in _SIZES.items()
            for rows in (5, 200)
        }
    ),
    "place_sampled": _cases({f"{rows} rows": partial(_place_sampled, rows) for rows in (1, 37, 1500)}),
    "count_accepted": _cases(
        {f"{n} sequences, {k} drafts": partial(_count_accepted, n, k) for n, k in ((3, 1), (9, 3), (150, 7))}, 7
    ),
    "advance_chain": _cases(
        {
            f"{rows} rows, {name}": partial(_advance_chain, rows, sizes)
            for name, sizes in _SIZES.items()
            for rows in (5, 200)
        }
    ),
}
