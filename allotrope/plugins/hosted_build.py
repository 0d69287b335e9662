"""How a model of ours is built inside a host: by the host's ranks and types, and by our options among the host's.

Must not know which host it is.
"""

from __future__ import annotations

from typing import Any

import torch

from allotrope.attention.registry import FAMILIES
from allotrope.errors import ConfigError
from allotrope.kernels.backend import Chooser, parse_wanted
from allotrope.kernels.chip import chip_of
from allotrope.layers.build import Build
from allotrope.layers.parallel import Parallel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_QUANTIZED_WEIGHTS = ("auto", "keep", "dequantize")
_OPTIONS = ("attention_backend", "quantized_weights")


def read_options(given: Any, where: str) -> dict[str, Any]:
    """Our options as the user gave them to the host, of which both have a value.

    `where`: the host's option that they are in. Raises ConfigError for one that is not ours, or has no such value.
    """
    unknown = sorted(set(given) - set(_OPTIONS)) if isinstance(given, dict) else [given]
    if unknown:
        allowed = ", ".join(_OPTIONS)
        raise ConfigError(f"{where}: allotrope={given!r} is not understood: {unknown[0]!r} (allowed: {allowed}).")
    options = {"attention_backend": None, "quantized_weights": "auto"} | given
    if options["quantized_weights"] not in _QUANTIZED_WEIGHTS:
        allowed = ", ".join(_QUANTIZED_WEIGHTS)
        raise ConfigError(f"quantized_weights={options['quantized_weights']!r} is not understood; allowed: {allowed}.")
    return options


def hosted_build(
    host: str,
    group: Any,
    options: dict[str, Any],
    device: torch.device,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    row_format: str = "plain",
) -> Build:
    """`host`: its name. `group`: its tensor-parallel group, which both hosts coordinate alike. `types`: of weights, of
    cache entries and of recurrent states. `row_format`: as in `Build`."""
    dtype, kv_dtype, state_dtype = types
    parallel = Parallel(
        group.rank_in_group,
        group.world_size,
        group.device_group,
        unreachable=(f"the ranks are those of {host}, which owns their memory",),
        host_all_reduce=group.all_reduce,
        all_ranks_sample=True,
    )
    chooser = Chooser(chip_of(device), parse_wanted("attention_backend", options["attention_backend"], FAMILIES))
    return Build(dtype, kv_dtype, device, parallel, chooser, row_format, state_dtype)
