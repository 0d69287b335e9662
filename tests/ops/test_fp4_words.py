"""How four 4-bit numbers lie in a word, and what the instructions of a GPU make of it."""

from __future__ import annotations

import numpy as np
import torch

from allotrope.ops.matmul import pack_for_kernels as pack
from allotrope.ops.matmul.mxfp4 import FP4_VALUES, MXFP4, SCALE_BIAS, fields
from allotrope.ops.matmul.weight import QuantizedWeight

MASK = np.uint32(0x81C081C0)


def every_word() -> tuple[np.ndarray, np.ndarray]:
    """All four codes there are [65536, 4], and their words, made as those of a weight are."""
    index = torch.arange(1 << 16)
    codes = torch.stack([index >> 4 * place & 15 for place in range(4)], dim=-1)
    # Number j of four runs: 32 words make 128 inputs.
    inputs = codes.view(-1, 32, 4).mT.reshape(-1, 128).byte()
    scales = torch.full((len(inputs), 4), SCALE_BIAS, dtype=torch.uint8)
    prepared = pack(QuantizedWeight(MXFP4, inputs[:, ::2] | inputs[:, 1::2] << 4, scales))
    return codes.numpy(), prepared.values.flatten().numpy().view(np.uint16)


def select_bytes(x: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """`prmt` of one register; `order`: the source of each byte, the lowest first."""
    selected = [
        (x >> np.uint32(8 * source) & np.uint32(255)) << np.uint32(8 * place) for place, source in enumerate(order)
    ]
    return np.bitwise_or.reduce(selected)


def test_words_say_the_same_in_another_form() -> None:
    codes, words = every_word()
    assert len(np.unique(words)) == 1 << 16
    for place, field in enumerate(fields(torch.from_numpy(words.astype(np.int32)))):
        found = field.numpy()
        assert np.array_equal(found >> 12 & 8 | found >> 6 & 7, codes[:, place])


def test_two_words_at_a_time_give_pairs_in_bf16() -> None:
    """The arithmetic of the instructions in `triton_fp4`, on registers of 32 bits, for every word in either half."""
    codes, words = every_word()
    order = np.random.default_rng(0).permutation(1 << 16)
    pair = words.astype(np.uint32) | words[order].astype(np.uint32) << np.uint32(16)
    swapped = select_bytes(pair, (1, 0, 3, 2))
    two, six, four = pair << np.uint32(2), pair << np.uint32(6), swapped << np.uint32(4)
    for place, found in enumerate((pair & MASK, four & MASK, (two ^ six) & MASK, (two ^ swapped) & MASK)):
        values = torch.from_numpy(found.view(np.int16).reshape(-1, 2)).view(torch.bfloat16)
        want = np.array(FP4_VALUES)[np.stack((codes[:, place], codes[order, place]), axis=1)]
        # Exact as they are, though the half is subnormal.
        assert np.array_equal(values.double().numpy() * 2.0**126, want)


def test_powers_of_two_in_pairs_scale_without_rounding() -> None:
    codes = torch.arange(16, dtype=torch.int32)
    numbers = ((codes & 8) << 12 | (codes & 7) << 6).to(torch.int16).view(torch.bfloat16)
    for exponent in range(129):
        stored = np.uint32((exponent + 126) * 0x01010101)
        want = torch.tensor(FP4_VALUES, dtype=torch.float64) * 2.0 ** (exponent - SCALE_BIAS)
        for pair in (stored << np.uint32(7), stored >> np.uint32(1)):
            found = np.array([pair & np.uint32(0x7F807F80)]).view(np.int16)
            low, high = torch.from_numpy(found).view(torch.bfloat16)
            assert low == high == 2.0 ** (exponent + 126 - SCALE_BIAS)
            assert torch.equal((numbers * low).double(), want)


def test_scales_keep_their_order_and_sizes_are_foretold() -> None:
    weight = MXFP4.quantize(torch.randn(3, 160))
    scales = weight.scales.clone()
    sizes = MXFP4.packed_bytes(weight.shape, False)
    prepared = pack(weight)
    assert sizes == (prepared.values.nbytes, prepared.scales.nbytes)
    assert prepared.padded_inputs == 256
    assert prepared.values.shape == (1, 1, 2, 64, 32) and prepared.scales.shape == (1, 1, 2, 64)
    stored = prepared.scales[0, 0].T.contiguous().view(torch.uint8)[:3, : scales.shape[1]]
    assert torch.equal(stored - 126, scales)


def test_tiles_lie_in_one_piece_and_in_the_memory_that_was_given() -> None:
    """Of 64 rows and 128 inputs: inputs first, then rows."""
    weight = MXFP4.quantize(torch.randn(2, 128, 256))
    plain, memory = weight.values.clone(), weight.values.data_ptr()
    prepared = pack(weight)
    assert prepared.values.shape == (2, 2, 2, 64, 32) and prepared.values.data_ptr() == memory
    for expert, block, step in ((0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)):
        rows, inputs = slice(64 * block, 64 * block + 64), slice(64 * step, 64 * step + 64)
        alone = pack(QuantizedWeight(MXFP4, plain[expert, rows, inputs].contiguous(), weight.scales[expert, rows, :4]))
        assert torch.equal(alone.values.flatten(), prepared.values[expert, block, step].flatten())
