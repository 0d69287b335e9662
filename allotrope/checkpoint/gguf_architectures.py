"""Maps the metadata and tensor names of GGUF files to those of Hugging Face checkpoints, for each known architecture.

Owns the tables from metadata keys to config entries, and from tensor names to tensor names. It must not know how the
model runs.

A metadata key of the architecture that no rule reads is an error, because it could change the model.
Key and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of `general.architecture`.

    `interleaved_rope`: the file stores the rows of each query and key head as rotation pairs (0, 1), (2, 3), ...; the
    Hugging Face layout pairs row i with row i + D/2. `GgufCheckpoint.read` reorders them.
    """

    model_type: str
    model_class: str
    interleaved_rope: bool


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", interleaved_rope=True),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM", interleaved_rope=False),
}

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Parameters of the llama3 rope rule. A file stores only the factors that result from them.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf_tensor_name(name: str) -> str | None:
    """The Hugging Face name of the GGUF tensor `name`, or None if no rule covers it."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None:
        module = _LAYER_TENSORS.get(layer[2])
        return None if module is None else f"model.layers.{layer[1]}.{module}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TENSORS[stem]}.{kind}" if stem in _TENSORS and kind in ("weight", "bias") else None


def read_architecture(file: GgufFile) -> GgufArchitecture:
    """The architecture of `file`. Raises `ModelError` with the known names if it is unknown."""
    name = file.metadata.get("general.architecture")
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
    architecture = read_architecture(file)
    keys = _Keys(file)
    embeddings = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": keys.take("vocab_size", None),
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if embeddings is not None:
        # The tensor includes padding rows, which the key may leave out.
        config["vocab_size"] = embeddings.shape[0]
    if architecture.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config.update(_heads(keys, config["hidden_size"]))
    config.update(_rope(keys, config["head_dim"], rope_factors))
    window = keys.take("attention.sliding_window", 0)
    if window:
        config.update(_windowed(architecture, window, keys))
    if keys.take("expert_count", 0):
        keys.reasons.append(f"{keys.prefix}.expert_count is not 0: mixtures of experts are not read from GGUF files")
    config.update(_special_ids(file))
    keys.finish()
    return config


class _Keys:
    """Metadata keys of one architecture, each read at most once. `finish` raises with every reason at once."""

    def __init__(self, file: GgufFile) -> None:
        self.prefix = file.metadata["general.architecture"]
        self.reasons: list[str] = []
        self._path = file.path
        start = len(self.prefix) + 1
        self._left = {k[start:]: v for k, v in file.metadata.items() if k.startswith(f"{self.prefix}.")}

    def take(self, key: str, default: Any) -> Any:
        """The value of `key`, or `default`. A list (one value per layer) must hold equal values, and stands for one."""
        value = self._left.pop(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.reasons.append(f"{self.prefix}.{key}={value} differs between layers; one value is supported")
            return value[0] if value else default
        return value

    def need(self, key: str) -> Any:
        """The value of the required `key`. If it is missing, 1 stands for it, so that later reasons are found too."""
        if key not in self._left:
            self.reasons.append(f"{self.prefix}.{key} is missing")
        return self.take(key, 1)

    def finish(self) -> None:
        self.reasons += [
            f"{self.prefix}.{key}={value} is not understood: ignoring it could change the model"
            for key, value in sorted(self._left.items())
        ]
        if self.reasons:
            raise ModelError(f"cannot load {self._path}", self.reasons)


def _heads(keys: _Keys, hidden_size: int) -> dict[str, Any]:
    heads = keys.need("attention.head_count")
    head_dim = keys.take("attention.key_length", hidden_size // heads)
    value_dim = keys.take("attention.value_length", head_dim)
    if value_dim != head_dim:
        keys.reasons.append(f"{keys.prefix}.attention.value_length={value_dim}; key_length {head_dim} is needed")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }


def _rope(keys: _Keys, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    theta = keys.take("rope.freq_base", 10000.0)
    rotated = keys.take("rope.dimension_count", head_dim)
    if rotated != head_dim:
        keys.reasons.append(f"{keys.prefix}.rope.dimension_count={rotated}; head dim {head_dim} is needed")
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.take("rope.scaling.factor", None)
    original = keys.take("rope.scaling.original_context_length", None)
    # The key says that the model was trained at the scaled length; it changes no computation.
    keys.take("rope.scaling.finetuned", None)
    scaling: dict[str, Any] | None = None
    if factors is not None:
        scaling = _llama3_scaling(keys, theta, factors)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind != "none":
        keys.reasons.append(f"{keys.prefix}.rope.scaling.type={kind!r}; allowed: none, linear, yarn")
    if factors is not None and kind != "none":
        keys.reasons.append(
            f"both {keys.prefix}.rope.scaling.type={kind!r} and the tensor {ROPE_FACTORS}; one is allowed"
        )
    if scaling is not None and None in scaling.values():
        keys.reasons.append(
            f"{keys.prefix}.rope.scaling.type={kind!r} needs {keys.prefix}.rope.scaling.factor and more"
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def llama3_rope_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """float64 [D/2]: divisor of each inverse frequency 1/theta^(2i/D) by the `llama3` rule.

    It is `factor` for wavelengths above original/low, 1 below original/high, and in between
    1 / ((1 - s)/factor + s) with s = (original/wavelength - low) / (high - low).
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)


def _llama3_scaling(keys: _Keys, theta: float, factors: np.ndarray) -> dict[str, Any] | None:
    """The `llama3` entry of `rope_scaling` that results in `factors`: the file has the factors, the config the rule."""
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_ROPE}
    if np.allclose(llama3_rope_factors(theta, 2 * len(factors), scaling), factors, rtol=1e-4):
        return scaling
    keys.reasons.append(
        f"the tensor {ROPE_FACTORS} (up to {factors.max():g}) does not follow the llama3 rule with {_LLAMA3_ROPE}"
    )
    return None


def _windowed(architecture: GgufArchitecture, window: int, keys: _Keys) -> dict[str, Any]:
    # Hugging Face configs name the same layers with a window Mistral.
    if architecture.model_type == "llama":
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    keys.reasons.append(f"{keys.prefix}.attention.sliding_window={window}; only llama files may have one")
    return {}


def _special_ids(file: GgufFile) -> dict[str, Any]:
    named = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in named.items()}
    ends = list(file.end_ids())
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {name: value for name, value in ids.items() if value is not None}
