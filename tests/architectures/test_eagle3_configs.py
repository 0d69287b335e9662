"""Configs of EAGLE3 heads: every value is read, or refused with its reason."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from checkpoint.test_config_values import numbers
from loading.eagle3_steps import ExpectedHeads

from allotrope.architectures.eagle3 import is_eagle3, read_eagle3
from allotrope.architectures.gpt_oss import tiny_gpt_oss
from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError

EXPECTED = ExpectedHeads()
# Of the file's heads: a model of 4 layers that they can draft for.
TARGET = tiny_llama() | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}
# Of the flat format, as released with heads for gpt-oss.
RELEASED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "draft_vocab_size": 201088,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [24, 30, 36],
        "next_layer_regular": True,
        "norm_before_fc": True,
        "parallel_draft_heads_num_layers": 1,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    },
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 201088,
}
GPT_OSS = tiny_gpt_oss() | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


def test_a_released_config_is_read_whole() -> None:
    _, spec = read_spec(copy.deepcopy(GPT_OSS), "target")
    assert is_eagle3(RELEASED)
    read = read_eagle3(copy.deepcopy(RELEASED), "head", spec)
    assert read.aux_layers == (24, 30, 36) and read.norm_before_fc and not read.norm_before_residual
    assert read.num_drafts is None and read.layers[0].mixer.inputs == 2 * 2880  # type: ignore[attr-defined]
    plain = {key: value for key, value in RELEASED.items() if key != "eagle_config"}
    assert read_eagle3(plain, "head", spec).aux_layers == (2, 18, 33)


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values; "a.b" names the key b in the object a."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    for key, value in changes.items():
        *outer, last = key.split(".")
        inner = result
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return result


REFUSED_FLAT: dict[str, tuple[dict[str, Any], str]] = {
    "unknown value": ({"eagle_config.use_magic": True}, "eagle_config use_magic=True is not understood"),
    "unknown outer value": ({"magic": 1}, "config magic=1 is not understood"),
    "another vocabulary": ({"vocab_size": 300000}, "vocab_size=300000 (needs the target's 201088)"),
    "too many ids": ({"draft_vocab_size": 201089}, "draft_vocab_size=201089"),
    "another target": ({"target_hidden_size": 4096}, "target_hidden_size=4096 (needs the target's 2880)"),
    "layer behind the last": ({"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 2, 37]}, "from 0 to 36"),
    "order": ({"eagle_config.eagle_aux_hidden_state_layer_ids": [30, 24, 36]}, "ascending"),
    "no integers": ({"eagle_config.eagle_aux_hidden_state_layer_ids": [1, "2", 3]}, "needs integers"),
    "another number of states": ({"num_aux_hidden_states": 4}, "num_aux_hidden_states=4 is not supported"),
    "two values": ({"norm_before_fc": False}, "norm_before_fc=False, but eagle_config has True"),
    "two norms": ({"fc_norm": True}, "norm_before_fc and fc_norm are both true"),
    "no first norm": ({"eagle_config.use_input_layernorm_in_first_layer": False}, "use_input_layernorm_in_first_layer"),
    "parallel drafts": ({"eagle_config.parallel_draft_step": 4}, "parallel_draft_step=4"),
    "scaled logits": ({"logit_scale": 0.5}, "logit_scale=0.5"),
    "window": ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window=True"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "norm of nothing": ({"eagle_config.use_aux_hidden_state": False}, "leaves no input for norm_before_fc"),
}
REFUSED_SPECULATORS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash'"),
    "no word on the residual": ({"norm_before_residual": None}, "no 'norm_before_residual'"),
    "layers of another kind": ({"transformer_layer_config.model_type": "mixtral"}, "model_type='mixtral'"),
    "unknown value of the layer": ({"transformer_layer_config.magic": 1}, "transformer_layer_config magic=1"),
    "another algorithm": ({"speculators_config.algorithm": "mtp"}, "algorithm='mtp'"),
    "no such proposal": ({"speculators_config.default_proposal_method": "tree"}, "no proposal method 'tree'"),
    "unknown value": ({"magic": 1}, "config magic=1 is not understood"),
}


@pytest.mark.parametrize("name", REFUSED_FLAT)
def test_flat_configs_that_are_refused(name: str) -> None:
    changes, reason = REFUSED_FLAT[name]
    _, spec = read_spec(copy.deepcopy(GPT_OSS), "target")
    with pytest.raises(ModelError) as error:
        read_eagle3(changed(RELEASED, changes), "head", spec)
    assert reason in str(error.value)


@pytest.mark.parametrize("name", REFUSED_SPECULATORS)
def test_configs_of_speculators_that_are_refused(name: str) -> None:
    changes, reason = REFUSED_SPECULATORS[name]
    _, spec = read_spec(copy.deepcopy(TARGET), "target")
    with pytest.raises(ModelError) as error:
        read_eagle3(changed(EXPECTED.heads["plain"]["config"], changes), "head", spec)
    assert reason in str(error.value)


# Last part of a key's path -> why its value changes nothing.
HARMLESS = {
    "max_window_layers": "there is no window",
    "parallel_draft_heads_num_layers": "of parallel drafts, and there are none",
    "embed_requires_grad": "of training",
    "tie_word_embeddings": "copied from the target: the head has tensors of its own",
    "use_sliding_window": "there is no window",
}


@pytest.mark.parametrize("name", ["released", *EXPECTED.heads])
def test_every_value_changes_the_spec(name: str) -> None:
    """Or is refused."""
    config: dict[str, Any] = RELEASED if name == "released" else EXPECTED.heads[name]["config"]
    _, spec = read_spec(copy.deepcopy(GPT_OSS if name == "released" else TARGET), "target")
    own, silent = read_eagle3(config, "head", spec), []
    for path, value in numbers(config):
        try:
            same = read_eagle3(changed(config, {".".join(path): value}), "head", spec) == own
        except ModelError:
            continue
        if same:
            silent.append(path[-1])
    assert set(silent) <= set(HARMLESS)


def test_every_reason_is_given_at_once() -> None:
    _, spec = read_spec(copy.deepcopy(GPT_OSS), "target")
    with pytest.raises(ModelError) as error:
        read_eagle3(changed(RELEASED, {"vocab_size": 5, "logit_scale": 2.0, "magic": 1}), "head", spec)
    assert len(error.value.reasons) >= 3


def test_the_number_of_drafts_is_that_of_training() -> None:
    _, spec = read_spec(copy.deepcopy(TARGET), "target")
    assert read_eagle3(EXPECTED.heads["plain"]["config"], "head", spec).num_drafts == 3
