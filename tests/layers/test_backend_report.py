"""Who runs the attention of each layer is said once for each kind, with why every better-ranked backend does not."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import engine

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.backend import Chooser, choose
from allotrope.kernels.chip import CHIPS
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.layers.backend_report import backend_choices, uncaptured, warn_without_kernels
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.parallel import Parallel

# Of each family, a model: what the log has to say on a CPU does not depend on the processor but for `compiled`.
MODELS = {
    "mha": "LlamaForCausalLM",
    "mla": "DeepseekV3ForCausalLM",
    "dsa": "DeepseekV32ForCausalLM",
    "gdn": "Qwen3NextForCausalLM",
    "csa": "DeepseekV4ForCausalLM",
}


def decoder(name: str, build: Build) -> Decoder:
    """The architecture's tiny model, its weights not filled."""
    architecture, spec = read_spec(find_architecture({"architectures": [name]}, "").tiny(), name)
    return architecture.decoder(spec, build)


def split(lines: list[str]) -> tuple[list[str], list[str]]:
    """Those of attention, and those of operations."""
    operations = [line for line in lines if line.startswith("operation ")]
    return [line for line in lines if line not in operations], operations


def test_every_family_has_a_model() -> None:
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_choice_is_said_with_its_reasons(name: str) -> None:
    """Each distinct attention has one sentence: its layers, who runs it, each backend passed over and each reason."""
    build = Build()
    model = decoder(name, build)
    lines, operations = split(backend_choices(model, build))
    kinds = dict.fromkeys((spec, backend) for spec, backend in model.attention)
    assert len(lines) == len(kinds) == len(set(lines))
    for line, (spec, backend) in zip(lines, kinds, strict=True):
        layers = [i for i, found in enumerate(model.attention) if found == (spec, backend)]
        assert line.startswith(f"attention of layers {layers[0]}")
        assert f": {spec.family}/{backend.name} (" in line
        for better in FAMILIES[spec.family].backends:
            if better.name == backend.name:
                break
            reasons = better.rejects(spec, build.chooser.chip)
            assert reasons and f"{better.name}: {', '.join(reasons)}" in line
    assert len(operations) == len(set(operations))
    chosen = {f"operation {one.op}/{one.backend.name}" for one in build.chooser.choices if one.op not in FAMILIES}
    assert {line.partition(" (")[0].partition(";")[0] for line in operations} == chosen


@pytest.mark.parametrize("family", sorted(MODELS))
def test_what_ranks_send_is_said(family: str) -> None:
    """Sums of every model; gathers of those whose ranks each select top-k indices of a share of the tokens."""
    build = Build(parallel=Parallel(0, 2))
    said = "\n".join(backend_choices(decoder(MODELS[family], build), build))
    assert "operation all_reduce/reference" in said
    assert ("operation all_gather/reference" in said) == (family in ("dsa", "csa"))
    assert "operation reduce_scatter" not in said


@pytest.mark.parametrize("family", sorted(MODELS))
def test_what_was_asked_for_is_the_reason(family: str) -> None:
    build = Build(chooser=Chooser(CPU_CHIP, {family: "reference", **({"mha": "reference"} if family == "gdn" else {})}))
    lines = [line for line in backend_choices(decoder(MODELS[family], build), build) if f": {family}/" in line]
    assert lines
    for line in lines:
        assert f"{family}/reference" in line
        for backend in FAMILIES[family].backends[:-1]:
            assert f"{backend.name}: reference was asked for" in line


def test_a_backend_of_a_family_that_is_not_there_is_named() -> None:
    build = Build(chooser=Chooser(CPU_CHIP, {"gdn": "chunked"}))
    *_, last = backend_choices(decoder("LlamaForCausalLM", build), build)
    assert last == "attention backend gdn=chunked is not used: this model has no layers of gdn"


def test_fp8_rows_say_why_the_reference_runs(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """An engine writes it to its log: on a CPU no faster backend has FP8 rows."""
    config = find_architecture({"architectures": ["LlamaForCausalLM"]}, "").tiny()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "allotrope"):
        engine(tmp_path, load_format="dummy", device="cpu", kv_cache_dtype="fp8", max_model_len=64).close()
    (line,) = [text for text in caplog.messages if text.startswith("attention of layers")]
    assert line.startswith("attention of layers 0-1: mha/reference (")
    assert "kv_dtype=float8_e4m3fn" in line and "cpu: kv_dtype=torch.float8_e4m3fn (needs 2 or 4 bytes)" in line


def test_steps_that_another_backend_takes_are_said() -> None:
    """`compiled` has queries of its rows' type alone; it is chosen all the same, by what the rows are."""
    for family in ("mha", "mla"):
        spec = next(spec for spec, _ in decoder(MODELS[family], Build()).attention if spec.family == family)
        backend = next(one for one in FAMILIES[family].backends if one.name == "compiled")
        (said,) = backend.fallbacks(spec, torch.bfloat16, CPU_CHIP)
        assert "every step runs as" in said and "dtype=torch.bfloat16 (needs kv_dtype=torch.float32)" in said


def test_what_cannot_be_captured_is_named() -> None:
    model = decoder("DeepseekV32ForCausalLM", Build())
    assert uncaptured(model.attention) == ["dsa/reference cannot be captured"]
    for layer in model.layers:
        mixer: Any = layer.mixer
        mixer.backend = next(one for one in FAMILIES[mixer.spec.family].backends if one.name == "triton")
    assert uncaptured(model.attention) == []


def test_reasons_on_a_gpu_are_those_of_the_layer() -> None:
    """A layer that no kernel takes says so on a GPU too: heads of states that are too wide."""
    spec = next(spec for spec, _ in decoder("Qwen3NextForCausalLM", Build()).attention if spec.family == "gdn")
    wide = dataclasses.replace(spec, k_head_dim=512)
    family = FAMILIES["gdn"]
    choice = choose(family, wide, CHIPS["sm_90"])
    over = choice.passed_over
    assert list(over) == [one.name for one in family.backends[: family.backends.index(choice.backend)]]
    assert "k_head_dim=512 (allowed: at most 256)" in over["triton"]


def test_every_choice_of_an_operation_is_said_with_its_reasons() -> None:
    build = Build(chooser=Chooser(CPU_CHIP, {"moe_group": "reference", "hash_route": "reference"}))
    lines = backend_choices(decoder("Qwen3MoeForCausalLM", build), build)
    (line,) = [line for line in lines if line.startswith("operation moe_group/")]
    assert line.startswith("operation moe_group/reference (experts=")
    assert "triton: reference was asked for, chip=cpu (needs a GPU)" in line and "cpu: reference was asked for" in line
    assert lines[-1] == "backend hash_route=reference is not used: this model has no operation hash_route"


def test_a_gpu_without_its_kernels_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU their absence is nothing to warn of."""
    for name in ("allotrope.kernels.triton_version", "allotrope.layers.backend_report"):
        monkeypatch.setattr(f"{name}.triton_reasons", lambda chip: ["triton is not installed"])
    for chip in (CPU_CHIP, CHIPS["sm_90"]):
        build = Build(device=torch.device("meta"), chooser=Chooser(chip, {"mha": "reference"}))
        with caplog.at_level(logging.INFO, "allotrope"):
            warn_without_kernels(build)
        warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert warned == (
            ["layers run at less than full speed, by PyTorch alone: triton is not installed"] if chip.is_gpu else []
        )
