"""Multi-token prediction between hyper-connections: one more decoder layer, which reads all residual streams.

Source: DeepSeek-AI 2026 (DeepSeek-V4 technical report).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel, copied_head
from allotrope.layers.hyper_connection import HyperHead
from allotrope.layers.linear import Linear
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Section
from allotrope.layers.step import Step
from allotrope.ops.hyper_connection import HyperConnectionSpec


@dataclass(frozen=True, kw_only=True)
class StreamMtpSpec:
    """`layers`: the one decoder layer. `prefix`: of its tensors' names in the target's checkpoint. `hyper`: the
    target's hyper-connections."""

    layers: tuple[LayerSpec]
    prefix: str
    hyper: HyperConnectionSpec

    def build(self, target: Decoder, spec: ModelSpec, build: Build) -> StreamMtpModel:
        return StreamMtpModel(self, target, spec, build)


class StreamMtpModel(DraftModel):
    """X_i = W_h norm_h(X_i) + W_e norm_e(embedding(next token)) for each stream; X' = layer(X).

    Passes read and return streams, [T, N * hidden]: the target's before they are joined, then its own. Its head is the
    target's, or a copy of it, behind a join and a norm of its own.
    """

    def __init__(self, own: StreamMtpSpec, target: Decoder, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        hidden, self.hyper = spec.hidden, own.hyper
        self.head = copied_head(target.head, hidden, build)
        # In a tuple: the target owns modules that it shares, and loads them.
        self._shared = (target.embedding, self.head or target.head)
        self.embedding_norm = RMSNorm(hidden, spec.norm_eps, build)
        self.hidden_norm = RMSNorm(hidden, spec.norm_eps, build)
        self.embedding_projection = Linear(hidden, (Section("", hidden),), build.at("embedding_projection"))
        self.hidden_projection = Linear(hidden, (Section("", hidden),), build.at("hidden_projection"))
        self.layers = nn.ModuleList(
            target.layer_class(layer, spec, build.at(f"layers.{i}")) for i, layer in enumerate(own.layers)
        )
        self.join = HyperHead(self.hyper, build)
        self.norm = RMSNorm(hidden, spec.norm_eps, build)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """As `DraftModel.forward`, with W = N * hidden."""
        embedding, _ = self._shared
        token = self.embedding_projection(self.embedding_norm(embedding(step.ids)))
        each = hidden.view(-1, self.hyper.hidden)
        streams = self.hidden_projection(self.hidden_norm(each)).view(-1, self.hyper.streams, self.hyper.hidden)
        after: torch.Tensor = self.layers[0](streams + token[:, None], step.layers[0])
        return after.flatten(1)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.greedy`."""
        _, head = self._shared
        return head.greedy(self._joined(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.logits`, with the target's vocabulary."""
        _, head = self._shared
        logits: torch.Tensor = head(self._joined(hidden))
        return logits

    def _joined(self, hidden: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = self.norm(self.join(hidden.unflatten(1, (self.hyper.streams, -1))))
        return joined
