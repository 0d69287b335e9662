"""Hosts build models while PyTorch's default type is the model's: nothing of ours may take its type from there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from allotrope.architectures.registry import ARCHITECTURES, find_architecture, read_spec
from allotrope.checkpoint.weights import finish
from allotrope.layers.build import Build
from allotrope.layers.parallel import Parallel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def types(architecture: str) -> dict[str, torch.dtype]:
    """Of every tensor that a finished model holds on to."""
    found, spec = read_spec(find_architecture({"architectures": [architecture]}, "test").tiny(), "test")
    decoder = found.decoder(spec, Build(torch.bfloat16, torch.bfloat16, CPU, Parallel()))
    finish(decoder)
    held = {}
    for name, module in decoder.named_modules():
        held |= {f"{name}.{key}": value.dtype for key, value in _tensors(module)}
    return held


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    for key, value in {**own, **module._parameters, **module._buffers}.items():
        parts = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
        yield from ((key, part) for part in parts if isinstance(part, torch.Tensor))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_types_do_not_follow_the_default(architecture: str) -> None:
    usual = types(architecture)
    torch.set_default_dtype(torch.bfloat16)
    assert types(architecture) == usual
