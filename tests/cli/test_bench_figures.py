"""The figures of a benchmark are what their definitions say, and files hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allotrope.bench.load import Traffic, send_times
from allotrope.bench.record import RequestRecord, random_prompts, samples, summarize
from allotrope.bench.report import tables, write_json, write_plot
from allotrope.errors import ConfigError

RECORDS = [
    RequestRecord(prompt_tokens=10, started=1.0, arrivals=[1.5, 1.75, 2.5], output_tokens=5, finished=2.6),
    RequestRecord(prompt_tokens=20, started=2.0, arrivals=[2.25], output_tokens=1, finished=2.25),
    RequestRecord(prompt_tokens=30, started=2.0, finished=2.0, error="HTTP 429: full"),
]


def test_figures_follow_their_definitions() -> None:
    assert samples(RECORDS) == {
        "TTFT": [0.5, 0.25],
        "TPOT": [pytest.approx(1.0 / 4)],
        "ITL": [0.25, 0.75],
        "E2E": [1.5, 0.25],
    }
    summary = summarize(RECORDS, duration_s=2.0)
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, ["HTTP 429: full"])
    assert (summary.prompt_tokens, summary.output_tokens) == (30, 6)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (1.0, 3.0, 18.0)
    assert summary.latency["TTFT"].mean_ms == pytest.approx(375)
    assert summary.latency["TTFT"].p50_ms == pytest.approx(375)
    assert summary.latency["ITL"].p99_ms == pytest.approx(745)


def test_percentiles_of_many_samples() -> None:
    many = [RequestRecord(1, 0.0, [ms / 1000], 1) for ms in range(1, 102)]
    spread = summarize(many, 1.0).latency["TTFT"]
    assert (spread.p50_ms, spread.p99_ms) == (pytest.approx(51), pytest.approx(100))


def test_all_failed_still_has_a_summary() -> None:
    summary = summarize(RECORDS[2:], 1.0)
    assert (summary.completed, summary.failed, summary.latency) == (0, 1, {})
    assert len(tables(summary)) == 2


def test_json_holds_everything(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"num_prompts": 3}, summarize(RECORDS, 2.0), RECORDS)
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["settings"] == {"num_prompts": 3}
    assert document["summary"]["latency"]["E2E"]["p50_ms"] == pytest.approx(875)
    assert [request["error"] for request in document["requests"]] == [None, None, "HTTP 429: full"]
    assert document["requests"][0]["itl_ms"] == [250, 750]
    assert document["requests"][2]["ttft_ms"] is None


def test_plot_is_a_png_and_needs_a_success(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the bench extra")
    write_plot(tmp_path / "run.png", "a title", RECORDS)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no request succeeded"):
        write_plot(tmp_path / "none.png", "a title", RECORDS[2:])


def test_prompts_and_send_times_repeat_with_their_seed() -> None:
    prompts = random_prompts(3, 7, 50, seed=1)
    assert prompts == random_prompts(3, 7, 50, seed=1) != random_prompts(3, 7, 50, seed=2)
    assert [len(prompt) for prompt in prompts] == [7, 7, 7]
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    times = send_times(2000, Traffic(output_len=1, rate=10.0, seed=3))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)
    assert send_times(3, Traffic(output_len=1)) == [0.0, 0.0, 0.0]


def test_seeds_may_be_negative() -> None:
    """As those of requests."""
    assert random_prompts(3, 7, 50, seed=-1) != random_prompts(3, 7, 50, seed=1)
    assert len(send_times(3, Traffic(output_len=1, rate=10.0, seed=-1))) == 3
