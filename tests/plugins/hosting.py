"""One checkpoint inside vLLM: what it answers and, in this process, what of vLLM's objects is ours."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forks import Forks, environment_with
from plugins.conftest import ENVIRONMENT, MODULES

from allotrope import LLM, SamplingParams
from allotrope.attention.cache_layout import CacheLayout, PagedRows, StateSlots, WindowRows, row_bytes

# Logits of Transformers, our engine and vLLM differ by rounding alone; the same bound as for the engine's own tests.
ATOL = 5e-4
# Of vLLM's caches: it clears all of it for each engine.
CACHE_BYTES = 1 << 26
# Seconds of a process of its own.
LIMIT = 580


@dataclass(frozen=True)
class Answer:
    """`ids`: chosen tokens. `logprobs`: [n] of them. `cached`: prompt tokens that were reused."""

    ids: list[int]
    logprobs: torch.Tensor
    cached: int


class Hosted:
    """A running `vllm.LLM` of a checkpoint."""

    def __init__(self, path: Path, **options: Any) -> None:
        from vllm import LLM

        plain = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": CACHE_BYTES,
        }
        self.llm = LLM(str(path), **(plain | options))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.groups = [group.kv_cache_spec for group in self.core.scheduler.kv_cache_config.kv_cache_groups]

    def answers(self, prompts: Sequence[Sequence[int]], count: int = 8) -> list[Answer]:
        """`count` greedy tokens after each prompt, all sent at once."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
        given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = []
        for output in self.llm.generate(given, wanted, use_tqdm=False):
            (one,) = output.outputs
            ids = list(one.token_ids)
            chosen = [step[token].logprob for step, token in zip(one.logprobs, ids, strict=True)]
            found.append(Answer(ids, torch.tensor(chosen), output.num_cached_tokens or 0))
        return found

    def metric(self, name: str) -> float:
        """A counter of vLLM's."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def blocks_for_one(self) -> int:
        """Blocks that one request of full length takes in all groups."""
        config = self.llm.llm_engine.vllm_config
        return sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in self.groups)

    def specs(self) -> dict[str, Any]:
        """By name of a cache, its spec in vLLM's memory; the cache manager goes by one of the same type."""
        found = {}
        of_memory = self.runner.kv_cache_config.kv_cache_groups
        for group, managed in zip(of_memory, self.groups, strict=True):
            each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            found.update({name: each.get(name, group.kv_cache_spec) for name in group.layer_names})
            assert {type(found[name]) for name in group.layer_names} == {type(managed)}
        return found

    def assert_ours(self) -> None:
        """Our model, our backends in every group, rows of the requests in our caches, and nothing in block 0.

        vLLM manages each cache by its lifetime."""
        from allotrope.plugins.vllm.cache import HostedCache, StepBuilder
        from allotrope.plugins.vllm.model import HostedModel

        assert isinstance(self.runner.model, HostedModel)
        layers = self.runner.compilation_config.static_forward_context
        assert layers and all(isinstance(layer, HostedCache) for layer in layers.values())
        used = [group for groups in self.runner.attn_groups for group in groups]
        assert used and all(isinstance(group.get_metadata_builder(), StepBuilder) for group in used)
        specs = self.specs()
        for cache in layers.values():
            assert_lifetime(cache.layout, specs[cache.name])
            for views in cache.views:
                for pool in views.values():
                    assert not _written(pool[0]), f"{cache.name}: block 0 is not empty"
                assert any(map(_written, views.values())), f"{cache.name} was never written"

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm, self.core, self.runner
        gc.collect()
        cleanup_dist_env_and_memory()


def assert_lifetime(layout: CacheLayout, spec: Any) -> None:
    """vLLM keeps all rows, the rows of a window, or one state, as `layout` says."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if isinstance(layout, StateSlots):
        assert type(spec) is MambaSpec
        # Earlier versions know no size but that of the page.
        size = getattr(spec, "state_content_size_bytes", row_bytes(layout))
        assert size == row_bytes(layout) <= spec.page_size_bytes
        return
    if isinstance(layout, WindowRows):
        assert type(spec) is SlidingWindowSpec and spec.sliding_window == layout.window
    else:
        assert isinstance(spec, FullAttentionSpec) and spec.sliding_window is None
    tokens = layout.stride if isinstance(layout, PagedRows) else 1
    # Under its name of later versions, or of earlier ones, where it is a spec of latent rows alone that has it.
    assert getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1)) == tokens
    assert spec.page_size_bytes == spec.block_size // tokens * row_bytes(layout)


def _written(pool: torch.Tensor) -> bool:
    """Whether anything but 0 is in it; PyTorch does not ask that of FP8."""
    return bool((pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool).any())


@contextmanager
def hosted(path: Path, **options: Any) -> Iterator[Hosted]:
    """A running vLLM, ended at the end."""
    running = Hosted(path, **options)
    try:
        yield running
    finally:
        running.close()


def assert_matches(answers: Sequence[Answer], prompts: Sequence[Sequence[int]], logits: Any) -> None:
    """`logits`: ids -> [L, vocabulary] of the reference, which is shown each prompt with its answer."""
    for prompt, answer in zip(prompts, answers, strict=True):
        want = logits([*prompt, *answer.ids[:-1]])[len(prompt) - 1 :].float()
        assert answer.ids == want.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"
        chosen = torch.log_softmax(want, -1).gather(1, torch.tensor(answer.ids)[:, None]).squeeze(1)
        torch.testing.assert_close(answer.logprobs, chosen, atol=ATOL, rtol=0.0)


def model_of(worker: Any) -> tuple[str, int, int]:
    """Of a rank's worker: where its model's class is from, which rank it is and of how many."""
    # With graphs of whole steps, the runner holds the model in a wrapper.
    model = worker.model_runner.get_model()
    parallel = model.build.parallel
    return type(model).__module__, parallel.rank, parallel.size


# The checkpoint is written before vLLM is imported, which teaches Transformers other classes of configs.
_APART = """
import json
from pathlib import Path
if __name__ == "__main__":
    given = json.loads({given!r})
    if not list(Path(given["path"]).iterdir()):
        from allotrope.architectures.registry import find_architecture
        from allotrope.verify.random_checkpoint import write_random
        names = dict(architectures=[given["architecture"]])
        write_random(find_architecture(names, "").tiny() | names, Path(given["path"]), None, 0)
    from vllm import LLM, SamplingParams
    from plugins.hosting import model_of
    llm = LLM(
        given["path"], distributed_executor_backend="mp", skip_tokenizer_init=True, dtype="float32",
        max_model_len=256, max_num_seqs=8, **given["options"]
    )
    wanted = SamplingParams(max_tokens=given["count"], temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
    asked = [dict(prompt_token_ids=prompt) for prompt in given["prompts"]]
    answers = [output.outputs[0] for output in llm.generate(asked, wanted, use_tqdm=False)]
    found = dict(
        ids=[list(answer.token_ids) for answer in answers],
        logprobs=[[step[id].logprob for step, id in zip(answer.logprobs, answer.token_ids)] for answer in answers],
        models=llm.collective_rpc(model_of),
    )
    print("FOUND" + json.dumps(found), flush=True)
"""
# A core for each rank is not asked for; functions may be sent to the ranks.
_APART_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


@dataclass(frozen=True)
class Apart:
    """What vLLM in a process of its own answered. `models`: of each rank, as `model_of`."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    models: list[list[Any]]


def answers_apart(
    architecture: str, path: Path, prompts: Sequence[Sequence[int]], count: int, fork: bool = False, **options: Any
) -> Apart:
    """`count` greedy tokens after each prompt, in fp32 with `options`. An empty `path` gets random weights first.
    `fork`: as for `run_apart`."""
    options = {"kv_cache_memory_bytes": CACHE_BYTES} | options
    named = {"architecture": architecture, "path": str(path), "options": options}
    given = json.dumps(named | {"prompts": [list(prompt) for prompt in prompts], "count": count})
    done = run_apart(_APART.format(given=given), _APART_ENVIRONMENT, fork)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), None)
    assert line is not None, done.stderr[-3000:]
    return Apart(**json.loads(line.removeprefix("FOUND")))


def assert_all_ours(found: Apart, ranks: int) -> None:
    """Rank by rank."""
    assert [module for module, _, _ in found.models] == ["allotrope.plugins.vllm.model"] * ranks
    assert [(rank, size) for _, rank, size in found.models] == [(rank, ranks) for rank in range(ranks)]


def assert_answers_as_engine(found: Apart, path: Path, prompts: Sequence[Sequence[int]], device: str) -> None:
    """Tokens are those of our engine, logprobs differ by rounding."""
    count = len(found.ids[0])
    llm = LLM(str(path), device=device, dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 26)
    try:
        wanted = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0)
        engine = [output.outputs[0] for output in llm.generate(prompts, wanted)]
    finally:
        llm.close()
    assert found.ids == [list(one.token_ids) for one in engine]
    for got, one in zip(found.logprobs, engine, strict=True):
        want = torch.tensor([step.logprob for step in one.logprobs or ()])
        torch.testing.assert_close(torch.tensor(got), want, atol=ATOL, rtol=0.0)


def run_apart(
    code: str, environment: dict[str, str] | None = None, fork: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with vLLM's test environment. `fork`: of one that has imported vLLM,
    which logs from INFO on."""
    given = environment or {}
    if fork:
        return _forks().run(code, given, LIMIT)
    env = environment_with(ENVIRONMENT | given)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=LIMIT)


@functools.cache
def _forks() -> Forks:
    return Forks(MODULES, environment_with(ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}))
