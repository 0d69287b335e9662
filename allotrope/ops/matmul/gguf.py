"""Weights in blocks of a GGUF file, which hold codes and their scales: values uint8 [.., outputs, bytes].

    w = scale * (code - offset) - minimum,  or scale * table[code]

A block has one scale (and minimum) for 32 numbers, or 256 numbers whose groups have small integers as scales, times one
float of the block. `dequantize` gives bit for bit what the `gguf` package does. Products may round activations to int8,
each group of 32 numbers of a row with a scale of its own. Source: ggml-quants.c of ggml, `gguf/quants.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from allotrope.kernels.chip import Chip
from allotrope.ops.matmul.packed_weight import PackedWeight
from allotrope.ops.matmul.weight import Format, QuantizedWeight

ACTIVATION_GROUP = 32
# Outputs of a panel, as in C.
PANEL = 16
ACTIVATION_MAX = 127
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of 4-bit floats, whose scale is halved.
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Plane:
    """`bits` of each number, from byte `at` on, in runs of `run` bytes: a run holds the lowest bits of `run` numbers,
    then those of the next ones. Eight bits are stored with a sign, and read as 128 more."""

    at: int
    bits: int
    run: int

    def read(self, blocks: torch.Tensor, numbers: int) -> torch.Tensor:
        """`blocks`: [.., bytes]. Returns [.., numbers] uint8."""
        stored = blocks[..., self.at : self.at + numbers * self.bits // 8]
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=blocks.device)
        if self.bits == 8:
            return stored ^ 128
        runs = stored.unflatten(-1, (-1, 1, self.run)) >> shifts[:, None]
        return (runs & ((1 << self.bits) - 1)).flatten(-3)

    def write(self, blocks: torch.Tensor, codes: torch.Tensor) -> None:
        """The inverse of `read`, of the lowest bits of `codes`."""
        if self.bits == 8:
            blocks[..., self.at : self.at + codes.shape[-1]] = codes ^ 128
            return
        bits = codes & ((1 << self.bits) - 1)
        runs = bits.unflatten(-1, (-1, 8 // self.bits, self.run))
        stored = runs[..., 0, :].clone()
        for place in range(1, 8 // self.bits):
            stored |= runs[..., place, :] << place * self.bits
        stored = stored.flatten(-2)
        blocks[..., self.at : self.at + stored.shape[-1]] = stored


@dataclass(frozen=True)
class Layout:
    """One type of blocks.

    `bytes`, `numbers`: of a block. `codes`: their planes, the lowest bits first. `offset`: what a code is more than its
    number. `table`: numbers of codes, in place of the offset. `scale_at`, `minimum_at`: bytes of the block's floats; -1
    for none. `minimum_sign`: -1 where minima are stored to be added. `group`: numbers that share a scale.
    `scales`: planes of the groups' integer scales, followed by their minima where there are such, () where the block
    has one scale; `scale_offset`: what these are more than their number. `mixed_scales`: they are the 12 bytes of Q4_K
    and Q5_K. `scale_type`: of the block's floats; "power" is one byte, an exponent of two plus 128. `rounded`: numbers
    are rounded to bf16. `e4m3`: codes are such floats.
    """

    kind: str
    bytes: int
    numbers: int
    codes: tuple[Plane, ...]
    offset: int = 0
    table: tuple[int, ...] = ()
    scale_at: int = 0
    minimum_at: int = -1
    minimum_sign: int = 1
    group: int = 32
    scales: tuple[Plane, ...] = ()
    scale_offset: int = 0
    mixed_scales: bool = False
    scale_type: Literal["fp16", "bf16", "fp32", "power"] = "fp16"
    rounded: bool = False
    e4m3: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return sum(plane.bits for plane in self.codes)

    @property
    def has_scales(self) -> bool:
        """Whether groups have integer scales of their own."""
        return bool(self.scales) or self.mixed_scales

    @property
    def scale_bits(self) -> int:
        """Of the integer scale of a group."""
        return 6 if self.mixed_scales else sum(plane.bits for plane in self.scales)


def _low_first(at: int) -> Plane:
    """Four bits of 32 numbers: the first 16 in the low halves."""
    return Plane(at, 4, 16)


LAYOUTS = (
    Layout("q4_0", 18, 32, (_low_first(2),), offset=8),
    Layout("q4_1", 20, 32, (_low_first(4),), minimum_at=2, minimum_sign=-1),
    Layout("q5_0", 22, 32, (_low_first(6), Plane(2, 1, 1)), offset=16),
    Layout("q5_1", 24, 32, (_low_first(8), Plane(4, 1, 1)), minimum_at=2, minimum_sign=-1),
    Layout("q8_0", 34, 32, (Plane(2, 8, 1),), offset=128),
    Layout("q2_k", 84, 256, (Plane(16, 2, 32),), scale_at=80, minimum_at=82, group=16, scales=(Plane(0, 4, 16),)),
    Layout(
        "q3_k",
        *(110, 256, (Plane(32, 2, 32), Plane(0, 1, 32))),
        offset=4,
        scale_at=108,
        group=16,
        scales=(Plane(96, 4, 8), Plane(104, 2, 4)),
        scale_offset=32,
    ),
    Layout("q4_k", 144, 256, (Plane(16, 4, 32),), minimum_at=2, mixed_scales=True),
    Layout("q5_k", 176, 256, (Plane(48, 4, 32), Plane(16, 1, 32)), minimum_at=2, mixed_scales=True),
    Layout(
        "q6_k",
        *(210, 256, (Plane(0, 4, 64), Plane(128, 2, 32))),
        offset=32,
        scale_at=208,
        group=16,
        scales=(Plane(192, 8, 1),),
        scale_offset=128,
    ),
    Layout("iq4_nl", 18, 32, (_low_first(2),), table=IQ4_VALUES),
    Layout(
        "iq4_xs",
        *(136, 256, (_low_first(8),)),
        table=IQ4_VALUES,
        scales=(Plane(4, 4, 1), Plane(2, 2, 1)),
        scale_offset=32,
    ),
    Layout("mxfp4_gguf", 17, 32, (_low_first(1),), table=FP4_DOUBLED, scale_type="power"),
)


@dataclass
class _Fields:
    """What blocks hold. `codes`: [.., numbers] uint8. `scale`, `minimum`: [.., 1] fp32, of the block. `scales`,
    `minima`: [.., groups] fp32, of its groups."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None


@dataclass(frozen=True, repr=False)
class GgufBlocks(Format):
    """`layout`: of the blocks. `int8_activations`: whether products may round activations to int8."""

    layout: Layout = LAYOUTS[0]
    int8_activations: bool = field(default=True, kw_only=True)

    value_dtype = torch.uint8
    scale_dtype = torch.uint8

    @property
    def name(self) -> str:
        return self.layout.kind

    @property
    def pack_factor(self) -> int:
        return self.layout.numbers

    @property
    def elements(self) -> int:
        return self.layout.bytes

    def __repr__(self) -> str:
        return f"GgufBlocks({self.name}{'' if self.int8_activations else ', exact activations'})"

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """As `Format.dequantize`."""
        layout = self.layout
        fields = _fields(layout, values.unflatten(-1, (-1, layout.bytes)))
        if layout.table:
            table = torch.tensor(layout.table, dtype=torch.float32, device=values.device)
            numbers = table[fields.codes.int()]
        else:
            numbers = (fields.codes.short() - layout.offset).float()
        scale = fields.scale if fields.scales is None else fields.scale * fields.scales
        plain = numbers.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
        if fields.minimum is not None:
            minimum = fields.minimum if fields.minima is None else fields.minimum * fields.minima
            plain -= minimum[..., None]
        return plain.flatten(-3)

    def quantize(self, weight: torch.Tensor, block_rows: int = 1) -> QuantizedWeight:
        """As `Format.quantize`: each group by its extremes. The inputs are whole blocks."""
        layout = self.layout
        numbers = weight.float().unflatten(-1, (-1, layout.numbers // layout.group, layout.group))
        fields = _scales_for(layout, numbers)
        blocks = weight.new_zeros((*numbers.shape[:-2], layout.bytes), dtype=torch.uint8)
        _write(layout, blocks, fields, _codes_for(layout, fields, numbers))
        values = blocks.flatten(-2)
        return QuantizedWeight(self, values, no_scales(values))

    def kernel_reasons(self, chip: Chip) -> list[str]:
        """As `Format.kernel_reasons`."""
        return [f"format={self.name} (allowed: plain, fp8, mxfp4 and int4)"]

    def pack(self, weight: QuantizedWeight) -> PackedWeight:
        """As `Format.pack`."""
        raise NotImplementedError("no GPU kernel reads blocks of GGUF")

    def packed_bytes(self, shape: tuple[int, ...], shared: bool) -> tuple[int, int]:
        """As `Format.packed_bytes`."""
        return self.stored_bytes(shape, shared)

    def groups(self, inputs: int) -> int:
        """As `Format.groups`: scales are in the blocks."""
        return 0

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """As `Format.activations`."""
        return round_activations(x) if self.int8_activations else x.float()


GGUF_BLOCKS = {layout.kind: GgufBlocks(layout=layout) for layout in LAYOUTS}
"""Every type by its name."""


def panel_bytes(layout: Layout, inputs: int) -> int:
    """Bytes of a panel of `PANEL` outputs as `blocks.c` has it: scales, up to a whole line of the cache, then codes."""
    floats, per_span = {"power": 1, "fp32": 4}.get(layout.scale_type, 2), 1 + (layout.minimum_at >= 0)
    scales = inputs // layout.numbers * floats
    if layout.has_scales:
        scales += inputs // layout.group
    return -(-scales * per_span * PANEL // 64) * 64 + inputs * PANEL * layout.bits // 8


def no_scales(values: torch.Tensor) -> torch.Tensor:
    """What stands for scales beside `values`."""
    return values.new_empty((*values.shape[:-1], 0))


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, inputs] rounded to int8, in fp32: the largest of each 32 becomes 127.

    Of exact products, as a fused multiply-add rounds them: near a tie, rounding twice would find another integer.
    """
    groups = x.float().unflatten(-1, (-1, ACTIVATION_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    # PyTorch divides a number by a tensor through its reciprocal, which rounds twice.
    inverse = torch.where(largest == 0, 0, torch.full_like(largest, ACTIVATION_MAX) / largest)
    whole = (groups.double() * inverse.double()).round().float()
    return (whole * (largest / ACTIVATION_MAX)).flatten(-2)


def _fields(layout: Layout, blocks: torch.Tensor) -> _Fields:
    """`blocks`: [.., bytes]."""
    codes = torch.zeros_like(blocks[..., :1]).expand(*blocks.shape[:-1], layout.numbers)
    shift = 0
    for plane in layout.codes:
        codes = codes | plane.read(blocks, layout.numbers) << shift
        shift += plane.bits
    if layout.scale_type == "power":
        exponent = blocks[..., :1].int()
        bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
        return _Fields(codes, bits.view(torch.float32))
    fields = _Fields(codes, _read_float(blocks, layout.scale_at))
    if layout.minimum_at >= 0:
        fields.minimum = _read_float(blocks, layout.minimum_at) * layout.minimum_sign
    if layout.has_scales:
        groups = layout.numbers // layout.group
        whole = _read_mixed(blocks) if layout.mixed_scales else _read_scales(layout, blocks, groups)
        fields.scales = whole[..., :groups].float() - layout.scale_offset
        fields.minima = whole[..., groups:].float() if layout.minimum_at >= 0 else None
    return fields


def _read_float(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _read_scales(layout: Layout, blocks: torch.Tensor, groups: int) -> torch.Tensor:
    """Integer scales of a block's groups, then their minima."""
    count = groups * (2 if layout.minimum_at >= 0 else 1)
    low, *high = layout.scales
    found = low.read(blocks, count)
    for plane in high:
        found = found | plane.read(blocks, count) << low.bits
    return found


def _read_mixed(blocks: torch.Tensor) -> torch.Tensor:
    """Eight scales and eight minima of 6 bits: four of each, then the other four, whose upper bits are above these."""
    scales, minima, low = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    first, second = (scales & 63, minima & 63), (low & 15 | scales >> 2 & 48, low >> 4 | minima >> 2 & 48)
    return torch.cat((first[0], second[0], first[1], second[1]), -1)


def _write_mixed(blocks: torch.Tensor, whole: torch.Tensor) -> None:
    first, second, first_minima, second_minima = whole.unflatten(-1, (4, 4)).unbind(-2)
    blocks[..., 4:8] = first | second >> 4 << 6
    blocks[..., 8:12] = first_minima | second_minima >> 4 << 6
    blocks[..., 12:16] = second & 15 | second_minima << 4


def _scales_for(layout: Layout, numbers: torch.Tensor) -> _Fields:
    """The scales, and no codes yet. `numbers`: [.., groups, group]."""
    none = numbers.new_empty(0, dtype=torch.uint8)
    largest = numbers.abs().amax(-1)
    if layout.scale_type == "power":
        exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 3
        return _Fields(none, torch.exp2(exponent))
    minimum = None
    if layout.minimum_at >= 0:
        low, high = numbers.amin(-1), numbers.amax(-1)
        if layout.has_scales:
            low, high = low.clamp(max=0), high.clamp(min=0)
        scale, minimum = (high - low) / (2**layout.bits - 1), -low
    elif layout.bits == 8:
        scale = largest / 127
    else:
        extreme = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scale = extreme / (layout.table[0] if layout.table else -layout.offset)
    if not layout.has_scales:
        return _Fields(none, scale.half().float(), None if minimum is None else minimum.half().float())
    most = 2**layout.scale_bits - 1 - layout.scale_offset
    whole = (scale.abs().amax(-1, keepdim=True) / most).half().float()
    fields = _Fields(none, whole, scales=_nearest(scale, whole).clamp(-layout.scale_offset, most))
    if minimum is not None:
        fields.minimum = (minimum.amax(-1, keepdim=True) / most).half().float()
        fields.minima = _nearest(minimum, fields.minimum).clamp(0, most)
    return fields


def _nearest(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (numbers * torch.where(scale == 0, 0, 1 / scale)).round()


def _codes_for(layout: Layout, fields: _Fields, numbers: torch.Tensor) -> torch.Tensor:
    """[.., numbers] uint8. `numbers`: [.., groups, group]."""
    scale = fields.scale if fields.scales is None else fields.scale * fields.scales
    if fields.minimum is not None:
        minimum = fields.minimum if fields.minima is None else fields.minimum * fields.minima
        numbers = numbers + minimum[..., None]
    scaled = numbers * torch.where(scale == 0, 0, 1 / scale)[..., None]
    if not layout.table:
        return (scaled.round() + layout.offset).clamp(0, 2**layout.bits - 1).to(torch.uint8).flatten(-2)
    codes, best = torch.zeros_like(scaled, dtype=torch.uint8), torch.full_like(scaled, torch.inf)
    for code, value in enumerate(layout.table):
        error = (scaled - value).abs()
        codes, best = torch.where(error < best, code, codes), torch.minimum(error, best)
    return codes.to(torch.uint8).flatten(-2)


def _write(layout: Layout, blocks: torch.Tensor, fields: _Fields, codes: torch.Tensor) -> None:
    """The inverse of `_fields`."""
    shift = 0
    for plane in layout.codes:
        plane.write(blocks, codes >> shift)
        shift += plane.bits
    if layout.scale_type == "power":
        blocks[..., :1] = (torch.log2(fields.scale) + 128).to(torch.uint8)
        return
    blocks[..., layout.scale_at : layout.scale_at + 2] = fields.scale.half().view(torch.uint8)
    if fields.minimum is not None:
        stored = (fields.minimum * layout.minimum_sign).half()
        blocks[..., layout.minimum_at : layout.minimum_at + 2] = stored.view(torch.uint8)
    if fields.scales is not None:
        whole = fields.scales + layout.scale_offset
        if fields.minima is not None:
            whole = torch.cat((whole, fields.minima), -1)
        whole = whole.to(torch.uint8)
        if layout.mixed_scales:
            _write_mixed(blocks, whole)
            return
        low = layout.scales[0]
        for place, plane in enumerate(layout.scales):
            plane.write(blocks, whole >> low.bits * place)
