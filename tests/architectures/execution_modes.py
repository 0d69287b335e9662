"""One model through the engine in every way that tokens can be cut into steps, against Transformers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from engine.watching import Watch, assert_idle, engine, request, run
from tiny_checkpoints import TinyCheckpoint, prompts

ATOL = 5e-4


def assert_matches(tiny: TinyCheckpoint, lengths: Sequence[int], **options: Any) -> None:
    """Logits at all positions and greedy tokens: chunked and batched, from cached pages, alone, and preempted."""
    torch.set_num_threads(1)
    ids = {f"p{len(one)}": one for one in prompts(lengths)}
    watch = Watch()
    options = {"max_num_seqs": 16, "max_model_len": max(lengths) + 16, **options}
    running = engine(tiny.directory, watch, max_num_batched_tokens=24, **options)
    tokens = run(running, [request(name, prompt) for name, prompt in ids.items()])
    want = {name: tiny.logits([*prompt, *tokens[name][:-1]]) for name, prompt in ids.items()}
    assert_seen(watch, ids, tokens, want)
    # Again, the other way round and from cached pages; `Watch` keeps what was computed anew.
    again = run(running, [request(name, ids[name]) for name in reversed(ids)])
    assert_seen(watch, ids, again, want)
    assert running.stats().prefix_hits > 0
    assert_idle(running)

    uncached = engine(tiny.directory, watch, enable_prefix_caching=False, max_num_batched_tokens=2048, **options)
    for name, prompt in ids.items():
        assert_seen(watch, {name: prompt}, run(uncached, [request(name, prompt)]), want)
    _assert_preempted(tiny, ids, tokens, options)


def assert_seen(
    watch: Watch, ids: Mapping[str, list[int]], tokens: Mapping[str, list[int]], want: Mapping[str, torch.Tensor]
) -> None:
    """What the engine computed is what Transformers did, and it chose the best token each time."""
    for name, prompt in ids.items():
        got = torch.stack([watch.seen[name][i] for i in range(len(want[name]))])
        torch.testing.assert_close(got, want[name], atol=ATOL, rtol=0.0, msg=lambda text, name=name: f"{name}: {text}")
        assert tokens[name] == want[name][len(prompt) - 1 :].argmax(-1).tolist(), name


def _assert_preempted(
    tiny: TinyCheckpoint, ids: Mapping[str, list[int]], tokens: Mapping[str, list[int]], options: dict[str, Any]
) -> None:
    """Every few steps the last sequence is sent back, as if pages had run out: cached pages take it up, or nothing."""
    for caching in (True, False):
        running = engine(tiny.directory, max_num_batched_tokens=64, enable_prefix_caching=caching, **options)
        scheduler, got = running._requests.scheduler, {name: [] for name in ids}
        for name, prompt in ids.items():
            running.add(request(name, prompt))
        for step in itertools.count():
            if not running.has_work():
                break
            if step % 4 == 3 and scheduler.running:
                last = scheduler.running.pop()
                scheduler.kv_cache_manager.free(last)
                scheduler.waiting.appendleft(last)
            for output in running.step():
                got[output.request_id].extend(output.token_ids)
        assert got == tokens
        assert_idle(running)
