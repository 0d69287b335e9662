"""What every draft model is to the engine: a few layers that guess the next tokens from the target's hidden states.

Must not know how its hidden states are made, or how drafts are verified.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Spec
from allotrope.layers.build import Build
from allotrope.layers.embedding import Head
from allotrope.layers.step import Step
from allotrope.ops.matmul.plain import PLAIN


def copied_head(head: Head, hidden: int, build: Build) -> Head | None:
    """A copy of the target's `head` in the format of `build.draft_head`; None where drafts are chosen by that one.

    It chooses drafts alone, so it may round. A softcap changes no order of logits and is left out.
    """
    if build.draft_head is PLAIN:
        return None
    own = dataclasses.replace(build, parallel=head.parallel)
    return Head(head.vocab_size, hidden, own, tied=head, format=build.draft_head)


class DraftModel(nn.Module, ABC):
    """`layers`: its decoder layers, each with a `mixer`. Row i of a pass stands for the token at position i + 1, which
    it reads beside the hidden state of position i: its cache rows lie at position i.

    `reads_tokens_alone`: row i of a pass stands for the token at position i, and reads no hidden state. The first pass
    then only stores, and a chain begins with the token that was sampled: it has as many passes as drafts.

    `shared_topk`: K where later passes attend to the top-k indices that the first one leaves in `Step.topk_indices`.
    """

    layers: nn.ModuleList
    reads_tokens_alone: bool = False
    shared_topk: int | None = None

    @property
    def attention(self) -> list[tuple[Spec, AttentionBackend]]:
        """The attention of each layer on this rank, and who runs it."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        return [(mixer.spec, mixer.backend) for mixer in mixers]

    def from_target(self, features: torch.Tensor) -> torch.Tensor:
        """What the first pass reads, [T, W], from the target's `features` [T, F]: `Step.features` where the target sets
        them, else its hidden states after the final norm."""
        return features

    @abstractmethod
    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """`hidden`: [T, W] of `from_target`, or what the pass before returned. `step`: its `ids` are the tokens after
        those of `hidden`, its `layers` those of the draft model. Returns [T, W]."""

    @property
    def stores_alone(self) -> bool:
        """Whether `store` is less than a pass: the entries of a lone layer need the output of none."""
        return len(self.layers) == 1 and all(backend.store is not None for _, backend in self.attention)

    def store(self, hidden: torch.Tensor, step: Step) -> None:
        """What `forward` does to the caches, for rows behind which no draft is made. Arguments as in `forward`."""
        self.forward(hidden, step)

    @abstractmethod
    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [n, W] that `forward` returned. Returns [n] int64 tokens of the target's vocabulary on every rank,
        -1 where no logit is finite."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden`: [n, W] that `forward` returned. Returns [n, draft vocabulary] fp32, whole on the ranks that
        sample."""
