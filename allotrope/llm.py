"""Offline generation in the calling process: `LLM(model).generate(prompts)`. Needs no server package."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
import torch

from allotrope.checkpoint.checkpoint import Checkpoint, tokenizer_path
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.frozen_heap import frozen_heap
from allotrope.engine.sampling_defaults import Defaults, describe_defaults
from allotrope.errors import AllotropeError, InvalidRequest, RequestsFailed
from allotrope.request import NOTHING_ALLOWED, FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from allotrope.text.stream import TextStream
from allotrope.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("allotrope.llm")

Prompt = str | Sequence[int] | np.ndarray | torch.Tensor | Mapping[str, Any]

# Preferred max_num_batched_tokens on a GPU. It is twice the server's value, because no client waits for a next token.
_STEP_TOKENS = 16384


@dataclass
class Completion:
    """One continuation. `logprobs`: one entry per token, if requested.

    `num_draft_tokens`, `num_accepted_tokens`: drafts of speculative decoding that were verified, and those accepted.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class RequestOutput:
    """A prompt and its `params.n` continuations. `cached_tokens`: prompt tokens read from the prefix cache."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0


class LLM:
    """A loaded model that generates in this process. Its options are the fields of `EngineConfig`."""

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        """Load `model`. `speculative_config` and `hf_overrides` may be mappings, too, and paths need not be text.

        Raises ConfigError or ModelError with every reason if it cannot be loaded.
        """
        self.config = EngineConfig(**{"model": model, **options})
        self.engine = Engine(self.config, preferred_tokens=_STEP_TOKENS)
        self._tokenizer: Tokenizer | None = None
        self._count = 0
        self._logged_defaults = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError if it has none; prompts of token ids need none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(tokenizer_path(self.config, self.engine.checkpoint))
        return self._tokenizer

    @property
    def sampling_defaults(self) -> Defaults:
        """Fields of `SamplingParams` that the checkpoint's generation_config.json sets. The first access logs them."""
        defaults = self.engine.limits.sampling_defaults
        if defaults and not self._logged_defaults:
            self._logged_defaults = True
            log.warning("%s", describe_defaults(defaults))
        return defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls that pass none: `SamplingParams()` with the values of generation_config.json."""
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, token ids, or as vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`.

        `params`: for all prompts, or one for each; default: `get_default_sampling_params()`. Returns one output per
        prompt, in order. Raises InvalidRequest before the first step if a prompt or its parameters cannot be served,
        and RequestsFailed with the outputs of the others once these are done if some of several prompts failed.
        """
        batch = _read_prompts(prompts)
        sampling = self.get_default_sampling_params() if params is None else params
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(batch)
        if len(each) != len(batch):
            raise InvalidRequest(f"{len(each)} sampling parameters were given for {len(batch)} prompts.", "params")
        requests = [self._request(prompt, own, fit=params is None) for prompt, own in zip(batch, each, strict=True)]
        return self._run(requests, continues_text=True)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template: Any
    ) -> RequestOutput:
        """Answer a conversation that the model's chat template renders. `template`: variables of the template.

        `params`: default: `get_default_sampling_params()`. If generation_config.json sets no length, the context
        limits the default's answer.
        """
        ids = self.tokenizer.apply_chat_template([dict(message) for message in messages], **template)
        sampling = params
        if sampling is None:
            sampling = SamplingParams(**{"max_tokens": None, **self.sampling_defaults})  # type: ignore[arg-type]
        request = self._request(ids, sampling, fit=params is None)
        return self._run([request], continues_text=False)[0]

    def close(self) -> None:
        """Free the model and its memory."""
        self.engine.close()

    def _request(self, prompt: str | Sequence[int], params: SamplingParams, *, fit: bool) -> Request:
        """`fit`: lower `max_tokens` to the space that the prompt leaves in the context."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"params has {reprlib.repr(params)}; SamplingParams for all prompts, or a list of one for each, are "
                f"needed.",
                "params",
            )
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if fit:
            params = params.fitted(len(ids), self.engine.limits.max_model_len)
        tokenizer = self._text()
        eos_ids = tuple(dict.fromkeys((*self.engine.limits.eos_ids, *(tokenizer.eos_ids if tokenizer else ()))))
        self._count += 1
        request = Request(request_id=f"offline-{self._count}", prompt_ids=tuple(ids), params=params, eos_ids=eos_ids)
        self.engine.check(request)
        if params.grammar is not None:
            self.engine.compile_grammar(params.grammar).result()
        return request

    def _run(self, requests: Sequence[Request], *, continues_text: bool) -> list[RequestOutput]:
        """`continues_text`: the answer continues the prompt's text; a chat answer starts a text of its own."""
        accumulators = {
            request.request_id: Accumulator(request, self._text(), continues_text=continues_text)
            for request in requests
        }
        with frozen_heap():
            failed = self._accumulate(requests, accumulators)
        if not failed:
            return [one.output for one in accumulators.values()]
        first = next(failed[name] for name in accumulators if name in failed)
        if len(requests) == 1:
            raise first
        raise RequestsFailed(
            f"{len(failed)} of {len(requests)} requests failed, the first of them as: {first}",
            [None if name in failed else one.output for name, one in accumulators.items()],
        ) from first

    def _accumulate(
        self, requests: Sequence[Request], accumulators: Mapping[str, Accumulator]
    ) -> dict[str, AllotropeError]:
        """Run the requests to their ends. `accumulators`: of each, by its id. Returns the errors of those that failed,
        by their ids."""
        waiting = list(requests)
        live, failed = set(accumulators), dict[str, AllotropeError]()
        try:
            while live:
                while waiting and self._has_room_for(waiting[0]):
                    self.engine.add(waiting.pop(0))
                for output in self.engine.step():
                    if output.request_id in failed:
                        continue
                    accumulator = accumulators[output.request_id]
                    try:
                        accumulator.take(output)
                    except AllotropeError as error:
                        # Its other sequences end with it; other requests go on.
                        failed[output.request_id] = error
                        live.discard(output.request_id)
                        self.engine.abort([output.request_id])
                        continue
                    if output.finish_reason is None and accumulator.ended(output.index):
                        # A stop string ended this sequence. The engine matches stop ids only, so it is told to abort
                        # it; the other sequences continue.
                        self.engine.abort_sequence(output.request_id, output.index)
                    if accumulator.ended(output.index) and accumulator.finished:
                        live.discard(output.request_id)
        except BaseException:
            # After any error or interrupt, the engine drops the requests whose outputs nobody reads.
            self.engine.abort(list(live))
            raise
        return failed

    def _has_room_for(self, request: Request) -> bool:
        """Whether the engine's queue has room for `request`. An empty queue passes every request to the engine, which
        refuses one that is larger than the queue.
        """
        queued = self.engine.num_waiting
        max_queued = self.config.max_num_waiting - request.params.n
        return queued == 0 or (queued < self.engine.limits.max_num_seqs and queued <= max_queued)

    def _text(self) -> Tokenizer | None:
        return self.tokenizer if _has_tokenizer(self.config, self.engine.checkpoint) else None


def _has_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    return config.tokenizer is not None or checkpoint.tokenizer_path is not None


class Accumulator:
    """Accumulates the outputs of one request."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, *, continues_text: bool) -> None:
        params = request.params
        if params.stop and tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and this model brings none.", "stop")
        self.output = RequestOutput(list(request.prompt_ids), [Completion(i) for i in range(params.n)])
        if params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs = []
        self._shows_stop = params.include_stop_str_in_output
        self._streams: list[TextStream] | None = None
        if tokenizer is not None:
            self._streams = [TextStream(tokenizer, params, continues_text=continues_text) for _ in range(params.n)]

    def ended(self, index: int) -> bool:
        return self.output.outputs[index].finish_reason is not None

    @property
    def finished(self) -> bool:
        return all(self.ended(index) for index in range(len(self.output.outputs)))

    def take(self, output: SequenceOutput) -> None:
        completion = self.output.outputs[output.index]
        if completion.finish_reason is not None:
            return
        if output.error == NOTHING_ALLOWED:
            raise InvalidRequest(NOTHING_ALLOWED, "allowed_token_ids")
        if output.error is not None:
            raise AllotropeError(f"request {output.request_id} failed: {output.error}.")
        self.output.cached_tokens = max(self.output.cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            self.output.prompt_logprobs = list(output.prompt_logprobs)
        completion.token_ids.extend(output.token_ids)
        if completion.logprobs is not None:
            completion.logprobs.extend(output.logprobs or ())
        completion.num_draft_tokens += output.num_draft_tokens
        completion.num_accepted_tokens += output.num_accepted_tokens
        completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
        if self._streams is None:
            return
        stream = self._streams[output.index]
        ids = output.token_ids
        if output.finish_reason == "stop" and not self._shows_stop:
            # The engine stops at stop ids only, so the last token is one, and its text is left out.
            ids = ids[:-1]
        completion.text += stream.push(ids, final=output.finish_reason is not None)
        if stream.stopped_by is not None:
            completion.finish_reason, completion.stop_reason = "stop", stream.stopped_by
            # A step may have added tokens behind the stop string. Accepted drafts come before its sampled token.
            behind = len(completion.token_ids) - stream.used_tokens
            sampled = len(output.token_ids) - output.num_accepted_tokens
            completion.num_accepted_tokens -= max(0, min(behind - sampled, output.num_accepted_tokens))
            del completion.token_ids[stream.used_tokens :]
            if completion.logprobs is not None:
                del completion.logprobs[stream.used_tokens :]


def _read_prompts(prompts: Any) -> list[str | tuple[int, ...]]:
    """One prompt, or several in any sequence, as texts and token ids."""
    values = _as_list(prompts)
    if isinstance(prompts, str | Mapping) or (values and _is_number(values[0])):
        return [_read_prompt(prompts, "prompt")]
    if values is None:
        raise InvalidRequest(f"prompts={reprlib.repr(prompts)}; a prompt or a list of prompts is needed.", "prompt")
    return [_read_prompt(one, f"prompts[{index}]") for index, one in enumerate(values)]


def _read_prompt(prompt: Any, name: str) -> str | tuple[int, ...]:
    """`name`: what a refusal calls the prompt."""
    given = prompt
    if isinstance(prompt, Mapping) and len(prompt) == 1:
        ((key, value),) = prompt.items()
        # A text under the key of ids, and ids under that of a text, are neither.
        if (key, isinstance(value, str)) in (("prompt", True), ("prompt_token_ids", False)):
            given = value
    if isinstance(given, str):
        return given
    values = _as_list(given)
    if values is not None and bool not in set(map(type, values)):
        with contextlib.suppress(TypeError):
            return tuple(map(operator.index, values))
    raise InvalidRequest(
        f"{name}={reprlib.repr(prompt)}; a text or a list of token ids, which are whole numbers, is needed, or one of "
        f'them as {{"prompt": text}} or {{"prompt_token_ids": ids}}.',
        "prompt",
    )


def _as_list(value: Any) -> list[Any] | None:
    """The items of a sequence or an array; None for anything else, and for bytes, which are neither text nor ids."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist() if value.ndim else None
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    return list(value) if hasattr(value, "__len__") and hasattr(value, "__getitem__") else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.ndim == 0)
