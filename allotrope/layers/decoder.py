"""A decoder-only language model, put together from its spec. Architectures that differ replace the layer class."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Spec
from allotrope.layers.build import Build
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.norm import RMSNorm
from allotrope.layers.step import LayerStep, Step
from allotrope.ops.all_reduce import ALL_REDUCE


class DecoderLayer(nn.Module):
    """x += mixer(norm(x)); x += ffn(norm(x))."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, build: Build) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(model.hidden, model.norm_eps, build, offset=model.norm_offset)
        self.mixer = spec.mixer.build(build.at("mixer"))
        self.ffn_norm = RMSNorm(model.hidden, model.norm_eps, build, offset=model.norm_offset)
        self.ffn = spec.ffn.build(build.at("ffn"))

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, ctx: LayerStep, following: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`: [T, hidden]. `normed`: `mixer_norm` of it. Returns the new x, and `following` of it: a norm is made
        where a sum is, in one launch."""
        x, normed = self.ffn_norm.add(self.mixer(normed, ctx), x)
        return following.add(self.ffn(normed, ctx), x)


class Decoder(nn.Module):
    """Embedding, layers, final norm, head. `layer_class`: what a layer of this architecture is."""

    layer_class: type[nn.Module] = DecoderLayer

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.chooser = spec, build.chooser
        if build.parallel.size > 1:
            # Layers sum by it through `Parallel`.
            build.chooser.choose(ALL_REDUCE, build.parallel.all_reduce_spec(spec.hidden, build.dtype))
        self.embedding = Embedding(spec.vocab_size, spec.hidden, build, scale=spec.embedding_scale)
        self.layers = nn.ModuleList(
            self.layer_class(layer, spec, build.at(f"layers.{i}")) for i, layer in enumerate(spec.layers)
        )
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, build, offset=spec.norm_offset)
        tied = self.embedding if spec.tied else None
        self.head = Head(spec.vocab_size, spec.hidden, build, tied=tied, softcap=spec.softcap)

    @property
    def backends(self) -> list[AttentionBackend]:
        """Who runs the attention of each layer."""
        return [backend for _, backend in self.attention]

    @property
    def attention(self) -> list[tuple[Spec, AttentionBackend]]:
        """The attention of each layer on this rank, and who runs it."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        return [(mixer.spec, mixer.backend) for mixer in mixers]

    def forward(self, step: Step) -> torch.Tensor:
        """Hidden states [T, hidden] of the step's tokens, after the final norm."""
        return self.through_layers(self.embedding(step.ids), step)

    def through_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """From the embeddings [T, hidden] to after the final norm."""
        norms: list[Any] = [*(layer.mixer_norm for layer in self.layers), self.norm]
        normed = norms[0](x)
        for layer, ctx, following in zip(self.layers, step.layers, norms[1:], strict=True):
            x, normed = layer(x, normed, ctx, following)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [n, hidden]. Returns [n, vocabulary] fp32, whole on the ranks that sample."""
        return self.head(hidden)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [n, hidden]. Returns [n] int64 greedy tokens on every rank, -1 where no logit is finite."""
        token_ids: torch.Tensor = self.head.greedy(hidden)
        return token_ids
