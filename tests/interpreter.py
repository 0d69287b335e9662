"""Triton's interpreter as the tests run it: its faults mended, rounding as the chips do, and faster."""

from __future__ import annotations

import interpreter_loops
import interpreter_rounding
import interpreter_speed

__all__ = ["interpreter_loops", "interpreter_rounding", "interpreter_speed"]
