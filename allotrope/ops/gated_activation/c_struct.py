"""How gate and up become one, as `gated_activation.h` takes it."""

from __future__ import annotations

import ctypes


class CompiledGating(ctypes.Structure):
    """act(gate) * (up + offset), gate at most `limit`, up within +-`limit`. act: gelu in its tanh form, or
    x * sigmoid(slope * x)."""

    _fields_ = (
        ("gelu", ctypes.c_long),
        ("slope", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("offset", ctypes.c_float),
    )
