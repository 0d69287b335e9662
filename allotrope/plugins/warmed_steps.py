"""Kernels of a host's steps, compiled before the first step of a kind. Must not know: which host."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from allotrope.kernels.warmup import warm_up_steps
from allotrope.layers.build import Build

Kind = tuple[bool, bool, int, bool]


def warm_up_first(
    seen: set[Kind], kind: tuple[bool, bool], tokens: int, step: Callable[[], object], build: Build, log: logging.Logger
) -> None:
    """Of the first step of a kind, have the kernels compiled several at once; the step would do it one by one.

    `seen`: kinds of the steps before. `kind`: what kernels are chosen by, beside the number of `tokens`. Operations of
    torch do run in a warm-up: a state that they write would move on twice.
    """
    device = build.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    # Sizes whose kernels are launched alike.
    whole = (*kind, (tokens - 1).bit_length(), tokens % 16 == 0)
    if whole not in seen:
        seen.add(whole)
        warm_up_steps(step, device, build.parallel.size, log)
