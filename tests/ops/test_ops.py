"""Every backend of every operation against the operation's reference, over the operation's own cases."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from device_under_test import DEVICE

from allotrope.attention.check import KINDS, compare
from allotrope.kernels.chip import Chip, chip_of
from allotrope.ops.case import OpCase, arguments_of
from allotrope.ops.matmul.weight import Weight
from allotrope.ops.registry import registered_cases, registered_ops

SEED = 20


@pytest.fixture(autouse=True)
def triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the interpreter runs Triton's kernels."""
    if DEVICE == "cpu" and importlib.util.find_spec("triton") is not None:
        monkeypatch.setattr("allotrope.kernels.triton_version.triton_reasons", lambda chip: [])


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
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))


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


def _outputs(backend: Any, case: OpCase, dtype: torch.dtype, *, exact: bool = False) -> list[torch.Tensor]:
    """What a backend returns, and its arguments after it: it may have written into them."""
    arguments = arguments_of(case, backend, torch.Generator().manual_seed(SEED), dtype, torch.device(DEVICE))
    if exact:
        arguments = _widened(arguments, dtype)
    return list(_tensors((backend.run(*arguments), arguments)))


def _wrong(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, tolerance: torch.dtype | None) -> str | None:
    """Why an output is wrong. `want`: of the reference. `exact`: of the reference with inputs in fp32."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}; wanted {want.dtype} {tuple(want.shape)}"
    if want.numel() == 0 or torch.equal(got, want):
        return None
    if want.dtype not in KINDS:
        return f"{int((got != want).sum())} of {want.numel()} values of {want.dtype} differ"
    judged = tolerance or want.dtype
    found = compare(got.to(judged), exact, KINDS[judged])
    return None if found else str(found)


CASES = [
    pytest.param(op, backend.name, case, dtype, id=f"{op.name}-{backend.name}-{name}-{str(dtype)[6:]}")
    for op in registered_ops().values()
    for name, case in registered_cases().get(op.name, {}).items()
    for backend, dtype in itertools.product(op.backends[:-1], case.dtypes)
]


@pytest.mark.parametrize(("op", "backend_name", "case", "dtype"), CASES)
def test_backends_return_what_the_reference_returns(
    op: Any, backend_name: str, case: OpCase, dtype: torch.dtype
) -> None:
    chip: Chip = chip_of(torch.device(DEVICE))
    (backend,) = (one for one in op.backends if one.name == backend_name)
    if reasons := backend.rejects(case.spec(dtype), chip):
        pytest.skip("; ".join(reasons))
    reference = op.backends[-1]
    got, want = _outputs(backend, case, dtype), _outputs(reference, case, dtype)
    exact = _outputs(reference, case, dtype, exact=True)
    assert len(got) == len(want)
    wrong = [text for three in zip(got, want, exact, strict=True) if (text := _wrong(*three, case.tolerance))]
    assert not wrong, wrong


@pytest.mark.parametrize("name", registered_ops())
def test_every_operation_has_cases(name: str) -> None:
    """Each of them with numbers that the reference takes."""
    cases = registered_cases().get(name, {})
    assert cases, f"no cases.py has cases of {name}"
    (reference,) = (one for one in registered_ops()[name].backends if one.name == "reference")
    for case, dtype in ((one, dtype) for one in cases.values() for dtype in one.dtypes):
        assert not reference.rejects(case.spec(dtype), chip_of(torch.device(DEVICE)))
        outputs = _outputs(reference, case, dtype)
        assert any(one.numel() for one in outputs)


def test_no_case_is_of_an_operation_that_is_not() -> None:
    assert set(registered_cases()) <= set(registered_ops())
