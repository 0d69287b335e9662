"""FP8 checkpoints: unpacked they are held to exactness, kept to what rounding their activations costs."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from quantized_twins import write_int4_twin, write_twin
from torch import nn
from verify_fixtures import Tiny

from allotrope.architectures.registry import find_architecture
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.dequantize import dequantized
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.errors import ModelError
from allotrope.kernels.chip import chip_of
from allotrope.layers.weights import pop_weights
from allotrope.ops.matmul import StoredWeight, cpu_blocks, unstored_reasons
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.weight import Format, QuantizedWeight
from allotrope.verify.options import MODES, VerifyOptions
from allotrope.verify.plain_files import plain_files
from allotrope.verify.random_checkpoint import write_random
from allotrope.verify.report import Report
from allotrope.verify.rounded_products import RoundedProducts, fp8_tensors, keeps_fp8
from allotrope.verify.run import verify
from allotrope.verify.transformers_model import TransformersModel, load_transformers

pytest.importorskip("transformers", reason="transformers is not installed")

Twin = Callable[[str], Path]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A tiny checkpoint of an architecture with FP8 matrices, beside its plain one; written once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            write_random(find_architecture({"architectures": [name]}, name).tiny(), folder / "plain", None, 0)
            made[name] = write_twin(folder / "plain", folder / "twin")
        return made[name]

    return make


def run(directory: Path, mode: str = "keep", engine: dict[str, object] | None = None, **options: object) -> Report:
    config = EngineConfig(model=str(directory), quantized_weights=mode, device="cpu", **(engine or {}))
    return verify(config, VerifyOptions(**({"lengths": "5,40,70"} | options)))


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"])
def test_dequantized_weights_are_exact_in_every_mode(twin: Twin, name: str) -> None:
    report = run(twin(name), "dequantize")
    assert report.passed, report.verdict()
    assert report.limits.exact and "float64" in report.limits.origin
    assert {r.name: r.verdict for r in report.modes} == {name: "pass" for name in MODES if name != "graphs"}
    assert report.layers is not None and all(layer.error < 5e-6 for layer in report.layers.layers)
    assert "kept" not in report.engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "DeepseekV32ForCausalLM"])
def test_kept_weights_have_the_tolerance_of_their_rounding(twin: Twin, name: str, dtype: str) -> None:
    report = run(twin(name), engine={"dtype": dtype}, modes="whole,chunked-64,cached,batched")
    assert report.passed, report.verdict()
    assert report.engine.endswith("(FP8 weights kept, activations rounded)")
    assert f"Transformers in {dtype} with activations rounded" in report.limits.origin
    assert not report.remarks
    score, limit = report.modes[0].score, report.limits.median_abs
    # The engine rounds what Transformers rounded: it is as far off, not just within the limit.
    assert score is not None and limit is not None and limit / 6 < score.median_abs < 0.75 * limit
    assert score.router_ties == 0
    assert report.layers is not None
    for layer, most in zip(report.layers.layers, report.layers.limits, strict=True):
        assert most / 6 < layer.error < 0.75 * most


@pytest.fixture
def of_32(twin: Twin, tmp_path: Path) -> Path:
    """Blocks that a CPU's products read as they are stored."""
    reasons = unstored_reasons(Fp8(32, fp8_activations=False), torch.float32, chip_of(torch.device("cpu")))
    if reasons:
        pytest.skip("; ".join(reasons))
    return write_twin(twin("Qwen3MoeForCausalLM").parent / "plain", tmp_path / "twin", block=32)


def test_weights_that_a_cpu_keeps_are_exact(of_32: Path) -> None:
    """Nothing is rounded, so nothing is allowed for."""
    report = run(of_32, "auto", modes="whole,chunked-64,cached,batched")
    assert report.passed, report.verdict()
    assert report.engine.endswith("(FP8 weights kept)")
    assert report.limits.exact and "float64" in report.limits.origin
    assert report.layers is not None and all(layer.error < 5e-6 for layer in report.layers.layers)
    report = run(of_32, "auto", engine={"dtype": "bfloat16"}, modes="whole")
    assert report.passed, report.verdict()
    assert "activations rounded" not in report.limits.origin


def test_a_small_fault_of_such_weights_is_found(of_32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = cpu_blocks.multiply
    monkeypatch.setattr(cpu_blocks, "multiply", lambda *given: multiply(*given).mul_(1.001))
    report = run(of_32, "auto", modes="whole")
    assert not report.passed
    assert report.layers is not None and report.layers.first is not None and report.layers.first.index == 0


def test_rows_that_round_as_well(twin: Twin) -> None:
    report = run(twin("Qwen3MoeForCausalLM"), engine={"kv_cache_dtype": "fp8"}, modes="whole")
    assert report.passed, report.verdict()
    assert "bfloat16 with activations rounded" in report.limits.origin and "FP8 rows" in report.limits.origin


def larger(weight: QuantizedWeight) -> QuantizedWeight:
    return dataclasses.replace(weight, scales=weight.scales * 1.5)


def swapped(weight: QuantizedWeight) -> QuantizedWeight:
    """Neighbouring rows in each other's place."""
    rows = torch.arange(weight.shape[-2]) ^ 1
    return QuantizedWeight(weight.format, weight.values[..., rows, :], weight.scales[..., rows, :])


class Fault(NamedTuple):
    """`module`: whose `nth` quantized weight, as a model is loaded, is spoiled. `layer`: where that shows."""

    module: str
    nth: int
    layer: int


FAULTS = (Fault("linear", 0, 0), Fault("linear", 2, 1), Fault("moe", 0, 0), Fault("moe", 2, 2))


@pytest.mark.parametrize("change", [larger, swapped])
@pytest.mark.parametrize(
    "fault", [Fault("linear", 0, 0), Fault("linear", 2, 1), Fault("moe", 0, 0), Fault("moe", 2, 2)]
)
def test_faults_are_found(
    twin: Twin, fault: Fault, change: Callable[[QuantizedWeight], QuantizedWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = twin("Qwen3MoeForCausalLM")
    taken_over: dict[int, int] = {}
    models: list[nn.Module] = []

    def spoiled(module: nn.Module, name: str, format: Format) -> StoredWeight:
        weight = pop_weights(module, name, format)
        if not isinstance(weight, QuantizedWeight):
            return weight
        # Every engine that verify makes has the fault.
        count = taken_over.setdefault(len(models), 0)
        taken_over[len(models)] += 1
        return change(weight) if count == fault.nth else weight

    from allotrope.loading import decoder

    finish = decoder.finish

    def counted(model: nn.Module) -> None:
        models.append(model)
        finish(model)

    monkeypatch.setattr(decoder, "finish", counted)
    monkeypatch.setattr(f"allotrope.layers.{fault.module}.pop_weights", spoiled)
    report = run(directory, modes="whole")
    assert models and not report.passed
    assert report.layers is not None and report.layers.first is not None, report.verdict()
    assert report.layers.first.index == fault.layer


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "DeepseekV4ForCausalLM"])
def test_transformers_rounds_what_the_engine_rounds(twin: Twin, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held to a Transformers that rounds, the engine is off by what any fp32 is: the same products round, no others."""
    directory = twin(name)
    load_plan = resolve_load_plan(
        EngineConfig(model=str(directory), quantized_weights="keep", dtype="float32", device="cpu")
    )
    names = fp8_tensors(load_plan)
    assert keeps_fp8(load_plan) and names

    def rounding(path: Path, *args: object) -> TransformersModel:
        model = load_transformers(path, *args)
        model.around = products = RoundedProducts(model.model, open_checkpoint(str(path)), names)
        assert products.share == 1
        return model

    monkeypatch.setattr("allotrope.verify.expected_outputs.load_transformers", rounding)
    report = run(directory, modes="whole")
    score = report.modes[0].score
    assert score is not None and score.median_abs < 1e-4
    assert report.layers is not None and all(layer.error < 5e-6 for layer in report.layers.layers)


def test_weights_that_are_not_found_are_said(twin: Twin) -> None:
    directory = twin("Qwen3MoeForCausalLM")
    # Another reference has other values under the same names.
    assert not run(directory, reference=str(directory.parent / "plain"), modes="whole").remarks
    config = EngineConfig(model=str(directory), quantized_weights="keep", dtype="float32", device="cpu")
    names = fp8_tensors(resolve_load_plan(config))
    plain = open_checkpoint(str(directory.parent / "plain"))
    model = load_transformers(directory, open_checkpoint(str(directory)).config, torch.float32, 3)
    assert RoundedProducts(model.model, plain, names).share == 0
    with plain_files(directory, open_checkpoint(str(directory)).config) as (files, _):
        dequantized = open_checkpoint(str(files))
        assert RoundedProducts(model.model, dequantized, names).share == 1
        assert 0.4 < RoundedProducts(model.model, dequantized, [*names, *(f"no.{name}" for name in names)]).share < 0.6


@pytest.mark.parametrize(("block", "scheme"), [(16, "block"), (48, "block"), (0, "channel")])
def test_transformers_gets_the_weights_as_they_are(twin: Twin, tmp_path: Path, block: int, scheme: str) -> None:
    """Also where blocks do not divide a weight."""
    plain = twin("Qwen3MoeForCausalLM").parent / "plain"
    directory = write_twin(plain, tmp_path / "twin", block=block or 16, scheme=scheme)
    checkpoint = open_checkpoint(str(directory))
    for dtype in (torch.float32, torch.float64):
        model = load_transformers(directory, checkpoint.config, dtype, 3).model
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        state, view = model.state_dict(), dequantized(checkpoint)
        compared = [name for name in view.headers() if name in state]
        assert any(name.endswith("q_proj.weight") for name in compared)
        for name in compared:
            assert torch.equal(state[name], view.read(name).to(dtype)), name
        for expert in range(2):
            want = view.read(f"model.layers.0.mlp.experts.{expert}.down_proj.weight")
            assert torch.equal(state["model.layers.0.mlp.experts.down_proj"][expert], want.to(dtype))


def test_transformers_unpacks_to_the_same_numbers(twin: Twin) -> None:
    """What is written out for Transformers is what it would have read itself, where it can."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    directory = twin("Qwen3MoeForCausalLM")
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    theirs = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32, quantization_config=config)
    ours = load_transformers(directory, open_checkpoint(str(directory)).config, torch.float32, 3).model.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours[name]), name


def test_a_copy_needs_room_and_goes_away(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = twin("Qwen3MoeForCausalLM")
    config = open_checkpoint(str(directory)).config
    with plain_files(directory, config) as (files, stated):
        assert files != directory and "quantization_config" not in stated
    assert not files.exists() and "quantization_config" in config
    with plain_files(directory.parent / "plain", stated) as (files, _):
        assert files == directory.parent / "plain"
    # Many files, of one tensor each.
    monkeypatch.setattr("allotrope.verify.plain_files._SHARD", 1)
    with plain_files(directory, config) as (files, _):
        view = dequantized(open_checkpoint(str(directory)))
        copy = open_checkpoint(str(files))
        assert len(list(files.glob("*.safetensors"))) == len(copy.headers()) == len(view.headers())
        assert all(torch.equal(copy.read(name), view.read(name)) for name in view.headers())
    full = shutil.disk_usage(directory)._replace(free=1000)
    monkeypatch.setattr("allotrope.verify.plain_files.shutil.disk_usage", lambda path: full)
    with pytest.raises(ModelError, match=r"in fp32, and .* has 0\.0 GB free"), plain_files(directory, config):
        pass


def test_stored_outputs_set_no_tolerance_for_rounded_products(tiny: Tiny, stored: Path, tmp_path: Path) -> None:
    directory = write_twin(tiny("mistral").directory, tmp_path / "twin")
    for name in ("expected.safetensors", "manifest.json"):
        shutil.copy(stored / name, directory / name)
    report = run(directory, modes="whole")
    assert report.passed, report.verdict()
    assert "Transformers" in report.origin
    assert "are not used" in report.remarks[0] and "--quantized-weights dequantize" in report.remarks[0]
    with pytest.raises(ModelError, match=r"manifest\.json does not say how far off FP8 products may be"):
        run(directory, against="stored", lengths=None)
    # Unpacked, they do judge; these are of the weights before they were quantized.
    report = run(directory, "dequantize", modes="whole", lengths=None)
    assert "outputs stored" in report.origin and not report.passed


@pytest.mark.parametrize("mode", ["keep", "dequantize"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_integers_are_exact(name: str, mode: str, tmp_path: Path) -> None:
    """Of a dense model, and of routed experts alone, as they are released."""
    write_random(find_architecture({"architectures": [name]}, name).tiny(), tmp_path / "plain", None, 0)
    write_int4_twin(tmp_path / "plain", tmp_path / "twin", experts_alone=name != "LlamaForCausalLM")
    report = run(tmp_path / "twin", mode, modes="whole,chunked-64,cached")
    assert report.passed, report.verdict()
    assert report.limits.exact
