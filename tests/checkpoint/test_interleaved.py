"""Taking interleaved projections apart, for every head count and every share of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.checkpoint.interleaved import Part, parts
from allotrope.layers.mixers.gdn import GdnMixerSpec
from allotrope.layers.parallel import Parallel, Placement


@st.composite
def mixers(draw: st.DrawFn) -> GdnMixerSpec:
    groups = draw(st.sampled_from((1, 2, 3, 4, 8)))
    return GdnMixerSpec(
        hidden=5,
        num_k_heads=groups,
        num_v_heads=groups * draw(st.sampled_from((1, 2, 4, 8))),
        k_head_dim=draw(st.integers(1, 6)),
        v_head_dim=draw(st.integers(1, 6)),
        conv_width=4,
    )


@settings(max_examples=150, deadline=None)
@given(mixer=mixers(), share=st.integers(0, 6))
def test_sections_of_every_rank(mixer: GdnMixerSpec, share: int) -> None:
    """What a rank holds is what taking its own key heads out of the projection's output would give."""
    nk, repeat = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    dk, dv = mixer.k_head_dim, mixer.v_head_dim
    shares = [size for size in range(1, nk + 1) if nk % size == 0]
    size = shares[share % len(shares)]
    sizes = (dk, dk, repeat * dv, repeat * dv)
    qkvz, ba = torch.randn(nk * sum(sizes), mixer.hidden), torch.randn(nk * 2 * repeat, mixer.hidden)
    tensors = dict(zip("qkvz", (part(qkvz) for part in parts(nk, sizes)), strict=True))
    tensors |= dict(zip("ba", (part(ba) for part in parts(nk, (repeat, repeat))), strict=True))
    x = torch.randn(3, mixer.hidden)
    rows, gates = (x @ qkvz.T).view(3, nk, -1), (x @ ba.T).view(3, nk, 2, repeat)
    placement = Placement(mixer.sections)
    for rank in range(size):
        parallel = Parallel(rank, size)
        held = torch.empty(placement.local(parallel), mixer.hidden)
        for name, tensor in tensors.items():
            placement.fill(held, tensor, name, parallel)
        mine = slice(rank * nk // size, (rank + 1) * nk // size)
        want = [piece.flatten(1) for piece in rows[:, mine].split(sizes, dim=2)]
        want += [gates[:, mine, i].flatten(1) for i in range(2)]
        torch.testing.assert_close(x @ held.T, torch.cat(want, dim=1))


@settings(max_examples=50, deadline=None)
@given(groups=st.integers(1, 5), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_parts_hold_every_row_once(groups: int, sizes: list[int]) -> None:
    rows = torch.arange(groups * sum(sizes))
    taken = [part(rows) for part in parts(groups, tuple(sizes))]
    assert torch.cat(taken).sort().values.tolist() == rows.tolist()
    whole = torch.cat([piece.view(groups, -1) for piece in taken], dim=1).flatten()
    assert torch.equal(whole, rows)


def test_even_and_odd_rows_are_right_for_one_value_head_only() -> None:
    """b and a come group by group; taking every other row is the same only with one value head to a key head."""
    for repeat in (1, 2):
        rows = torch.arange(4 * 2 * repeat)
        assert torch.equal(Part(4, (repeat, repeat), 0)(rows), rows[::2]) == (repeat == 1)


def test_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"11 rows are not 2 groups of 2 \+ 3"):
        Part(2, (2, 3), 0)(torch.zeros(11, 4))
