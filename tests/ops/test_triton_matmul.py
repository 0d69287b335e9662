"""Products with quantized weights against their plain twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.matmul import gluon_fp8, triton, triton_quantize
from allotrope.ops.matmul import pack_for_kernels as pack
from allotrope.ops.matmul.fp8 import ACTIVATION_GROUP, Fp8, quantize_rows
from allotrope.ops.matmul.int4 import Int4
from allotrope.ops.matmul.launch import GLUON, PYTORCH, Launch
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.plain import PLAIN, pack_plain
from allotrope.ops.matmul.providers import multiply
from allotrope.ops.matmul.weight import Format, QuantizedWeight

TYPES = {kind: dtype for dtype, kind in KINDS.items()}
BLOCK, CHANNEL = Fp8(128), Fp8(0)
INT4, INT4_BY_128, INT4_CHANNEL = Int4(32), Int4(128), Int4(0)


def weight_of(format: Format, *shape: int, rows: int = 1) -> QuantizedWeight:
    if format is PLAIN:
        values = torch.randn(shape, device=DEVICE).div_(shape[-1] ** 0.5).bfloat16()
        return QuantizedWeight(format, values, values)
    made = format.quantize(torch.randn(shape) / shape[-1] ** 0.5, rows)
    return QuantizedWeight(format, made.values.to(DEVICE), made.scales.to(DEVICE))


LAUNCHES = {
    "weights left": Launch(16, 32),
    "weights left, rounded before": Launch(16, 32, quantize=False),
    "rows left": Launch(16, 32, swap_ab=False, quantize=False),
    "rows left, rounded here": Launch(16, 32, swap_ab=False),
    "long steps": Launch(16, 32, block_k=256),
    "shared inputs": Launch(16, 32, split_k=3),
    "shared inputs, rows left": Launch(16, 32, split_k=2, swap_ab=False),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("inputs", [128, 300, 1, 1100])
def test_activations_are_rounded_as_the_twin_does(inputs: int, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one run and of several, of which a program has parts."""
    if many:
        monkeypatch.setattr(triton_quantize, "_MANY_RUNS", 1)
    torch.manual_seed(0)
    x = torch.randn(5, inputs + 3, device=DEVICE).bfloat16()[:, :inputs]
    x[2] = 0
    values, scales = triton_quantize.quantize_rows(x)
    want, factors = quantize_rows(x)
    assert torch.equal(scales, factors)
    # Division rounds in its own way on a chip: a code may be the neighbour of one that is nearly as near.
    gate_tile = (values.float() * scales.repeat_interleave(ACTIVATION_GROUP, 1) - x_padded(x)).abs()
    assert bool((gate_tile <= 32.5 * scales.repeat_interleave(ACTIVATION_GROUP, 1)).all())
    assert float((values.float() != want.float()).float().mean()) < 0.01
    # Of rows in another order, the same.
    order = torch.tensor([4, 0, 0], device=DEVICE)
    taken, its_scales = triton_quantize.quantize_rows(x, sorted_token_ids=order)
    assert torch.equal(taken.float(), values.float()[order]) and torch.equal(its_scales, scales[order])


def x_padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.float(), (0, -x.shape[1] % ACTIVATION_GROUP))


def gated(y: torch.Tensor, gating: GatedActivation | None) -> torch.Tensor:
    """What is wanted of products `y`, gates before ups."""
    if gating is None:
        return y
    gate, up = y.chunk(2, dim=1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(gating.slope * gate) * (up + gating.offset)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (found := compare(got, want, "bf16")), str(found)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize(
    ("format", "rows"),
    [(BLOCK, 128), (BLOCK, 1), (CHANNEL, 1), (MXFP4, 1), (INT4, 1), (INT4_BY_128, 1), (INT4_CHANNEL, 1)],
    ids=["block", "rows", "channel", "mxfp4", "int4", "int4 by 128", "int4 channel"],
)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 128, 384), (19, 41, 448)])
def test_one_weight(format: Format, rows: int, tokens: int, outputs: int, inputs: int, launch: Launch) -> None:
    check_one_weight(format, rows, tokens, outputs, inputs, launch)


SLICED_K = {
    "8 rows": Launch(8, 16, 8, quantize=False, num_stages=3, provider="sliced_k", block_k=64),
    "16 rows": Launch(16, 32, 4, quantize=False, num_stages=2, provider="sliced_k"),
}


@pytest.mark.parametrize("launch", SLICED_K.values(), ids=SLICED_K)
@pytest.mark.parametrize(
    ("format", "rows"),
    [(BLOCK, 128), (BLOCK, 1), (CHANNEL, 1), (PLAIN, 1)],
    ids=["block", "rows", "channel", "plain"],
)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 128, 384), (19, 41, 1348)])
def test_sliced_k(format: Format, rows: int, tokens: int, outputs: int, inputs: int, launch: Launch) -> None:
    """Fewer runs of inputs than slices, and more; several tiles of rows."""
    check_one_weight(format, rows, tokens, outputs, inputs, launch)


def check_one_weight(format: Format, rows: int, tokens: int, outputs: int, inputs: int, launch: Launch) -> None:
    """Odd sizes, x and y cut out of wider memory, nothing beyond read or written."""
    torch.manual_seed(tokens)
    weight, bias = weight_of(format, outputs, inputs, rows=rows), torch.randn(outputs, device=DEVICE).bfloat16()
    memory = torch.full((tokens + 2, inputs + 8), torch.nan, device=DEVICE).bfloat16()
    x = memory[:tokens, :inputs]
    x.copy_(torch.randn(x.shape))
    out = torch.full((tokens, outputs + 5), 7.0, device=DEVICE).bfloat16()
    want = format.activations(x) @ weight.dequantize().T + bias.float()
    prepared = pack(weight)
    got = multiply(x, prepared, bias=bias, out=out[:, :outputs], launch=launch)
    check(got, want)
    assert bool((out[:, outputs:] == 7).all())
    again = multiply(x, prepared, bias=bias, launch=launch)
    assert torch.equal(again, got)


def test_scratch_memory_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products whose programs share inputs have the same, whatever their sizes, and leave its counters at zero;
    those of the side stream, which run meanwhile, have another."""
    launch, scratch = LAUNCHES["shared inputs"], triton.scratch
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(device: torch.device, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(scratch(device, overlap))
        return taken[-1]

    monkeypatch.setattr(triton, "scratch", record)
    for outputs, inputs, on_side in ((128, 384, False), (96, 512, False), (128, 384, True), (96, 512, True)):
        monkeypatch.setattr(triton, "on_side_stream", lambda device, on_side=on_side: on_side)
        x = torch.randn(3, inputs, device=DEVICE).bfloat16()
        multiply(x, pack(weight_of(BLOCK, outputs, inputs, rows=128)), launch=launch)
    first, second, side, again = taken
    assert all(one is other for one, other in zip((*first, *side), (*second, *again), strict=True))
    assert not any(one is other for one, other in zip(first, side, strict=True))
    assert not first[1].any() and not side[1].any()


EXPERT_LAUNCHES = [
    *((format, LAUNCHES[launch]) for format in (BLOCK, MXFP4, INT4) for launch in ("weights left", "rows left")),
    *((format, launch) for format in (BLOCK, PLAIN) for launch in SLICED_K.values()),
]


@pytest.mark.parametrize(("format", "launch"), EXPERT_LAUNCHES, ids=str)
@pytest.mark.parametrize(
    "gating",
    [None, GatedActivation(), GatedActivation(slope=1.702, limit=1.0, offset=1.0)],
    ids=["plain", "silu", "clamped"],
)
@pytest.mark.parametrize("sizes", [[5, 0, 17, 1], [0, 0, 1, 0], [0, 33, 0, 0]], ids=str)
def test_experts(sizes: list[int], gating: GatedActivation | None, format: Format, launch: Launch) -> None:
    """Empty experts and one that has all rows; rows of x taken in any order; biases and gates in the same launch."""
    torch.manual_seed(0)
    count, outputs, inputs, tokens = len(sizes), 64, 192, 7
    weight = weight_of(format, count, outputs, inputs)
    bias = torch.randn(count, outputs, device=DEVICE).bfloat16()
    x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
    sorted_token_ids = torch.randint(tokens, (sum(sizes),), device=DEVICE, dtype=torch.int32)
    expert_offsets = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    plain, seen = weight.dequantize(), format.activations(x)[sorted_token_ids]
    parts = [seen[end - size : end] for size, end in zip(sizes, expert_offsets.tolist(), strict=True)]
    want = torch.cat([part @ plain[e].T + bias[e].float() for e, part in enumerate(parts)])
    want = gated(want, gating)
    given = {"expert_offsets": expert_offsets, "sorted_token_ids": sorted_token_ids, "gating": gating}
    check(multiply(x, pack(weight), bias=bias, launch=launch, **given), want)


@pytest.mark.parametrize(
    "launch",
    [
        Launch(16, 64),
        Launch(16, 64, split_k=3),
        Launch(16, 64, block_k=256, num_stages=3),
        Launch(64, 32),
        Launch(32, 32, swap_ab=False),
    ],
    ids=["16 rows", "parts", "long steps", "64 rows", "rows left"],
)
@pytest.mark.parametrize("gating", [None, GatedActivation()], ids=["plain", "silu"])
@pytest.mark.parametrize("sizes", [[1, 0, 2], [0, 64, 0, 7], [0, 0, 33]], ids=str)
def test_four_bits_for_few_rows(sizes: list[int], gating: GatedActivation | None, launch: Launch) -> None:
    """Odd sizes and numbers of steps, rows of all magnitudes. A row that is not finite spoils itself and no other."""
    if gating is not None and launch.split_k > 1:
        pytest.skip("gates want whole sums")
    torch.manual_seed(0)
    rows, outputs, inputs = sum(sizes), 90, 32 * 13
    weight, bias = weight_of(MXFP4, len(sizes), outputs, inputs), torch.randn(len(sizes), outputs, device=DEVICE)
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    expert_offsets = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    x *= torch.exp2(torch.randint(-30, 5, (rows, 1), device=DEVICE))
    given = {"weight": pack(QuantizedWeight(MXFP4, weight.values.clone(), weight.scales)), "bias": bias.bfloat16()}
    got = multiply(x, expert_offsets=expert_offsets, gating=gating, launch=launch, **given)
    parts = zip(x.float().split(sizes), weight.dequantize(), bias.bfloat16().float(), strict=True)
    want = torch.cat([part @ plain.T + more for part, plain, more in parts])
    want = gated(want, gating)
    for row in range(rows):
        check(got[row], want[row])
    x[rows // 2, 17] = torch.nan
    spoiled = multiply(x, expert_offsets=expert_offsets, gating=gating, launch=launch, **given)
    others = torch.arange(rows, device=DEVICE) != rows // 2
    assert bool(spoiled[rows // 2].isnan().all()) and torch.equal(spoiled[others], got[others])


@pytest.mark.parametrize("launch", [LAUNCHES["weights left"], LAUNCHES["rows left"]], ids=["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("format", [BLOCK, MXFP4, INT4], ids=["block", "mxfp4", "int4"])
def test_other_types_of_activations(format: Format, dtype: torch.dtype, launch: Launch) -> None:
    """4-bit weights round nothing, whatever the type."""
    torch.manual_seed(0)
    weight, x = weight_of(format, 40, 256), torch.randn(5, 256, device=DEVICE).to(dtype)
    want = format.activations(x) @ weight.dequantize().T
    got = multiply(x, pack(weight), launch=launch)
    # A code of FP8 activations that falls the other way shows in fp32.
    kind = "bf16" if format is BLOCK else KINDS[dtype]
    assert (found := compare(got.to(TYPES[kind]), want, kind)), str(found)


def test_a_table_of_tiles_says_what_programs_find(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, sizes = pack(weight_of(BLOCK, 5, 32, 128)), torch.tensor([0, 33, 1, 0, 20], device=DEVICE)
    x, expert_offsets = torch.randn(54, 128, device=DEVICE).bfloat16(), sizes.cumsum(0).int()
    want = multiply(x, weight, expert_offsets=expert_offsets)
    monkeypatch.setattr("allotrope.ops.matmul.triton._SEARCHED", 0)
    assert torch.equal(multiply(x, weight, expert_offsets=expert_offsets), want)


def test_products_of_the_same_rows_share_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each height of tiles."""
    torch.manual_seed(0)
    monkeypatch.setattr("allotrope.ops.matmul.triton._SEARCHED", 0)
    x, expert_offsets = torch.randn(21, 64, device=DEVICE).bfloat16(), torch.tensor([20, 20, 21], device=DEVICE).int()
    weights = [pack_plain(torch.randn(3, outputs, 64, device=DEVICE).bfloat16()) for outputs in (32, 48)]
    tile_tables: dict[int, torch.Tensor] = {}
    for rows in (16, 32):
        given = {"expert_offsets": expert_offsets, "launch": Launch(rows, 32)}
        found = [multiply(x, weight, tile_tables=tile_tables, **given) for weight in weights]
        made = tile_tables[rows]
        for weight, y in zip(weights, found, strict=True):
            assert torch.equal(multiply(x, weight, tile_tables=tile_tables, **given), y)
            assert torch.equal(multiply(x, weight, expert_offsets=expert_offsets, launch=Launch(rows, 32)), y)
        assert tile_tables[rows] is made
    assert sorted(tile_tables) == [16, 32]


@pytest.mark.parametrize("gating", [None, GatedActivation()], ids=["plain", "silu"])
@pytest.mark.parametrize("sizes", [[5, 0, 300, 1], [0, 128, 0, 65], [129, 64]], ids=str)
def test_groups_of_warps_say_the_same(sizes: list[int], gating: GatedActivation | None) -> None:
    """On Hopper; elsewhere the same launch is one of `product_kernel`. Blocks of outputs and steps of odd numbers."""
    torch.manual_seed(0)
    count, outputs, inputs, tokens = len(sizes), 384 * (2 if gating else 1), 5 * 128, 40
    weight = weight_of(BLOCK, count, outputs, inputs, rows=128)
    x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
    sorted_token_ids = torch.randint(tokens, (sum(sizes),), device=DEVICE, dtype=torch.int32)
    expert_offsets = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    rows = Fp8().activations(x)[sorted_token_ids].split(sizes)
    want = torch.cat([part @ plain.T for part, plain in zip(rows, weight.dequantize(), strict=True)])
    want = gated(want, gating)
    memory = torch.full((len(want), want.shape[1] + 8), 7.0, device=DEVICE).bfloat16()
    out = memory[:, : want.shape[1]]
    given = {"weight": pack(weight), "expert_offsets": expert_offsets, "gating": gating, "launch": GLUON}
    check(multiply(x, sorted_token_ids=sorted_token_ids, out=out, **given), want)
    assert bool((memory[:, want.shape[1] :] == 7).all())
    # The same rows, in order already.
    assert torch.equal(multiply(x[sorted_token_ids], **given), out)


@pytest.mark.parametrize(
    "gating",
    [None, GatedActivation(), GatedActivation(slope=1.702, limit=1.0, offset=1.0)],
    ids=["plain", "silu", "clamped"],
)
@pytest.mark.parametrize("sizes", [[5, 0, 300, 1], [0, 128, 0, 65], [129, 64]], ids=str)
def test_groups_of_warps_take_four_bits_apart(sizes: list[int], gating: GatedActivation | None) -> None:
    """As above. Outputs and inputs that end within a block and a step, with a bias and without."""
    torch.manual_seed(0)
    count, outputs, inputs, tokens = len(sizes), 192 * 2 if gating else 208, 5 * 128 + 32, 40
    weight = weight_of(MXFP4, count, outputs, inputs)
    x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
    sorted_token_ids = torch.randint(tokens, (sum(sizes),), device=DEVICE, dtype=torch.int32)
    expert_offsets = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    bias = torch.randn(count, outputs, device=DEVICE).bfloat16() if gating != GatedActivation() else None
    parts = zip(x.float()[sorted_token_ids].split(sizes), weight.dequantize(), strict=True)
    want = torch.cat(
        [part @ plain.T + (0 if bias is None else bias[i].float()) for i, (part, plain) in enumerate(parts)]
    )
    want = gated(want, gating)
    memory = torch.full((len(want), want.shape[1] + 16), 7.0, device=DEVICE).bfloat16()
    out = memory[:, : want.shape[1]]
    given = {"weight": pack(weight), "expert_offsets": expert_offsets, "bias": bias, "gating": gating, "launch": GLUON}
    check(multiply(x, sorted_token_ids=sorted_token_ids, out=out, **given), want)
    assert bool((memory[:, want.shape[1] :] == 7).all())
    # The same rows, in order already.
    assert torch.equal(multiply(x[sorted_token_ids], **given), out)


@pytest.mark.parametrize(("tokens", "block_m"), [(1, 64), (37, 64), (64, 64), (65, 128), (128, 128)])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(128, 128), (384, 5 * 128), (640, 300), (20 * 128, 24 * 128), (300 * 128, 128), (272 * 128, 7 * 128)],
)
def test_equal_shares_of_a_weight(outputs: int, inputs: int, tokens: int, block_m: int) -> None:
    """On Hopper Stream-K; elsewhere the same launch is one of `product_kernel`. Fewer steps than programs, tiles that
    lie in several runs and runs of several tiles, a tile whose second half is not there."""
    if DEVICE == "cpu" and (outputs > 640 or tokens > 1):
        pytest.skip("the interpreter takes its time, and has no runs")
    torch.manual_seed(0)
    weight = weight_of(BLOCK, outputs, inputs, rows=128)
    x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
    want = Fp8().activations(x) @ weight.dequantize().T
    memory = torch.full((tokens + 1, outputs + 16), 7.0, device=DEVICE).bfloat16()
    out = memory[:tokens, :outputs]
    launch = replace(GLUON, block_m=block_m)
    prepared = pack(weight)
    check(multiply(x, prepared, out=out, launch=launch), want)
    assert bool((memory[:, outputs:] == 7).all()) and bool((memory[tokens] == 7).all())
    # Parts are added in order, and arrivals are 0 again.
    assert all(torch.equal(multiply(x, prepared, launch=launch), out) for _ in range(3))
    sums = multiply(x, prepared, out=torch.empty(tokens, outputs, device=DEVICE), launch=launch)
    assert torch.equal(sums.bfloat16(), out)


@pytest.mark.parametrize("programs", [1, 7, 114, 132])
def test_every_step_lies_in_the_run_that_takes_it(programs: int) -> None:
    for steps in (programs, programs + 1, 5 * programs - 1, 20 * 48, 136 * 40, 1940 * 40):
        bounds = [i * steps // programs for i in range(programs + 1)]
        found = [gluon_fp8._run_of.fn(step, steps, programs) for step in bounds[:-1]]
        assert found == list(range(programs))
        assert [gluon_fp8._run_of.fn(end - 1, steps, programs) for end in bounds[1:]] == list(range(programs))


@pytest.mark.skipif(DEVICE != "cuda", reason="PyTorch multiplies blocks on a GPU only")
@pytest.mark.parametrize("tokens", [1, 130, 256])
def test_the_library_says_the_same(tokens: int) -> None:
    torch.manual_seed(0)
    weight = weight_of(BLOCK, 384, 640, rows=128)
    x, bias = torch.randn(tokens, 640, device=DEVICE).bfloat16(), torch.randn(384, device=DEVICE).bfloat16()
    want = Fp8().activations(x) @ weight.dequantize().T + bias.float()
    check(multiply(x, pack(weight), bias=bias, launch=Launch(128, 128, provider="pytorch")), want)


def test_nothing_to_multiply() -> None:
    weight = pack(weight_of(BLOCK, 32, 128))
    assert multiply(torch.empty(0, 128, device=DEVICE).bfloat16(), weight).shape == (0, 32)
    with pytest.raises(ValueError, match="rows of 64 numbers for a weight of 128 inputs"):
        multiply(torch.empty(1, 64, device=DEVICE).bfloat16(), weight)


def test_scales_too_large_for_the_fast_way_are_right() -> None:
    torch.manual_seed(0)
    weight = weight_of(MXFP4, 32, 128)
    weight = QuantizedWeight(MXFP4, weight.values, weight.scales + 20)
    x = torch.randn(3, 128, device=DEVICE).bfloat16()
    want = x.float() @ weight.dequantize().T
    check(multiply(x, pack(weight)), want)


@pytest.mark.parametrize(
    "launch",
    [
        Launch(16, 64, block_k=64),
        Launch(32, 64, 4, block_k=128),
        Launch(16, 128, 2, swap_ab=False, block_k=64),
        PYTORCH,
    ],
    ids=["weights left", "parts", "rows left", "PyTorch"],
)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 128, 512), (35, 41, 456)])
def test_one_plain_weight(tokens: int, outputs: int, inputs: int, launch: Launch) -> None:
    """Odd sizes, x and y cut out of wider memory, nothing beyond read or written."""
    torch.manual_seed(tokens)
    weight = torch.randn(outputs, inputs, device=DEVICE).div_(inputs**0.5).bfloat16()
    # On a CPU with AMX, oneDNN multiplies what lies behind a row by zero: NaN would stay.
    behind = 1e4 if launch is PYTORCH and DEVICE == "cpu" else torch.nan
    bias, memory = torch.randn(outputs, device=DEVICE).bfloat16(), torch.full((tokens, inputs + 8), behind)
    memory = memory.bfloat16().to(DEVICE)
    x = memory[:, :inputs]
    x.copy_(torch.randn(x.shape))
    out = torch.full((tokens, outputs + 5), 7.0, device=DEVICE).bfloat16()
    got = multiply(x, pack_plain(weight), bias=bias, out=out[:, :outputs], launch=launch)
    check(got, x.float() @ weight.float().T + bias.float())
    assert bool((out[:, outputs:] == 7).all())
    assert torch.equal(multiply(x, pack_plain(weight), bias=bias, launch=launch), got)
    assert multiply(x[:0], pack_plain(weight), bias=bias, launch=launch).shape == (0, outputs)


@pytest.mark.parametrize(
    "launch",
    [Launch(16, 64, 8, block_k=64), Launch(16, 32, 2, swap_ab=False, num_stages=3), Launch(16, 128), PYTORCH],
    ids=["many parts", "rows left", "one part", "PyTorch"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_sums_that_are_not_rounded(bias: bool, launch: Launch) -> None:
    """Products of bf16 are exact in fp32: logits of experts want them so."""
    if launch.provider == "pytorch" and DEVICE == "cpu":
        pytest.skip("PyTorch has no product of bf16 in fp32 on a CPU")
    torch.manual_seed(0)
    weight, x = torch.randn(40, 456, device=DEVICE).div_(456**0.5).bfloat16(), torch.randn(5, 456, device=DEVICE)
    added, out = torch.randn(40, device=DEVICE) if bias else None, torch.empty(5, 40, device=DEVICE)
    got = multiply(x.bfloat16(), pack_plain(weight), bias=added, out=out, launch=launch)
    assert got is out
    want = x.bfloat16().double() @ weight.double().T + (0.0 if added is None else added.double())
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("sizes", [[5, 0, 17, 1, 0, 16], [0, 0, 1], [40], [0, 33, 0, 0, 2]], ids=str)
def test_plain_experts(sizes: list[int], left: bool, dtype: torch.dtype) -> None:
    """Odd widths, rows cut out of wider ones; a row's result does not depend on its neighbours."""
    torch.manual_seed(0)
    inputs, outputs = 50, 41
    memory = torch.full((sum(sizes) + 3, inputs + 6), torch.nan, device=DEVICE).to(dtype)
    rows = memory[: sum(sizes), :inputs]
    rows.copy_(torch.randn(rows.shape))
    weights = (torch.randn(len(sizes), outputs, inputs, device=DEVICE) / 7).to(dtype)
    expert_offsets = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    want = torch.cat([r.float() @ w.float().T for r, w in zip(rows.split(sizes), weights, strict=True)])
    launch, prepared = Launch(16, 32, swap_ab=left), pack_plain(weights)
    got = multiply(rows, prepared, expert_offsets=expert_offsets, launch=launch)
    assert (found := compare(got, want, KINDS[dtype])), str(found)
    last = [index for index, size in enumerate(sizes) if size][-1]
    alone = (torch.arange(len(sizes), device=DEVICE) >= last).int()
    assert torch.equal(multiply(rows[-1:], prepared, expert_offsets=alone, launch=launch)[0], got[-1])
