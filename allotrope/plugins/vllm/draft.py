"""Our draft head of a model's own checkpoint, as vLLM's MTP model: vLLM says what it reads and verifies its drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig

from allotrope.architectures.registry import read_draft
from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.errors import ModelError
from allotrope.layers.draft import DraftModel
from allotrope.layers.step import Step
from allotrope.loading.decoder import fill_draft
from allotrope.loading.draft import draft_build, draft_tensors
from allotrope.plugins.vllm import log
from allotrope.plugins.vllm.cache import HostedCache
from allotrope.plugins.vllm.contract import PAIRED_DRAFT_HEADS
from allotrope.plugins.vllm.model import HostedLayers, HostedModel


class SharedParts(torch.nn.Module):
    """Takes the parts of the target that vLLM hands to a draft model. Nobody reads them: ours has them already."""


class HostedDraft(HostedLayers):
    """The draft head of a `HostedModel`, whose embedding and head it uses."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        target = _target(vllm_config)
        super().__init__(target.checkpoint, target.architecture)
        # In a tuple: the target owns its modules, and loads them.
        self._target = (target,)
        self.model = SharedParts()
        spec = read_draft(self.checkpoint.config, self.checkpoint.source)
        if spec is None:
            raise ModelError(self.checkpoint.source, ["config.json names no draft head (speculative decoding by mtp)"])
        self._spec = spec
        names = vllm_config.speculative_config.draft_model_config.architectures
        self._paired = any(name in PAIRED_DRAFT_HEADS for name in names)
        self.build = dataclasses.replace(target.build, formats={})
        if target.build.formats:
            self.build = draft_build(self.checkpoint, self.architecture, target.decoder, spec, self.build)
        self.draft: DraftModel = spec.build(target.decoder, target.decoder.spec, self.build)
        # vLLM reads one number of a cache's name: that of its layer.
        self._host(self.draft.layers, [None] * len(spec.layers), prefix or "draft", vllm_config)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`input_ids`: [T]. Returns [T, hidden]."""
        (target,) = self._target
        return target.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`input_ids`: [T], the token after that of each row of `hidden_states`: [T, hidden], padding last.

        Returns what `compute_logits` reads and what the next pass reads, which are the same; once, where vLLM knows no
        head of this name that tells them apart.
        """
        if inputs_embeds is not None or intermediate_tensors is not None:
            raise ModelError(self.checkpoint.source, ["Allotrope's models take token ids, not embeddings or stages"])
        self._ensure_loaded()
        batch, order, layers = self._plan(len(input_ids))
        hidden = self.draft(hidden_states[order.tokens], Step(input_ids[order.tokens], batch, layers, self._tables))
        out = hidden.new_zeros(len(input_ids), hidden.shape[1])
        out[order.tokens] = hidden
        return (out, out) if self._paired else out

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """`hidden_states`: [n, hidden]. Returns [n, vocabulary] fp32."""
        return self.draft.logits(hidden_states)

    def _load(self, weights: Checkpoint | None) -> None:
        (target,) = self._target
        source = None if weights is None else draft_tensors(weights, self._spec)
        rules = self.architecture.draft_rules(target.decoder.spec, self._spec)
        fill_draft(
            self.draft,
            rules,
            self.build,
            source,
            seed=target.seed,
            quantized_weights=target.quantized_weights,
            log=lambda line: log.info("allotrope: %s", line),
        )
        self._finish()


def _target(vllm_config: VllmConfig) -> HostedModel:
    """The model that vLLM has loaded before. Raises ModelError where that is not one of ours."""
    for found in _models(vllm_config):
        return found
    raise ModelError(
        vllm_config.model_config.model,
        [
            "Allotrope's draft head drafts for Allotrope's models, and vLLM runs another one",
            "ALLOTROPE_VLLM=0 gives vLLM's own models",
        ],
    )


def _models(vllm_config: VllmConfig) -> Iterator[HostedModel]:
    layers = vllm_config.compilation_config.static_forward_context.values()
    caches = [layer for layer in layers if isinstance(layer, HostedCache)]
    return (cache.model for cache in caches if isinstance(cache.model, HostedModel))
