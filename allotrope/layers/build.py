"""What every layer is built with: the rank's share, the types, the device, the attention backends asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from allotrope.layers.parallel import Parallel


@dataclass(frozen=True)
class Build:
    """`dtype`: weights and activations. `kv_dtype`: cached rows. `backends`: family name -> backend asked for.
    `row_format`: "plain", or "scaled" for FP8 rows with factors of their own.
    """

    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: Parallel = Parallel()
    backends: Mapping[str, str] = field(default_factory=dict)
    row_format: str = "plain"
