"""Every released format of quantized weights: plan, dummy weights and engine agree, and the numbers are right."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_tiny
from torch import nn
from weight_formats import FORMATS, INT4, KIMI, MXFP4, compressed, float8, quark, write_released

from allotrope.architectures.registry import find_architecture
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.dequantize import QuantizedView, dequantized
from allotrope.checkpoint.weight_formats import weight_formats
from allotrope.checkpoint.weights import Loader
from allotrope.config import EngineConfig
from allotrope.engine.load import load_model
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.plan_report import report_model
from allotrope.errors import ModelError
from allotrope.kernels.chip import chip_of
from allotrope.layers.weights import VALUES
from allotrope.ops.matmul import multiplied_as_stored
from allotrope.ops.matmul.int4 import Int4
from allotrope.ops.matmul.weight import QuantizedWeight

pytest.importorskip("transformers", reason="transformers is not installed")

INTEGERS = "compressed-tensors int4"
MODELS = {"dense": "LlamaForCausalLM", "experts": "Qwen3MoeForCausalLM"}
CASES = [(kind, name) for name in FORMATS for kind in MODELS if kind == "experts" or not FORMATS[name].experts_alone]
# Heads and experts of whole blocks of 128.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of the unquantized models."""
    made = {}
    for kind, name in MODELS.items():
        tiny = find_architecture({"architectures": [name]}, name).tiny()
        sizes = {key: size for key, size in SIZES.items() if key in tiny or key == "head_dim"}
        made[kind] = write_tiny(tiny | sizes, tmp_path_factory.mktemp(kind)).directory
    return made


@pytest.fixture
def released(request: pytest.FixtureRequest, plain: dict[str, Path], tmp_path: Path) -> Path:
    """The directory of a case; its twin stands beside it."""
    kind, name = request.param
    write_released(plain[kind], tmp_path / "released", FORMATS[name])
    return tmp_path / "released"


def config(directory: Path, mode: str = "keep", **more: Any) -> EngineConfig:
    return EngineConfig(model=str(directory), quantized_weights=mode, dtype="float32", device="cpu", **more)  # type: ignore[arg-type]


def loaded(options: EngineConfig) -> nn.Module:
    """The model with its weights as they are loaded, before any product takes them."""
    load_plan = resolve_load_plan(options)
    model = load_plan.architecture.decoder(load_plan.spec, load_plan.build)
    Loader(model, load_plan.architecture.rules(load_plan.spec)).load(dequantized(load_plan.checkpoint))
    return model


def held_bytes(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of the memory that a model's weights take, wherever they went."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        # Numbers of experts and bounds of norms are no weights.
        if thing.dtype == torch.int64 or thing.dim() == 0 or thing.untyped_storage().data_ptr() in seen:
            return 0
        seen.add(thing.untyped_storage().data_ptr())
        return thing.untyped_storage().nbytes()
    parts: list[object] = []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif isinstance(thing, functools.partial):
        parts = list(thing.args)
    elif isinstance(thing, nn.Module) or type(thing).__module__.startswith("allotrope"):
        parts = list(getattr(thing, "__dict__", {}).values())
    return sum(held_bytes(part, seen) for part in parts)


@pytest.mark.parametrize("released", CASES, indirect=True, ids=": ".join)
def test_stored_numbers_are_those_of_the_format(released: Path) -> None:
    twin = dict(loaded(config(released.with_name("released-plain"))).named_parameters())
    for name, parameter in loaded(config(released, "dequantize")).named_parameters():
        assert torch.equal(parameter, twin[name]), name
    view = dequantized(open_checkpoint(str(released)))
    assert isinstance(view, QuantizedView)
    formats = {name: view.format(name) for name in view.headers()}
    assert any(formats.values())
    for name, format in formats.items():
        if format is not None:
            assert torch.equal(QuantizedWeight(format, *view.packed(name)).dequantize(), view.read(name)), name


@pytest.mark.parametrize("mode", ["keep", "dequantize"])
@pytest.mark.parametrize("released", CASES, indirect=True, ids=": ".join)
def test_the_plan_is_what_the_engine_and_dummy_weights_take(released: Path, mode: str) -> None:
    stored, stated = config(released, mode), config(released, mode, load_format="dummy")
    report = report_model(stored, 1 << 30)
    wanted = report.weight_bytes
    assert report.formats_from == "the checkpoint"
    assert held_bytes(load_model(resolve_load_plan(stored), 0)) == wanted
    assert held_bytes(load_model(resolve_load_plan(stated), 0)) == wanted
    kept = [name for name, _ in resolve_load_plan(stored).meta_model.named_parameters() if name.endswith(VALUES)]
    assert bool(kept) == (mode == "keep")
    # From the config alone, as of a hub id whose weights are elsewhere.
    (released / "model.safetensors").unlink()
    alone = report_model(stored, 1 << 30)
    assert (alone.weight_bytes, alone.formats_from) == (wanted, "config.json")


@pytest.mark.parametrize("released", [("experts", INTEGERS)], indirect=True, ids=": ".join)
def test_integers_are_kept_as_released(released: Path, tmp_path: Path) -> None:
    """The plan is what lies in the files, also where nobody asks and a CPU's products read them as they are stored."""
    headers = open_checkpoint(str(released)).headers()
    stored = sum(header.stored_bytes for name, header in headers.items() if not name.endswith("_shape"))
    assert report_model(config(released), 1 << 30).weight_bytes == stored
    plain = report_model(config(released.with_name("released-plain")), 1 << 30).weight_bytes
    assert report_model(config(released, "dequantize"), 1 << 30).weight_bytes == plain
    if multiplied_as_stored(Int4(32), torch.float32, chip_of(torch.device("cpu"))):
        assert report_model(config(released, "auto"), 1 << 30).weight_bytes == stored
    shutil.copy(released / "config.json", tmp_path)
    assert report_model(config(tmp_path), 1 << 30).weight_bytes == stored


def test_a_shape_that_is_not_that_of_the_words_is_refused(plain: dict[str, Path], tmp_path: Path) -> None:
    """As of inputs that do not fill their last word."""
    write_released(plain["experts"], tmp_path / "released", FORMATS[INTEGERS])
    path = tmp_path / "released" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("_shape"))
    save_file(tensors | {name: tensors[name] - torch.tensor([0, 3])}, path)
    with pytest.raises(ModelError, match=r"weight_shape is .* multiple of 8"):
        loaded(config(tmp_path / "released"))


def test_the_text_part_of_a_wrapper_states_its_formats(tmp_path: Path) -> None:
    """As Kimi-K2.5 is released: integers in the routed experts, and plain weights in all else."""
    wrapper = find_architecture({"architectures": ["KimiK25ForConditionalGeneration"]}, "").tiny()
    wrapper["text_config"]["quantization_config"] = compressed(INT4, "pack-quantized", KIMI)
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    load_plan = resolve_load_plan(config(tmp_path, load_format="dummy"))
    names = [name for name, _ in load_plan.meta_model.named_parameters() if name.endswith(VALUES)]
    assert names and all(".ffn.experts." in name for name in names)


def test_what_a_wrapper_excludes_has_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    """As Quark writes of Gemma 4, whose text model lies within another: all but attention is quantized."""
    wrapper = find_architecture({"architectures": ["Gemma4ForConditionalGeneration"]}, "").tiny()
    layers = range(wrapper["text_config"]["num_hidden_layers"])
    kept = [f"model.language_model.layers.{i}.self_attn.{name}_proj" for i in layers for name in "qkvo"]
    wrapper["quantization_config"] = quark(MXFP4, ["lm_head", *kept])
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    load_plan = resolve_load_plan(config(tmp_path, load_format="dummy"))
    names = [name for name, _ in load_plan.meta_model.named_parameters() if name.endswith(VALUES)]
    assert {name.split(".")[1] for name in names if ".ffn." in name} == {str(i) for i in layers}
    assert not any(".mixer." in name for name in names)


def transformed(*locations: str) -> dict[str, Any]:
    """As compressed-tensors names where a Hadamard matrix multiplies."""
    apply = [{"targets": ["Linear"], "location": location, "inverse": False, "ignore": []} for location in locations]
    return {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}}


def test_transforms_that_stored_weights_include_change_nothing() -> None:
    stated = float8("channel")
    offline = stated | transformed("weight_input", "weight_output")
    assert weight_formats({"quantization_config": offline}, "") == weight_formats({"quantization_config": stated}, "")


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "'awq' is not supported.*AWQ stores 4-bit integers"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "'gptq' is not supported.*GPTQ stores integers"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes' types are not read"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not supported"),
        (compressed(INT4 | {"symmetric": False}, "pack-quantized", []), "symmetric=False"),
        (compressed(INT4 | {"num_bits": 8}, "int-quantized", []), "type='int', num_bits=8"),
        (compressed(INT4 | {"type": "float", "group_size": 16}, "nvfp4-pack-quantized", []), "nvfp4-pack-quantized"),
        (float8("block", block_structure=None), "blocks of None"),
        (float8("channel") | transformed("weight_input", "input", "k_cache"), "transforms at input, k_cache, and"),
        (quark(MXFP4 | {"dtype": "int4"}, []), "dtype='int4'"),
        (quark([MXFP4, MXFP4], []), r"2 stage\(s\)"),  # type: ignore[arg-type]
    ],
)
def test_other_formats_are_refused_by_plan_and_engine(
    plain: dict[str, Path], tmp_path: Path, stated: dict[str, Any], reason: str
) -> None:
    source = write_released(
        plain["dense"], tmp_path / "released", dataclasses.replace(FORMATS["fp8 tensor"], stated=stated)
    ).with_name("released")
    for options in (config(source), config(source, load_format="dummy")):
        with pytest.raises(ModelError, match=reason):
            resolve_load_plan(options)
    with pytest.raises(ModelError, match=reason):
        report_model(config(source), 1 << 30)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("fp8", "quantization_config='fp8'"),
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, "modules_to_not_convert=5"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers='lm_head'"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:("]}, "is no regular expression"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "at least 1 row"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": ["Linear"]}}, "not as it has to be"),
    ],
)
def test_a_malformed_statement_is_refused(stated: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        weight_formats({"quantization_config": stated}, "model")


def test_a_group_of_names_goes_before_one_of_a_class() -> None:
    """As compressed-tensors ranks them, in whatever order they stand."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": numbers | {"strategy": "channel"}},
        "group_1": {
            "targets": ["re:.*experts.*"],
            "weights": numbers | {"strategy": "block", "block_structure": [128, 128]},
        },
        "group_2": {"targets": ["model.layers.0.mlp.experts.0.up_proj"], "weights": numbers | {"strategy": "tensor"}},
    }
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    formats = weight_formats({"quantization_config": stated}, "")
    assert formats is not None
    schemes = [
        formats.scheme(f"model.layers.0.{name}.weight")
        for name in ("self_attn.q_proj", "mlp.experts.1.up_proj", "mlp.experts.0.up_proj")
    ]
    assert all(schemes) and schemes[1].block == (128, 128) and len({str(one) for one in schemes}) == 3


def test_layers_of_their_own_and_lists_of_what_stays_plain() -> None:
    layers = {"*lm_head": {"weight": None}, "*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}
    formats = weight_formats(
        {"quantization_config": quark(MXFP4, ["re:.*layers\\.0\\."]) | {"layer_quant_config": layers}}, ""
    )
    assert formats is not None

    def kind(name: str) -> str | None:
        scheme = formats.scheme(name)
        return None if scheme is None else f"{scheme.format.name} {scheme.format.group_size}"

    assert kind("model.layers.1.self_attn.q_proj.weight") == "fp8 0"
    assert kind("model.layers.1.mlp.experts.0.up_proj.weight") == "mxfp4 32"
    assert kind("model.layers.0.mlp.experts.0.up_proj.weight") is None
    assert kind("model.layers.1.mlp.gate.weight") is None
    assert kind("lm_head.weight") is None
