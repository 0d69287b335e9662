"""Reading a checkpoint's config.json strictly: every value that is read has a type, every key is read or refused.

Both spellings of Hugging Face configs are understood: the released one (`rope_theta`, `rope_scaling`) and that of
Transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, overload

from allotrope.errors import ModelError
from allotrope.ops.rope import RopeScaling, RopeSpec, ScalingKind

T = TypeVar("T")

# Keys that say nothing about the function being computed: bookkeeping, training, and tokens that the tokenizer owns.
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

_REQUIRED: Any = object()


class ConfigReader:
    """Typed reads of one JSON object that remember what was read and what was wrong.

    Wrong or missing values do not raise at once: `finish()` raises one ModelError with every reason.
    """

    def __init__(self, values: Mapping[str, Any], subject: str) -> None:
        self.values, self.subject = values, subject
        self.reasons: list[str] = []
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.values.get(key) is not None

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: type[T], default: Any = _REQUIRED) -> Any:
        """The value of `key`, which must be a `kind` (an int passes for a float); null counts as absent."""
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
        return value

    def expect(self, key: str, *allowed: object) -> None:
        """Refuse any value of `key` but these; an absent key counts as None."""
        self._read.add(key)
        if self.values.get(key) not in allowed:
            found, listed = self.values.get(key), ", ".join(repr(value) for value in allowed if value is not None)
            self.reasons.append(f"config {key}={found!r} is not supported (allowed: {listed or 'absent'})")

    def ignore(self, *keys: str) -> None:
        """Declare that keys do not change what this model computes."""
        self._read.update(keys)

    def section(self, key: str) -> ConfigReader:
        """A reader of the object at `key`; its reasons join these."""
        child = ConfigReader(self.get(key, dict), f"{self.subject} {key}")
        child.reasons = self.reasons
        return child

    def refuse(self, reason: str) -> None:
        """Add a reason of the caller's own, once."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def unread(self) -> list[str]:
        """Keys with a value that nobody read."""
        return sorted(
            key
            for key, value in self.values.items()
            if value is not None and key not in self._read and key not in BOOKKEEPING
        )

    def refuse_unread(self, what: str = "config") -> None:
        """Add a reason for every value left unread; for a `section`, once all of it is read."""
        self.reasons.extend(f"{what} {key}={self.values[key]!r} is not understood" for key in self.unread())

    def finish(self) -> None:
        """Raise ModelError if anything was wrong or a value was left unread."""
        self.refuse_unread()
        if self.reasons:
            raise ModelError(self.subject, self.reasons)


def layer_types(config: ConfigReader, count: int, allowed: Iterable[str]) -> list[str] | None:
    """The config's `layer_types`, checked to be one allowed word per layer; None if it has none."""
    found = config.get("layer_types", list, None)
    if found is None:
        return None
    known = set(allowed)
    wrong = sorted({str(kind) for kind in found} - known)
    if wrong or len(found) != count:
        config.refuse(
            f"config layer_types has {len(found)} entries (needs {count}), unknown kinds {wrong} "
            f"(allowed: {', '.join(sorted(known))})"
        )
        return None
    return [str(kind) for kind in found]


def agreeing_layers(config: ConfigReader, key: str, stated: list[Any] | None, derived: list[Any]) -> list[Any]:
    """What each layer is: as `stated` layer by layer, else as `derived` from the value of `key`.

    A value of `key` that says otherwise than the stated list is refused: one of the two would be lost.
    """
    if stated is None:
        return derived
    if config.has(key) and stated != derived:
        config.refuse(f"config {key}={config.values[key]!r} makes layers {derived!r}, but the config lists {stated!r}")
    return stated


def wrapper_is_tied(config: ConfigReader, text: ConfigReader, tied: bool) -> bool:
    """Whether the head of a model inside of a wrapper is its embedding; refused where the two configs differ.

    `tied`: as read from the text part.
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
    """The rotation of heads of `dim` dims, from either spelling.

    `kind`: key of `rope_parameters` where it is given per layer type. `theta_key`: where the config itself has the
    base. `dim` shrinks by `partial_rotary_factor`, else by `default_part` (but for proportional scaling).
    """
    values = rope_values(config, theta_key)
    if kind is not None and kind in values:
        values = dict(values[kind] or {})
    _refuse_another(config, theta_key, "rope_theta", values)
    _refuse_another(config, "partial_rotary_factor", "partial_rotary_factor", values)
    values.setdefault("rope_theta", config.get(theta_key, float, default_theta))
    partial = config.get("partial_rotary_factor", float, None)
    reader = ConfigReader(values, f"{config.subject} rope")
    reader.reasons = config.reasons
    theta = reader.get("rope_theta", float)
    part = reader.get("partial_rotary_factor", float, None) or partial or default_part
    name = reader.get("rope_type", str, None) or reader.get("type", str, "default")
    # The old key beside the new one; "mrope" is how the old one calls positions on several axes.
    reader.expect("type", name, None, *(("mrope",) if name == "default" else ()))
    # A text token has one position on all three axes of an image, so splitting the pairs among them changes nothing.
    reader.ignore("mrope_section", "mrope_interleaved")
    if name == "proportional":
        # Frequencies are those of the whole head; only the first pairs turn.
        scaling = RopeScaling(
            kind="proportional", factor=reader.get("factor", float, 1.0), rotated=int(part * dim // 2)
        )
    else:
        dim = int(dim * part)
        scaling = _read_scaling(reader, name, config)
    reader.refuse_unread("rope")
    return RopeSpec(dim=dim, theta=theta, interleaved=interleaved, scaling=scaling)


def rope_values(config: ConfigReader, theta_key: str = "rope_theta") -> dict[str, Any]:
    """What the config says of its rotation: `rope_scaling`, else `rope_parameters`, flat or per layer type.

    Where both are there, Transformers takes `rope_scaling` alone. Values that would be lost by that are refused.
    `theta_key`: as of `read_rope`.
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
    """Refuse a value of the config that says otherwise than the rotation's own `key`."""
    stated, own = config.values.get(outside), values.get(key)
    if stated is not None and own is not None and stated != own:
        config.refuse(f"config {outside}={stated!r}, but its rotation has {key}={own!r}: give one value")


def _read_scaling(reader: ConfigReader, name: str, config: ConfigReader) -> RopeScaling:
    if name in ("default", "none"):
        # Where nothing is stretched, the length before stretching is the context.
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
    """YaRN; without an explicit attention factor it is 0.1 ln(factor) + 1, or the ratio of DeepSeek's two scales."""
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
    """0.1 m ln(factor) + 1 above factor 1."""
    return 1.0 if factor <= 1.0 else 0.1 * (1.0 if mscale is None else mscale) * math.log(factor) + 1.0
