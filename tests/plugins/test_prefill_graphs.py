"""Steps with prompts inside a host run on padded static buffers, with the attention of their true rows between the
pieces: the same tokens as without. What is captured of them is held on a GPU, by `test_on_gpu.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugins.hosting import hosted
from tiny_checkpoints import prompts

from allotrope import LLM, SamplingParams
from allotrope.architectures.registry import find_architecture
from allotrope.graphs.piecewise_graphs import PiecewiseGraphs
from allotrope.layers.step import Step
from allotrope.plugins import prefill_graphs
from allotrope.plugins.prefill_graphs import PrefillGraphs
from allotrope.verify.random_checkpoint import write_random

# One of each family, and one whose experts count rows.
ARCHITECTURES = (
    *("LlamaForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
    *("DeepseekV32ForCausalLM", "Qwen3NextForCausalLM", "DeepseekV4ForCausalLM"),
)
COUNT = 4


@pytest.mark.usefixtures("in_vllm")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_steps_give_the_same_tokens(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    asked = prompts((1, 5, 45, 150), vocab_size=300)
    sizes: list[tuple[int, int]] = []
    plain = PiecewiseGraphs.run

    def run(self: PiecewiseGraphs, size: int, step: Step) -> None:
        sizes.append((size, len(step.ids)))
        plain(self, size, step)

    monkeypatch.setattr(PiecewiseGraphs, "run", run)
    made = PrefillGraphs.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        # As on a GPU, but that every size has its first step for ever.
        self._captures, self._launching = True, Never()

    monkeypatch.setattr(PrefillGraphs, "__init__", init)
    with hosted(tmp_path, block_size=16, max_num_batched_tokens=64) as running:
        found = [answer.ids for answer in running.answers(asked, COUNT)]
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=256)
    wanted = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    assert found == [list(output.outputs[0].token_ids) for output in llm.generate(asked, wanted)]
    assert sizes and any(size > tokens for size, tokens in sizes), sizes


class Never(dict[int, float]):
    def setdefault(self, size: int, launching: float = 1.0) -> float:  # type: ignore[override]
        return launching


class Graphs:
    """Stands for graphs of sizes 16 and 32, of which `waits` wait for the host. `launching`: how much of the time of
    the others that takes."""

    def __init__(self, waits: set[int], fails: bool = False, launching: float = 0.05) -> None:
        self.sizes, self.waits, self.fails, self.launching = [16, 32], waits, fails, launching
        self.captured: list[int] = []
        self.ran: list[str] = []
        self.warnings: list[str] = []

    def padded(self, tokens: int) -> int:
        return 16 if tokens <= 16 else 32

    def run(self, size: int, step: object) -> None:
        self.ran.append(f"{'replay' if size in self.captured else 'eager'} {size}")

    def run_timed(self, size: int, step: object) -> float:
        self.ran.append(f"timed {size}")
        return 0.95 if size in self.waits else self.launching

    def capture(self, size: int) -> None:
        if self.fails:
            raise RuntimeError("no room")
        self.captured.append(size)

    def drop(self, size: int) -> None:
        self.captured.remove(size)


def steps_of(
    graphs: Graphs, lengths: tuple[int, ...], free: int, monkeypatch: pytest.MonkeyPatch, taken: int = 0
) -> list[str]:
    """What steps of so many tokens do. `taken`: memory of each graph."""
    monkeypatch.setattr(prefill_graphs, "free_memory", lambda device: free - taken * len(graphs.captured))

    class Decoder:
        layers = ()

        def __call__(self, step: Any) -> torch.Tensor:
            graphs.ran.append(f"plain {len(step.ids)}")
            return torch.zeros(len(step.ids), 2)

    build: Any = SimpleNamespace(device=torch.device("cpu"), parallel=SimpleNamespace(size=1))
    log: Any = SimpleNamespace(
        info=lambda *said: None, warning=lambda text, *values: graphs.warnings.append(text % values)
    )
    buffers = SimpleNamespace(
        body=lambda *args: None, refresh=lambda *args: None, kept=lambda tokens: (torch.zeros(tokens, 2), None)
    )
    monkeypatch.setattr(prefill_graphs, "PrefillBuffers", lambda *args: buffers)
    monkeypatch.setattr(prefill_graphs, "PiecewiseGraphs", lambda *args, **options: graphs)
    monkeypatch.setattr(prefill_graphs, "SIZES", graphs.sizes)
    given: Any = (Decoder(), build, None, log)
    made = PrefillGraphs(*given, wanted=True)
    assert not made._captures, "nothing is captured on a CPU"
    made._captures = True
    for length in lengths:
        step: Any = SimpleNamespace(ids=torch.zeros(length), batch=SimpleNamespace(positions=torch.zeros(length)))
        assert len(made.run(step)) == length
    return graphs.ran


def test_a_size_is_captured_behind_its_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = steps_of(Graphs({16, 32}), (9, 12, 30, 9, 16, 40), 1 << 40, monkeypatch)
    assert ran == ["eager 16", "timed 16", "eager 32", "replay 16", "replay 16", "plain 40"]


def test_a_size_that_keeps_the_device_busy_runs_unpadded_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = steps_of(Graphs({16}), (30, 30, 30, 9, 9, 9), 1 << 40, monkeypatch)
    assert ran == ["eager 32", "timed 32", "plain 30", "eager 16", "timed 16", "replay 16"]
    # What is captured already stays.
    ran = steps_of(Graphs({32}), (30, 30, 9, 9, 9, 30), 1 << 40, monkeypatch)
    assert ran == ["eager 32", "timed 32", "eager 16", "timed 16", "plain 9", "replay 32"]


def test_a_step_as_long_as_its_size_is_replayed_where_launching_takes_a_part_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = steps_of(Graphs({16}, launching=0.3), (32, 32, 32, 30, 9, 9, 9, 32), 1 << 40, monkeypatch)
    assert ran == [
        *("eager 32", "timed 32", "replay 32", "plain 30"),
        *("eager 16", "timed 16", "replay 16", "replay 32"),
    ]
    # One that a padded step has measured is captured with the next one that is as long as it.
    ran = steps_of(Graphs(set(), launching=0.3), (30, 30, 32, 32, 30), 1 << 40, monkeypatch)
    assert ran == ["eager 32", "timed 32", "timed 32", "replay 32", "plain 30"]
    # Where it takes next to none, no graph is worth its memory.
    ran = steps_of(Graphs(set()), (32, 32, 32, 16, 16, 16), 1 << 40, monkeypatch)
    assert ran == ["eager 32", "timed 32", "plain 32", "eager 16", "timed 16", "plain 16"]


@pytest.mark.parametrize(("free", "fails", "why"), [(1 << 30, False, "little memory"), (1 << 40, True, "no room")])
def test_without_room_no_size_more_is_captured(
    free: int, fails: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Graphs({16, 32}, fails)
    graphs.captured.append(16)
    ran = steps_of(graphs, (30, 30, 30, 16), free, monkeypatch)
    assert ran == ["eager 32", "timed 32", "plain 30", "replay 16"]
    (warning,) = graphs.warnings
    assert "no more prefill graphs" in warning and why in warning


def test_a_graph_that_takes_too_much_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs({16, 32})
    ran = steps_of(graphs, (9, 9, 9, 30, 30, 30, 9), 3 << 30, monkeypatch, taken=(1 << 30) + (1 << 29))
    # The first one leaves half of what the second may begin with.
    assert ran == ["eager 16", "timed 16", "replay 16", "eager 32", "timed 32", "plain 30", "replay 16"]
    (warning,) = graphs.warnings
    assert "after those of [16] tokens" in warning and "little memory is free" in warning
    graphs = Graphs({16, 32})
    ran = steps_of(graphs, (9, 9, 9, 9), 3 << 30, monkeypatch, taken=(2 << 30) + (1 << 29))
    assert ran == ["eager 16", "timed 16", "plain 9", "plain 9"] and graphs.captured == []
    (warning,) = graphs.warnings
    assert "the one of 16 left little memory free" in warning
