"""Sums over the ranks of a process group: the same bits on every rank, which may differ from those of another order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from allotrope.kernels.backend import Chooser
from allotrope.kernels.symmetric_memory import map_workspace
from allotrope.layers.build import Build
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Parallel, map_peers

TOKENS, SIZE = 5, 64
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def parts_of(ranks: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Parts of each rank and a residual. Sums of the first numbers end halfway between two of 16 bits, and those of the
    second cancel: the order of summation decides what they are rounded to."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(TOKENS, SIZE, generator=generator) for _ in range(ranks)]
    for rank, part in enumerate(parts):
        part[0, : SIZE // 2] = (1.0, 2.0**-8, 2.0**-8, -(2.0**-9))[rank]
        part[0, SIZE // 2 :] = (256.0, 1.0, -256.0, 1.0)[rank]
    return [part.to(dtype) for part in parts], torch.randn(TOKENS, SIZE, generator=generator).to(dtype)


def join(rank: int, ranks: int, folder: Path) -> Parallel:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    return Parallel(rank, ranks)


def sum_parts(rank: int, ranks: int, folder: Path) -> None:
    """One rank: writes what it gets to a file."""
    parallel = join(rank, ranks, folder)
    found = []
    for dtype in DTYPES:
        parts, residual = parts_of(ranks, dtype)
        build = Build(dtype=dtype, parallel=parallel)
        # What the log says of the backends names none that does not run.
        assert map_peers(parallel, build.chooser, dtype, SIZE, CPU) is parallel
        asked = map_peers(parallel, Chooser(build.chooser.chip, {"all_reduce": "reference"}), dtype, SIZE, CPU)
        assert asked.workspace is None and asked.unreachable == ("all_reduce=reference was asked for",)
        norms = [RMSNorm(SIZE, 1e-6, build, weighted=False) for _ in range(2)]
        found += [parallel.all_reduce(parts[rank].clone()), *norms[0].add(parts[rank].clone(), residual, norms[1])]
        found += parallel.all_reduce_each(parts[rank], 2 * parts[rank])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def refuse_memory(rank: int, ranks: int, folder: Path) -> None:
    """One rank: writes why it and the others have no memory in common."""
    join(rank, ranks, folder)
    workspace, reasons = map_workspace(rank, ranks, None, CPU, SIZE)
    assert workspace is None
    torch.save(list(reasons), folder / f"{rank}.pt")
    dist.destroy_process_group()


def run(function: object, ranks: int, folder: Path) -> list[list[torch.Tensor]]:
    """What each of `ranks` processes wrote."""
    torch.multiprocessing.start_processes(function, (ranks, folder), ranks, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_same_bits(ranks: int, tmp_path: Path) -> None:
    results = run(sum_parts, ranks, tmp_path)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
    for i, dtype in enumerate(DTYPES):
        parts, residual = parts_of(ranks, dtype)
        summed, with_residual, normed, once, twice = results[0][5 * i : 5 * i + 5]
        total = sum(part.double() for part in parts)
        assert isinstance(total, torch.Tensor)
        allowed = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}[dtype]
        # Of the numbers that cancel, what was rounded on the way is left.
        size = torch.stack([part.double().abs() for part in parts]).sum(0)
        for got, times in ((summed, 1), (once, 1), (twice, 2)):
            error = (got.double() - times * total).abs()
            assert bool((error <= times * allowed * size).all())
        inner = summed.double() / (summed.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(with_residual.double(), residual.double() + inner, atol=16 * allowed, rtol=0.0)
        root = (with_residual.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(normed.double(), with_residual.double() / root, atol=16 * allowed, rtol=0.0)


def test_ranks_agree_on_why_they_share_no_memory(tmp_path: Path) -> None:
    first, second = run(refuse_memory, 2, tmp_path)
    assert first == second
    assert [str(reason).partition(":")[0] for reason in first] == ["rank 0", "rank 1"]
