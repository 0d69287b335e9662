"""The types of the fixtures of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tiny_checkpoints import TinyCheckpoint

Tiny = Callable[[str], TinyCheckpoint]
Spoil = Callable[[Path, str, Callable[[torch.Tensor], torch.Tensor]], Path]
