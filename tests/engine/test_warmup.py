"""A warmed-up engine gives the tokens that it would have given, and keeps nothing of the warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_decode import static
from engine.watching import GREEDY, Watch, assert_same, assert_same_logits, engine, request, run
from tiny_checkpoints import prompts, write_tiny

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime import interpreter

from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_moe import tiny_qwen3_moe
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.config import EngineConfig
from allotrope.engine import warmup as warmup_module
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.engine.model_runner import GraphShapes
from allotrope.engine.ranks.rank_group import RankGroup
from allotrope.engine.warmup import warm_up
from allotrope.engine.worker import Worker
from allotrope.kernels import pdl
from allotrope.request import SamplingParams

CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": tiny_llama,
    "experts": tiny_qwen3_moe,
    "hybrid": tiny_qwen3_next,
}
OPTIONS = {"device": "cpu", "max_num_seqs": 5, "max_num_batched_tokens": 48, "page_size": 4, "max_model_len": 96}
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=6, seed=3)
ASKED = [request(f"r{i}", ids, (GREEDY, DRAWN)[i % 2]) for i, ids in enumerate(prompts((5, 33, 7, 60)))]


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny(CONFIGS[request.param](), tmp_path_factory.mktemp("tiny")).directory


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are warmed up on this CPU."""
    monkeypatch.setattr("allotrope.kernels.warmup.triton_reasons", lambda device: [])


@pytest.fixture
def kernels(own_choices: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels run on this CPU, in Triton's interpreter; filled with the names of those that are launched."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU kernels are not interpreted")
    launched: list[str] = []
    plain = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(self.fn.__name__)
        plain(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    for name in (
        "kernels.triton_version",
        "attention.mha.family",
        "attention.gdn.family",
    ):
        monkeypatch.setattr(f"allotrope.{name}.triton_reasons", lambda device: [])
    yield launched


def warmed_up(running: Engine, decode: GraphShapes | None = None) -> None:
    worker: Any = running._executor.worker  # type: ignore[attr-defined]
    warm_up(worker.model, worker.draft_model, worker.load_plan, worker.config, decode)


def assert_untouched(running: Engine) -> None:
    """No byte of the caches was written."""
    model_runner = running._executor.worker.model_runner  # type: ignore[attr-defined]
    written = [
        (layer, cache, field)
        for layer, caches in enumerate(model_runner.arena.layers)
        for cache, fields in caches.items()
        for field, view in fields.items()
        if view.contiguous().view(torch.uint8).any()
    ]
    assert not written


def test_a_warm_up_leaves_nothing(model: Path, here: None, caplog: pytest.LogCaptureFixture) -> None:
    want, got = Watch(), Watch()
    tokens = run(engine(model, want, **OPTIONS), ASKED)
    running = engine(model, got, **OPTIONS)
    state = torch.get_rng_state()
    held = {name: tensor.clone() for name, tensor in running.model.state_dict().items()}
    with caplog.at_level(logging.DEBUG, "allotrope"):
        warmed_up(running)
    assert "compiled 0 kernels in" in caplog.text and "the warm-up failed" not in caplog.text
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, held[name]) for name, tensor in running.model.state_dict().items())
    assert_untouched(running)
    assert_same(run(running, ASKED), tokens)
    assert_same_logits(got, want)


def test_kernels_are_launched_after_it_only(model: Path, here: None, kernels: list[str]) -> None:
    """Kernels that were skipped have left nothing where later ones read: tables, scratch, states."""
    options = OPTIONS | {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    asked = [request(f"r{i}", ids, replace(ASKED[i].params, max_tokens=2)) for i, ids in enumerate(prompts((3, 5)))]
    want, got = Watch(), Watch()
    tokens = run(engine(model, want, **options), asked)
    assert {"norm_kernel", "peaks_kernel", "decode_kernel"} <= set(kernels)
    running = engine(model, got, **options)
    kernels.clear()
    warmed_up(running)
    assert not kernels
    assert_untouched(running)
    assert_same(run(running, asked), tokens)
    assert_same_logits(got, want)
    assert kernels


def test_the_masks_of_grammars_are_warmed_up(
    tmp_path: Path, here: None, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine(write_tiny(tiny_llama(), tmp_path).directory, **OPTIONS)
    compiled: set[str] = set()
    monkeypatch.setattr(pdl, "compile_for", lambda launch, *_, **__: compiled.add(launch.__self__.fn.__name__))
    warmed_up(running)
    assert {"mask_tokens_kernel", "peaks_kernel"} <= compiled


def test_static_steps_are_warmed_up_on_buffers_of_their_own(tmp_path: Path, here: None) -> None:
    model = write_tiny(tiny_llama(), tmp_path).directory
    plain = engine(model, **OPTIONS)
    static(plain, 5)
    tokens = run(plain, ASKED)
    running = engine(model, **OPTIONS)
    model_runner = static(running, 5)
    warmed_up(running, GraphShapes(5, 96, 5, 0, capture=False))
    assert model_runner.graphs is not None and model_runner.buffers is not None
    assert (model_runner.graphs.eager, model_runner.graphs.replays) == (0, 0)
    assert not model_runner.buffers._heads.any() and not model_runner.buffers.hidden.any()
    assert_untouched(running)
    assert_same(run(running, ASKED), tokens)


def test_a_warm_up_that_fails_is_logged_and_the_engine_goes_on(
    model: Path, here: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such\nluck")

    tokens = run(engine(model, **OPTIONS), ASKED)
    running = engine(model, **OPTIONS)
    monkeypatch.setattr(LoadPlan, "sampler", lambda load_plan: fail)
    with caplog.at_level(logging.INFO, "allotrope"):
        warmed_up(running)
    (told,) = [record for record in caplog.records if "warm-up" in record.getMessage()]
    assert told.levelno == logging.WARNING and told.getMessage().endswith("launched: RuntimeError: no such luck")
    assert_untouched(running)
    assert_same(run(running, ASKED), tokens)


@pytest.mark.parametrize(
    "option",
    [
        {"max_model_len": 2},
        {"max_num_batched_tokens": 5},
        {"max_model_len": 20},
        {"max_model_len": 128},
        {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 1},
    ],
)
def test_steps_of_every_length_are_warmed_up(
    model: Path, option: dict[str, int], here: None, caplog: pytest.LogCaptureFixture
) -> None:
    options = OPTIONS | option
    config = EngineConfig(model=str(model), dtype="float32", kv_cache_memory_bytes=1 << 22, **options)
    with caplog.at_level(logging.DEBUG, "allotrope"):
        memory = Worker(resolve_load_plan(config), config, RankGroup(0, 1)).plan_memory()
    assert memory.tokens and "compiled 0 kernels in" in caplog.text


def test_nothing_is_warmed_up_where_no_kernel_runs(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "allotrope"):
        warmed_up(engine(model, **OPTIONS))
    assert " kernels in " not in caplog.text and "warm-up" not in caplog.text


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], [1]),
        ([1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64], [1, 2, 4, 8, 16, 24, 32, 56, 64]),
        ([1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100], [1, 2, 4, 8, 16, 24, 32, 56, 64, 96, 100]),
    ],
)
def test_one_size_stands_for_each_kind_of_launch(sizes: list[int], expected: list[int]) -> None:
    assert warmup_module._launched_differently(sizes) == expected
