"""Norm, rotation and store in one launch, against the same written plainly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.ops.qk_norm_rope import HeadSpec, Rows
from allotrope.ops.qk_norm_rope import triton as rope_store_triton
from allotrope.ops.qk_norm_rope.reference import rope_store
from allotrope.ops.qk_norm_rope.triton import rope_store as fused
from allotrope.ops.rope import RopeScaling, RopeSpec, RopeTable, Rotation

HEADS = HeadSpec(heads=6, kv_heads=3, dim=16, v_dim=16)
NORMED = dataclasses.replace(HEADS, qk_norm=True)
CASES = {
    "plain": (HEADS, RopeSpec(dim=16, theta=1e4)),
    "normed": (NORMED, RopeSpec(dim=16, theta=1e4)),
    "interleaved": (NORMED, RopeSpec(dim=16, theta=1e4, interleaved=True)),
    "partial": (dataclasses.replace(NORMED, dim=24, v_dim=8), RopeSpec(dim=12, theta=1e4)),
    "partial interleaved": (dataclasses.replace(NORMED, dim=24), RopeSpec(dim=12, theta=1e4, interleaved=True)),
    "some pairs still": (
        NORMED,
        RopeSpec(dim=16, theta=1e4, scaling=RopeScaling(kind="proportional", rotated=4, factor=1.0)),
    ),
    "no rotation": (NORMED, None),
    "values from keys": (
        dataclasses.replace(NORMED, values_from_keys=True, v_norm=True, heads=5, kv_heads=1),
        RopeSpec(dim=16, theta=1e4),
    ),
    "scaled values": (dataclasses.replace(HEADS, value_scale=0.5), RopeSpec(dim=16, theta=1e4)),
    "queries only": (dataclasses.replace(NORMED, kv_heads=0), RopeSpec(dim=16, theta=1e4)),
    "wide": (HeadSpec(heads=2, kv_heads=1, dim=512, v_dim=512, qk_norm=True), RopeSpec(dim=512, theta=1e4)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _draw(spec: HeadSpec, rope: RopeSpec | None, dtype: torch.dtype, tokens: int = 7) -> tuple:
    """A projection with columns of others behind it, the rotation of far positions, and the norms' factors."""
    torch.manual_seed(0)
    projected = torch.randn(tokens, spec.width + 8).to(DEVICE, dtype)
    positions = torch.arange(tokens, device=DEVICE) * 977 + 3
    rotation = None if rope is None else RopeTable(rope, torch.device(DEVICE)).at(positions, dtype)
    weights = [1 + torch.randn(spec.dim, device=DEVICE) / 4 for _ in range(2)] if spec.qk_norm else [None, None]
    return projected, rotation, *weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_without_pools(name: str, dtype: torch.dtype) -> None:
    spec, rope = CASES[name]
    projected, *others = _draw(spec, rope, dtype)
    exact = rope_store(spec, projected.float(), *others, None)
    for got, want in zip(fused(spec, projected, *others, None), exact, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.is_contiguous()
            assert (found := compare(got, want, KINDS[dtype])), str(found)


def _pools(spec: HeadSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    """Pools as views of one buffer that holds both, poisoned."""
    width = spec.kv_heads * (spec.dim + spec.v_dim)
    buffer = torch.full((4, 5, width), torch.nan, device=DEVICE).to(dtype)
    k, v = buffer.split((spec.kv_heads * spec.dim, spec.kv_heads * spec.v_dim), dim=-1)
    return [k.unflatten(-1, (spec.kv_heads, -1)), v.unflatten(-1, (spec.kv_heads, -1))]


def _stored(spec: HeadSpec, inputs: tuple, pool: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """q and what the pools then hold, by the kernel and as it should be; and that nothing else was written."""
    slots = torch.tensor([7, -1, 19, 5, -1, 6, 12], device=DEVICE)
    kept = slots[slots >= 0]
    untouched = torch.ones(20, dtype=torch.bool, device=DEVICE).index_fill_(0, kept, False)
    projected, *others = inputs
    found = {}
    # What is wanted of bf16 rows is the exact number; FP8 rows are rounded twice.
    exact = (projected.float(), torch.float32) if pool == torch.bfloat16 else (projected, pool)
    for name, run, given, dtype in (("got", fused, projected, pool), ("want", rope_store, *exact)):
        k, v = _pools(spec, dtype)
        q, *none = run(spec, given, *others, Rows(k, v, slots, k_scale=0.25, v_scale=2.0))
        assert none == [None, None]
        pools = [one.flatten(0, 1) for one in (k, v)]
        assert all(one[untouched].float().isnan().all() for one in pools)
        found[name] = [q, *(one[kept] for one in pools)]
    return found


@pytest.mark.parametrize("name", [name for name, (spec, _) in CASES.items() if spec.kv_heads])
def test_rows_go_to_their_slots_and_nowhere_else(name: str) -> None:
    spec, rope = CASES[name]
    found = _stored(spec, _draw(spec, rope, torch.bfloat16), torch.bfloat16)
    for got, want in zip(found["got"], found["want"], strict=True):
        assert (judged := compare(got, want, "bf16")), str(judged)


def test_fp8_rows_hold_the_number_over_the_scale() -> None:
    """Numbers that FP8 has exactly, some too large for it: the pools are equal bit for bit."""
    spec, rope = CASES["plain"]
    assert rope is not None
    projected, *_ = _draw(spec, rope, torch.bfloat16)
    projected = (projected * 16).to(torch.float8_e4m3fn).to(torch.bfloat16)
    projected[0] *= 1024
    start = RopeTable(rope, torch.device(DEVICE)).at(torch.zeros(7, device=DEVICE), torch.bfloat16)
    found = _stored(spec, (projected, start, None, None), torch.float8_e4m3fn)
    for got, want in zip(found["got"], found["want"], strict=True):
        assert torch.equal(got.float(), want.float())
    assert found["got"][1].float().abs().max() == 448


@pytest.mark.parametrize("name", [name for name, (spec, _) in CASES.items() if spec.kv_heads])
def test_fp8_rows_of_any_numbers(name: str) -> None:
    spec, rope = CASES[name]
    found = _stored(spec, _draw(spec, rope, torch.bfloat16), torch.float8_e4m3fn)
    for got, want in zip(found["got"][1:], found["want"][1:], strict=True):
        got, want = got.float(), want.float()
        # One step of FP8 apart where the first rounding was near a tie.
        assert ((got - want).abs() <= want.abs() / 8 + 2**-9).all()
        assert (got == want).float().mean() > 0.98


def test_values_that_are_keys_need_no_pool() -> None:
    spec = dataclasses.replace(NORMED, values_from_keys=True)
    inputs = _draw(spec, RopeSpec(dim=16, theta=1e4), torch.float32)
    slots = torch.arange(7, device=DEVICE) + 5
    k, _ = _pools(spec, torch.float32)
    fused(spec, *inputs, Rows(k, None, slots))
    want = rope_store(spec, *inputs, None)[1]
    assert want is not None
    assert compare(k.flatten(0, 1)[slots], want, "fp32")


def test_one_program_a_token_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rope = CASES["partial"]
    inputs = _draw(dataclasses.replace(spec, heads=200), rope, torch.bfloat16)
    many = fused(dataclasses.replace(spec, heads=200), *inputs, None)
    monkeypatch.setattr(rope_store_triton, "_MIN_PROGRAMS", 1)
    one = fused(dataclasses.replace(spec, heads=200), *inputs, None)
    assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True))


def test_a_token_alone_is_the_token_in_company() -> None:
    spec, rope = CASES["partial"]
    projected, rotation, *weights = _draw(spec, rope, torch.bfloat16)
    assert isinstance(rotation, Rotation)
    whole = fused(spec, projected, rotation, *weights, None)[0]
    one = fused(spec, projected[3:4], rotation.select(torch.tensor([3], device=DEVICE)), *weights, None)[0]
    assert torch.equal(whole[3:4], one)
