"""Memory that processes share by a descriptor: it has no name, and is gone with the last process that has it open."""

from __future__ import annotations

import os
import tempfile


def create_shared_memory(size: int) -> int:
    """A descriptor of `size` bytes of zeros."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("allotrope")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
