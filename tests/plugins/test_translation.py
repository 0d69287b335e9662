"""From vLLM's words to ours, without vLLM: page sizes, batches and page tables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from counted_launches import Launches

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.attention.batch import BatchLayout, index_pages
from allotrope.attention.cache_layout import (
    CacheLayout,
    Field,
    PagedRows,
    StateSlots,
    WindowRows,
    page_bytes,
    page_views,
    row_bytes,
)
from allotrope.layers.parallel import Parallel
from allotrope.plugins.steps import arrange, rows_index
from allotrope.plugins.vllm import STATEFUL
from allotrope.plugins.vllm.translate import common_page, describe, one_table, page_of, page_tokens, states_index

CPU = torch.device("cpu")


@dataclass
class Told:
    """What vLLM's common metadata says of a step."""

    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int = 64
    num_actual_tokens: int = 0
    num_reqs: int = 0
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.query_start_loc = self.query_start_loc_cpu
        self.num_reqs = len(self.seq_lens)
        self.num_actual_tokens = self.num_actual_tokens or int(self.query_start_loc_cpu[-1])


def told(lens: list[int], seen: list[int]) -> Told:
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    return Told(starts, torch.tensor(seen, dtype=torch.int32), max(lens))


def caches(architecture: str) -> tuple[CacheLayout, ...]:
    found = find_architecture({"architectures": [architecture]}, architecture)
    _, spec = read_spec(found.tiny() | {"architectures": [architecture]}, architecture)
    own = [layer.mixer for layer in spec.layers if layer.mixer.shares_cache_of is None]
    specs = [mixer.attention(Parallel(), torch.bfloat16, torch.bfloat16) for mixer in own]
    return tuple(layout for one in specs for layout in one.caches().values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [16, 128])
def test_pages_hold_whole_rows_of_every_cache(architecture: str, block_size: int) -> None:
    layouts = caches(architecture)
    pages = {layout: page_of(layout, layouts, block_size) for layout in layouts}
    for layout, page in pages.items():
        if isinstance(layout, StateSlots):
            assert row_bytes(layout) <= page
            continue
        assert page_bytes(layout, page_tokens(layout, page)) == page
        if isinstance(layout, PagedRows):
            assert page_tokens(layout, page) >= block_size
        if one_table(layouts) or (len(set(layouts)) == 1):
            # vLLM's scheduler goes by its own block size where there is one group.
            assert page_tokens(layout, page) == block_size
    if not one_table(layouts):
        assert set(pages.values()) == {common_page(layouts, block_size)}
    sizes = " and ".join(map(str, dict.fromkeys(pages.values())))
    assert f"pages of {sizes} bytes" in describe(layouts, block_size)


def test_rows_that_are_kept_share_one_table() -> None:
    """Latent rows and index keys of a sparse model; not with windows, states, or several tokens to a row."""
    assert len(set(caches("DeepseekV32ForCausalLM"))) == 2 and one_table(caches("DeepseekV32ForCausalLM"))
    for architecture in ("GptOssForCausalLM", "Qwen3NextForCausalLM", "DeepseekV4ForCausalLM"):
        assert not one_table(caches(architecture))


def test_stateful_architectures_are_those_with_states() -> None:
    found = {name for name in ARCHITECTURES if any(isinstance(layout, StateSlots) for layout in caches(name))}
    assert found == STATEFUL


def test_a_states_padding_is_told() -> None:
    state = StateSlots((Field("ssm", (100,), torch.uint8),))
    rows = PagedRows((Field("kv", (16,), torch.uint8),))
    assert describe((state, rows), 8).split("; ") == [
        "pages of 128 bytes: ssm one state, 21 % of the page unused",
        "kv 8 tokens",
        "prefixes are shared in runs of 8 tokens",
    ]


def test_views_of_whole_pages_share_their_memory() -> None:
    layout = PagedRows((Field("k", (2, 3), torch.float32), Field("v", (2, 2), torch.float32)))
    memory = torch.zeros(5, page_bytes(layout, 4), dtype=torch.uint8)
    found = page_views(layout, memory)
    assert [tuple(view.shape) for view in found.values()] == [(5, 4, 2, 3), (5, 4, 2, 2)]
    # What one page holds lies in that page, and a row has one number in the pool.
    found["k"].flatten(0, 1).index_fill_(0, torch.tensor([4, 7]), 1.0)
    found["v"].flatten(0, 1).index_fill_(0, torch.tensor([8]), 1.0)
    assert [bool(page.any()) for page in memory] == [False, True, True, False, False]
    assert memory[1].view(torch.float32).view(4, 10)[:, :6].sum() == 12


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_whole_pages_are_as_far_apart_as_they_are_long(rows: int) -> None:
    """Kernels go from row to row by this stride alone, across pages as well."""
    layout = PagedRows((Field("c", (6,), torch.float32), Field("k_pe", (2, 1), torch.float32)))
    for view in page_views(layout, torch.zeros(5, page_bytes(layout, rows), dtype=torch.uint8)).values():
        assert view.stride()[:2] == (8 * rows, 8)


def test_states_may_have_longer_pages() -> None:
    layout = StateSlots((Field("conv", (3, 2), torch.bfloat16), Field("ssm", (2, 2), torch.float32)))
    found = page_views(layout, torch.zeros(4, 64, dtype=torch.uint8)[:, :40])
    assert [tuple(view.shape) for view in found.values()] == [(4, 3, 2), (4, 2, 2)]


@pytest.mark.parametrize(
    ("layout", "pages", "text"),
    [
        (PagedRows((Field("k", (5,), torch.uint8),)), torch.zeros(3, 16, dtype=torch.uint8), "rows of 5 bytes"),
        (PagedRows((Field("k", (4,), torch.uint8),)), torch.zeros(3, 20, dtype=torch.uint8)[:, :16], "20 apart"),
        (
            WindowRows((Field("a", (3,), torch.uint8), Field("b", (1,), torch.float32)), 4),
            torch.zeros(2, 14, dtype=torch.uint8),
            "field b of torch.float32 is not aligned",
        ),
    ],
)
def test_pages_that_do_not_fit_are_refused(layout: CacheLayout, pages: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        page_views(layout, pages)


def test_requests_with_one_new_token_come_first() -> None:
    batch, order = arrange(told([3, 1, 0, 2, 1], [9, 5, 0, 2, 1]), CPU)
    assert batch.query_lens == (1, 1, 3, 2) and batch.seq_lens == (5, 1, 9, 2)
    assert order.requests.tolist() == [1, 4, 0, 3]
    assert order.tokens.tolist() == [3, 6, 0, 1, 2, 4, 5]


@pytest.mark.parametrize("told_which_prefill", [False, True])
def test_each_draft_is_a_request(told_which_prefill: bool) -> None:
    """With the pages of its request, after the draft before. The host's lengths count rejected drafts."""
    step = told([6, 3, 1, 2], [6, 9, 5, 8])
    step.seq_lens_cpu_upper_bound = step.seq_lens + 2
    if told_which_prefill:
        step.is_prefilling = torch.tensor([True, False, False, True])
    batch, order = arrange(step, CPU, max_drafts=2)
    pages = rows_index(batch, order, torch.arange(1, 9).view(4, 2), torch.arange(100, 112), 8).table
    if told_which_prefill:
        assert batch.query_lens == (1, 1, 1, 1, 6, 2) and batch.seq_lens == (7, 8, 9, 5, 6, 8)
        assert order.requests.tolist() == [1, 1, 1, 2, 0, 3]
        assert order.tokens.tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 10, 11]
    else:
        assert batch.query_lens == (1, 1, 1, 1, 1, 1, 6) and batch.seq_lens == (7, 8, 9, 5, 7, 8, 6)
        assert order.requests.tolist() == [1, 1, 1, 2, 3, 3, 0]
        assert order.tokens.tolist() == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert pages[:3].tolist() == [[3, 4]] * 3


def test_vllms_order_is_kept_where_it_is_ours() -> None:
    batch, order = arrange(told([1, 1, 4], [7, 3, 4]), CPU)
    assert batch.query_lens == (1, 1, 4)
    assert (order.requests, order.tokens) == (slice(0, 3), slice(0, 6))


@pytest.mark.parametrize("lens", [[1, 1, 4], [3, 1, 2]])
def test_what_is_handed_back_has_vllms_order_and_zeros_for_padding(lens: list[int]) -> None:
    """A host that captures steps reads what stands behind the last token."""
    order = arrange(told(lens, lens), CPU)[1]
    theirs = torch.arange(1.0, 13.0).view(6, 2)
    ours = theirs[order.tokens]
    assert torch.equal(order.restored(ours, 6), theirs)
    assert torch.equal(order.restored(ours, 8), torch.cat((theirs, torch.zeros(2, 2))))


def test_page_tables_are_those_of_our_own_engine() -> None:
    batch, order = arrange(told([2, 1], [6, 9]), CPU)
    # The second request is first with us; its first page fell out of a window and became vLLM's null block.
    table = torch.tensor([[3, 5, 9, 9], [0, 7, 2, 8]], dtype=torch.int32)
    slots = torch.tensor([5 * 4 + 0, 5 * 4 + 1, 2 * 4 + 0])
    found = rows_index(batch, order, table, slots, 4)
    want = index_pages(batch, 4, [[-1, 7, 2], [3, 5, 9]])
    assert found.page_size == 4
    assert torch.equal(found.table, want.table) and torch.equal(found.slots, want.slots)


def test_nothing_is_written_to_block_0() -> None:
    batch = BatchLayout((1, 1), (1, 1), CPU)
    order = arrange(told([1, 1], [1, 1]), CPU)[1]
    found = rows_index(batch, order, torch.tensor([[0], [1]]), torch.tensor([3, 4]), 4)
    assert found.slots.tolist() == [-1, 4]


def test_the_state_is_that_of_the_block_of_the_last_token() -> None:
    batch, order = arrange(told([1, 1, 3], [4, 5, 9]), CPU)
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert states_index(batch, order, table, None).slots.tolist() == [1, 4, 7]
    assert states_index(batch, order, table, 4).slots.tolist() == [1, 5, 9]


NUMBERS = torch.arange(8)


def test_decodes_from_static_tensors() -> None:
    """The same facts as from the host's integers, which are bounds then; padding sees nothing."""
    step = told([1, 1, 1], [4, 9, 0])
    batch, order = arrange(step, CPU, NUMBERS)
    assert batch.seq_lens == (64, 64, 64)
    assert batch.tensors.seq_lens is step.seq_lens and batch.tensors.query_start is step.query_start_loc
    assert batch.positions.tolist() == [3, 8, 0] and batch.positions.dtype == torch.int64
    assert batch.request_of_token.tolist() == [0, 1, 2]
    assert arrange(step, CPU, NUMBERS[:2])[0].request_of_token.tolist() == [0, 1, 2]
    assert arrange(told([1, 2], [4, 9]), CPU, NUMBERS)[0].static_tensors is None
    table, slots = torch.arange(60, dtype=torch.int32).view(3, 20), torch.tensor([7, 8, -1])
    rows = rows_index(batch, order, table, slots, 4)
    # vLLM's own memory, as wide as the longest request needs.
    assert rows.table.shape == (3, 16) and rows.table.data_ptr() == table.data_ptr()
    assert rows.slots.data_ptr() == slots.data_ptr()


@pytest.mark.parametrize("width", [1, 3])
def test_states_of_decodes_from_static_tensors(width: int) -> None:
    batch, order = arrange(told([1, 1, 1], [4, 9, 0]), CPU, NUMBERS)
    table = (10 * torch.arange(3)[:, None] + torch.arange(width)).int()
    only = states_index(batch, order, table, None).slots
    # Kernels read slots one behind the other.
    assert only.tolist() == [0, 10, 20] and only.is_contiguous()
    if width == 3:
        current = states_index(batch, order, table, 4).slots
        assert current.tolist() == [0, 12, 20] and current.is_contiguous()


def test_a_decode_step_is_taken_in_by_two_launches() -> None:
    """However many block tables there are: each more is time at every step of every model."""
    step = told([1] * 4, [4, 9, 5, 0])
    table, only, slots = torch.ones(4, 16).int(), torch.ones(4, 1).int(), torch.arange(4)
    with Launches() as found:
        batch, order = arrange(step, CPU, NUMBERS)
        for _ in range(3):
            rows_index(batch, order, table, slots, 4)
            states_index(batch, order, only, None)
    assert len(found.names) == 2, found.names
