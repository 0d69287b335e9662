"""Requests to the engine and their outputs, as plain data.

These types cross the process border between server and engine, so they hold integers, floats and strings only: never a
tensor, a tokenizer or text that the engine would have to interpret.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from allotrope.errors import InvalidRequest
from allotrope.field_types import field_types

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "structural_tag"]

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
# Logits are divided by the penalty, and overflow if it is far smaller.
MIN_REPETITION_PENALTY = 0.01
# Characters of a grammar's source, and of the text that opens it.
MAX_GRAMMAR_LENGTH = 1 << 20
MAX_AFTER_LENGTH = 256


@dataclass(frozen=True)
class Grammar:
    """What an output has to be.

    `source`: by `kind`, JSON text of a schema, nothing (`json_object`), a regular expression, a JSON list of texts, a
    Lark grammar, or JSON text of a structural tag. `after`: text of the output behind which the grammar holds, such as
    the end of reasoning; None: it holds from the start. `before`: with `after`, the token that an output begins with
    which has that text; another one is held from the start. `param`: the request's field that brought it, for refusals.
    """

    kind: GrammarKind
    source: str = ""
    after: str | None = None
    before: str | None = None
    param: str = field(default="grammar", compare=False)

    def check(self) -> None:
        """Raise `InvalidRequest` for a kind that there is not, and for texts that are empty or too long."""
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise InvalidRequest(f"grammar.kind={self.kind!r} is not known; allowed: {kinds}.", self.param)
        for name, text in (("source", self.source), ("after", self.after)):
            if not isinstance(text, str) and (name, text) != ("after", None):
                raise InvalidRequest(f"grammar.{name}={reprlib.repr(text)}; a text is needed.", self.param)
        if not self.source and self.kind not in ("json_object", "regex"):
            raise InvalidRequest(f"{self.param} is an empty {self.kind}.", self.param)
        if len(self.source) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(
                f"{self.param} has {len(self.source)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed.", self.param
            )
        if self.after is not None and not 0 < len(self.after) <= MAX_AFTER_LENGTH:
            raise InvalidRequest(
                f"grammar.after has {len(self.after)} characters; allowed: 1 to {MAX_AFTER_LENGTH}.", self.param
            )


NOTHING_ALLOWED = "allowed_token_ids has no token with which the grammar can go on."
"""The error of a sequence that the client's own limits leave no token."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. `temperature` 0 is greedy.

    These values disable a parameter: `top_p` 1, `top_k` 0, `min_p` 0, penalties 0 (repetition 1), `max_tokens` None
    (only the context limits the answer).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def fitted(self, prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """These parameters with `max_tokens` lowered to the space in the context, for a default that no client set.

        `prompt_tokens`: length of the prompt. `max_model_len`: context of the model. `max_tokens` stays at least
        `min_tokens`.
        """
        if self.max_tokens is None:
            return self
        room = min(self.max_tokens, max_model_len - prompt_tokens)
        return replace(self, max_tokens=max(room, self.min_tokens, 1))

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` naming the first field that is not of its type or out of its range.

        `vocab_size`: number of ids that the model's output layer scores.
        """
        for name, (takes, needs) in _FIELD_TYPES.items():
            value = getattr(self, name)
            if not takes(value):
                raise InvalidRequest(f"{name}={reprlib.repr(value)}; {needs}.", name)
        _in_range("n", self.n, 1, 128)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -MAX_SEED, MAX_SEED)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}.", "min_tokens"
            )
        if len(self.stop) > 16:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most 16 are allowed.", "stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not contain an empty string.", "stop")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _in_range(name, count, 0, MAX_LOGPROBS)
        _in_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        _in_vocabulary("logit_bias", tuple(self.logit_bias), vocab_size)
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(f"logit_bias of token {token} is {bias}; allowed: -100 to 100.", "logit_bias")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: no token could be chosen.", "allowed_token_ids")
            _in_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if self.grammar is not None:
            self.grammar.check()


# Lists travel as tuples do.
_FIELD_TYPES = field_types(SamplingParams, lists=True)


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    below = value <= low if open_low else value < low
    if math.isnan(value) or below or value > high:
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name}={value} is out of range; allowed: {bracket}{low}, {high}].", name)


def _in_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name} has token id {token}; the vocabulary has ids 0 to {vocab_size - 1}.", name)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and its sampling parameters. The engine answers with `params.n` sequences.

    `request_id`: unique among live requests. `prompt_ids`: token ids of the prompt, at least one.
    `eos_ids`: ids that end a sequence unless `params.ignore_eos`. `arrival`: seconds (time.monotonic).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    arrival: float = 0.0

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Raise `InvalidRequest` if a model with these limits can never run this request."""
        if not self.prompt_ids:
            raise InvalidRequest("the prompt is empty; at least one token is needed.", "prompt")
        if len(self.prompt_ids) >= max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(self.prompt_ids)} tokens; this model's context is {max_model_len} tokens "
                f"(--max-model-len), of which at least one must be left to generate.",
                "prompt",
            )
        _in_vocabulary("prompt", self.prompt_ids, vocab_size)
        self.params.check(vocab_size)
        self._check_choice(vocab_size)
        if len(self.prompt_ids) + self.params.min_tokens > max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(self.prompt_ids)} tokens and min_tokens is {self.params.min_tokens}; together "
                f"they exceed the context of {max_model_len} tokens.",
                "min_tokens",
            )
        max_tokens = self.params.max_tokens
        if max_tokens is not None and len(self.prompt_ids) + max_tokens > max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(self.prompt_ids)} tokens and max_tokens is {max_tokens}; together they exceed "
                f"the context of {max_model_len} tokens. Ask for at most {max_model_len - len(self.prompt_ids)}.",
                "max_tokens",
            )

    def _check_choice(self, vocab_size: int) -> None:
        """Refuse a request whose allowed tokens all end the sequence: before `min_tokens`, none may be chosen."""
        params = self.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}
        allowed = params.allowed_token_ids
        if params.min_tokens and (len(ends) >= vocab_size if allowed is None else ends.issuperset(allowed)):
            raise InvalidRequest(
                f"min_tokens={params.min_tokens} leaves no token to choose: every allowed id ends the sequence. "
                f"Widen allowed_token_ids or shorten stop_token_ids.",
                "min_tokens",
            )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's raw distribution (before temperature and penalties).

    `logprob` and `rank` (1 = most likely) belong to `token_id`. `top`: the most likely (id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceOutput:
    """The tokens that one step adds to sequence `index` (0 to n-1) of a request.

    `token_ids`: new ids, possibly none. `logprobs`: one entry per new id, if requested. `cached_tokens`: number of
    prompt tokens read from the prefix cache. `stop_reason`: the stop id that ended the sequence, if one did. `error`:
    the reason of `finish_reason` "error". `num_draft_tokens`: drafts that the step verified for the sequence.
    `num_accepted_tokens`: how many of them are among `token_ids`.
    The first output alone has these: `prompt_logprobs` (its first entry is None, as nothing precedes the first token),
    `cache_lost` (number of prompt tokens that were cached once and are computed again, by reason), and `queued_seconds`
    (from arrival to the first step).
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    cache_lost: dict[str, int] = field(default_factory=dict)
    queued_seconds: float = 0.0
    error: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
