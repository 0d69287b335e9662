"""A sleep frees storages and fills them again, and an engine that has slept answers as before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine.watching import engine, request, run
from tiny_checkpoints import prompts
from torch import nn

from allotrope.architectures.registry import find_architecture
from allotrope.engine import sleep
from allotrope.engine.sleep import SleepingMemory, tensors_of
from allotrope.errors import InvalidRequest


@dataclass(frozen=True)
class _Packed:
    values: torch.Tensor
    scales: tuple[torch.Tensor, ...]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(7), requires_grad=False)
        self.weight = _Packed(torch.randn(5, 6), (torch.randn(3),))
        self.register_buffer("table", torch.arange(4))
        self.part = self.weight.values[1:3]


def test_every_tensor_of_a_model_is_found() -> None:
    model = nn.Sequential(_Layer(), _Layer())
    found = {one.data_ptr() for one in tensors_of(model)}
    for layer in model:
        assert isinstance(layer, _Layer)
        held = (layer.bias, layer.weight.values, *layer.weight.scales, layer.get_buffer("table"), layer.part)
        assert {one.data_ptr() for one in held} <= found


def test_tensors_and_their_views_come_back() -> None:
    model = _Layer()
    caches = [torch.randn(8, 8)]
    before = [one.clone() for one in tensors_of(model)]
    asleep = SleepingMemory(tensors_of(model), caches)
    assert asleep.bytes == 7 * 4 + 5 * 6 * 4 + 3 * 4 + 4 * 8 + 8 * 8 * 4
    assert {one.untyped_storage().nbytes() for one in (*tensors_of(model), *caches)} == {0}
    asleep.restore()
    assert all(map(torch.equal, tensors_of(model), before))
    assert not caches[0].any()
    model.weight.values[1, 0] = 5.0
    assert model.part[0, 0] == 5.0


def test_nothing_is_freed_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "available_memory", lambda: 8)
    kept = torch.ones(4)
    with pytest.raises(InvalidRequest, match="host memory") as refused:
        SleepingMemory([kept], [])
    assert refused.value.param == "level"
    assert torch.equal(kept, torch.ones(4))


# One of each family.
NAMES = (
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    "DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "DeepseekV4ForCausalLM",
)
LENGTHS = (5, 30, 7, 70)


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tiny config of an architecture, for random weights."""
    config = find_architecture({"architectures": [request.param]}, "").tiny()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_computes_as_before(model: Path) -> None:
    """Whatever the layers and backends hold of a weight is a view of it, or a copy of their own."""
    running = engine(model, load_format="dummy", max_model_len=256, device="cpu")
    asked = prompts(LENGTHS)
    want = run(running, [request(f"r{i}", ids) for i, ids in enumerate(asked)])
    asleep = SleepingMemory(tensors_of(running.model), ())
    assert asleep.bytes >= sum(one.nbytes for one in running.model.parameters())
    asleep.restore()
    running.reset_prefix_cache()
    assert run(running, [request(f"r{i}", ids) for i, ids in enumerate(asked)]) == want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: there is no memory to free")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_is_free_while_the_engine_sleeps(model: Path, dtype: str) -> None:
    running = engine(
        model, load_format="dummy", max_model_len=256, device="cuda", dtype=dtype, kv_cache_memory_bytes=64_000_000
    )
    running.capture_all()
    asked = prompts(LENGTHS)
    want = run(running, [request(f"r{i}", ids) for i, ids in enumerate(asked)])
    held = running.memory.bytes + sum(one.nbytes for one in tensors_of(running.model) if one.device.type == "cuda")
    before = torch.cuda.memory_allocated()
    for turn in range(2):
        running.sleep()
        assert before - torch.cuda.memory_allocated() > 0.9 * held
        running.wake()
        again = run(running, [request(f"{turn} {i}", ids) for i, ids in enumerate(asked)])
        assert list(again.values()) == list(want.values())
    running.close()


def test_an_engine_sleeps_between_requests(tmp_path: Path) -> None:
    config = find_architecture({"architectures": ["LlamaForCausalLM"]}, "").tiny()
    (tmp_path / "config.json").write_text(json.dumps(config))
    running = engine(tmp_path, load_format="dummy", max_model_len=256, device="cpu")
    (ids,) = prompts((70,))
    running.add(request("open", ids))
    with pytest.raises(InvalidRequest, match="1 requests are open"):
        running.sleep()
    running.abort(["open"])
    want = run(running, [request("r", ids)])
    running.sleep()
    running.wake()
    assert run(running, [request("r", ids)]) == want
    assert running.stats().prefix_hits == 0
