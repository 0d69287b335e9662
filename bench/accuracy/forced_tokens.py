"""A logits processor of vLLM that decodes given tokens: a request's `extra_args` name them.

`extra_args`: "forced", the tokens in order; "after", the length of the prompt. vLLM takes its logprobs before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

try:
    # Of the second model runner, which has an interface of its own.
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotLogitsProcessor
except ImportError:
    SlotLogitsProcessor = object


def _force(logits: torch.Tensor, token: int) -> None:
    """`logits`: [vocabulary], of which `token` alone stays possible."""
    logits.fill_(-math.inf)
    logits[token] = 0.0


def _forced_of(params: SamplingParams) -> tuple[int, list[int]] | None:
    """Length of the prompt, and the tokens after it; None if the request chooses its own."""
    given = params.extra_args or {}
    return (given["after"], given["forced"]) if "forced" in given else None


class ForcedTokensProcessor(AdapterLogitsProcessor, SlotLogitsProcessor):  # type: ignore[misc]
    """Both of vLLM's interfaces: by output tokens of a request, and by slots of a batch."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool = False) -> None:
        """`device`: the states of all slots, in the second model runner."""
        AdapterLogitsProcessor.__init__(self, vllm_config, device, is_pin_memory)
        self._slots: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        given = _forced_of(params)
        if given is None:
            return None
        tokens = given[1]

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(tokens):
                _force(logits, tokens[len(output_ids)])
            return logits

        return force

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._slots.pop(req_idx, None)
        given = _forced_of(sampling_params)
        if given is not None:
            self._slots[req_idx] = given
        return given is not None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """`logits`: [B, vocabulary]. `ctx`: of the second model runner."""
        if ctx is None:
            return super().apply(logits)
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            if slot in self._slots:
                after, tokens = self._slots[slot]
                index = int(ctx.seq_lens_upper_bound_np[row]) - after
                # A chunk of a prompt chooses nothing.
                if 0 <= index < len(tokens):
                    _force(logits[row], tokens[index])
        return logits
