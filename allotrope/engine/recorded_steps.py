"""Decode steps of few requests on a CPU, replayed without Python between their calls of C.

A step's embeddings, rotations and plans are made as ever. What the layers compute of them is recorded once for each
number of requests, and replayed in later steps with the addresses of their tensors: the same calls, so the same bits.
Owns which steps are recorded. Must not know what layers compute.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch

from allotrope.kernels.c import recording
from allotrope.kernels.c.recording import Arena, Recording, record
from allotrope.layers.decoder import Decoder
from allotrope.layers.step import Step

log = logging.getLogger("allotrope.engine")

# With more requests, Python is a small part of a step; and the most recordings that are kept.
MAX_REQUESTS, _MAX_RECORDINGS = 16, 64


class RecordedSteps:
    """Runs a model's decode steps. `reason`: why every call is made by Python; empty while steps are recorded."""

    def __init__(self, model: Decoder) -> None:
        self.reason = _reason(model)
        self.replays = 0
        self._model = model
        self._arena = Arena()
        self._recordings: dict[Hashable, Recording] = {}
        # Of a step: the layers whose plans no earlier layer has, and the rotations that layers ask for.
        self._planned: list[int] | None = None
        self._rotations: list[Any] = []

    def run(self, step: Step) -> torch.Tensor:
        """As the model's `forward`, for a step of one token a request."""
        model = self._model
        if self.reason or step.batch.num_requests > MAX_REQUESTS:
            return self._called(step)
        if self._planned is None:
            hidden = self._called(step)
            plans = [id(layer.plan) for layer in step.layers]
            self._planned = [i for i, plan in enumerate(plans) if plan not in plans[:i]]
            self._rotations = step.rotations
            return hidden
        x = model.embedding(step.ids)
        key, inputs = self._inputs(step, x)
        known = self._recordings.get(key)
        if known is not None:
            self.replays += 1
            return known.replay(inputs)
        with record(self._arena, inputs) as recorder:
            hidden = model.through_layers(x, step)
        if recorder.reason:
            self._stop(recorder.reason)
            # What it returned may lie in memory that is let go of.
            return hidden.clone()
        if len(self._recordings) == _MAX_RECORDINGS:
            self._recordings.clear()
        self._recordings[key] = recorder.recording(hidden)
        return hidden

    def reset(self) -> None:
        """Let go of all recordings: what they read has moved."""
        self._recordings.clear()

    def _called(self, step: Step) -> torch.Tensor:
        hidden: torch.Tensor = self._model(step)
        return hidden

    def _inputs(self, step: Step, x: torch.Tensor) -> tuple[Hashable, list[torch.Tensor]]:
        """What tells recordings apart, and the tensors that are others in each step."""
        keys: list[Hashable] = [step.batch.num_requests]
        inputs = [x, step.ids, *vars(step.batch.tensors).values()]
        for spec, dtype in self._rotations:
            rotation = step.rotation(spec, dtype)
            inputs += [rotation.cos, rotation.sin]
        for layer in self._planned or ():
            recorded = self._model.backends[layer].recorded
            assert recorded is not None
            key, tensors = recorded(step.layers[layer].plan)
            keys.append(key)
            inputs += tensors
        return tuple(keys), inputs

    def _stop(self, reason: str) -> None:
        self.reason = reason
        self._recordings.clear()
        log.info("decode steps are not recorded: %s", reason)


def _reason(model: Decoder) -> str:
    """Why no step of a model can be recorded."""
    own = [
        name
        for name in ("forward", "begin", "through_layers")
        if getattr(type(model), name) is not getattr(Decoder, name)
    ]
    if own or model.aux_layers:
        return "more goes into its layers, or comes out of them, than hidden states"
    if model.embedding.parallel.size > 1:
        return "ranks sum in every layer"
    names = sorted({backend.name for backend in model.backends if backend.recorded is None})
    if names:
        return f"attention of backend {', '.join(names)} (needs one that can be recorded)"
    return "; ".join(recording.reasons())
