"""A whole model that drafts for another of the same vocabulary: it reads tokens alone, none of the target's states.

Source: Leviathan et al. 2023 (speculative decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.step import Step


@dataclass(frozen=True, kw_only=True)
class DecoderDraftSpec:
    """`model`: the sizes of the draft model. `decoder`: its class."""

    model: ModelSpec
    decoder: type[Decoder]

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Its decoder layers."""
        return self.model.layers

    @property
    def prefix(self) -> str:
        """Its tensors have a checkpoint of their own."""
        return ""

    def build(self, target: Decoder, spec: ModelSpec, build: Build) -> DecoderDraft:
        """As `DraftSpec.build`. Nothing is shared with the target."""
        return DecoderDraft(self.decoder(self.model, build))


class DecoderDraft(DraftModel):
    """Row i of a pass is the token at position i. `W`: hidden."""

    reads_tokens_alone = True

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.layers = decoder.layers

    @property
    def stores_alone(self) -> bool:
        """A first pass is never followed by the choice of a draft, and is whole all the same."""
        return False

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """As `DraftModel.forward`. `hidden` is not read."""
        found: torch.Tensor = self.decoder(step)
        return found

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.greedy`."""
        return self.decoder.greedy(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.logits`, with the target's vocabulary."""
        return self.decoder.logits(hidden)
