"""`--speculative-config`: vLLM's keys, their defaults, and every reason of a refusal at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allotrope.config import EngineConfig
from allotrope.errors import ConfigError
from allotrope.speculative_config import SpeculativeConfig


def parse(**values: Any) -> SpeculativeConfig:
    return SpeculativeConfig.parse(json.dumps(values))


def reasons(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(values)
    return str(caught.value)


def test_defaults_are_those_of_vllm() -> None:
    config = parse(method="ngram", num_speculative_tokens=3)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)
    assert config.adaptive and config.drafts_from_text and not config.is_synthetic
    assert config.rejection_sample_method == "standard"
    suffix = parse(method="suffix")
    assert suffix.num_speculative_tokens == 16
    assert (suffix.suffix_decoding_max_tree_depth, suffix.suffix_decoding_max_cached_requests) == (24, 10000)
    assert (suffix.suffix_decoding_max_spec_factor, suffix.suffix_decoding_min_token_prob) == (1.0, 0.1)
    assert parse(method="suffix", suffix_decoding_max_tree_depth=8).num_speculative_tokens == 8


@pytest.mark.parametrize(
    ("given", "both"), [({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 2}, (2, 2)),
                        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4))],
)  # fmt: skip
def test_one_lookup_length_gives_the_other(given: dict[str, int], both: tuple[int, int]) -> None:
    config = parse(method="ngram", num_speculative_tokens=3, **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == both


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"method": "deepseek_mtp"}, "mtp"),
        ({"method": "qwen3_next_mtp"}, "mtp"),
        ({"method": "mtp"}, "mtp"),
        ({"model": "[ngram]"}, "ngram"),
        ({"model": "ngram"}, "ngram"),
        ({"model": "nvidia/gpt-oss-120b-Eagle3-v3"}, "eagle3"),
        ({"model": "Qwen/Qwen3-0.6B"}, "draft_model"),
        ({"model": "Qwen/Qwen3-0.6B", "method": "eagle3"}, "eagle3"),
    ],
)
def test_method_by_alias_or_model(given: dict[str, str], method: str) -> None:
    assert parse(num_speculative_tokens=2, **given).method == method


def test_mtp_may_leave_the_length_to_the_checkpoint() -> None:
    assert parse(method="mtp").num_speculative_tokens == 0
    # null is what vLLM's own config prints for a key that is absent.
    assert parse(method="mtp", num_speculative_tokens=None, model=None).num_speculative_tokens == 0


def test_only_heads_of_models_have_a_type() -> None:
    assert parse(method="mtp").draft_head_dtype == "auto"
    assert parse(method="eagle3", model="head", draft_head_dtype="model").draft_head_dtype == "model"
    assert "draft_head_dtype='int4'; allowed: auto, fp8, model" in reasons(method="mtp", draft_head_dtype="int4")
    assert "draft_head_dtype: method='suffix' does not read it" in reasons(method="suffix", draft_head_dtype="fp8")


def test_every_reason_is_named_at_once() -> None:
    text = reasons(
        method="ngram", num_speculative_tokens=17, prompt_lookup_min=9, prompt_lookup_max=4,
        draft_tensor_parallel_size=0, suffix_decoding_min_token_prob=1.5,
    )  # fmt: skip
    for part in (
        "num_speculative_tokens=17; allowed: 1 to 16",
        "prompt_lookup_min=9 is more than prompt_lookup_max=4",
        "draft_tensor_parallel_size=0; allowed: 1 to 1024",
        "suffix_decoding_min_token_prob=1.5; allowed: 0 to 1",
    ):
        assert part in text
    text = reasons(metod="ngram", tensor_parallel_size=2, num_speculative_tokens="3", adaptive=1)
    for part in (
        "unknown 'metod'; allowed: method, model, num_speculative_tokens",
        "tensor_parallel_size: give draft_tensor_parallel_size",
        "num_speculative_tokens='3'; a whole number is needed",
        "adaptive=1; true or false is needed",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, "method is missing, and no model tells it; allowed: ngram, suffix, mtp, eagle3, draft_model"),
        ({"method": "medusa", "num_speculative_tokens": 2}, "method='medusa'; allowed: ngram, suffix, mtp, eagle3"),
        ({"method": "ngram"}, "num_speculative_tokens is missing; ngram needs 1 to 16"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "model is missing; eagle3 needs"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True; a whole number"),
        # Matches of 2 tokens are the shortest that anything is drafted behind, and a tree has one more.
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 2}, "suffix_decoding_max_tree_depth=2; allowed: 3 to"),
        ({"method": "suffix", "model": "ngram"}, "model: method='suffix' does not read it; leave it out"),
        ({"method": "mtp", "synthetic_acceptance_length": 10**400}, "synthetic_acceptance_length"),
    ],
)
def test_refusals(given: dict[str, Any], part: str) -> None:
    assert part in reasons(**given)


def test_a_key_that_is_filled_in_is_not_refused_as_given() -> None:
    text = reasons(method="mtp", prompt_lookup_max=4)
    assert "prompt_lookup_max: method='mtp' does not read it" in text and "prompt_lookup_min" not in text


@pytest.mark.parametrize("source", ["{", "[1]", '"ngram"'])
def test_only_a_json_object_is_read(source: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config="):
        SpeculativeConfig.parse(source)


def test_forced_acceptance_is_checked() -> None:
    forced = {"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    assert parse(**forced, synthetic_acceptance_length=2.6).synthetic_acceptance_length == 2.6
    assert parse(**forced, synthetic_acceptance_rates=[1, 0.5, 0.5]).synthetic_acceptance_rates == (1.0, 0.5, 0.5)
    assert "needs one of synthetic_acceptance_length and" in reasons(**forced)
    both = {"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1, 0, 0]}
    assert "needs one of synthetic_acceptance_length and" in reasons(**forced, **both)
    assert "synthetic_acceptance_length=4.5; allowed: 1 to 4" in reasons(**forced, synthetic_acceptance_length=4.5)
    text = reasons(**forced, synthetic_acceptance_rates=[0.5, 1.5])
    assert "has 2 entries; num_speculative_tokens=3" in text and "allowed: 0 to 1 each" in text and "rise" in text
    without = {"method": "mtp", "num_speculative_tokens": 3, "synthetic_acceptance_length": 2}
    assert "synthetic_acceptance_length needs rejection_sample_method='synthetic'" in reasons(**without)
    assert "which is exact; use 'standard'" in reasons(**without, rejection_sample_method="block")


def test_engine_config_checks_and_parses_it() -> None:
    assert EngineConfig(model="m").speculation is None
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert EngineConfig(model="m", speculative_config=text).speculation == SpeculativeConfig.parse(text)
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        EngineConfig(model="m", speculative_config='{"method": "ngram"}')


def test_offline_use_takes_a_mapping_too() -> None:
    from allotrope.llm import LLM

    # Refused before anything is loaded.
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        LLM("no-such-model", speculative_config={"method": "ngram"})
