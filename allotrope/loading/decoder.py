"""How every host loads a decoder: one rank, one of several ranks, and the plugins all call `load_decoder`. What drafts
for it is filled the same way.

Owns the order of loading: fill every parameter, pack the weights, read the scales of cached rows, report the choices.
Must not know where weights come from, who asked for which format, or how much memory there is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from allotrope.architectures.registry import Architecture
from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.checkpoint.dequantize import dequantized
from allotrope.checkpoint.weights import Loader, LoadReport, Rule, fill_random, finish
from allotrope.layers.backend_report import backend_choices, warn_without_kernels
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.model_spec import ModelSpec
from allotrope.loading.kv_scales import WithoutKvScales, set_kv_scales
from allotrope.loading.quantized_formats import formats_kept_quantized
from allotrope.ops.matmul import multiplied_as_stored, unstored_reasons
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import GgufBlocks
from allotrope.ops.matmul.weight import Format


def only_kept(build: Build, option: str, activations: str = "auto") -> Build:
    """`build` with those of its formats that stay quantized. `option`: "auto", "keep" or "dequantize". `activations`:
    "auto", "int8" or "keep".

    "auto" leaves to a CPU what its products read, such as blocks of GGUF, and everything but these to a GPU; it rounds
    activations to int8 where they are not in float32. Activations that meet FP8 are rounded to it where a CPU's
    products do not read it, as a GPU's round them.
    """
    rounds = activations == "int8" or (activations == "auto" and build.dtype != torch.float32)

    def as_multiplied(format: Format) -> Format:
        if isinstance(format, GgufBlocks):
            return dataclasses.replace(format, int8_activations=rounds)
        if isinstance(format, Fp8):
            exact = dataclasses.replace(format, fp8_activations=False)
            return exact if multiplied_as_stored(exact, build.dtype, build.chooser.chip) else format
        return format

    formats = {place: as_multiplied(format) for place, format in build.formats.items()}
    if option != "auto":
        return dataclasses.replace(build, formats=formats if option == "keep" else {})
    each = list(dict.fromkeys(formats.values()))
    # The first time on a machine, products of each are compiled for it.
    with ThreadPoolExecutor() as pool:
        fits = dict(zip(each, pool.map(lambda format: _fits(format, build), each), strict=True))
    return dataclasses.replace(build, formats={place: format for place, format in formats.items() if fits[format]})


def _fits(format: Format, build: Build) -> bool:
    """Whether a format stays quantized where nobody says so."""
    chip = build.chooser.chip
    if chip.is_gpu:
        return not isinstance(format, GgufBlocks)
    return multiplied_as_stored(format, build.dtype, chip)


def quantized_build(checkpoint: Checkpoint, architecture: Architecture, spec: ModelSpec, build: Build) -> Build:
    """`build` with the formats of the weights that stay quantized, as the checkpoint's headers or its config say."""

    def make(build: Build) -> Decoder:
        return make_decoder(architecture, spec, build)

    formats = formats_kept_quantized(WithoutKvScales(checkpoint), architecture.rules(spec), build, make)
    return dataclasses.replace(build, formats=formats)


def quantized_draft_build(
    tensors: Checkpoint, rules: Sequence[Rule], build: Build, make: Callable[[Build], nn.Module]
) -> Build:
    """As `quantized_build`, of a draft model. `tensors`: those of the draft model. `make`: makes the module."""
    formats = formats_kept_quantized(WithoutKvScales(tensors, of_draft=True), rules, build, make)
    return dataclasses.replace(build, formats=formats)


def make_decoder(architecture: Architecture, spec: ModelSpec, build: Build) -> Decoder:
    """The decoder with parameters on the build's device and no values in them."""
    return architecture.decoder(spec, build)


def make_meta_decoder(architecture: Architecture, spec: ModelSpec, build: Build) -> Decoder:
    """The decoder with parameters that take no memory."""
    return make_decoder(architecture, spec, dataclasses.replace(build, device=torch.device("meta")))


def load_decoder(
    decoder: Decoder,
    architecture: Architecture,
    build: Build,
    weights: Checkpoint | None,
    *,
    seed: int,
    quantized_weights: str,
    log: Callable[[str], None],
) -> Decoder:
    """Fill `decoder` and make it ready to run.

    `weights`: the checkpoint to read; None draws reproducible random weights from `seed`. `quantized_weights`: the
    option, which the log names where weights are dequantized. `log`: takes each line about the loading. Returns
    `decoder`. Raises ModelError for weights that do not fit the architecture, with every key on either side.
    """
    source = None if weights is None else WithoutKvScales(weights)
    for line in _fill(decoder, architecture.rules(decoder.spec), build, source, seed, quantized_weights):
        log(line)
    warn_without_kernels(build)
    for line in backend_choices(decoder, build):
        log(line)
    stage = decoder.stage
    owners = [layer.mixer.shares_cache_of for layer in decoder.spec.layers[stage.first : stage.last]]
    shares = [None if owner is None else owner - stage.first for owner in owners]
    if line := set_kv_scales(decoder.layers, shares, source, stage.first):
        log(line)
    decoder.eval()
    return decoder


def fill_draft(
    draft: DraftModel,
    rules: Sequence[Rule],
    build: Build,
    weights: Checkpoint | None,
    *,
    seed: int,
    quantized_weights: str,
    log: Callable[[str], None],
) -> DraftModel:
    """Fill a draft model and make it ready to run. The model that it drafts for is loaded before it.

    `rules`: of its tensors. `weights`: a checkpoint of its tensors alone, see `loading.draft.draft_tensors`; None draws
    random ones. The rest as in `load_decoder`. Returns `draft`. Raises ModelError for weights that do not fit.
    """
    source = None if weights is None else WithoutKvScales(weights, of_draft=True)
    for line in _fill(draft, rules, build, source, seed, quantized_weights):
        log(f"draft model: {line}")
    # The checkpoint counts its layer behind those of the model, or from 0.
    first = min(source.scales, default=0) if source is not None else 0
    if line := set_kv_scales(draft.layers, [None] * len(draft.layers), source, first):
        log(f"draft model: {line}")
    draft.eval()
    return draft


def _fill(
    model: nn.Module,
    rules: Sequence[Rule],
    build: Build,
    source: WithoutKvScales | None,
    seed: int,
    quantized_weights: str,
) -> list[str]:
    """Fill every parameter and pack the weights. Returns lines for the log."""
    lines = []
    if source is None:
        fill_random(model, seed)
    else:
        started = time.monotonic()
        is_elsewhere = model.is_elsewhere if isinstance(model, Decoder) else lambda name: False
        report = Loader(model, rules, is_elsewhere).load(dequantized(source))
        lines = _read_lines(report, build, time.monotonic() - started, quantized_weights)
    finish(model)
    return lines


def _read_lines(report: LoadReport, build: Build, seconds: float, quantized_weights: str) -> list[str]:
    lines = [
        f"read {report.tensors} tensors, {report.bytes / 1e6:.1f} MB in {seconds:.1f} s; dropped {len(report.dropped)}"
    ]
    of_kind: dict[tuple[str, str], set[str]] = {}
    for format, names in report.dequantized.items():
        kind = "another type" if format is None else format.name
        of_kind.setdefault((kind, _why(format, build, quantized_weights)), set()).update(names)
    lines += [
        f"dequantized on load, kept as {build.dtype}: {kind}: {', '.join(sorted(names))}: {why}"
        for (kind, why), names in sorted(of_kind.items())
    ]
    return lines


def _why(format: Format | None, build: Build, quantized_weights: str) -> str:
    """The reason that weights which are stored in a format do not stay so."""
    if quantized_weights == "dequantize":
        return "quantized_weights=dequantize"
    if quantized_weights == "auto" and format is not None:
        if isinstance(format, Fp8) and not build.chooser.chip.is_gpu:
            format = dataclasses.replace(format, fp8_activations=False)
        reasons = unstored_reasons(format, build.dtype, build.chooser.chip)
        if reasons:
            return "; ".join(reasons)
    return "their layers or their formats cannot be kept quantized"
