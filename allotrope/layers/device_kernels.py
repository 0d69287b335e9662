"""The Triton kernels of layers, where they run: every caller has a plain way for where they do not."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from allotrope.attention.backend import triton_reasons


@functools.cache
def device_kernels(name: str, device: torch.device) -> ModuleType | None:
    """The module `layers.<name>_triton`; None where Triton's kernels do not run on `device`."""
    if triton_reasons(device):
        return None
    return importlib.import_module(f"allotrope.layers.{name}_triton")
