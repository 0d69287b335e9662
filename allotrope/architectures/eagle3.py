"""EAGLE3 heads of Llama's and of Qwen3's form: draft models in checkpoints of their own.

Two formats are read. The flat one has the names of the EAGLE repository (`midlayer.*`), and NVIDIA's keys below
`eagle_config`. That of vLLM's speculators has the layer's config below `transformer_layer_config`.

Sources: Li et al. 2025 (EAGLE-3); `models/eagle3` of speculators; `llama_eagle3.py` of vLLM, whose meaning of layer
numbers holds here: the residual stream before a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from allotrope.architectures.llama import read_llama
from allotrope.architectures.qwen3 import read_qwen3
from allotrope.checkpoint.read_config import ConfigReader
from allotrope.checkpoint.weights import Rule, drop, fuse
from allotrope.errors import ModelError
from allotrope.layers.decoder import refuse_aux_layers
from allotrope.layers.eagle3 import Eagle3Spec
from allotrope.layers.mixers.mha import MhaMixerSpec
from allotrope.layers.model_spec import ModelSpec

READERS = {"llama": read_llama, "qwen3": read_qwen3}
"""Type of the layers -> what reads their config."""

# Names in config.json of either format -> type of the layers; None where `transformer_layer_config` says it.
HEADS = {
    "Eagle3DraftModel": None,
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3Speculator": None,
    "LlamaForCausalLMEagle3": "llama",
}

T = TypeVar("T")


def is_eagle3(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE3 head."""
    return any(name in HEADS for name in config.get("architectures") or [])


def read_eagle3(config: dict[str, Any], source: str, target: ModelSpec) -> Eagle3Spec:
    """Read the config.json of a head for the model `target`. `source`: of the config, for messages.

    What the config does not say is as in the speculators' checkpoints: see `Eagle3Spec`'s defaults. Raises ModelError
    with every value that is missing, wrong, unknown or not for this target.
    """
    reader = ConfigReader(config, source)
    try:
        read = _read_speculators if reader.has("speculators_model_type") else _read_flat
        spec = _checked(reader, read(reader, target), target)
    except (ValueError, ZeroDivisionError) as error:
        # The spec refused a value that contradicts others. The reader's own reasons come first.
        reader.refuse(str(error))
        raise ModelError(source, reader.reasons) from error
    reader.finish()
    return spec


def _read_speculators(config: ConfigReader, target: ModelSpec) -> Eagle3Spec:
    """The speculators' format. Its layer's config is often a copy of the target's, so it does not say what is tied."""
    config.expect("speculators_model_type", "eagle3")
    config.expect("tie_word_embeddings", False, None)
    config.ignore("speculators_version", "embed_requires_grad", "has_no_defaults_at_init", "base_model_ep_plan")
    layer = config.section("transformer_layer_config")
    kind = layer.get("model_type", str)
    if kind not in READERS:
        config.refuse(f"config transformer_layer_config model_type={kind!r} (allowed: {', '.join(READERS)})")
        layer.ignore(*layer.values)
        kind = "llama"
    model = READERS[kind](layer)
    layer.refuse_unread("config transformer_layer_config")
    return Eagle3Spec(
        model=dataclasses.replace(_with_wide_input(model), tied=False),
        draft_vocab_size=config.get("draft_vocab_size", int),
        target_hidden=config.get("target_hidden_size", int, model.hidden),
        aux_layers=_aux_layers(config, config.get("eagle_aux_hidden_state_layer_ids", list, []), target),
        norm_before_fc=config.get("norm_before_fc", bool, False),
        fc_norm=config.get("fc_norm", bool, False),
        # vLLM and speculators differ in what they take for a value that is not there.
        norm_before_residual=config.get("norm_before_residual", bool),
        norm_output=config.get("norm_output", bool, False),
        num_drafts=_num_drafts(config),
    )


def _num_drafts(config: ConfigReader) -> int | None:
    """The drafts of a step that the default proposal method names. How it accepts them is for the verifier to say."""
    if not config.has("speculators_config"):
        return None
    section = config.section("speculators_config")
    section.expect("algorithm", "eagle3")
    section.ignore("verifier")
    default, methods = section.get("default_proposal_method", str), section.get("proposal_methods", list)
    section.refuse_unread("config speculators_config")
    for method in methods:
        if isinstance(method, dict) and method.get("proposal_type") == default:
            return ConfigReader(method, "proposal method").get("speculative_tokens", int, None)
    config.refuse(f"config speculators_config has no proposal method {default!r}")
    return None


def _read_flat(config: ConfigReader, target: ModelSpec) -> Eagle3Spec:
    """The format of the EAGLE repository, with NVIDIA's `eagle_config`."""
    names = config.get("architectures", list, [])
    kind = next((HEADS[name] for name in names if name in HEADS), None)
    if kind is None:
        config.refuse(f"config architectures={names!r} needs a speculators_model_type, which tells the format")
    nested = config.section("eagle_config") if config.has("eagle_config") else ConfigReader({}, config.subject)
    config.expect("logit_scale", 1, 1.0, None)
    config.expect("is_causal", True, None)
    config.expect("bias", False, None)
    config.expect("qkv_bias", False, None)
    config.expect("parallel_drafting", False, None)
    config.expect("position_embedding_type", "rope", None)
    config.ignore("target_model_type")
    _refuse_window(config, kind)
    for key, allowed in (
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
        ("next_layer_regular", True),
        ("parallel_draft_step", 1),
    ):
        for where in (config, nested):
            where.expect(key, allowed, None)
    for where in (config, nested):
        # The tensors say whether the head is its own; the layers of parallel drafts are none with one step.
        where.ignore("has_lm_head", "parallel_draft_heads_num_layers")
    model = READERS[kind or "llama"](config)
    if model.tied:
        config.refuse("config tie_word_embeddings=True is not supported (allowed: False)")
    use_aux = _either(config, nested, "use_aux_hidden_state", bool, True)
    stated = _either(config, nested, "eagle_aux_hidden_state_layer_ids", list, [])
    spec = Eagle3Spec(
        model=_with_wide_input(model),
        draft_vocab_size=config.get("draft_vocab_size", int, model.vocab_size),
        target_hidden=config.get("target_hidden_size", int, model.hidden),
        aux_layers=_aux_layers(config, stated, target) if use_aux else (),
        norm_before_fc=_either(config, nested, "norm_before_fc", bool, False),
        fc_norm=_either(config, nested, "fc_norm", bool, False),
        norm_before_residual=_either(config, nested, "norm_before_residual", bool, False),
        norm_output=_either(config, nested, "norm_output", bool, False),
    )
    nested.refuse_unread("config eagle_config")
    return spec


def _refuse_window(config: ConfigReader, kind: str | None) -> None:
    """Llama's layers have no window. Heads for Qwen carry the keys of Qwen's config all the same."""
    if kind == "qwen3":
        return
    config.expect("use_sliding_window", False, None)
    config.ignore("max_window_layers")
    if config.values.get("use_sliding_window") is False:
        config.ignore("sliding_window")


def _either(config: ConfigReader, nested: ConfigReader, key: str, kind: type[T], default: T) -> T:
    """The value of `key` in the config or below `eagle_config`. Two that differ are refused."""
    outer, inner = config.get(key, kind, None), nested.get(key, kind, None)
    if outer is not None and inner is not None and outer != inner:
        config.refuse(f"config {key}={outer!r}, but eagle_config has {inner!r}: give one value")
    return next((value for value in (outer, inner) if value is not None), default)


def _aux_layers(config: ConfigReader, stated: Sequence[Any], target: ModelSpec) -> tuple[int, ...]:
    """The layers that the config names, or the ones that EAGLE-3 was made with. Their number may be stated once more.

    A number stands for the residual stream before that layer.
    """
    count = len(target.layers)
    layers = list(stated) or [2, count // 2, count - 3]
    for key in ("num_aux_hidden_states", "num_aux_layers", "num_eagle_features"):
        config.expect(key, len(layers), None)
    if any(not isinstance(one, int) or isinstance(one, bool) for one in layers):
        config.refuse(f"config eagle_aux_hidden_state_layer_ids={layers!r} (needs integers)")
        return ()
    try:
        refuse_aux_layers(layers, count, True)
    except ValueError as error:
        config.refuse(f"config eagle_aux_hidden_state_layer_ids: {error}")
    return tuple(layers)


def _with_wide_input(model: ModelSpec) -> ModelSpec:
    """The layers of the head: the first projects the embedding and the hidden states beside it."""
    mixer = model.layers[0].mixer
    assert isinstance(mixer, MhaMixerSpec)
    first = dataclasses.replace(model.layers[0], mixer=dataclasses.replace(mixer, inputs=2 * model.hidden))
    return dataclasses.replace(model, layers=(first, *model.layers[1:]))


def _checked(config: ConfigReader, spec: Eagle3Spec, target: ModelSpec) -> Eagle3Spec:
    """Refuse a head that is not for `target`, and norms that contradict each other."""
    model = spec.model
    if model.vocab_size != target.vocab_size:
        config.refuse(f"config vocab_size={model.vocab_size} (needs the target's {target.vocab_size})")
    if spec.target_hidden != target.hidden:
        config.refuse(f"config target_hidden_size={spec.target_hidden} (needs the target's {target.hidden})")
    if not 0 < spec.draft_vocab_size <= model.vocab_size:
        config.refuse(f"config draft_vocab_size={spec.draft_vocab_size} (needs 1 to {model.vocab_size})")
    if spec.norm_before_fc and spec.fc_norm:
        config.refuse("config norm_before_fc and fc_norm are both true: give one")
    if not spec.aux_layers:
        if spec.norm_before_fc or spec.fc_norm:
            config.refuse("config use_aux_hidden_state=False leaves no input for norm_before_fc or fc_norm")
        if model.hidden != target.hidden:
            config.refuse(f"config hidden_size={model.hidden} (needs the target's {target.hidden} without fc)")
    return spec


def eagle3_rules(spec: Eagle3Spec) -> list[Rule]:
    """Weight rules of a head, in either format."""
    rules = [
        Rule("norm.weight", "norm.weight"),
        drop("t2d", "the inverse of d2t, for training"),
        drop("layers.{i}.self_attn.rotary_emb.inv_freq", "computed from the config"),
        drop("midlayer.self_attn.rotary_emb.inv_freq", "computed from the config"),
    ]
    optional = {
        "fc.weight": ("fc.weight", bool(spec.aux_layers)),
        "input_norm.weight": ("input_norm.weight", spec.norm_before_fc),
        "fc_norm.{i}.weight": ("fc_norms.{i}.weight", spec.fc_norm),
        "embed_tokens.weight": ("embedding.weight", spec.own_embedding),
        "lm_head.weight": ("head.weight", spec.own_head),
        "d2t": ("d2t", spec.maps_ids),
    }
    rules += [Rule(theirs, ours) for theirs, (ours, there) in optional.items() if there]
    for i in range(len(spec.layers)):
        for theirs in (f"layers.{i}.", *(("midlayer.",) if i == 0 else ())):
            rules += _layer_rules(theirs, i)
    return rules


def _layer_rules(theirs: str, index: int) -> list[Rule]:
    """Weight rules of one layer. `theirs`: what its names begin with."""
    ours = f"layers.{index}."
    renamed = {
        "input_layernorm.weight": "mixer_norm.weight" if index else "embedding_norm.weight",
        "hidden_norm.weight": "hidden_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.q_norm.weight": "mixer.q_norm.weight",
        "self_attn.k_norm.weight": "mixer.k_norm.weight",
    }
    rules = [Rule(theirs + name, ours + target) for name, target in renamed.items()]
    for kind in ("weight", "bias"):
        rules += fuse(theirs + "self_attn.{}." + kind, ours + "mixer.qkv." + kind, ("q_proj", "k_proj", "v_proj"))
        rules += fuse(theirs + "mlp.{}." + kind, ours + "ffn.gate_up." + kind, ("gate_proj", "up_proj"))
        rules.append(Rule(theirs + "self_attn.o_proj." + kind, ours + "mixer.out." + kind))
        rules.append(Rule(theirs + "mlp.down_proj." + kind, ours + "ffn.down." + kind))
    return rules


def tiny_eagle3(target: ModelSpec) -> dict[str, Any]:
    """Config of a head with half of the target's vocabulary, in the flat format, for tests."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // 2,
        "hidden_size": target.hidden,
        "intermediate_size": 2 * target.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": target.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, len(target.layers) // 2, len(target.layers)],
            "use_aux_hidden_state": True,
        },
    }
