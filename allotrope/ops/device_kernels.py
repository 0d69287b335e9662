"""The Triton kernels of layers, where they run: every caller has a plain way for where they do not."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

from allotrope.kernels.chip import chip_of
from allotrope.kernels.triton_version import triton_reasons

log = logging.getLogger("allotrope.layers")


@functools.cache
def device_kernels(name: str, device: torch.device) -> ModuleType | None:
    """The module `ops.<name>.triton`; None where Triton's kernels do not run on `device`."""
    reasons = triton_reasons(chip_of(device))
    if reasons:
        _say(device.type, "; ".join(reasons))
        return None
    return importlib.import_module(f"allotrope.ops.{name}.triton")


@functools.cache
def _say(device_type: str, reasons: str) -> None:
    """Say once that a GPU's layers go without our kernels; a CPU has other ones."""
    if device_type != "cpu":
        log.warning("layers run at less than full speed, by PyTorch alone: %s", reasons)
