"""An SGLang with the plugin in processes of its own, as `bench.accuracy.ask` asks it.

Chunks of text are prompts, whose losses are SGLang's logprobs of input tokens: it has no way to decode given tokens. So
text is never preempted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from allotrope.architectures.registry import read_spec
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.eval.items import TextChunks
from allotrope.eval.options import ModeName
from allotrope.plugins.sglang.memory import CacheMemory, planned_layouts
from allotrope.text.tokenizer import Tokenizer
from allotrope.verify.execution_modes import NotExercised
from bench.accuracy.ask import CHUNK, TIGHT, Generated, Host, NotOurs, Running, T

# Tokens that a request may have beside its prompt and its answer.
_SPARE = 16
# Of the mode `preempted`: SGLang retracts a request every so many steps, whether memory is short or not.
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


def settings(model: str, mode: ModeName) -> tuple[dict[str, Any], ...]:
    """Options of SGLang's engine in a mode; each is tried until one exercises it."""
    checkpoint = open_checkpoint(model, load_format="dummy")
    _, spec = read_spec(checkpoint.config, checkpoint.source)
    memory = CacheMemory(planned_layouts(spec, checkpoint.source))
    cold, chunk = {"disable_radix_cache": True}, math.lcm(CHUNK, memory.row_stride)
    small = cold | {"chunked_prefill_size": chunk, "max_running_requests": TIGHT}
    found: dict[ModeName, tuple[dict[str, Any], ...]] = {
        "cold": (cold,),
        "warm": ({"disable_radix_cache": False},),
        "chunked": (small,),
        "preempted": (small,),
        "two-ranks": (cold | {"tp_size": 2},),
    }
    return found[mode]


class RunningSglang(Running):
    """SGLang's engine, whose scheduler and ranks are processes of their own."""

    def __init__(self, model: str, options: dict[str, Any], tokenizer: Tokenizer, longest: int) -> None:
        import sglang
        from sglang.srt.entrypoints.engine import Engine

        self.tokenizer = tokenizer
        self.engine = Engine(model_path=model, **({"context_length": longest + _SPARE} | options))
        info = self.engine.get_server_info()
        # This backend runs no other model.
        if info["attention_backend"] != "allotrope":
            raise NotOurs("SGLang runs a model of its own, not the plugin's: is allotrope installed beside SGLang?")
        ranks = info["tp_size"]
        model_words = f"{info['dtype']} with {info['kv_cache_dtype']} caches{f', {ranks} ranks' if ranks > 1 else ''}"
        self.host = Host(f"SGLang {sglang.__version__}", model_words, ())
        self._retractions = 0
        self._newlines = tokens_with(tokenizer, b"\n")

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Generated]:
        params = [{"temperature": 0, "max_new_tokens": most, "stop_token_ids": self._newlines} for most in max_tokens]
        found = []
        for output in self._generate(prompts, params):
            ids, reason = list(output["output_ids"]), output["meta_info"]["finish_reason"]
            ended = reason["type"] == "stop" and not set(ids[-1:]).intersection(self._newlines)
            found.append(Generated(ids, ended, output["meta_info"]["cached_tokens"]))
        return found

    def losses(self, text: TextChunks, first: int | None) -> tuple[tuple[tuple[float, ...], ...], int]:
        prompts = [[*chunk.prompt, *chunk.forced] for chunk in text.chunks]
        params = [{"temperature": 0, "max_new_tokens": 1}] * len(prompts)
        # SGLang computes all tokens from here on, cached or not.
        start = 0 if first is None else first - 1
        losses, cached = [], 0
        for prompt, output in zip(prompts, self._generate(prompts, params, start), strict=True):
            found = output["meta_info"]["input_token_logprobs"]
            count = len(prompt) - max(start + 1, 1)
            if [token for _, token, *_ in found[-count:]] != prompt[-count:]:
                raise RuntimeError("SGLang's logprobs are not those of the tokens that it was given")
            losses.append((*[math.nan] * (len(prompt) - count), *(_loss(one[0]) for one in found[-count:])))
            cached += output["meta_info"]["cached_tokens"]
        return tuple(losses), cached

    def squeezed(self, run: Callable[[], T]) -> tuple[T, str]:
        before = self._retractions
        found = run()
        if self._retractions == before:
            raise NotExercised("no request was retracted: SGLang retracts requests that decode, and no others")
        return found, f"{self._retractions - before} retractions"

    def close(self) -> None:
        self.engine.shutdown()

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: list[dict[str, Any]], start: int | None = None
    ) -> list[dict[str, Any]]:
        """`start`: first token whose logprob is wanted; None: no logprobs."""
        ids = [list(prompt) for prompt in prompts]
        wanted = {} if start is None else {"return_logprob": True, "logprob_start_len": start}
        outputs: list[dict[str, Any]] = self.engine.generate(input_ids=ids, sampling_params=params, **wanted)
        self._retractions += sum(output["meta_info"]["num_retractions"] for output in outputs)
        return outputs


def tokens_with(tokenizer: Tokenizer, part: bytes) -> list[int]:
    """All tokens of text that have `part` in it. SGLang knows stop tokens alone, where no tokenizer is given to it."""
    texts = (token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids)
    return [token for token in texts if part in tokenizer.token_bytes(token)]


def _loss(logprob: float) -> float:
    """NaN says that a token was not computed, so a model's own becomes infinity."""
    return math.inf if math.isnan(logprob) else -logprob
