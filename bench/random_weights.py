"""Random weights for a real config.json, quantized as the released checkpoint is, so that engines read the same files.

    python bench/random_weights.py bench/configs/qwen3_next_80b_fp8 /tmp/model --layers 12 --device cuda
    python bench/random_weights.py bench/configs/qwen3_next_80b_fp8 /tmp/model --layers 12 --mtp

Names and shapes are those of the released checkpoint. Sizes are such that logits are sane and tokens spread over the
experts: matrices N(0, 1 / inputs), routers three times that, embeddings N(0, 1), tied ones a tenth of a matrix,
norms around neutral. The same seed gives the same weights on the same kind of device.

--mtp adds the multi-token-prediction layer that the release has and most engines leave out unless they draft with it.
Its embedding and head are the model's own once more, where the release has them twice.

FP8 weights are rounded by blocks, with a scale for each; 4-bit weights are uniform codes under a power of two.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from allotrope.architectures.registry import Architecture, read_draft, read_spec  # noqa: E402
from allotrope.checkpoint.checkpoint import TensorHeader  # noqa: E402
from allotrope.checkpoint.mtp_rules import SHARED  # noqa: E402
from allotrope.errors import AllotropeError, ConfigError, ModelError  # noqa: E402
from allotrope.layers.model_spec import ModelSpec  # noqa: E402
from allotrope.ops.matmul.mxfp4 import FP4_GROUP, FP4_VALUES, SCALE_BIAS  # noqa: E402
from allotrope.verify.random_checkpoint import _known_name, _released, first_layers  # noqa: E402
from allotrope.verify.random_draft import draft_head  # noqa: E402
from allotrope.verify.transformers_model import class_and_config, quiet  # noqa: E402

SHARD_BYTES = 4 << 30
# Files that are written at once.
WRITERS = 4
# What no release of these models has in FP8, named in its config or not.
NEVER_FP8 = re.compile(
    r"(^|\.)(embed|embed_tokens|lm_head|head|gate|router|shared_expert_gate|weights_proj|fc|eh_proj)$|compressor|norm|hc_"
)
GATES = re.compile(r"\.(gate|router|router\.proj)\.weight$")
# Small: scores of the best experts are close together, and a correction shall not choose the same ones for all tokens.
CORRECTIONS = ("gate.e_score_correction_bias", "gate.bias")
FULL_PRECISION = re.compile(r"(A_log|e_score_correction_bias|gate\.bias|attn_sink|\.ape|hc_\w+)$")
NEUTRAL_ONE = re.compile(r"norm\.weight$|(layer_scalar|router\.scale|per_expert_scale)$")
# A norm behind a gate has no offset, even where all others do.
GATED_NORM = "linear_attn.norm.weight"
# A recurrent state shall remember tens of tokens.
DECAYS = ("A_log", "dt_bias")


def write_checkpoint(
    config: Mapping[str, Any],
    into: Path,
    *,
    layers: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    mtp: bool = False,
) -> tuple[int, int]:
    """Write config.json, shards and their index into `into`. Returns how many tensors and bytes.

    `layers`: keep so many of the first ones; None, all. `mtp`: with the multi-token-prediction layer. Raises
    ConfigError or ModelError if that is not possible.
    """
    if any(into.glob("*.safetensors")):
        raise ConfigError(f"{into} has weights already; give an empty directory.")
    shrunk = dict(config) if layers is None else with_layers(config, layers)
    plain = {key: value for key, value in shrunk.items() if key != "quantization_config"}
    names, spec = released_tensors(plain)
    head, copies = mtp_tensors(plain, names) if mtp else ({}, {})
    maker = Maker(shrunk, spec, seed, torch.device(device))
    into.mkdir(parents=True, exist_ok=True)
    shards = Shards(into)
    for name, like in (names | head).items():
        for stored, tensor in maker.make(name, like):
            shards.add(stored, tensor)
    for copy, name in copies.items():
        for _, tensor in maker.make(name, names[name]):
            shards.add(copy, tensor)
    of_head = [name for name, like in head.items() if like.dim() == 2 and not maker.quantization.covers(name, like)]
    named = _layers_named(shrunk, len(spec.layers), [name.removesuffix(".weight") for name in of_head])
    (into / "config.json").write_text(json.dumps(named, indent=1) + "\n")
    return shards.finish()


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """`config` with its first layers: a whole number of times the pattern in which kinds of layers alternate.

    Leading layers of a kind of their own (dense ones, looked-up experts) shrink to one. Raises ConfigError otherwise.
    """
    _, spec = read_spec(dict(config), "config")
    kinds = [layer.mixer for layer in spec.layers]
    total = len(kinds)
    half = total // 2
    # The first layers may be of other kinds than the pattern has.
    repeats = (n for n in range(1, half + 1) if all(kinds[i] == kinds[i + n] for i in range(half, total - n)))
    period = next(repeats, 1)
    if layers != total and layers % period:
        raise ConfigError(f"layers={layers} cuts a pattern; give a multiple of {period}, or all {total}.")
    cut = first_layers(config, layers)
    text = cut.get("text_config", cut)
    for key in ("first_k_dense_replace", "num_hash_layers"):
        if layers < total and isinstance(text.get(key), int):
            text[key] = min(text[key], 1, layers - 1)
    return cut


def released_tensors(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], ModelSpec]:
    """Released names of a model in full precision to tensors without memory, from Transformers, or from our rules."""
    architecture, spec = read_spec(config, "config")
    rules = [(rule.pattern(), rule.source) for rule in architecture.rules(spec)]
    found = _transformers_tensors(config)
    known = {name: _known_name(name, rules) for name in found}
    strange = next((name for name, released in known.items() if released is None), None)
    if strange is None:
        tensors = {str(known[name]): like for name, like in found.items()}
    else:
        tensors = _tensors_of_rules(architecture, spec, strange)
    heads = ("lm_head.weight", "head.weight") if spec.tied else ()
    return {name: like for name, like in tensors.items() if name not in heads}, spec


def mtp_tensors(
    config: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Released names of the multi-token-prediction layer to tensors without memory, and the names of its embedding and
    head to those of the model's own. `tensors`: of the model. Raises ConfigError where the config has no such layer.
    """
    architecture, spec = read_spec(config, "config")
    draft = read_draft(config, "config")
    if draft is None:
        raise ConfigError("--mtp: the config names no multi-token-prediction layer.")
    headers = {name: TensorHeader(name, tuple(like.shape), like.dtype, like.nbytes) for name, like in tensors.items()}
    head = draft_head(architecture, spec, draft, headers)
    if not head:
        raise ConfigError("--mtp: no layer is like the multi-token-prediction layer; keep more with --layers.")
    own = {rule.target: rule.source for rule in architecture.rules(spec) if rule.source in tensors}
    copies = {
        rule.source: own["embedding.weight" if "emb" in rule.source else "head.weight"]
        for rule in architecture.draft_rules(spec, draft)
        if rule.reason == SHARED
    }
    return head, copies


def _transformers_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    with quiet(), tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        try:
            cls, described = class_and_config(config, Path(scratch))
            with torch.device("meta"):
                model = cls(described)
            found: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
        except ModelError:
            raise
        except Exception as error:
            # The border to another library.
            raise ModelError("Transformers cannot make the model", [f"{type(error).__name__}: {error}"]) from error
    return found


def _tensors_of_rules(architecture: Architecture, spec: ModelSpec, strange: str) -> dict[str, torch.Tensor]:
    tensors = _released(architecture, spec, strange)
    # The model itself is made with the first one, and computes tables.
    name, first = next(tensors)
    with torch.device("meta"):
        return {name: first.to("meta"), **dict(tensors)}


@dataclass(frozen=True)
class Quantization:
    """`method`: "", "fp8" or "mxfp4". `block`: of FP8 scales. `skipped`: patterns of modules that stay as they are.

    `packed_experts`: experts are 4-bit, two to a byte. `scale`: what is put for `.weight` in a scale's name.
    `scale_type`: how scales are stored. `power_of_two`: what scales are.
    """

    method: str = ""
    block: tuple[int, int] = (128, 128)
    skipped: tuple[str, ...] = ()
    packed_experts: bool = False
    scale: str = ".weight_scale_inv"
    scale_type: torch.dtype = torch.float32
    power_of_two: bool = False

    def covers(self, name: str, like: torch.Tensor) -> bool:
        """Whether the tensor is quantized."""
        if self.method == "mxfp4":
            return like.dim() == 3 and not name.endswith("bias") and "experts" in name
        module = name.removesuffix(".weight")
        if self.method != "fp8" or like.dim() != 2 or module == name or NEVER_FP8.search(module):
            return False
        return not any(fnmatch.fnmatch(module, p) or fnmatch.fnmatch(module, p + ".*") for p in self.skipped)


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """From `quantization_config`. Raises ConfigError for what is not known."""
    stated = config.get("quantization_config")
    if not stated:
        return Quantization()
    method, skipped = stated.get("quant_method"), tuple(stated.get("modules_to_not_convert") or ())
    if method == "mxfp4":
        return Quantization(method, skipped=skipped)
    block, experts = stated.get("weight_block_size"), config.get("expert_dtype")
    if method != "fp8" or not block or experts not in (None, "fp4", "fp8"):
        raise ConfigError(
            f"quant_method={method!r}, weight_block_size={block!r}, expert_dtype={experts!r} cannot be written "
            "(allowed: mxfp4; fp8 with a weight_block_size and expert_dtype absent, 'fp4' or 'fp8')."
        )
    packed = experts == "fp4"
    return Quantization(
        method,
        (block[0], block[1]),
        skipped,
        packed_experts=packed,
        scale=".weight_scale_inv" if experts is None else ".scale",
        scale_type=torch.float8_e8m0fnu if packed else torch.float32,
        power_of_two=stated.get("scale_fmt") == "ue8m0",
    )


class Maker:
    """Draws tensors on a device and hands them out as they are stored, on the CPU."""

    def __init__(self, config: Mapping[str, Any], spec: ModelSpec, seed: int, device: torch.device) -> None:
        self.spec, self.seed, self.device = spec, seed, device
        self.quantization = read_quantization(config)
        text = config.get("text_config") or config
        self.experts = text.get("n_routed_experts") or 0

    def make(self, name: str, like: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Stored names and tensors of the full-precision tensor `name`."""
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
        quantization = self.quantization
        if not quantization.covers(name, like):
            yield name, self._plain(name, like, generator).cpu()
        elif quantization.method == "mxfp4":
            experts, inputs, outputs = like.shape
            codes, exponents = self._four_bits((experts, outputs), inputs, generator)
            yield name + "_blocks", codes.unflatten(-1, (-1, FP4_GROUP // 2)).cpu()
            yield name + "_scales", exponents.cpu()
        elif quantization.packed_experts and ".experts." in name:
            codes, exponents = self._four_bits(tuple(like.shape[:-1]), like.shape[-1], generator)
            yield name, codes.view(torch.int8).cpu()
            yield name.removesuffix(".weight") + quantization.scale, exponents.view(quantization.scale_type).cpu()
        else:
            weight, scale = fp8_blocks(
                self._values(name, like, generator), quantization.block, power_of_two=quantization.power_of_two
            )
            yield name, weight.cpu()
            yield name.removesuffix(".weight") + quantization.scale, scale.to(quantization.scale_type).cpu()

    def _plain(self, name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if not like.is_floating_point():
            # A table of experts per token: different ones in each row.
            order = torch.rand((like.shape[0], self.experts), generator=generator, device=self.device).argsort(-1)
            return order[:, : like.shape[1]].contiguous()
        return self._values(name, like, generator).to(torch.float32 if FULL_PRECISION.search(name) else torch.bfloat16)

    def _values(self, name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """[like.shape] fp32."""
        values = torch.randn(tuple(like.shape), generator=generator, device=self.device)
        if name.endswith(DECAYS):
            return values.mul_(0.75).sub_(1.5)
        if NEUTRAL_ONE.search(name):
            offset = self.spec.norm_offset if "norm" in name and not name.endswith(GATED_NORM) else 0.0
            return values.mul_(0.1).add_(1.0 - offset)
        if name.endswith(CORRECTIONS):
            return values.mul_(0.001)
        if like.dim() < 2 or name.endswith("bias"):
            return values.mul_(0.1)
        if "embed" in name:
            # Tied and as large as the rest of a hidden state, it would make every token follow itself.
            return values.mul_(0.1 / math.sqrt(like.shape[-1])) if self.spec.tied else values
        # Experts of one tensor come as [experts, inputs, outputs]; a convolution is [channels, 1, taps].
        inputs = like.shape[1] if like.dim() == 3 and like.shape[1] > 1 else like.shape[-1]
        return values.mul_((3.0 if GATES.search(name) else 1.0) / math.sqrt(inputs))

    def _four_bits(
        self, rows: tuple[int, ...], inputs: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [*rows, inputs / 2] uint8 of two values each, exponents [*rows, inputs / 32] uint8.

        Of the two nearest powers of two, each as often as makes the mean square 1 / inputs.
        """
        if inputs % FP4_GROUP:
            raise ConfigError(f"{inputs} inputs do not come in blocks of {FP4_GROUP}, as 4-bit weights do.")
        square = sum(value * value for value in FP4_VALUES) / len(FP4_VALUES)
        exact = -0.5 * math.log2(square * inputs)
        above = (4.0 ** (exact - math.floor(exact)) - 1.0) / 3.0
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        codes = torch.randint(256, (*rows, inputs // 2), dtype=torch.uint8, **options)
        up = torch.rand((*rows, inputs // FP4_GROUP), **options) < above
        return codes, up.to(torch.uint8) + (SCALE_BIAS + math.floor(exact))


def fp8_blocks(
    weight: torch.Tensor, block: tuple[int, int], *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """w = q * s, the largest value of a block being the largest of FP8 (or up to a factor of two below it).

    `weight`: [out, in]. Returns q [out, in] float8_e4m3fn and s [ceil(out / block), ceil(in / block)] fp32.
    """
    (out, inputs), (rows, columns) = weight.shape, block
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -out % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)).clamp_min_(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    rounded = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
    return rounded[:out, :inputs].contiguous(), scale


class Shards:
    """Tensors into files of a few GB each, and the index of them. Files are written while the next is drawn."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.writers = ThreadPoolExecutor(WRITERS)
        self.writes: deque[Future[None]] = deque()
        self.held: dict[str, torch.Tensor] = {}
        self.held_bytes = self.bytes = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, and write what is held if it would become too much."""
        if self.held and self.held_bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self.held[name] = tensor
        self.held_bytes += tensor.nbytes

    def finish(self) -> tuple[int, int]:
        """Write the rest and the index. Returns how many tensors and bytes."""
        self._write()
        self._await_writes(0)
        self.writers.shutdown()
        count, where = len(self.files), {}
        for number, names in enumerate(self.files, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.into / file)
            where.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.bytes}, "weight_map": where}
        (self.into / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        return len(where), self.bytes

    def _part(self, number: int) -> Path:
        return self.into / f"part-{number:05d}.safetensors"

    def _write(self) -> None:
        self._await_writes(WRITERS - 1)
        part = self._part(len(self.files) + 1)
        self.writes.append(self.writers.submit(save_file, self.held, part, metadata={"format": "pt"}))
        self.files.append(list(self.held))
        self.bytes += self.held_bytes
        self.held, self.held_bytes = {}, 0

    def _await_writes(self, most: int) -> None:
        """Until at most so many files are being written, which bounds what memory holds of them."""
        while len(self.writes) > most:
            self.writes.popleft().result()


def _layers_named(config: dict[str, Any], layers: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """`config` with the modules that stay unquantized named one by one: not every engine reads a `*` in FP8's list.

    `more`: further ones.
    """
    stated = config.get("quantization_config")
    if not stated or stated.get("quant_method") != "fp8" or not stated.get("modules_to_not_convert"):
        return config
    named = []
    for pattern in stated["modules_to_not_convert"]:
        named += [pattern.replace("*", str(i)) for i in range(layers)] if "*" in pattern else [pattern]
    return config | {"quantization_config": {**stated, "modules_to_not_convert": [*named, *more]}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="directory with a config.json")
    parser.add_argument("out", type=Path, help="directory to write, without weights so far")
    parser.add_argument("--layers", type=int, help="first layers to keep; default: all")
    parser.add_argument("--quantization", choices=("as-stated", "none"), default="as-stated")
    parser.add_argument("--mtp", action="store_true", help="with the multi-token-prediction layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to draw")
    options = parser.parse_args(arguments)
    config = json.loads((options.config / "config.json").read_text())
    if options.quantization == "none":
        for key in ("quantization_config", "expert_dtype"):
            config.pop(key, None)
    begin = time.perf_counter()
    try:
        tensors, size = write_checkpoint(
            config, options.out, layers=options.layers, seed=options.seed, device=options.device, mtp=options.mtp
        )
    except AllotropeError as error:
        sys.exit(str(error))
    print(f"{options.out}: {tensors} tensors, {size / 1e9:.2f} GB, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
