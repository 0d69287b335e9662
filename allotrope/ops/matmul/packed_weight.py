"""Quantized weights in the form that products read, made once when a weight is whole."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from allotrope.kernels.chip import Chip, chip_of
from allotrope.ops.matmul.quantized_weight import ACTIVATION_RUN, FP4_RUN, Kind, Quantized, shared_scales

# Of 4-bit codes; the largest that leaves room for the 2^126 that come on top, for codes come as 2^-126 of their worth.
_FAST_SCALES, _ON_TOP = 128, 126
# Inputs whose 4-bit codes lie in the same words: four runs; and rows that lie together, step by step of as many inputs.
WORDS_RUN, TILE_ROWS = 4 * FP4_RUN, 64


@dataclass(frozen=True)
class Prepared:
    """A weight as the kernel reads it; made by `prepare`. `kind`: or "plain".

    `codes`: [E or 1, outputs, padded]. `scales`: [E or 1, outputs / scale_rows, runs]. 4-bit codes lie in tiles, each
    in one piece of memory: four in an int16 [E or 1, outputs / 64, padded / 128, 64, 32], and their scales plus 126,
    modulo 256, four in an int32 [E or 1, outputs / 64, padded / 128, 64]. `outputs`, `inputs`: of the plain weight.
    `fast`: the scales are small enough for the fast way from 4 bits to bf16, and the chip knows it.
    `library_scales`: runs rounded up to fours, a run's neighbour next to it [runs, outputs / 128], as PyTorch's product
    wants them; None where rows do not share scales.
    """

    kind: Kind | Literal["plain"]
    codes: torch.Tensor
    scales: torch.Tensor
    outputs: int
    inputs: int
    padded: int
    scale_rows: int
    row_scales: bool
    experts: int
    fast: bool
    library_scales: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def prepare(weight: Quantized) -> Prepared:
    """Pad the inputs to whole tiles, join rows that share a scale, and put 4-bit codes in the order of the kernel.

    `weight`: [outputs, inputs], or [E, outputs, inputs]; its memory is taken over. Raises ValueError for runs that are
    neither 128 nor a whole row.
    """
    stacked = len(weight.shape) == 3
    if weight.format.kind == "fp8" and weight.format.run not in (0, ACTIVATION_RUN):
        raise ValueError(f"fp8 has run={weight.format.run} (needs {ACTIVATION_RUN} or the whole row)")
    weight = shared_scales(weight)
    outputs, inputs = weight.shape[-2:]
    codes, scales, fast = weight.codes, weight.scales, True
    if not stacked:
        codes, scales = codes[None], scales[None]
    if weight.format.kind == "fp8":
        padded = -(-inputs // ACTIVATION_RUN) * ACTIVATION_RUN
        codes = _padded(codes.view(torch.uint8), padded).view(torch.float8_e4m3fn)
    else:
        padded = -(-inputs // WORDS_RUN) * WORDS_RUN
        fast = int(scales.max()) <= _FAST_SCALES and scales_pairs(chip_of(scales.device))
        codes, scales = _tiles_of_words(codes, padded), _tiles_of_scales(scales, padded)
    blocks = None
    if weight.rows_per_scale == ACTIVATION_RUN and weight.format.run == ACTIVATION_RUN and not stacked:
        blocks = F.pad(scales[0], (0, -scales.shape[-1] % 4)).contiguous().t()
    return Prepared(
        weight.format.kind,
        codes.contiguous(),
        scales.contiguous(),
        outputs,
        inputs,
        padded,
        weight.rows_per_scale,
        weight.format.run == 0,
        codes.shape[0] if stacked else 0,
        fast,
        blocks,
    )


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _tiles_of_words(codes: torch.Tensor, padded: int) -> torch.Tensor:
    """`codes`: [E, outputs, bytes], whose memory is taken where tiles divide it: weights fill most of the memory."""
    count, outputs, width = codes.shape
    blocks, steps = -(-outputs // TILE_ROWS), padded // WORDS_RUN
    whole = (outputs, 2 * width) == (blocks * TILE_ROWS, padded) and codes.is_contiguous()
    shape = (count, blocks, steps, TILE_ROWS, WORDS_RUN // 4)
    tiles = codes.view(torch.int16).view(shape) if whole else codes.new_empty(shape, dtype=torch.int16)
    order = _words().to(codes.device)
    for given, tile in zip(codes, tiles, strict=True):
        rows = F.pad(given, (0, padded // 2 - width, 0, blocks * TILE_ROWS - outputs))
        words = order[_runs_side_by_side(rows)]
        tile.copy_(words.view(blocks, TILE_ROWS, steps, -1).transpose(1, 2))
    return tiles


def _tiles_of_scales(scales: torch.Tensor, padded: int) -> torch.Tensor:
    """`scales`: [E, outputs, runs]."""
    count, outputs, runs = scales.shape
    blocks = -(-outputs // TILE_ROWS)
    rows = F.pad(scales, (0, padded // FP4_RUN - runs, 0, blocks * TILE_ROWS - outputs))
    return (rows + _ON_TOP).view(torch.int32).view(count, blocks, TILE_ROWS, -1).transpose(2, 3).contiguous()


def _runs_side_by_side(codes: torch.Tensor) -> torch.Tensor:
    """`codes`: [.., n] bytes. Number j of each four runs, the first in the lowest bits of an int32 [.., n / 2]."""
    plain = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).unflatten(-1, (-1, 4, FP4_RUN)).int()
    four = plain[..., 0, :] | plain[..., 1, :] << 4 | plain[..., 2, :] << 8 | plain[..., 3, :] << 12
    return four.flatten(-2)


def fields(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What each number of a word is taken from: its sign in bit 15, its exponent in 8 and 7, its mantissa in 6.

    `words`: int32 of 16 bits. No bit of a word is lost: together, the four numbers are the word in another form.
    """
    swapped = (words & 255) << 8 | words >> 8
    return words, swapped << 4, words << 2 ^ words << 6, words << 2 ^ swapped


@functools.cache
def _words() -> torch.Tensor:
    """The word of each four codes, the first code in the lowest bits of its index: [65536] int16."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    codes = torch.zeros_like(words)
    for place, field in enumerate(fields(words)):
        codes |= (field >> 12 & 8 | field >> 6 & 7) << 4 * place
    return codes.argsort().to(torch.int16)


def prepare_plain(weights: torch.Tensor) -> Prepared:
    """Weights that are not quantized, in the same form. `weights`: [outputs, inputs], or [E, outputs, inputs]."""
    outputs, inputs = weights.shape[-2:]
    experts = len(weights) if weights.dim() == 3 else 0
    none = weights.new_empty(1, 1, 1)
    return Prepared("plain", weights.view(-1, outputs, inputs), none, outputs, inputs, inputs, 1, False, experts, False)


def scales_pairs(chip: Chip) -> bool:
    """Whether one instruction multiplies two numbers of 16 bits there; the interpreter does it as well."""
    return chip.vendor != "nvidia" or chip.capability >= (9, 0)
