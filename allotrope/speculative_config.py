"""Options of speculative decoding, as `--speculative-config` gives them: one JSON object with vLLM's keys.

Owns the keys, their allowed values and their defaults. It must not know a model, nor how drafts are made.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from allotrope.errors import ConfigError

SpeculativeMethod = Literal["ngram", "suffix", "mtp", "eagle3", "draft_model"]
RejectionSampleMethod = Literal["standard", "synthetic"]
DraftHeadDtype = Literal["auto", "fp8", "model"]

# Most drafts that a step verifies for one sequence.
MAX_SPECULATIVE_TOKENS = 16
MAX_PROMPT_LOOKUP = 64
MAX_TREE_DEPTH = 256
# What vLLM looks up where neither prompt_lookup_min nor prompt_lookup_max is given.
_PROMPT_LOOKUP = 5
_TREE_DEPTH = 24

_ALIASES = {"[ngram]": "ngram"}
# vLLM names the checkpoint's own heads by architecture too, such as 'qwen3_next_mtp'.
_MTP_ALIAS = re.compile(r"[a-z0-9_]+_mtp")
# Keys and values of vLLM that are known and refused, each with its remedy.
_REFUSED_KEYS = {
    "tensor_parallel_size": "give draft_tensor_parallel_size",
    "draft_sample_method": "drafts are the most likely tokens, as with 'greedy'; leave it out",
}
_REFUSED_SAMPLING = {"block": "a draft is accepted where it equals the sampled token, which is exact; use 'standard'"}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and verified.

    `method`: what makes the drafts. `model`: directory or hub id of the head or of the draft model (eagle3,
    draft_model); for mtp the target itself. `num_speculative_tokens`: most drafts of one sequence in a step; 0 stands
    for one with `mtp`, and for what the head's config says with `eagle3`. `prompt_lookup_min`, `prompt_lookup_max`:
    length in tokens of the n-gram that is looked up. `suffix_decoding_max_tree_depth`: one more than the most tokens of
    a match. `suffix_decoding_max_cached_requests`: former outputs that are searched. `suffix_decoding_max_spec_factor`:
    drafts per matched token. `suffix_decoding_min_token_prob`: least estimated probability of a draft.
    `draft_tensor_parallel_size`: ranks that share the draft model; None: those of the target. `draft_head_dtype`: the
    head by which mtp and eagle3 choose drafts is an FP8 copy ("fp8"), as the model has it ("model"), or FP8 on a GPU
    that multiplies it ("auto"). It decides no token.
    `rejection_sample_method`: 'standard' accepts a draft that equals the token sampled in its place; 'synthetic'
    accepts by `synthetic_acceptance_rates`, whatever the tokens: for benchmarks alone.
    `synthetic_acceptance_rates`: entry i is the probability that the first i + 1 drafts are all accepted.
    `synthetic_acceptance_length`: mean tokens of a step instead, 1 to num_speculative_tokens + 1. `adaptive`: draft
    fewer tokens where more would not raise the throughput.
    """

    method: SpeculativeMethod
    model: str | None = None
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = _PROMPT_LOOKUP
    prompt_lookup_max: int = _PROMPT_LOOKUP
    suffix_decoding_max_tree_depth: int = _TREE_DEPTH
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    draft_tensor_parallel_size: int | None = None
    draft_head_dtype: DraftHeadDtype = "auto"
    rejection_sample_method: RejectionSampleMethod = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    adaptive: bool = True

    @property
    def drafts_from_text(self) -> bool:
        """Whether drafts are looked up in former tokens, with no weights."""
        return self.method in ("ngram", "suffix")

    @property
    def is_synthetic(self) -> bool:
        return self.rejection_sample_method == "synthetic"

    @classmethod
    def parse(cls, source: str | Mapping[str, Any]) -> SpeculativeConfig:
        """The config in `source`, a JSON object or its text. Raises ConfigError with every reason."""
        values = _read_object(source)
        reasons = _unknown_keys(values)
        # null is what a key is that was left out.
        given = {name: value for name, value in values.items() if value is not None and name in _FIELDS}
        reasons += _wrong_types(given)
        if not reasons:
            reasons += _resolve_method(given)
        if not reasons:
            reasons += _without_effect(given)
            _resolve_lengths(given)
            reasons += _wrong_values(given)
        if reasons:
            raise ConfigError("bad options: speculative_config: " + "; ".join(reasons) + ".")
        if "synthetic_acceptance_rates" in given:
            given["synthetic_acceptance_rates"] = tuple(map(float, given["synthetic_acceptance_rates"]))
        return cls(**given)


_FIELDS = {f.name: f for f in dataclasses.fields(SpeculativeConfig)}
_TEXTS = ("method", "model", "rejection_sample_method", "draft_head_dtype")
_INTEGERS = (
    "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "draft_tensor_parallel_size",
)  # fmt: skip
_NUMBERS = ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "synthetic_acceptance_length")


def _read_object(source: str | Mapping[str, Any]) -> dict[str, Any]:
    values: Any = source
    if isinstance(source, str):
        try:
            values = json.loads(source)
        except ValueError as error:
            raise ConfigError(f"bad options: speculative_config={source!r} is not JSON ({error}).") from None
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"bad options: speculative_config={source!r} is not a JSON object, such as "
            '\'{"method": "ngram", "num_speculative_tokens": 3}\'.'
        )
    return dict(values)


def _unknown_keys(values: Mapping[str, Any]) -> list[str]:
    refused = [f"{name}: {_REFUSED_KEYS[name]}" for name in values if name in _REFUSED_KEYS]
    unknown = [name for name in values if name not in _FIELDS and name not in _REFUSED_KEYS]
    if unknown:
        refused.append(f"unknown {', '.join(map(repr, unknown))}; allowed: {', '.join(_FIELDS)}")
    return refused


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _wrong_types(given: Mapping[str, Any]) -> list[str]:
    reasons = []
    for name, value in given.items():
        if name in _TEXTS:
            right, wanted = isinstance(value, str), "a text"
        elif name in _INTEGERS:
            right, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        elif name in _NUMBERS:
            right, wanted = _is_number(value), "a number"
        elif name == "adaptive":
            right, wanted = isinstance(value, bool), "true or false"
        else:
            right = isinstance(value, list | tuple) and all(map(_is_number, value))
            wanted = "a list of numbers"
        if not right:
            reasons.append(f"{name}={value!r}; {wanted} is needed")
    return reasons


def _resolve_method(given: dict[str, Any]) -> list[str]:
    """Write the method's own name into `given`, guessed from the model's where it is absent, as vLLM does."""
    methods = get_args(SpeculativeMethod)
    method, model = given.get("method"), given.get("model")
    if method is None and model is None:
        return [f"method is missing, and no model tells it; allowed: {', '.join(methods)}"]
    if method is None:
        assert model is not None
        if model in ("ngram", "[ngram]", "suffix"):
            method = model
        else:
            method = "eagle3" if "eagle3" in model.lower() else "draft_model"
    resolved = "mtp" if _MTP_ALIAS.fullmatch(method) else _ALIASES.get(method, method)
    if resolved not in methods:
        return [f"method={method!r}; allowed: {', '.join(methods)}"]
    given["method"] = resolved
    return []


def _resolve_lengths(given: dict[str, Any]) -> None:
    """Write the lengths that follow from others into `given`: those of n-grams, and suffix decoding's drafts."""
    shortest, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if shortest is not None or longest is not None:
        given["prompt_lookup_min"] = longest if shortest is None else shortest
        given["prompt_lookup_max"] = shortest if longest is None else longest
    if given["method"] == "suffix" and "num_speculative_tokens" not in given:
        # vLLM drafts as many as the tree is deep; ours verifies 16 at most.
        depth = given.get("suffix_decoding_max_tree_depth", _TREE_DEPTH)
        given["num_speculative_tokens"] = min(depth, MAX_SPECULATIVE_TOKENS)


def _wrong_values(given: Mapping[str, Any]) -> list[str]:
    method: str = given["method"]
    reasons = []
    if "num_speculative_tokens" not in given and method not in ("mtp", "eagle3"):
        reasons.append(f"num_speculative_tokens is missing; {method} needs 1 to {MAX_SPECULATIVE_TOKENS}")
    ranges: dict[str, tuple[float, float]] = {
        "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
        "prompt_lookup_min": (1, MAX_PROMPT_LOOKUP),
        "prompt_lookup_max": (1, MAX_PROMPT_LOOKUP),
        "suffix_decoding_max_tree_depth": (3, MAX_TREE_DEPTH),
        "suffix_decoding_max_cached_requests": (0, 10**6),
        "suffix_decoding_max_spec_factor": (0, 1000),
        "suffix_decoding_min_token_prob": (0, 1),
        "draft_tensor_parallel_size": (1, 1024),
    }
    for name, (low, high) in ranges.items():
        if name in given and not low <= given[name] <= high:
            reasons.append(f"{name}={given[name]}; allowed: {low} to {high}")
    heads = get_args(DraftHeadDtype)
    if given.get("draft_head_dtype", "auto") not in heads:
        reasons.append(f"draft_head_dtype={given['draft_head_dtype']!r}; allowed: {', '.join(heads)}")
    if given.get("prompt_lookup_min", 0) > given.get("prompt_lookup_max", 0):
        reasons.append(
            f"prompt_lookup_min={given['prompt_lookup_min']} is more than "
            f"prompt_lookup_max={given['prompt_lookup_max']}"
        )
    if method in ("eagle3", "draft_model") and not given.get("model"):
        reasons.append(f"model is missing; {method} needs the directory or hub id of its weights")
    return reasons + _wrong_sampling(given)


def _without_effect(given: Mapping[str, Any]) -> list[str]:
    """Keys that the method does not read."""
    method: str = given["method"]
    unread = [name for name in given if name.startswith("suffix_decoding_") and method != "suffix"]
    unread += [name for name in given if name.startswith("prompt_lookup_") and method != "ngram"]
    unread += [name for name in ("draft_head_dtype",) if name in given and method not in ("mtp", "eagle3")]
    if method in ("ngram", "suffix"):
        own_name = given.get("model") in (method, f"[{method}]")
        unread += [name for name in ("model",) if name in given and not own_name]
        unread += [name for name in ("draft_tensor_parallel_size",) if name in given]
    return [f"{name}: method={method!r} does not read it; leave it out" for name in unread]


def _wrong_sampling(given: Mapping[str, Any]) -> list[str]:
    sampling = given.get("rejection_sample_method", "standard")
    allowed = get_args(RejectionSampleMethod)
    if sampling not in allowed:
        advice = _REFUSED_SAMPLING.get(sampling, f"allowed: {', '.join(allowed)}")
        return [f"rejection_sample_method={sampling!r}; {advice}"]
    rates, length = given.get("synthetic_acceptance_rates"), given.get("synthetic_acceptance_length")
    if sampling != "synthetic":
        named = [name for name in ("synthetic_acceptance_rates", "synthetic_acceptance_length") if name in given]
        return [f"{name} needs rejection_sample_method='synthetic'" for name in named]
    if (rates is None) == (length is None):
        return [
            "rejection_sample_method='synthetic' needs one of synthetic_acceptance_length and "
            "synthetic_acceptance_rates"
        ]
    count = given.get("num_speculative_tokens")
    if count is None:
        return ["rejection_sample_method='synthetic' needs num_speculative_tokens"]
    if length is not None:
        fits = 1 <= length <= count + 1
        return [] if fits else [f"synthetic_acceptance_length={length}; allowed: 1 to {count + 1}"]
    assert rates is not None
    return _wrong_rates(list(rates), count)


def _wrong_rates(rates: list[float], count: int) -> list[str]:
    reasons = []
    if len(rates) != count:
        reasons.append(
            f"synthetic_acceptance_rates has {len(rates)} entries; num_speculative_tokens={count} needs as many"
        )
    if not all(0 <= rate <= 1 for rate in rates):
        reasons.append(f"synthetic_acceptance_rates={rates}; allowed: 0 to 1 each")
    if any(later > former for former, later in itertools.pairwise(rates)):
        reasons.append(f"synthetic_acceptance_rates={rates} rise; each is at most the one before it")
    return reasons
