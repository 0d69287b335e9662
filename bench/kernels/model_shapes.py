"""The products that models run on a rank of a GPU, read off their configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from allotrope.commands.model_backends import chip_named
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.layers.moe import Experts, Moe
from allotrope.layers.parallel import Parallel
from allotrope.layers.weights import WeightMatmul
from allotrope.ops.matmul.launch import Shape
from allotrope.rank_layout import RankLayout

# What launches are measured for, by the name of the weight's format.
KINDS = ("plain", "fp8", "mxfp4")
# Outputs from which it matters how a product is launched.
FEWEST = 16
# Bytes for weights, steps and caches: more than any model needs, so that none is refused.
ENOUGH = 1 << 42


def shapes_of(model: Path, ranks: int, chip: str) -> list[tuple[Shape, int]]:
    """Each product of our kernels in `model`, a folder with a config.json, on one of `ranks` tensor-parallel ranks; and
    how many experts a token takes, 1 where there are none."""
    config = EngineConfig(model=str(model), load_format="dummy")
    plan = resolve_load_plan(config, Parallel.of(RankLayout(tensor=ranks)), available=ENOUGH, chip=chip_named(chip)[0])
    decoder = plan.meta_model
    topk = {module.experts: module.router.spec.topk for module in decoder.modules() if isinstance(module, Moe)}
    found: dict[Shape, int] = {}
    for module in decoder.modules():
        taken = topk[module] if isinstance(module, Experts) else 1
        for index, one in enumerate(_matmuls(module)):
            spec = one.spec
            if one.backend.name != "triton" or spec.outputs < FEWEST or spec.format.name not in KINDS:
                continue
            # Gates and ups are one weight.
            gated = isinstance(module, Experts) and index == 0
            outputs = spec.outputs // 2 if gated else spec.outputs
            found[Shape(spec.format.name, spec.experts, outputs, spec.inputs, gated)] = taken
    return list(found.items())


def _matmuls(module: nn.Module) -> Iterator[WeightMatmul]:
    for value in vars(module).values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, WeightMatmul):
                yield one
