"""Python's garbage collector beside steps: a full collection walks over all that a process holds, a tenth of a second
and more with a model loaded, and the tokens of some hundred requests bring one every hundred steps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Collections within pass over what was made before; behind it they do not. Where something is frozen already,
    whoever did that is left to it."""
    if gc.get_freeze_count():
        yield
        return
    # What is young and unreachable would wait for a full collection.
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
