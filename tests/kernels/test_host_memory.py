"""What a process gives back to the system, and what it must keep."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from allotrope.kernels import host_memory

SMAPS = Path("/proc/self/smaps")
SIZE = 1 << 20

pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="the system does not list a process's memory")


def resident(address: int) -> int:
    """KiB of the mapping that begins at `address`."""
    lines = iter(SMAPS.read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:08x}-"):
            return next(int(entry.split()[1]) for entry in lines if entry.startswith("Rss:"))
    raise AssertionError("there is no such mapping")


def mapped(path: Path) -> tuple[mmap.mmap, int]:
    """A private mapping of a file's bytes, all read once, and its address."""
    with path.open("rb") as file:
        found = mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert sum(found[i] for i in range(0, SIZE, 4096)) >= 0
    return found, ctypes.addressof(ctypes.c_char.from_buffer(found))


def protect(address: int) -> None:
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), mmap.PROT_READ) == 0


def test_pages_of_files_come_back_when_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * (SIZE // 256))
    found, address = mapped(tmp_path / "file")
    protect(address)
    assert resident(address) == SIZE // 1024
    host_memory.unmap_code("test 1")
    assert resident(address) == 0
    assert found[:] == bytes(range(256)) * (SIZE // 256)


def test_what_was_written_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    found, address = mapped(tmp_path / "file")
    found[5000] = 7
    protect(address)
    host_memory.unmap_code("test 2")
    assert found[5000] == 7 and resident(address) == SIZE // 1024


def test_memory_without_a_file_stays() -> None:
    numbers = bytearray(range(256)) * 4096
    host_memory.give_back()
    host_memory.unmap_code("test 3")
    assert numbers == bytearray(range(256)) * 4096


def test_it_is_done_once_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    found, address = mapped(tmp_path / "file")
    protect(address)
    host_memory.unmap_code("once")
    assert found[SIZE - 1] == 0
    left = resident(address)
    host_memory.unmap_code("once")
    assert resident(address) == left > 0
