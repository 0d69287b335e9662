"""The kernel of verify steps: the rows of a sequence have the bits that plain decoding gives each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.batch import VerifyTensors
from allotrope.attention.mha import triton_decode
from allotrope.attention.mha.spec import MhaSpec

PAGE = 16
# The length of a sequence's first row, and its rows; length 0 is a padding row. Chunks of 32 keys, of 40 from 4 chunks
# on: rows of one sequence come to a further chunk, to longer chunks, and to a further first block of a window.
SEQUENCES = [(1, 1), (31, 4), (0, 1), (94, 5), (127, 3), (0, 1), (30, 1), (140, 9)]


def spec_of(heads: int, kv_heads: int, head_dim: int, window: int | None = None, **more: Any) -> MhaSpec:
    return MhaSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        scale=0.3,
        kv_dtype=torch.float32,
        **more,
    )


SPECS = {
    "three heads": spec_of(6, 2, 16),
    "six heads": spec_of(6, 1, 24, 45),
    "nine heads": spec_of(9, 1, 16, softcap=5.0),
    "one head": spec_of(1, 1, 16, v_head_dim=32),
    "one chunk": spec_of(8, 1, 16, 5, sinks=True),
    "window and sinks": spec_of(8, 1, 16, 50, sinks=True),
    "short and long": spec_of(6, 2, 16),
}
# Fewest keys of a chunk of a short and of a long request, and most chunks.
CHUNKS = {"short and long": (16, 32, 16)}


def verify_tensors() -> tuple[torch.Tensor, VerifyTensors]:
    """Lengths of all rows, and which rows are one sequence."""
    lens: list[int] = []
    first: list[int] = []
    count: list[int] = []
    for length, rows in SEQUENCES:
        first += [len(lens)] * rows
        count += [rows] + [0] * (rows - 1)
        lens += [length + i for i in range(rows)]
    columns = [torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (lens, first, count)]
    return columns[0], VerifyTensors(columns[1], columns[2], torch.zeros_like(columns[2]))


@pytest.mark.parametrize("name", SPECS)
def test_rows_that_share_keys_have_the_bits_of_plain_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]
    chunk, long_chunk, most = CHUNKS.get(name, (32, 32, 4))
    monkeypatch.setattr(triton_decode, "max_chunks_of", lambda spec: most)
    stages, programs = (2, 4096) if DEVICE == "cuda" else (1, 64)
    how = triton_decode.Config(16, chunk, long_chunk, 4, stages, programs)
    torch.manual_seed(3)
    lens, verify = verify_tensors()
    longest, rows = int(lens.max()), len(lens)
    pages = -(-longest // PAGE)
    tables = torch.randperm(len(SEQUENCES) * pages).view(-1, pages) + 1
    table = tables.repeat_interleave(torch.tensor([count for _, count in SEQUENCES]), 0).to(DEVICE)
    pools = {
        field: torch.full((1 + tables.numel(), PAGE, spec.num_kv_heads, dim), torch.nan, device=DEVICE)
        for field, dim in (("k", spec.head_dim), ("v", spec.value_dim))
    }
    for i, (length, count) in enumerate(SEQUENCES):
        # What is behind the last draft is not read.
        stored = length + count - 1 if length else 0
        at = tables[i][torch.arange(stored) // PAGE], torch.arange(stored) % PAGE
        for pool in pools.values():
            pool[at] = torch.randn(stored, *pool.shape[2:]).to(DEVICE)
    q = torch.randn(rows, spec.num_heads, spec.head_dim).to(DEVICE)
    sinks = torch.randn(spec.num_heads).to(DEVICE) if spec.sinks else None

    def decoded(only: VerifyTensors | None) -> torch.Tensor:
        out = torch.full((rows, spec.num_heads, spec.value_dim), torch.nan, device=DEVICE)
        triton_decode.decode(spec, how, q, pools, table, lens, longest, sinks, out, 1.0, 1.0, only)
        return out

    want, got = decoded(None), decoded(verify)
    assert want.isfinite().all() and want[lens > 0].all(-1).all() and not want[lens == 0].any()
    differ = [row for row in range(rows) if not torch.equal(got[row], want[row])]
    assert not differ, f"other bits in rows {differ} of lengths {lens[differ].tolist()}"
