"""What GGUF files call the tensors of each known architecture. Those in a block are behind the name of its layer.

Names and meanings are those of llama.cpp's conversion (`conversion/`) and of its models (`src/models/`).
"""

from __future__ import annotations

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


def llama_names() -> GgufNames:
    block = {
        **_DENSE,
        "attn_q": GgufRule("self_attn.q_proj", rows=rows_of_halves("num_attention_heads")),
        "attn_k": GgufRule("self_attn.k_proj", rows=rows_of_halves("num_key_value_heads")),
    }
    return GgufNames(_TOP, block)


def gemma3_names() -> GgufNames:
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


def gemma4_names() -> GgufNames:
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


def hybrid_names(*, tiled: bool) -> GgufNames:
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


def kimi_linear_names() -> GgufNames:
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


def minimax_m2_names() -> GgufNames:
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


def gpt_oss_names() -> GgufNames:
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


_DRAFT_LAYER = "model.layers.{i}."


def latent_names(*, indexer: bool = False) -> GgufNames:
    """DeepSeek's, and those of GLM-5; `indexer`: with sparse attention."""
    block: Rules = {**_NORMS, **_SPARSE, **_LATENT, **(_INDEXER if indexer else {})}
    return GgufNames(_TOP, block, draft=_DRAFT_LAYER, draft_parts=_DRAFT_PARTS)


def glm4_moe_names() -> GgufNames:
    norms: Rules = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    block = {**_ATTENTION, **_HEAD_NORMS, **_SPARSE, **norms}
    return GgufNames(_TOP, block, draft=_DRAFT_LAYER, draft_parts=_DRAFT_PARTS)


def mimo2_names() -> GgufNames:
    sinks: Rules = {"attn_sinks.weight": GgufRule("self_attn.attention_sink_bias")}
    draft = "model.mtp.layers.{j}."
    parts: Rules = {
        "ffn_norm": f"{draft}pre_mlp_layernorm",
        "nextn.eh_proj": f"{draft}eh_proj",
        "nextn.enorm": f"{draft}enorm",
        "nextn.hnorm": f"{draft}hnorm",
        "nextn.shared_head_norm": f"{draft}final_layernorm",
        "layer_output_norm": f"{draft}final_layernorm",
    }
    return GgufNames(_TOP, {**_NORMS, **_ATTENTION, **_SPARSE, **sinks}, draft=draft, draft_parts=parts)


def qwen3_names() -> GgufNames:
    return GgufNames(_TOP, {**_DENSE, **_HEAD_NORMS})


def qwen3_moe_names() -> GgufNames:
    return GgufNames(_TOP, {**_NORMS, **_ATTENTION, **_HEAD_NORMS, **_ROUTER, **_experts("mlp.experts.")})
