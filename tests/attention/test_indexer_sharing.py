"""Ranks that share an indexer's work select what one rank alone selects, to the bit."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import pytest
import torch
from device_under_test import DEVICE

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.check import Case, cases
from allotrope.attention.dsa import sharing
from allotrope.attention.dsa.sharing import Gather, share
from allotrope.attention.mla.plan import Span
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, at_random, whole

CPU = torch.device("cpu")


def backend_named(family: str, name: str) -> AttentionBackend:
    if name == "reference":
        return FAMILIES[family].backends[-1]
    pytest.importorskip("triton", reason="triton is not installed")
    kernels = importlib.import_module(f"allotrope.attention.{family}.triton")
    return AttentionBackend("triton", lambda spec, chip: [], plan=kernels.build_plan, run=kernels.run, in_graphs=True)


def played(case: Case, backend: AttentionBackend, rank: int, ranks: int, gather: Gather) -> list[torch.Tensor]:
    """Outputs and selections of one rank, of whole prompts and of chunks among decodes."""
    kept: list[torch.Tensor] = []

    def run(spec: Any, plan: Any, caches: Any, inputs: Any) -> Any:
        index = dataclasses.replace(inputs.index, gather=gather)
        found = backend.run(spec, plan, caches, dataclasses.replace(inputs, index=index))
        kept.extend(found if isinstance(found, tuple) else (found,))
        return kept[-len(found)] if isinstance(found, tuple) else found

    indexer = dataclasses.replace(case.spec.indexer, rank=rank, ranks=ranks)
    of_rank = dataclasses.replace(case, spec=dataclasses.replace(case.spec, indexer=indexer))
    for steps in (whole(case.lengths), at_random(case.lengths, 1)):
        Replay(of_rank, dataclasses.replace(backend, run=run), DEVICE).play(steps)
    return kept


class Exchange:
    """Collects what a rank sends, or gives it what all have sent."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]

    def record(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        # What is sent later does not depend on what comes back: of the others, the first key.
        self.sent[rank].append(rows)
        found = rows.new_zeros(len(self.sent), *rows.shape)
        found[rank] = rows
        return found.flatten(0, 1)

    def joined(self) -> Gather:
        calls = iter([torch.cat(rows) for rows in zip(*self.sent, strict=True)])
        return lambda rows: next(calls)


@pytest.mark.parametrize(
    ("family", "case_name", "name", "ranks", "lengths"),
    [
        ("dsa", "picking", "reference", 2, (7, 330, 9, 150)),
        ("dsa", "picking", "reference", 3, (7, 330, 9, 150)),
        ("dsa", "picking", "triton", 2, (90, 9)),
        ("csa", "chosen", "reference", 2, (7, 130, 9, 50)),
        ("csa", "chosen", "reference", 3, (7, 130, 9, 50)),
        ("csa", "chosen", "triton", 2, (50, 9)),
    ],
)
def test_ranks_select_what_one_selects(
    family: str, case_name: str, name: str, ranks: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MIN_PAIRS", 0)
    for module in ("plan", "triton"):
        monkeypatch.setattr(f"allotrope.attention.csa.{module}.SHARED_BLOCK", 16)
    backend, case = backend_named(family, name), dataclasses.replace(cases(family)[case_name], lengths=lengths)
    want = played(case, backend, 0, 1, lambda rows: rows)
    exchange = Exchange(ranks)
    for rank in range(ranks):
        played(case, backend, rank, ranks, functools.partial(exchange.record, rank))
    assert exchange.sent[0]
    for rank in range(ranks):
        got = played(case, backend, rank, ranks, exchange.joined())
        assert all(torch.equal(one, exact) for one, exact in zip(got, want, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_query_is_one_ranks(ranks: int) -> None:
    spans = [Span(0, 0, 100, 1), Span(1, 5, 64, 200), Span(3, 205, 3000, 64)]
    tokens = [token for span in spans for token in range(span.token, span.token + span.queries)]
    found = [share(spans, 64, rank, ranks, CPU) for rank in range(ranks)]
    rows = []
    for own, shared in found:
        assert shared is not None
        mine = [token for span in own for token in range(span.token, span.token + span.queries)]
        assert shared.own.tolist()[: len(mine)] == mine
        assert all(span.queries <= 64 for span in own)
        for span in own:
            of = next(one for one in spans if one.request == span.request)
            assert span.position - of.position == span.token - of.token
        rows.append(shared.own)
    gathered = torch.cat(rows)
    for _, shared in found:
        assert shared is not None
        assert sorted(shared.tokens.tolist()) == tokens
        assert torch.equal(gathered[shared.source], shared.tokens)


def test_little_work_is_not_shared() -> None:
    spans = [Span(0, 0, 100, 40)]
    assert share(spans, 64, 0, 1, CPU) == (spans, None)
    assert share([], 64, 1, 2, CPU) == ([], None)
    assert share(spans, 64, 1, 2, torch.device("cuda")) == (spans, None)
