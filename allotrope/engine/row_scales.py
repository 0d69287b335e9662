"""What FP8 rows of the caches are divided by: the checkpoint's own scales where it brings some, else 1.

Released checkpoints hold one number per layer for keys and one for values (`k_scale`, `v_scale`), or one for both
(`kv_scale`), below the layer's attention. Where rows are not FP8 they are read by nobody, and said to be left out.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allotrope.attention.cache_layout import CacheLayout
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.errors import ConfigError, ModelError
from allotrope.models.checkpoint import Checkpoint, TensorHeader
from allotrope.models.decoder import Decoder

log = logging.getLogger("allotrope.engine")

FP8 = torch.float8_e4m3fn
_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\.(q|k|v|kv)_scale")


class WithoutRowScales:
    """A checkpoint whose scales of cached rows are taken out: its other tensors are those of any release.

    `scales`: layer -> "k", "v" or "kv" -> name of the tensor.
    """

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.source, self.config = inner.source, inner.config
        self.generation_config, self.tokenizer_path = inner.generation_config, inner.tokenizer_path
        self.has_weights = inner.has_weights
        self.scales: dict[int, dict[str, str]] = {}
        self._kept: dict[str, TensorHeader] = {}
        for name, header in inner.headers().items():
            found = _NAME.fullmatch(name)
            if found is None:
                self._kept[name] = header
            elif found[2] != "q":
                self.scales.setdefault(int(found[1]), {})[found[2]] = name

    def headers(self) -> dict[str, TensorHeader]:
        """As `Checkpoint.headers`."""
        return self._kept

    def read(self, name: str) -> torch.Tensor:
        """As `Checkpoint.read`."""
        return self.inner.read(name)

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


def refuse_fp8(specs: Sequence[Spec]) -> None:
    """Raise ConfigError, naming the families, if rows are to be FP8 where their family stores none."""
    families = {spec.family for spec in specs if _has_fp8(spec.caches()) and not _arguments(spec.family)}
    if families:
        raise ConfigError(
            f"kv_cache_dtype='fp8': {', '.join(sorted(families))} stores no FP8 rows. Try --kv-cache-dtype auto."
        )


def set_row_scales(
    model: Decoder, specs: Sequence[Spec], shares: Mapping[int, int], checkpoint: WithoutRowScales | None
) -> None:
    """Give each layer with FP8 rows its scales, and say where they come from. `shares`: layer -> owner of its rows."""
    stated, fp8 = 0, 0
    values: list[float] = []
    for number, (layer, spec) in enumerate(zip(model.layers, specs, strict=True)):
        owner = shares.get(number, number)
        if _is_scaled(spec) or not _has_fp8(specs[owner].caches()):
            continue
        fp8 += 1
        scales = {}
        for name in _arguments(spec.family):
            kind = name.removesuffix("_scale")
            found = None if checkpoint is None else checkpoint.scale(owner, kind, "kv")
            stated += found is not None
            scales[name] = 1.0 if found is None else found
        values += scales.values()
        mixer: Any = layer.mixer
        mixer.row_scales = scales
    if fp8 and stated:
        log.info("FP8 rows of %d layers: scales %.3g to %.3g, from the checkpoint", fp8, min(values), max(values))
    elif any(map(_is_scaled, specs)):
        log.info("FP8 rows carry factors of their own")
    elif fp8:
        log.info("FP8 rows of %d layers: scale 1, as the checkpoint brings none", fp8)
    elif checkpoint is not None and checkpoint.scales:
        log.info("the checkpoint's scales of FP8 rows are not used: rows are not FP8 (--kv-cache-dtype fp8)")


def _is_scaled(spec: Any) -> bool:
    """Whether rows carry factors of their own."""
    return getattr(getattr(spec, "mla", spec), "row_format", "plain") == "scaled"


def _has_fp8(caches: Mapping[str, CacheLayout]) -> bool:
    return any(field.dtype == FP8 for layout in caches.values() for field in layout.fields)


def _arguments(family: str) -> list[str]:
    """The arguments of a family's `run` that are scales of rows."""
    found = inspect.signature(FAMILIES[family].backends[-1].run).parameters
    return [name for name in found if name in ("k_scale", "v_scale", "kv_scale")]
