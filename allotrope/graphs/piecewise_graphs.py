"""Captured prefill steps: CUDA graphs of all that lies between the attention of one layer and that of the next.

A step of n tokens, whatever its requests are, runs at the next size: what projections, experts and norms compute
depends on the number of rows alone, and is replayed. Attention runs between the pieces as ever, on the n true rows,
with the step's own plan. Steps that no graph holds go the same way, so that they compute exactly what a graph does.

Owns sizes, padding and pieces. Must not know requests, models, or what attention computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.graphs.captured import Graphs, collector_paused
from allotrope.kernels.device_bytes import DeviceBytes
from allotrope.layers.step import Attend, LayerStep, Step

# Ever wider apart: from 128 tokens on, padding is a fifth of a step at most.
_STEPS = ((16, 64, 16), (64, 256, 32), (256, 512, 64), (512, 1024, 128), (1024, 2048, 256), (2048, 4097, 512))
_SIZES = tuple(size for step in _STEPS for size in range(*step))
MOST_TOKENS = _SIZES[-1]
"""Of a step that is captured."""
# Graphs of 25 sizes, up to 3584 tokens, of Qwen3-235B on two H200s took 1.12 GB with 8 layers and 1.70 with 94, where
# an eager step of 3584 tokens takes 0.45: so many times that in the memory that all share, and bytes of each graph.
_POOL, _GRAPH_BYTES = 2.5, 300_000


def prefill_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens that prefill steps are padded to, up to `max_tokens` or the next multiple of 16."""
    most = -(-min(max_tokens, MOST_TOKENS) // 16) * 16
    return [*(size for size in _SIZES if size < most), most]


def expected_bytes(eager: int, max_tokens: int, layers: int) -> int:
    """Memory that the graphs of all sizes will take. `eager`: that of an eager step of `max_tokens` tokens."""
    if not max_tokens:
        return 0
    return round(_POOL * eager) + _GRAPH_BYTES * len(prefill_sizes(max_tokens)) * (layers + 1)


@dataclass(frozen=True)
class _Piece:
    """A graph, and the attention behind it: `run` of layer `layer`, from `inputs` to `out`, both of padded rows, in
    memory that graphs share."""

    graph: torch.cuda.CUDAGraph
    layer: int
    run: Callable[[LayerStep, Any], torch.Tensor]
    inputs: Any
    out: torch.Tensor


@dataclass(frozen=True)
class _Pieces:
    """The pieces of a step, and what is behind its last attention."""

    pieces: tuple[_Piece, ...]
    last: torch.cuda.CUDAGraph


class PiecewiseGraphs(Graphs[_Pieces]):
    """Runs `body(size, attend)`, a step on static buffers that calls `attend` in place of each layer's attention.

    `idle()`: a step of one row that stores nothing, with padding rows alone in the static buffers. None: sizes are
    captured behind steps of them, by `run_timed` and `capture`. The rest as in `Graphs`.
    """

    def __init__(
        self,
        body: Callable[[int, Attend], None],
        idle: Callable[[], Step] | None,
        sizes: Sequence[int],
        device: torch.device,
        *,
        capture: bool,
        alone: bool = True,
    ) -> None:
        super().__init__(sizes, device, capture=capture, alone=alone, name="prefill steps", unit="tokens")
        self._body, self._idle = body, idle
        # Dimensions after the tokens, and type, of what each layer's attention returns.
        self._returned: dict[int, tuple[torch.Size, torch.dtype]] = {}

    def run(self, size: int, step: Step) -> None:
        """Run the body at one of the sizes. `step`: of the true rows, at most `size`, which the static buffers hold."""
        found = self._graphs.get(size)
        if found is None:
            self.eager += 1
            self._body(size, self._attending(size, step))
            return
        self.replays += 1
        tokens = len(step.ids)
        for piece in found.pieces:
            piece.graph.replay()
            piece.out[:tokens].copy_(piece.run(step.layers[piece.layer], _first(piece.inputs, tokens, size)))
            if tokens < size:
                piece.out[tokens:].zero_()
        found.last.replay()

    def run_timed(self, size: int, step: Step) -> float:
        """Run the body eagerly, so that the size can be captured. Returns how much of the time launching took: near 1
        where the device waited for the host."""
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        with self._on_stream():
            self._body(size, self._attending(size, step))
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return (launched - started) / (time.perf_counter() - started)

    def _attending(self, size: int, step: Step) -> Attend:
        """Attention of the true rows, at once."""
        tokens = len(step.ids)

        def attend(layer: int, run: Callable[[LayerStep, Any], torch.Tensor], inputs: Any) -> torch.Tensor:
            attended = run(step.layers[layer], _first(inputs, tokens, size))
            self._returned[layer] = attended.shape[1:], attended.dtype
            out = attended.new_zeros(size, *attended.shape[1:])
            out[:tokens].copy_(attended)
            return out

        return attend

    def _prepare(self, size: int) -> None:
        assert self._idle is not None, "sizes are captured behind steps of them"
        step = self._idle()
        with self._on_stream():
            self._body(size, self._attending(size, step))

    def _capture(self, size: int) -> _Pieces:
        pieces: list[_Piece] = []
        # The graph that is being captured.
        graph: torch.cuda.CUDAGraph | None = None

        def end() -> torch.cuda.CUDAGraph:
            nonlocal graph
            assert graph is not None, "nothing is being captured"
            ended, graph = graph, None
            ended.capture_end()
            return ended

        def attend(layer: int, run: Callable[[LayerStep, Any], torch.Tensor], inputs: Any) -> torch.Tensor:
            nonlocal graph
            shape, dtype = self._returned[layer]
            out = torch.empty(size, *shape, dtype=dtype, device=self._device)
            # Their memory goes on to later pieces, as it would if the attention between were a part of them.
            pieces.append(_Piece(end(), layer, run, inputs.map_tokens(_unowned), _unowned(out)))
            graph = self._begin()
            return out

        with self._on_stream(), collector_paused():
            graph = self._begin()
            try:
                self._body(size, attend)
                return _Pieces(tuple(pieces), end())
            finally:
                if graph is not None:
                    graph.capture_end()


def _first(inputs: Any, tokens: int, size: int) -> Any:
    """The inputs of the first `tokens` of `size` rows."""
    return inputs if tokens == size else inputs.map_tokens(lambda rows: rows[:tokens])


def _unowned(x: torch.Tensor) -> torch.Tensor:
    """A tensor at the address of `x` that does not keep its memory."""
    if not x.numel():
        return x
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = DeviceBytes(x.data_ptr(), extent * x.itemsize).tensor(x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())
