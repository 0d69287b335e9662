"""A vLLM with the plugin in this process, as `bench.accuracy.ask` asks it.

Text: where a prompt is computed in any case, a chunk's prompt has its losses from prompt logprobs and its last tokens
are decoded; in the modes `warm` and `preempted`, where prompt logprobs would lack cached or recomputed tokens, all
tokens of its second half are decoded. Decoded tokens are those of the chunk, whatever vLLM would choose.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from allotrope.errors import ConfigError
from allotrope.eval.items import TextChunks
from allotrope.eval.options import ModeName
from allotrope.text.tokenizer import Tokenizer
from allotrope.verify.execution_modes import NotExercised
from bench.accuracy.ask import CHUNK, TIGHT, Generated, Host, NotOurs, Running, T

# Named, because its module is vLLM's.
FORCED_TOKENS = "bench.accuracy.forced_tokens:ForcedTokensProcessor"
# Blocks that the longest request may have beside its own; each is tried until requests preempt each other.
_SPARE = (2, 0)

_COLD: dict[str, Any] = {"enable_prefix_caching": False}
_SMALL: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": TIGHT}

SETTINGS: dict[ModeName, tuple[dict[str, Any], ...]] = {
    "cold": (_COLD,),
    # Prefixes are shared in whole blocks, which are short where they are asked for.
    "warm": ({"enable_prefix_caching": True}, {"enable_prefix_caching": True, "block_size": 16}),
    "chunked": (_COLD | _SMALL,),
    # A prompt that fits into memory now, and not with its answer, may begin.
    "preempted": (_COLD | _SMALL | {"block_size": 16, "scheduler_reserve_full_isl": False},),
    "two-ranks": (_COLD | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},),
}
"""Options of vLLM in a mode; each is tried until one exercises it."""


class RunningVllm(Running):
    """A vLLM in this process, but for its ranks."""

    def __init__(self, model: str, options: dict[str, Any], tokenizer: Tokenizer, longest: int) -> None:
        import vllm
        from vllm.engine.arg_utils import EngineArgs

        # Of some versions alone.
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        options = {key: value for key, value in options.items() if key != "scheduler_reserve_full_isl" or key in known}
        self.llm = vllm.LLM(model, **({"max_model_len": longest} | options))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.tokenizer = tokenizer
        self.state_dtype = options.get("mamba_ssm_cache_dtype", "auto")
        self.host = self._host(vllm.__version__)

    def _host(self, version: str) -> Host:
        ranks = self.llm.collective_rpc(describe_model)
        for one in ranks:
            if not one["module"].startswith("allotrope."):
                raise NotOurs(
                    f"vLLM runs a model of {one['module']}, not the plugin's: is allotrope installed beside vLLM?"
                )
        first, asked = ranks[0], self.state_dtype
        if asked not in ("auto", first["states"]):
            raise ConfigError(f"mamba_ssm_cache_dtype={asked!r}: vLLM has set {first['states']} on this platform.")
        model = f"{first['types']}{f', {len(ranks)} ranks' if len(ranks) > 1 else ''}"
        return Host(f"vLLM {version} ({first['runner']})", model, first["backends"])

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[Generated]:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=most, stop=["\n"]) for most in max_tokens]
        found = []
        for output in self._generate(prompts, params):
            one = output.outputs[0]
            ended = one.finish_reason == "stop" and not isinstance(one.stop_reason, str)
            found.append(Generated(list(one.token_ids), ended, output.num_cached_tokens or 0))
        return found

    def losses(self, text: TextChunks, first: int | None) -> tuple[tuple[tuple[float, ...], ...], int]:
        """With `first`, tokens from there on are decoded and have losses; else the chunk's forced tokens are decoded,
        and the prompt has losses as well."""
        from vllm import SamplingParams

        prompts, forced, params = [], [], []
        for chunk in text.chunks:
            ids, start = [*chunk.prompt, *chunk.forced], len(chunk.prompt) if first is None else first
            prompts.append(ids[:start])
            forced.append(ids[start:])
            params.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=len(ids) - start,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0,
                    prompt_logprobs=0 if first is None else None,
                    extra_args={"forced": ids[start:], "after": start},
                )
            )
        losses, cached = [], 0
        for prompt, tokens, output in zip(prompts, forced, self._generate(prompts, params), strict=True):
            answer = output.outputs[0]
            if list(answer.token_ids) != tokens:
                raise RuntimeError(f"vLLM decoded {answer.token_ids[:4]} … where {tokens[:4]} … were forced")
            decoded = _losses_of(answer.logprobs, tokens)
            before: list[float] = [math.nan] * len(prompt)
            if first is None:
                before[1:] = _losses_of(output.prompt_logprobs[1:], prompt[1:])
            losses.append((*before, *decoded))
            cached += output.num_cached_tokens or 0
        return tuple(losses), cached

    def close(self) -> None:
        """Free the model, its memory and its ranks."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm, self.core
        gc.collect()
        cleanup_dist_env_and_memory()

    def _generate(self, prompts: Sequence[Sequence[int]], params: list[Any]) -> list[Any]:
        given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return list(self.llm.generate(given, params, use_tqdm=False))

    def squeezed(self, run: Callable[[], T]) -> tuple[T, str]:
        for spare in _SPARE:
            before = self._preemptions()
            with self._memory_for_one(spare):
                found = run()
            if preemptions := self._preemptions() - before:
                return found, f"{preemptions} preemptions"
        raise NotExercised("no sequence was preempted: what this model keeps of a prompt does not grow enough")

    def _preemptions(self) -> int:
        return int(sum(one.value for one in self.llm.get_metrics() if one.name == "vllm:num_preemptions"))

    @contextmanager
    def _memory_for_one(self, spare: int) -> Iterator[None]:
        """All blocks but those of the longest request and `spare` ones are held."""
        scheduler, config = self.core.scheduler, self.llm.llm_engine.vllm_config
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        needed = sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs)
        pool = scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - needed - spare))
        try:
            yield
        finally:
            pool.free_blocks(held)


def describe_model(worker: Any) -> dict[str, Any]:
    """Of a rank: "module", that of its model's class; and of our models "types" in words, the type of "states", the
    "backends", and the "runner" of vLLM, of which there are two."""
    model = worker.get_model()
    found: dict[str, Any] = {"module": type(model).__module__}
    if not found["module"].startswith("allotrope."):
        return found
    from allotrope.layers.backend_report import choice_reports

    build = model.build
    kinds = [str(kind).removeprefix("torch.") for kind in (build.dtype, build.kv_dtype, build.state_dtype)]
    second = type(worker.model_runner).__module__.startswith("vllm.v1.worker.gpu.")
    return found | {
        "types": f"{kinds[0]} with {kinds[1]} caches and {kinds[2]} states on {build.device.type}",
        "states": kinds[2],
        "backends": tuple(str(one) for one in choice_reports(model.decoder, build)),
        "runner": f"model runner V{2 if second else 1}",
    }


def _losses_of(steps: Sequence[Any], tokens: Sequence[int]) -> list[float]:
    """-log p of each token in its step. NaN says that a token was not computed, so a model's own becomes infinity."""
    losses = [-step[token].logprob for step, token in zip(steps, tokens, strict=True)]
    return [math.inf if math.isnan(loss) else loss for loss in losses]
