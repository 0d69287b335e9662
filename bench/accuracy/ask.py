"""What vLLM with the plugin answers to items in an execution mode. Must not know what is right.

Tasks are sent together and answered greedily to the first newline. Text: where a prompt is computed in any case, a
chunk's prompt has its losses from prompt logprobs and its last tokens are decoded; in the modes `warm` and `preempted`,
where prompt logprobs would lack cached or recomputed tokens, all tokens of its second half are decoded. Decoded tokens
are those of the chunk, whatever vLLM would choose.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from allotrope.errors import ConfigError
from allotrope.eval.answers import Answer, Answers, ask_both
from allotrope.eval.items import Item, Items, TextChunks
from allotrope.eval.options import ModeName
from allotrope.text.tokenizer import Tokenizer
from allotrope.verify.execution_modes import NotExercised

# Named, because its module is vLLM's.
FORCED_TOKENS = "bench.accuracy.forced_tokens:ForcedTokensProcessor"
# Prompts that run together in a warm cache: each is run twice, before later ones need its memory.
_TOGETHER = 32
# Tokens of a step, and sequences that run together, where there are few of them.
_CHUNK, _TIGHT = 64, 8
# Blocks that the longest request may have beside its own; each is tried until requests preempt each other.
_SPARE = (2, 0)

_COLD: dict[str, Any] = {"enable_prefix_caching": False}
_SMALL: dict[str, Any] = {"max_num_batched_tokens": _CHUNK, "max_num_seqs": _TIGHT}

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


class NotOurs(Exception):
    """vLLM runs another model than the plugin's."""


@dataclass(frozen=True)
class Host:
    """What ran. `version`: of vLLM and its model runner. `model`: types, device and ranks. `backends`: of its layers
    and operations."""

    version: str
    model: str
    backends: tuple[str, ...]


def ask_vllm(
    model: str, options: dict[str, Any], tokenizer: Tokenizer, items: Items, name: ModeName
) -> tuple[Answers, Host]:
    """Run all items in a mode, in a vLLM of its own that `options` start. `tokenizer`: says the text of answers.

    Raises NotExercised if what the mode is there to try came about in no part of them, NotOurs if the model is not the
    plugin's, and what vLLM raises.
    """
    started = time.monotonic()
    running = _Running(model, {"max_model_len": items.longest} | options, tokenizer)
    try:
        return running.ask(items, name, started), running.host
    finally:
        running.close()


class _Running:
    """A vLLM in this process, but for its ranks."""

    def __init__(self, model: str, options: dict[str, Any], tokenizer: Tokenizer) -> None:
        import vllm
        from vllm.engine.arg_utils import EngineArgs

        # Of some versions alone.
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        options = {key: value for key, value in options.items() if key != "scheduler_reserve_full_isl" or key in known}
        self.llm = vllm.LLM(model, **options)
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
        return Host(f"{version} ({first['runner']})", model, first["backends"])

    def ask(self, items: Items, name: ModeName, started: float) -> Answers:
        """Answers to all items."""
        return ask_both(
            items, name, started, lambda: self.ask_tasks(items.tasks, name), lambda text: self.ask_text(text, name)
        )

    def ask_tasks(
        self, tasks: dict[str, tuple[Item, ...]], name: ModeName
    ) -> tuple[dict[str, tuple[Answer, ...]], str]:
        """Answers, and a remark."""
        if name == "preempted":
            return self._squeezed(lambda: self._answers(tasks, warm=False)[0])
        answers, cached, total = self._answers(tasks, warm=name == "warm")
        return answers, _reused(cached, total) if name == "warm" else ""

    def _answers(
        self, tasks: dict[str, tuple[Item, ...]], *, warm: bool
    ) -> tuple[dict[str, tuple[Answer, ...]], int, int]:
        """`warm`: every prompt runs before it counts. Also returns prompt tokens: reused ones, and all."""
        from vllm import SamplingParams

        answers: dict[str, tuple[Answer, ...]] = {}
        cached = total = 0
        for task, items in tasks.items():
            found: list[Answer] = []
            size = _TOGETHER if warm else len(items)
            for group in (items[i : i + size] for i in range(0, len(items), size)):
                prompts = [item.ids for item in group]
                if warm:
                    self._generate(prompts, [SamplingParams(temperature=0.0, max_tokens=1)] * len(group))
                params = [SamplingParams(temperature=0.0, max_tokens=item.max_tokens, stop=["\n"]) for item in group]
                outputs = self._generate(prompts, params)
                found += [self._answer(output.outputs[0]) for output in outputs]
                cached += sum(output.num_cached_tokens or 0 for output in outputs)
                total += sum(map(len, prompts))
            answers[task] = tuple(found)
        return answers, cached, total

    def _answer(self, output: Any) -> Answer:
        """The first line, as our engine says it: vLLM leaves the bytes of an incomplete character out."""
        ids = list(output.token_ids)
        ended = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        return Answer(text.partition("\n")[0], tuple(ids))

    def ask_text(self, text: TextChunks, name: ModeName) -> tuple[tuple[tuple[float, ...], ...], str]:
        """-log p of every token of each chunk, NaN where it was not computed; and a remark."""
        if name == "preempted":
            return self._squeezed(lambda: self._losses(text, text.first)[0])
        if name != "warm":
            return self._losses(text, None)[0], ""
        from vllm import SamplingParams

        # Another request leaves the beginning; the rest of the prompt is computed on top of it.
        left = [[*chunk.prompt, *chunk.forced][: max(1, text.first * 3 // 4)] for chunk in text.chunks]
        found: list[tuple[float, ...]] = []
        cached = total = 0
        for i in range(0, len(text.chunks), _TOGETHER):
            group = dataclasses.replace(text, chunks=text.chunks[i : i + _TOGETHER])
            before = left[i : i + _TOGETHER]
            self._generate(before, [SamplingParams(temperature=0.0, max_tokens=1)] * len(before))
            losses, reused = self._losses(group, text.first)
            found += losses
            cached += reused
            total += text.first * len(before)
        return tuple(found), _reused(cached, total)

    def _losses(self, text: TextChunks, decoded_from: int | None) -> tuple[tuple[tuple[float, ...], ...], int]:
        """`decoded_from`: the position from which tokens are decoded and have losses; None: the chunk's forced tokens,
        with losses of the prompt as well. Also returns how many prompt tokens were reused."""
        from vllm import SamplingParams

        prompts, forced, params = [], [], []
        for chunk in text.chunks:
            ids, start = [*chunk.prompt, *chunk.forced], len(chunk.prompt) if decoded_from is None else decoded_from
            prompts.append(ids[:start])
            forced.append(ids[start:])
            params.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=len(ids) - start,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0,
                    prompt_logprobs=0 if decoded_from is None else None,
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
            if decoded_from is None:
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

    def _squeezed(self, run: Any) -> tuple[Any, str]:
        """What `run` returns where sequences preempt each other, and a remark."""
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


def _reused(cached: int, total: int) -> str:
    if not cached:
        raise NotExercised("no prompt was found in the prefix cache: none has the tokens of one shared run")
    return f"{cached} of {total} prompt tokens reused"
