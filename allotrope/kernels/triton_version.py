"""Whether Triton kernels run on a chip with the installed Triton, and which types they may hold there."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
from typing import Any

import torch

from allotrope.kernels.chip import Chip

log = logging.getLogger("allotrope.kernels")

# The oldest and the newest Triton that the kernels are tested with.
TRITON_VERSIONS = ((3, 6), (3, 9))


# Older NVIDIA chips multiply no bf16.
MIN_CAPABILITY = (8, 0)
# KiB of shared memory that launches of released sizes count on.
MIN_SHARED_MEMORY = {"nvidia": 99, "amd": 64}


def needs_triton(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects` of Triton kernels that take any spec."""
    return triton_reasons(chip)


def triton_reasons(chip: Chip) -> list[str]:
    """Why no Triton kernel runs on `chip`; Triton is not imported where it runs none."""
    reasons = [] if chip.is_gpu else [f"chip={chip.arch} (needs a GPU)"]
    if chip.vendor == "nvidia" and chip.capability < MIN_CAPABILITY:
        reasons.append(f"chip={chip.arch} (needs sm_80 or newer: the kernels multiply bf16)")
    least = MIN_SHARED_MEMORY.get(chip.vendor, 0)
    if chip.shared_memory < least * 1024:
        reasons.append(f"shared_memory={chip.shared_memory // 1024} KiB (needs {least} KiB)")
    if not _has_triton():
        reasons.append("triton is not installed")
    elif not reasons:
        reasons.extend(version_reasons(_triton_version()))
    return reasons


def e4m3fn_reasons(name: str, dtype: torch.dtype, chip: Chip) -> list[str]:
    """Why Triton's kernels cannot read and write tensors of `dtype` on `chip`. `name`: what the spec calls the type."""
    if dtype != torch.float8_e4m3fn or chip.triton_has_e4m3fn:
        return []
    return [f"{name}=float8_e4m3fn on {chip.arch} (needs sm_89 or newer)"]


@functools.cache
def version_reasons(version: str) -> tuple[str, ...]:
    """Why the kernels cannot be compiled by this version of Triton. One that is newer than those tested is tried, and
    what may be wrong with it is said once."""
    found = re.match(r"(\d+)\.(\d+)", version)
    oldest, newest = (".".join(map(str, one)) for one in TRITON_VERSIONS)
    if found is None:
        log.warning(
            "triton=%r is no version that can be read; the kernels are tested with %s to %s", version, oldest, newest
        )
        return ()
    pair = (int(found[1]), int(found[2]))
    if pair < TRITON_VERSIONS[0]:
        return (f"triton={version} (needs {oldest} or newer: it lacks what the kernels call)",)
    if pair > TRITON_VERSIONS[1]:
        log.warning(
            "triton=%s is newer than those the kernels are tested with (%s to %s): if one cannot be compiled, install "
            "a tested version",
            *(version, oldest, newest),
        )
    return ()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _triton_version() -> str:
    """The installed version; builds for some chips come under other names, and only the package itself knows it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("triton").__version__)
