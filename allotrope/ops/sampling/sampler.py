"""From a step's logits to its tokens and log-probabilities, by backends that are chosen once."""

from __future__ import annotations

import torch

from allotrope.kernels.backend import Chooser
from allotrope.ops.logprobs import LOGPROBS, LogprobsSpec, LogprobsTensors
from allotrope.ops.sampling import SAMPLING
from allotrope.ops.sampling.logits_processors import apply_logits_processors
from allotrope.ops.sampling.spec import Sampled, SamplingSpec, SamplingStep
from allotrope.ops.token_mask import TOKEN_MASK, TokenMaskSpec


class Sampler:
    """Chooses the next token of each row."""

    def __init__(self, chooser: Chooser, vocab_size: int) -> None:
        """Raises BackendError."""
        self._choose = chooser.choose(SAMPLING, SamplingSpec(vocab_size)).run
        self._mask_tokens = chooser.choose(TOKEN_MASK, TokenMaskSpec(vocab_size)).run
        self._gather_logprobs = chooser.choose(LOGPROBS, LogprobsSpec(vocab_size)).run

    def __call__(self, logits: torch.Tensor, step: SamplingStep) -> Sampled:
        """`argmax(z)` for greedy rows, else a draw from `softmax(z / temperature)` after truncation, z the logits that
        `step.processors` leave. Reported log-probabilities are those of the logits as they came.

        `logits`: [B, V], any float type; consumed: rows with processors may be changed in place, so that tensors made
        in inference mode must be sampled in it. Raises nothing for rows without a token.
        """
        raw = logits
        finite = None
        if step.processors:
            # A mask may hide a NaN, and a row that holds one is not to be trusted.
            finite = logits.amax(-1).isfinite()
            if step.scored is not None:
                raw = logits.index_select(0, step.scored)
            logits = apply_logits_processors(logits.float(), step.processors)
            if step.processors.bits is not None:
                logits = self._mask_tokens(logits, step.processors.bits)
        elif step.scored is not None and len(step.scored) < len(logits):
            raw = logits.index_select(0, step.scored)

        token_ids: torch.Tensor = self._choose(logits, step)
        scores = None
        if step.scored is not None:
            scores = self.gather_logprobs(raw, token_ids.index_select(0, step.scored), step.top_count)
        return Sampled(token_ids if finite is None else token_ids.where(finite, -1), scores)

    def gather_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobsTensors:
        """`log_softmax(logits)` at one token of each row and at the `count` most likely ones.

        `logits`: [N, V], any float type; not changed. `token_ids`: [N] int64. `count`: K, 0 for none.
        """
        found: LogprobsTensors = self._gather_logprobs(logits, token_ids, count)
        return found
