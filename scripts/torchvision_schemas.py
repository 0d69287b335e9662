"""Lets PyPI's torchvision be imported beside a CPU build of torch.

That build of torchvision needs CUDA libraries to define its operators, and refuses to be imported without them. This
module is put into an environment's site-packages with a `.pth` file that imports it: it defines the operators, which
nobody calls, when torchvision is first imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class DefineSchemas(MetaPathFinder):
    """Finds nothing: it is asked before the others."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            # Operators live as long as their library object.
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(self)
        return None


KEPT: list[DefineSchemas] = []
sys.meta_path.insert(0, DefineSchemas())
