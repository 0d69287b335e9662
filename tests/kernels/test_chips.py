"""What is chosen on each chip for layers of released sizes: a kernel that it runs, or a reason with what it needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.csa.spec import IndexerSpec as CsaIndexerSpec
from allotrope.attention.dsa.spec import DsaSpec, IndexerSpec
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.mha.spec import MhaSpec
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.backend import choose
from allotrope.kernels.chip import CHIPS, Chip
from allotrope.kernels.registry import every_specialization
from allotrope.kernels.triton_version import e4m3fn_reasons
from allotrope.ops.registry import registered_cases, registered_ops
from allotrope.ops.rope import RopeSpec

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOO_OLD_FOR_FP8 = "kv_dtype=float8_e4m3fn on sm_80 (needs sm_89 or newer)"


def mha(heads: int, kv_heads: int, dim: int, **more: Any) -> MhaSpec:
    return MhaSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, kv_dtype=BF16, **more)


MLA = MlaSpec(num_heads=128, latent_dim=512, rope_dim=64, nope_dim=128, v_head_dim=128, scale=0.07, kv_dtype=BF16)
DSA = DsaSpec(mla=MLA, topk=2048, indexer=IndexerSpec(num_heads=64, head_dim=128))
CSA = CsaSpec(
    num_heads=64, head_dim=512, scale=512**-0.5, window=128, rope=RopeSpec(dim=64, theta=1e4, interleaved=True),
    kv_dtype=BF16, ratio=4, overlap=True, indexer=CsaIndexerSpec(num_heads=64, head_dim=128, topk=512),
)  # fmt: skip
GDN = GdnSpec(num_k_heads=16, num_v_heads=32, k_head_dim=128, v_head_dim=128, conv_width=4, conv_dtype=BF16)

PLAIN = {
    "GQA of 128": mha(64, 8, 128),
    "window and sinks": mha(64, 8, 64, window=128, sinks=True),
    "heads of 256": mha(16, 2, 256, softcap=50.0, window=4096),
    "heads of 512": mha(32, 4, 512),
    "latent": MLA,
    "sparse latent": DSA,
    "gated delta rule": GDN,
    "decay per channel": dataclasses.replace(GDN, channel_decay=True),
    "compressed": CSA,
}
SCALED_MLA = dataclasses.replace(MLA, kv_dtype=FP8, row_format="scaled")
QUANTIZED = {
    "GQA of 128": dataclasses.replace(mha(64, 8, 128), kv_dtype=FP8),
    "latent": dataclasses.replace(MLA, kv_dtype=FP8),
    "scaled latent": SCALED_MLA,
    "sparse latent": dataclasses.replace(
        DSA, mla=SCALED_MLA, indexer=IndexerSpec(num_heads=64, head_dim=128, key_format="scaled")
    ),
    "compressed": dataclasses.replace(CSA, kv_dtype=FP8),
    "scaled compressed": dataclasses.replace(CSA, kv_dtype=FP8, row_format="scaled"),
}


@pytest.fixture(params=CHIPS.values(), ids=CHIPS)
def chip(request: pytest.FixtureRequest) -> Chip:
    found: Chip = request.param
    return found


@pytest.mark.parametrize("spec", PLAIN.values(), ids=PLAIN)
def test_every_chip_runs_every_family_by_triton(chip: Chip, spec: Any) -> None:
    choice = choose(FAMILIES[spec.family], spec, chip)
    assert (choice.backend.name, choice.passed_over) == ("triton", {})


@pytest.mark.parametrize("spec", QUANTIZED.values(), ids=QUANTIZED)
def test_fp8_caches_need_a_chip_that_converts_them(chip: Chip, spec: Any) -> None:
    choice = choose(FAMILIES[spec.family], spec, chip)
    if chip.arch != "sm_80":
        assert (choice.backend.name, choice.passed_over) == ("triton", {})
        return
    assert choice.backend.name in ("chunked", "reference")
    assert TOO_OLD_FOR_FP8 in choice.passed_over["triton"]


def test_every_operation_runs_or_says_what_it_needs(chip: Chip) -> None:
    """The first backend without a reason is chosen. Those before it say what they found and what they need."""
    for name, op in registered_ops().items():
        for case in registered_cases().get(name, {}).values():
            for dtype in case.dtypes:
                choice = choose(op, case.spec(dtype), chip)
                assert choice.backend.name != "cpu", (name, choice)
                for backend, reasons in choice.passed_over.items():
                    stated = ["needs " in reason or "allowed: " in reason for reason in reasons]
                    assert stated and all(stated), (name, backend, reasons)


@pytest.mark.parametrize(
    ("chip", "reason"),
    [
        (Chip("nvidia", "sm_75", 40, 64 << 10), "chip=sm_75 (needs sm_80 or newer"),
        (Chip("nvidia", "sm_90", 132, 48 << 10), "shared_memory=48 KiB (needs 99 KiB)"),
        (Chip("amd", "gfx90a", 104, 32 << 10), "shared_memory=32 KiB (needs 64 KiB)"),
    ],
    ids=["old", "small", "small AMD"],
)
def test_chips_that_run_no_kernel_say_why(chip: Chip, reason: str) -> None:
    for spec in PLAIN.values():
        choice = choose(FAMILIES[spec.family], spec, chip)
        assert choice.backend.name in ("chunked", "reference")
        assert any(reason in said for said in choice.passed_over["triton"]), choice.passed_over


def test_heads_that_no_tile_holds_are_rejected(chip: Chip) -> None:
    for spec, reason in (
        (dataclasses.replace(MLA, latent_dim=1024), "latent_dim=1024 (needs at most 512)"),
        (dataclasses.replace(GDN, k_head_dim=512), "k_head_dim=512 (allowed: at most 256)"),
    ):
        choice = choose(FAMILIES[spec.family], spec, chip)
        assert reason in choice.passed_over["triton"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_an_indexer_that_shared_memory_does_not_hold_is_rejected(arch: str) -> None:
    spec = dataclasses.replace(DSA, indexer=IndexerSpec(num_heads=128, head_dim=256))
    passed_over = choose(FAMILIES["dsa"], spec, CHIPS[arch]).passed_over
    small = {"triton": ["shared_memory=99 KiB (the indexer needs 128 KiB)"]}
    assert passed_over == (small if arch in ("sm_89", "sm_120") else {})


def test_what_is_compiled_is_what_is_not_rejected(chip: Chip) -> None:
    """Specializations with e4m3 numbers exist on a chip just where backends take such caches."""
    compiled = [one.name for one in every_specialization(chip) if one.has_e4m3fn]
    assert bool(compiled) == (not e4m3fn_reasons("kv_dtype", FP8, chip))


def test_kernels_of_warpgroups_are_launched_on_hopper_alone(chip: Chip) -> None:
    from allotrope.attention.mha import gluon_prefill
    from allotrope.attention.mla import triton_decode

    hopper = chip.arch == "sm_90"
    assert (gluon_prefill.config(chip, mha(64, 8, 128), BF16) is not None) == hopper
    assert triton_decode.config(chip, MLA, BF16, False).gluon == hopper
    compiled = {
        one.kernel.fn.__module__ for one in every_specialization(chip) if type(one.kernel).__name__.startswith("Gluon")
    }
    assert bool(compiled) == hopper


@pytest.mark.parametrize("spec", [spec for spec in PLAIN.values() if isinstance(spec, MhaSpec)])
def test_prompts_are_gathered_where_a_copy_engine_fetches_tiles(chip: Chip, spec: MhaSpec) -> None:
    from allotrope.attention.mha import triton_prefill

    how = triton_prefill.config(chip, spec, BF16)
    assert not how.gather or chip.has_tma
    assert not triton_prefill.without_gather(chip, spec, how).gather


@pytest.mark.parametrize(
    ("arch", "facts"),
    [
        ("sm_80", "tf32"),
        ("sm_89", "tf32 e4m3fn"),
        ("sm_90", "tf32 e4m3fn tma pdl wgmma"),
        ("sm_100", "tf32 e4m3fn tma pdl"),
        ("sm_120", "tf32 e4m3fn tma pdl"),
        ("gfx942", "e4m3fnuz"),
        ("gfx950", "e4m3fn"),
    ],
)
def test_what_each_chip_has(arch: str, facts: str) -> None:
    names = ("tf32", "e4m3fn", "e4m3fnuz", "tma", "pdl", "wgmma")
    assert {name for name in names if getattr(CHIPS[arch], f"has_{name}")} == set(facts.split())
