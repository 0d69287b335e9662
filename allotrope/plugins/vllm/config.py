"""vLLM's config as ours: the checkpoint that it names, what a model is built with, and what our models refuse.

Must not know how a model computes. SGLang's twin is `allotrope.plugins.sglang.config`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from allotrope.architectures.registry import ARCHITECTURES, Architecture, read_spec
from allotrope.attention.cache_layout import CacheLayout
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.checkpoint.weight_formats import quantization_of, weight_formats
from allotrope.errors import ConfigError, ModelError
from allotrope.layers.build import Build
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.parallel import Parallel
from allotrope.loading.kv_scales import FP8, attention_specs
from allotrope.plugins.hosted_build import DTYPES, hosted_build
from allotrope.plugins.vllm import log
from allotrope.plugins.vllm.speculation import speculation_reasons
from allotrope.plugins.weights import FOREIGN_FORMATS, foreign_weights, hub_revision

_KV_DTYPES = {**DTYPES, **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_ds_mla"), FP8)}
# Endings of architectures that vLLM makes of the model that answers.
_CONVERTED = (
    *("ForSequenceClassification", "ForTokenClassification", "ClassificationModel", "ForTextEncoding"),
    *("ForRewardModeling", "EmbeddingModel", "RewardModel", "Model"),
)


def open_config(vllm_config: VllmConfig, weights: bool = False) -> tuple[Checkpoint, Architecture, ModelSpec]:
    """The checkpoint's config.json as it stands, read by our rules; `weights`: with the headers of its tensors.

    Raises ModelError or ConfigError.
    """
    config = vllm_config.model_config
    overrides = {} if _is_draft(vllm_config) else config.hf_overrides or {}
    if not isinstance(overrides, dict):
        raise ConfigError(
            "hf_overrides is a function; Allotrope's models need an object. ALLOTROPE_VLLM=0 turns them off."
        )
    checkpoint = open_checkpoint(
        config.model,
        revision=hub_revision(config.model, config.revision),
        load_format="auto" if weights else "dummy",
        hf_overrides=json.dumps(overrides) if overrides else None,
        cache=vllm_config.load_config.download_dir,
    )
    names = checkpoint.config.get("architectures")
    if names:
        checkpoint.config = checkpoint.config | {"architectures": [_converted(names[0]), *names[1:]]}
    return checkpoint, *read_spec(checkpoint.config, checkpoint.source)


def _converted(name: str) -> str:
    """The architecture whose class vLLM takes, and converts, for one that it does not know by name."""
    if name in ARCHITECTURES:
        return name
    for suffix in _CONVERTED:
        for own in ("ForCausalLM", "ForConditionalGeneration"):
            if name.endswith(suffix) and name.removesuffix(suffix) + own in ARCHITECTURES:
                return name.removesuffix(suffix) + own
    return name


def _is_draft(vllm_config: VllmConfig) -> bool:
    """Whether the model drafts for another one: vLLM then sets a function of its own as `hf_overrides`."""
    speculative = vllm_config.speculative_config
    return (
        speculative is not None
        and speculative.method == "draft_model"
        and vllm_config.model_config is speculative.draft_model_config
    )


def refuse_unsupported(vllm_config: VllmConfig, checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raise ModelError, with every reason, for options of vLLM that our models do not support."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    config, offload = vllm_config.model_config, vllm_config.offload_config
    stated = quantization_of(checkpoint.config)
    asked = {
        "LoRA": vllm_config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        # vLLM keeps it only for mixtures of experts, whose experts its own models shard over these ranks.
        "data parallelism of experts": parallel.data_parallel_size > 1,
        "expert parallelism": parallel.enable_expert_parallel,
        "quantizing a plain checkpoint": config.quantization is not None and not stated,
        "dual batch overlap": parallel.enable_dbo or getattr(parallel, "ubatch_size", 0) > 1,
        "transfer of caches (kv_transfer_config)": vllm_config.kv_transfer_config is not None,
        "prompts of embeddings": config.enable_prompt_embeds,
        "offloading weights": offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
        "a config of another place (hf_config_path)": config.hf_config_path not in (None, config.model),
        "another type of cache for some layers": bool(cache.kv_cache_dtype_skip_layers),
        "a type for a convolution's cached inputs (mamba_cache_dtype)": cache.mamba_cache_dtype != "auto",
        "classes of texts (convert=classify)": getattr(config, "convert_type", "none") == "classify",
        "updates of weights (weight_transfer_config)": getattr(vllm_config, "weight_transfer_config", None) is not None,
        "returning the experts of tokens (enable_return_routed_experts)": _returns_experts(vllm_config),
        "rounding states at random (enable_mamba_cache_stochastic_rounding)": _rounds_at_random(vllm_config),
        # Newer releases lack this option.
        "measuring scales of FP8 rows": getattr(cache, "calculate_kv_scales", False),
    }
    reasons = [f"{what} is not supported by Allotrope's models" for what, wanted in asked.items() if wanted]
    if vllm_config.load_config.load_format in FOREIGN_FORMATS:
        reasons.append(foreign_weights(vllm_config.load_config.load_format))
    if vllm_config.speculative_config is not None:
        layouts = planned_layouts(vllm_config, checkpoint, spec)
        reasons += speculation_reasons(vllm_config.speculative_config, config.model, layouts)
    # Raises for an unknown quantization.
    weight_formats(checkpoint.config, config.model)
    if reasons:
        raise ModelError(config.model, [*reasons, "ALLOTROPE_VLLM=0 gives vLLM's own models"])


def _returns_experts(vllm_config: VllmConfig) -> bool:
    """vLLM 0.32 has the option in `aux_output_config`, earlier versions in `model_config`."""
    places = (vllm_config.model_config, getattr(vllm_config, "aux_output_config", None))
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def _rounds_at_random(vllm_config: VllmConfig) -> bool:
    """Some versions have the option in `mamba_config`, others in `cache_config`."""
    mamba = getattr(vllm_config, "mamba_config", None)
    return any(
        getattr(place, name, False)
        for place, name in (
            (mamba, "enable_stochastic_rounding"),
            (vllm_config.cache_config, "enable_mamba_cache_stochastic_rounding"),
        )
    )


def warn_unused_backend(vllm_config: VllmConfig) -> None:
    """Warn, and do not refuse: vLLM sets an attention backend for some architectures by itself, so the config does not
    say whether the user asked for it."""
    backend = vllm_config.attention_config.backend
    if backend is not None:
        log.warning(
            "vLLM's attention backend %s is not used: Allotrope's layers have their own"
            " (additional_config: allotrope.attention_backend)",
            backend.name,
        )


def log_state_dtype(vllm_config: VllmConfig, keeps_states: bool) -> None:
    """Log that recurrent states are float32: vLLM's CPU platform sets this type on some processors, so the config does
    not say whether the user asked for it."""
    if vllm_config.device_config.device_type == "cpu" and vllm_config.cache_config.mamba_ssm_cache_dtype == "float32":
        log.info(
            "allotrope: %s: mamba_ssm_cache_dtype is float32, by request or because vLLM's CPU platform resets it"
            " on processors with AVX-512 BF16",
            "recurrent states are float32" if keeps_states else "the model keeps no recurrent states",
        )


def make_build(vllm_config: VllmConfig, options: dict[str, Any]) -> Build:
    """What a model's layers are built with. `options`: of `read_options`. Raises ConfigError for a type of caches that
    our models do not have."""
    cache, dtype = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    if cache != "auto" and cache not in _KV_DTYPES:
        allowed = ", ".join(["auto", *_KV_DTYPES])
        raise ConfigError(f"kv_cache_dtype={cache!r} is not supported by Allotrope's models (allowed: {allowed}).")
    device = torch.device(vllm_config.device_config.device_type)
    types = (dtype, _KV_DTYPES.get(cache, dtype), state_dtype(vllm_config))
    # vLLM's name of the block-scaled FP8 KV cache.
    row_format = "scaled" if cache == "fp8_ds_mla" else "plain"
    return hosted_build("vLLM", get_tp_group(), options, device, types, row_format)


def state_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """Type of recurrent states: fp32 unless the user names one. vLLM's own models default to that of activations."""
    return DTYPES.get(vllm_config.cache_config.mamba_ssm_cache_dtype, torch.float32)


def planned_layouts(vllm_config: VllmConfig, checkpoint: Checkpoint, spec: ModelSpec) -> list[CacheLayout]:
    """Cache layouts of a model that is not yet built, with entries of the model's type."""
    dtype, size = vllm_config.model_config.dtype, vllm_config.parallel_config.tensor_parallel_size
    build = Build(dtype, dtype, torch.device("meta"), Parallel(0, size), state_dtype=state_dtype(vllm_config))
    specs = attention_specs(spec, build, checkpoint.source)
    return [layout for one in specs for layout in one.caches().values()]
