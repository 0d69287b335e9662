"""Batches and page tables, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.attention.batch import BatchLayout, index_pages

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> BatchLayout:
    decodes = draw(st.integers(0, 4))
    prefills = draw(st.lists(st.integers(2, 40), max_size=4))
    query = [1] * decodes + prefills
    if not query:
        query = [1]
    contexts = [draw(st.integers(0, 60)) for _ in query]
    return BatchLayout(tuple(query), tuple(q + c for q, c in zip(query, contexts, strict=True)), CPU)


@settings(max_examples=100, deadline=None)
@given(batch=batches())
def test_what_a_batch_says_about_its_tokens(batch: BatchLayout) -> None:
    tokens = [
        (b, context + i)
        for b, (context, q) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True))
        for i in range(q)
    ]
    assert batch.num_tokens == len(tokens)
    assert batch.request_of_token.tolist() == [b for b, _ in tokens]
    assert batch.positions.tolist() == [position for _, position in tokens]
    assert batch.num_decodes == batch.query_lens.count(1)
    for b in range(batch.num_requests):
        assert tokens[batch.query_start[b]][0] == b
        assert batch.query_start[b + 1] - batch.query_start[b] == batch.query_lens[b]


@settings(max_examples=100, deadline=None)
@given(batch=batches(), size=st.sampled_from((1, 4, 16)), data=st.data())
def test_slots_lie_in_the_request_own_pages(batch: BatchLayout, size: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(1, 1 + sum(-(-n // size) for n in batch.seq_lens))))
    pages, at = [], 0
    for n in batch.seq_lens:
        pages.append(list(order[at : at + -(-n // size)]))
        at += len(pages[-1])
    gone = data.draw(st.integers(0, batch.num_requests - 1))
    pages[gone][0] = -1
    index = index_pages(batch, size, pages)
    for token in range(batch.num_tokens):
        b, position = int(batch.request_of_token[token]), int(batch.positions[token])
        page = pages[b][position // size]
        assert index.slots[token] == (-1 if page < 0 else page * size + position % size)
    for b, row in enumerate(pages):
        assert index.table[b].tolist() == row + [-1] * (index.table.shape[1] - len(row))
    written = index.slots[index.slots >= 0].tolist()
    assert len(set(written)) == len(written)
    assert index_pages(batch, size, pages, write=False).slots.eq(-1).all()


def test_wrong_batches_are_refused() -> None:
    for query, seen in (((0,), (1,)), ((3,), (2,)), ((2, 1), (2, 1))):
        with pytest.raises(ValueError, match="query_lens"):
            BatchLayout(query, seen, CPU)
    with pytest.raises(ValueError, match="zip"):
        BatchLayout((1, 1), (1,), CPU)
    with pytest.raises(ValueError, match="2 pages of 4 tokens cannot hold 9 tokens"):
        index_pages(BatchLayout((1,), (9,), CPU), 4, [[1, 2]])


def test_a_page_number_beyond_32_bits_is_kept() -> None:
    index = index_pages(BatchLayout((1,), (1,), CPU), 256, [[2**30]])
    assert index.slots.tolist() == [2**38]


def test_plans_of_a_step_share_zeros() -> None:
    batch = BatchLayout((1, 1), (4, 9), torch.device("cpu"))
    found = batch.cleared(2, 3)
    assert found is batch.cleared(2, 3) and found is not batch.cleared(3, 2)
    assert found.dtype == torch.int32 and found.shape == (2, 3) and not found.any()
    assert found is not BatchLayout((1, 1), (4, 9), torch.device("cpu")).cleared(2, 3)
