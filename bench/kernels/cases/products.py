"""Products with quantized weights: one weight, and a layer's routed experts from routing's answer to their sum."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from allotrope.attention.check import Comparison, compare
from allotrope.layers.build import Build
from allotrope.layers.weights import WeightMatmul
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.grouped_matmul import GROUPED_MATMUL
from allotrope.ops.matmul import MATMUL, MatmulSpec
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format, QuantizedWeight
from bench.kernels.cases.case import KernelCase, Timed, same

BLOCK = Fp8(128)
# Outputs and inputs of one weight: input projections of a hybrid, and DeepSeek's widest.
DENSE = ((12288, 2048), (7168, 18432))
ROWS = (4, 16, 64, 8192)


@dataclass(frozen=True)
class ExpertShape:
    """`count` experts of `width`, of which each token of `hidden` numbers takes `topk`."""

    name: str
    count: int
    hidden: int
    width: int
    topk: int
    format: Format | None


EXPERTS = (
    ExpertShape("512x(2048x512) top 10 fp8", 512, 2048, 512, 10, BLOCK),
    ExpertShape("256x(7168x2048) top 8 fp8", 256, 7168, 2048, 8, BLOCK),
    ExpertShape("128x(2880x2880) top 4 mxfp4", 128, 2880, 2880, 4, MXFP4),
    ExpertShape("128x(2048x768) top 8 bf16", 128, 2048, 768, 8, None),
)


def cases() -> list[KernelCase]:
    found = [_dense(rows, *shape, BLOCK) for shape in DENSE for rows in ROWS]
    found += [_dense(rows, 5760, 2880, MXFP4) for rows in ROWS]
    for shape in EXPERTS:
        found += [_experts(rows, shape) for rows in ROWS if shape.hidden < 4096 or rows < 8192]
    tiny = ExpertShape("tiny", 4, 64, 32, 2, MXFP4)
    return [*found, _dense(3, 64, 128, BLOCK, tiny=True), _experts(3, tiny, tiny=True)]


def _codes(format: Format, shape: tuple[int, ...], device: torch.device) -> QuantizedWeight:
    """A random weight, drawn as codes: quantizing a large one would take longer than all that is measured."""
    *outer, outputs, inputs = shape
    if format.name == "mxfp4":
        values = torch.randint(0, 256, (*outer, outputs, inputs // 2), device=device, dtype=torch.uint8)
        scales = torch.randint(117, 120, (*outer, outputs, inputs // 32), device=device, dtype=torch.uint8)
        return QuantizedWeight(format, values, scales)
    values = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn)
    for part in values.view(-1, outputs, inputs):
        part.copy_(torch.randn(outputs, inputs, device=device))
    blocks = torch.rand((*outer, -(-outputs // 128), -(-inputs // 128)), device=device).add_(0.5).div_(inputs**0.5)
    return QuantizedWeight(format, values, blocks.repeat_interleave(128, dim=-2).narrow(-2, 0, outputs))


def _bytes(format: Format | None, numbers: int) -> int:
    """Of a weight, its scales included."""
    if format is None:
        return 2 * numbers
    return numbers // 2 + numbers // 32 if format.name == "mxfp4" else numbers + 4 * numbers // 128**2


def _dense(rows: int, outputs: int, inputs: int, format: Format, tiny: bool = False) -> KernelCase:
    def make(device: torch.device) -> Any:
        weight = _codes(format, (outputs, inputs), device)
        return torch.randn(rows, inputs, device=device).bfloat16(), weight

    def ours(found: Any) -> Timed:
        x, weight = found
        build = Build(torch.bfloat16, device=x.device)
        matmul = WeightMatmul(MATMUL, MatmulSpec(format, x.dtype, outputs, inputs), build)
        packed = matmul.pack(QuantizedWeight(format, weight.values.clone(), weight.scales.clone()))
        return lambda: matmul.run(x, packed)

    def reference(found: Any) -> torch.Tensor:
        x, weight = found
        return format.activations(x) @ weight.dequantize().T

    def deepgemm(found: Any) -> Timed:
        from vllm.third_party import deep_gemm

        x, weight = found
        values, scales = _rounded(x)
        blocks = weight.scales[::128].contiguous()
        out = torch.empty(rows, outputs, device=x.device, dtype=x.dtype)
        return lambda: deep_gemm.fp8_gemm_nt((values, scales), (weight.values, blocks), out, disable_ue8m0_cast=True)

    def library(found: Any) -> Timed:
        from torch.nn.functional import ScalingType, scaled_mm

        x, weight = found
        values, scales = _rounded(x)
        blocks = weight.scales[::128].contiguous().t()
        kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        scales = scales.t().contiguous().t()
        return lambda: scaled_mm(
            values, weight.values.t(), scales, kinds[0], blocks, kinds[1], output_dtype=torch.bfloat16
        )

    return KernelCase(
        family="products",
        name=f"{'tiny' if tiny else 'weight'} {outputs}x{inputs} {format.name} rows {rows}",
        make=make,
        ours=ours,
        check=same(reference, "bf16"),
        bytes=_bytes(format, outputs * inputs) + 2 * rows * (outputs + inputs),
        flops=2 * rows * outputs * inputs,
        rate="fp8" if format.name == "fp8" else "bf16",
        peers={"deepgemm": deepgemm, "torch": library} if format.name == "fp8" else {},
        tiny=tiny,
        note="peers are given rounded activations; ours rounds them",
    )


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from allotrope.ops.matmul.fp8 import quantize_rows

    return quantize_rows(x)


def _experts(rows: int, shape: ExpertShape, tiny: bool = False) -> KernelCase:
    count, hidden, width, topk = shape.count, shape.hidden, shape.width, shape.topk

    def topk_ids(device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(0)
        return torch.rand(rows, count, device=device, generator=generator).topk(topk).indices

    def make(device: torch.device) -> Any:
        if shape.format is None:
            weights: list[Any] = [
                torch.randn(count, 2 * width, hidden, device=device).div_(hidden**0.5).bfloat16(),
                torch.randn(count, hidden, width, device=device).div_(width**0.5).bfloat16(),
            ]
        else:
            weights = [
                _codes(shape.format, (count, 2 * width, hidden), device),
                _codes(shape.format, (count, hidden, width), device),
            ]
        x = torch.randn(rows, hidden, device=device).bfloat16()
        mix = torch.rand(rows, topk, device=device)
        return x, mix / mix.sum(-1, keepdim=True), topk_ids(device), weights

    def ours(found: Any) -> Timed:
        from allotrope.layers.moe import Experts

        x, mix, chosen, weights = found
        layer = Experts(1, 8, 8, GatedActivation(), Build(torch.bfloat16, device=x.device), bias=False)
        layer.count = count
        matmuls = []
        for name, weight in zip(("gate_up", "down"), weights, strict=True):
            format, stored = PLAIN, PlainWeight(weight)
            if isinstance(weight, QuantizedWeight):
                format = weight.format
                stored = QuantizedWeight(format, weight.values.clone(), weight.scales.clone())
            spec = MatmulSpec(format, x.dtype, *weight.shape[1:], experts=count)
            matmuls.append(WeightMatmul(GROUPED_MATMUL, spec, Build(torch.bfloat16, device=x.device)))
            delattr(layer, name)
            setattr(layer, name, matmuls[-1].pack(stored))
        layer.matmuls, layer.plain_on_cpu = tuple(matmuls), False
        return functools.partial(layer, x, mix, chosen)

    def check(found: Any, timed: Any) -> list[Comparison]:
        """Each product by itself, the second of what the first gave: rounding to FP8 in between makes large differences
        of the smallest. Gates have long tails: of so many numbers, the largest are far above their row's RMS, and only
        all together are held to the first one's bound.
        """
        x, mix, chosen, weights = found
        format = shape.format or PLAIN
        groups = timed.func.grouped(chosen)
        inner = timed.func.run_gate_up(x, groups.expert_offsets, groups.sorted_token_ids)
        want_inner, y = torch.empty_like(inner, dtype=torch.float32), torch.zeros(rows, hidden, device=x.device)
        seen, owner = format.activations(x), chosen.flatten()
        for expert in owner.unique().tolist():
            pairs = (owner == expert).nonzero().squeeze(1)
            token, row = pairs // topk, groups.inverse[pairs]
            first, second = (_plain(weight, expert) for weight in weights)
            gate, up = (seen[token] @ first.T).chunk(2, dim=-1)
            want_inner[row] = torch.nn.functional.silu(gate) * up
            y.index_add_(0, token, format.activations(inner[row]) @ second.T * mix.flatten()[pairs, None])
        first = compare(inner, want_inner, "bf16")
        first = replace(first, wrong=tuple(reason for reason in first.wrong if not reason.startswith("peak=")))
        return [first, compare(timed(), y, "bf16")]

    def vllm(found: Any) -> Timed:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        x, mix, chosen, weights = found
        ids = chosen.int()
        if shape.format is None:
            with set_current_vllm_config(VllmConfig()):
                return lambda: fused_experts(x, weights[0], weights[1], mix, ids)
        scales = [weight.scales[:, ::128].contiguous() for weight in weights]
        with set_current_vllm_config(VllmConfig()):
            config = fp8_w8a8_moe_quant_config(w1_scale=scales[0], w2_scale=scales[1], block_shape=[128, 128])
            return lambda: fused_experts(x, weights[0].values, weights[1].values, mix, ids, quant_config=config)

    used = _used(rows, shape)
    return KernelCase(
        family="products",
        name=f"experts {shape.name} rows {rows}",
        make=make,
        ours=ours,
        check=check,
        bytes=used * _bytes(shape.format, 3 * hidden * width) + 4 * rows * hidden,
        flops=6 * rows * topk * hidden * width,
        rate="fp8" if shape.format is BLOCK else "bf16",
        peers={"vllm": vllm} if shape.format is not MXFP4 else {},
        tiny=tiny,
        note=f"{used} experts expected to be chosen",
    )


def _plain(weight: Any, expert: int) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight[expert].float()
    return QuantizedWeight(weight.format, weight.values[expert], weight.scales[expert]).dequantize()


def _used(rows: int, shape: ExpertShape) -> int:
    """Experts that at least one of `rows` tokens is expected to take."""
    return round(shape.count * (1 - (1 - shape.topk / shape.count) ** rows))
