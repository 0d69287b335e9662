"""A softmax-attention layer whose projections are normed, rotated and stored by one kernel, against the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, index_pages
from allotrope.attention.cache_layout import pool_bytes, views
from allotrope.attention.check import compare
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.backend import Chooser
from allotrope.kernels.chip import chip_of
from allotrope.layers.build import Build
from allotrope.layers.mixers.mha import MhaMixer, MhaMixerSpec
from allotrope.layers.step import LayerStep, Step
from allotrope.ops.rope import RopeSpec

PLAIN = {"hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25}
ROPE = RopeSpec(dim=16, theta=1e4)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rope": ROPE},
    "normed, gated": {"rope": RopeSpec(dim=8, theta=1e4), "qk_norm": "head", "norm_offset": 1.0, "output_gate": True},
    "values from keys": {"rope": ROPE, "qk_norm": "head", "values_from_keys": True, "v_norm": True},
    "no rotation, scaled values": {"rope": None, "value_scale": 0.5},
    "reads another's rows": {"rope": ROPE, "qk_norm": "head", "shares_cache_of": 0},
    "norm over all heads": {"rope": ROPE, "qk_norm": "all"},
}


def _run(spec: MhaMixerSpec, device: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and key rows of a prompt of 5 and a decode, at random weights, by the backend of that name."""
    torch.manual_seed(0)
    build = Build(device=torch.device(device), chooser=Chooser(chip_of(torch.device(device)), {"mha": "reference"}))
    mixer = MhaMixer(spec, build)
    for parameter in mixer.parameters():
        parameter.data = torch.randn(parameter.shape).to(device)
    for module in mixer.modules():
        if hasattr(module, "finish_loading"):
            module.finish_loading()
    backend: AttentionBackend = next(one for one in FAMILIES["mha"].backends if one.name == name)
    mixer.backend = backend
    batch = BatchLayout((1, 5), (3, 5), torch.device(device))
    layout = mixer.spec.caches()["kv"]
    torch.manual_seed(1)
    pools = views(layout, 4, 5, torch.zeros(pool_bytes(layout, 4, 5), dtype=torch.uint8, device=device))
    for pool in pools.values():
        pool[1:] = torch.randn(pool[1:].shape).to(device)
    index = {"kv": index_pages(batch, 4, [[3], [1, 4]], write=spec.shares_cache_of is None)}
    x = torch.randn(6, spec.hidden).to(device)
    ctx = LayerStep(backend.plan(mixer.spec, batch, index), {"kv": pools})
    step = Step(torch.zeros(6, dtype=torch.int64, device=device), batch, [ctx])
    assert ctx.step is step
    return mixer(x, ctx).cpu(), torch.cat([pool.flatten().cpu() for pool in pools.values()])


@pytest.mark.parametrize("name", CASES)
def test_one_launch_does_what_many_did(name: str) -> None:
    spec = MhaMixerSpec(**PLAIN | CASES[name])
    for got, want in zip(_run(spec, DEVICE, "triton"), _run(spec, "cpu", "reference"), strict=True):
        assert (found := compare(got, want, "fp32")), str(found)
