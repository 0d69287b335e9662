"""What FP8 rows of the caches are divided by: the checkpoint's own scales where it brings some, else 1.

Released checkpoints hold one number per layer for keys and one for values (`k_scale`, `v_scale`), or one for both
(`kv_scale`), below the layer's attention. Where rows are not FP8 they are read by nobody, and said to be left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from allotrope.attention.cache_layout import CacheLayout, StateSlots
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.checkpoint.checkpoint import Checkpoint, CheckpointView, TensorHeader
from allotrope.errors import ConfigError, ModelError
from allotrope.layers.build import Build
from allotrope.layers.mixers.mixer import attention_of
from allotrope.layers.model_spec import ModelSpec

FP8 = torch.float8_e4m3fn
# Quark and early compressed-tensors have them as scales of the projections' outputs.
_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\.(q|k|v|kv)(?:_scale|_proj\.output_scale)")
# Layers of a draft model have numbers of their own, which are not those of the model's layers.
_DRAFT = re.compile(r"(?:.*\.)?mtp\..*")


class WithoutKvScales(CheckpointView):
    """A checkpoint whose scales of cached rows are taken out: its other tensors are those of any release.

    `scales`: layer -> "k", "v" or "kv" -> name of the tensor. `of_draft`: of the layers of a draft model.
    """

    def __init__(self, inner: Checkpoint, *, of_draft: bool = False) -> None:
        super().__init__(inner)
        self.scales: dict[int, dict[str, str]] = {}
        self._kept: dict[str, TensorHeader] = {}
        for name, header in inner.headers().items():
            found = None if _DRAFT.fullmatch(name) and not of_draft else _NAME.fullmatch(name)
            if found is None:
                self._kept[name] = header
            elif found[2] != "q":
                of_layer = self.scales.setdefault(int(found[1]), {})
                if found[2] not in of_layer or not name.endswith(".output_scale"):
                    of_layer[found[2]] = name

    def headers(self) -> dict[str, TensorHeader]:
        """As `Checkpoint.headers`."""
        return self._kept

    def scale(self, layer: int, *kinds: str) -> float | None:
        """The first of `kinds` that the layer has. Raises ModelError where it is no number to divide by."""
        of_layer = self.scales.get(layer, {})
        name = next((of_layer[kind] for kind in kinds if kind in of_layer), None)
        if name is None:
            return None
        values = self.inner.read(name).float().unique().tolist()
        if len(values) != 1 or not math.isfinite(values[0]) or values[0] <= 0:
            raise ModelError(self.source, [f"{name} is {values[:4]}; one number above 0 is needed"])
        return float(values[0])


def attention_specs(spec: ModelSpec, build: Build, source: str) -> tuple[Spec, ...]:
    """Per layer, its attention on this rank. `source`: of the checkpoint, for messages.

    Raises ModelError where it cannot be as `build` wants it, ConfigError where rows are to be FP8 and their family
    stores none, or states are to have a type and there are none.
    """
    try:
        specs = tuple(attention_of(layer.mixer, build) for layer in spec.layers)
    except ValueError as error:
        raise ModelError(source, [str(error)]) from error
    _refuse_fp8(specs)
    if build.state_dtype != torch.float32 and not any(_keeps_state(one) for one in specs):
        families = ", ".join(sorted({one.family for one in specs}))
        raise ConfigError(f"state_dtype: {families} keeps no recurrent state. Leave it out.")
    return specs


def _refuse_fp8(specs: Sequence[Spec]) -> None:
    families = {spec.family for spec in specs if _has_fp8(spec.caches()) and not FAMILIES[spec.family].scale_names}
    if families:
        raise ConfigError(
            f"kv_cache_dtype='fp8': {', '.join(sorted(families))} stores no FP8 rows. Try --kv-cache-dtype auto."
        )


def set_kv_scales(
    layers: nn.ModuleList, shares: Sequence[int | None], checkpoint: WithoutKvScales | None, first: int = 0
) -> str:
    """Give each of `layers` with FP8 rows its scales.

    `shares`: per layer, the one whose rows it reads. `checkpoint`: None if there is none to ask. `first`: its number of
    the first layer.

    Returns one line on where they come from, for the host's log; empty where there is nothing to say.
    """
    mixers: list[Any] = [layer.mixer for layer in layers]
    stated, fp8 = 0, 0
    values: list[float] = []
    for number, (mixer, shared) in enumerate(zip(mixers, shares, strict=True)):
        owner = number if shared is None else shared
        if _block_scaled(mixer.spec) or not _has_fp8(mixers[owner].spec.caches()):
            continue
        fp8 += 1
        scales = {}
        for name in FAMILIES[mixer.spec.family].scale_names:
            kind = name.removesuffix("_scale")
            found = None if checkpoint is None else checkpoint.scale(first + owner, kind, "kv")
            stated += found is not None
            scales[name] = 1.0 if found is None else found
        values += scales.values()
        mixer.kv_scales = scales
    if fp8 and stated:
        return f"FP8 rows of {fp8} layers: scales {min(values):.3g} to {max(values):.3g}, from the checkpoint"
    if any(_block_scaled(mixer.spec) for mixer in mixers):
        return "FP8 rows carry factors of their own"
    if fp8:
        return f"FP8 rows of {fp8} layers: scale 1, as the checkpoint brings none"
    if checkpoint is not None and checkpoint.scales:
        return "the checkpoint's scales of FP8 rows are not used: rows are not FP8 (--kv-cache-dtype fp8)"
    return ""


def _block_scaled(spec: Spec) -> bool:
    return FAMILIES[spec.family].block_scaled(spec)


def _keeps_state(spec: Spec) -> bool:
    return any(isinstance(layout, StateSlots) for layout in spec.caches().values())


def _has_fp8(caches: Mapping[str, CacheLayout]) -> bool:
    return any(field.dtype == FP8 for layout in caches.values() for field in layout.fields)
