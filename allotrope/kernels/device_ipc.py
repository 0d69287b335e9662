"""Memory of a GPU that processes of one host have in common: IPC handles of CUDA's driver or of HIP.

Owns: the calls of the library. Must not know: what lies in the memory. PyTorch's own symmetric memory numbers the
mappings of a process, so that a process whose peers are new ones cannot map a second time; its shared tensors open a
peer's memory in the peer's context, which costs each rank some 500 MB on every other GPU.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.kernels.chip import chip_of
from allotrope.kernels.device_bytes import DeviceBytes

_HANDLE_BYTES = 64
# cudaIpcMemLazyEnablePeerAccess and hipIpcMemLazyEnablePeerAccess.
_ENABLE_PEER_ACCESS = 1
# hipDeviceMallocUncached: other GPUs see a write before the kernel ends.
_UNCACHED = 3


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * _HANDLE_BYTES)]


@dataclass(frozen=True)
class _Library:
    """The calls, named alike for CUDA and HIP; each returns 0 or an error's number."""

    allocate: Callable[[Any, int], int]
    free: Callable[[Any], int]
    export: Callable[[Any, Any], int]
    open: Callable[[Any, _Handle, int], int]
    close: Callable[[Any], int]


@functools.cache
def _library(vendor: str) -> _Library:
    amd = vendor == "amd"
    lib = ctypes.CDLL("libamdhip64.so" if amd else "libcuda.so.1")
    if amd:
        names = ("hipFree", "hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipIpcCloseMemHandle")
        uncached = _typed(lib.hipExtMallocWithFlags, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        allocate = functools.partial(_allocate_uncached, uncached)
    else:
        names = ("cuMemFree_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle")
        allocate = _typed(lib.cuMemAlloc_v2, ctypes.c_void_p, ctypes.c_size_t)
    free, get_handle, open_handle, close_handle = (getattr(lib, name) for name in names)
    return _Library(
        allocate,
        _typed(free, ctypes.c_void_p),
        _typed(get_handle, ctypes.c_void_p, ctypes.c_void_p),
        _typed(open_handle, ctypes.c_void_p, _Handle, ctypes.c_uint),
        _typed(close_handle, ctypes.c_void_p),
    )


def _library_of(device: torch.device) -> _Library:
    return _library(chip_of(device).vendor)


def _typed(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _allocate_uncached(function: Any, into: Any, size: int) -> int:
    return int(function(into, size, _UNCACHED))


def _checked(what: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{what} failed with error {status} of the driver")


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """`size` zeroed bytes on `device` that `export` takes."""
    with torch.cuda.device(device):
        # The driver's calls are of the current context, which PyTorch makes at first use.
        torch.cuda.synchronize(device)
        library, address = _library_of(device), ctypes.c_void_p()
        _checked("allocating memory for other processes", library.allocate(ctypes.byref(address), size))
        assert address.value is not None, "the driver says that it is allocated"
        memory = DeviceBytes(address.value, size)
        # Freed when no tensor refers to it any longer.
        weakref.finalize(memory, library.free, address).atexit = False
        return memory.tensor(device).zero_()


def export(memory: torch.Tensor) -> bytes:
    """The handle by which another process of this host maps what `allocate` gave."""
    handle = _Handle()
    with torch.cuda.device(memory.device):
        _checked("exporting memory", _library_of(memory.device).export(ctypes.byref(handle), memory.data_ptr()))
    return ctypes.string_at(ctypes.addressof(handle), _HANDLE_BYTES)


class Mapping:
    """Another process's memory as `device` sees it, from `address` on, until nothing refers to this any longer."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        library, address = _library_of(device), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            given = _Handle.from_buffer_copy(handle)
            _checked("mapping memory", library.open(ctypes.byref(address), given, _ENABLE_PEER_ACCESS))
        assert address.value is not None, "the driver says that it is mapped"
        self.address = address.value
        weakref.finalize(self, library.close, address).atexit = False
