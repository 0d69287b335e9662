"""What a process gives back to the system, and what it must keep."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from allotrope.kernels import host_memory

SMAPS = Path("/proc/self/smaps")
HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
SIZE = 1 << 20
BYTES = bytes(range(256)) * (SIZE // 256)
CODE = mmap.PROT_READ | mmap.PROT_EXEC

pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="the system does not list a process's memory")


def resident(address: int) -> int:
    """Bytes of the mapping that begins at `address`."""
    lines = iter(SMAPS.read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:08x}-"):
            return next(int(entry.split()[1]) * 1024 for entry in lines if entry.startswith("Rss:"))
    raise AssertionError("there is no such mapping")


@pytest.mark.parametrize(("protection", "left"), [(CODE, 0), (mmap.PROT_READ, SIZE)])
def test_code_comes_back_when_it_is_read(protection: int, left: int, tmp_path: Path) -> None:
    """Files that are only read are not code: they may be gone, and something else be there."""
    (tmp_path / "file").write_bytes(BYTES)
    with (tmp_path / "file").open("rb") as file:
        found = mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(found))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), protection) == 0
    assert found[:] == BYTES and resident(address) == SIZE
    host_memory.give_back()
    assert resident(address) == left
    assert found[:] == BYTES and resident(address) == SIZE


def test_memory_without_a_file_stays() -> None:
    """Also such that may be run."""
    numbers = bytearray(BYTES)
    found = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    found[:] = BYTES
    address = ctypes.addressof(ctypes.c_char.from_buffer(found))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), CODE) == 0
    host_memory.give_back()
    assert found[:] == numbers == BYTES


@pytest.mark.parametrize("shape", [(3, 1000), (3, 1 << 20), (1 << 22,)])
def test_weights_lie_in_huge_pages(shape: tuple[int, ...]) -> None:
    """Aligned to them, and as long as they are used."""
    found = host_memory.empty_weight(shape, torch.bfloat16)
    assert found.shape == shape and found.dtype == torch.bfloat16 and found.is_contiguous()
    numbers = torch.arange(found.numel()) % 251
    found.copy_(numbers.view(shape))
    part = found[-1]
    del found
    assert torch.equal(part.flatten(), numbers[-part.numel() :].bfloat16())
    if HUGE_PAGE.exists() and part.nbytes > 2 * int(HUGE_PAGE.read_text()):
        assert host_memory.empty_weight(shape, torch.bfloat16).data_ptr() % int(HUGE_PAGE.read_text()) == 0
