"""The time of a step from its work, against numbers computed by hand."""

from __future__ import annotations

import pytest

from allotrope.attention.cost import StepCost
from allotrope.attention.registry import FAMILIES
from allotrope.engine.planning.step_cost import DENSE, EXPERTS, HEAD, StepWork
from allotrope.engine.planning.step_time import ATTENTION, LAUNCHES, PARTS, PASSED, PRODUCTS, StepTime
from allotrope.kernels.chip_figures import FIGURES, Fitted

H200, A100 = FIGURES["h200"], FIGURES["a100"]
BANDWIDTH, BF16, FP8 = H200.bandwidth.value, H200.rates["bf16"].value, H200.rates["fp8"].value
FITTED = Fitted(step=1e-3, launch=1e-6, bytes=1.1, flops=1.2, passed=2.0, prompts=5e-3, host_launch=1e-4)
WORK = StepWork(
    classes={
        "mha": StepCost(10**9, 10**12),
        EXPERTS: StepCost(10**10, 10**12, 10**12),
        DENSE: StepCost(10**9, 10**11),
        HEAD: StepCost(10**9, 10**11),
    },
    launches=100,
    passed=10**8,
    padding=StepCost(0, 10**13, 10**13),
)


def test_the_least_time_is_the_roofline_of_each_class() -> None:
    assert StepTime(H200, FITTED).least(WORK.classes) == pytest.approx(
        10**12 / BF16 + 10**10 / BANDWIDTH + 2 * max(10**9 / BANDWIDTH, 10**11 / BF16)
    )


def test_parts_by_hand() -> None:
    time = StepTime(H200, FITTED)
    found = time.parts(WORK)
    assert tuple(found) == PARTS
    assert found[ATTENTION] == pytest.approx(1.2 * 10**12 / BF16 / FAMILIES["mha"].matmul_share)
    # Rows of padding are computed, and not read.
    assert found[EXPERTS] == pytest.approx(1.2 * (10**12 + 10**13) / FP8)
    assert found[PRODUCTS] == pytest.approx(max(1.1 * 2 * 10**9 / BANDWIDTH, 1.2 * 2 * 10**11 / BF16))
    assert found[PASSED] == pytest.approx(2 * 10**8 / BANDWIDTH) and found[LAUNCHES] == pytest.approx(1e-4)
    assert time.kernels(WORK) == pytest.approx(sum(found.values()))
    assert time.decode(WORK) == pytest.approx(1e-3 + time.kernels(WORK))


def test_a_step_with_prompts_waits_for_the_slower_of_host_and_device() -> None:
    small = StepWork({DENSE: StepCost(1000)}, 100, 0, StepCost())
    time = StepTime(H200, FITTED)
    assert time.prompt_step(small) == pytest.approx(100 * 1e-4)
    assert time.prompt_step(WORK) == pytest.approx(max(time.kernels(WORK), 1e-2))
    assert time.prompts([small, small]) == pytest.approx(5e-3 + 2 * 1e-2)
    # As piecewise graphs the host has a fifth of the work, and kernels take what they take.
    assert time.prompt_step(small, graphs=True) == pytest.approx(100 * 1e-4 / 5)
    assert time.prompt_step(WORK, graphs=True) == pytest.approx(time.kernels(WORK))


def test_a_chip_without_fp8_products_multiplies_in_bf16() -> None:
    cost = {DENSE: StepCost(0, 10**12, 10**12)}
    assert StepTime(A100, FITTED).least(cost) == pytest.approx(10**12 / A100.rates["bf16"].value)
    assert StepTime(H200, FITTED).least(cost) == pytest.approx(10**12 / FP8)
