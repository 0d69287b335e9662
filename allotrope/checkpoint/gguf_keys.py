"""Metadata keys of a GGUF file, read strictly, and the config entries that all architectures take from them.

A metadata key of the architecture that no rule reads is an error, because it could change the model.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile

ROPE_FACTORS = "rope_freqs.weight"

# Parameters of the llama3 rope rule. A file stores only the factors that result from them.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Keys:
    """Metadata keys of one architecture, each read at most once. `finish` raises with every reason at once.

    `factors`: [D/2] divisor of each inverse frequency, or None if the file has no such tensor.
    """

    def __init__(self, file: GgufFile, factors: np.ndarray | None) -> None:
        self.prefix = file.metadata["general.architecture"]
        self.file = file
        self.factors = factors
        self.reasons: list[str] = []
        start = len(self.prefix) + 1
        self._left = {k[start:]: v for k, v in file.metadata.items() if k.startswith(f"{self.prefix}.")}
        # The layers of the model alone: a file counts those that make drafts among its blocks.
        self.drafts = int(self.take("nextn_predict_layers", 0))
        self.layers = int(self.need("block_count")) - self.drafts

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self.file.tensors

    def take(self, key: str, default: Any) -> Any:
        """The value of `key`, or `default`. A list (one value per layer) must hold equal values, and stands for one."""
        value = self._left.pop(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.reasons.append(f"{self.prefix}.{key}={value} differs between layers; one value is supported")
            return value[0] if value else default
        return value

    def take_list(self, key: str) -> list[Any] | None:
        """The values of `key` for the model's layers, or None without it. One value stands for all layers."""
        value = self._left.pop(key, None)
        if value is None or not isinstance(value, list):
            return None if value is None else [value] * self.layers
        if len(value) not in (self.layers, self.layers + self.drafts):
            self.reasons.append(f"{self.prefix}.{key} has {len(value)} values for {self.layers} layers")
        return value[: self.layers]

    def need(self, key: str) -> Any:
        """The value of the required `key`. If it is missing, 1 stands for it, so that later reasons are found too."""
        if key not in self._left:
            self.reasons.append(f"{self.prefix}.{key} is missing")
        return self.take(key, 1)

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse a value of `key` that is not in `allowed`. An absent key is allowed."""
        value = self._left.pop(key, None)
        if value is not None and value not in allowed:
            shown = ", ".join(str(one) for one in allowed)
            self.reasons.append(f"{self.prefix}.{key}={value}; allowed: {shown}")

    def expect_list(self, key: str, derived: list[Any]) -> None:
        """Refuse values of `key` that differ from `derived`, one for each layer. An absent key is allowed."""
        stated = self.take_list(key)
        if stated is not None and stated != derived:
            self.reasons.append(f"{self.prefix}.{key}={stated}, but the tensors say {derived}")

    def ignore(self, key: str) -> None:
        """Mark a key that does not change this model's function as read."""
        self._left.pop(key, None)

    def finish(self) -> None:
        self.reasons += [
            f"{self.prefix}.{key}={value} is not understood: ignoring it could change the model"
            for key, value in sorted(self._left.items())
        ]
        if self.reasons:
            raise ModelError(f"cannot load {self.file.path}", self.reasons)


def model_config(keys: Keys) -> dict[str, Any]:
    """Config entries that every architecture has."""
    # The tensor includes padding rows, which the key may leave out.
    stated, embeddings = keys.take("vocab_size", None), keys.file.tensors.get("token_embd.weight")
    config = {
        "vocab_size": stated if embeddings is None else embeddings.shape[0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.layers,
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not keys.has("output.weight"),
    }
    config.update(_special_ids(keys.file))
    return config


def head_config(keys: Keys, hidden_size: int) -> dict[str, Any]:
    """Counts and size of the heads of grouped-query attention, where all layers have the same."""
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


def rope_config(keys: Keys, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, and `partial_rotary_factor` if the model may rotate a part of its heads."""
    theta = keys.take("rope.freq_base", 10000.0)
    rotated = keys.take("rope.dimension_count", head_dim)
    if rotated != head_dim and not partial:
        keys.reasons.append(f"{keys.prefix}.rope.dimension_count={rotated}; head dim {head_dim} is needed")
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.take("rope.scaling.factor", None)
    original = keys.take("rope.scaling.original_context_length", None)
    # The key says that the model was trained at the scaled length; it changes no computation.
    keys.take("rope.scaling.finetuned", None)
    scaling: dict[str, Any] | None = None
    if keys.factors is not None:
        scaling = _llama3_scaling(keys, theta, keys.factors)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind != "none":
        keys.reasons.append(f"{keys.prefix}.rope.scaling.type={kind!r}; allowed: none, linear, yarn")
    if keys.factors is not None and kind != "none":
        keys.reasons.append(
            f"both {keys.prefix}.rope.scaling.type={kind!r} and the tensor {ROPE_FACTORS}; one is allowed"
        )
    if scaling is not None and None in scaling.values():
        keys.reasons.append(
            f"{keys.prefix}.rope.scaling.type={kind!r} needs {keys.prefix}.rope.scaling.factor and more"
        )
    if kind == "yarn" and scaling is not None:
        scaling |= _yarn_values(keys)
    config = {"rope_theta": theta, "rope_scaling": scaling}
    return config | {"partial_rotary_factor": _part(rotated, head_dim)} if partial else config


def _part(rotated: int, head_dim: int) -> float:
    """The smallest factor of which int(head_dim * factor) is `rotated`, despite rounding."""
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else math.nextafter(part, math.inf)


def _yarn_values(keys: Keys) -> dict[str, Any]:
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    found = {name: keys.take(f"rope.scaling.{key}", None) for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}


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


def _llama3_scaling(keys: Keys, theta: float, factors: np.ndarray) -> dict[str, Any] | None:
    """The `llama3` entry of `rope_scaling` that results in `factors`: the file has the factors, the config the rule."""
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_ROPE}
    if np.allclose(llama3_rope_factors(theta, 2 * len(factors), scaling), factors, rtol=1e-4):
        return scaling
    keys.reasons.append(
        f"the tensor {ROPE_FACTORS} (up to {factors.max():g}) does not follow the llama3 rule with {_LLAMA3_ROPE}"
    )
    return None


def _special_ids(file: GgufFile) -> dict[str, Any]:
    named = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in named.items()}
    ends = list(file.end_ids())
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {name: value for name, value in ids.items() if value is not None}
