"""A CPU as a platform of SGLang, whose own CPU engine needs packages that no index has.

`activate` is the entry point. The platform takes the place of none: it is there where SGLang has no device to run on.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from allotrope.plugins.sglang import NAME

_GROUP = "sglang.srt.platforms"


def activate() -> str | None:
    """Where the platform's class lies; None where SGLang has another device or the user names another platform."""
    named = os.environ.get("SGLANG_PLATFORM")
    if named == NAME or (not named and _is_last_resort()):
        return f"{__name__}_cpu.CpuPlatform"
    return None


def _is_last_resort() -> bool:
    import torch

    others = [found.name for found in entry_points(group=_GROUP) if found.name != NAME]
    wants_own = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "0"
    return not others and not wants_own and not torch.accelerator.is_available()
