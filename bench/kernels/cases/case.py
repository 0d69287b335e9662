"""One measured case: inputs, our kernel, the check that gates it, what it moves and computes, and who else can do it.

A family's file in this folder offers `cases() -> list[KernelCase]`. Making the list must be cheap and need neither a
GPU nor Triton nor a peer: everything heavy is imported and made inside the callables.

    KernelCase(
        family="mha", name="decode B64 8192 64/8x128 bf16",
        make=lambda device: Inputs(...),           # anything; pools, plan, tokens
        ours=lambda x: lambda: run(x.spec, ...),   # prepares what is not timed, returns what is
        check=same(lambda x: reference(...), "bf16"),
        bytes=2 * B * L * G * D * 2, flops=4 * B * H * L * D,
        peers={"fa3": fa3},                        # def fa3(x): from vllm... import f; return lambda: f(x.q, ...)
        absent={"flashinfer": "no sinks with head dim 64"},
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from allotrope.attention.batch import BatchLayout, PageIndex, VerifyRows, index_pages
from allotrope.attention.check import Comparison, compare

Timed = Callable[[], Any]
"""What is timed: no argument, no host work that a graph could not capture."""
Check = Callable[[Any, Timed], Sequence[Comparison]]


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """`family`, `name`: together unique. `make(device)`: the inputs, drawn at random, that all callables share.

    `ours(inputs)`: prepares (plans, scratch) and returns what is timed. `check(inputs, timed)`: runs it and compares
    with the reference; nothing is timed unless every comparison is true. `bytes`, `flops`: the fewest that the
    operation must move through device memory and compute, by the family's formulae. `rate`: type of the products.
    `peers`: name -> as `ours`; one that raises ImportError is reported as absent. `absent`: name -> why a peer that a
    reader would expect cannot run the case. `tiny`: small enough for a check on a CPU. `note`: for the reader.
    """

    family: str
    name: str
    make: Callable[[torch.device], Any]
    ours: Callable[[Any], Timed]
    check: Check
    bytes: int
    flops: int = 0
    rate: Literal["bf16", "fp8"] = "bf16"
    peers: Mapping[str, Callable[[Any], Timed]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    tiny: bool = False
    note: str = ""


def same(reference: Callable[[Any], Any], kind: str) -> Check:
    """The usual check: what is timed returns what `reference(inputs)` returns, within the tolerances of `kind`.

    Either returns a tensor, or a tuple of as many tensors (None is passed over). For kernels that change their inputs,
    write a check of your own that copies them.
    """

    def check(inputs: Any, timed: Timed) -> list[Comparison]:
        want, got = _tensors(reference(inputs)), _tensors(timed())
        assert len(want) == len(got), f"{len(got)} outputs; the reference has {len(want)}"
        return [compare(g, w, kind) for g, w in zip(got, want, strict=True)]

    return check


def _tensors(found: Any) -> list[torch.Tensor]:
    parts = found if isinstance(found, (tuple, list)) else (found,)
    return [part for part in parts if part is not None]


def decode_batch(
    requests: int, length: int, page_size: int, device: torch.device, seed: int = 0
) -> tuple[BatchLayout, PageIndex, int]:
    """Decoding requests of `length` visible tokens each, their pages all over the pool.

    Returns the batch, where its rows lie, and how many pages the pool must have (page 0 is nobody's).
    """
    return prefill_batch((1,) * requests, (length,) * requests, page_size, device, seed)


def prefill_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], page_size: int, device: torch.device, seed: int = 0
) -> tuple[BatchLayout, PageIndex, int]:
    """As `decode_batch`, with any new and visible tokens per request."""
    counts = [-(-n // page_size) for n in seq_lens]
    order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    pages = []
    for count in counts:
        pages.append(order[:count])
        order = order[count:]
    batch = BatchLayout(tuple(query_lens), tuple(seq_lens), device)
    return batch, index_pages(batch, page_size, pages), 1 + sum(counts)


def verify_batch(
    sequences: int, rows: int, length: int, page_size: int, device: torch.device, replay: int = 0, seed: int = 0
) -> tuple[BatchLayout, PageIndex, int]:
    """As `decode_batch`, for sequences with `rows` - 1 drafts each, whose first rows see `length` tokens. `replay`: the
    accepted drafts of each sequence's step before."""
    longest = length + rows - 1
    _, paged, pages = decode_batch(sequences, longest, page_size, device, seed)
    batch = BatchLayout(
        (1,) * (sequences * rows),
        tuple(range(length, longest + 1)) * sequences,
        device,
        verify=VerifyRows(
            tuple(first for first in range(0, sequences * rows, rows) for _ in range(rows)),
            (rows, *(0,) * (rows - 1)) * sequences,
            (replay, *(0,) * (rows - 1)) * sequences,
        ),
    )
    of_rows = paged.table.repeat_interleave(rows, dim=0).tolist()
    return batch, index_pages(batch, page_size, of_rows), pages
