"""A checkpoint of ours as SGLang's config: what its scheduler, memory and server ask of a model before it is built.

SGLang sees one kind of attention whatever the families are. How many elements a token and a state take is known when
the model is built, which declares it here, and SGLang asks afterwards.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.utils.hf_transformers.config import HfModelConfigParser
from transformers import PretrainedConfig

from allotrope.architectures.registry import ARCHITECTURES, read_spec
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.errors import ConfigError, ModelError
from allotrope.loading.kv_scales import FP8
from allotrope.plugins.hosted_build import read_options
from allotrope.plugins.sglang import NAME, PLAIN, STATEFUL
from allotrope.plugins.sglang.memory import HEAD_DIM, CacheMemory, planned_layouts
from allotrope.plugins.weights import FOREIGN_FORMATS, foreign_weights, hub_revision

log = logging.getLogger("sglang.allotrope")
# What SGLang reads of a checkpoint's config beside the shape of its caches.
_KEPT = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
# What SGLang counts its pools by, which is not what the checkpoint says.
_OF_POOLS = ("num_hidden_layers", "num_attention_heads", "head_dim")
KV_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8_e4m3": FP8}
# Options of SGLang that change what its own layers, pools and loaders do, and that ours would not see. Some versions
# lack some of them; where they are not wanted they are empty, 0 or negative.
_UNSEEN = {
    "offload_group_size": "offloading weights",
    "kt_weight_path": "experts on the CPU",
    "enable_paged_experts": "experts on the CPU",
    "enable_eplb": "balancing experts",
    "ep_num_redundant_experts": "expert parallelism",
    "expert_distribution_recorder_mode": "counting the tokens of experts",
    "enable_return_routed_experts": "returning the experts of tokens",
    "enable_return_indexer_topk": "returning the tokens that an indexer selects",
    "enable_return_aux_hidden_states": "returning hidden states between layers",
    "torchao_config": "quantization",
    "modelopt_quant": "quantization",
    "quantization_param_path": "scales of FP8 entries from a file of their own",
    "enable_int8_mamba_checkpoint": "int8 copies of states",
    "enable_linear_replayssm": "replaying states",
    "enable_mamba_cache_stochastic_rounding": "rounding states at random",
    "enable_flexkv": "caches on other devices",
    "enable_unified_cache_external_linker": "caches on other devices",
    "enable_hisparse": "caches on other devices",
    "enable_pdmux": "two batches at once",
    "enable_single_batch_overlap": "two parts of a batch at once",
    "dllm_algorithm": "decoding by diffusion",
}
# On a GPU, kernels look a page up once for all keys that they read together.
PAGE_SIZE = 64


class HostedConfig(PretrainedConfig):
    """A model whose caches hold entries of tokens alone."""

    row_stride = 1
    num_hidden_layers = 1
    # Whether it is as our rules made it; what SGLang sets from then on are overrides.
    made = False

    def __setattr__(self, key: str, value: Any) -> None:
        """SGLang sets the overrides of the checkpoint's config here too, one by one. Those of a text model inside are
        SGLang's as well; layers and heads are those of SGLang's pools, whatever the model has."""
        if self.made and key == "text_config" and isinstance(value, dict):
            for inner, one in value.items():
                setattr(self, inner, one)
        elif not (self.made and key in _OF_POOLS):
            super().__setattr__(key, value)

    def declare(self, memory: CacheMemory, kv_dtype: torch.dtype, ranks: int) -> None:
        """Say what the model of one rank keeps of each token, in elements of SGLang's type, and of each sequence."""
        # SGLang shares heads out among its ranks.
        self.num_key_value_heads = memory.heads(kv_dtype.itemsize) * ranks
        self.state_bytes = memory.state_bytes


class HostedHybridConfig(HostedConfig):
    """A model that keeps states of sequences. To SGLang, layer 0 has all entries of tokens and layer 1 all states."""

    num_hidden_layers = 2
    full_attention_layer_ids = (0,)
    linear_layer_ids = (1,)

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """One state of so many elements; the convolution's, which SGLang keeps apart, is ours to hold."""
        elements = max(self.state_bytes // torch.float32.itemsize, 1)
        shape = Mamba2StateShape(
            conv=[(1, 1)],
            temporal=(1, 1, elements),
            intermediate_size=1,
            conv_dim=1,
            ssm_state_size=elements,
            num_heads=1,
            head_dim=1,
            state_size=elements,
            conv_kernel=2,
        )
        dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
        return Mamba2CacheParams(shape=shape, layers=list(self.linear_layer_ids), dtype=dtype)


class ConfigParser(HfModelConfigParser):
    """SGLang's reader of configs, but for architectures of ours."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, **kwargs: Any
    ) -> PretrainedConfig:
        """The config of the checkpoint at `model`. Raises ModelError for one of ours that our rules do not read."""
        if "gguf_file" not in kwargs:
            config, _ = PretrainedConfig.get_config_dict(model, revision=revision, **kwargs)
            if (config.get("architectures") or [""])[0] in ARCHITECTURES:
                return hosted_config(str(model), revision)
        return super().parse(model, trust_remote_code=trust_remote_code, revision=revision, **kwargs)


def hosted_config(source: str, revision: str | None) -> HostedConfig:
    """What SGLang shall know of a checkpoint."""
    checkpoint = open_checkpoint(source, revision=hub_revision(source, revision), load_format="dummy")
    _, spec = read_spec(checkpoint.config, checkpoint.source)
    memory = CacheMemory(planned_layouts(spec, checkpoint.source))
    text = checkpoint.config | checkpoint.config.get("text_config", {})
    kind, name = (HostedHybridConfig, STATEFUL) if memory.state_bytes else (HostedConfig, PLAIN)
    found = kind(
        **{key: text[key] for key in _KEPT if text.get(key) is not None},
        architectures=[name],
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        max_position_embeddings=spec.context,
        num_attention_heads=text.get("num_attention_heads", 1),
        num_hidden_layers=kind.num_hidden_layers,
        head_dim=HEAD_DIM,
        row_stride=memory.row_stride,
    )
    found.declare(memory, torch.float32, 1)
    found.made = True
    return found


def _refuse(args: Any) -> None:
    """Raise ModelError for everything that SGLang is asked for and that our models do not do."""
    asked = {
        "LoRA": args.enable_lora or args.lora_paths,
        "pipeline parallelism": args.pp_size > 1,
        # Earlier versions have the switch alone.
        "data parallelism of attention": args.enable_dp_attention or getattr(args, "attn_dp_size", 1) > 1,
        "expert parallelism": args.ep_size > 1,
        "context parallelism": args.attn_cp_size > 1 or args.dcp_size > 1,
        "quantization": args.quantization,
        "offloading weights": args.cpu_offload_gb > 0,
        "transfer of caches (disaggregation_mode)": args.disaggregation_mode != "null",
        "speculative decoding": args.speculative_algorithm,
        "caches on other devices (enable_hierarchical_cache)": args.enable_hierarchical_cache,
        "caches on other devices (enable_lmcache)": args.enable_lmcache,
        "one memory for all caches (enable_unified_memory)": args.enable_unified_memory,
        "embeddings of texts": args.is_embedding,
        "two batches at once (enable_two_batch_overlap)": args.enable_two_batch_overlap,
        # They would have to be loaded again.
        "releasing weights without a copy (enable_memory_saver without enable_weights_cpu_backup)": (
            args.enable_memory_saver and not args.enable_weights_cpu_backup
        ),
        f"model_impl={args.model_impl}": args.model_impl not in ("auto", "sglang"),
        "deterministic inference (enable_deterministic_inference)": args.enable_deterministic_inference,
        f"kv_cache_dtype={args.kv_cache_dtype}": args.kv_cache_dtype not in ("auto", *KV_DTYPES),
    } | {f"{what} ({option})": _is_wanted(getattr(args, option, None)) for option, what in _UNSEEN.items()}
    reasons = [f"{what} is not supported by Allotrope's models" for what, wanted in asked.items() if wanted]
    if args.load_format in FOREIGN_FORMATS:
        reasons.append(foreign_weights(args.load_format))
    if reasons:
        raise ModelError(args.model_path, [*reasons, "ALLOTROPE_SGLANG=0 gives SGLang's own models"])


def _is_wanted(value: Any) -> bool:
    return value > 0 if isinstance(value, int) else bool(value)


def read_overrides(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What overrides the checkpoint's config, and our options among it. Raises ConfigError for one that is not ours."""
    overrides = json.loads(args.json_model_override_args)
    return overrides, read_options(overrides.pop("allotrope", {}), "json_model_override_args")


def declare_arguments(server_args: Any, hf_config: HostedConfig) -> dict[str, Any]:
    """SGLang's arguments for a model of ours. Raises ModelError for what our models do not do, ConfigError for options
    of ours that there are not, and for pages that hold no whole entries."""
    _refuse(server_args)
    read_overrides(server_args)
    asked, page_size, stride = server_args.attention_backend, server_args.page_size, hf_config.row_stride
    if asked not in (None, NAME):
        log.info("allotrope: attention_backend=%s is not used: Allotrope's models bring their own", asked)
    shares_states = isinstance(hf_config, HostedHybridConfig) and not server_args.disable_radix_cache
    if page_size is None:
        # SGLang keeps states of prefixes with pages of one token alone.
        page_size = 1 if shares_states else math.lcm(PAGE_SIZE, stride)
    if page_size % stride:
        raise ConfigError(
            f"page_size={page_size} is not a multiple of {stride}, the tokens of one entry of the model's compressed"
            " caches. Leave --page-size out."
        )
    declared = {
        "attention_backend": NAME,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "page_size": page_size,
    }
    if shares_states and server_args.mamba_radix_cache_strategy == "auto":
        # SGLang's own choice, which 0.5.16 makes and then forgets: it would take prefixes of running steps.
        declared |= {
            "uses_mamba_radix_cache": True,
            "mamba_radix_cache_strategy": "no_buffer",
            "disable_overlap_schedule": True,
        }
    return declared
