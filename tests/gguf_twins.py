"""GGUF files of tiny Hugging Face checkpoints, written as llama.cpp converts them.

The tables here are the other direction of those that read the files, from the same source: llama.cpp's `conversion/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

Config = dict[str, Any]
Arrays = dict[str, np.ndarray]

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "DeepseekV32ForCausalLM": "deepseek32",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Glm4MoeForCausalLM": "glm4moe",
    "GlmMoeDsaForCausalLM": "glm-dsa",
    "GptOssForCausalLM": "gpt-oss",
    "KimiLinearForCausalLM": "kimi-linear",
    "LlamaForCausalLM": "llama",
    "MiMoV2FlashForCausalLM": "mimo2",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "MistralForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}

# Parts of Hugging Face names behind those of the layer, and what they are called in a GGUF file.
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.f_a_proj": "ssm_f_a",
    "self_attn.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.q_conv1d": "ssm_conv1d_q",
    "self_attn.k_conv1d": "ssm_conv1d_k",
    "self_attn.v_conv1d": "ssm_conv1d_v",
    "self_attn.o_norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.router": "ffn_gate_inp",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    **{f"{mlp}.gate.e_score_correction_bias": "exp_probs_b.bias" for mlp in ("mlp", "block_sparse_moe")},
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    **{f"{mlp}.gate": "ffn_gate_inp" for mlp in ("mlp", "block_sparse_moe")},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{
        f"{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("mlp.shared_experts", "mlp.shared_expert", "block_sparse_moe.shared_experts")
        for part in ("gate", "up", "down")
    },
}
_USUAL_NORMS = {"post_attention_layernorm": "ffn_norm"}
# Models that name the norm before the MLP after what is before it.
_LATE_NORMS = {"post_attention_layernorm": "post_attention_norm"}
_SANDWICH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = re.compile(r"(model\.layers\.\d+\.\w+)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def write_gguf_twin(directory: Path, path: Path, *, changes: Mapping[str, Any] | None = None, parts: int = 1) -> str:
    """Write the checkpoint in `directory` as a GGUF file, and return its path.

    `changes`: metadata that replaces what would be written; None leaves a key out. `parts`: files to split it into.
    """
    config = json.loads((directory / "config.json").read_text())
    name = config["architectures"][0]
    architecture = ARCHITECTURES[name]
    state = {key: value.float().numpy() for key, value in load_file(directory / "model.safetensors").items()}
    metadata = _metadata(architecture, config) | dict(changes or {})
    tensors = _tensors(architecture, config, state)
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=0 if parts == 1 else -(-len(tensors) // parts))
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if value is not None:
            adders.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    for key, value in tensors.items():
        writer.add_tensor(key, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf"))


def _metadata(architecture: str, config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", config.get("model_max_length")),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("layernorm_epsilon")),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "expert_count": _first(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": _first(config, "num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": {"sigmoid": 2, "softmax": 1}.get(
            str(_first(config, "scoring_func", "moe_router_activation_func"))
        ),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        **_rope(config),
    }
    return found | _OWN_METADATA.get(architecture, lambda config: {})(config)


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    scaling = config.get("rope_scaling") or {}
    found: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("yarn", "linear"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{key}": float(scaling[key]) for key in ("beta_fast", "beta_slow")}
    return found


def _of_llama(config: Config) -> dict[str, Any]:
    # llama.cpp's conversion leaves the window out.
    return {
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["head_dim"],
        "attention.sliding_window": config.get("sliding_window"),
    }


def _of_latent(config: Config) -> dict[str, Any]:
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    scaling = config.get("rope_scaling") or {}
    return {
        "vocab_size": config["vocab_size"],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"] if "mscale_all_dim" in scaling else None,
        "expert_shared_count": _first(config, "n_shared_experts", "num_shared_experts"),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "leading_dense_block_count": config["first_k_dense_replace"],
    }


def _of_sparse_latent(config: Config) -> dict[str, Any]:
    kinds = config.get("indexer_types")
    return _of_latent(config) | {
        "nextn_predict_layers": config.get("num_nextn_predict_layers", 0),
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.types": None if kinds is None else [kind == "full" for kind in kinds],
    }


def _of_kimi_linear(config: Config) -> dict[str, Any]:
    linear = config["linear_attn_config"]
    full = linear["full_attn_layers"]
    groups = [int(i + 1 in full) for i in range(config["num_hidden_layers"])]
    return _of_latent(config) | {
        "attention.head_count_kv": groups,
        "attention.value_length": config["head_dim"],
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "kda.head_dim": linear["head_dim"],
    }


def _of_glm4_moe(config: Config) -> dict[str, Any]:
    return {
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "nextn_predict_layers": config["num_nextn_predict_layers"],
    }


def _of_minimax_m2(config: Config) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"], "rope.dimension_count": config["rotary_dim"]}


def _of_mimo2(config: Config) -> dict[str, Any]:
    pattern = config["hybrid_layer_pattern"]
    groups = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    return {
        "attention.head_count_kv": [groups[windowed] for windowed in pattern],
        # It counts the query's own key.
        "attention.sliding_window": config["sliding_window_size"] + 1,
        "attention.sliding_window_pattern": pattern,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base_swa": float(config["swa_rope_theta"]),
    }


def _of_gpt_oss(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _of_gemma3(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "rope.freq_base_swa": config["rope_local_base_freq"],
    }


def _of_gemma4(config: Config) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    groups = config["num_global_key_value_heads"] or config["num_key_value_heads"], config["num_key_value_heads"]
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    width = config["intermediate_size"]
    wide = config["use_double_wide_mlp"]
    return {
        "feed_forward_length": [width * (1 + (wide and i >= first_shared)) for i in range(len(slides))],
        "attention.head_count_kv": [groups[one] for one in slides],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _of_hybrid(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config
    interval = config["full_attention_interval"]
    return {
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": interval,
        "attention.recurrent_layers": [bool((i + 1) % interval) for i in range(config["num_hidden_layers"])],
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0] if "mrope_section" in rope else None,
    }


_OWN_METADATA: dict[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek2": _of_latent,
    "deepseek32": _of_sparse_latent,
    "gemma3": _of_gemma3,
    "gemma4": _of_gemma4,
    "glm-dsa": _of_sparse_latent,
    "glm4moe": _of_glm4_moe,
    "gpt-oss": _of_gpt_oss,
    "kimi-linear": _of_kimi_linear,
    "llama": _of_llama,
    "mimo2": _of_mimo2,
    "minimax-m2": _of_minimax_m2,
    "qwen35": _of_hybrid,
    "qwen35moe": _of_hybrid,
    "qwen3next": _of_hybrid,
}


def _tensors(architecture: str, config: Config, state: Arrays) -> Arrays:
    found: Arrays = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    norms = _norms(architecture)
    for name, values in state.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            layer = _layer(name)[0]
            stacked = f"{layer}ffn_{_EXPERT_PARTS[expert[3]]}_exps.weight"
            experts.setdefault(stacked, {})[int(expert[2])] = values
            continue
        for stored, converted in _converted(architecture, config, norms, name, values):
            found[stored] = converted
    for stored, by_number in experts.items():
        found[stored] = np.stack([by_number[i] for i in range(len(by_number))])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_factors(config, scaling)
    if architecture == "gemma4":
        pairs = config["global_head_dim"] // 2
        rotated = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (pairs - rotated))
    return found


def _norms(architecture: str) -> dict[str, str]:
    if architecture in ("gemma3", "gemma4"):
        return _SANDWICH_NORMS
    late = ("glm4moe", "gpt-oss", "qwen3next", "qwen35", "qwen35moe")
    return _LATE_NORMS if architecture in late else _USUAL_NORMS


def _layer(name: str) -> tuple[str, str]:
    """`blk.N.`, and the part of a Hugging Face name behind its layer's."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    assert match is not None, name
    return f"blk.{match[1]}.", match[2]


def _converted(
    architecture: str, config: Config, norms: Mapping[str, str], name: str, values: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
        "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    }
    offset = architecture in ("gemma3", "qwen3next", "qwen35", "qwen35moe") and name.endswith("norm.weight")
    # The norm behind a gate has no offset.
    if offset and "linear_attn" not in name:
        values = values + np.float32(1)
    if name in top:
        return [(top[name], values)]
    layer, inner = _layer(name)
    special = _special(architecture, config, inner, values)
    if special is not None:
        return [(layer + stored, converted) for stored, converted in special]
    stem, _, kind = inner.rpartition(".")
    if stem in norms:
        return [(f"{layer}{norms[stem]}.{kind}", values)]
    if inner in _NAMES:
        return [(layer + _NAMES[inner], values)]
    return [(f"{layer}{_NAMES[stem]}.{kind}", values)]


def _special(architecture: str, config: Config, inner: str, values: np.ndarray) -> list[tuple[str, np.ndarray]] | None:
    """Tensors that are not only renamed."""
    if architecture == "llama" and (of := re.fullmatch(r"self_attn\.([qk])_proj\.(\w+)", inner)):
        heads = config["num_attention_heads" if of[1] == "q" else "num_key_value_heads"]
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return [(f"attn_{of[1]}.{of[2]}", halves.swapaxes(1, 2).reshape(values.shape))]
    if inner.endswith("kv_b_proj.weight"):
        both = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
        keys = config["qk_nope_head_dim"]
        return [("attn_k_b.weight", both[:, :keys].swapaxes(1, 2)), ("attn_v_b.weight", both[:, keys:])]
    if inner.endswith(".A_log"):
        values = -np.exp(values)
    if inner.startswith("mlp.experts."):
        return _stacked_experts(architecture, inner, values)
    if architecture == "kimi-linear" and inner.endswith("A_log"):
        return [("ssm_a", values.reshape(1, 1, -1, 1))]
    if architecture == "kimi-linear" and "conv1d" in inner:
        return [(_NAMES[inner.removesuffix(".weight")] + ".weight", values.reshape(1, values.shape[0], 1, -1))]
    if inner.startswith("linear_attn."):
        return _linear(architecture, config, inner, values)
    if inner == "mlp.shared_expert_gate.weight":
        return [("ffn_gate_inp_shexp.weight", values.reshape(1, -1))]
    return None


def _stacked_experts(architecture: str, inner: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Experts that the checkpoint has in one tensor: gpt-oss's [E, in, out] with gate and up in turns, else halves."""
    kind = "bias" if inner.endswith("_bias") else "weight"
    if architecture == "gpt-oss" and kind == "weight":
        values = values.swapaxes(1, 2)
    if "down_proj" in inner:
        return [(f"ffn_down_exps.{kind}", values)]
    turns = architecture == "gpt-oss"
    gate, up = (values[:, ::2], values[:, 1::2]) if turns else np.split(values, 2, axis=1)
    return [(f"ffn_gate_exps.{kind}", gate), (f"ffn_up_exps.{kind}", up)]


def _linear(architecture: str, config: Config, inner: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if inner == "linear_attn.in_proj_qkvz.weight":
        wide = heads // groups * value_dim
        by_group = values.reshape(groups, -1, values.shape[-1])
        cut = np.split(by_group, [key_dim, 2 * key_dim, 2 * key_dim + wide], axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in cut)
        return [("attn_qkv.weight", np.concatenate([q, k, v])), ("attn_gate.weight", z)]
    if "conv1d" in inner:
        values = values.squeeze(1)
    if architecture != "qwen3next":
        keys = 2 * groups * key_dim
        if "in_proj_qkv" in inner or "conv1d" in inner:
            values = np.concatenate([values[:keys], _by_number(values[keys:], groups, heads)])
        elif "out_proj" in inner:
            values = _by_number(values.T, groups, heads).T
        elif ".norm." not in inner:
            values = _by_number(values, groups, heads)
    stem, _, kind = inner.rpartition(".")
    return [(_NAMES[inner] if inner in _NAMES else f"{_NAMES[stem]}.{kind}", values)]


def _by_number(values: np.ndarray, groups: int, heads: int) -> np.ndarray:
    """Heads in the order of their groups to that of their numbers in a group."""
    split = values.reshape(groups, heads // groups, -1, *values.shape[1:])
    return split.swapaxes(0, 1).reshape(values.shape)


def _llama3_factors(config: Config, scaling: Config) -> np.ndarray:
    factors = []
    for i in range(0, config["head_dim"], 2):
        turns = scaling["original_max_position_embeddings"] / (
            2 * np.pi * config["rope_theta"] ** (i / config["head_dim"])
        )
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (turns - low) / (high - low)
        factors.append(
            1.0
            if turns > high
            else scaling["factor"]
            if turns < low
            else 1 / ((1 - smooth) / scaling["factor"] + smooth)
        )
    return np.array(factors)
