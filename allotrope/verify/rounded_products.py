"""The rounding that an engine with FP8 weights cannot do without, done to another library's model.

FP8 products of a GPU round their activations to e4m3. How far that alone takes a right engine from the truth is
measured by running the reference with it. Weights are recognized by their values: whatever a library calls them and
however it stacks them, the first row of a matrix is the first row of a tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.checkpoint.dequantize import QuantizedView, dequantized
from allotrope.checkpoint.weight_formats import ONLINE, quantization_of
from allotrope.checkpoint.weights import filled
from allotrope.engine.load_plan import LoadPlan
from allotrope.layers.parallel import placement_of
from allotrope.layers.weights import VALUES, format_of
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import GgufBlocks


def keeps_fp8(load_plan: LoadPlan) -> bool:
    """Whether the engine has products with FP8 weights that the checkpoint has, too, and rounds their activations."""
    return any(format.fp8_activations for format in _kept_fp8(load_plan))


def fp8_words(load_plan: LoadPlan) -> str:
    """What a report says of FP8 weights that are kept; empty where there are none."""
    if keeps_fp8(load_plan):
        return " (FP8 weights kept, activations rounded)"
    return " (FP8 weights kept)" if _kept_fp8(load_plan) else ""


def _kept_fp8(load_plan: LoadPlan) -> list[Fp8]:
    if quantization_of(load_plan.checkpoint.config).get("quant_method") == ONLINE:
        return []
    return [format for format in load_plan.build.formats.values() if isinstance(format, Fp8)]


def keeps_blocks(load_plan: LoadPlan) -> bool:
    """Whether the engine multiplies blocks of a GGUF file as they are stored, by which it rounds activations."""
    return any(isinstance(format, GgufBlocks) for format in load_plan.build.formats.values())


def fp8_tensors(load_plan: LoadPlan) -> list[str]:
    """Names of the checkpoint's tensors that the engine multiplies as FP8, rounding their activations."""
    view = dequantized(load_plan.checkpoint)
    if not isinstance(view, QuantizedView):
        return []
    build = dataclasses.replace(load_plan.build, device=torch.device("meta"))
    parameters = dict(load_plan.architecture.decoder(load_plan.spec, build).named_parameters())
    rules = [(rule.pattern(), rule) for rule in load_plan.architecture.rules(load_plan.spec) if rule.target is not None]
    found = []
    for name in view.headers():
        format = view.format(name)
        if format is None or format.name != "fp8":
            continue
        for pattern, rule in rules:
            match = pattern.fullmatch(name)
            codes = parameters.get(filled(rule, match) + VALUES) if match else None
            if codes is None:
                continue
            kept = format_of(codes)
            rounds = isinstance(kept, Fp8) and kept.fp8_activations
            if rounds and any(one.name == rule.section for one in placement_of(codes).sections):
                found.append(name)
                break
    return found


class RoundedProducts(TorchFunctionMode):
    """While it is entered, products of `model` with the tensors `names` of `checkpoint` round what they multiply.

    `checkpoint`: plain, and what `model` was loaded from. `share`: of the numbers in these tensors, how many were found
    in the model.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        super().__init__()
        headers = checkpoint.headers()
        there = [name for name in names if name in headers]
        first = [row for name in there for row in checkpoint.read(name)[..., 0, :].reshape(-1, headers[name].shape[-1])]
        known = {dtype: {_key(row.to(dtype)) for row in first} for dtype in {p.dtype for p in model.parameters()}}
        self.places: set[int] = set()
        numbers = 0
        for parameter in model.parameters():
            for matrix in _matrices(parameter.data):
                if bool(matrix[0].any()) and _key(matrix[0]) in known[parameter.dtype]:
                    self.places.add(matrix.data_ptr())
                    numbers += matrix.numel()
        wanted = sum(math.prod(headers[name].shape) for name in there)
        # Tensors that the checkpoint lacks count as one more each.
        self.share = min(1.0, numbers / max(wanted, 1)) * len(there) / max(len(names), 1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) > 1 and args[1].data_ptr() in self.places:
            x = args[0]
            rounded = Fp8().activations(x.reshape(-1, x.shape[-1])).to(x.dtype).view(x.shape)
            args = (rounded, *args[1:])
        return func(*args, **(kwargs or {}))


def _matrices(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrices that products are made with: the weight itself, or one of each expert."""
    if weight.dim() == 2:
        yield weight
    elif weight.dim() == 3:
        yield from weight


def _key(row: torch.Tensor) -> bytes:
    return hashlib.blake2b(row.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
