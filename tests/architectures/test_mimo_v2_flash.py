"""MiMo-V2-Flash against Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures.execution_modes import assert_matches
from tiny_checkpoints import write_tiny

from allotrope.architectures.mimo_v2_flash import tiny_mimo_v2_flash
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError


def test_mimo_v2_flash(tmp_path: Path) -> None:
    assert_matches(write_tiny(tiny_mimo_v2_flash(), tmp_path), (1, 5, 15, 16, 17, 18, 70))


def test_the_window_is_the_tokens_before_and_the_query() -> None:
    _, spec = read_spec(tiny_mimo_v2_flash(), "tiny")
    assert [getattr(layer.mixer, "window", 0) for layer in spec.layers] == [None, 17, 17, 17, 17, None]


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(ModelError, match=r"hybrid_layer_pattern=\[0, 1\] \(needs 6"):
        read_spec(tiny_mimo_v2_flash() | {"hybrid_layer_pattern": [0, 1]}, "tiny")
