"""Counts what would be kernels of a captured step, where there is no device to capture one."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Memory alone.
_FREE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::detach")


class Launches(TorchDispatchMode):
    """`names`: the operations, in order, that start a kernel on a device: all but views and bare memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if not function.is_view and name.partition(".")[0] not in _FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))
