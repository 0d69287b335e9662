"""Bytes of a GPU's memory as PyTorch takes them from other libraries."""

from __future__ import annotations

import torch


class DeviceBytes:
    """`size` bytes at `address`. A tensor of them refers to this object, and owns no memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}

    def tensor(self, device: torch.device) -> torch.Tensor:
        """[size] bytes on `device`, which has the memory."""
        return torch.as_tensor(self, device=device)
