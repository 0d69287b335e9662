"""Warm-up: steps run whose kernels are compiled, several at once, and not launched.

A step of a warm-up runs as it is, with the shapes, types and strides of a true one: a kernel of `pdl_jit` or
`no_pdl_jit` is compiled in the background for exactly the arguments that it gets. Owns: which thread warms up, the
threads that compile, and what lies in memory that kernels would have written. Must not know: which steps there are.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allotrope.kernels.chip import chip_of
from allotrope.kernels.threads import threads_of
from allotrope.kernels.triton_version import triton_reasons
from allotrope.logs import one_line

_warming_up: ContextVar[bool] = ContextVar("warming_up", default=False)

_aten = torch.ops.aten
# Of more threads that compile, each would wait for Python most of the time.
_MAX_THREADS = 16
_UNWRITTEN = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


@dataclass
class Compiled:
    """How many kernels a warm-up compiled, once it is over. `failed`: those that cannot be; a launch will say why."""

    kernels: int = 0
    failed: int = 0


def warming_up() -> bool:
    """Whether this thread warms up: then no kernel is launched, and no collective is entered."""
    return _warming_up.get()


def warm_up_steps(steps: Callable[[], object], device: torch.device, ranks: int, log: logging.Logger) -> None:
    """Warm up by what `steps` runs on `device`, which each of `ranks` does at once, and log what was compiled.

    Does nothing where Triton does not run. Where it fails kernels are compiled as they are first launched.
    """
    if triton_reasons(chip_of(device)):
        return
    threads = threads_of(ranks, _MAX_THREADS)
    started = time.monotonic()
    try:
        with warmup(threads, device) as compiled:
            steps()
    except Exception as error:
        # Whatever it was, the start does not depend on it.
        reason = one_line(f"{type(error).__name__}: {error}")
        log.warning("the warm-up failed, kernels are compiled as they are first launched: %s", reason)
        return
    level, seconds = logging.INFO if compiled.kernels else logging.DEBUG, time.monotonic() - started
    log.log(level, "compiled %d kernels in %.1f s, %d at once", compiled.kernels, seconds, threads)
    if compiled.failed:
        log.warning("%d kernels cannot be compiled: they fail if they are launched", compiled.failed)


@contextlib.contextmanager
def warmup(threads: int, device: torch.device) -> Iterator[Compiled]:
    """Warm up by the steps inside; at the end every kernel that they would launch has been compiled, `threads` at once,
    and on a GPU is loaded, with the host's code that launches it, which is compiled as well.

    Operations of torch do run. Memory that a kernel was to write holds zeros, which are safe indices: page, slot and
    row 0 always exist. The results of such a step mean nothing. A kernel that cannot be compiled is passed over: it
    will fail where it is launched.
    """
    compiled = Compiled()
    with _pool(threads, device) as pool, _mode(pool, device) as mode:
        token = _warming_up.set(True)
        try:
            with _Zeroed():  # type: ignore[no-untyped-call]
                yield compiled
        finally:
            _warming_up.reset(token)
            # From Triton 3.9 on the mode forgets them at its end.
            futures = list(mode.raw_futures)
    compiled.failed = sum(future.exception() is not None for future in futures)
    compiled.kernels = len(futures) - compiled.failed


def _pool(threads: int, device: torch.device) -> ThreadPoolExecutor:
    if device.type == "cpu":
        return ThreadPoolExecutor(threads, "compile")
    # Which GPU is meant is known thread by thread.
    number = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (number,))


def _mode(pool: Executor, device: torch.device) -> Any:
    from triton import AsyncCompileMode

    class Loading(AsyncCompileMode):
        """Kernels are loaded where they were compiled, not one by one as they are launched."""

        # What follows is Triton's own: what it does with a kernel that is there, and from 3.9 on with one that is not.
        def submit(self, key: Any, compile_fn: Callable[[], Any], *others: Callable[[Any], None]) -> Any:
            def loaded() -> Any:
                kernel = compile_fn()
                _ = kernel.run
                return kernel

            return super().submit(key, loaded, *others)

    return (AsyncCompileMode if device.type == "cpu" else Loading)(pool, ignore_errors=True)


def report_late_kernels(device: torch.device, log: logging.Logger) -> None:
    """From now on say in `log` which kernel is compiled, and for how long all wait for it: it was not warmed up."""
    if triton_reasons(chip_of(device)):
        return
    from triton import knobs

    def listener(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        name = getattr(src, "name", None) or getattr(getattr(src, "fn", None), "__name__", "?")
        how = "found compiled" if cache_hit else "compiled"
        log.info("kernel %s was not warmed up: %s in %.0f ms while requests are served", name, how, times.total / 1e3)

    knobs.compilation.listener = listener


def compile_for(launch: Callable[..., Any], *args: Any, **options: Any) -> None:
    """What a warm-up does in place of `launch(*args, **options)`, which is Triton's `run` of a kernel."""
    kernel = launch(*args, **{**options, "warmup": True})
    # One that is ready by now goes where launches look first: layers that follow ask for it again and again.
    future = getattr(kernel, "future", None)
    if future is not None and future.done():
        kernel.result(ignore_errors=True)


class _Zeroed(TorchDispatchMode):
    """Zeroes memory that PyTorch allocates uninitialised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in _UNWRITTEN else out
