"""How a command's answers are sampled: the flags that `generate` and `chat` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allotrope.config import option
from allotrope.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Choice of the next token, and when to end. `--seed` of the engine seeds these too."""

    temperature: float = option("Randomness; 0 always takes the likeliest token.", 0.0)
    top_p: float = option("Keep the likeliest tokens that together reach this probability.", 1.0)
    top_k: int = option("Keep this many of the likeliest tokens; 0 keeps all.", 0)
    min_p: float = option("Keep tokens at least this likely, relative to the likeliest.", 0.0)
    repetition_penalty: float = option("Above 1: tokens seen before become less likely.", 1.0)
    max_tokens: int = option("Most tokens to generate.", 512)
    stop: list[str] | None = option("End before this text; may be given several times.", None)

    def as_params(self) -> SamplingParams:
        """The same for the engine."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
        )

    def as_request_fields(self) -> dict[str, Any]:
        """The same for a server: OpenAI's fields, and the extensions only where they are in use."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }
        if self.stop:
            fields["stop"] = self.stop
        for name, off in (("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if getattr(self, name) != off:
                fields[name] = getattr(self, name)
        return fields
