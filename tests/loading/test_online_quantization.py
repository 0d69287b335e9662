"""Plain checkpoints whose weights are quantized while they are loaded."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from device_under_test import DEVICE
from engine.watching import Watch, engine, run
from engine.watching import request as ask
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts, write_tiny

from allotrope.architectures.glm4_moe import tiny_glm4_moe
from allotrope.architectures.gpt_oss import tiny_gpt_oss
from allotrope.architectures.qwen3 import tiny_qwen3
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.dequantize import PlainCheckpoint, dequantized
from allotrope.checkpoint.weight_formats import online_statement
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.plan_report import report_model
from allotrope.errors import ConfigError
from allotrope.kernels.chip import CHIPS
from allotrope.ops.matmul.weight import QuantizedWeight
from allotrope.verify.options import VerifyOptions
from allotrope.verify.run import verify

ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU takes fp8 and int4")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sparse")
    write_tiny(tiny_glm4_moe(), directory)
    return directory


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    write_tiny(tiny_qwen3(), directory)
    return directory


def logits(model: Path, **options: object) -> torch.Tensor:
    """[L, vocabulary] at every position of a prompt."""
    watch = Watch()
    ids = prompts([24])[0]
    run(engine(model, watch, max_model_len=64, max_num_seqs=2, **options), [ask("a", ids)])
    return torch.stack([watch.seen["a"][i] for i in range(len(ids))])


def online(model: Path, scheme: str, *, blocks: bool) -> PlainCheckpoint:
    checkpoint = open_checkpoint(str(model))
    checkpoint.config["quantization_config"] = online_statement(scheme, blocks=blocks)
    view = dequantized(checkpoint)
    assert isinstance(view, PlainCheckpoint)
    return view


def rounded_twin(model: Path, view: PlainCheckpoint, into: Path) -> Path:
    """The checkpoint with every weight as its quantized form stands for it."""
    into.mkdir()
    state = load_file(model / "model.safetensors")
    for name in state:
        format = view.format(name)
        if format is not None:
            state[name] = QuantizedWeight(format, *view.packed(name)).dequantize()
    save_file(state, into / "model.safetensors")
    (into / "config.json").write_text((model / "config.json").read_text())
    return into


@pytest.mark.parametrize(
    ("scheme", "kind", "limit"),
    [
        pytest.param("int8", "dense", 0.04, marks=ON_CPU),
        ("int4", "dense", 0.04),
        ("fp8", "dense", 1e-4 if DEVICE == "cpu" else 0.12),
        ("int4", "sparse", 0.3),
    ],
)
def test_the_engine_multiplies_the_rounded_weights(
    scheme: str, kind: str, limit: float, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """`limit`: products round activations, too, by which near-ties of a router fall otherwise; FP8 ones of a CPU do
    not."""
    torch.set_num_threads(1)
    model: Path = request.getfixturevalue(kind)
    # A CPU keeps blocks of GGUF, a GPU the form of compressed-tensors.
    twin = rounded_twin(model, online(model, scheme, blocks=scheme != "fp8" and DEVICE == "cpu"), tmp_path / "twin")
    got, want, plain = logits(model, quantization=scheme), logits(twin), logits(model)
    assert (got - want).norm() < limit * want.norm()
    # Rounding to four bits is far from nothing.
    assert (got - plain).norm() > (1.5 * limit if scheme == "int4" else 1e-3) * plain.norm()


@pytest.mark.parametrize(("scheme", "blocks", "steps"), [("int8", True, 254), ("int4", True, 15), ("int4", False, 14)])
def test_weights_are_within_a_step(scheme: str, blocks: bool, steps: int, sparse: Path) -> None:
    view = online(sparse, scheme, blocks=blocks)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    format, plain = view.format(name), view.read(name)
    assert format is not None
    values = QuantizedWeight(format, *view.packed(name)).dequantize()
    # Steps over the largest number of a group, which here is a row. One end of four bits may be cut off.
    steps_off = (values - plain) / (2 * plain.abs().amax(-1, keepdim=True) / steps)
    assert steps_off.abs().max() < 1.05 and steps_off.square().mean().sqrt() < 0.35


@pytest.mark.parametrize("scheme", [pytest.param("int8", marks=ON_CPU), "int4"])
def test_random_weights_are_numbers_of_unit_gain(scheme: str, sparse: Path) -> None:
    """Random bytes in place of blocks would have scales that are no numbers."""
    plain, rounded = (logits(sparse, load_format="dummy", **kinds) for kinds in ({}, {"quantization": scheme}))
    assert rounded.isfinite().all()
    assert 0.5 < rounded.std() / plain.std() < 2


def test_small_and_sensitive_weights_stay_plain(sparse: Path) -> None:
    view = online(sparse, "int8", blocks=True)
    kept = {name for name in view.headers() if view.format(name) is not None}
    layer = "model.layers.1."
    assert {layer + "self_attn.q_proj.weight", layer + "mlp.shared_experts.up_proj.weight"} <= kept
    plain = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", layer + "mlp.gate.weight"]
    plain += [layer + "mlp.gate.e_score_correction_bias", layer + "self_attn.q_proj.bias"]
    assert not kept & set(plain)


def test_plans_count_the_quantized_bytes(sparse: Path) -> None:
    def plan(**options: str) -> tuple[int, str]:
        config = EngineConfig(model=str(sparse), device="cpu", dtype="float32", **options)
        report = report_model(config, 1 << 34)
        return report.weight_bytes, "\n".join(report.lines())

    (plain, _), (eighth, text) = plan(), plan(quantization="int8")
    assert eighth < 0.5 * plain
    assert "weights that stay quantized: as --quantization int8 says" in text


def test_what_cannot_be_is_refused(sparse: Path, tmp_path: Path) -> None:
    def refused(model: Path, **options: object) -> str:
        chip = options.pop("chip", None)
        with pytest.raises(ConfigError) as caught:
            resolve_load_plan(EngineConfig(model=str(model), **options), chip=chip)
        return str(caught.value)

    none = refused(sparse, quantization="fp8", device="cpu", dtype="float16")
    assert "no product reads such weights" in none and "one of fp8, int8, int4" in none
    assert "one of fp8, int4" in refused(sparse, quantization="int8", device="cpu", chip=CHIPS["sm_90"])
    assert "quantized_weights=dequantize makes plain" in refused(
        sparse, quantization="int8", quantized_weights="dequantize"
    )
    stated = {**tiny_qwen3(), "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert "is quantized (fp8). Leave it out." in refused(tmp_path, quantization="int4", load_format="dummy")


def test_experts_that_stay_plain_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As those of gpt-oss in bfloat16, whose stored experts have their inputs first."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_gpt_oss()))
    resolve_load_plan(EngineConfig(model=str(tmp_path), load_format="dummy", device="cpu", quantization="int8"))
    assert re.search(r"quantization=int8: experts stay plain, \d\d % of the weights' bytes", caplog.text)


def test_rounding_of_activations_needs_blocks(sparse: Path) -> None:
    asked = EngineConfig(model=str(sparse), device="cpu", quantized_activations="int8")
    with pytest.raises(ConfigError, match=r"quantized_activations=int8: no weight .* Leave it out"):
        resolve_load_plan(asked)
    assert resolve_load_plan(dataclasses.replace(asked, quantization="int8")).build.formats


def test_verify_says_the_error(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_tiny(tiny_qwen3(), tmp_path)
    options = VerifyOptions(modes="whole,chunked-3", lengths="3,17", new_tokens=3)
    report = verify(EngineConfig(model=str(tmp_path), quantization="int8", device="cpu"), options)
    assert report.passed and [one.name for one in report.modes] == ["whole", "chunked-3"]
    assert any(line.startswith("int8 weights put logits off by a relative RMS of ") for line in report.remarks)
    score = report.modes[0].score
    assert score is not None and 1e-4 < score.rel_rms < 0.1


# What the loader leaves plain: inputs that are not whole groups, and stacks of experts with the inputs first.
LEFT_PLAIN = {
    "layers.0.ffn.down.weight": lambda: tiny_qwen3() | {"intermediate_size": 144},
    "layers.0.ffn.experts.down": tiny_gpt_oss,
}


@pytest.mark.parametrize("plain", LEFT_PLAIN)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_plan_leaves_plain_what_the_loader_does(scheme: str, plain: str, tmp_path: Path) -> None:
    """Whether there are weights or not."""
    directory = write_tiny(LEFT_PLAIN[plain](), tmp_path).directory
    options = EngineConfig(model=str(directory), quantization=scheme, device="cpu", dtype="float32")  # type: ignore[arg-type]
    stored, dummy = (
        dict(resolve_load_plan(one).meta_model.named_parameters())
        for one in (options, dataclasses.replace(options, load_format="dummy"))
    )
    assert {name: one.shape for name, one in dummy.items()} == {name: one.shape for name, one in stored.items()}
    assert plain in dummy and "layers.0.mixer.qkv.weight" not in dummy
