"""Finds the fastest launch of quantized products on this GPU, and writes it where `launch_for` looks.

    python bench/kernels/tune_products.py                        what the models of bench/configs run on 1 and 2 GPUs
    python bench/kernels/tune_products.py MODEL --tensor-parallel-size 4 --missing
    python bench/kernels/tune_products.py --only "512x" --rows 4,64
    python bench/kernels/tune_products.py --provider gluon       what is chosen already against one provider's
    python bench/kernels/tune_products.py --chosen               only times what is chosen already

FP8 products are timed with rows that a norm or a gate has quantized, but where --unquantized says otherwise. Every
candidate is held against the reference first. Candidates are compiled by several processes, then timed by one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import gc
import itertools
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    # The script's own folder is not where `bench` lies.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from allotrope.attention.check import TOLERANCES, compare
from allotrope.kernels.chip import chip_of
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.matmul import pack_for_kernels as pack
from allotrope.ops.matmul.launch import (
    FEW_OUTPUTS,
    FEW_PLAIN_ROWS,
    GLUON,
    PYTORCH,
    Launch,
    Shape,
    bucket,
    launch_for,
    tuned,
    tuned_name,
    write_tuned,
)
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.plain import pack_plain
from allotrope.ops.matmul.quantized_rows import keep_quantized
from allotrope.ops.matmul.weight import QuantizedWeight
from bench.kernels.cases.products import BLOCK, _codes
from bench.kernels.model_shapes import shapes_of
from bench.kernels.timing import Stopwatch

GATING = GatedActivation()
# Of the roughly timed launches, those within this factor of the fastest are timed again, at most so many.
CLOSE, FINALISTS = 1.15, 16
# Microseconds that a kernel of PyTorch's costs a decode step beyond its own: it begins when the one before it has
# ended, and the one behind it when it has (`bench/engine.py` with and without ALLOTROPE_PDL=0, by kernel).
NO_PDL_US = 1.3
ROWS = (4, 16, 64, 128, 256, 512, 2048, 8192)
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class Line:
    """The fastest launch of a product. `moved`: bytes of the weights that it reads. `micros`: median of its runs."""

    key: str
    rows: int
    micros: float
    moved: float
    flops: float
    launch: Launch

    @property
    def rates(self) -> tuple[float, float]:
        """TB/s of weights, TFLOP/s."""
        return self.moved / self.micros / 1e6, self.flops / self.micros / 1e6

    def __str__(self) -> str:
        rate = "{:.2f} TB/s {:.0f} TFLOP/s".format(*self.rates)
        return f"{self.key:28s} rows {self.rows:6d} {self.micros:8.1f} us {rate}  {self.launch}"


def write_report(path: Path, lines: Sequence[Line], command: str, device: str) -> None:
    """A JSON file with a row per product and number of rows; `bench/results.py` makes its table."""
    rows = []
    for line in sorted(lines, key=lambda line: (line.key, line.rows)):
        launch, (copied, computed) = line.launch, line.rates
        tiles = "swap-AB" if launch.swap_ab else "no swap"
        ours = {"gluon": "warp-specialized", "sliced_k": "sliced-K"}.get(launch.provider, tiles)
        rows.append(
            {
                "product": line.key,
                "rows": line.rows,
                "us": round(line.micros, 1),
                "tb_per_s": round(copied, 2),
                "tflop_per_s": round(computed),
                "tile": [launch.block_m, launch.block_n],
                "splits": launch.split_k,
                "by": "PyTorch" if launch.provider == "pytorch" else ours,
            }
        )
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    report = {"command": command, "device": device, "date": date, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")


def others() -> list[tuple[Shape, int]]:
    """Products beside those of bench/configs, and how many experts a token takes."""
    # Copies of heads that choose drafts.
    found = [
        (Shape("fp8", 0, *size, False), 1) for size in ((201088, 2880), (248320, 5120), (151936, 2048), (129280, 7168))
    ]
    # Llama 3 8B.
    llama = ((128256, 4096), (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
    found += [(Shape("plain", 0, *size, False), 1) for size in llama]
    # Qwen3 30B A3B and Gemma 4 26B A4B.
    for width, hidden in ((768, 2048), (704, 2816)):
        found += [(Shape("plain", 128, width, hidden, True), 8), (Shape("plain", 128, hidden, width, False), 8)]
    return found


def shapes(models: Sequence[Path], ranks: Sequence[int], chip: str) -> list[tuple[Shape, int]]:
    """The products of models on so many ranks each, and how many experts a token takes; of no models, of all in
    bench/configs and of `others`."""
    folders = models or sorted(one.parent for one in CONFIGS.glob("*/config.json") if "eagle3" not in one.parent.name)
    found = dict(pair for model in folders for count in ranks for pair in shapes_of(model, count, chip))
    return list((found if models else {**found, **dict(others())}).items())


def in_library(shape: Shape) -> bool:
    """Whether PyTorch's product takes such a weight: of FP8 ones those of whole blocks."""
    return shape.kind != "fp8" or shape.outputs % BLOCK.rows == 0


def candidates(shape: Shape, rows: int, quantized: bool) -> Iterator[Launch]:
    """Launches worth trying for so many rows, which may have been quantized before."""
    usual = -(-rows // shape.experts) if shape.experts else rows
    if shape.kind == "mxfp4":
        yield from _of_four_bits(shape, usual)
        return
    if usual <= 16:
        yield from _of_sliced_k(shape, usual)
    fp8 = shape.kind == "fp8"
    if not shape.experts and not fp8:
        yield from _of_plain(shape, rows)
        return
    if fp8 and not shape.experts and usual <= 128:
        yield from _of_fp8(shape, usual, quantized)
    elif usual <= 128:
        heights = [h for h in (8, 16, 32, 64) if min(usual, 64) / 2 <= h <= max(16, 4 * usual)]
        # Rounding in the product saves a launch, and costs every step a barrier.
        rounds = (False,) if quantized else (True, False) if fp8 else (True,)
        for height, columns, stages, inside in itertools.product(heights, (64, 128), (2, 3, 5), rounds):
            yield Launch(height, columns, 1, True, inside, 4, stages)
        if not shape.gated:
            yield from (Launch(height, 256, 1, True, True, 8, 3) for height in heights)
    if usual > 32:
        for height, columns, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (3, 4)):
            wide = 2 * columns if shape.gated else columns
            if wide > 256 or (height * wide > 64 * 256 and warps == 4):
                continue
            yield Launch(height, columns, 1, False, False, warps, stages)
        if fp8 and not shape.experts and in_library(shape):
            yield PYTORCH
        if fp8 and shape.experts:
            yield GLUON


def _of_sliced_k(shape: Shape, rows: int) -> Iterator[Launch]:
    """As `candidates`, of products whose inputs a program's warps share out."""
    block_m, codes = (8 if rows <= 8 else 16), 1 if shape.kind == "fp8" else 2
    for block_n, slices, block_k in itertools.product((16, 32), (2, 4, 8, 16), (128,) if codes == 1 else (64, 128)):
        # Each of 4 warps has a product of 16 rows of weights.
        if block_n * slices < 64 or slices * block_k >= 2 * shape.inputs:
            continue
        step = codes * slices * block_k * (block_n * (2 if shape.gated else 1) + block_m)
        for stages in (2, 3, 4):
            if step * stages <= 200_000:
                yield Launch(block_m, block_n, slices, True, False, 4, stages, block_k, "sliced_k")


def _of_fp8(shape: Shape, rows: int, quantized: bool) -> Iterator[Launch]:
    """As `candidates`, of one FP8 weight and few rows."""
    fewest = rows if rows <= 32 else 32 if rows <= 64 else 64
    heights = [h for h in (8, 16, 32, 64) if fewest <= h <= max(16, 2 * rows)]
    # Programs that share inputs: enough of them, and not so many that their parts are what is read.
    shares = [split for split in (1, 2, 3, 4, 5, 6, 8, 10) if split <= max(1, shape.inputs // 512)]
    for height, columns in itertools.product(heights, (64, 128)):
        tiles = -(-shape.outputs // columns) * -(-rows // height)
        splits = [split for split in shares if split == 1 or 60 <= tiles * split <= 1100]
        # Of few rows rounding in the product may save a launch; it costs every step a barrier.
        rounds = (True, False) if rows <= 16 and not quantized else (False,)
        for split, stages, inside in itertools.product(splits, (2, 3, 4), rounds):
            yield Launch(height, columns, split, True, inside, 4, stages)
        if rows > 16:
            # Wide tiles read the rows less often.
            for split, stages in itertools.product(splits, (3, 4)):
                yield Launch(height, 2 * columns, split, True, False, 8, stages)
    # Stream-K.
    yield dataclasses.replace(GLUON, block_m=64 if rows <= 64 else 128)


def _of_plain(shape: Shape, rows: int) -> Iterator[Launch]:
    """As `candidates`, of one plain weight."""
    yield PYTORCH
    if rows > FEW_PLAIN_ROWS:
        return
    height = max(16, bucket(rows))
    # Programs that share inputs, where there are few; and not so many that their parts are what is read.
    splits = [split for split in (1, 2, 4, 8) if -(-shape.outputs // 128) * split <= 1200 or split == 1]
    widths: tuple[int, ...] = (64, 128, 256)
    if shape.outputs <= FEW_OUTPUTS:
        widths, splits = (64,), [split for split in (4, 8, 16, 32) if split <= shape.inputs // 128]
        for columns, split, depth, stages in itertools.product((16, 32, 64), splits, (64, 128), (2, 4)):
            yield Launch(height, columns, split, False, True, 4, stages, depth)
    for columns, split, depth in itertools.product(widths, splits, (64, 128)):
        for warps in (4, 8) if columns > 64 else (4,):
            # As many steps ahead as there is room for, and fewer.
            most = 220_000 // (2 * depth * (columns + height))
            for stages in sorted({min(most, count) for count in (3, 4, 6)}):
                if stages > 1 and columns * height <= 128 * 32 * warps:
                    yield Launch(height, columns, split, True, True, warps, stages, depth)


def _of_four_bits(shape: Shape, usual: int) -> Iterator[Launch]:
    """As `candidates`. A tile has `wide` rows of weights: gates and ups are one tile."""
    heights, widths = (8, 16, 32, 64, 128, 256), (32, 64, 128, 256)
    splits: tuple[int, ...] = (1,) if shape.gated or shape.experts else (1, 2, 4, 8)
    if shape.experts and not shape.gated and usual == 1:
        # Few chosen experts are few tiles.
        splits = (1, 2, 3)
    for height, columns, warps, stages in itertools.product(heights, widths, (4, 8), (2, 3, 4)):
        wide = 2 * columns if shape.gated else columns
        # A group of 4 warps multiplies 64 rows of weights at a time; sums take half of its registers at most.
        fits = 16 * warps <= wide <= 32 * warps and height * wide <= 128 * 32 * warps
        if not fits or not min(usual, 128) / 2 <= height <= max(16, 4 * usual):
            continue
        for split in splits:
            yield Launch(height, columns, split, True, True, warps, stages)
            if height <= 32:
                yield Launch(height, columns, split, True, True, warps, stages, 256)
        if height >= 64 and wide >= 128:
            yield Launch(height, columns, 1, False, True, warps, stages)
    if usual > 32 and shape.experts:
        yield GLUON
    if usual <= 64:
        # Products of the tensor cores that take few rows on their left.
        for columns, warps in ((32, 2), (32, 4), (64, 2), (64, 4)):
            yield Launch(16, columns, 1, False, True, warps, 3)


def weight_of(shape: Shape, device: torch.device) -> tuple[Any, Any]:
    """A random weight, plain or quantized, and its prepared form."""
    outputs = 2 * shape.outputs if shape.gated else shape.outputs
    size = (max(1, shape.experts), outputs, shape.inputs)
    if shape.kind == "plain":
        plain = torch.randn(size, device=device, dtype=torch.bfloat16).div_(shape.inputs**0.5)
        return plain, pack_plain(plain if shape.experts else plain[0])
    weight = _codes(BLOCK if shape.kind == "fp8" else MXFP4, size if shape.experts else size[1:], device)
    return weight, pack(QuantizedWeight(weight.format, weight.values.clone(), weight.scales.clone()))


def quantized_before(x: torch.Tensor) -> torch.Tensor:
    """`x`, its rows quantized as if the kernel that wrote it had done so."""
    from allotrope.ops.matmul.triton_quantize import quantize_rows

    values, scales = quantize_rows(x.clone(), whole=True)
    kept = keep_quantized(x, 1)
    assert kept is not None
    kept.values.copy_(values)
    kept.scales.copy_(scales.t())
    return x


def finds_quantized(shape: Shape, unquantized: str) -> bool:
    """Whether rows come quantized: to FP8 products that are neither an expert's second nor one of these words."""
    others = any(word in shape.key + ";" for word in unquantized.split(",") if word)
    return shape.kind == "fp8" and not others and (shape.gated or not shape.experts)


def rows_of(shape: Shape, rows: int, topk: int, device: torch.device, before: bool) -> dict[str, Any]:
    """Activations and, for experts, whose rows they are. `before`: they come quantized."""
    torch.manual_seed(0)
    if not shape.experts:
        x = torch.randn(rows, shape.inputs, device=device).bfloat16()
        return {"x": quantized_before(x) if before else x}
    tokens = max(1, rows // topk)
    experts = torch.rand(tokens, shape.experts, device=device).topk(topk).indices.flatten().sort().values
    expert_offsets = torch.searchsorted(experts, torch.arange(shape.experts, device=device), right=True).int()
    # The second product has its rows in order.
    x = torch.randn(tokens if shape.gated else len(experts), shape.inputs, device=device).bfloat16()
    sorted_token_ids = torch.randint(tokens, (len(experts),), device=device).int() if shape.gated else None
    x = quantized_before(x) if before else x
    return {"x": x, "expert_offsets": expert_offsets, "sorted_token_ids": sorted_token_ids}


def reference(shape: Shape, weight: Any, given: dict[str, Any]) -> torch.Tensor:
    x = given["x"] if given.get("sorted_token_ids") is None else given["x"][given["sorted_token_ids"]]
    seen = (BLOCK if shape.kind == "fp8" else MXFP4).activations(x)
    if not shape.experts:
        return seen @ (weight[0].float() if shape.kind == "plain" else weight.dequantize()).T
    parts, start = [], 0
    for expert, end in enumerate(given["expert_offsets"].tolist()):
        if end > start:
            plain = weight[expert].float() if shape.kind == "plain" else None
            if plain is None:
                plain = QuantizedWeight(weight.format, weight.values[expert], weight.scales[expert]).dequantize()
            parts.append(seen[start:end] @ plain.T)
            start = end
    y = torch.cat(parts)
    if not shape.gated:
        return y
    gate, up = y.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def compile_all(job: tuple[Shape, int, int, list[Launch]]) -> list[str]:
    """Run candidates once on small memory, for the compiler's cache. Returns what failed."""
    from allotrope.ops.matmul.providers import multiply

    shape, rows, topk, launches = job
    device, failed = torch.device("cuda"), []
    # Constants of the kernel are what counts, not sizes.
    shape = dataclasses.replace(shape, outputs=256, inputs=512)
    given = rows_of(shape, rows, topk, device, before=False)
    _, prepared = weight_of(shape, device)
    for launch in launches:
        try:
            multiply(**given, weight=prepared, gating=GATING if shape.gated else None, launch=launch)
        except Exception as error:  # a launch that the chip has no room for is no candidate
            failed.append(f"{launch}: {type(error).__name__}")
    torch.cuda.synchronize()
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", type=Path, help="folders with a config.json; default: all of bench/configs"
    )
    parser.add_argument("--tensor-parallel-size", nargs="+", type=int, default=[1, 2], help="of the models")
    parser.add_argument("--missing", action="store_true", help="only what has not been measured on this chip")
    parser.add_argument("--only", default="", help="shapes whose name, with a ; behind it, has one of these, by commas")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="tokens; experts get topk times as many rows")
    parser.add_argument("--unquantized", default="", help="shapes, as of --only, whose FP8 rows come as they are")
    parser.add_argument("--out", type=Path, help="also write what is found to this JSON file")
    parser.add_argument("--chosen", action="store_true", help="time what is chosen already, and choose nothing")
    parser.add_argument(
        "--provider", help="try launches of this one alone, beside what is chosen already; write those that win"
    )
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further shape is begun")
    options = parser.parse_args(arguments)
    from allotrope.ops.matmul.providers import multiply

    device, begun = torch.device("cuda"), time.monotonic()
    chip = tuned_name(chip_of(device))
    listed = shapes(options.models, options.tensor_parallel_size, chip)
    wanted = [(shape, topk) for shape, topk in listed if any(w in shape.key + ";" for w in options.only.split(","))]

    def tried(shape: Shape, rows: int) -> list[Launch]:
        chosen = [launch_for(shape, rows, chip, in_library(shape))]
        if options.chosen:
            return chosen
        found = list(candidates(shape, rows, finds_quantized(shape, options.unquantized)))
        if options.provider is None:
            return found
        others = [one for one in found if one.provider == options.provider and one not in chosen]
        return chosen + others if others else []

    def tokens_of(shape: Shape, topk: int) -> list[int]:
        """Numbers of tokens to measure."""
        numbers = [int(word) for word in options.rows.split(",")]
        if shape.kind == "plain" and not shape.experts:
            # More rows are PyTorch's.
            numbers = [count for count in numbers if count <= FEW_PLAIN_ROWS]
        known = tuned(chip).get(shape.key, {}) if options.missing else {}
        return [count for count in numbers if str(bucket(count * topk)) not in known and tried(shape, count * topk)]

    wanted = [(shape, topk) for shape, topk in wanted if tokens_of(shape, topk)]
    jobs = [
        (shape, rows * topk, topk, tried(shape, rows * topk))
        for shape, topk in wanted
        for rows in tokens_of(shape, topk)
    ]
    # Kernels differ by what is constant in them, not by shape: compile for one shape of each kind.
    first: dict[Any, tuple[Shape, int, int, list[Launch]]] = {}
    for shape, rows, topk, launches in jobs:
        for launch in launches:
            first.setdefault((shape.kind, shape.experts, shape.gated, launch), (shape, min(rows, 64), topk, [launch]))
    groups: dict[Any, list[Launch]] = {}
    for shape, rows, topk, launches in first.values():
        groups.setdefault((shape, rows, topk), []).extend(launches)
    split = [
        (shape, rows, topk, launches[i :: options.processes])
        for (shape, rows, topk), launches in groups.items()
        for i in range(options.processes)
        if launches[i :: options.processes]
    ]
    with concurrent.futures.ProcessPoolExecutor(
        options.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        failed = [text for texts in pool.map(compile_all, split) for text in texts]
    print(f"compiled {len(first)} launches in {time.monotonic() - begun:.0f} s, {len(failed)} failed", flush=True)
    for text in failed[:5]:
        print("  ", text)
    recorder = Stopwatch(device)
    # A graph that is captured collects garbage first.
    gc.freeze()
    lines: list[Line] = []
    for shape, topk in wanted:
        if time.monotonic() - begun > options.limit:
            print("out of time before", shape.key, flush=True)
            break
        weight, prepared = weight_of(shape, device)
        best: dict[str, Launch] = {}
        for rows in tokens_of(shape, topk):
            given = rows_of(shape, rows * topk, topk, device, finds_quantized(shape, options.unquantized))
            want = reference(shape, weight, given)
            gating = GATING if shape.gated else None
            runs = []
            for launch in tried(shape, rows * topk):
                try:
                    got = multiply(**given, weight=prepared, gating=gating, launch=launch)
                    # Gates have long tails: of so many numbers, the largest are far above their row's RMS.
                    found = compare(got, want, "bf16")
                    if not found.rms <= TOLERANCES["bf16"].rms:
                        print("WRONG", shape.key, rows, launch, found, flush=True)
                        continue
                    run = functools.partial(multiply, **given, weight=prepared, gating=gating, launch=launch)
                    runs.append((recorder.rough(run), launch, run))
                except Exception as error:  # no room on the chip
                    failed.append(f"{launch}: {error}")
            if not runs:
                continue
            runs.sort(key=lambda one: one[0])
            close = [one for one in runs if one[0] < CLOSE * runs[0][0]][:FINALISTS]
            times = [(recorder.time(run, 10).median, launch) for _, launch, run in close]
            extra = NO_PDL_US if rows * topk <= FEW_PLAIN_ROWS else 0.0
            times.sort(key=lambda pair: pair[0] + extra * (pair[1].provider == "pytorch"))
            if options.provider in (None, times[0][1].provider):
                best[str(bucket(rows * topk))] = times[0][1]
            moved = (
                prepared.nbytes
                if not shape.experts
                else prepared.nbytes * len(given["expert_offsets"].unique()) / shape.experts
            )
            flops = 2 * rows * topk * prepared.outputs * shape.inputs
            found_line = Line(shape.key, rows * topk, times[0][0], moved, flops, times[0][1])
            lines.append(found_line)
            print(found_line, flush=True)
        torch.cuda.empty_cache()
        # Shape by shape: whoever ends this early keeps what was found.
        if best and not options.chosen:
            print("wrote", write_tuned(chip, {shape.key: best}), flush=True)
    if options.out is not None:
        command = shlex.join(["python", "bench/kernels/tune_products.py", *(arguments or sys.argv[1:])])
        write_report(options.out, lines, command, torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
