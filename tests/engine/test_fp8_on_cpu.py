"""FP8 checkpoints that a CPU multiplies as they are stored, against the same models with plain weights."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from engine.watching import Watch, assert_same, assert_same_logits, engine, request, run
from tiny_checkpoints import prompts, write_tiny
from weight_formats import FORMATS, write_released

from allotrope.architectures.registry import find_architecture
from allotrope.config import EngineConfig
from allotrope.engine.load import load_model
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.kernels.chip import chip_of
from allotrope.layers.linear import Linear, RowLinear
from allotrope.layers.moe import Experts
from allotrope.ops.matmul import unstored_reasons
from allotrope.ops.matmul.cpu_blocks import BlockWeight
from allotrope.ops.matmul.fp8 import Fp8

OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
MODELS = {"dense": "LlamaForCausalLM", "experts": "Qwen3MoeForCausalLM"}
STORED = ["fp8 block", "fp8 tensor", "fbgemm_fp8"]


@pytest.fixture(autouse=True)
def compiled() -> None:
    torch.set_num_threads(1)
    reasons = unstored_reasons(Fp8(128, fp8_activations=False), torch.float32, chip_of(torch.device("cpu")))
    if reasons:
        pytest.skip("; ".join(reasons))


def written(folder: Path, kind: str, stored: str) -> Path:
    tiny = find_architecture({"architectures": [MODELS[kind]]}, "").tiny()
    sizes = {key: size for key, size in SIZES.items() if key in tiny or key == "head_dim"}
    plain = write_tiny(tiny | sizes, folder / "plain").directory
    write_released(plain, folder / "released", FORMATS[stored])
    return folder / "released"


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_plain_weights(
    kind: str, stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = written(tmp_path, kind, stored)
    asked = [request(f"r{i}", ids) for i, ids in enumerate(prompts((5, 40)))]
    with caplog.at_level(logging.INFO, "allotrope"):
        kept, plain = Watch(), Watch()
        tokens = run(engine(model, kept, **OPTIONS), asked)
        assert not any(line.startswith("dequantized") or "anew" in line for line in caplog.messages)
        assert_same(run(engine(model, plain, quantized_weights="dequantize", **OPTIONS), asked), tokens)
        (line,) = (line for line in caplog.messages if line.startswith("dequantized on load"))
        assert ": fp8: " in line and line.endswith("quantized_weights=dequantize")
    assert_same_logits(kept, plain, atol=2e-4)


def test_bf16_is_as_near(tmp_path: Path) -> None:
    """Kept weights are exact; plain ones are rounded to bf16."""
    model = written(tmp_path, "dense", "fp8 block")
    asked = [request("r", prompts((9,))[0])]
    seen = []
    for options in ({}, {"quantized_weights": "dequantize"}, {"dtype": "float32"}):
        watch = Watch()
        run(engine(model, watch, **{"dtype": "bfloat16", **OPTIONS, **options}), asked)
        seen.append(watch.seen["r"][8].float())
    kept, plain, exact = seen
    assert (kept - exact).norm() < 0.03 * exact.norm() and (plain - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_take_a_byte_each_as_planned(kind: str, stored: str, tmp_path: Path) -> None:
    model = written(tmp_path, kind, stored)
    load_plan = resolve_load_plan(EngineConfig(model=str(model), dtype="bfloat16", **OPTIONS))
    modules = list(load_model(load_plan, 0).modules())
    weights = [one for module in modules if isinstance(module, Linear) for one in module.weights]
    weights += [one for module in modules if isinstance(module, Experts) for one in (module.gate_up, module.down)]
    weights += [module.weight for module in modules if isinstance(module, RowLinear)]
    blocks = [one for one in weights if isinstance(one, BlockWeight)]
    assert {one.format.name for one in blocks} == {"fp8"}
    assert sum(one.nbytes for one in blocks) <= 1.04 * sum(math.prod(one.shape) for one in blocks)
    plain = resolve_load_plan(
        EngineConfig(model=str(model), dtype="bfloat16", quantized_weights="dequantize", **OPTIONS)
    )
    assert load_plan.weight_bytes < 0.75 * plain.weight_bytes
