"""Gemma 3 and Gemma 4 in all their variants, against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from architectures.execution_modes import assert_matches
from tiny_checkpoints import write_tiny

from allotrope.architectures.gemma3 import FULL, SLIDING, tiny_gemma3, tiny_gemma3_wrapper
from allotrope.architectures.gemma4 import tiny_gemma4, tiny_gemma4_wrapper
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError

LENGTHS = (1, 5, 16, 31, 32, 33, 80)


def with_experts() -> dict[str, Any]:
    return tiny_gemma4() | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    }


VARIANTS = {
    "gemma 3": tiny_gemma3,
    "gemma 3, layers by pattern, soft cap": lambda: (
        tiny_gemma3() | {"layer_types": None, "final_logit_softcapping": 10.0}
    ),
    "gemma 4": tiny_gemma4,
    "gemma 4 with experts": with_experts,
    "gemma 4 with inputs per layer and shared rows": tiny_gemma4_wrapper,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gemma(variant: str, tmp_path: Path) -> None:
    config = {key: value for key, value in VARIANTS[variant]().items() if value is not None}
    assert_matches(write_tiny(config, tmp_path), LENGTHS)


def test_shared_layers_read_the_cache_of_the_last_layer_of_their_type() -> None:
    _, spec = read_spec(tiny_gemma4_wrapper(), "tiny")
    assert [layer.mixer.shares_cache_of for layer in spec.layers] == [None, None, None, None, None, 3, 3, 4]


def test_every_token_has_inputs_per_layer() -> None:
    small = {"vocab_size_per_layer_input": 319}
    read_spec(tiny_gemma4() | small, "none per layer")
    config = tiny_gemma4_wrapper()
    with pytest.raises(ModelError, match=r"vocab_size_per_layer_input=319 \(needs vocab_size=320 or more\)"):
        read_spec(config | {"text_config": config["text_config"] | small}, "tiny")


def test_a_multimodal_config_is_read_as_strictly_as_a_text_config() -> None:
    config = tiny_gemma3_wrapper()
    config["text_config"] |= {"novel": 1, "sliding_window": "wide"}
    with pytest.raises(ModelError) as caught:
        read_spec(config, "tiny")
    assert [reason for reason in caught.value.reasons if "novel" in reason or "sliding_window" in reason] == [
        "config sliding_window='wide' (needs int)",
        "config text_config novel=1 is not understood",
    ]


def test_shared_layers_without_a_layer_of_their_type_are_refused() -> None:
    config = tiny_gemma4() | {"layer_types": [SLIDING, SLIDING, SLIDING, FULL, FULL], "num_kv_shared_layers": 2}
    with pytest.raises(ModelError, match="leaves layer 3 no full_attention to read from"):
        read_spec(config, "tiny")
