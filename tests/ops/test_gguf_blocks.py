"""Blocks of GGUF: against the `gguf` package, packed for a CPU, and on processors of other kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_blocks import (
    MATRIX_UNITS,
    PROCESSORS,
    compile_blocks,
    compile_for_arm,
    compile_for_tiles,
    need,
    off,
    packed,
    run_blocks,
)

from allotrope.kernels.chip import chip_of
from allotrope.ops.grouped_matmul.cpu_blocks import grouped_matmul
from allotrope.ops.matmul import MatmulSpec, cpu_blocks, reference
from allotrope.ops.matmul.gguf import ACTIVATION_GROUP, GGUF_BLOCKS, GgufBlocks
from allotrope.ops.matmul.int4 import Int4
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.weight import Format, QuantizedWeight

KINDS = [pytest.param(format, id=kind) for kind, format in GGUF_BLOCKS.items()]
# Of bytes that packing may add.
MOST_BYTES = 1.25
# Differences of sums in fp32 relative to the whole; of weights that are rounded to bf16.
EXACT, ROUNDED_WEIGHTS = 2e-6, 4e-3


def made(format: GgufBlocks, outputs: int, inputs: int, *experts: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    return format.quantize(torch.randn(*experts, outputs, inputs, generator=generator) / inputs**0.5)


@pytest.mark.parametrize("format", KINDS)
def test_numbers_are_those_of_the_gguf_package(format: GgufBlocks) -> None:
    """Bit for bit, of blocks with every byte there is."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[format.name.removesuffix("_gguf").upper()]
    assert gguf.constants.GGML_QUANT_SIZES[kind] == (format.pack_factor, format.elements)
    blocks = torch.randint(0, 256, (33, 7 * format.elements), generator=torch.Generator().manual_seed(0))
    blocks = blocks.to(torch.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks.numpy(), kind)
    found = format.dequantize(blocks, blocks[:, :0]).numpy()
    same = (found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))
    assert same.all()


@pytest.mark.parametrize("format", KINDS)
def test_quantizing_is_as_near_as_its_bits_allow(format: GgufBlocks) -> None:
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    stored = format.quantize(weight)
    assert stored.shape == weight.shape and stored.nbytes == sum(format.stored_bytes((16, 512), False))
    assert off(stored.dequantize(), weight) < 2.0 ** (1 - format.layout.bits)


@pytest.mark.parametrize("format", KINDS)
def test_packing_keeps_numbers_and_bytes(format: GgufBlocks) -> None:
    stored = made(format, 48, 512, 2)
    weight = packed(stored)
    assert torch.allclose(weight.dequantize(), stored.dequantize(), rtol=1e-6, atol=1e-7)
    assert weight.nbytes == sum(cpu_blocks.packed_bytes(format, stored.shape, False)) <= MOST_BYTES * stored.nbytes
    one = packed(stored[1])
    ids = torch.tensor([47, 0, 17])
    assert torch.allclose(one.rows(ids, torch.float32), stored[1].rows(ids, torch.float32), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("format", KINDS)
def test_activations_that_are_integers_are_not_rounded(format: GgufBlocks) -> None:
    """Whole numbers, of which the largest of each group is 127, are what they are rounded to."""
    stored = made(format, 19, 512)
    x = torch.randint(-127, 128, (5, 512), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::ACTIVATION_GROUP] = 127
    y = cpu_blocks.matmul(x, packed(stored))
    assert off(y, x @ stored.dequantize().t()) < EXACT


@pytest.mark.parametrize("kind", ["q4_0", "q4_k", "q6_k"])
def test_many_rows_are_more_exact_than_few(kind: str) -> None:
    """Rows at the edges of tiles, of blocks of rows and of inputs, into an output of wider rows, in fp32."""
    stored = made(GGUF_BLOCKS[kind], 150, 1280)
    weight, bias = packed(stored), torch.randn(150)
    for rows in (17, 33, 530):
        x = torch.randn(rows, 1280).bfloat16()
        out = torch.full((rows, 160), torch.nan)
        cpu_blocks.matmul(x, weight, bias, out=out[:, 5:155])
        wanted = x.float() @ stored.dequantize().t() + bias
        rounded = reference.matmul(x.float(), stored, bias)
        assert off(out[:, 5:155], wanted) < max(ROUNDED_WEIGHTS, 1.1 * off(rounded, wanted))
        assert bool(out[:, :5].isnan().all()) and bool(out[:, 155:].isnan().all())


def test_exact_activations_stay_exact() -> None:
    format = replace(GGUF_BLOCKS["q5_k"], int8_activations=False)
    stored = made(format, 33, 256)
    x = torch.randn(40, 256)
    assert off(cpu_blocks.matmul(x, packed(stored)), x @ stored.dequantize().t()) < EXACT


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("format", KINDS)
def test_a_row_does_not_depend_on_the_others(format: GgufBlocks, exact: bool) -> None:
    """Bit for bit: alone, with a few, and with so many that inputs are unpacked once for all of them. Matrix units
    round otherwise, from 17 rows on."""
    stored = made(format, 40, 768)
    weight = packed(QuantizedWeight(replace(format, int8_activations=not exact), stored.values, stored.scales))
    x = torch.randn(270, 768)
    whole = cpu_blocks.matmul(x, weight)
    some = cpu_blocks.matmul(x[:16], weight) if MATRIX_UNITS else whole[:23]
    for few in (1, 5):
        parts = x[: len(some)].split(few)
        assert torch.equal(torch.cat([cpu_blocks.matmul(part, weight) for part in parts]), some)
    assert torch.equal(cpu_blocks.matmul(x[200:], weight), whole[200:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_not_hidden(number: float, rows: int, dtype: torch.dtype) -> None:
    weight = packed(made(GGUF_BLOCKS["q4_k"], 40, 512))
    for at in (0, 20, 500):
        x = torch.ones(rows, 512, dtype=dtype)
        x[0, at] = number
        y = cpu_blocks.matmul(x, weight)
        assert not y[0].isfinite().any() and y[1:].isfinite().all()


def test_experts_with_many_rows() -> None:
    sizes = (3, 70, 0, 41)
    stored = made(GGUF_BLOCKS["q4_k"], 48, 256, len(sizes))
    x, offsets = torch.randn(sum(sizes), 256).bfloat16(), torch.tensor(sizes).cumsum(0).int()
    y = grouped_matmul(x, packed(stored), offsets)
    plain, start = stored.dequantize(), 0
    for expert, size in enumerate(sizes):
        if size:
            assert off(y[start : start + size], x[start : start + size].float() @ plain[expert].t()) < 0.01
        start += size


def test_shards_of_whole_blocks() -> None:
    """Inputs are cut between blocks, outputs anywhere; parts add up."""
    stored = made(GGUF_BLOCKS["q4_k"], 40, 512)
    half = stored.values.shape[1] // 2
    x = torch.randn(2, 512)
    parts = [
        QuantizedWeight(stored.format, stored.values[:, cut], stored.scales)
        for cut in (slice(0, half), slice(half, None))
    ]
    total = sum(cpu_blocks.matmul(x[:, 256 * i : 256 * i + 256], packed(part)) for i, part in enumerate(parts))
    assert off(total, reference.matmul(x, stored)) < EXACT
    assert off(cpu_blocks.matmul(x, packed(stored[16:])), reference.matmul(x, stored)[:, 16:]) < EXACT


@pytest.mark.parametrize("format", [MXFP4, Int4(32), Int4(128), Int4(0)], ids=str)
def test_other_formats_as_blocks(format: Format) -> None:
    """Numbers stay bit for bit what they are, activations are not rounded, and bytes hardly more."""
    generator = torch.Generator().manual_seed(0)
    stored = format.quantize(torch.randn(2, 32, 256, generator=generator))
    weight = packed(stored)
    assert torch.equal(weight.dequantize(), stored.dequantize())
    assert weight.nbytes == sum(cpu_blocks.packed_bytes(format, stored.shape, False)) <= MOST_BYTES * stored.nbytes
    x = torch.randn(3, 256, generator=generator)
    assert off(cpu_blocks.matmul(x, packed(stored[1])), x @ stored[1].dequantize().t()) < EXACT


def test_a_gpu_and_other_formats_are_refused() -> None:
    chip = chip_of(torch.device("cpu"))
    (plain,) = cpu_blocks.rejects(MatmulSpec(PLAIN, torch.float32, 1, 1), chip)
    (half,) = cpu_blocks.rejects(MatmulSpec(GGUF_BLOCKS["q4_0"], torch.float16, 1, 1), chip)
    (gpu,) = cpu_blocks.rejects(MatmulSpec(GGUF_BLOCKS["q4_0"], torch.float32, 1, 1), replace(chip, vendor="nvidia"))
    assert "needs blocks of GGUF" in plain and "dtype=torch.float16" in half and "needs cpu" in gpu


def test_activations_near_a_tie_round_as_the_reference_says() -> None:
    """So many that rounding products first, then to integers, would find others in some rows."""
    stored = made(GGUF_BLOCKS["q8_0"], 16, 512)
    x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0))
    found = torch.cat([cpu_blocks.matmul(rows, packed(stored)) for rows in x.split(8)])
    wanted = reference.matmul(x, stored)
    assert float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < EXACT


def defines(format: GgufBlocks) -> dict[str, int]:
    return cpu_blocks.defines(format.layout, format.int8_activations)


def assert_the_same(format: GgufBlocks, command: list[str], folder: Path) -> None:
    """Of few rows, and of so many that inputs are unpacked once for all of them."""
    stored = made(format, 37, 768)
    for rows in (5, 23):
        x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(rows))
        y, weight = run_blocks(command, folder, stored.values, x)
        assert off(y, reference.matmul(x, stored)) < EXACT
        assert torch.allclose(weight, stored.dequantize(), rtol=1e-6, atol=1e-7)


FORMATS = {kind: GGUF_BLOCKS[kind] for kind in ("q4_k", "q6_k", "q8_0", "iq4_nl", "q3_k", "mxfp4_gguf")}
FORMATS |= {f"{kind} exact": replace(GGUF_BLOCKS[kind], int8_activations=False) for kind in ("q4_k", "q6_k", "iq4_nl")}


@pytest.mark.parametrize("processor", ["no vectors", "AVX2"])
@pytest.mark.parametrize("kind", FORMATS)
def test_lesser_processors_find_the_same(kind: str, processor: str, tmp_path: Path) -> None:
    features, flags = PROCESSORS[processor]
    program = compile_blocks(defines(FORMATS[kind]), tmp_path, need(*features), flags.split())
    assert_the_same(FORMATS[kind], [str(program)], tmp_path)


@pytest.mark.parametrize("architecture", ["armv8-a", "armv8.2-a+dotprod"])
@pytest.mark.parametrize("kind", FORMATS)
def test_an_arm_processor_finds_the_same(kind: str, architecture: str, tmp_path: Path) -> None:
    """Compiled for Arm64 with and without dot products, and run by an emulator."""
    assert_the_same(FORMATS[kind], compile_for_arm(defines(FORMATS[kind]), tmp_path, architecture), tmp_path)


@pytest.mark.parametrize("kind", ["q4_0", "q4_k", "q6_k", "iq4_nl", "q8_0"])
def test_matrix_units_find_the_same(kind: str, tmp_path: Path) -> None:
    """Their instructions are emulated, so that processors without them test what surrounds these; with two threads."""
    format = GGUF_BLOCKS[kind]
    stored, x = made(format, 150, 768), torch.randn(530, 768).bfloat16()
    program = compile_for_tiles(defines(format), tmp_path)
    for rows in (17, 33, 530):
        y, _ = run_blocks([str(program)], tmp_path, stored.values, x[:rows], threads=2)
        # The units were used: weights become bf16 for them.
        assert EXACT < off(y, x[:rows].float() @ stored.dequantize().t()) < ROUNDED_WEIGHTS
