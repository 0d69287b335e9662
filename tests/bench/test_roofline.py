"""The engine bench's roofline without a GPU: what steps read, and which class takes the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import tiny

from allotrope import SamplingParams
from bench.engine import roofline_report
from bench.engine.measuring import random_prompts


def test_a_roofline_needs_a_gpu_and_one_model(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine.main([str(tmp_path), "--roofline"]) == 2
    assert capsys.readouterr().err == "there is no GPU to measure a roofline on\n"
    with pytest.raises(SystemExit):
        engine.main([str(tmp_path), str(tmp_path / "other"), "--roofline"])


def test_a_roofline_of_a_synthetic_profile(engine: Any, tmp_path: Path) -> None:
    from bench.engine.launches import Launch, Span, micros_by_class

    spans = [Span("mha", 10, 20), Span("dense", 20, 30), Span("experts", 30, 40), Span("head", 40, 50)]
    kernels = [("attend", 11, 8.0), ("store", 12, 2.0), ("gemm", 21, 4.0), ("group", 31, 1.0), ("product", 32, 9.0)]
    kernels += [("gemm", 41, 5.0), ("norm_kernel", 51, 1.0), ("nvjet_router", 52, 6.0)]
    micros = micros_by_class([Launch(*kernel) for kernel in kernels], spans, frozenset({"norm_kernel"}))
    assert micros == {"mha": 10.0, "dense": 10.0, "experts": 10.0, "head": 5.0, "rest": 1.0}

    work = {
        "mha": {"bytes": 5_000_000, "flops": 10**9, "fp8": 0},
        "dense": {"bytes": 1_000_000, "flops": 4 * 10**9, "fp8": 2 * 10**9},
        "experts": {"bytes": 0, "flops": 2 * 10**9, "fp8": 0},
        "head": {"bytes": 5_000_000, "flops": 0, "fp8": 0},
    }
    ceilings = {"copy": 1e12, "matmul": {"bf16": 1e15, "fp8": 2e15}}
    classes = roofline_report.roofline_classes(work, micros, ceilings)
    assert {kind: (one["least_us"], one["bound"], one["of_ceiling"]) for kind, one in classes.items()} == {
        "mha": (pytest.approx(5.0), "copy", pytest.approx(0.5)),
        "dense": (pytest.approx(3.0), "matmul", pytest.approx(0.3)),
        "experts": (pytest.approx(2.0), "matmul", pytest.approx(0.2)),
        "head": (pytest.approx(5.0), "copy", pytest.approx(1.0)),
        "rest": (0.0, "copy", 0.0),
    }
    slow = roofline_report.roofline_classes(work, {}, {"copy": 1e12, "matmul": {"bf16": 1e15}})
    assert slow["dense"]["least_us"] == pytest.approx(4.0) and slow["dense"]["of_ceiling"] is None

    step = {"requests": 2, "tokens": 2, "seen": 20, "classes": classes}
    report = {
        "command": "python bench/engine.py tiny --roofline", "date": "today", "model": "tiny", "described": "Small.",
        "settings": {"runs": 3}, "environment": {"device": "none"}, "ceilings": ceilings, "steps": {"decode": step},
    }  # fmt: skip
    paths = roofline_report.write_roofline(tmp_path / "found" / "roofline", report)
    assert json.loads(paths[0].read_text()) == report
    page = paths[1].read_text()
    assert "## decode: 2 requests, 2 tokens, 20 visible" in page
    assert "| mha | 0.005 | 1.0 | copy | 5.0 | 10.0 | 50% |" in page
    assert "| all | 0.011 | 7.0 |  | 15.0 | 36.0 | 42% |" in page


@pytest.mark.parametrize(("architecture", "family"), [("Qwen3MoeForCausalLM", "mha"), ("DeepseekV4ForCausalLM", "csa")])
def test_a_profiled_step_names_every_class(architecture: str, family: str, tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    from allotrope.config import EngineConfig
    from bench.engine.launches import classes_of, decoding, lengths_of, named_spans

    (tmp_path / "config.json").write_text(json.dumps(tiny(architecture)))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", threads=1, max_model_len=64
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    running = decoding(config, [[5, 6, 7], [8, 9, 10, 11]], params)
    before = running.model.backends
    profiler = profile(activities=[ProfilerActivity.CPU])
    plans: Any = running._executor.worker.model_runner._layers  # type: ignore[attr-defined]
    with classes_of(running.model), lengths_of(plans) as passes, profiler as profiled:
        running.step()
    assert running.model.backends == before
    ((new, seen),) = passes
    assert new == (1, 1) and seen[1] == seen[0] + 1
    names = [span.name for span in named_spans(profiled.profiler.kineto_results.events())]
    layers = len(running.model.layers)
    assert set(names) == {family, "experts", "dense", "head"}
    assert names.count(family) == layers and names.count("head") == 1
    running.close()


def test_roofline_steps_are_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where no kernel is seen: what the steps read, and their least work."""
    from allotrope.config import EngineConfig
    from allotrope.engine.load_plan import resolve_load_plan
    from bench.engine import roofline
    from bench.engine.launches import Launch, Span

    def unprofiled(running: Any, spans: Any) -> tuple[list[Launch], list[Span]]:
        with spans(running.model):
            running.step()
        return [Launch("attend", 1, 2.0)], [Span("mha", 0, 2)]

    monkeypatch.setattr(roofline, "record", unprofiled)
    monkeypatch.setattr(roofline, "our_kernels", frozenset)
    (tmp_path / "config.json").write_text(json.dumps(tiny("Qwen3MoeForCausalLM")))
    options = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "threads": 1, "async_scheduling": "on"}
    sizes = roofline.Sizes(requests=3, context=20, prefill=50, runs=2)

    def prompts(what: str, count: int, length: int) -> list[list[int]]:
        return random_prompts(what, count, length, 320)

    found = roofline.profile_steps(str(tmp_path), sizes, prompts, options)
    decode, prefill = found["decode"], found["prefill"]
    assert decode.new == (1, 1, 1) and all(20 < n < 40 for n in decode.seen) and decode.micros == {"mha": 2.0}
    assert (prefill.new, prefill.seen) == ((50,), (50,))
    load_plan = resolve_load_plan(EngineConfig(model=str(tmp_path), **options))
    assert prefill.work == roofline.least(load_plan, (50,), (50,))
    with pytest.raises(RuntimeError, match=r"requests=3, of which \d decode at once"):
        roofline.profile_steps(str(tmp_path), sizes, prompts, options | {"kv_cache_memory_bytes": 61_440})
