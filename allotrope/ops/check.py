"""Is a backend of an operation right? It is held against the operation's reference, over the operation's own cases.

for case in registered_cases()["rms_norm"].values():
    assert not check_op(RMS_NORM, backend, case, torch.bfloat16, device)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from allotrope.kernels.backend import Backend, Op
from allotrope.kernels.tolerance import KINDS, compare
from allotrope.ops.case import OpCase, arguments_of
from allotrope.ops.matmul.weight import Weight

SEED = 20


def check_op(op: Op, backend: Backend, case: OpCase, dtype: torch.dtype, device: torch.device) -> list[str]:
    """What is wrong with the outputs of `backend`, with activations of `dtype`; empty if nothing is.

    Floating-point outputs are held against what the reference returns for arguments that are widened to fp32. Integers
    must be equal, in however many bits they are kept.
    """
    reference = op.backends[-1]
    got, want = outputs(backend, case, dtype, device), outputs(reference, case, dtype, device)
    exact = outputs(reference, case, dtype, device, widen=True)
    if len(got) != len(want):
        return [f"{len(got)} tensors; wanted {len(want)}"]
    found = (_wrong(*three, case.tolerance) for three in zip(got, want, exact, strict=True))
    return [reason for reason in found if reason is not None]


def outputs(
    backend: Backend, case: OpCase, dtype: torch.dtype, device: torch.device, *, widen: bool = False
) -> list[torch.Tensor]:
    """What a backend returns, and its arguments after it: it may have written into them. `widen`: give it fp32."""
    arguments = arguments_of(case, backend, torch.Generator().manual_seed(SEED), dtype, device)
    if widen:
        arguments = _widened(arguments, dtype)
    return list(_tensors((backend.run(*arguments), arguments)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in results or arguments, in one order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Weight):
        # Each backend has its own form of one.
        return
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _widened(value: Any, dtype: torch.dtype) -> Any:
    """The same with every tensor of `dtype` in fp32: what the reference then returns is exact."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == dtype else value
    if isinstance(value, tuple):
        parts = [_widened(one, dtype) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_widened(one, dtype) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _widened(getattr(value, one.name), dtype) for one in fields(value)})
    return value


def _wrong(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, tolerance: torch.dtype | None) -> str | None:
    """Why an output is wrong. `want`: of the reference. `exact`: of the reference with inputs in fp32."""
    if not want.is_floating_point() and not want.is_complex():
        got = got.to(want.dtype)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}; wanted {want.dtype} {tuple(want.shape)}"
    if want.numel() == 0 or torch.equal(got, want):
        return None
    if want.dtype not in KINDS:
        return f"{int((got != want).sum())} of {want.numel()} values of {want.dtype} differ"
    dtype_of_tolerance = tolerance or want.dtype
    found = compare(got.to(dtype_of_tolerance), exact, KINDS[dtype_of_tolerance])
    return None if found else str(found)
