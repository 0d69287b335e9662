"""Every backend of every operation against the operation's reference, over the operation's own cases."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_under_test import DEVICE

from allotrope.kernels.backend import Op
from allotrope.kernels.chip import Chip, chip_of
from allotrope.ops.case import OpCase
from allotrope.ops.check import check_op, outputs
from allotrope.ops.registry import registered_cases, registered_ops


@pytest.fixture(autouse=True)
def triton_runs(own_choices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the interpreter runs Triton's kernels."""
    if DEVICE == "cpu" and importlib.util.find_spec("triton") is not None:
        monkeypatch.setattr("allotrope.kernels.triton_version.triton_reasons", lambda chip: [])


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
    wrong = check_op(op, backend, case, dtype, torch.device(DEVICE))
    assert not wrong, wrong


def test_a_backend_that_is_wrong_is_found() -> None:
    """Off by a little more than rounding, of another type, and with other integers."""
    device = torch.device(DEVICE)
    norm, group = (registered_ops()[name] for name in ("rms_norm", "moe_group"))

    def spoiled(op: Op, change: Callable[[Any], Any]) -> list[str]:
        right = op.backends[-1]
        wrong = replace(right, run=lambda *given: change(right.run(*given)))
        return check_op(op, wrong, next(iter(registered_cases()[op.name].values())), torch.float32, device)

    assert not spoiled(norm, lambda y: y)
    assert not spoiled(group, lambda groups: [one.int() for one in groups])
    assert "peak=" in spoiled(norm, lambda y: y * 1.001)[0]
    assert "wanted torch.float32" in spoiled(norm, lambda y: y.double())[0]
    assert "values of torch.int32 differ" in spoiled(group, lambda groups: [one + 1 for one in groups])[0]


@pytest.mark.parametrize("name", registered_ops())
def test_every_operation_has_cases(name: str) -> None:
    """Each of them with numbers that the reference takes."""
    cases = registered_cases().get(name, {})
    assert cases, f"no cases.py has cases of {name}"
    (reference,) = (one for one in registered_ops()[name].backends if one.name == "reference")
    for case, dtype in ((one, dtype) for one in cases.values() for dtype in one.dtypes):
        assert not reference.rejects(case.spec(dtype), chip_of(torch.device(DEVICE)))
        found = outputs(reference, case, dtype, torch.device(DEVICE))
        assert any(one.numel() for one in found)


def test_no_case_is_of_an_operation_that_is_not() -> None:
    assert set(registered_cases()) <= set(registered_ops())
