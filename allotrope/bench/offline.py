"""Timed runs of an engine in this process.

Owns how requests are added to the engine and timed. It must not know HTTP or text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from allotrope.bench.record import RequestRecord
from allotrope.engine.engine import Engine
from allotrope.errors import AllotropeError
from allotrope.request import Request, SamplingParams


def run_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    queue: int,
    on_done: Callable[[RequestRecord], None],
) -> tuple[list[RequestRecord], float]:
    """Generate `output_len` tokens for every prompt, greedily, ignoring end-of-sequence tokens.

    `prompts`: token ids. `queue`: largest number of requests in the engine; a request's time starts when it is added.
    `on_done` is called as each request ends. Returns the records in the order of `prompts`, and the seconds of the
    whole run. Raises `AllotropeError` if a request fails.
    """
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    waiting = [(f"bench-{number}", tuple(prompt)) for number, prompt in enumerate(prompts)][::-1]
    records: dict[str, RequestRecord] = {}
    unfinished = 0
    begin = time.perf_counter()
    while waiting or unfinished:
        while waiting and unfinished < queue:
            name, prompt = waiting.pop()
            records[name] = RequestRecord(prompt_tokens=len(prompt), started=time.perf_counter())
            engine.add(Request(request_id=name, prompt_ids=prompt, params=params, arrival=time.monotonic()))
            unfinished += 1
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            record = records[output.request_id]
            if output.error is not None:
                raise AllotropeError(f"request {output.request_id} failed: {output.error}")
            if output.token_ids:
                record.arrivals.append(now)
                record.output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                record.finished = now
                unfinished -= 1
                on_done(record)
    return list(records.values()), time.perf_counter() - begin
