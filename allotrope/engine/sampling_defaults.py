"""Values of a checkpoint's `generation_config.json`: sampling defaults of requests, and the ids that end a sequence.

Owns which of its values are taken and how they are checked. Must not know requests beyond `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping

from allotrope.errors import InvalidRequest, ModelError
from allotrope.request import SamplingParams

Defaults = dict[str, int | float]

# Name in the file -> field of `SamplingParams`.
_TAKEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
_WHOLE = ("top_k", "max_new_tokens")
# Values that would change what Transformers generates, with those that ask for nothing.
_NOT_TAKEN: dict[str, tuple[object, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
    "watermarking_config": (),
}


def read_sampling_defaults(config: Mapping[str, object], source: str) -> Defaults:
    """The sampling values of `config` as fields of `SamplingParams`.

    `config`: contents of `generation_config.json`. `source`: the checkpoint, for errors. null counts as left out, and
    top_k=-1 as 0. Raises ModelError with every value that no request could have.
    """
    defaults: Defaults = {}
    reasons = []
    for name, field in _TAKEN.items():
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            reasons.append(f"{name}={value!r}; a number is needed")
            continue
        if name in _WHOLE:
            if not float(value).is_integer():
                reasons.append(f"{name}={value}; a whole number is needed")
                continue
            value = int(value)
        if (name, value) == ("top_k", -1):
            value = 0
        try:
            SamplingParams(**{field: value}).check(vocab_size=1)  # type: ignore[arg-type]
        except InvalidRequest as error:
            reasons.append(str(error).rstrip(".").replace(field, name, 1))
            continue
        defaults[field] = value
    if reasons:
        advice = "mend generation_config.json, or give --generation-config none"
        raise ModelError(f"{source}: generation_config.json cannot be used", [*reasons, advice])
    return defaults


def values_not_taken(config: Mapping[str, object]) -> list[str]:
    """`name=value` of what `config` asks for beyond the sampling values that are taken."""
    return [
        f"{name}={config[name]}"
        for name, neutral in _NOT_TAKEN.items()
        if config.get(name) is not None and config[name] not in neutral
    ]


def eos_ids(source: str, *configs: Mapping[str, object]) -> tuple[int, ...]:
    """`eos_token_id` of the first config that has one, itself or in its text part; it may be a number or a list. Raises
    ModelError for anything else: sequences of `source` would never end."""
    for config in configs:
        text, value = config.get("text_config"), config.get("eos_token_id")
        if value is None and isinstance(text, Mapping):
            value = text.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(one) is not int for one in ids):
            raise ModelError(source, [f"eos_token_id={value!r} is neither a token id nor a list of them"])
        if ids:
            return tuple(ids)
    return ()


def describe_defaults(defaults: Defaults) -> str:
    """One line for the log."""
    listed = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return (
        f"requests that set no value of their own get {listed} from the checkpoint's generation_config.json; "
        "--generation-config none turns that off"
    )
