"""No value of a config is dropped in silence: it changes the model, is refused, or is known to change nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import tiny

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_draft, read_spec
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.read_config import BOOKKEEPING
from allotrope.errors import ModelError
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.ops.rope import RopeSpec

LATENT = ("Deepseek", "GlmMoeDsa", "Kimi")
# Last part of a key's path -> why its value changes nothing, and in which models.
HARMLESS = {
    "num_key_value_heads": ("latent attention has no heads of keys", LATENT),
    "head_dim": ("latent attention has sizes of its own", LATENT),
    "num_nextn_predict_layers": ("one multi-token-prediction layer makes all drafts", ("DeepseekV4",)),
    "_sliding_window_pattern": ("saved by default beside the list that decides", ("Gemma3",)),
    "tie_word_embeddings": ("the text part decides, and its head has to be loaded", ("KimiK25", "Kimi_K25")),
    "mrope_interleaved": ("a text token has one position on all axes", ("Qwen3_5",)),
    "use_double_wide_mlp": ("of layers that share rows, and there are none", ("Gemma4",)),
    "vocab_size_per_layer_input": ("of inputs per layer, and there are none", ("Gemma4",)),
    "index_topk_freq": ("of a schedule in whose place layers are listed", ("GlmMoeDsa",)),
    "index_skip_topk_offset": ("of a schedule in whose place layers are listed", ("GlmMoeDsa",)),
    "rope_theta": ("nothing is rotated", ("KimiLinear",)),
    "attention_chunk_size": ("no layer is chunked", ("MiMo",)),
    "sliding_window": ("released as the window, saved as the window with the query's own key", ("MiMo",)),
    "use_sliding_window": ("there is no window", ("Qwen3",)),
    "max_window_layers": ("there is no window", ("Qwen3",)),
}


def other(value: Any) -> Any:
    """Another value of the type; None for one that is left alone."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 1.5 + 0.25 if isinstance(value, float) else None


def numbers(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths of the numbers of a config, but those of the parts that see and hear, with other values."""
    for key, value in config.items():
        if key in BOOKKEEPING or key in ("vision_config", "audio_config") or key.startswith(("mm_", "projection_")):
            continue
        if isinstance(value, dict):
            yield from numbers(value, (*path, key))
        elif other(value) is not None and not key.endswith(("_token_id", "_token_index")):
            yield (*path, key), other(value)


def silent(config: dict[str, Any], name: str) -> list[str]:
    """Numbers that can be changed without a change of the model or of its draft head."""

    def read(config: dict[str, Any]) -> tuple[object, object]:
        return read_spec(config, name)[1], read_draft(config, name)

    specs = read(config)
    found = []
    for path, value in numbers(config):
        changed = copy.deepcopy(config)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        try:
            same = read(changed) == specs
        except ModelError:
            continue
        if same and not name.startswith(HARMLESS.get(path[-1], ("", ()))[1]):
            found.append(".".join(path))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_config_value_changes_the_spec(name: str) -> None:
    assert silent(find_architecture({"architectures": [name]}, name).tiny(), name) == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_value_that_transformers_writes_changes_the_spec(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(find_architecture({"architectures": [name]}, name).tiny()))
    written = transformers.AutoConfig.from_pretrained(tmp_path).to_dict() | {"architectures": [name]}
    assert silent(json.loads(json.dumps(written, default=str)), name) == []


# As older Transformers write it into a config inside another one.
DUMPED = {
    **{"_attn_implementation_autoset": True, "pruned_heads": {}, "tf_legacy_loss": False, "use_bfloat16": False},
    **{"max_length": 20, "min_length": 0, "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
    **{"num_beams": 1, "repetition_penalty": 1.0, "remove_invalid_values": False, "bad_words_ids": None},
}


def test_what_transformers_writes_into_every_config_is_of_no_model() -> None:
    config = find_architecture({"architectures": ["KimiK25ForConditionalGeneration"]}, "tiny").tiny()
    dumped = config | {"text_config": config["text_config"] | DUMPED}
    assert read_spec(dumped | DUMPED, "tiny")[1] == read_spec(config, "tiny")[1]
    with pytest.raises(ModelError, match="pruned_heads="):
        read_spec(config | {"pruned_heads": {"0": [1]}}, "tiny")


def test_a_llama_may_say_that_it_is_one() -> None:
    """As SmolLM2's config does."""
    config = find_architecture({"architectures": ["LlamaForCausalLM"]}, "tiny").tiny()
    stated = config | {"is_llama_config": True, "rope_interleaved": False}
    assert read_spec(stated, "tiny")[1] == read_spec(config, "tiny")[1]
    with pytest.raises(ModelError, match="rope_interleaved=True is not supported"):
        read_spec(config | {"rope_interleaved": True}, "tiny")


def rope(config: dict[str, Any]) -> RopeSpec:
    mixer = read_spec(config, "tiny")[1].layers[-1].mixer
    assert isinstance(mixer, MhaMixerSpec) and mixer.rope is not None
    return mixer.rope


def qwen3(**changes: Any) -> dict[str, Any]:
    config = find_architecture({"architectures": ["Qwen3ForCausalLM"]}, "").tiny()
    return {key: value for key, value in config.items() if not key.startswith("rope")} | changes


LINEAR = {"rope_type": "linear", "factor": 4.0}
BOTH = {
    "all in each": {
        "rope_scaling": LINEAR | {"rope_theta": 7e5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "base outside": {
        "rope_theta": 7e5,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    },
    "nothing stretched": {"rope_theta": 7e5, "rope_scaling": {"rope_type": "default"}, "rope_parameters": LINEAR},
    "an empty one": {"rope_scaling": {}, "rope_parameters": LINEAR | {"rope_theta": 5e5}},
}


@pytest.mark.parametrize("case", BOTH)
def test_rope_scaling_stands_in_place_of_rope_parameters(case: str, tmp_path: Path) -> None:
    """As in Transformers, number for number."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from allotrope.ops.rope import inverse_frequencies

    (tmp_path / "config.json").write_text(json.dumps(qwen3(**BOTH[case])))
    theirs = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(inverse_frequencies(rope(qwen3(**BOTH[case]))), theirs)


PARAMETERS = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": PARAMETERS, "rope_scaling": LINEAR}, "write rope_theta into rope_scaling"),
        (
            {"rope_theta": 7e5, "rope_parameters": PARAMETERS | {"partial_rotary_factor": 0.5}, "rope_scaling": LINEAR},
            "write partial_rotary_factor into rope_scaling",
        ),
        (
            {"rope_parameters": {"full_attention": PARAMETERS}, "rope_scaling": LINEAR},
            "write the scaling into rope_parameters",
        ),
        ({"rope_parameters": PARAMETERS, "rope_theta": 1e6}, r"rope_theta=1000000\.0, but its rotation has"),
        (
            {"rope_parameters": PARAMETERS | {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25},
            r"partial_rotary_factor=0\.25, but its rotation has",
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"factor": 4.0}}, r"factor=4\.0 is not supported"),
        ({"rope_theta": 5e5, "rope_scaling": LINEAR | {"type": "yarn"}}, "type='yarn' is not supported"),
    ],
)
def test_rope_values_that_would_be_lost_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_spec(qwen3(**changes), "tiny")


def test_an_override_replaces_the_other_spelling(tmp_path: Path) -> None:
    stored, wanted = qwen3(rope_theta=5e5, rope_scaling=LINEAR), {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(stored | {"text_config": stored}))
    for given in ({"rope_parameters": wanted}, {"rope_scaling": wanted}):
        overrides = json.dumps(given | {"text_config": given})
        config = open_checkpoint(str(tmp_path), load_format="dummy", hf_overrides=overrides).config
        assert rope(config | {"text_config": None}).scaling.factor == 8.0
        assert rope(config["text_config"]).scaling.factor == 8.0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("GptOssForCausalLM", {"experts_per_token": 5}),
        ("GptOssForCausalLM", {"initial_context_length": 129}),
        ("DeepseekV32ForCausalLM", {"mlp_layer_types": ["sparse"] * 4}),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "FFFFF"}),
        (
            "Gemma3ForConditionalGeneration",
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
        ),
        ("MiMoV2FlashForCausalLM", {"rms_norm_eps": 1e-6}),
        ("MiMoV2FlashForCausalLM", {"layer_types": ["full_attention"] * 6}),
        ("MiniMaxM2ForCausalLM", {"partial_rotary_factor": 0.25}),
        ("DeepseekV4ForCausalLM", {"partial_rotary_factor": 0.3}),
        ("Qwen3_5ForCausalLM", {"full_attention_interval": 2}),
    ],
)
def test_two_values_that_differ_are_refused(name: str, changes: dict[str, Any]) -> None:
    config = find_architecture({"architectures": [name]}, name).tiny()
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    with pytest.raises(ModelError):
        read_spec(config, name)


# Values of which the models that read them have defaults of their own, and no tensor would show a wrong one.
LEFT_OUT = {
    ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"): ("DeepseekV3", "Glm", "KimiK25"),
    ("routed_scaling_factor", "swiglu_limit"): ("DeepseekV4",),
    ("sliding_window",): ("Mistral",),
    ("attention_value_scale",): ("MiMo",),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_without_a_value_that_no_tensor_shows_is_refused(name: str) -> None:
    keys = [key for keys, names in LEFT_OUT.items() if name.startswith(names) for key in keys]
    for key in keys:
        config = find_architecture({"architectures": [name]}, name).tiny()
        text = config.get("text_config", config)
        del text[key]
        with pytest.raises(ModelError, match=f"config has no '{key}'"):
            read_spec(config, name)


def test_a_window_says_how_long_it_is_and_which_layers_have_it() -> None:
    windowed = qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    read_spec(windowed, "tiny")
    for key in ("sliding_window", "max_window_layers"):
        with pytest.raises(ModelError, match=f"config has no '{key}'"):
            read_spec({name: value for name, value in windowed.items() if name != key}, "tiny")
    experts = find_architecture({"architectures": ["Qwen3MoeForCausalLM"]}, "tiny").tiny()
    with pytest.raises(ModelError, match="use_sliding_window=True is not supported"):
        read_spec(experts | {"use_sliding_window": True, "sliding_window": 8}, "tiny")


def test_null_is_a_value_where_leaving_out_is_not() -> None:
    for name, key in (("MistralForCausalLM", "sliding_window"), ("MiMoV2FlashForCausalLM", "attention_value_scale")):
        read_spec(find_architecture({"architectures": [name]}, name).tiny() | {key: None}, name)


def test_half_of_each_head_is_rotated_in_a_glm_config_that_does_not_say_how_much() -> None:
    config = find_architecture({"architectures": ["Glm4MoeForCausalLM"]}, "tiny").tiny()
    stated = read_spec(config, "tiny")[1]
    del config["partial_rotary_factor"]
    assert read_spec(config, "tiny")[1] == stated


# Keys, wherever a config has them, with values of which no model can be made.
IMPOSSIBLE: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "hc_mult"), (0, -1)),
    "partial_rotary_factor": (0.0, 1.5, -1.0),
    "rope_theta": (0.0, -1.0),
    "compress_rope_theta": (0.0,),
    # Odd ones cannot be paired.
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "global_head_dim"), (0, 15)),
    "o_groups": (0, 3),
    **dict.fromkeys(("intermediate_size", "o_lora_rank"), (0, -1)),
    **dict.fromkeys(("n_shared_experts", "hidden_size_per_layer_input", "sliding_window"), (-1,)),
}


def with_value(config: dict[str, Any], key: str, value: float) -> bool:
    """Set `key` wherever `config` has it; whether it has."""
    parts = [part for name, part in config.items() if isinstance(part, dict) and name != "vision_config"]
    found = [with_value(part, key, value) for part in parts]
    if key in config:
        config[key] = value
    return key in config or any(found)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_impossible_sizes_are_refused(name: str) -> None:
    tested = 0
    for key, values in IMPOSSIBLE.items():
        for value in values:
            config = copy.deepcopy(find_architecture({"architectures": [name]}, name).tiny())
            if not with_value(config, key, value) or name.startswith(HARMLESS.get(key, ("", ()))[1]):
                continue
            tested += 1
            try:
                read_spec(config, name)
            except ModelError:
                continue
            pytest.fail(f"{key}={value} is not refused")
    assert tested >= 8


@pytest.mark.parametrize(
    ("name", "key"), [("MiniMaxM2ForCausalLM", "rotary_dim"), ("DeepseekV4ForCausalLM", "qk_rope_head_dim")]
)
def test_a_rope_that_is_wider_than_its_head_is_refused(name: str, key: str) -> None:
    config = find_architecture({"architectures": [name]}, name).tiny()
    with pytest.raises(ModelError, match="needs at most as many"):
        read_spec(config | {key: 2 * config["head_dim"]}, name)


@pytest.mark.parametrize("names", [3, True, "LlamaForCausalLM", [3], {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_refused(names: object) -> None:
    with pytest.raises(ModelError, match="config architectures="):
        find_architecture({"architectures": names}, "x")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma4ForCausalLM", {"rope_parameters": {"sliding_attention": 3}}),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": {}, "mscale_all_dim": 1.0}}),
        ("DeepseekV2ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": [1]}}),
    ],
)
def test_ropes_of_other_types_are_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        read_spec(find_architecture({"architectures": [name]}, name).tiny() | changes, name)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "factor=inf"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings=0",
        ),
    ],
)
def test_numbers_with_which_nothing_can_be_computed_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_spec(tiny("LlamaForCausalLM") | changed, "")


def test_layers_are_listed_as_often_as_there_are_layers() -> None:
    config = tiny("GptOssForCausalLM")
    with pytest.raises(ModelError, match=r"lists 1 layers, and num_hidden_layers is") as refused:
        read_spec(config | {"layer_types": ["full_attention"]}, "")
    assert "allowed" not in str(refused.value)
    with pytest.raises(ModelError, match=r"layer_types has round \(allowed: full_attention"):
        read_spec(config | {"layer_types": ["round"] * config["num_hidden_layers"]}, "")
