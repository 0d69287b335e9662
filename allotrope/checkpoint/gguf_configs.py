"""A config.json from the metadata of a GGUF file, for each known architecture, without the dtype.

Keys and meanings are those of llama.cpp's conversion (`conversion/`) and of its models (`src/models/`).
"""

from __future__ import annotations

from typing import Any

from allotrope.checkpoint.gguf_keys import Keys, head_config, model_config, rope_config

_SIGMOID = 2
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def _dense_config(keys: Keys, name: str, model_type: str) -> dict[str, Any]:
    """A dense decoder with Llama's names."""
    config = {"architectures": [name], "model_type": model_type, "hidden_act": "silu", **model_config(keys)}
    config["intermediate_size"] = keys.need("feed_forward_length")
    config["attention_bias"] = keys.has("blk.0.attn_q.bias")
    config.update(head_config(keys, config["hidden_size"]))
    return config


def llama_config(keys: Keys) -> dict[str, Any]:
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


def mistral3_config(keys: Keys) -> dict[str, Any]:
    config = llama_config(keys)
    scale = keys.take("attention.temperature_scale", None)
    if scale:
        keys.reasons.append(
            f"{keys.prefix}.attention.temperature_scale={scale}: queries that are scaled by their position are not "
            f"supported"
        )
    keys.take("rope.scaling.yarn_log_multiplier", None)
    return config


def qwen3_config(keys: Keys) -> dict[str, Any]:
    config = _dense_config(keys, "Qwen3ForCausalLM", "qwen3")
    config.update(rope_config(keys, config["head_dim"]))
    window = keys.take("attention.sliding_window", 0)
    if window:
        keys.reasons.append(f"{keys.prefix}.attention.sliding_window={window}; only llama files may have one")
    if keys.take("expert_count", 0):
        keys.reasons.append(f"{keys.prefix}.expert_count is not 0: a mixture of experts is a qwen3moe file")
    return config


def qwen3_moe_config(keys: Keys) -> dict[str, Any]:
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


def qwen3_next_config(keys: Keys) -> dict[str, Any]:
    config = _hybrid_config(keys, "Qwen3NextForCausalLM", "qwen3_next", sparse=True)
    return config | {
        "intermediate_size": config["moe_intermediate_size"],
        "norm_topk_prob": True,
        "num_nextn_predict_layers": keys.drafts,
    }


def qwen3_5_config(keys: Keys) -> dict[str, Any]:
    config = _hybrid_config(keys, "Qwen3_5ForCausalLM", "qwen3_5_text", sparse=False)
    return config | {"mtp_num_hidden_layers": keys.drafts}


def qwen3_5_moe_config(keys: Keys) -> dict[str, Any]:
    config = _hybrid_config(keys, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", sparse=True)
    return config | {"mtp_num_hidden_layers": keys.drafts}


def gemma3_config(keys: Keys) -> dict[str, Any]:
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


def gemma4_config(keys: Keys) -> dict[str, Any]:
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


def gpt_oss_config(keys: Keys) -> dict[str, Any]:
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


def deepseek2_config(keys: Keys) -> dict[str, Any]:
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


def deepseek32_config(keys: Keys) -> dict[str, Any]:
    return _sparse_latent_config(keys, "DeepseekV32ForCausalLM", "deepseek_v32")


def glm_dsa_config(keys: Keys) -> dict[str, Any]:
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


def glm4_moe_config(keys: Keys) -> dict[str, Any]:
    keys.expect("expert_gating_func", _SIGMOID)
    config = _dense_config(keys, "Glm4MoeForCausalLM", "glm4_moe")
    config |= _expert_config(keys, "n_routed_experts") | _router_config(keys)
    config.update(rope_config(keys, config["head_dim"], partial=True))
    return config | {"use_qk_norm": keys.has("blk.0.attn_q_norm.weight")}


def minimax_m2_config(keys: Keys) -> dict[str, Any]:
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


def kimi_linear_config(keys: Keys) -> dict[str, Any]:
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


def mimo2_config(keys: Keys) -> dict[str, Any]:
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
