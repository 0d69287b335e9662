"""The eight models: a config.json in the released spelling of each, and how it differs from the release.

Sizes suit the kernels of sm_90 (head dims of 64 and more, MLA's released latent of 512 + 64) and keep every model under
two million parameters. All have a context of 131,072 positions, which training reaches only in part.
"""

from __future__ import annotations

from typing import Any

VOCAB, BOS, EOS, PAD = 320, 256, 257, 258

SLIDING, FULL = "sliding_attention", "full_attention"


def _shared(architecture: str, model_type: str, **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "hidden_size": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
    } | values


def _yarn(**values: Any) -> dict[str, Any]:
    return {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096} | values


LLAMA_WINDOW = _shared(
    "MiMoV2FlashForCausalLM",
    "mimo_v2_flash",
    num_hidden_layers=5,
    hybrid_layer_pattern=[0, 1, 1, 0, 1],
    moe_layer_freq=[0, 0, 0, 0, 1],
    # Transformers reads these two.
    layer_types=[FULL, SLIDING, SLIDING, FULL, SLIDING],
    mlp_layer_types=["dense", "dense", "dense", "dense", "sparse"],
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=96,
    v_head_dim=64,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    swa_head_dim=96,
    swa_v_head_dim=64,
    rms_norm_eps=1e-5,
    layernorm_epsilon=1e-5,
    attention_value_scale=0.707,
    add_swa_attention_sink_bias=True,
    add_full_attention_sink_bias=False,
    sliding_window=128,
    sliding_window_size=128,
    attention_chunk_size=128,
    rope_theta=5000000,
    swa_rope_theta=10000,
    partial_rotary_factor=0.334,
    moe_intermediate_size=64,
    n_routed_experts=8,
    n_shared_experts=None,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=None,
)

GPT_OSS = _shared(
    "GptOssForCausalLM",
    "gpt_oss",
    num_hidden_layers=4,
    layer_types=[SLIDING, FULL, SLIDING, FULL],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    attention_bias=True,
    rms_norm_eps=1e-5,
    intermediate_size=64,
    num_local_experts=8,
    num_experts_per_tok=4,
    experts_per_token=4,
    sliding_window=128,
    initial_context_length=4096,
    swiglu_limit=7.0,
    rope_theta=150000,
    rope_scaling=_yarn(rope_type="yarn", truncate=False),
)

QWEN3_NEXT = _shared(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    num_hidden_layers=4,
    full_attention_interval=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=256,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    rope_theta=10000000,
    rope_scaling=None,
    partial_rotary_factor=0.25,
)

QWEN3_MOE = _shared(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    num_hidden_layers=4,
    max_window_layers=4,
    use_sliding_window=False,
    sliding_window=None,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=256,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    moe_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    rope_theta=1000000.0,
    rope_scaling=None,
)

DEEPSEEK_V3 = _shared(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    num_hidden_layers=3,
    num_nextn_predict_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    intermediate_size=256,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope_theta=10000,
    rope_scaling=_yarn(type="yarn", mscale=1.0, mscale_all_dim=1.0),
)

DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_nextn_predict_layers": 0,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 256,
}

DEEPSEEK_V4 = _shared(
    "DeepseekV4ForCausalLM",
    "deepseek_v4",
    num_hidden_layers=5,
    compress_ratios=[0, 4, 128, 4, 0, 0],
    num_nextn_predict_layers=0,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=128,
    qk_rope_head_dim=64,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=64,
    sliding_window=128,
    compress_rope_theta=160000,
    index_n_heads=8,
    index_head_dim=128,
    index_topk=128,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    num_hash_layers=1,
    topk_method="noaux_tc",
    scoring_func="sqrtsoftplus",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=6,
    hc_eps=1e-6,
    rope_theta=10000,
    rope_scaling=_yarn(type="yarn", factor=16),
)

_GEMMA4_TEXT = {
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_size": 128,
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": 320,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": None,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": _GEMMA4_TEXT,
    "vision_config": None,
    "audio_config": None,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "boi_token_id": 320,
    "eoi_token_id": 321,
    "image_token_id": 322,
    "video_token_id": 323,
    "boa_token_id": 324,
    "eoa_token_index": 325,
    "audio_token_id": 326,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama_window": LLAMA_WINDOW,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "gemma4": GEMMA4,
    "qwen3_moe": QWEN3_MOE,
}

# Steps of each model. Those with states, indexers or compressed entries take longer: side by side on one H200, seven
# are done within nine minutes, and DeepSeek V4's within fourteen.
STEPS: dict[str, int] = {
    "llama_window": 3500,
    "gpt_oss": 3500,
    "qwen3_next": 2400,
    "deepseek_v3": 3500,
    "deepseek_v32": 3000,
    "deepseek_v4": 6000,
    "gemma4": 3500,
    "qwen3_moe": 3500,
}

# What a model card says beside the sizes, which differ in every model.
UNLIKE_THE_RELEASE: dict[str, str] = {
    "llama_window": "The layout is MiMo-V2-Flash's, the released one that is nearest to a Llama with a sliding window "
    "and sinks; only the last layer has experts, and there are no MTP layers.",
    "gpt_oss": "The vocabulary is of bytes. Experts are trained in bf16 and quantized to MXFP4 afterwards.",
    "qwen3_next": "Head dims are 64 (released: 128 for the delta rule, 256 for attention). There is one MTP layer.",
    "deepseek_v3": "The latent has its released size, 512 + 64; there are 4 heads of 32 + 64, and one MTP layer.",
    "deepseek_v32": "As deepseek_v3, without the MTP layer. The indexer has 8 heads (released: 64) and top-k 256 "
    "(2048).",
    "deepseek_v4": "Heads have 128 dims (released: 512), the indexer 8 heads and top-k 128 (64 and 512), "
    "and hyper-connections 6 rounds (20); there is no MTP layer.",
    "gemma4": "Head dims are 64 and 128 (released: 256 and 512); there are no per-layer embeddings and no experts.",
    "qwen3_moe": "8 experts, of which 2 are chosen (released: 128 and 8); head dim 64 (released: 128).",
}
