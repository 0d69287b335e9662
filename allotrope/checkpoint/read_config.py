"""Reads a checkpoint's config.json strictly: every value has its type, and every key is read or refused.

It reads both spellings of Hugging Face configs: the older one (`rope_theta`, `rope_scaling`) and that of Transformers 5
(`rope_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, overload

from allotrope.errors import ModelError
from allotrope.ops.rope import RopeScaling, RopeSpec, ScalingKind

T = TypeVar("T")

# Keys that do not change the computed function: bookkeeping, training, and tokens that the tokenizer owns.
BOOKKEEPING = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version _name_or_path auto_map use_cache
    cache_implementation attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout initializer_range
    initializer_factor bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unsloth_version
    unsloth_fixed router_aux_loss_coef output_router_logits router_jitter_noise aux_loss_alpha seq_aux ep_size
    output_attentions output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder is_decoder
    add_cross_attention tie_encoder_decoder finetuning_task id2label label2id problem_type prefix
    task_specific_params tokenizer_class torchscript pretraining_tp transformers.js_config quantization_config
    """.split()
)

# How to generate, and what else older Transformers write into every config, above all into those inside others. Of the
# model they say nothing, and requests take their defaults from generation_config.json.
GENERATION = frozenset(
    """
    _attn_implementation_autoset max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens tf_legacy_loss use_bfloat16
    """.split()
)

# Counts without which there is no model.
_AT_LEAST_ONE = frozenset(
    """
    num_hidden_layers vocab_size hidden_size max_position_embeddings num_attention_heads head_dim
    intermediate_size moe_intermediate_size hc_mult o_lora_rank
    """.split()
)

_REQUIRED: Any = object()


class ConfigReader:
    """Typed reads of one JSON object. The reader records the keys that are read and the reasons of refusals.

    `finish()` raises one ModelError with every wrong, missing or unread value.
    """

    def __init__(self, values: Mapping[str, Any], subject: str) -> None:
        self.values, self.subject = values, subject
        self.reasons: list[str] = []
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self.values.get(key) is not None

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: type[T], default: Any = _REQUIRED) -> Any:
        """The value of `key`, of type `kind` (an int is valid as a float). null counts as absent."""
        self._read.add(key)
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                self.reasons.append(f"config has no {key!r} (needs {kind.__name__})")
                return kind()
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.reasons.append(f"config {key}={value!r} (needs {kind.__name__})")
            return kind() if default is _REQUIRED or default is None else default
        least = 1 if key in _AT_LEAST_ONE else 0
        if kind is int and isinstance(value, int) and value < least:
            self.refuse(f"config {key}={value} (needs at least {least})")
            # What is computed from it on the way to the end.
            return least
        if isinstance(value, float) and (not math.isfinite(value) or (key.endswith("eps") and value < 0)):
            self.refuse(f"config {key}={value} (needs a number{', at least 0' if key.endswith('eps') else ''})")
            return 1.0
        return value

    def expect(self, key: str, *allowed: object) -> None:
        """Refuse a value of `key` that is not in `allowed`. An absent key counts as None."""
        self._read.add(key)
        if self.values.get(key) not in allowed:
            actual, listed = self.values.get(key), ", ".join(repr(value) for value in allowed if value is not None)
            self.reasons.append(f"config {key}={actual!r} is not supported (allowed: {listed or 'absent'})")

    def require(self, key: str) -> None:
        """Refuse a config without `key`, of which null means something else than leaving it out."""
        if key not in self.values:
            self.refuse(f"config has no {key!r} (null is allowed)")

    def ignore(self, *keys: str) -> None:
        """Mark keys that do not change this model's function as read."""
        self._read.update(keys)

    def section(self, key: str) -> ConfigReader:
        """A reader of the object at `key`. It shares this reader's list of reasons."""
        child = ConfigReader(self.get(key, dict), f"{self.subject} {key}")
        child.reasons = self.reasons
        return child

    def refuse(self, reason: str) -> None:
        """Add a reason, once."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def unread(self) -> list[str]:
        """Keys that have a value and are unread."""
        known = self._read | BOOKKEEPING | GENERATION
        return sorted(
            key
            for key, value in self.values.items()
            if value is not None
            and key not in known
            # Written empty; heads that are gone would be another model.
            and (key, value) != ("pruned_heads", {})
        )

    def refuse_unread(self, prefix: str = "config") -> None:
        """Add a reason for every unread value. A `section` needs this call after its last read."""
        self.reasons.extend(f"{prefix} {key}={self.values[key]!r} is not understood" for key in self.unread())

    def finish(self) -> None:
        """Raise ModelError if there are reasons or unread values."""
        self.refuse_unread()
        if self.reasons:
            raise ModelError(self.subject, self.reasons)


def layer_types(config: ConfigReader, count: int, allowed: Iterable[str]) -> list[str] | None:
    """The config's `layer_types`, or None without them. A list with other words or another length is refused."""
    stated = config.get("layer_types", list, None)
    if stated is None:
        return None
    known = set(allowed)
    wrong = sorted({str(kind) for kind in stated} - known)
    if wrong:
        config.refuse(f"config layer_types has {', '.join(wrong)} (allowed: {', '.join(sorted(known))})")
    if len(stated) != count:
        config.refuse(
            f"config layer_types lists {len(stated)} layers, and num_hidden_layers is {count}: give both, with as many "
            f"entries as layers"
        )
    return [str(kind) for kind in stated] if not wrong and len(stated) == count else None


def agreeing_layers(config: ConfigReader, key: str, stated: list[Any] | None, derived: list[Any]) -> list[Any]:
    """The type of each layer: `stated` by a list in the config, else `derived` from the value of `key`.

    If the two differ, the config is refused.
    """
    if stated is None:
        return derived
    if config.has(key) and stated != derived:
        config.refuse(f"config {key}={config.values[key]!r} makes layers {derived!r}, but the config lists {stated!r}")
    return stated


def wrapper_is_tied(config: ConfigReader, text: ConfigReader, tied: bool) -> bool:
    """Whether a multimodal model's output head is tied to its embedding. It is refused if the two configs differ.

    `config`: of the whole model. `text`, `tied`: config of the text part, and the value read from it.
    """
    stated = config.get("tie_word_embeddings", bool, tied)
    if text.has("tie_word_embeddings") and stated != tied:
        config.refuse(f"config tie_word_embeddings={stated} but text_config has {tied}")
    return stated


def read_rope(
    config: ConfigReader,
    dim: int,
    *,
    kind: str | None = None,
    theta_key: str = "rope_theta",
    default_theta: float | None = None,
    interleaved: bool = False,
    default_part: float = 1.0,
) -> RopeSpec:
    """The rope of heads with `dim` dims, from either spelling.

    `kind`: layer type, if `rope_parameters` has an entry for each type. `theta_key`: key of the base in the config
    itself. The rope rotates `partial_rotary_factor` (default: `default_part`) of the dims; with proportional scaling
    the spec keeps all dims.
    """
    values = rope_values(config, theta_key)
    if kind is not None and kind in values:
        inner = values[kind] or {}
        if not isinstance(inner, Mapping):
            config.refuse(f"config rope_parameters.{kind}={inner!r} (needs dict)")
        values = dict(inner) if isinstance(inner, Mapping) else {}
    _refuse_another(config, theta_key, "rope_theta", values)
    _refuse_another(config, "partial_rotary_factor", "partial_rotary_factor", values)
    values.setdefault("rope_theta", config.get(theta_key, float, default_theta))
    partial = config.get("partial_rotary_factor", float, None)
    reader = ConfigReader(values, f"{config.subject} rope")
    reader.reasons = config.reasons
    theta = reader.get("rope_theta", float)
    part = next(
        one for one in (reader.get("partial_rotary_factor", float, None), partial, default_part) if one is not None
    )
    name = reader.get("rope_type", str, None) or reader.get("type", str, "default")
    # `type` is the older key of `rope_type`. Its "mrope" means positions on several axes.
    reader.expect("type", name, None, *(("mrope",) if name == "default" else ()))
    # A text token has one position on all three axes of an image, so splitting the pairs among them changes nothing.
    reader.ignore("mrope_section", "mrope_interleaved")
    if name == "proportional":
        # The frequencies span the whole head, and only the first pairs are rotated.
        scaling = RopeScaling(
            kind="proportional", factor=reader.get("factor", float, 1.0), rotated=int(part * dim // 2)
        )
    else:
        dim = int(dim * part)
        scaling = _read_scaling(reader, name, config)
    reader.refuse_unread("rope")
    if not 0 < part <= 1:
        config.refuse(f"config partial_rotary_factor={part} (needs more than 0, at most 1)")
    spec = RopeSpec(dim=dim, theta=theta, interleaved=interleaved, scaling=scaling)
    refuse_impossible(config, spec)
    return spec


def refuse_impossible(config: ConfigReader, rope: RopeSpec) -> None:
    """Refuse a rope that cannot pair its dims, or has no frequencies."""
    if rope.dim < 2 or rope.dim % 2:
        config.refuse(f"config rotates {rope.dim} dims of a head (needs an even number, at least 2)")
    if rope.theta <= 0:
        config.refuse(f"config rotates with theta={rope.theta} (needs more than 0)")
    if rope.scaling.factor <= 0:
        config.refuse(f"config stretches its rotation by factor={rope.scaling.factor} (needs more than 0)")
    if rope.scaling.kind in ("yarn", "llama3") and rope.scaling.original_length < 1:
        config.refuse(
            f"config rope has original_max_position_embeddings={rope.scaling.original_length} (needs at least 1)"
        )


def rope_values(config: ConfigReader, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The config's `rope_scaling`, else its `rope_parameters`, which are flat or per layer type.

    If a config has both, Transformers reads `rope_scaling` alone. A config that would lose values so is refused.
    `theta_key`: see `read_rope`.
    """
    parameters = config.get("rope_parameters", dict, None) or {}
    scaling = config.get("rope_scaling", dict, None) or {}
    if not scaling or scaling == parameters:
        return dict(parameters)
    if any(isinstance(value, dict) for value in parameters.values()):
        config.refuse(
            f"config rope_scaling={scaling!r} is for all layers, and rope_parameters has values for each type of "
            f"layer: write the scaling into rope_parameters, and leave rope_scaling out"
        )
    for key, outside in (("rope_theta", theta_key), ("partial_rotary_factor", "partial_rotary_factor")):
        if key in parameters and key not in scaling and not config.has(outside):
            config.refuse(
                f"config rope_scaling={scaling!r} stands in place of rope_parameters, whose {key}={parameters[key]!r} "
                f"it lacks: write {key} into rope_scaling"
            )
    return dict(scaling)


def _refuse_another(config: ConfigReader, outside: str, key: str, values: Mapping[str, Any]) -> None:
    """Refuse a config whose value of `outside` differs from the value of `key` in the rope's own object."""
    stated, own = config.values.get(outside), values.get(key)
    if stated is not None and own is not None and stated != own:
        config.refuse(f"config {outside}={stated!r}, but its rotation has {key}={own!r}: give one value")


def _read_scaling(reader: ConfigReader, name: str, config: ConfigReader) -> RopeScaling:
    if name in ("default", "none"):
        # Without scaling, the original length is the context.
        reader.expect("factor", 1, None)
        reader.ignore("original_max_position_embeddings")
        return RopeScaling()
    if name == "linear":
        return RopeScaling(kind="linear", factor=reader.get("factor", float))
    if name == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=reader.get("factor", float),
            original_length=reader.get("original_max_position_embeddings", int),
            low_freq_factor=reader.get("low_freq_factor", float),
            high_freq_factor=reader.get("high_freq_factor", float),
        )
    if name == "yarn":
        return _read_yarn(reader, config)
    known: tuple[ScalingKind, ...] = ("linear", "llama3", "yarn")
    reader.refuse(f"rope type {name!r} is not supported (allowed: default, {', '.join(known)})")
    reader.ignore(*reader.values)
    return RopeScaling()


def _read_yarn(reader: ConfigReader, config: ConfigReader) -> RopeScaling:
    """Reads YaRN. The default attention factor is 0.1 ln(factor) + 1, or the ratio of DeepSeek's two mscales."""
    original = reader.get("original_max_position_embeddings", int, None)
    if original is None:
        original = config.get("original_max_position_embeddings", int, None)
    if original is None:
        original = config.get("max_position_embeddings", int)
    factor = reader.get("factor", float)
    stated = reader.get("attention_factor", float, None)
    mscale, all_dims = reader.get("mscale", float, None), reader.get("mscale_all_dim", float, None)
    if stated is None:
        stated = yarn_scale(factor)
        if mscale and all_dims:
            stated = yarn_scale(factor, mscale) / yarn_scale(factor, all_dims)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=original,
        beta_fast=reader.get("beta_fast", float, None) or 32.0,
        beta_slow=reader.get("beta_slow", float, None) or 1.0,
        attention_factor=stated,
        truncate=reader.get("truncate", bool, True),
    )


def yarn_scale(factor: float, mscale: float | None = 1.0) -> float:
    """0.1 m ln(factor) + 1 for factors above 1, else 1."""
    return 1.0 if factor <= 1.0 else 0.1 * (1.0 if mscale is None else mscale) * math.log(factor) + 1.0
