"""FP8 weights in panels of a byte a weight, on this CPU and on processors of other kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_blocks import (
    PROCESSORS,
    compile_blocks,
    compile_for_arm,
    compile_for_tiles,
    need,
    off,
    packed,
    run_blocks,
)

from allotrope.kernels.chip import CHIPS, chip_of
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.grouped_matmul import cpu_blocks as grouped
from allotrope.ops.grouped_matmul import reference as grouped_reference
from allotrope.ops.matmul import MatmulSpec, cpu_blocks, reference
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.weight import QuantizedWeight

BLOCKS, ROWS, TENSOR, RUNS = (
    Fp8(128, rows=128, fp8_activations=False),
    Fp8(0, fp8_activations=False),
    Fp8(0, rows=0, fp8_activations=False),
    Fp8(128, fp8_activations=False),
)
FORMATS = [
    pytest.param(BLOCKS, 128, id="blocks"),
    pytest.param(RUNS, 1, id="runs"),
    pytest.param(ROWS, 1, id="rows"),
    pytest.param(TENSOR, 1 << 20, id="tensor"),
]
# Relative differences of sums in fp32; of sums that become bf16, and of weights that do.
EXACT, ROUNDED = 2e-6, 4e-3
# Of many rows, inputs are unpacked once for all of them.
FEW_AND_MANY = (11, 23)
NONE = 0x7F


def made(format: Fp8, block_rows: int, outputs: int, inputs: int, *experts: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    return format.quantize(torch.randn(*experts, outputs, inputs, generator=generator) / inputs**0.5, block_rows)


def every_code(format: Fp8, outputs: int, inputs: int) -> QuantizedWeight:
    """Codes of all kinds but those that are no numbers."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, NONE, (outputs, inputs), generator=generator)
    codes |= torch.randint(0, 2, codes.shape, generator=generator) << 7
    scales = torch.rand(outputs, format.groups(inputs), generator=generator) / 1000
    return QuantizedWeight(format, codes.to(torch.uint8).view(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(41, 448), (150, 1280), (7, 96)])
@pytest.mark.parametrize(("format", "block_rows"), FORMATS)
def test_products_are_those_of_the_plain_weight(
    format: Fp8, block_rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """Nothing is rounded before the sums are; weights are, to bf16, where there are matrix units."""
    stored = made(format, block_rows, outputs, inputs)
    weight, bias = packed(stored, dtype), torch.randn(outputs)
    for rows in (1, 2, 8, 13, 33):
        x = torch.randn(rows, inputs + 8).to(dtype)[:, :inputs]
        wide = torch.full((rows, outputs + 3), torch.nan)
        cpu_blocks.matmul(x, weight, bias, out=wide[:, 1 : outputs + 1])
        wanted = x.double() @ stored.dequantize().double().t() + bias
        assert off(wide[:, 1 : outputs + 1], wanted) < (EXACT if dtype == torch.float32 or rows < 17 else ROUNDED)
        assert bool(wide[:, :1].isnan().all()) and bool(wide[:, outputs + 1 :].isnan().all())
        assert off(cpu_blocks.matmul(x, weight, bias), reference.matmul(x, stored, bias)) < ROUNDED


@pytest.mark.parametrize(("format", "block_rows"), FORMATS)
def test_packing_keeps_numbers_and_bytes(format: Fp8, block_rows: int) -> None:
    """Bit for bit, also where rows share their scales already; scales add little to a byte a weight."""
    stored = made(format, block_rows, 256, 512, 2)
    weight = packed(stored)
    assert torch.equal(weight.dequantize(), stored.dequantize())
    assert weight.nbytes == sum(cpu_blocks.packed_bytes(format, stored.shape, False)) <= 1.04 * stored.values.nbytes
    assert torch.equal(packed(format.share_scales(stored)).panels, weight.panels)
    ids = torch.tensor([200, 0, 17])
    assert torch.equal(packed(stored[1]).rows(ids, torch.float32), stored[1].rows(ids, torch.float32))


@pytest.mark.parametrize("format", [BLOCKS, ROWS, Fp8(32, fp8_activations=False)], ids=["blocks", "rows", "by 32"])
def test_every_number_there_is(format: Fp8) -> None:
    stored = every_code(format, 40, 256)
    weight = packed(stored)
    assert torch.equal(weight.dequantize(), stored.dequantize())
    x = torch.randn(5, 256)
    assert off(cpu_blocks.matmul(x, weight), x.double() @ stored.dequantize().double().t()) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", [NONE, NONE | 128])
def test_a_code_that_is_no_number_stays_none(code: int, dtype: torch.dtype) -> None:
    stored = every_code(BLOCKS, 40, 256)
    stored.values.view(torch.uint8)[17, 131] = code
    weight = packed(stored, dtype)
    wrong = weight.dequantize().isnan()
    assert bool(wrong[17, 131]) and int(wrong.sum()) == 1
    for rows in (1, 20):
        y = cpu_blocks.matmul(torch.ones(rows, 256, dtype=dtype), weight)
        assert bool(y[:, 17].isnan().all()) and int(y.isnan().sum()) == rows


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_activations_that_are_no_numbers_are_not_hidden(number: float) -> None:
    weight = packed(made(BLOCKS, 128, 40, 256))
    x = torch.ones(3, 256)
    x[0, 100] = number
    y = cpu_blocks.matmul(x, weight)
    assert not y[0].isfinite().any() and bool(y[1:].isfinite().all())


def test_a_row_does_not_depend_on_the_others() -> None:
    weight = packed(made(BLOCKS, 128, 40, 512))
    x = torch.randn(13, 512)
    whole = cpu_blocks.matmul(x, weight)
    assert torch.equal(torch.cat([cpu_blocks.matmul(x[i : i + 1], weight) for i in range(13)]), whole)


@pytest.mark.parametrize("gating", [None, GatedActivation()], ids=["down", "gate and up"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "block_rows"), FORMATS)
def test_experts(format: Fp8, block_rows: int, dtype: torch.dtype, gating: GatedActivation | None) -> None:
    sizes = (3, 70, 0, 41)
    stored = made(format, block_rows, 48, 192, len(sizes))
    x, bias = torch.randn(sum(sizes), 192).to(dtype), torch.randn(len(sizes), 48)
    offsets = torch.tensor(sizes).cumsum(0).int()
    y = grouped.grouped_matmul(x, packed(stored, dtype), offsets, None, bias, gating)
    wanted = grouped_reference.grouped_matmul(x, stored, offsets, None, bias, gating)
    assert off(y, wanted) < (EXACT if dtype == torch.float32 else 2 * ROUNDED)


def test_what_cannot_be_is_refused() -> None:
    def refused(format: Fp8, inputs: int = 256, chip: str = "") -> str:
        asked = CHIPS[chip] if chip else chip_of(torch.device("cpu"))
        (reason,) = cpu_blocks.rejects(MatmulSpec(format, torch.float32, 16, inputs), asked)
        return reason

    assert "fp8 activations" in refused(Fp8(128, rows=128))
    assert "group_size=16 (needs multiples of 32)" in refused(Fp8(16, rows=16, fp8_activations=False))
    assert "inputs=48" in refused(ROWS, 48) and "needs cpu" in refused(ROWS, chip="sm_90")
    assert "activations as they are" in "".join(BLOCKS.kernel_reasons(CHIPS["sm_90"]))
    assert not Fp8(128, rows=128).kernel_reasons(CHIPS["sm_90"])


def stored_blocks(weight: QuantizedWeight) -> torch.Tensor:
    """A scale, then its codes: uint8 [outputs, bytes]."""
    span = cpu_blocks.layout_of(weight.format, weight.shape[1]).numbers
    scales = weight.scales.repeat_interleave((weight.format.group_size or weight.shape[1]) // span, dim=1)
    codes = weight.values.view(torch.uint8).unflatten(1, (-1, span))
    return torch.cat((scales[..., None].view(torch.uint8), codes), -1).flatten(1)


def assert_the_same(command: list[str], folder: Path, dtype: torch.dtype, rows: int, tiles: bool = False) -> None:
    """`tiles`: by matrix units, for which weights become bf16."""
    stored = every_code(BLOCKS, 53, 640)
    x = torch.randn(rows, 640).to(dtype)
    y, weight = run_blocks(command, folder, stored_blocks(stored), x, threads=2)
    assert torch.equal(weight, stored.dequantize())
    least, most = (EXACT, ROUNDED) if tiles else (0, EXACT)
    assert least < off(y, x.double() @ stored.dequantize().double().t()) < most


DEFINES = cpu_blocks.defines(cpu_blocks.layout_of(BLOCKS, 640), int8_activations=False)
PAIRS = (("avx512_bf16", "avx512vbmi"), "-march=native -mno-amx-tile -mno-amx-bf16 -mno-amx-int8 -D__znver4__=1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*PROCESSORS, "products of pairs"])
def test_other_processors_find_the_same(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    features, flags = PROCESSORS.get(kind, PAIRS)
    program = compile_blocks(DEFINES, tmp_path, need(*features), flags.split(), dtype)
    for rows in FEW_AND_MANY:
        assert_the_same([str(program)], tmp_path, dtype, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_arm_processor_finds_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    command = compile_for_arm(DEFINES, tmp_path, "armv8-a", dtype)
    for rows in FEW_AND_MANY:
        assert_the_same(command, tmp_path, dtype, rows)


def test_matrix_units_find_the_same(tmp_path: Path) -> None:
    program = compile_for_tiles(DEFINES, tmp_path)
    for rows in (17, 33, 530):
        assert_the_same([str(program)], tmp_path, torch.bfloat16, rows, tiles=True)
