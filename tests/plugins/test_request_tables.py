"""What captured steps inside SGLang read of its tables: a copy, which says what the tables said when it was made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allotrope.plugins.sglang.request_tables import RequestTables

PAGE, CONTEXT, REQUESTS = 4, 30, 6


def pool() -> Any:
    """A table of requests, each with pages in an order of its own; the state of request r is 10 - r."""
    pages = torch.stack([torch.randperm(50)[: CONTEXT // PAGE + 1] for _ in range(REQUESTS)])
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    return SimpleNamespace(req_to_token=slots, get_mamba_indices=lambda rows: (10 - rows).int()), pages


@pytest.mark.parametrize("longest", [1, PAGE, PAGE + 1, CONTEXT])
def test_pages_and_states_of_a_step(longest: int) -> None:
    request_pool, pages = pool()
    tables = RequestTables(SimpleNamespace(page_size=PAGE), request_pool, CONTEXT, keeps_states=True)
    tables.prepare_graphs(5)
    requests, width = torch.tensor([4, 0, 3]), -(-longest // PAGE)
    eager = tables.pages(requests, longest, captured=False)
    assert torch.equal(eager, pages[requests, :width].int())
    tables.copy(requests, longest)
    request_pool.req_to_token.zero_()
    # A graph reads as many columns as any step may have.
    copied = tables.pages(requests, longest, captured=True)
    assert copied.shape == (3, CONTEXT // PAGE + 1) and torch.equal(copied[:, :width], eager)
    states = tables.states(requests, captured=True)
    assert torch.equal(states, tables.states(requests, captured=False)) and states.tolist() == [6, 10, 7]


def test_a_copy_is_written_where_graphs_read() -> None:
    """Steps of other sizes share the memory."""
    request_pool, pages = pool()
    tables = RequestTables(SimpleNamespace(page_size=PAGE), request_pool, CONTEXT, keeps_states=False)
    tables.prepare_graphs(REQUESTS)
    everyone = torch.arange(REQUESTS)
    tables.copy(everyone, CONTEXT)
    before = tables.pages(everyone, CONTEXT, captured=True)
    tables.copy(torch.tensor([5, 2]), PAGE)
    after = tables.pages(everyone, CONTEXT, captured=True)
    assert after[:2, 0].tolist() == [pages[5, 0], pages[2, 0]]
    assert torch.equal(after[:, 1:], before[:, 1:]) and torch.equal(after[2:], before[2:])
