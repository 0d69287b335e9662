"""Records of requests, the latency figures of a run, and random prompts.

Owns the definitions of TTFT, TPOT, ITL and E2E. It must not know how the times are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass
class RequestRecord:
    """Times of one request at its client, in seconds of one clock.

    `started`: time of sending. `arrivals`: time of each delta. `output_tokens`: tokens in all deltas. `error`: reason
    of a failure, or None; failed requests count in no figure.
    """

    prompt_tokens: int
    started: float
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0
    finished: float = 0.0
    error: str | None = None

    def ttft(self) -> float:
        """Time to first token: first arrival - start."""
        return self.arrivals[0] - self.started

    def e2e(self) -> float:
        """End to end: last arrival - start."""
        return self.arrivals[-1] - self.started

    def tpot(self) -> float | None:
        """Time per output token: (e2e - ttft) / (output tokens - 1); None for a single token."""
        return (self.e2e() - self.ttft()) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def itl(self) -> list[float]:
        """Inter-token latency: gaps between arrivals. A delta with several tokens counts once."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of one latency, in milliseconds."""

    mean_ms: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Summary:
    """Summary of a run: counts, rates per second of `duration_s`, and the spread of each latency.

    `latency`: name of a latency -> spread, without latencies that have no samples. `errors`: distinct reasons of
    failures.
    """

    completed: int
    failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    latency: dict[str, Spread]
    errors: list[str]

    def as_json(self) -> dict[str, Any]:
        """The summary as plain data for a JSON file."""
        return asdict(self)


def samples(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Name of a latency -> its samples in seconds, from the requests that succeeded. Empty ones are left out."""
    good = [record for record in records if record.error is None and record.arrivals]
    latencies = {
        "TTFT": [record.ttft() for record in good],
        "TPOT": [tpot for record in good if (tpot := record.tpot()) is not None],
        "ITL": [gap for record in good for gap in record.itl()],
        "E2E": [record.e2e() for record in good],
    }
    return {name: values for name, values in latencies.items() if values}


def summarize(records: Sequence[RequestRecord], duration_s: float) -> Summary:
    """The summary of the `records` of a run of `duration_s` seconds."""
    good = [record for record in records if record.error is None]
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    return Summary(
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt,
        output_tokens=output,
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output / duration_s,
        total_tokens_per_s=(prompt + output) / duration_s,
        latency={name: _spread(values) for name, values in samples(records).items()},
        errors=sorted({record.error for record in records if record.error is not None}),
    )


def _spread(seconds: Sequence[float]) -> Spread:
    p50, p99 = np.percentile(seconds, [50, 99])
    return Spread(mean_ms=1000 * float(np.mean(seconds)), p50_ms=1000 * float(p50), p99_ms=1000 * float(p99))


def seeded_generator(seed: int) -> np.random.Generator:
    """A generator of random numbers. `seed`: of any sign, as requests have it."""
    return np.random.default_rng(seed % 2**64)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` ids, uniform over [0, vocab_size). Equal seeds give equal prompts."""
    ids = seeded_generator(seed).integers(0, vocab_size, size=(count, length))
    return [[int(token) for token in row] for row in ids]
