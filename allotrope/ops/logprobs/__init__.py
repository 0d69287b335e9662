"""Log-probabilities and ranks of one token of each row, and the most likely tokens."""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.logprobs import reference
from allotrope.ops.logprobs.spec import LogprobsSpec, LogprobsTensors

__all__ = ["LOGPROBS", "LogprobsSpec", "LogprobsTensors"]

LOGPROBS = Op(
    "logprobs",
    "log_softmax(logits) at one token of each row and at the most likely ones",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.logprobs.triton", "gather_logprobs")),
        Backend("reference", runs_anywhere, reference.gather_logprobs),
    ),
)
