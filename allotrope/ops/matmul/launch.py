"""How a quantized product is launched: what was measured to be fastest, by chip and shape, else a rule of thumb.

Measured launches lie in `tuned/<chip>.json`; `bench/kernels/tune_products.py` writes them. Must not know Triton.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from allotrope.kernels.chip import Chip
from allotrope.ops.matmul.weight import KERNEL_STEP

FOLDER = Path(__file__).parent / "tuned"
# Rows of FP8 weights in blocks from which PyTorch's product was the fastest of every shape tried; numbers of a weight
# from which it was for all those above 64.
_LIBRARY_ROWS, _LIBRARY_SIZE = 1024, 12_000_000
# Rows of which more would be launched alike.
_MANY = 8192
# Rows up to which one plain weight may not be left to PyTorch; numbers from which an unmeasured one is not, and outputs
# from which that holds for all those rows.
FEW_PLAIN_ROWS, _LARGE_PLAIN, _VOCABULARY = 64, 1 << 24, 1 << 16
# Outputs up to which tiles are few, and inputs from which they are worth sharing out.
FEW_OUTPUTS = 1024
# Programs that keep a chip of today busy.
_PROGRAMS = 264
# Inputs of a program that shares those of more than 64 rows with others, at least: their parts are read again.
_INPUTS_OF_PART = 1536
INTERPRETER = "interpreter"
# Chips of one architecture: where one has not been measured, what the H200 does is far better than a rule of thumb.
_HOPPER = ("h100", "h200", "h800", "h20", "gh200")


@dataclass(frozen=True)
class Shape:
    """A product but for its rows. `kind`: the name of the weight's format; "fp32" where any but FP8 ones meet fp32
    rows. `experts`: 0 for one weight. `outputs`: of the result; `gated`: of two weights.
    """

    kind: str
    experts: int
    outputs: int
    inputs: int
    gated: bool

    @property
    def key(self) -> str:
        experts = f"{self.experts}x" if self.experts else ""
        return f"{self.kind} {experts}{self.outputs}x{self.inputs}{' gated' if self.gated else ''}"

    @classmethod
    def of(cls, key: str) -> Shape:
        """The shape with this key."""
        kind, sizes, *gated = key.split()
        *experts, outputs, inputs = map(int, sizes.split("x"))
        return cls(kind, experts[0] if experts else 0, outputs, inputs, bool(gated))


Provider = Literal["triton", "sliced_k", "pytorch", "gluon"]


@dataclass(frozen=True)
class Launch:
    """`block_m`, `block_n`: rows and outputs of a program's tile. `split_k`: programs that share the inputs. `swap_ab`:
    the weights are the left operand. `quantize`: FP8 activations are rounded in the product, not before it. `block_k`:
    inputs of a step, but for FP8 weights. `provider`: "triton"; "sliced_k", in which `split_k` groups of a program's
    warps share the inputs; "pytorch", whose product does it all; "gluon", whose groups of warps have tasks of their
    own: of one FP8 weight and at most `block_m` rows (64 or 128) Stream-K, and of experts, whose tiles have sizes of
    their own. Where PyTorch or Gluon does not know how, Triton takes the same tiles.
    """

    block_m: int
    block_n: int
    split_k: int = 1
    swap_ab: bool = True
    quantize: bool = True
    num_warps: int = 4
    num_stages: int = 4
    block_k: int = 128
    provider: Provider = "triton"


PYTORCH = Launch(128, 128, swap_ab=False, quantize=False, num_warps=8, num_stages=3, provider="pytorch")
GLUON = Launch(128, 128, swap_ab=False, quantize=False, num_warps=8, num_stages=3, provider="gluon")


def bucket(rows: int) -> int:
    """The power of two that is measured in place of `rows`."""
    return 1 << max(rows - 1, 0).bit_length()


@functools.lru_cache(maxsize=1 << 14)
def launch_for(shape: Shape, rows: int, chip: str, library: bool = True) -> Launch:
    """`rows`: of the product, the pairs of token and expert where there are experts. `library`: whether PyTorch's
    product takes the weight. More rows than were measured go as the most that were, where that were many: their tiles
    are full. Fewer go as the next larger number that was; rows of experts as the nearest one, as each expert has its
    share of them, and tiles above it read weights at a lower rate. Experts of which another number was measured go by
    the rows of each.
    """
    found, measured_rows = tuned(chip).get(shape.key, {}), rows
    if not found and (other := _nearest(shape, chip)) is not None:
        found = tuned(chip)[other.key]
        measured_rows = -(-rows * other.experts // shape.experts) if shape.experts else rows
    wanted = bucket(measured_rows)
    below = [measured for measured in map(int, found) if measured < wanted]
    above = [measured for measured in map(int, found) if measured >= wanted]
    if above:
        nearest = min(above)
        if shape.experts and below and wanted * wanted < nearest * max(below):
            nearest = max(below)
    elif below and max(below) >= _MANY:
        nearest = max(below)
    else:
        return rule_of_thumb(shape, rows, chip, library)
    launch = found[str(nearest)]
    return launch if library or launch.provider != "pytorch" else rule_of_thumb(shape, rows, chip, library)


def _nearest(shape: Shape, chip: str) -> Shape | None:
    """The measured shape whose launches an unmeasured one takes: of one FP8 weight the nearest within a factor of two;
    of experts those of the same size.

    Where each FP8 weight measured on H200 is launched as its nearest, 87 % round activations as their own launch does
    and 83 % share inputs so; by the rule of thumb 62 and 58 %.
    """
    measured = [
        other
        for other in map(Shape.of, tuned(chip))
        if (other.kind, other.gated, bool(other.experts)) == (shape.kind, shape.gated, bool(shape.experts))
    ]
    if shape.experts:
        same = [other for other in measured if (other.outputs, other.inputs) == (shape.outputs, shape.inputs)]
        return min(same, key=lambda other: abs(math.log(other.experts / shape.experts)), default=None)
    if shape.kind != "fp8" or shape.gated:
        return None

    def distance(other: Shape) -> float:
        return math.hypot(math.log2(other.outputs / shape.outputs), math.log2(other.inputs / shape.inputs))

    return min((other for other in measured if distance(other) < 1), key=distance, default=None)


@functools.cache
def tuned(chip: str) -> dict[str, dict[str, Launch]]:
    """Shape -> bucket of rows -> launch, as measured on a chip or one like it; empty where nothing was."""
    return {
        key: {rows: Launch(**launch) for rows, launch in buckets.items()} for key, buckets in _measured(chip).items()
    }


def _measured(chip: str) -> dict[str, dict[str, dict[str, Any]]]:
    paths = [FOLDER / f"{chip}.json", *([FOLDER / "h200.json"] if chip.startswith(_HOPPER) else [])]
    found = next((path for path in paths if path.is_file()), None)
    return {} if found is None else json.loads(found.read_text())


def write_tuned(chip: str, found: dict[str, dict[str, Launch]]) -> Path:
    """Put measured launches beside those that the chip has used so far."""
    path, whole = FOLDER / f"{chip}.json", _measured(chip)
    for key, buckets in found.items():
        whole.setdefault(key, {}).update({rows: asdict(launch) for rows, launch in buckets.items()})
    lines = [f"  {json.dumps(key)}: {json.dumps(whole[key])}" for key in sorted(whole)]
    FOLDER.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    forget()
    return path


def forget() -> None:
    """What is measured is read again."""
    tuned.cache_clear()
    launch_for.cache_clear()


def rule_of_thumb(shape: Shape, rows: int, chip: str, library: bool = True) -> Launch:
    """Tiles as high as the rows of an expert; wide ones of many rows; inputs shared where tiles are few. `library`: as
    of `launch_for`."""
    if chip == INTERPRETER:
        return Launch(16, 32, 1 if shape.gated else 2, swap_ab=rows % 2 == 0, quantize=rows < 8, num_stages=1)
    amd = chip.startswith("gfx")
    stages = 2 if amd else 4
    expert_rows = max(1, -(-rows // shape.experts)) if shape.experts else rows
    if shape.kind == "fp32":
        # For checking, not for speed: what fits into the memory of a program.
        few = expert_rows <= 16
        return Launch(
            16 if few else 32, 64, swap_ab=False, num_warps=4 if few or amd else 8, num_stages=1 if amd else 2
        )
    if shape.kind == "plain" and not shape.experts:
        return PYTORCH if amd else _of_plain(shape, rows)
    four_bits = shape.kind == "mxfp4" and not amd
    if four_bits and shape.experts and expert_rows > 32 and chip.startswith(_HOPPER):
        return GLUON
    if expert_rows > 64 and four_bits:
        return (
            Launch(128, 64, num_warps=4, num_stages=2) if shape.gated else Launch(128, 256, num_warps=8, num_stages=3)
        )
    if expert_rows > 64:
        in_library = library and (rows >= _LIBRARY_ROWS or shape.outputs * shape.inputs >= _LIBRARY_SIZE)
        if shape.kind == "fp8" and not shape.experts and not amd:
            if in_library:
                return PYTORCH
            if not shape.gated and -(-rows // 128) * -(-shape.outputs // 128) < _PROGRAMS // 2:
                # Low tiles, for high ones would leave programs without work.
                tiles = -(-rows // 64) * -(-shape.outputs // 64)
                splits = max(1, min(_PROGRAMS // tiles, shape.inputs // _INPUTS_OF_PART))
                return Launch(64, 64, splits, swap_ab=splits > 1, quantize=False)
        narrow = shape.gated or (amd and shape.kind in ("plain", "int4"))
        return Launch(
            128, 64 if narrow else 128, swap_ab=False, quantize=False, num_warps=8, num_stages=2 if amd else 3
        )
    block_m = 16 if expert_rows <= 16 else 32 if expert_rows <= 32 else 64
    if shape.experts or shape.gated:
        if four_bits and expert_rows <= 4:
            return Launch(8, 64, num_stages=3, block_k=256) if shape.gated else Launch(8, 128)
        if four_bits:
            # Steps of 256 inputs for few rows, for more of them there are not enough registers.
            return Launch(
                block_m, 32 if shape.gated and block_m == 16 else 64, num_stages=3, block_k=256 if block_m < 64 else 128
            )
        if shape.kind == "fp8" and not amd and shape.inputs >= 2048:
            # Rounding in the product costs every step a barrier.
            return Launch(block_m, 64, quantize=False, num_stages=5)
        return Launch(block_m, 64, swap_ab=not amd, num_stages=stages)
    block_n = 128 if shape.outputs >= 128 * _PROGRAMS else 64
    tiles = -(-shape.outputs // block_n)
    splits = max(1, min(_PROGRAMS // tiles, -(-shape.inputs // KERNEL_STEP) // 4, 8))
    # A barrier there does not wait until the parts that its waves have stored can be seen by other programs.
    return Launch(block_m, block_n, 1 if amd else splits, swap_ab=not amd, num_stages=stages)


def _of_plain(shape: Shape, rows: int) -> Launch:
    """How PyTorch multiplies small weights is hard to beat, and medium ones by more than 16 rows; the rest is a
    matter of reading. So few outputs as of a router are little to multiply: its inputs are shared out.
    """
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if shape.outputs <= FEW_OUTPUTS and shape.inputs >= FEW_OUTPUTS and rows <= FEW_PLAIN_ROWS:
        return Launch(block_m, 16, 8 if shape.inputs >= 2048 else 4, swap_ab=False)
    most = FEW_PLAIN_ROWS if shape.outputs >= _VOCABULARY else 16
    if shape.outputs * shape.inputs < _LARGE_PLAIN or rows > most:
        return PYTORCH
    if rows > 16:
        return Launch(block_m, 128, num_warps=8, num_stages=3, block_k=64)
    tiles = -(-shape.outputs // 64)
    return Launch(16, 64, max(1, min(4, 336 // tiles)), num_stages=3)


def within(launch: Launch, shape: Shape, chip: Chip) -> Launch:
    """`launch` with as many stages as the shared memory of a chip holds, where launches were made for a larger one."""
    if chip.vendor != "nvidia" or chip.has_wgmma:
        return launch
    size = {"fp8": 1.0, "mxfp4": 0.5, "fp32": 4.0}.get(shape.kind, 2.0)
    x_bytes = launch.block_m * (4 if shape.kind == "fp32" else 2)
    stage = launch.block_k * (x_bytes + launch.block_n * (2 if shape.gated else 1) * size)
    # The tiles of the current step are not held twice.
    return replace(launch, num_stages=min(launch.num_stages, max(2, 1 + int(chip.shared_memory // stage))))


def tuned_name(chip: Chip) -> str:
    """The name under which launches measured on a chip are kept."""
    if not chip.is_gpu:
        return INTERPRETER
    return chip.arch if chip.vendor == "amd" else chip.product.removeprefix("nvidia_")
