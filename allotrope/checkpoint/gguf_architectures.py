"""The architectures of GGUF files: from `general.architecture` to a config.json, and to the names of tensors.

It must not know how the model runs, or how values are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from allotrope.checkpoint import gguf_configs as configs
from allotrope.checkpoint import gguf_names as names
from allotrope.checkpoint.gguf_keys import Keys
from allotrope.checkpoint.gguf_tensors import GgufNames
from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile


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
    keys: Keys | None = None
    try:
        keys = Keys(file, rope_factors)
        config = read_architecture(file).config(keys)
    except (ArithmeticError, TypeError, ValueError) as error:
        reasons = [*(keys.reasons if keys else ()), f"metadata has a value of another type, or out of range: {error}"]
        raise ModelError(f"cannot load {file.path}", reasons) from error
    keys.finish()
    return config


ARCHITECTURES = {
    "deepseek2": GgufArchitecture(configs.deepseek2_config, names.latent_names()),
    "deepseek32": GgufArchitecture(configs.deepseek32_config, names.latent_names(indexer=True)),
    "gemma3": GgufArchitecture(configs.gemma3_config, names.gemma3_names()),
    "gemma4": GgufArchitecture(configs.gemma4_config, names.gemma4_names()),
    "glm-dsa": GgufArchitecture(configs.glm_dsa_config, names.latent_names(indexer=True)),
    "glm4moe": GgufArchitecture(configs.glm4_moe_config, names.glm4_moe_names()),
    "gpt-oss": GgufArchitecture(configs.gpt_oss_config, names.gpt_oss_names()),
    "kimi-linear": GgufArchitecture(configs.kimi_linear_config, names.kimi_linear_names()),
    "llama": GgufArchitecture(configs.llama_config, names.llama_names()),
    "mimo2": GgufArchitecture(configs.mimo2_config, names.mimo2_names()),
    "minimax-m2": GgufArchitecture(configs.minimax_m2_config, names.minimax_m2_names()),
    "mistral3": GgufArchitecture(configs.mistral3_config, names.llama_names()),
    "qwen3": GgufArchitecture(configs.qwen3_config, names.qwen3_names()),
    "qwen35": GgufArchitecture(configs.qwen3_5_config, names.hybrid_names(tiled=True)),
    "qwen35moe": GgufArchitecture(configs.qwen3_5_moe_config, names.hybrid_names(tiled=True)),
    "qwen3moe": GgufArchitecture(configs.qwen3_moe_config, names.qwen3_moe_names()),
    "qwen3next": GgufArchitecture(configs.qwen3_next_config, names.hybrid_names(tiled=False)),
}

# Architectures that run from Hugging Face checkpoints, but not from GGUF files.
REFUSED = {
    "deepseek4": "its compressed attention is read from Hugging Face checkpoints alone",
}
