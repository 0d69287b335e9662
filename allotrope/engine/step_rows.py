"""The rows of the scheduler as a step's plan, its sampling and its drafting see them.

Must not know: how a step is launched or read.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

from allotrope.engine.drafting import Wanted
from allotrope.engine.inputs import SampledSequence, StepRow
from allotrope.engine.sampling_batch import RowSampling
from allotrope.engine.scheduler import Row
from allotrope.engine.sequence import PLACEHOLDER


def step_rows(row: Row, num_logits: int, prev: int) -> list[StepRow]:
    """The row's own, then one for each draft. `prev`: the place of the sequence in the step before, whose tokens are
    yet to be read, or -1."""
    seq = row.seq
    ids, prev_sequence = tuple(seq.ids[seq.computed : row.end]), prev if seq.unread_drafts else -1
    index, next_id = prev if ids[-1] == PLACEHOLDER else -1, -1 if row.samples else seq.ids[row.end]
    own = seq.pages, seq.slots
    rows = [StepRow(ids, seq.computed, *own, num_logits, index, 0, seq.replay, next_id, prev_sequence)]
    for i, draft in enumerate(row.drafts):
        index = row.draft_indices[i] if draft == PLACEHOLDER else -1
        rows.append(StepRow((draft,), row.end + i, *own, 1, index, i + 1, 0, -1, prev_sequence))
    return rows


def decode_rows(rows: abc.Sequence[Row]) -> int:
    """The rows of a step where all have one token, drafts among them, else 0."""
    return sum(1 + len(row.drafts) for row in rows) if all(row.tokens == 1 for row in rows) else 0


def wanted_drafts(rows: abc.Sequence[Row], unstored: int | None = None) -> list[Wanted]:
    """The most drafts of each sequence behind the tokens that a step samples from `rows`. `unstored`: those for which
    a draft model stores no token of its own; None where no model makes them."""
    found = []
    for row in rows:
        seq = row.seq
        # The token that the step samples may be there already.
        output_len = seq.output_len + seq.unread_drafts + int(row.end == len(seq.ids))
        left = seq.max_output_len - output_len - 1
        found.append((seq, left if unstored is None else min(left, unstored + row.lookahead)))
    return found


def sampled_sequences(rows: abc.Sequence[Row], forced: Iterator[int | None]) -> Iterator[SampledSequence]:
    """The sequences that a rank samples from in a step. `forced`: of each of them, as in `InFlightStep`."""
    start = 0
    for row in rows:
        if row.samples:
            count, drafts = next(forced), len(row.drafts)
            reserved = row.end + row.seq.unread_drafts + drafts + row.lookahead
            yield SampledSequence(start + row.tokens - 1, drafts, reserved, -1 if count is None else count)
        start += row.tokens + len(row.drafts)


def sampling_rows(ready: abc.Sequence[Row]) -> list[RowSampling]:
    """Per row, its sequence as sampling sees it, and behind each of its drafts."""
    records = []
    for row in ready:
        sampling = row.seq.sampling
        sampling.drafts = row.drafts
        records.append(sampling)
        if row.drafts:
            records += [sampling.after_drafts(count) for count in range(1, len(row.drafts) + 1)]
    return records
