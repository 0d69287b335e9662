"""Multi-token prediction: one more decoder layer, which reads the hidden state of a token and the token after it.

Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel, copied_head
from allotrope.layers.linear import Linear
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Section
from allotrope.layers.step import Step


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """`layers`: the one decoder layer. `prefix`: of its tensors' names in the target's checkpoint. `shared_topk`: as in
    `DraftModel`."""

    layers: tuple[LayerSpec]
    prefix: str
    shared_topk: int | None = None

    def build(self, target: Decoder, spec: ModelSpec, build: Build) -> MtpModel:
        return MtpModel(self, target, spec, build)


class MtpModel(DraftModel):
    """x = W [norm_e(embedding(next token)) | norm_h(hidden)]; hidden' = norm(layer(x)).

    Embedding and head are the target's, or the head is a copy of it. The first pass reads the target's hidden states
    after its final norm, and later ones what the pass before returned, which is after `norm`: both are what the head
    reads.
    """

    def __init__(self, own: MtpSpec, target: Decoder, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        hidden, eps, offset = spec.hidden, spec.norm_eps, spec.norm_offset
        self.shared_topk = own.shared_topk
        self.head = copied_head(target.head, hidden, build)
        # In a tuple: the target owns modules that it shares, and loads them.
        self._shared = (target.embedding, self.head or target.head)
        self.embedding_norm = RMSNorm(hidden, eps, build, offset=offset)
        self.hidden_norm = RMSNorm(hidden, eps, build, offset=offset)
        # Every rank has it whole: cut, it would need a sum over the ranks of its own.
        self.projection = Linear(2 * hidden, (Section("", hidden),), build.at("projection"))
        self.layers = nn.ModuleList(
            target.layer_class(layer, spec, build.at(f"layers.{i}")) for i, layer in enumerate(own.layers)
        )
        self.norm = RMSNorm(hidden, eps, build, offset=offset)

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """As `DraftModel.forward`, with W = hidden."""
        x, layer = self._projected(hidden, step), self._layer
        normed: torch.Tensor
        _, normed = layer(x, layer.mixer_norm(x), step.layers[0], self.norm)
        return normed

    def store(self, hidden: torch.Tensor, step: Step) -> None:
        """As `DraftModel.store`."""
        if not self.stores_alone:
            super().store(hidden, step)
            return
        layer = self._layer
        layer.mixer.store(layer.mixer_norm(self._projected(hidden, step)), step.layers[0])

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    def _projected(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """What the layer reads [T, hidden]."""
        embedding, _ = self._shared
        read = (self.embedding_norm(embedding(step.ids)), self.hidden_norm(hidden))
        projected: torch.Tensor = self.projection(torch.cat(read, dim=-1))
        return projected

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.greedy`."""
        _, head = self._shared
        return head.greedy(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.logits`, with the target's vocabulary."""
        _, head = self._shared
        logits: torch.Tensor = head(hidden)
        return logits
