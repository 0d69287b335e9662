"""The best of parts of a vocabulary is the greedy token of the whole: with ties, NaN, infinities and masked parts."""

from __future__ import annotations

import math

import pytest
import torch
from device_under_test import DEVICE

from allotrope.ops.sampling import reference as sampling
from allotrope.ops.sampling.spec import SamplingStep
from allotrope.ops.vocab_argmax import reference

VOCABULARY = 840


def logits_of_all_kinds() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, VOCABULARY, generator=generator)
    # FP8 has few values: most rows tie, across parts too.
    logits[8:40] = logits[8:40].to(torch.float8_e4m3fn).float()
    logits[20:24] = logits[20:24].clamp(max=0.0)
    logits[24:28] = 0.0
    logits[28:30] = -0.0
    logits[30, 5:] = logits[30, :5].max()
    logits[40, 800], logits[41, 3] = math.nan, -torch.tensor(math.nan)
    logits[42, 400], logits[43] = math.inf, -math.inf
    logits[44, :700] = -math.inf
    logits[45, 100:] = -math.inf
    logits[46, 10], logits[46, 820] = math.nan, math.inf
    return logits


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_parts_give_the_token_of_the_whole(ranks: int, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        from allotrope.ops.vocab_argmax import triton as chosen
    else:
        chosen = reference  # type: ignore[assignment]
    logits = logits_of_all_kinds()
    want = sampling.choose(logits, SamplingStep(greedy=torch.arange(len(logits))))
    assert (want < 0).sum() == 5
    size = VOCABULARY // ranks
    bests = []
    for rank in range(ranks):
        part = logits[:, rank * size : (rank + 1) * size].to(DEVICE)
        bests.append(chosen.best(part) + (VOCABULARY - (rank + 1) * size))
    assert chosen.token(torch.stack(bests).amax(0), VOCABULARY).tolist() == want.tolist()
