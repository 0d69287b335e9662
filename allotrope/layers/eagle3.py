"""EAGLE3: a draft head that reads the residual stream of several layers of its target, and the token after.

Source: Li et al. 2025 (EAGLE-3); `fc_norm` and `norm_output` from EAGLE 3.1. The form is that of the heads that vLLM's
speculators trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder, DecoderLayer
from allotrope.layers.draft import DraftModel, copied_head
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.linear import Linear
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Placement, Section
from allotrope.layers.step import LayerStep, Step


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec:
    """`model`: the sizes of the head. The first of its layers projects queries, keys and values from 2 * hidden inputs.

    `draft_vocab_size`: tokens that its output head scores. `target_hidden`: size of one auxiliary hidden state.
    `aux_layers`: layers of the target before which the residual stream is read; none: the head reads the target's
    hidden states after the final norm. `norm_before_fc`: a norm of all auxiliary hidden states at once. `fc_norm`: a
    norm of each. `norm_before_residual`: the residual stream begins after `hidden_norm`. `norm_output`: the next pass
    reads the hidden state after the final norm. `own_embedding`, `own_head`: False shares the target's. `maps_ids`: ids
    of the draft vocabulary are not those of the target. `num_drafts`: that the head was trained for, None if unknown.
    """

    model: ModelSpec
    draft_vocab_size: int
    target_hidden: int
    aux_layers: tuple[int, ...]
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = True
    own_head: bool = True
    maps_ids: bool = True
    num_drafts: int | None = None

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Its decoder layers."""
        return self.model.layers

    @property
    def prefix(self) -> str:
        """Its tensors have a checkpoint of their own."""
        return ""

    def build(self, target: Decoder, spec: ModelSpec, build: Build) -> Eagle3Model:
        """As `DraftSpec.build`. The target keeps its auxiliary hidden states for the head from then on: see
        `Decoder.keep_aux_hidden_states`, which raises ValueError."""
        target.keep_aux_hidden_states(self.aux_layers)
        return Eagle3Model(self, target, build)


class FirstLayer(nn.Module):
    """x = r + mixer([norm_e(embedding) | norm_h(hidden)]), with r = hidden or norm_h(hidden); x += ffn(norm(x))."""

    def __init__(self, own: Eagle3Spec, build: Build) -> None:
        super().__init__()
        spec, hidden, eps = own.layers[0], own.model.hidden, own.model.norm_eps
        self.norm_before_residual = own.norm_before_residual
        self.embedding_norm = RMSNorm(hidden, eps, build)
        self.hidden_norm = RMSNorm(hidden, eps, build)
        self.mixer = spec.mixer.build(build.at("mixer"))
        self.ffn_norm = RMSNorm(hidden, eps, build)
        self.ffn = spec.ffn.build(build.at_stage("ffn"))

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, ctx: LayerStep, following: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`embedded`: [T, hidden] of the next tokens. Returns the residual stream, and `following` of it."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat((self.embedding_norm(embedded), normed), dim=-1)
        x, normed = self.ffn_norm.add(self.mixer(x, ctx), residual)
        return following.add(ctx.shared(self.ffn, normed), x)

    def store(self, embedded: torch.Tensor, hidden: torch.Tensor, ctx: LayerStep) -> None:
        """The part of `forward` that stores entries."""
        x = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        mixer: Any = self.mixer
        mixer.store(x, ctx)


class Eagle3Model(DraftModel):
    """h = W_fc [aux hidden states]; x, y = the layers of (embedding(next token), h), and norm(x); next h: x, or y with
    `norm_output`. The head scores y.

    `F` of the features: `target_hidden` for each auxiliary hidden state. `W`: hidden.
    """

    def __init__(self, own: Eagle3Spec, target: Decoder, build: Build) -> None:
        super().__init__()
        self.spec, model = own, own.model
        hidden, eps, features = model.hidden, model.norm_eps, own.target_hidden * len(own.aux_layers)
        self.input_norm = RMSNorm(features, eps, build) if own.norm_before_fc else None
        self.fc_norms = (
            nn.ModuleList(RMSNorm(own.target_hidden, eps, build) for _ in own.aux_layers) if own.fc_norm else None
        )
        # Every rank has it whole: cut, it would need a sum over the ranks of its own.
        self.fc = Linear(features, (Section("", hidden),), build.at("fc")) if own.aux_layers else None
        others = model.layers[1:]
        self.layers = nn.ModuleList(
            [
                FirstLayer(own, build.at("layers.0")),
                *(DecoderLayer(layer, model, build.at(f"layers.{i}")) for i, layer in enumerate(others, 1)),
            ]
        )
        self.norm = RMSNorm(hidden, eps, build)
        # In a tuple: the target owns the modules that it shares, and loads them.
        self.embedding = Embedding(model.vocab_size, hidden, build.at("embedding")) if own.own_embedding else None
        self.head: Head | None = copied_head(target.head, hidden, build)
        if own.own_head:
            self.head = Head(own.draft_vocab_size, hidden, build.at_stage("head"), tied=None, format=build.draft_head)
        self._embedding = (self.embedding or target.embedding,)
        self._head = (self.head or target.head,)
        self.d2t: nn.Parameter | None = None
        if own.maps_ids:
            size = own.draft_vocab_size
            # Offsets of random weights stay inside the vocabulary.
            placement = Placement((Section("", size),), below=model.vocab_size - size + 1)
            self.d2t = build.parameter((size,), placement, torch.int64)

    def finish_loading(self) -> None:
        """Turn the offsets of `d2t` into ids of the target. Raises ValueError for ids outside its vocabulary."""
        if self.d2t is None or self.d2t.is_meta:
            return
        self.d2t.data = self.d2t.data + torch.arange(len(self.d2t), device=self.d2t.device)
        low, high = int(self.d2t.min()), int(self.d2t.max())
        if low < 0 or high >= self.spec.model.vocab_size:
            raise ValueError(f"d2t leads to the ids {low} to {high} (needs 0 to {self.spec.model.vocab_size - 1})")

    def from_target(self, features: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.from_target`. `features`: [T, F]."""
        if self.fc is None:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norms is not None:
            states = features.unflatten(-1, (len(self.fc_norms), -1)).unbind(1)
            normed = [norm(state.contiguous()) for norm, state in zip(self.fc_norms, states, strict=True)]
            features = torch.cat(normed, dim=-1)
        projected: torch.Tensor = self.fc(features)
        return projected

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """As `DraftModel.forward`."""
        first: Any = self.layers[0]
        others: list[Any] = list(self.layers)[1:]
        norms: list[Any] = [*(layer.mixer_norm for layer in others), self.norm]
        (embedding,) = self._embedding
        x, normed = first(embedding(step.ids), hidden, step.layers[0], norms[0])
        for layer, ctx, following in zip(others, step.layers[1:], norms[1:], strict=True):
            x, normed = layer(x, normed, ctx, following)
        recycled: torch.Tensor = normed if self.spec.norm_output else x
        return recycled

    def store(self, hidden: torch.Tensor, step: Step) -> None:
        """As `DraftModel.store`."""
        if not self.stores_alone:
            super().store(hidden, step)
            return
        first: Any = self.layers[0]
        (embedding,) = self._embedding
        first.store(embedding(step.ids), hidden, step.layers[0])

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.greedy`."""
        (head,) = self._head
        token_ids: torch.Tensor = head.greedy(self._normed(hidden))
        if self.d2t is None:
            return token_ids
        return torch.where(token_ids < 0, token_ids, self.d2t[token_ids])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DraftModel.logits`."""
        (head,) = self._head
        logits: torch.Tensor = head(self._normed(hidden))
        return logits

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads, from what `forward` returned."""
        return hidden if self.spec.norm_output else self.norm(hidden)
