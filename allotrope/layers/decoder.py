"""A decoder-only language model, put together from its spec. Architectures that differ replace the layer class."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Spec
from allotrope.layers.build import Build
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.model_spec import LayerSpec, ModelSpec
from allotrope.layers.norm import RMSNorm
from allotrope.layers.parallel import Parallel
from allotrope.layers.stage import Stage, StageLayers
from allotrope.layers.step import LayerStep, Step
from allotrope.ops.all_gather_reduce_scatter import ALL_GATHER, REDUCE_SCATTER
from allotrope.ops.all_reduce import ALL_REDUCE


class DecoderLayer(nn.Module):
    """x += mixer(norm(x)); x += ffn(norm(x))."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, build: Build) -> None:
        super().__init__()
        mixer: Any = spec.mixer.build(build.at("mixer"))
        ffn: Any = spec.ffn.build(build.at_stage("ffn"))
        norm = functools.partial(RMSNorm, model.hidden, model.norm_eps, build, offset=model.norm_offset)
        self.mixer_norm = norm(quantized_from=mixer.quantized_from)
        self.mixer = mixer
        self.ffn_norm = norm(quantized_from=ffn.quantized_from)
        self.ffn = ffn

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, ctx: LayerStep, following: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`: [T, hidden]. `normed`: `mixer_norm` of it. Returns the new x, and `following` of it: a norm is made
        where a sum is, in one launch."""
        x, normed = self.ffn_norm.add(self.mixer(normed, ctx), x)
        return following.add(ctx.shared(self.ffn, normed), x)


class Decoder(nn.Module):
    """Embedding, layers, final norm, head.

    `layer_class`: what a layer of this architecture is. `one_stream`: whether the residual stream of its layers is one
    tensor [T, hidden]. `aux_layers`: see `keep_aux_hidden_states`. A pipeline stage has a run of the layers;
    `first_parts` are on the first stage alone, `last_parts` on the last.
    """

    layer_class: type[nn.Module] = DecoderLayer
    one_stream: bool = True
    aux_layers: tuple[int, ...] = ()
    first_parts: tuple[str, ...] = ("embedding", "head")
    last_parts: tuple[str, ...] = ("norm",)

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.chooser, self.parallel = spec, build.chooser, build.parallel
        # Layers sum and exchange by them through `Parallel`.
        if build.parallel.size > 1:
            build.chooser.choose(ALL_REDUCE, build.parallel.all_reduce_spec(spec.hidden, build.dtype))
        if build.parallel.data is not None:
            for op in (ALL_GATHER, REDUCE_SCATTER):
                build.chooser.choose(op, build.parallel.data.all_reduce_spec(spec.hidden, build.dtype))
        vocabulary, of_head = build.at("embedding"), build.at_stage("head")
        if spec.tied and of_head.parallel is not build.parallel:
            # Cut among other ranks than the embedding, the head could not share its table.
            vocabulary, of_head = (dataclasses.replace(one, parallel=Parallel()) for one in (vocabulary, of_head))
        self.stage = build.stage or Stage.whole(len(spec.layers))
        self.dtype = build.dtype
        if self.stage.is_first:
            self.embedding = Embedding(spec.vocab_size, spec.hidden, vocabulary, scale=spec.embedding_scale)
        numbers = range(self.stage.first, self.stage.last)
        self.layers = StageLayers(
            [self.layer_class(spec.layers[i], spec, build.at(f"layers.{i}")) for i in numbers], self.stage.first
        )
        if self.stage.is_last:
            self.norm = RMSNorm(spec.hidden, spec.norm_eps, build, offset=spec.norm_offset)
        else:
            # The last sum of the stage is made with a norm, whose weight would be that of the next stage.
            self.border = RMSNorm(spec.hidden, spec.norm_eps, build, weighted=False)
        if self.stage.is_first:
            tied = self.embedding if spec.tied else None
            self.head = Head(spec.vocab_size, spec.hidden, of_head, tied=tied, softcap=spec.softcap)

    @property
    def backends(self) -> list[AttentionBackend]:
        """Who runs the attention of each layer."""
        return [backend for _, backend in self.attention]

    @property
    def attention(self) -> list[tuple[Spec, AttentionBackend]]:
        """The attention of each layer on this rank, and who runs it."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        return [(mixer.spec, mixer.backend) for mixer in mixers]

    def keep_aux_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Make every later pass set `Step.features` to [T, len(layers) * hidden]: the residual stream before each of
        `layers`, one beside the other. The number of layers stands for the stream after the last.

        Raises ValueError for numbers that are not ascending layers of this model, and for a residual stream of several
        tensors.
        """
        refuse_aux_layers(layers, len(self.layers), self.one_stream)
        self.aux_layers = layers

    def forward(self, step: Step, received: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, hidden] of the step's tokens, after the final norm.

        Of a pipeline stage that is not the last, [T, `sent_width`], what the stage behind it receives. `received`: [T,
        `received_width`] what the stage before it returned; None for the first.
        """
        x = self.begin(step) if received is None else self.resume(received, step)
        return self.through_layers(x, step)

    def begin(self, step: Step) -> torch.Tensor:
        """The residual stream before the first layer."""
        return self.embedded(step)

    def embedded(self, step: Step) -> torch.Tensor:
        """[T, hidden] embeddings of the step's tokens."""
        x: torch.Tensor = self.embedding(step.ids) if step.embeddings is None else step.embeddings
        return x

    def reads_ids(self) -> bool:
        """Whether layers read token ids beside their embeddings."""
        return False

    def resume(self, received: torch.Tensor, step: Step) -> torch.Tensor:
        """The residual stream that `hand_on` of the stage before handed on."""
        return received

    def hand_on(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, `sent_width`] what the stage behind needs. `x`: the residual stream after the last layer of this one."""
        return x

    def border_width(self, layer: int) -> int:
        """Numbers of a token that pass from the stage before `layer` to the one that begins with it."""
        return self.spec.hidden

    @property
    def received_width(self) -> int:
        """Numbers of a token that this stage receives; 0 for the first."""
        return 0 if self.stage.is_first else self.border_width(self.stage.first)

    @property
    def sent_width(self) -> int:
        """Numbers of a token that this stage returns."""
        return self.spec.hidden if self.stage.is_last else self.border_width(self.stage.last)

    def is_elsewhere(self, parameter: str) -> bool:
        """Whether another stage has the parameter of this name."""
        part, _, rest = parameter.partition(".")
        if part == "layers":
            number = int(rest.partition(".")[0])
            return number < self.stage.count and number not in self.stage
        elsewhere = () if self.stage.is_first else self.first_parts
        return part in (elsewhere if self.stage.is_last else (*elsewhere, *self.last_parts))

    def through_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """From the residual stream [T, hidden] before the first layer to what `forward` returns."""
        following = self.norm if self.stage.is_last else self.border
        norms: list[Any] = [*(layer.mixer_norm for layer in self.layers), following]
        normed = norms[0](x)
        # A pass without a draft model that reads them keeps none.
        aux: list[torch.Tensor] = []
        for i, (layer, ctx, following) in enumerate(zip(self.layers, step.layers, norms[1:], strict=True)):
            if i in self.aux_layers:
                aux.append(x)
            x, normed = layer(x, normed, ctx, following)
        if self.aux_layers:
            if len(self.layers) in self.aux_layers:
                aux.append(x)
            step.features = torch.cat(aux, dim=-1)
        return normed if self.stage.is_last else self.hand_on(x, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [n, hidden]. Returns [n, vocabulary] fp32, whole on the ranks that sample."""
        return self.head(hidden)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [n, hidden]. Returns [n] int64 greedy tokens on every rank, -1 where no logit is finite."""
        token_ids: torch.Tensor = self.head.greedy(hidden)
        return token_ids


def refuse_aux_layers(layers: Sequence[int], count: int, one_stream: bool) -> None:
    """Raise ValueError where a model of `count` layers cannot hand out its residual stream before `layers`."""
    if not one_stream:
        raise ValueError("its residual stream is several tensors, and auxiliary hidden states are made of one")
    ascending = all(first < second for first, second in itertools.pairwise(layers))
    if not ascending or any(not 0 <= one <= count for one in layers):
        raise ValueError(f"aux_hidden_state_layers={list(layers)} (needs ascending numbers from 0 to {count})")
