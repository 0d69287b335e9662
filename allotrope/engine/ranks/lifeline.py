"""The lifeline of a worker process: it ends with the process that started it, whatever either of them does.

Must not import torch: a worker process is bound to its parent before anything that takes long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent(descriptor: int, parent: int) -> None:
    """End this process as soon as the other end of the socket `descriptor` is closed or the process `parent` ends.

    A process that is stopped reads no socket, so on Linux the system kills it as well. That happens when the *thread*
    that started it ends: the parent keeps this thread for as long as the process is wanted.
    """
    os.set_inheritable(descriptor, False)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the system was asked.
        os._exit(0)
    threading.Thread(target=_end_at_the_close, args=(descriptor,), name="lifeline", daemon=True).start()


def _end_at_the_close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        # Nothing is ever sent.
        os.read(descriptor, 1)
    # A collective that waits for the parent would never end. Nothing is owed to anyone.
    os._exit(0)
