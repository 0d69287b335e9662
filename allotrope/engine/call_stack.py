"""Looks at the call stacks of this process's threads: where one is, whether it waits for other ranks, who compiles."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
# Modules and functions: "" is all of them.
_COMPILERS = (("triton.compiler.compiler", "compile"), ("allotrope.kernels.c.compiler", ""))


def place_of(thread: int) -> tuple[str, bool]:
    """Where a thread is, below the libraries that it has called, and whether it waits in a collective or for a GPU."""
    frames = list(_frames(sys._current_frames().get(thread)))
    waits = any(_is_in(frame, module) for frame in frames for module in ("torch.distributed", "torch.cuda"))
    own = next((frame for frame in frames if not _is_in(frame, "torch") and not _is_of_python(frame)), None)
    if own is None:
        return "", waits
    return f"{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno})", waits


def compiles_kernel() -> bool:
    """Whether a thread of this process compiles a kernel, or waits until one is compiled."""
    return any(
        _is_in(frame, module) and frame.f_code.co_name.startswith(function)
        for top in sys._current_frames().values()
        for frame in _frames(top)
        for module, function in _COMPILERS
    )


def failed_in_collective(error: BaseException) -> bool:
    """Whether an error was raised by a collective."""
    return any(_is_in(frame, "torch.distributed") for frame in _traceback(error.__traceback__))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _traceback(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_of_python(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file


def _is_in(frame: FrameType, module: str) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name == module or name.startswith(module + ".")
