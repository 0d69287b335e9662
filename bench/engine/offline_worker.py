"""One engine's offline API in a process of its own, told by lines of JSON on stdin what to do; answers on stdout.

Runs in the Python of the engine that it stands for: at the top it may import nothing but the standard library.

    {"load": {"directory": ..., "options": {...}}}     ->  {"environment": {...}, "kv_tokens": n, "forced_by": ...}
    {"run": {"prompts": [[ids], ...], "tokens": n}}    ->  {"began": s, "seconds": s, "ids": [...], "drafts": ...}
    {"forced": {"prompts": [[ids], ...], "tokens": n}} ->  {"logprobs": [[{id: logprob}, ...], ...]}
    {"accept": {"length": mean}}                       ->  {}
    {"memory": {}}                                     ->  {"device_used_gb": ..., "peak_reserved_gb": ...} or {}

A command that fails is answered by {"error": ...}.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from typing import Any, NamedTuple, Protocol

Prompts = list[list[int]]
Logprobs = dict[int, float]


class Drafts(NamedTuple):
    """`verified`: times that a sequence had drafts verified. `accepted`: tokens of them that were accepted."""

    verified: int
    accepted: int


# Ids at each place of a forced text.
TOP = 8
# vLLM's counters of what `Drafts` has.
VLLM_DRAFTS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


class Engine(Protocol):
    """`kv_tokens`: that the caches hold, None if nobody says. `forced_by`: the steps that `forced` has its logprobs
    from, "decode" or "prefill"."""

    version: str
    kv_tokens: int | None
    forced_by: str

    def __init__(self, directory: str, options: dict[str, Any]) -> None: ...

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        """That many greedy tokens of each prompt, past any end token."""
        ...

    def forced(self, prompts: Prompts, tokens: int) -> list[list[Logprobs]]:
        """Logprobs of the best ids, before any were forbidden, of each of `tokens` tokens after a prompt; all of these
        are its last token again."""
        ...

    def accept(self, length: float) -> None:
        """Force so many tokens of a sequence in a step from now on, in the mean; it was loaded with another number."""
        ...

    def drafts(self) -> Drafts | None:
        """Counts of speculative decoding since the start; None where it is off."""
        ...


class Allotrope:
    forced_by = "decode"

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        import allotrope
        from allotrope.logs import configure_logging

        configure_logging("INFO")
        self.llm = allotrope.LLM(directory, **options)
        self.version = getattr(allotrope, "__version__", "checkout")
        # Of one data-parallel rank, which has requests of its own.
        self.kv_tokens: int | None = self.llm.engine.memory.tokens * options.get("data_parallel_size", 1)
        self.started = False

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        from allotrope import SamplingParams

        if self.started:
            # What a server captures between requests; the first tokens do not wait for it.
            self.llm.engine.capture_all()
        self.started = True
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self.llm.generate(prompts, params)]

    def forced(self, prompts: Prompts, tokens: int) -> list[list[Logprobs]]:
        from allotrope import SamplingParams

        plain: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": TOP}
        params = [SamplingParams(allowed_token_ids=(prompt[-1],), **plain) for prompt in prompts]
        found = [output.outputs[0].logprobs or () for output in self.llm.generate(prompts, params)]
        return [[{id: round(value, 4) for id, value in step.top} for step in steps] for steps in found]

    def accept(self, length: float) -> None:
        self.llm.engine.set_acceptance_length(length)

    def drafts(self) -> Drafts | None:
        counts = self.llm.engine.stats().speculation
        return None if counts is None else Drafts(counts.drafts, counts.accepted_tokens)


class Vllm:
    forced_by = "decode"

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        import vllm

        self.speculates = "speculative_config" in options
        self.llm = vllm.LLM(directory, **options)
        apart = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
        self.version = f"{vllm.__version__}{', its engine in another process' if apart else ''}"
        cache = self.llm.llm_engine.vllm_config.cache_config
        blocks = getattr(cache, "num_gpu_blocks", None)
        # Its own count takes a window for as long as a step's tokens. Blocks may be of several sizes, and this is the
        # smallest.
        counts = (blocks * cache.block_size if blocks else 0, getattr(cache, "kv_cache_size_tokens", None) or 0)
        self.kv_tokens: int | None = max(counts) or None

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        return [list(output.token_ids) for output in self._outputs(prompts, [{}] * len(prompts), tokens)]

    def forced(self, prompts: Prompts, tokens: int) -> list[list[Logprobs]]:
        only = [{"allowed_token_ids": [prompt[-1]], "logprobs": TOP} for prompt in prompts]
        outputs = self._outputs(prompts, only, tokens)
        return [
            [{id: round(one.logprob, 4) for id, one in step.items()} for step in output.logprobs] for output in outputs
        ]

    def accept(self, length: float) -> None:
        def set_rates(worker: Any) -> None:
            import torch
            from vllm.config import SpeculativeConfig
            from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

            rates = worker.model_runner.rejection_sampler.synthetic_conditional_rates
            own = SpeculativeConfig._acceptance_length_to_rates(length, len(rates))
            rates.copy_(torch.tensor(unconditional_to_conditional_rates(own)))

        self.llm.collective_rpc(set_rates)

    def drafts(self) -> Drafts | None:
        counts: dict[str, int] = {}
        # One of each name for each engine.
        for metric in self.llm.get_metrics() if self.speculates else ():
            if metric.name in VLLM_DRAFTS:
                counts[metric.name] = counts.get(metric.name, 0) + metric.value
        return Drafts(*(counts[name] for name in VLLM_DRAFTS)) if len(counts) == len(VLLM_DRAFTS) else None

    def _outputs(self, prompts: Prompts, wanted: list[dict[str, Any]], tokens: int) -> list[Any]:
        from vllm import SamplingParams

        plain: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**plain, **more) for more in wanted]
        given = [{"prompt_token_ids": ids} for ids in prompts]
        return [output.outputs[0] for output in self.llm.generate(given, params, use_tqdm=False)]


class HostedVllm(Vllm):
    """vLLM with our plugin. Raises RuntimeError if the model that it runs is not ours."""

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        super().__init__(directory, options)
        # One answer from each rank.
        for model in self.llm.collective_rpc(lambda worker: type(worker.get_model()).__module__):
            if not model.startswith("allotrope."):
                raise RuntimeError(f"vLLM runs a model of {model}; the log says why the plugin is off")


class Sglang:
    # Its logprobs are taken after biases and masks: a decode step cannot be forced without changing them.
    forced_by = "prefill"

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(model_path=directory, **options)
        self.version = f"{sglang.__version__}, its engine in another process"
        self.kv_tokens: int | None = self.engine.get_server_info().get("max_total_num_tokens")

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        return [list(output["output_ids"]) for output in self._outputs(prompts, tokens)]

    def forced(self, prompts: Prompts, tokens: int) -> list[list[Logprobs]]:
        texts = [prompt + [prompt[-1]] * tokens for prompt in prompts]
        starts = [len(prompt) - 1 for prompt in prompts]
        outputs = self._outputs(texts, 1, return_logprob=True, logprob_start_len=starts, top_logprobs_num=TOP)
        # The token at the start has none, and each later one those after the token before it.
        steps = [output["meta_info"]["input_top_logprobs"][1:] for output in outputs]
        return [[{id: round(value, 4) for value, id, _ in step} for step in one] for one in steps]

    def accept(self, length: float) -> None:
        raise NotImplementedError("SGLang is not measured with drafts")

    def drafts(self) -> Drafts | None:
        return None

    def _outputs(self, prompts: Prompts, tokens: int, **more: Any) -> list[Any]:
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        return list(self.engine.generate(input_ids=prompts, sampling_params=params, **more))


class HostedSglang(Sglang):
    """SGLang with our plugin. Raises RuntimeError if the attention that it runs is not ours."""

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        super().__init__(directory, options)
        backend = self.engine.get_server_info()["attention_backend"]
        if backend != "allotrope":
            raise RuntimeError(f"SGLang runs attention of {backend}; the log says why the plugin is off")


ENGINES: dict[str, type[Engine]] = {
    "allotrope": Allotrope,
    "vllm": Vllm,
    "vllm+allotrope": HostedVllm,
    "sglang": Sglang,
    "sglang+allotrope": HostedSglang,
}


def environment(version: str) -> dict[str, str]:
    """What a reader needs to run it again."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"version": version, "torch": torch.__version__, "python": platform.python_version(), "device": device}


def gpu_memory() -> dict[str, float]:
    """Of the first device, now, and of this process's allocator at its peak, unless the engine is in another one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    return {"device_used_gb": (total - free) / 1e9} | ({"peak_reserved_gb": reserved / 1e9} if reserved else {})


def run(engine: Engine, prompts: Prompts, tokens: int) -> dict[str, Any]:
    """Time one batch. `began` is by the host's clock, the same for all processes; `drafts` are counts, or None. Raises
    RuntimeError if a prompt did not get all of its tokens."""
    before, begin = engine.drafts(), time.perf_counter()
    ids = engine.generate(prompts, tokens)
    seconds, after = time.perf_counter() - begin, engine.drafts()
    wrong = [len(one) for one in ids if len(one) != tokens]
    if wrong or len(ids) != len(prompts):
        raise RuntimeError(f"{len(ids)} continuations of {len(prompts)} prompts, {wrong[:5]} tokens of {tokens}")
    drafts = None
    if before is not None and after is not None:
        drafts = {key: getattr(after, key) - getattr(before, key) for key in Drafts._fields}
    return {"began": begin, "seconds": seconds, "ids": ids, "drafts": drafts}


def main() -> None:
    # Libraries print: only answers may go where the parent reads.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Scripts of this folder must not pass for packages that the engines look for by name.
    sys.path.pop(0)
    engine: Engine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "load" in command:
                engine = ENGINES[sys.argv[1]](**command["load"])
                answer: dict[str, Any] = {
                    "environment": environment(engine.version),
                    "kv_tokens": engine.kv_tokens,
                    "forced_by": engine.forced_by,
                }
            elif "memory" in command:
                answer = gpu_memory()
            elif "accept" in command:
                assert engine is not None
                engine.accept(**command["accept"])
                answer = {}
            else:
                assert engine is not None
                if "run" in command:
                    answer = run(engine, **command["run"])
                else:
                    answer = {"logprobs": engine.forced(**command["forced"])}
        except Exception as error:
            # The border of the process: an engine that cannot run a model is a result.
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
