"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import functools

import torch

from allotrope.attention.backend import Backend, lazily, runs_anywhere, triton_reasons
from allotrope.attention.mha import compiled, cpu, reference
from allotrope.attention.mha.plan import build_plan
from allotrope.attention.mha.spec import MhaSpec

_TRITON = "allotrope.attention.mha.triton"
_TRITON_ROWS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def _triton_rejects(spec: MhaSpec, device: torch.device) -> list[str]:
    reasons = triton_reasons(device)
    if spec.kv_dtype not in _TRITON_ROWS:
        reasons.append(f"kv_dtype={spec.kv_dtype} (needs one of {', '.join(str(dtype) for dtype in _TRITON_ROWS)})")
    return reasons


class MHA:
    """Softmax attention over keys and values."""

    name = "mha"
    backends = (
        Backend("triton", _triton_rejects, lazily(_TRITON, "build_plan"), lazily(_TRITON, "run"), in_graphs=True),
        Backend("compiled", compiled.rejects, compiled.plan, compiled.run, fallbacks=compiled.fallbacks),
        Backend("cpu", cpu.rejects, build_plan, functools.partial(reference.run, core=cpu.attend)),
        Backend("reference", runs_anywhere, build_plan, reference.run),
    )
