"""Many mixed requests at once, and each of them alone: no token may differ, nothing may leak.

    python bench/engine/soak.py MODEL                                    2,000 requests of up to 8k tokens
    python bench/engine/soak.py MODEL --requests 40 --longest 200        smaller
    python bench/engine/soak.py MODEL --dtype bfloat16 --hf-overrides '{"max_position_embeddings": 9216}'

Prompts have lengths from 1 up, short ones most often; a third of them begin like another one; some are aborted in the
middle; memory is so tight that sequences are sent back. Greedy tokens are compared with those of the same request run
alone in an empty engine. Where the first that differs is within the noise of rounding (the two likeliest tokens closer
than twice the largest difference of any log-probability both runs report), it is a near-tie and named as one. Ends
with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from allotrope.cache.memory import Demand, make_plan
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.request import Request, SamplingParams, SequenceOutput

# Differences of log-probabilities that rounding alone never makes, by type: beyond them nothing is a near-tie.
_MOST_NOISE = {"float32": 0.01, "bfloat16": 1.0, "float16": 0.3}
# Growth of memory between a third of the run and its end that counts as none: a few tensors of one step.
_FLAT_BYTES = 32 << 20


@dataclass
class Answer:
    """`tokens` and, per token, its log-probability and how far the second likeliest is behind it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    error: str | None = None
    ended: bool = False

    def take(self, output: SequenceOutput) -> None:
        self.error = self.error or output.error
        self.ended = self.ended or output.finish_reason is not None
        for token, record in zip(output.token_ids, output.logprobs or (), strict=True):
            self.tokens.append(token)
            self.logprobs.append(record.logprob)
            self.margins.append(record.top[0][1] - record.top[1][1])


@dataclass(frozen=True)
class Found:
    """What a soak came to. `different`: requests whose tokens differ by more than a near-tie."""

    requests: int
    aborted: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    replays: int
    seconds: float
    alone_seconds: float
    noise: float
    near_ties: list[str]
    different: list[str]
    errors: list[str]
    leaked: dict[str, int]
    grown_bytes: int

    def wrong(self) -> list[str]:
        """Every reason why it did not pass."""
        reasons = [f"tokens differ: {text}" for text in self.different] + [f"failed: {text}" for text in self.errors]
        reasons += [f"{count} pages of {label} are still held" for label, count in self.leaked.items() if count]
        if self.grown_bytes > _FLAT_BYTES:
            reasons.append(f"memory grew by {self.grown_bytes} bytes")
        return reasons


def draw(count: int, longest: int, most_output: int, vocab: int, seed: int) -> list[Request]:
    """Requests of `longest` tokens at most, prompt and output together; a third share a beginning with others."""
    rng = random.Random(seed)
    output = max(1, min(most_output, longest // 2))
    stems = [_ids(rng, rng.randint(longest // 8, longest // 2), vocab) for _ in range(20)]
    requests = []
    for i in range(count):
        ids = _ids(rng, _length(rng, longest - output), vocab)
        if rng.random() < 1 / 3:
            stem = rng.choice(stems)
            ids = (stem[: rng.randint(len(stem) // 2, len(stem))] + ids)[: longest - output]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, output), ignore_eos=True, logprobs=2)
        requests.append(Request(request_id=f"r{i}", prompt_ids=tuple(ids), params=params))
    return requests


def _length(rng: random.Random, most: int) -> int:
    return max(1, int(math.exp(rng.uniform(0.0, math.log(most)))))


def _ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def run_together(engine: Engine, requests: Sequence[Request], seed: int) -> tuple[dict[str, Answer], set[str], int]:
    """All requests, a few arriving at each step, one in seven aborted unless it ends before.

    Returns answers, who was aborted, and by how many bytes memory grew.
    """
    rng = random.Random(seed)
    waiting = list(requests)
    doomed = {request.request_id: rng.randint(0, 20) for request in requests if rng.random() < 0.15}
    answers = {request.request_id: Answer() for request in requests}
    aborted: set[str] = set()
    third = 0
    while waiting or engine.has_work():
        for _ in range(min(len(waiting), rng.randint(0, 8))):
            if engine.stats().waiting < 32:
                engine.add(waiting.pop())
        for output in engine.step():
            answers[output.request_id].take(output)
        for name in [name for name in engine.requests if name in doomed]:
            doomed[name] -= 1
            if doomed[name] < 0:
                engine.abort([name])
                aborted.add(name)
        if not third and len(waiting) < 2 * len(requests) // 3:
            # Graphs that are still to come would count as growth, with the workspace of their stream.
            engine.capture_all()
            third = used_memory(engine)
    return answers, aborted, used_memory(engine) - third


def used_memory(engine: Engine) -> int:
    """Bytes in use: of the GPU's allocator, or of this process."""
    device = next(engine.model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_alone(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[str, Answer]]:
    """Each request by itself, with nothing cached."""
    for request in requests:
        answer = Answer()
        engine.reset_prefix_cache()
        engine.add(request)
        while engine.has_work():
            for output in engine.step():
                answer.take(output)
        yield request.request_id, answer


def compare(together: dict[str, Answer], alone: dict[str, Answer], most_noise: float) -> tuple[float, Any, Any]:
    """The largest difference of log-probabilities before tokens part, near-ties, and real differences, in words."""
    noise = 0.0
    parted: list[tuple[str, int]] = []
    for name, want in alone.items():
        got = together[name]
        same = next((i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b), None)
        if same is not None:
            parted.append((name, same))
        end = min(len(got.tokens), len(want.tokens)) if same is None else same
        noise = max([noise, *(abs(got.logprobs[i] - want.logprobs[i]) for i in range(end))])
    near, wrong = [], []
    for name, i in parted:
        margin = min(alone[name].margins[i], together[name].margins[i])
        text = f"{name}, token {i}: {together[name].tokens[i]} for {alone[name].tokens[i]}, {margin:.2g} apart"
        (near if margin <= 2 * noise and noise <= most_noise else wrong).append(text)
    if noise > most_noise:
        wrong.append(f"log-probabilities of equal tokens differ by {noise:.2g}; allowed: {most_noise:.2g}")
    return noise, near, wrong


def soak(config: EngineConfig, count: int, longest: int, most_output: int, seed: int) -> Found:
    """Run it all. `config`: the engine for the mixed run; memory is set here."""
    load_plan = resolve_load_plan(config)
    vocab = load_plan.spec.vocab_size
    requests = draw(count, longest, most_output, vocab, seed)
    # Windows and states of a full batch, but pages for the context of few: sequences must be sent back.
    demand = Demand(
        context=longest, sequences=config.max_num_seqs, step_tokens=config.max_num_batched_tokens, reuse=True
    )
    tight = make_plan(load_plan.groups, demand, longest + longest // 2).bytes
    roomy = make_plan(load_plan.groups, dataclasses.replace(demand, sequences=1), 2 * longest).bytes
    engine = Engine(dataclasses.replace(config, kv_cache_memory_bytes=tight, scheduler_reserve_full_isl=False))
    started = time.monotonic()
    together, aborted, grown = run_together(engine, requests, seed)
    seconds = time.monotonic() - started
    stats, replays = engine.stats(), engine.graph_replays
    engine.close()
    del engine
    single = Engine(dataclasses.replace(config, max_num_seqs=1, kv_cache_memory_bytes=roomy))
    started = time.monotonic()
    alone = dict(run_alone(single, [one for one in requests if one.request_id not in aborted]))
    single.close()
    dtype = single.limits.model_dtype
    noise, near, different = compare(together, alone, _MOST_NOISE[dtype])
    for name, answer in alone.items():
        if not (together[name].ended and answer.ended) or len(together[name].tokens) != len(answer.tokens):
            different.append(f"{name} has {len(together[name].tokens)} tokens together, {len(answer.tokens)} alone")
    return Found(
        requests=count,
        aborted=len(aborted),
        tokens=sum(len(answer.tokens) for answer in together.values()),
        prompt_tokens=sum(len(request.prompt_ids) for request in requests),
        cached_tokens=stats.prefix_hits,
        preemptions=stats.preemptions,
        replays=replays,
        seconds=seconds,
        alone_seconds=time.monotonic() - started,
        noise=noise,
        near_ties=near,
        different=different,
        errors=[f"{name}: {answer.error}" for name, answer in together.items() if answer.error],
        leaked=stats.pages_used,
        grown_bytes=grown,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=8192, help="tokens of prompt and output together")
    parser.add_argument("--most-output", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    for name, default in (
        ("device", "auto"),
        ("dtype", "float32"),
        ("kv-cache-dtype", "auto"),
        ("load-format", "auto"),
    ):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--hf-overrides")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    asked = vars(parser.parse_args(arguments))
    count, longest, most, seed, out = (asked.pop(k) for k in ("requests", "longest", "most_output", "seed", "out"))
    found = soak(EngineConfig(max_model_len=longest, **asked), count, longest, most, seed)
    print(
        f"{found.requests} requests ({found.aborted} aborted), {found.prompt_tokens} prompt tokens of which "
        f"{found.cached_tokens} were cached, {found.tokens} tokens in {found.seconds:.1f} s, alone "
        f"{found.alone_seconds:.1f} s; {found.preemptions} preemptions, {found.replays} graph replays; "
        f"log-probabilities differ by up to {found.noise:.2g}; {len(found.near_ties)} near-ties; memory grew by "
        f"{found.grown_bytes} bytes"
    )
    for text in found.near_ties[:20]:
        print(f"near-tie: {text}")
    wrong = found.wrong()
    for text in wrong[:20]:
        print(f"WRONG: {text}")
    print("WRONG" if wrong else "PASS")
    if out is not None:
        out.write_text(json.dumps({"command": sys.argv, **dataclasses.asdict(found)}, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
