"""The architectures of GGUF files: from `general.architecture` to a config.json, and to the names of tensors.

Owns the tables of both for each known architecture. It must not know how the model runs, or how values are stored.
Names and meanings are those of llama.cpp's conversion (`conversion/`) and of its models (`src/models/`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from allotrope.checkpoint.gguf_keys import Keys, head_config, model_config, rope_config
from allotrope.checkpoint.gguf_tensors import (
    GgufNames,
    GgufRule,
    Rules,
    convolution_taps,
    decay_log,
    grouped_value_heads,
    grouped_values_behind_keys,
    latent_keys_and_values,
    minus_one,
    rows_of_halves,
)
from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile

_SIGMOID = 2
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of `general.architecture`. `config`: metadata to config.json, without the dtype."""

    config: Callable[[Keys], dict[str, Any]]
    names: GgufNames


def read_architecture(file: GgufFile) -> GgufArchitecture:
    """The architecture of `file`. Raises `ModelError` with the known names, or the reason if it is known not to run."""
    name = file.metadata.get("general.architecture")
    if name in REFUSED:
        raise ModelError(f"cannot load {file.path}", [f"general.architecture={name!r}: {REFUSED[name]}"])
    if name not in ARCHITECTURES:
        raise ModelError(
            f"cannot load {file.path}",
            [f"general.architecture={name!r}; known from GGUF files: {', '.join(sorted(ARCHITECTURES))}"],
        )
    return ARCHITECTURES[name]


def hf_config(file: GgufFile, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """The `config.json` of `file`, without the dtype.

    `rope_factors`: [D/2] divisor of each inverse frequency, or None if the file has no such tensor. Raises `ModelError`
    with every metadata key that is missing, unknown or unsupported.
    """
    keys = Keys(file, rope_factors)
    config = read_architecture(file).config(keys)
    keys.finish()
    return config


# Names of tensors. Those in a block are behind the name of its layer.

_TOP: Rules = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS: Rules = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION: Rules = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS: Rules = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP: Rules = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE: Rules = {**_NORMS, **_ATTENTION, **_MLP}
_ROUTER: Rules = {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_SHARED: Rules = {f"{name}_shexp": f"mlp.shared_experts.{name[4:]}_proj" for name in _MLP}


def _experts(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Rules:
    """Routed experts. `prefix`: Hugging Face name of them, with the last dot. Gate and up may be one tensor."""
    return {
        "ffn_gate_exps": f"{prefix}{{e}}.{gate}",
        "ffn_up_exps": f"{prefix}{{e}}.{up}",
        "ffn_down_exps": f"{prefix}{{e}}.{down}",
        "ffn_gate_up_exps": (GgufRule(f"{prefix}{{e}}.{gate}", half=0), GgufRule(f"{prefix}{{e}}.{up}", half=1)),
    }


_SPARSE: Rules = {**_MLP, **_ROUTER, **_SHARED, **_experts("mlp.experts.")}
_LATENT: Rules = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # Older files have the whole projection.
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": GgufRule("self_attn.kv_b_proj.weight", make=latent_keys_and_values, partner="attn_v_b.weight"),
    "attn_output": "self_attn.o_proj",
}
_INDEXER: Rules = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.k_norm": "self_attn.indexer.k_norm",
}
# A layer that makes drafts, in DeepSeek's layout.
_DRAFT_PARTS: Rules = {
    "nextn.eh_proj": "model.layers.{i}.eh_proj",
    "nextn.enorm": "model.layers.{i}.enorm",
    "nextn.hnorm": "model.layers.{i}.hnorm",
    "nextn.embed_tokens": "model.layers.{i}.embed_tokens",
    "nextn.shared_head_norm": "model.layers.{i}.shared_head.norm",
    "nextn.shared_head_head": "model.layers.{i}.shared_head.head",
}


def _offset_norms(rules: Rules) -> Rules:
    """`rules` of norms that the file stores with the 1 that the model adds."""
    return {name: GgufRule(str(target), make=minus_one) for name, target in rules.items()}


def _llama_names() -> GgufNames:
    block = {
        **_DENSE,
        "attn_q": GgufRule("self_attn.q_proj", rows=rows_of_halves("num_attention_heads")),
        "attn_k": GgufRule("self_attn.k_proj", rows=rows_of_halves("num_key_value_heads")),
    }
    return GgufNames(_TOP, block)


def _gemma3_names() -> GgufNames:
    norms: Rules = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        **_HEAD_NORMS,
    }
    return GgufNames(
        {**_TOP, **_offset_norms({"output_norm": "model.norm"})}, {**_ATTENTION, **_MLP, **_offset_norms(norms)}
    )


def _gemma4_names() -> GgufNames:
    top: Rules = {
        **_TOP,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    block: Rules = {
        **_ATTENTION,
        **_MLP,
        **_HEAD_NORMS,
        **_experts("experts."),
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale.weight": GgufRule("layer_scalar"),
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": GgufRule("router.scale"),
        "ffn_down_exps.scale": GgufRule("router.per_expert_scale"),
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
    return GgufNames(top, block)


def _hybrid_names(*, tiled: bool) -> GgufNames:
    """Qwen's hybrids. `tiled`: value heads are stored by their number in a group of heads that share a key head."""
    heads = grouped_value_heads if tiled else None
    behind_keys = grouped_values_behind_keys if tiled else None
    norms = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", **_HEAD_NORMS}
    linear = "linear_attn."
    block: Rules = {
        **_ATTENTION,
        **_MLP,
        **_offset_norms(norms),
        **_experts("mlp.experts."),
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp.weight": GgufRule("mlp.shared_expert_gate.weight", shape=lambda shape: (1, shape[-1])),
        **{f"{name}_shexp": f"mlp.shared_expert.{name[4:]}_proj" for name in _MLP},
        # Older files have the projection in the layout of the released checkpoint.
        "ssm_in": linear + "in_proj_qkvz",
        "ssm_ba": linear + "in_proj_ba",
        "attn_qkv": GgufRule(linear + "in_proj_qkv", rows=behind_keys),
        "attn_gate": GgufRule(linear + "in_proj_z", rows=heads),
        "ssm_beta": GgufRule(linear + "in_proj_b", rows=heads),
        "ssm_alpha": GgufRule(linear + "in_proj_a", rows=heads),
        "ssm_conv1d.weight": GgufRule(linear + "conv1d.weight", rows=behind_keys, shape=convolution_taps),
        "ssm_a": GgufRule(linear + "A_log", rows=heads, make=decay_log),
        "ssm_dt.bias": GgufRule(linear + "dt_bias", rows=heads),
        "ssm_norm": linear + "norm",
        "ssm_out": GgufRule(linear + "out_proj", columns=heads),
    }
    parts = {"nextn.eh_proj": "mtp.fc"}
    parts_norms = {
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    }
    return GgufNames(
        {**_TOP, **_offset_norms({"output_norm": "model.norm"})},
        block,
        draft="mtp.layers.{j}.",
        draft_parts={**parts, **_offset_norms(parts_norms)},
    )


def _kimi_linear_names() -> GgufNames:
    attention = "self_attn."
    sparse = "block_sparse_moe."
    low_rank = {f"ssm_{name}": f"{attention}{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")}
    taps = {
        f"ssm_conv1d_{name}.weight": GgufRule(f"{attention}{name}_conv1d.weight", shape=convolution_taps)
        for name in "qkv"
    }
    block: Rules = {
        **_NORMS,
        **_MLP,
        **_LATENT,
        **_ATTENTION,
        **low_rank,
        **taps,
        "ssm_beta": attention + "b_proj",
        "ssm_a": GgufRule(attention + "A_log", make=decay_log),
        "ssm_dt.bias": GgufRule(attention + "dt_bias"),
        "ssm_norm": attention + "o_norm",
        "ffn_gate_inp": sparse + "gate",
        "exp_probs_b.bias": GgufRule(sparse + "gate.e_score_correction_bias"),
        **{f"{name}_shexp": f"{sparse}shared_experts.{name[4:]}_proj" for name in _MLP},
        **_experts(sparse + "experts.", "w1", "w3", "w2"),
    }
    return GgufNames(_TOP, block)


def _minimax_m2_names() -> GgufNames:
    sparse = "block_sparse_moe."
    block: Rules = {
        **_NORMS,
        **_ATTENTION,
        **_HEAD_NORMS,
        "ffn_gate_inp": sparse + "gate",
        "exp_probs_b.bias": GgufRule(sparse + "e_score_correction_bias"),
        **_experts(sparse + "experts.", "w1", "w3", "w2"),
    }
    return GgufNames(_TOP, block)


def _gpt_oss_names() -> GgufNames:
    block: Rules = {
        **_ATTENTION,
        **_experts("mlp.experts."),
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": GgufRule("self_attn.sinks"),
        "ffn_gate_inp": "mlp.router",
    }
    return GgufNames(_TOP, block)


# Configs.


def _dense_config(keys: Keys, name: str, model_type: str) -> dict[str, Any]:
    """A dense decoder with Llama's names."""
    config = {"architectures": [name], "model_type": model_type, "hidden_act": "silu", **model_config(keys)}
    config["intermediate_size"] = keys.need("feed_forward_length")
    config["attention_bias"] = keys.has("blk.0.attn_q.bias")
    config.update(head_config(keys, config["hidden_size"]))
    return config


def _llama_config(keys: Keys) -> dict[str, Any]:
    config = _dense_config(keys, "LlamaForCausalLM", "llama")
    config["mlp_bias"] = keys.has("blk.0.ffn_gate.bias")
    config.update(rope_config(keys, config["head_dim"]))
    if keys.take("expert_count", 0):
        keys.reasons.append(
            f"{keys.prefix}.expert_count is not 0: mixtures of experts with Llama's names (Mixtral) are not supported"
        )
    window = keys.take("attention.sliding_window", 0)
    if window:
        # Hugging Face configs name the same layers with a window Mistral, which has no biases.
        if config.pop("attention_bias") or config.pop("mlp_bias"):
            keys.reasons.append(f"{keys.prefix}.attention.sliding_window={window}; layers with a window have no biases")
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _mistral3_config(keys: Keys) -> dict[str, Any]:
    config = _llama_config(keys)
    scale = keys.take("attention.temperature_scale", None)
    if scale:
        keys.reasons.append(
            f"{keys.prefix}.attention.temperature_scale={scale}: queries that are scaled by their position are not "
            f"supported"
        )
    keys.take("rope.scaling.yarn_log_multiplier", None)
    return config


def _qwen3_config(keys: Keys) -> dict[str, Any]:
    config = _dense_config(keys, "Qwen3ForCausalLM", "qwen3")
    config.update(rope_config(keys, config["head_dim"]))
    window = keys.take("attention.sliding_window", 0)
    if window:
        keys.reasons.append(f"{keys.prefix}.attention.sliding_window={window}; only llama files may have one")
    if keys.take("expert_count", 0):
        keys.reasons.append(f"{keys.prefix}.expert_count is not 0: a mixture of experts is a qwen3moe file")
    return config


def _qwen3_moe_config(keys: Keys) -> dict[str, Any]:
    # Files of models whose layers are all sparse may leave out the width of dense ones.
    keys.take("feed_forward_length", None)
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **model_config(keys)}
    config |= {"hidden_act": "silu", "attention_bias": keys.has("blk.0.attn_q.bias")}
    config |= _expert_config(keys, "num_experts") | {"norm_topk_prob": True}
    config["intermediate_size"] = config["moe_intermediate_size"]
    config.update(head_config(keys, config["hidden_size"]))
    config.update(rope_config(keys, config["head_dim"]))
    return config


def _expert_config(keys: Keys, count: str) -> dict[str, Any]:
    """`count`: config key of the number of experts."""
    width = keys.take("expert_feed_forward_length", None)
    if width is None:
        # Older files leave it to the tensor.
        tensors = (t for t in keys.file.tensors.values() if t.name.endswith(".ffn_gate_exps.weight"))
        width = next((tensor.shape[1] for tensor in tensors), 1)
    return {
        count: keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": width,
    }


def _hybrid_config(keys: Keys, name: str, model_type: str, *, sparse: bool) -> dict[str, Any]:
    config = {"architectures": [name], "model_type": model_type, "hidden_act": "silu", **model_config(keys)}
    config["attention_bias"] = keys.has("blk.0.attn_q.bias")
    config.update(head_config(keys, config["hidden_size"]))
    config.update(rope_config(keys, config["head_dim"], partial=True))
    # A text token has one position on all axes of an image.
    keys.ignore("rope.dimension_sections")
    width = keys.take("feed_forward_length", None)
    if sparse:
        config |= _expert_config(keys, "num_experts")
        config["shared_expert_intermediate_size"] = keys.need("expert_shared_feed_forward_length")
    else:
        config["intermediate_size"] = width
    heads = keys.need("ssm.time_step_rank")
    config |= {
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys.need("ssm.inner_size") // heads,
        "layer_types": [LINEAR if keys.has(f"blk.{i}.ssm_a") else FULL for i in range(config["num_hidden_layers"])],
    }
    keys.take("full_attention_interval", None)
    keys.expect_list("attention.recurrent_layers", [kind == LINEAR for kind in config["layer_types"]])
    return config


def _qwen3_next_config(keys: Keys) -> dict[str, Any]:
    config = _hybrid_config(keys, "Qwen3NextForCausalLM", "qwen3_next", sparse=True)
    return config | {
        "intermediate_size": config["moe_intermediate_size"],
        "norm_topk_prob": True,
        "num_nextn_predict_layers": keys.drafts,
    }


def _qwen3_5_config(keys: Keys) -> dict[str, Any]:
    config = _hybrid_config(keys, "Qwen3_5ForCausalLM", "qwen3_5_text", sparse=False)
    return config | {"mtp_num_hidden_layers": keys.drafts}


def _qwen3_5_moe_config(keys: Keys) -> dict[str, Any]:
    config = _hybrid_config(keys, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", sparse=True)
    return config | {"mtp_num_hidden_layers": keys.drafts}


def _gemma3_config(keys: Keys) -> dict[str, Any]:
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **model_config(keys)}
    config |= {"hidden_activation": "gelu_pytorch_tanh", "intermediate_size": keys.need("feed_forward_length")}
    config.update(head_config(keys, config["hidden_size"]))
    config.update(rope_config(keys, config["head_dim"]))
    # Files do not say how queries are scaled; the 27B model alone does not go by the head dim.
    wide = config["hidden_size"] // config["num_attention_heads"]
    window = keys.take("attention.sliding_window", 0)
    pattern = keys.take_list("attention.sliding_window_pattern") or [6] * keys.layers
    return config | {
        "query_pre_attn_scalar": wide if config["num_hidden_layers"] == 62 else config["head_dim"],
        "rope_local_base_freq": keys.take("rope.freq_base_swa", 10000.0),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": [
            SLIDING if window and _slides(pattern, i) else FULL for i in range(config["num_hidden_layers"])
        ],
        "final_logit_softcapping": keys.take("final_logit_softcapping", None),
    }


def _slides(pattern: list[Any], layer: int) -> bool:
    """Whether a layer has a window: flags of each layer, or the period of layers without one."""
    one = pattern[layer] if layer < len(pattern) else 1
    return one if isinstance(one, bool) else bool((layer + 1) % one) if one > 1 else one == 1


def _gemma4_config(keys: Keys) -> dict[str, Any]:
    config = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **model_config(keys)}
    slides = [bool(flag) for flag in keys.take_list("attention.sliding_window_pattern") or [False] * keys.layers]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if one else FULL for one in slides],
        "num_attention_heads": keys.need("attention.head_count"),
        "sliding_window": keys.need("attention.sliding_window"),
        "final_logit_softcapping": keys.take("final_logit_softcapping", None),
        "num_kv_shared_layers": keys.take("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": keys.take("embedding_length_per_layer_input", 0),
        "global_head_dim": keys.need("attention.key_length"),
        "head_dim": keys.need("attention.key_length_swa"),
    }
    second = keys.file.tensors.get("per_layer_token_embd.weight")
    config["vocab_size_per_layer_input"] = config["vocab_size"] if second is None else second.shape[0]
    keys.expect("attention.value_length", config["global_head_dim"])
    keys.expect("attention.value_length_swa", config["head_dim"])
    widths = keys.take_list("feed_forward_length") or [0]
    config |= {"intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] != widths[0]}
    groups = keys.take_list("attention.head_count_kv") or [1] * keys.layers
    by_kind = {
        kind: {g for g, one in zip(groups, config["layer_types"], strict=True) if one == kind}
        for kind in (SLIDING, FULL)
    }
    if any(len(counts) > 1 for counts in by_kind.values()):
        keys.reasons.append(f"{keys.prefix}.attention.head_count_kv={groups} differs within one kind of layer")
    # Layers without a projection of values take them from the keys.
    first_full = next((i for i, one in enumerate(slides) if not one), 0)
    config["attention_k_eq_v"] = not keys.has(f"blk.{first_full}.attn_v.weight")
    config["num_key_value_heads"] = min(by_kind[SLIDING] or by_kind[FULL])
    full_groups = min(by_kind[FULL] or by_kind[SLIDING])
    config["num_global_key_value_heads"] = full_groups if config["attention_k_eq_v"] else None
    if not config["attention_k_eq_v"] and full_groups != config["num_key_value_heads"]:
        keys.reasons.append(f"{keys.prefix}.attention.head_count_kv={groups}; full layers need as many as others")
    config["rope_parameters"] = _gemma4_rope(keys, config)
    if keys.file.metadata.get("gemma4.expert_count"):
        experts = _expert_config(keys, "num_experts")
        config |= {"enable_moe_block": True, "top_k_experts": experts.pop("num_experts_per_tok"), **experts}
    return config


def _gemma4_rope(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Full layers rotate the pairs whose factor is 1; the factors of the others are so large that they stand still."""
    factors = keys.factors
    dim = config["global_head_dim"]
    rotated = dim // 2 if factors is None else int((factors == 1).sum())
    if factors is not None and (
        len(factors) != dim // 2 or (factors[:rotated] != 1).any() or (factors[rotated:] < 1e20).any()
    ):
        keys.reasons.append(
            f"the tensor rope_freqs.weight {factors} is not 1 for the first pairs and vast for the rest"
        )
    keys.expect("rope.dimension_count", dim)
    keys.expect("rope.dimension_count_swa", config["head_dim"])
    return {
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * rotated / dim,
            "rope_theta": keys.take("rope.freq_base", 1e6),
        },
        SLIDING: {"rope_type": "default", "rope_theta": keys.take("rope.freq_base_swa", 10000.0)},
    }


def _gpt_oss_config(keys: Keys) -> dict[str, Any]:
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **model_config(keys)}
    keys.take("feed_forward_length", None)
    experts = _expert_config(keys, "num_local_experts")
    config |= {"hidden_act": "silu", "attention_bias": keys.has("blk.0.attn_q.bias")}
    config["intermediate_size"] = experts.pop("moe_intermediate_size")
    config.update(experts)
    config.update(head_config(keys, config["hidden_size"]))
    config.update(rope_config(keys, config["head_dim"]))
    if config["rope_scaling"] is not None:
        # Files do not say so; every release does.
        config["rope_scaling"]["truncate"] = False
    config["sliding_window"] = keys.need("attention.sliding_window")
    config["layer_types"] = [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]
    keys.expect("expert_gating_func", 3)
    return config


def _router_config(keys: Keys) -> dict[str, Any]:
    """DeepSeek's routing."""
    return {
        "n_group": keys.take("expert_group_count", 1),
        "topk_group": keys.take("expert_group_used_count", 1),
        "norm_topk_prob": bool(keys.take("expert_weights_norm", False)),
        "routed_scaling_factor": keys.take("expert_weights_scale", 1.0),
        "first_k_dense_replace": keys.take("leading_dense_block_count", 0),
        "n_shared_experts": keys.take("expert_shared_count", 0),
        "num_nextn_predict_layers": keys.drafts,
    }


def _latent_config(keys: Keys) -> dict[str, Any]:
    """Latent attention: metadata describes the absorbed form, with one KV head."""
    heads, latent = keys.need("attention.head_count"), keys.need("attention.kv_lora_rank")
    rope_dim = keys.need("rope.dimension_count")
    absorbed = keys.take("attention.key_length", None), keys.take("attention.value_length", None)
    # Older files describe the decompressed heads.
    head_dim = keys.take("attention.key_length_mla", absorbed[0])
    value_dim = keys.take("attention.value_length_mla", absorbed[1])
    if head_dim is None or value_dim is None:
        keys.reasons.append(f"{keys.prefix}.attention.key_length_mla and value_length_mla are missing")
        head_dim, value_dim = rope_dim + 1, 1
    keys.take_list("attention.head_count_kv")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": keys.take("attention.q_lora_rank", None),
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": value_dim,
    }


def _deepseek_config(keys: Keys, name: str, model_type: str) -> dict[str, Any]:
    config = {"architectures": [name], "model_type": model_type, "hidden_act": "silu", **model_config(keys)}
    config["intermediate_size"] = keys.need("feed_forward_length")
    config |= _latent_config(keys) | _expert_config(keys, "n_routed_experts") | _router_config(keys)
    rope = rope_config(keys, config["qk_rope_head_dim"])
    # Files store a tenth of `mscale_all_dim`, to which `mscale` is equal in every release.
    mscale = 10 * keys.take("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_scaling"] is not None and mscale:
        rope["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}
    return config | rope


def _deepseek2_config(keys: Keys) -> dict[str, Any]:
    sigmoid = keys.take("expert_gating_func", 1) == _SIGMOID
    config = _deepseek_config(
        keys,
        "DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM",
        "deepseek_v3" if sigmoid else "deepseek_v2",
    )
    if sigmoid:
        return config | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if keys.drafts:
        keys.reasons.append(f"{keys.prefix}.nextn_predict_layers={keys.drafts}; DeepSeek V2 has none")
    del config["num_nextn_predict_layers"]
    return config | {"scoring_func": "softmax", "topk_method": "group_limited_greedy"}


def _sparse_latent_config(keys: Keys, name: str, model_type: str) -> dict[str, Any]:
    keys.expect("expert_gating_func", _SIGMOID)
    return _deepseek_config(keys, name, model_type) | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "index_n_heads": keys.need("attention.indexer.head_count"),
        "index_head_dim": keys.need("attention.indexer.key_length"),
        "index_topk": keys.need("attention.indexer.top_k"),
    }


def _deepseek32_config(keys: Keys) -> dict[str, Any]:
    return _sparse_latent_config(keys, "DeepseekV32ForCausalLM", "deepseek_v32")


def _glm_dsa_config(keys: Keys) -> dict[str, Any]:
    config = _sparse_latent_config(keys, "GlmMoeDsaForCausalLM", "glm_moe_dsa")
    kinds = ["full" if keys.has(f"blk.{i}.indexer.proj.weight") else "shared" for i in range(keys.layers)]
    keys.expect_list("attention.indexer.types", [kind == "full" for kind in kinds])
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    return config | {
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "indexer_types": kinds,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"} | (scaling or {}),
    }


def _glm4_moe_config(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", _SIGMOID)
    config = _dense_config(keys, "Glm4MoeForCausalLM", "glm4_moe")
    config |= _expert_config(keys, "n_routed_experts") | _router_config(keys)
    config.update(rope_config(keys, config["head_dim"], partial=True))
    return config | {"use_qk_norm": keys.has("blk.0.attn_q_norm.weight")}


def _minimax_m2_config(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", _SIGMOID)
    keys.take("feed_forward_length", None)
    config = {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", **model_config(keys)}
    experts = _expert_config(keys, "num_local_experts")
    config |= {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "intermediate_size": experts.pop("moe_intermediate_size"),
    }
    config.update(experts)
    config.update(head_config(keys, config["hidden_size"]))
    rotated = keys.take("rope.dimension_count", config["head_dim"])
    config.update(rope_config(keys, config["head_dim"]))
    return config | {"rotary_dim": rotated}


def _kimi_linear_config(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", _SIGMOID)
    config = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **model_config(keys)}
    config["model_max_length"] = config.pop("max_position_embeddings")
    config |= {"hidden_act": "silu", "intermediate_size": keys.need("feed_forward_length")}
    config |= _latent_config(keys) | _expert_config(keys, "num_experts")
    config["num_experts_per_token"] = config.pop("num_experts_per_tok")
    router = _router_config(keys)
    dim, linear = keys.need("kda.head_dim"), [i for i in range(keys.layers) if keys.has(f"blk.{i}.ssm_a")]
    heads = next((t.shape[0] for t in keys.file.tensors.values() if t.name.endswith(".ssm_beta.weight")), 1)
    # The model has no rope.
    keys.take("rope.freq_base", None)
    return config | {
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        # Files do not say so; every release does.
        "moe_renormalize": True,
        "num_expert_group": router["n_group"],
        "topk_group": router["topk_group"],
        "first_k_dense_replace": router["first_k_dense_replace"],
        "num_shared_experts": router["n_shared_experts"],
        "routed_scaling_factor": router["routed_scaling_factor"],
        "num_nextn_predict_layers": keys.drafts,
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i in range(keys.layers) if i not in linear],
            "kda_layers": [i + 1 for i in linear],
            "head_dim": dim,
            "num_heads": heads,
            "short_conv_kernel_size": keys.need("ssm.conv_kernel"),
        },
    }


def _mimo2_config(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", _SIGMOID)
    config = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", **model_config(keys)}
    config["layernorm_epsilon"] = config.pop("rms_norm_eps")
    config |= {"hidden_act": "silu", "intermediate_size": keys.need("feed_forward_length")}
    config |= _expert_config(keys, "n_routed_experts") | _router_config(keys)
    del config["first_k_dense_replace"], config["num_nextn_predict_layers"]
    slides = [bool(flag) for flag in keys.take_list("attention.sliding_window_pattern") or [False] * keys.layers]
    groups = keys.take_list("attention.head_count_kv") or [1] * keys.layers
    by_kind = {flag: {g for g, one in zip(groups, slides, strict=True) if one == flag} for flag in (False, True)}
    if any(len(counts) > 1 for counts in by_kind.values()):
        keys.reasons.append(f"{keys.prefix}.attention.head_count_kv={groups} differs within one kind of layer")
    heads, dim = keys.need("attention.head_count"), keys.need("attention.key_length")
    value_dim = keys.take("attention.value_length", dim)
    full_groups, window_groups = (min(by_kind[flag] or by_kind[not flag]) for flag in (False, True))
    config.update(rope_config(keys, dim, partial=True))
    del config["rope_scaling"]
    shape = {"num_attention_heads": heads, "head_dim": dim, "v_head_dim": value_dim}
    config |= shape | {f"swa_{key}": value for key, value in shape.items()}
    layers = range(config["num_hidden_layers"])
    return config | {
        "num_key_value_heads": full_groups,
        "swa_num_key_value_heads": window_groups,
        "hybrid_layer_pattern": [int(one) for one in slides],
        "moe_layer_freq": [int(keys.has(f"blk.{i}.ffn_gate_inp.weight")) for i in layers],
        "sliding_window": keys.need("attention.sliding_window"),
        "swa_rope_theta": keys.take("rope.freq_base_swa", 10000.0),
        "attention_value_scale": keys.take("attention.value_scale", 1.0),
        "add_swa_attention_sink_bias": any(keys.has(f"blk.{i}.attn_sinks.weight") for i in layers if slides[i]),
        "add_full_attention_sink_bias": any(keys.has(f"blk.{i}.attn_sinks.weight") for i in layers if not slides[i]),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        # Files do not say so; every release does.
        "norm_topk_prob": True,
    }


_LATENT_BLOCK: Rules = {**_NORMS, **_SPARSE, **_LATENT}

ARCHITECTURES = {
    "deepseek2": GgufArchitecture(
        _deepseek2_config, GgufNames(_TOP, _LATENT_BLOCK, draft="model.layers.{i}.", draft_parts=_DRAFT_PARTS)
    ),
    "deepseek32": GgufArchitecture(
        _deepseek32_config,
        GgufNames(_TOP, {**_LATENT_BLOCK, **_INDEXER}, draft="model.layers.{i}.", draft_parts=_DRAFT_PARTS),
    ),
    "gemma3": GgufArchitecture(_gemma3_config, _gemma3_names()),
    "gemma4": GgufArchitecture(_gemma4_config, _gemma4_names()),
    "glm-dsa": GgufArchitecture(
        _glm_dsa_config,
        GgufNames(_TOP, {**_LATENT_BLOCK, **_INDEXER}, draft="model.layers.{i}.", draft_parts=_DRAFT_PARTS),
    ),
    "glm4moe": GgufArchitecture(
        _glm4_moe_config,
        GgufNames(
            _TOP,
            {
                **_ATTENTION,
                **_HEAD_NORMS,
                **_SPARSE,
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
            },
            draft="model.layers.{i}.",
            draft_parts=_DRAFT_PARTS,
        ),
    ),
    "gpt-oss": GgufArchitecture(_gpt_oss_config, _gpt_oss_names()),
    "kimi-linear": GgufArchitecture(_kimi_linear_config, _kimi_linear_names()),
    "llama": GgufArchitecture(_llama_config, _llama_names()),
    "mimo2": GgufArchitecture(
        _mimo2_config,
        GgufNames(
            _TOP,
            {
                **_NORMS,
                **_ATTENTION,
                **_SPARSE,
                "attn_sinks.weight": GgufRule("self_attn.attention_sink_bias"),
            },
            draft="model.mtp.layers.{j}.",
            draft_parts={
                "ffn_norm": "model.mtp.layers.{j}.pre_mlp_layernorm",
                "nextn.eh_proj": "model.mtp.layers.{j}.eh_proj",
                "nextn.enorm": "model.mtp.layers.{j}.enorm",
                "nextn.hnorm": "model.mtp.layers.{j}.hnorm",
                "nextn.shared_head_norm": "model.mtp.layers.{j}.final_layernorm",
                "layer_output_norm": "model.mtp.layers.{j}.final_layernorm",
            },
        ),
    ),
    "minimax-m2": GgufArchitecture(_minimax_m2_config, _minimax_m2_names()),
    "mistral3": GgufArchitecture(_mistral3_config, _llama_names()),
    "qwen3": GgufArchitecture(_qwen3_config, GgufNames(_TOP, {**_DENSE, **_HEAD_NORMS})),
    "qwen35": GgufArchitecture(_qwen3_5_config, _hybrid_names(tiled=True)),
    "qwen35moe": GgufArchitecture(_qwen3_5_moe_config, _hybrid_names(tiled=True)),
    "qwen3moe": GgufArchitecture(
        _qwen3_moe_config,
        GgufNames(_TOP, {**_NORMS, **_ATTENTION, **_HEAD_NORMS, **_ROUTER, **_experts("mlp.experts.")}),
    ),
    "qwen3next": GgufArchitecture(_qwen3_next_config, _hybrid_names(tiled=False)),
}

# Architectures that run from Hugging Face checkpoints, but not from GGUF files.
REFUSED = {
    "deepseek4": "its compressed attention is read from Hugging Face checkpoints alone",
}
