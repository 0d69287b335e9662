"""The table of chips: complete, plausible, and open about what nobody measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from allotrope.kernels.chip import CHIPS
from allotrope.kernels.chip_figures import FIGURES, FITTED, ChipFigures, figures_of, known_chips

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CHIP_ROWS = [pytest.param(one, id=name) for name, one in FIGURES.items()]


def test_every_architecture_that_kernels_are_compiled_for_has_a_chip() -> None:
    for arch, chip in CHIPS.items():
        found = figures_of(arch)
        assert found is not None and found.chip == chip
    assert set(known_chips()) == {*FIGURES, *CHIPS}
    assert figures_of("sm_30") is None and figures_of("cpu") is None


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "a100", "l40s", "mi300x", "mi355x"])
def test_a_chip_has_its_name(name: str) -> None:
    found = figures_of(name.upper())
    assert found is figures_of(name) and found is not None and found.name == name


@pytest.mark.parametrize("figures", CHIP_ROWS)
def test_figures_are_plausible(figures: ChipFigures) -> None:
    assert 40 << 30 < figures.memory.value < 300 << 30
    # Bytes per second of memory, and more operations than bytes by two or three orders of magnitude.
    assert 5e11 < figures.bandwidth.value < 1e13
    assert 100 < figures.rates["bf16"].value / figures.bandwidth.value < 500
    rates = [figures.rates[kind].value for kind in ("bf16", "fp8", "fp4") if kind in figures.rates]
    assert all(1.8 < after / before < 2.1 for before, after in itertools.pairwise(rates))
    # Products of FP8 numbers are counted where the chip has them.
    assert ("fp8" in figures.rates) == (figures.chip.has_e4m3fn or figures.chip.has_e4m3fnuz)
    links = [figures.link] + ([] if figures.network is None else [figures.network])
    for link in links:
        assert link.bandwidth.value < figures.bandwidth.value / 5
        assert 1e-6 < link.latency.value <= link.library_latency.value < 1e-4
    if figures.network is not None:
        assert figures.network.bandwidth.value < figures.link.bandwidth.value
        assert figures.network.latency.value > figures.link.latency.value


@pytest.mark.parametrize("figures", CHIP_ROWS)
def test_every_number_has_a_source_and_assumptions_are_said(figures: ChipFigures) -> None:
    stated = [figures.memory, figures.bandwidth, *figures.rates.values()]
    link = figures.link
    stated += [link.bandwidth, link.pair_bandwidth, link.latency, link.library_latency]
    assert all(len(one.source) > 10 for one in stated)
    assert len(figures.assumed()) == sum(not one.measured for one in stated)
    if figures.network is not None:
        assert len(figures.assumed(hosts=2)) == len(figures.assumed()) + 3


def test_the_measured_chip_assumes_nothing_within_a_host() -> None:
    assert FIGURES["h200"].assumed() == []
    assert any("not measured on this chip" in text for text in FIGURES["b200"].assumed())


def test_the_constants_in_use_are_those_that_were_fitted() -> None:
    fitted = json.loads((RESULTS / "cost_model_h200.json").read_text())
    assert fitted["constants"] == dataclasses.asdict(FITTED)
    assert max(error for errors in fitted["mean_error"].values() for error in errors.values()) <= 0.15


def test_ceilings_are_those_of_the_kernel_benchmark() -> None:
    ceilings = json.loads((RESULTS / "kernels_mha.json").read_text())["ceilings"]
    figures = FIGURES["h200"]
    assert figures.bandwidth.value == pytest.approx(ceilings["copy"], rel=1e-3)
    for kind in ("bf16", "fp8"):
        assert figures.rates[kind].value == pytest.approx(ceilings["matmul"][kind], rel=1e-3)
