"""Steps with prompts inside a host, in piecewise CUDA graphs: launching a layer takes a host longer than a GPU needs to
compute a few hundred tokens of it.

A size is captured behind the second step that has it, and replayed from the third on: by every step of up to so many
tokens where the device waited for the host, and elsewhere by those that are as long, which lose nothing to padding. A
host that prepares a step when the one before has ended lets the device wait for the first kernels of each. Must not
know which host it is.
"""

from __future__ import annotations

import logging

import torch

from allotrope.graphs.piecewise_graphs import MOST_TOKENS, PiecewiseGraphs, prefill_sizes
from allotrope.graphs.prefill_buffers import PrefillBuffers
from allotrope.kernels.chip import free_memory
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.step import Step
from allotrope.ops.rope import RopeTables

# Hosts prepare a step while the one before is computed, with the Python that launches it: longer steps wait than in our
# engine. In chunks of 8192 tokens SGLang took 28 to 38 ms for 8 layers of Qwen3-Next, whose kernels take 22.
SIZES = (*prefill_sizes(MOST_TOKENS), 5120, 6144, 7168, 8192)
# A step waits for the host where launching takes so much of its time, and gains nothing worth a graph where it takes so
# little.
_WAITS, _GAINS = 0.8, 0.1
# Tokens of a step that is as long as its size, to these.
_FULL = 0.98
# Of what a host has left free on the device, this before a graph and this behind it: the host allocates there itself.
_FREE_BYTES, _LEFT_BYTES = 2 << 30, 1 << 30


class PrefillGraphs:
    """Runs steps of `decoder` that have prompts. `wanted`: whether the host wants graphs of them. `log`: the host's."""

    def __init__(
        self, decoder: Decoder, build: Build, tables: RopeTables, log: logging.Logger, *, wanted: bool
    ) -> None:
        self._decoder, self._device, self._tables, self._log = decoder, build.device, tables, log
        # Ranks would have to agree on when a size is captured.
        self._captures = wanted and build.parallel.size == 1 and build.device.type == "cuda"
        # The most tokens of a step that may wait for the host.
        self._most = SIZES[-1]
        # Of sizes of which a step ran, how much of its time launching takes; all of it until that is measured.
        self._launching: dict[int, float] = {}
        self._buffers: PrefillBuffers | None = None
        self.graphs: PiecewiseGraphs | None = None

    def run(self, step: Step) -> torch.Tensor:
        """[T, hidden], valid until the next step."""
        tokens = len(step.ids)
        # A host that captures the step itself has the decoder.
        captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if (self._captures or self.graphs is not None) and tokens <= SIZES[-1] and not captured:
            buffers, graphs = self._static()
            size = graphs.padded(tokens)
            full, launching = tokens >= _FULL * size, self._launching.get(size, 1.0)
            if size in graphs.captured:
                static = full or launching > _WAITS
            else:
                static = self._captures and (size <= self._most or (full and launching > _GAINS))
            if static:
                buffers.refresh(step.ids, step.batch.positions, size)
                self._run(graphs, size, step, full=full)
                return buffers.kept(tokens)[0]
        hidden: torch.Tensor = self._decoder(step)
        return hidden

    def _run(self, graphs: PiecewiseGraphs, size: int, step: Step, *, full: bool) -> None:
        if size in graphs.captured or size not in self._launching:
            self._launching.setdefault(size, 1.0)
            graphs.run(size, step)
            return
        launching = self._launching[size] = graphs.run_timed(size, step)
        if launching <= _WAITS:
            # Nor will longer ones wait.
            self._most = min(self._most, max((one for one in graphs.sizes if one < size), default=0))
        if launching > (_GAINS if full else _WAITS):
            self._capture(graphs, size)

    def _static(self) -> tuple[PrefillBuffers, PiecewiseGraphs]:
        """Made with the first step."""
        if self._buffers is None or self.graphs is None:
            self._buffers = PrefillBuffers(SIZES[-1], self._device, self._tables)
            body = self._buffers.body(self._decoder, len(self._decoder.layers))
            self.graphs = PiecewiseGraphs(body, None, SIZES, self._device, capture=False)
        return self._buffers, self.graphs

    def _capture(self, graphs: PiecewiseGraphs, size: int) -> None:
        """Capture a size; where that cannot be, no other one either."""
        try:
            if free_memory(self._device) < _FREE_BYTES:
                raise RuntimeError("little memory is free")
            graphs.capture(size)
            if free_memory(self._device) < _LEFT_BYTES:
                graphs.drop(size)
                raise RuntimeError(f"the one of {size} left little memory free")
        except RuntimeError as error:
            self._captures = False
            self._log.warning("allotrope: no more prefill graphs, after those of %s tokens: %s", graphs.captured, error)
        else:
            self._log.info("allotrope: captured steps with prompts of %d tokens", size)
