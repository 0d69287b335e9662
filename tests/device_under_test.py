"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
