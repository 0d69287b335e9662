"""Allotrope: one attention stack for hybrid language models.

For offline use, write `from allotrope import LLM, SamplingParams`. Importing the package loads neither torch nor a
server package: each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allotrope.env import spinning_briefly

if TYPE_CHECKING:
    from allotrope.llm import LLM as LLM
    from allotrope.request import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_MODULES = {"LLM": "allotrope.llm", "SamplingParams": "allotrope.request"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with spinning_briefly():
            return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'allotrope' has no attribute {name!r}")
