"""Everything of SGLang that the plugin imports, subclasses or calls: the only list of host symbols, and their probes.

Owns which host versions are known. A symbol that another file of this folder uses is in this table.
"""

from __future__ import annotations

from allotrope.plugins.contract import Contract, Limit, Symbol

HOST = "sglang"
DISTRIBUTIONS = ("sglang",)
# Releases differ in what they ask of a plugin, the last number included. 0.5.18 to 0.5.20 fail on hybrids of other
# packages: their ModelConfig has no full_attention_layer_ids.
KNOWN = ("0.5.16", "0.5.17", "0.5.21", "0.5.22", "0.5.23")

_ASKED = (
    *("model_path", "revision", "load_format", "json_model_override_args", "random_seed", "page_size"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "disable_radix_cache"),
    *("disable_overlap_schedule", "mamba_radix_cache_strategy", "uses_mamba_radix_cache"),
    *("kv_cache_dtype", "mamba_ssm_dtype", "quantization", "enable_lora", "lora_paths", "is_embedding"),
    *("pp_size", "ep_size", "attn_cp_size", "dcp_size", "enable_dp_attention", "enable_two_batch_overlap"),
    *("cpu_offload_gb", "disaggregation_mode", "speculative_algorithm", "enable_unified_memory"),
    *("enable_hierarchical_cache", "enable_lmcache", "disable_cuda_graph", "disable_prefill_cuda_graph"),
    *("enable_memory_saver", "enable_weights_cpu_backup", "model_impl", "enable_deterministic_inference"),
    "download_dir",
)
_BATCH = (
    *("forward_mode", "batch_size", "seq_lens", "seq_lens_cpu", "extend_seq_lens_cpu"),
    *("out_cache_loc", "req_pool_indices"),
)
_POOLS = "sglang.srt.mem_cache.memory_pool"
# Read, never imported: what SGLang hands over.
READ = (
    Symbol("sglang.srt.server_args:ServerArgs", accepts=_ASKED),
    Symbol("sglang.srt.distributed.parallel_state:GroupCoordinator", has=("all_reduce",)),
    Symbol(f"{_POOLS}:MHATokenToKVPool", accepts=("page_size",), has=("get_key_buffer", "get_value_buffer")),
    Symbol(f"{_POOLS}:HybridLinearKVPool", accepts=("page_size",), has=("get_key_buffer", "get_value_buffer")),
    Symbol(f"{_POOLS}:HybridReqToTokenPool", has=("get_mamba_indices",)),
)
SYMBOLS = (
    *READ,
    Symbol("sglang.srt.arg_groups.overrides:register_model_override", accepts=("architecture",)),
    Symbol(
        "sglang.srt.configs.linear_attn_model_registry:LinearAttnModelSpec",
        accepts=(
            *("config_class", "backend_class_name", "arch_names"),
            *("uses_mamba_radix_cache", "support_mamba_cache"),
        ),
    ),
    Symbol("sglang.srt.configs.linear_attn_model_registry:get_linear_attn_spec_by_arch"),
    Symbol("sglang.srt.configs.linear_attn_model_registry:register_linear_attn_model", accepts=("spec",)),
    Symbol("sglang.srt.configs.mamba_utils:Mamba2CacheParams", accepts=("shape", "layers", "dtype")),
    Symbol("sglang.srt.configs.mamba_utils:Mamba2StateDType", accepts=("conv", "temporal")),
    Symbol(
        "sglang.srt.configs.mamba_utils:Mamba2StateShape",
        accepts=(
            *("conv", "temporal", "intermediate_size", "conv_dim", "ssm_state_size"),
            *("num_heads", "head_dim", "state_size", "conv_kernel"),
        ),
    ),
    Symbol("sglang.srt.configs.model_config_parser_registry:register_model_config_parser", accepts=("name",)),
    Symbol("sglang.srt.distributed.parallel_state:get_tp_group"),
    Symbol("sglang.srt.layers.attention.attention_registry:register_attention_backend", accepts=("name",)),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        has=(
            *("init_forward_metadata", "init_forward_metadata_out_graph"),
            *("get_cuda_graph_seq_len_fill_value", "init_cuda_graph_state"),
        ),
    ),
    Symbol("sglang.srt.layers.logits_processor:LogitsProcessor", accepts=("config", "skip_all_gather")),
    Symbol("sglang.srt.layers.logits_processor:LogitsProcessorOutput"),
    Symbol("sglang.srt.model_executor.forward_batch_info:ForwardBatch", accepts=_BATCH),
    Symbol("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"),
    Symbol("sglang.srt.platforms.cpu:CpuDeviceMixin"),
    Symbol("sglang.srt.platforms.device_mixin:PlatformEnum", has=("OOT",)),
    Symbol("sglang.srt.platforms.interface:SRTPlatform", has=("apply_server_args_defaults", "get_dispatch_key_name")),
    Symbol("sglang.srt.runtime_context:get_server_args"),
    Symbol("sglang.srt.server_args:add_attention_backend_choices"),
    Symbol("sglang.srt.utils.hf_transformers.config:HfModelConfigParser", has=("parse",)),
)
# Not probed: it imports all of SGLang's models. The plugin calls it where the user names another package of models.
UNPROBED = (Symbol("sglang.srt.models.registry:ModelRegistry", has=("register",)),)
# Of `sglang serve --model-type allotrope` alone.
OPTIONAL = (
    Symbol("sglang.cli.serve_backends:SERVE_BACKEND_API_VERSION"),
    Symbol("sglang.cli.serve_backends:ServeBackend", accepts=("api_version", "run")),
    Symbol("sglang.cli.serve_backends:ServeRequest", accepts=("argv", "model_path", "model_path_is_positional")),
)
LIMITS = (
    Limit("speculative decoding is refused"),
    Limit("LoRA, embeddings of texts, pipeline, context and expert parallelism are refused"),
    Limit("layers with windows keep the entries of all tokens"),
    Limit("with the radix cache, pages have one token and steps do not overlap", frozenset({"state"})),
    Limit("prefixes are shared up to the end of a prompt or of a chunk of one", frozenset({"state"})),
    Limit("pages and chunks of prompts are multiples of 128 tokens", frozenset({"compressed"})),
)
CONTRACT = Contract("SGLang", DISTRIBUTIONS, KNOWN, SYMBOLS, LIMITS, OPTIONAL)
installed, probe, refusals = CONTRACT.installed, CONTRACT.probe, CONTRACT.refusals
