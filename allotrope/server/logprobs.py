"""Writes tokens and their log-probabilities as JSON.

Chat completions, text completions and prompt log-probabilities have a form each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allotrope.request import TokenLogprobs
from allotrope.server.generation import Generation, TokenScore

if TYPE_CHECKING:
    from allotrope.text.tokenizer import Tokenizer

Json = dict[str, Any]

# JSON has no -inf, so the lowest log-probability stands for it.
_MIN_LOGPROB = -9999.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The parts of an answer beside its text.

    `logprobs`: number of alternatives to report at each position (None: no log-probabilities). `prompt_logprobs`: the
    same for the prompt. `token_ids`: report token ids. `ids_as_tokens`: write tokens as 'token_id:7'. `usage`: a stream
    ends with the usage. `usage_always`: every chunk has the usage.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    ids_as_tokens: bool = False
    usage: bool = False
    usage_always: bool = False


class TokenWriter:
    """Writes tokens in the forms of the API."""

    def __init__(self, tokenizer: Tokenizer, report: Report) -> None:
        self._tokenizer = tokenizer
        self._report = report

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._report.ids_as_tokens else self._tokenizer.token_text(token)

    def chat_logprobs(self, tokens: Sequence[TokenScore]) -> Json:
        return {"content": [self._chat_entry(token) for token in tokens], "refusal": None}

    def _chat_entry(self, token: TokenScore) -> Json:
        scores = token.logprobs
        if scores is None:
            raise RuntimeError(f"token {token.id} came without the log-probabilities that were asked for")
        top = [self._chat_token(*pair) for pair in scores.top[: self._report.logprobs]]
        return {**self._chat_token(token.id, scores.logprob), "top_logprobs": top}

    def _chat_token(self, token: int, logprob: float) -> Json:
        bytes_ = list(self._tokenizer.token_bytes(token))
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": bytes_}

    def legacy_logprobs(self, tokens: Sequence[TokenScore]) -> Json:
        return {
            "tokens": [self.text(token.id) for token in tokens],
            "token_logprobs": [None if t.logprobs is None else _finite(t.logprobs.logprob) for t in tokens],
            "top_logprobs": [None if t.logprobs is None else self._legacy_top(t.logprobs) for t in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _legacy_top(self, scores: TokenLogprobs) -> dict[str, float]:
        top = {self.text(token): _finite(logprob) for token, logprob in scores.top[: self._report.logprobs]}
        return {**top, self.text(scores.token_id): _finite(scores.logprob)}

    def prompt_logprobs(self, generation: Generation) -> list[Json | None] | None:
        count = self._report.prompt_logprobs
        if count is None or generation.prompt_logprobs is None:
            return None
        return [None if scores is None else self._prompt_entry(scores, count) for scores in generation.prompt_logprobs]

    def _prompt_entry(self, scores: TokenLogprobs, count: int) -> Json:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(scores.top[:count], start=1)]
        listed = {token: (logprob, rank) for token, logprob, rank in ranked}
        listed[scores.token_id] = (scores.logprob, scores.rank)
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text(token)}
            for token, (logprob, rank) in listed.items()
        }


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
