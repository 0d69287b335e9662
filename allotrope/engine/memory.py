"""The memory of a device: bytes that are free, bytes of the weights, and the share that may be used.

Owns the questions to the device and to the system. Must not know config.json or how caches are laid out.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from allotrope.config import EngineConfig
from allotrope.kernels.chip import free_memory as free_device_memory
from allotrope.layers.embedding import Head
from allotrope.layers.moe import Experts
from allotrope.layers.weights import packed_bytes


def weight_bytes_of(model: nn.Module) -> int:
    """Bytes of a rank's weights. `model`: made without memory."""
    copies = sum(module.copied_bytes() for module in model.modules() if isinstance(module, Experts | Head))
    return copies + sum(packed_bytes(one) for one in model.parameters())


def utilization(config: EngineConfig, device: torch.device) -> float:
    """The share of free memory that may be used: a GPU's for everything, a CPU's for caches."""
    if config.memory_utilization is not None:
        return config.memory_utilization
    return 0.9 if device.type == "cuda" else 0.5


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now."""
    return free_device_memory(device) if device.type == "cuda" else available_memory()


def available_memory() -> int:
    """Bytes of main memory that can be had without swapping, within the limits of the container."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)
