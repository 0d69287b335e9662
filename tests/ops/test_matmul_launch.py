"""How quantized products are launched: by what was measured, else by rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from allotrope.kernels.chip import CHIPS
from allotrope.ops import grouped_matmul, matmul
from allotrope.ops.matmul import MatmulSpec, launch
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.launch import PYTORCH, Launch, Shape, bucket, launch_for, rule_of_thumb, tuned, write_tuned
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.weight import Format

SHAPE = Shape("fp8", 0, 4096, 2048, False)


def test_the_next_larger_measured_number_of_rows_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    launch.forget()
    small, large = Launch(16, 64, 4), Launch(64, 128, swap_ab=False)
    write_tuned("chip", {SHAPE.key: {"4": small}})
    write_tuned("chip", {SHAPE.key: {"64": large}})
    try:
        assert [launch_for(SHAPE, rows, "chip") for rows in (1, 4, 5, 64)] == [small, small, large, large]
        assert launch_for(SHAPE, 65, "chip") == rule_of_thumb(SHAPE, 65, "chip")
        other = Shape("fp8", 0, 64, 64, False)
        assert launch_for(other, 4, "chip") == rule_of_thumb(other, 4, "chip")
        # More rows than many go as many do.
        write_tuned("chip", {SHAPE.key: {"8192": large}})
        launch.forget()
        assert launch_for(SHAPE, 8193, "chip") == launch_for(SHAPE, 1 << 20, "chip") == large
    finally:
        launch.forget()


def test_one_fp8_weight_goes_as_the_nearest_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    launch.forget()
    near, far, others = Launch(16, 64, 4), Launch(16, 128, 2), Launch(32, 64)
    wide = Shape("fp8", 0, 16384, 2048, False)
    experts, gated, plain = Shape("fp8", 8, 4096, 2048, False), Shape("fp8", 0, 4096, 2048, True), "plain 4096x2048"
    found = {SHAPE.key: {"16": near}, wide.key: {"16": far}}
    write_tuned("chip", found | {key: {"16": others} for key in (experts.key, gated.key, plain)})
    try:
        assert all(Shape.of(key).key == key for key in tuned("chip"))
        for size, wanted in (((5120, 2048), near), ((4096, 1536), near), ((12288, 2048), far)):
            assert launch_for(Shape("fp8", 0, *size, False), 4, "chip") == wanted, size
        # Twice as large, of another kind, or more rows than were measured: by rule.
        twice = [Shape("fp8", 0, 4096, 4096, False), Shape("fp8", 0, 2048, 2048, False)]
        for shape in (*twice, Shape("plain", 0, 5120, 2048, False), Shape("fp8", 8, 5120, 2048, False)):
            assert launch_for(shape, 4, "chip") == rule_of_thumb(shape, 4, "chip"), shape
        unmeasured = Shape("fp8", 0, 5120, 2048, False)
        assert launch_for(unmeasured, 17, "chip") == rule_of_thumb(unmeasured, 17, "chip")
    finally:
        launch.forget()


def test_rows_are_wanted_quantized_where_products_do_not_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    launch.forget()
    quantizes, takes = Launch(16, 64, quantize=True), Launch(16, 64, quantize=False)
    sizes = {(1024, 512): (quantizes, quantizes), (8192, 512): (quantizes, takes), (65536, 512): (takes, quantizes)}
    shapes = {size: Shape("fp8", 0, *size, False) for size in sizes}
    write_tuned("h200", {shapes[size].key: {"4": few, "16": more} for size, (few, more) in sizes.items()})
    chip = replace(CHIPS["sm_90"], product="nvidia_h200")

    def quantized_from(format: Format, outputs: int, experts: int = 0) -> int | None:
        of = grouped_matmul if experts else matmul
        return of.kernels_quantized_from(MatmulSpec(format, torch.bfloat16, outputs, 512, experts), chip)

    try:
        assert [quantized_from(Fp8(128), outputs) for outputs, _ in sizes] == [17, 1, 1]
        assert quantized_from(PLAIN, 1024) is quantized_from(PLAIN, 1024, experts=8) is None
        for launches, wanted in (((quantizes, takes), 1), ((quantizes, quantizes), None)):
            experts = dict(zip(("64", "512"), launches, strict=True))
            write_tuned("h200", {Shape("fp8", 8, 512, 512, True).key: experts})
            assert quantized_from(Fp8(128), 1024, experts=8) is wanted
    finally:
        launch.forget()


def test_other_numbers_of_experts_go_by_the_rows_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    launch.forget()
    small, large = Launch(8, 64), Launch(32, 128)
    whole, half, narrow = (Shape("mxfp4", *size, 2880, True) for size in ((128, 2880), (64, 2880), (64, 1440)))
    write_tuned("chip", {whole.key: {"64": small, "2048": large}})
    try:
        rows = (1, 32, 128, 256, 1024)
        assert [launch_for(half, count, "chip") for count in rows] == [small, small, small, large, large]
        assert [launch_for(whole, 2 * count, "chip") for count in rows] == [small, small, small, large, large]
        for shape in (narrow, Shape("fp8", 64, 2880, 2880, True), Shape("mxfp4", 64, 2880, 2880, False)):
            assert launch_for(shape, 32, "chip") == rule_of_thumb(shape, 32, "chip"), shape
        # More than were measured, which were not many: by rule, for the rows that there are.
        assert launch_for(half, 4096, "chip") == rule_of_thumb(half, 4096, "chip")
    finally:
        launch.forget()


@pytest.mark.parametrize("rows", [65, 128, 500, 1023])
def test_rules_leave_large_fp8_weights_to_pytorch(rows: int) -> None:
    large, small = Shape("fp8", 0, 36864, 7168, False), Shape("fp8", 0, 2048, 2048, False)
    for shape, chip, wanted in ((large, "h200", "pytorch"), (small, "h200", "triton"), (large, "gfx942", "triton")):
        assert rule_of_thumb(shape, rows, chip).provider == wanted
    assert rule_of_thumb(small, 1024, "h200").provider == "pytorch"
    assert rule_of_thumb(large, 64, "h200").provider == "triton"


def test_rows_of_experts_go_as_the_nearest_measured_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 experts, 256 rows are nearer to 128 than to 2048; one weight's rows would fill the larger tiles."""
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    launch.forget()
    small, large = Launch(8, 64), Launch(32, 128)
    experts = Shape("fp8", 64, 512, 2048, True)
    for shape in (experts, SHAPE):
        write_tuned("chip", {shape.key: {"128": small, "2048": large}})
    try:
        rows = (1, 128, 129, 256, 257, 512, 513, 1024, 2048)
        assert [launch_for(experts, count, "chip") for count in rows] == [small] * 4 + [large] * 5
        assert [launch_for(SHAPE, count, "chip") for count in rows] == [small] * 2 + [large] * 7
    finally:
        launch.forget()


def test_a_chip_of_the_same_architecture_starts_from_what_the_h200_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    launch.forget()
    first, own, other = Launch(32, 128), Launch(32, 64, 2), Shape("fp8", 0, 64, 64, False)
    write_tuned("h200", {SHAPE.key: {"4": first}, other.key: {"4": first}})
    try:
        assert launch_for(SHAPE, 4, "h100_80gb_hbm3") == first != launch_for(SHAPE, 4, "b200")
        launch.forget()
        write_tuned("h100_80gb_hbm3", {SHAPE.key: {"4": own}})
        assert [launch_for(shape, 4, "h100_80gb_hbm3") for shape in (SHAPE, other)] == [own, first]
        assert launch_for(SHAPE, 4, "h200") == first
    finally:
        launch.forget()


@pytest.mark.parametrize("chip", ["h200", "gfx942", "gfx950", "interpreter"])
@pytest.mark.parametrize("rows", [1, 17, 64, 500, 8192, 1 << 17])
def test_large_plain_weights_are_not_left_to_pytorch(rows: int, chip: str) -> None:
    head, down, small = (Shape("plain", 0, *size, False) for size in ((131072, 2048), (8192, 28672), (2048, 2048)))
    found = [rule_of_thumb(shape, rows, chip) for shape in (head, down, small)]
    ours = [launch.provider != "pytorch" for launch in found]
    assert ours == ([rows <= 64, rows <= 16, False] if chip == "h200" else [chip == "interpreter"] * 3)
    if chip == "h200" and rows <= 16:
        # As many programs as a chip has room for, of weights of few outputs too.
        assert [launch.split_k for launch in found[:2]] == [1, 2]


@pytest.mark.parametrize("chip", ["h200", "gfx942", "gfx950", "interpreter"])
@pytest.mark.parametrize("rows", [1, 17, 64, 500, 8192, 1 << 17])
def test_rules_give_tiles_that_exist(rows: int, chip: str) -> None:
    for shape in (SHAPE, Shape("mxfp4", 128, 2880, 2880, True), Shape("plain", 8, 64, 64, False)):
        found = rule_of_thumb(shape, rows, chip)
        heights = (8, 16, 32, 64, 128) if shape.kind == "mxfp4" and chip == "h200" else (16, 32, 64, 128)
        assert found.block_m in heights and found.block_n in (32, 64, 128) and found.split_k >= 1
        assert not (shape.gated and found.split_k > 1) and not (
            found.provider == "pytorch" and (shape.experts or "gfx" in chip)
        )


def test_what_was_measured_can_be_read() -> None:
    for path in launch.FOLDER.glob("*.json"):
        for key, buckets in tuned(path.stem).items():
            assert all(bucket(int(rows)) == int(rows) for rows in buckets), key
            # Programs that share inputs have no whole sums to gate; warps of one program do.
            shared = [found for found in buckets.values() if found.split_k > 1 and found.provider != "sliced_k"]
            assert "gated" not in key or not shared


def test_rules_take_groups_of_warps_for_four_bits_where_chips_know_how() -> None:
    shape = Shape("mxfp4", 64, 2880, 2880, True)
    assert (
        rule_of_thumb(shape, 64 * 33, "h200").provider == "gluon"
        and rule_of_thumb(shape, 64 * 33, "h100_80gb_hbm3").provider == "gluon"
    )
    assert (
        rule_of_thumb(shape, 64 * 32, "h200").provider != "gluon"
        and rule_of_thumb(shape, 64 * 33, "b200").provider != "gluon"
    )


@pytest.mark.parametrize(("outputs", "inputs", "rows", "splits"), [(2112, 7168, 65, 4), (2240, 7168, 500, 1)])
def test_weights_that_the_library_does_not_take_are_not_left_to_it(
    outputs: int, inputs: int, rows: int, splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as DeepSeek's joined projections, whose blocks of scales do not begin at multiples of 128 rows."""
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    launch.forget()
    shape = Shape("fp8", 0, outputs, inputs, False)
    try:
        assert launch_for(shape, rows, "h200").provider == "pytorch"
        wanted = Launch(64, 64, splits, swap_ab=splits > 1, quantize=False)
        assert launch_for(shape, rows, "h200", library=False) == wanted
        write_tuned("h200", {shape.key: {"4": Launch(8, 64), "512": PYTORCH}})
        assert launch_for(shape, rows, "h200") == PYTORCH
        assert launch_for(shape, rows, "h200", library=False) == wanted
        # Of many rows, high tiles leave no program without work.
        assert launch_for(shape, 8192, "h200", library=False).block_m == 128
    finally:
        launch.forget()
