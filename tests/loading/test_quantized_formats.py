"""Weights that stay quantized are, cut and reordered, the numbers that the same checkpoint has when it is unpacked."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_twins import write_twin
from safetensors.torch import load_file, save_file
from torch import nn

from allotrope.architectures.registry import find_architecture
from allotrope.checkpoint.dequantize import dequantized
from allotrope.checkpoint.weights import Loader
from allotrope.config import EngineConfig
from allotrope.engine.load import load_model
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.layers.parallel import Parallel, parallel_of, placement_of
from allotrope.layers.weights import SCALES, VALUES
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.weight import QuantizedWeight
from allotrope.rank_layout import RankLayout
from allotrope.verify.options import VerifyOptions
from allotrope.verify.random_checkpoint import write_random
from allotrope.verify.run import verify

pytest.importorskip("transformers", reason="transformers is not installed")

NAMES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "KimiLinearForCausalLM",
    "MiniMaxM2ForCausalLM",
)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture
def twin(request: pytest.FixtureRequest, twins: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    if name not in twins:
        folder = tmp_path_factory.mktemp(name)
        write_random(tiny(name), folder / "plain", None, 0)
        twins[name] = write_twin(folder / "plain", folder / "twin", mxfp4=name == "GptOssForCausalLM")
    return twins[name]


def tiny(name: str) -> dict[str, Any]:
    return find_architecture({"architectures": [name]}, name).tiny()


def loaded(load_plan: LoadPlan, keep: bool) -> nn.Module:
    build = load_plan.build if keep else dataclasses.replace(load_plan.build, formats={})
    model = load_plan.architecture.decoder(load_plan.spec, build)
    rules = load_plan.architecture.rules(load_plan.spec)
    Loader(model, rules).load(dequantized(load_plan.checkpoint))
    return model


def effective(model: nn.Module, name: str, section: str) -> tuple[torch.Tensor, bool]:
    """A section of a weight as plain numbers, and whether it is kept quantized."""
    parameters = dict(model.named_parameters())
    kept = next((one for one in (name, name + VALUES) if one in parameters and has(parameters[one], section)), None)
    assert kept is not None, (name, section)
    plain = cut(parameters[kept], section)
    if kept == name:
        return plain.float(), False
    scales = parameters[name + SCALES]
    taken = cut(scales, section) if has(scales, section) else scales.data
    packed = plain.dtype == torch.uint8
    run = 0 if scales.shape[-1] == 1 and not packed else 32 if packed else 16
    return QuantizedWeight(MXFP4 if packed else Fp8(run), plain, taken).dequantize(), True


def has(parameter: nn.Parameter, section: str) -> bool:
    return any(one.name == section for one in placement_of(parameter).sections)


def cut(parameter: nn.Parameter, section: str) -> torch.Tensor:
    placement, parallel = placement_of(parameter), parallel_of(parameter)
    one, index = placement.section(section)
    first = sum(before.local(parallel) for before in placement.sections[:index])
    return parameter.data.narrow(placement.dim + bool(placement.experts), first, one.filled(parallel))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("twin", NAMES, indirect=True)
def test_every_section_is_what_the_plain_one_is(twin: Path, size: int) -> None:
    """Of all ranks together: those of quantized weights are cut between groups."""
    shares: dict[tuple[str, str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for rank in range(size):
        parallel = Parallel(rank, size)
        config = EngineConfig(model=str(twin), quantized_weights="keep", dtype="float32", device="cpu")
        load_plan = resolve_load_plan(config, parallel)
        plain, kept = loaded(load_plan, False), loaded(load_plan, True)
        found = {}
        for name, parameter in plain.named_parameters():
            placement = placement_of(parameter)
            for section in placement.sections:
                want = cut(parameter, section.name).float()
                got, found[name, section.name] = effective(kept, name, section.name)
                key = name, section.name, placement.dim + bool(placement.experts)
                shares.setdefault(key, []).append((got, want))
        # Projections and experts are kept; what makes heads of latents, norms, routers and embeddings are not.
        quantized = {name for (name, _), one in found.items() if one}
        assert (
            any(".mixer." in name for name in quantized) or "GptOss" in load_plan.checkpoint.config["architectures"][0]
        )
        assert any("experts.down" in name for name in quantized)
        assert not any("router" in name or "embedding" in name or "norm" in name for name in quantized)
    for (*key, dim), pairs in shares.items():
        got, want = (torch.cat(ones, dim) for ones in zip(*pairs, strict=True))
        assert torch.equal(got, want), key


def test_experts_in_two_formats_are_all_read_plain(tmp_path: Path) -> None:
    """A later one is plain, as where a list of what is not quantized names it."""
    write_random(tiny("Glm4MoeForCausalLM"), tmp_path / "plain", None, 0)
    twin = write_twin(tmp_path / "plain", tmp_path / "twin")
    stored, plain = (load_file(path / "model.safetensors") for path in (twin, tmp_path / "plain"))
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    del stored[name + "_scale_inv"]
    save_file(stored | {name: plain[name]}, twin / "model.safetensors")
    config = EngineConfig(model=str(twin), quantized_weights="keep", dtype="float32", device="cpu")
    load_plan = resolve_load_plan(config)
    want, got = (dict(loaded(load_plan, keep).named_parameters()) for keep in (False, True))
    assert torch.equal(got["layers.1.ffn.experts.down"], want["layers.1.ffn.experts.down"])
    assert "layers.2.ffn.experts.down" + VALUES in got


@pytest.mark.parametrize("keep", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("twin", NAMES, indirect=True)
def test_a_rank_has_whole_experts_and_reads_no_others(twin: Path, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever format: those of all ranks are those of one rank, and the rest is as without expert parallelism."""
    config = EngineConfig(model=str(twin), quantized_weights="keep", dtype="float32", device="cpu")
    whole = loaded(resolve_load_plan(config), keep)
    layout, read = RankLayout(1, 4, expert_parallel=True), Loader._read
    names: list[list[str]] = []

    def noted(self: Loader, checkpoint: Any, name: str, *rest: Any) -> None:
        names[-1].append(name)
        read(self, checkpoint, name, *rest)

    monkeypatch.setattr(Loader, "_read", noted)
    for rank in range(layout.size):
        names.append([])
        load_plan = resolve_load_plan(config, Parallel.of(layout, rank))
        own = loaded(load_plan, keep)
        held = {one.held for one in map(placement_of, own.parameters()) if one.held is not None}
        (mine,) = held
        for name, parameter in own.named_parameters():
            if ".experts." not in name or name.endswith(SCALES):
                continue
            for section in placement_of(parameter).sections:
                target = name.removesuffix(VALUES)
                got, want = effective(own, target, section.name), effective(whole, target, section.name)
                assert torch.equal(got[0], want[0][list(mine)]) and got[1] == want[1], (name, rank)
    of_experts = [[name for name in found if ".experts." in name] for found in names]
    if any(re.search(r"\.experts\.\d", name) for name in of_experts[0]):
        assert len({name for found in of_experts for name in found}) == sum(map(len, of_experts))


@pytest.mark.parametrize("twin", NAMES[:1], indirect=True)
def test_scales_of_rows(twin: Path, tmp_path: Path) -> None:
    channel = write_twin(twin.parent / "plain", tmp_path / "channel", scheme="channel")
    config = EngineConfig(model=str(channel), quantized_weights="keep", dtype="float32", device="cpu")
    load_plan = resolve_load_plan(config)
    plain, kept = loaded(load_plan, False), loaded(load_plan, True)
    got, quantized = effective(kept, "layers.0.mixer.out.weight", "")
    assert quantized
    assert torch.equal(got, dict(plain.named_parameters())["layers.0.mixer.out.weight"])


def sizes(load_plan: LoadPlan) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (one.shape, one.dtype) for name, one in load_plan.meta_model.named_parameters()}


@pytest.mark.parametrize("twin", NAMES, indirect=True)
def test_without_weights_the_config_says_the_same(twin: Path) -> None:
    """A dummy model of the same config is made of the same parameters, and the plan counts them alike."""
    options = {"model": str(twin), "quantized_weights": "keep", "dtype": "float32", "device": "cpu"}
    stored = resolve_load_plan(EngineConfig(**options))  # type: ignore[arg-type]
    stated = resolve_load_plan(EngineConfig(load_format="dummy", **options))  # type: ignore[arg-type]
    assert sizes(stated) == sizes(stored)
    assert stated.weight_bytes == stored.weight_bytes
    model = load_model(stated, 0)
    assert all(bool(torch.isfinite(p.data.float()).all()) for p in model.parameters() if p.is_floating_point())


@pytest.mark.parametrize("twin", ["GptOssForCausalLM"], indirect=True)
def test_four_bit_weights_are_exact(twin: Path) -> None:
    report = verify(EngineConfig(model=str(twin), quantized_weights="keep", device="cpu"), VerifyOptions())
    assert report.passed, report.verdict()
