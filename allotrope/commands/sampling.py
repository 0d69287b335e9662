"""Sampling flags that `generate` and `chat` share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from allotrope.config import option
from allotrope.engine.sampling_defaults import Defaults
from allotrope.request import SamplingParams

_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 512}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling options. `--seed` of the engine seeds the sampling too.

    The checkpoint's `generation_config.json`, or the server, gives the values that are left out. Without one, sampling
    is greedy.
    """

    temperature: float | None = option(
        "Randomness; 0 always takes the likeliest token; default: the model's own, else 0.", None
    )
    top_p: float | None = option("Keep the likeliest tokens that together reach this probability.", None)
    top_k: int | None = option("Keep this many of the likeliest tokens; 0 keeps all.", None)
    min_p: float | None = option("Keep tokens at least this likely, relative to the likeliest.", None)
    repetition_penalty: float | None = option("Above 1: tokens seen before become less likely.", None)
    max_tokens: int | None = option("Most tokens to generate; default: the model's own, else 512.", None)
    stop: list[str] | None = option("End before this text; may be given several times.", None)

    def as_params(self, defaults: Defaults, prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """These options as `SamplingParams`.

        `defaults`: sampling defaults of the checkpoint. A default `max_tokens` is lowered to the space that
        `prompt_tokens` leave in `max_model_len`.
        """
        values = {**_DEFAULTS, **defaults, **self._set_options()}
        params = SamplingParams(**values, stop=tuple(self.stop or ()))
        return params if self.max_tokens is not None else params.fitted(prompt_tokens, max_model_len)

    def as_request_fields(self, set_by_server: Collection[str] = ()) -> dict[str, Any]:
        """These options as fields of a request. The defaults of `set_by_server` are left to the server."""
        ours = {name: value for name, value in _DEFAULTS.items() if name not in set_by_server}
        fields = {**ours, **self._set_options()}
        return {**fields, "stop": self.stop} if self.stop else fields

    def _set_options(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
