"""Every architecture, with random weights, in every mode against Transformers."""

from __future__ import annotations

import pytest

from allotrope.architectures.registry import ARCHITECTURES
from allotrope.config import EngineConfig
from allotrope.verify.options import VerifyOptions
from allotrope.verify.run import verify


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_pass(name: str) -> None:
    report = verify(EngineConfig(model=name), VerifyOptions(random=True))
    assert report.passed, report.verdict()
    assert {result.verdict for result in report.modes} == {"pass"}
    assert report.layers is not None
    assert all(layer.selections in ("", "same", "same, some unseen", "unseen") for layer in report.layers.layers)
