"""A sequence with drafts, as requests that share its pages, against plain decoding of the same tokens one by one.

Every row of a verify step gives the bits of plain decoding, also the rows behind a wrong draft. What wrong drafts leave
in the caches is overwritten before it is read. The number of KV splits is held: where it follows from the size of the
step, another size sums in another order.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from device_under_test import DEVICE

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import (
    BatchLayout,
    BatchTensors,
    PageIndex,
    VerifyRows,
    VerifyTensors,
    index_pages,
)
from allotrope.attention.check import Case, cases
from allotrope.attention.family import boundaries
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay
from allotrope.kernels.chip import CHIPS
from allotrope.kernels.chip import CPU as CPU_CHIP

FP8 = torch.float8_e4m3fn
MAX_DRAFTS = 3


@dataclass(frozen=True)
class Row:
    """One new token of a decode: of `sequence`, at `position`; `wrong`: a draft that the sequence does not go on
    with."""

    sequence: int
    position: int
    wrong: bool = False


@dataclass(frozen=True)
class Prompt:
    """New tokens of a sequence behind its first `context`."""

    sequence: int
    context: int
    tokens: int


@dataclass(frozen=True)
class Turn:
    """One verify step. `rows`: of each sequence, its next token and then its drafts; `accepted`: how many of these are
    right, the next token included."""

    rows: tuple[tuple[Row, ...], ...]
    accepted: tuple[int, ...]
    prompts: tuple[Prompt, ...]


def turns(case: Case, lengths: Sequence[int], seed: int) -> Iterator[Turn]:
    """Random sequences with 0 to `MAX_DRAFTS` drafts beside random prompts, until all of `lengths` are done.

    A sequence begins with a prompt or without context. Half of the prompts end a few tokens before a length at which
    the layer computes in another way, so that drafts cross it.
    """
    choose = random.Random(seed)
    edges = [case.page_size, 2 * case.page_size, *boundaries(case.spec)]
    done = [0] * len(lengths)
    while remaining := [i for i, n in enumerate(lengths) if done[i] < n]:
        rows, accepted, prompts = [], [], []
        for i in choose.sample(remaining, choose.randint(1, len(remaining))):
            left = lengths[i] - done[i]
            if left > 1 and choose.random() < (0.7 if done[i] == 0 else 0.3):
                before = [edge - choose.randint(0, MAX_DRAFTS) - done[i] for edge in edges]
                near = [n for n in before if 1 < n < left]
                tokens = choose.choice(near) if near and choose.random() < 0.5 else choose.randint(2, left)
                prompts.append(Prompt(i, done[i], tokens))
                done[i] += tokens
                continue
            drafts = choose.randint(0, min(MAX_DRAFTS, left - 1))
            right = choose.randint(0, drafts)
            rows.append(tuple(Row(i, done[i] + j, j > right) for j in range(drafts + 1)))
            accepted.append(right + 1)
            done[i] += right + 1
        yield Turn(tuple(rows), tuple(accepted), tuple(prompts))


class Player(Replay):
    """A replay whose steps name their tokens. `other`: the inputs of drafts that are wrong."""

    def __init__(self, case: Case, backend: AttentionBackend, seed: int, device: str) -> None:
        super().__init__(case, backend, device, seed)
        self.inputs = case.inputs(0)
        self.layer = {name: t if t is None else t.to(self.device) for name, t in self.inputs.layer.items()}
        self.other = case.inputs(1).tokens
        if "kv_scale" in FAMILIES[case.spec.family].scale_names and is_plain_fp8(case):
            self.layer["kv_scale"] = 0.02  # type: ignore[assignment]

    def launch(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Prompt] = (),
        *,
        verify: bool = False,
        padding: int = 0,
        written: Sequence[Row] | None = None,
        caches: Collection[str] | None = None,
    ) -> torch.Tensor:
        """Run one step; returns its [T, ...] output without padding rows.

        `verify`: whether the rows of a sequence are drafts of one step. `padding`: rows that fill up a captured size.
        `written`: the rows that are stored in `caches`, default all of both.
        """
        members = [row.sequence for row in rows] + [prompt.sequence for prompt in prompts]
        query_lens = [1] * len(rows) + [prompt.tokens for prompt in prompts]
        seq_lens = [row.position + 1 for row in rows] + [prompt.context + prompt.tokens for prompt in prompts]
        for sequence, end in zip(members, seq_lens, strict=True):
            self._take_pages(sequence, end)
        drafts = verify_rows(members) if verify else None
        batch = BatchLayout(tuple(query_lens), tuple(seq_lens), self.device, verify=drafts)
        index = {}
        for name in self.layouts:
            index[name] = index_pages(batch, self.page_sizes[name], [self.held[name][i] for i in members])
            if written is not None and (caches is None or name in caches):
                index[name].slots[[t for t, row in enumerate(rows) if row not in written]] = -1
        tokens = self.inputs_of(rows, prompts)
        if padding:
            batch, index, tokens = padded(batch, index, tokens, padding)
        plan = self.backend.plan(self.spec, batch, index)
        inputs = FAMILIES[self.spec.family].ready_inputs(self.spec, **tokens, **self.layer)
        result = self.backend.run(self.spec, plan, self.pools, inputs)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        assert not out[batch.num_tokens - padding :].any()
        return out[: batch.num_tokens - padding].cpu()

    def inputs_of(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """Every per-token input of a step."""
        found = {}
        for name, own in self.inputs.tokens.items():
            parts = [
                (self.other[name] if row.wrong else own)[self.begin[row.sequence] + row.position][None] for row in rows
            ]
            for prompt in prompts:
                first = self.begin[prompt.sequence] + prompt.context
                parts.append(own[first : first + prompt.tokens])
            found[name] = torch.cat(parts).to(self.device)
        return found

    def finish(self, turn: Turn) -> None:
        """Count the accepted tokens of a turn as done, and free what no later query reads."""
        for rows, accepted in zip(turn.rows, turn.accepted, strict=True):
            self.done[rows[0].sequence] += accepted
            self._free_pages(rows[0].sequence)
        for prompt in turn.prompts:
            self.done[prompt.sequence] += prompt.tokens
            self._free_pages(prompt.sequence)

    def copy_of_pools(self) -> dict[str, dict[str, torch.Tensor]]:
        """The bytes of all caches."""
        return {
            name: {field: t.view(torch.uint8).clone() for field, t in fields.items()}
            for name, fields in self.pools.items()
        }

    def restore(self, copy: dict[str, dict[str, torch.Tensor]]) -> None:
        """Undo what was stored since `copy_of_pools`."""
        for name, fields in copy.items():
            for field, t in fields.items():
                self.pools[name][field].view(torch.uint8).copy_(t)

    def decode(self, turn: Turn, padding: int, *, alone: bool) -> dict[Row | Prompt, torch.Tensor]:
        """The outputs of a turn's tokens by plain decoding, one token of each sequence a step; wrong drafts last, and
        undone.

        `alone`: a step has no other requests, but for the turn's prompts in the first one. Otherwise it has as many as
        the verify step and of the same lengths, which store nothing, and its padding rows.
        """
        every = [row for rows in turn.rows for row in rows]
        found: dict[Row | Prompt, torch.Tensor] = {}
        for wrong in (False, True):
            before = self.copy_of_pools()
            for step in range(MAX_DRAFTS + 1):
                own = [rows[step] for rows in turn.rows if step < len(rows) and rows[step].wrong == wrong]
                prompts = turn.prompts if not alone or (step == 0 and not wrong) else ()
                is_first = step == 0 and not wrong
                if not own and not (is_first and prompts):
                    continue
                rows = own if alone else every
                out = self.launch(rows, prompts, written=own, padding=0 if alone else padding)
                found |= {row: out[t] for t, row in enumerate(rows) if row in own}
                if is_first and prompts:
                    sizes = [prompt.tokens for prompt in prompts]
                    found |= dict(zip(prompts, out[len(rows) :].split(sizes), strict=True))
            if wrong:
                self.restore(before)
        return found


def verify_rows(members: Sequence[int]) -> VerifyRows:
    """Requests of the same sequence are neighbours."""
    first = [members.index(member) for member in members]
    return VerifyRows(
        tuple(first),
        tuple(members.count(m) if first[b] == b else 0 for b, m in enumerate(members)),
        (0,) * len(members),
    )


def padded(
    batch: BatchLayout, index: dict[str, PageIndex], tokens: dict[str, torch.Tensor], count: int
) -> tuple[BatchLayout, dict[str, PageIndex], dict[str, torch.Tensor]]:
    """A step of a captured size: `count` padding rows behind the decodes, and bounds on the host."""
    exact, verify, size = batch.tensors, batch.verify_tensors, batch.num_requests + count
    none = torch.zeros(count, dtype=torch.int64, device=batch.device)
    new = torch.arange(batch.num_requests, size, device=batch.device)
    tensors = BatchTensors(
        torch.cat((exact.seq_lens, none.int())), torch.arange(size + 1, device=batch.device).int(),
        torch.cat((exact.positions, none)), torch.cat((exact.request_of_token, new)),
    )  # fmt: skip
    static = verify and VerifyTensors(
        torch.cat((verify.first_row, new.int())), torch.cat((verify.num_rows, none.int() + 1)),
        torch.cat((verify.replay, none.int())),
    )  # fmt: skip
    bounds = (max(batch.seq_lens),) * size
    alone = verify and VerifyRows(tuple(range(size)), (1,) * size, (0,) * size)
    layout = BatchLayout((1,) * size, bounds, batch.device, tensors, alone, static)
    filled = {
        name: PageIndex(
            entry.page_size, torch.cat((entry.table, entry.table.new_full((count, entry.table.shape[1]), -1))),
            torch.cat((entry.slots, entry.slots.new_full((count,), -1))),
        )
        for name, entry in index.items()
    }  # fmt: skip
    rows = {
        name: torch.cat((t, t.new_full((count, *t.shape[1:]), torch.nan if t.is_floating_point() else -1)))
        for name, t in tokens.items()
    }
    return layout, filled, rows


def play(
    case: Case,
    backend: AttentionBackend,
    lengths: Sequence[int],
    seed: int,
    *,
    alone: bool,
    padding: int = 0,
    device: str = "cpu",
) -> None:
    """Verify steps of one player beside plain decodes of another: the same bits, row by row.

    `alone`: as in `Player.decode`. `padding`: rows that fill up verify steps without prompts.
    """
    speculative, plain = Player(case, backend, 1, device), Player(case, backend, 2, device)
    if not alone:
        # Requests of the same lengths, which store nothing, read rows that nothing was written to.
        for fields in plain.pools.values():
            for t in fields.values():
                t.view(torch.uint8).zero_()
    for number, turn in enumerate(turns(case, lengths, seed)):
        every = [row for rows in turn.rows for row in rows]
        filled = 0 if turn.prompts else padding
        out = speculative.launch(every, turn.prompts, verify=True, padding=filled)
        assert out.isfinite().all()
        got: dict[Row | Prompt, torch.Tensor] = {row: out[t] for t, row in enumerate(every)}
        first = len(every)
        for prompt in turn.prompts:
            got[prompt] = out[first : first + prompt.tokens]
            first += prompt.tokens
        want = plain.decode(turn, filled, alone=alone)
        assert got.keys() == want.keys()
        differ = [part for part, result in got.items() if not torch.equal(result, want[part])]
        assert not differ, f"turn {number} {turn}: other bits at {differ}"
        speculative.finish(turn)
        plain.finish(turn)


def is_plain_fp8(case: Case) -> bool:
    spec: Any = getattr(case.spec, "mla", case.spec)
    return spec.kv_dtype == FP8 and getattr(spec, "row_format", "plain") == "plain"


FORMATS = ("fp32", "bf16", "fp8", "scaled")


def case_in(family: str, name: str, kind: str) -> Case | None:
    """The case with a cache format, or None where the layer has no such format."""
    case = cases(family, torch.float32 if kind == "fp32" else torch.bfloat16)[name]
    if kind in ("fp32", "bf16"):
        return case
    if not FAMILIES[family].scale_names:
        return None
    changes: dict[str, Any] = {"kv_dtype": FP8}
    spec: Any = case.spec
    if kind == "scaled":
        changes["row_format"] = "scaled"
        if family == "csa" and spec.head_dim == 64:
            changes["head_dim"] = 80
    try:
        if hasattr(spec, "mla"):
            spec = dataclasses.replace(spec, mla=dataclasses.replace(spec.mla, **changes))
        else:
            spec = dataclasses.replace(spec, **changes)
    except (TypeError, ValueError):
        return None
    return dataclasses.replace(case, spec=spec)


def kernels_of(family: str) -> AttentionBackend:
    """The family's Triton kernels."""
    return next(backend for backend in FAMILIES[family].backends if backend.name == "triton")


PAGED = [name for name, family in FAMILIES.items() if "state" not in family.cache_kinds]
# Backends on a CPU that give a request the same bits in steps of any size. PyTorch's products of matrices do not.
ANY_SIZE = {"compiled"}
RUNS = [
    pytest.param(case, backend, backend.name in ANY_SIZE, id=f"{family}-{name}-{kind}-{backend.name}")
    for family in PAGED
    for name in cases(family)
    for kind in FORMATS
    for case in [case_in(family, name, kind)]
    if case is not None
    for backend in FAMILIES[family].backends
    if not backend.rejects(case.spec, CPU_CHIP)
]


@pytest.mark.parametrize(("case", "backend", "alone"), RUNS)
def test_rows_on_a_cpu(case: Case, backend: AttentionBackend, alone: bool) -> None:
    for seed in range(2):
        play(case, backend, case.lengths, seed, alone=alone)


# The interpreter takes seconds for what a GPU does at once: there, one case of a family has every format.
EVERY_FORMAT = {"window_and_sinks", "released", "picking_released", "chosen"}
KERNEL_RUNS = [
    pytest.param(family, case, id=f"{family}-{name}-{kind}")
    for family in PAGED
    for name in cases(family)
    for kind in FORMATS
    for case in [case_in(family, name, kind)]
    if case is not None and not kernels_of(family).rejects(case.spec, CHIPS["sm_90"])
    if DEVICE == "cuda" or kind == "fp32" or name in EVERY_FORMAT
]


def few(case: Case) -> tuple[int, ...]:
    """Lengths of two of the case's sequences, one of which reaches past two pages and past every length at which the
    layer computes in another way; of the others 0."""
    edges = [edge for edge in boundaries(case.spec) if edge < max(case.lengths)]
    first, second = sorted(range(len(case.lengths)), key=lambda i: -case.lengths[i])[:2]
    reach = {first: max(2 * case.page_size, *edges, 0) + MAX_DRAFTS + 1, second: MAX_DRAFTS + 2}
    return tuple(min(n, reach.get(i, 0)) for i, n in enumerate(case.lengths))


@pytest.mark.parametrize(("family", "case"), KERNEL_RUNS)
def test_rows_by_kernels(family: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a padding row behind the steps without prompts, as a captured size has them. In one number of KV splits,
    softmax and compressed attention give the same bits in steps of any size."""
    monkeypatch.setattr("allotrope.attention.mla.triton_decode.split_count", lambda *sizes: 3)
    monkeypatch.setattr("allotrope.attention.csa.triton.split_count", lambda *sizes: 3)
    play(case, kernels_of(family), few(case), 0, alone=family in ("mha", "csa"), padding=1, device=DEVICE)


@pytest.mark.parametrize("family", PAGED)
def test_rows_in_as_many_kv_splits_as_the_step_asks_for(family: str) -> None:
    case = next(case for name, case in cases(family).items() if name in ("grouped_4", "small", "picking", "chosen"))
    play(case, kernels_of(family), few(case), 1, alone=False, padding=2, device=DEVICE)


@pytest.mark.parametrize("context", [0, 2, 5])
@pytest.mark.parametrize("name", ["chosen", "chosen_without_overlap", "all_overlapping"])
def test_entries_that_close_at_a_draft_pool_the_rows_of_the_step(name: str, context: int) -> None:
    """States that the same launch saves are not read: those of the drafts are not saved here, and their place holds
    NaN."""
    case, backend = cases("csa")[name], kernels_of("csa")
    sequence = len(case.lengths) - 1
    prompts = [Prompt(sequence, 0, context)] if context else []
    rows = [Row(sequence, context + j) for j in range(8)]
    plain, speculative = (Player(case, backend, seed, DEVICE) for seed in range(2))
    for player in (plain, speculative):
        if prompts:
            player.launch([], prompts)
    want = torch.cat([plain.launch([row]) for row in rows])
    got = speculative.launch(rows, verify=True, written=rows[:1], caches=("state", "index_state"))
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", PAGED)
def test_a_draft_that_is_not_stored_is_noticed(family: str) -> None:
    case = next(iter(cases(family).values()))
    backend = FAMILIES[family].backends[-1]
    rows = [Row(len(case.lengths) - 1, position) for position in range(4)]
    stored, unstored = (Player(case, backend, 0, "cpu").launch(rows, verify=True, written=rows[:n]) for n in (4, 1))
    assert torch.equal(stored[0], unstored[0])
    assert not torch.equal(stored[1:], unstored[1:])
