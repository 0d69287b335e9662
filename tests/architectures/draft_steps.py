"""A model and its draft model, run step by step on caches of their own: no engine is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from allotrope.architectures.registry import read_draft, read_spec
from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex, index_pages
from allotrope.attention.cache_layout import CacheLayout, PagedRows, WindowRows, pool_bytes, views
from allotrope.attention.family import CacheViews, Spec
from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.step import LayerStep, Step
from allotrope.loading.decoder import load_decoder, make_decoder, make_meta_decoder, quantized_build
from allotrope.loading.draft import draft_build, load_draft

PAGE_SIZE = 8
PAGES = 64


def ignored(line: str) -> None:
    """Takes the log of a loading."""


class DraftSteps:
    """One sequence. `seed`: draws random weights for the config of `directory`. `keep`: quantized weights stay so."""

    def __init__(
        self,
        directory: Path,
        *,
        build: Build | None = None,
        seed: int | None = None,
        keep: bool = False,
        log: Callable[[str], None] = ignored,
    ) -> None:
        checkpoint = open_checkpoint(str(directory), load_format="auto" if seed is None else "dummy")
        architecture, spec = read_spec(checkpoint.config, checkpoint.source)
        draft = read_draft(checkpoint.config, checkpoint.source)
        assert draft is not None
        # A spare draft: the model keeps what a draft model reads.
        build = build or Build(max_drafts=1)
        weights = None if seed is not None else checkpoint
        builds = [build, build]
        if keep:
            meta = make_meta_decoder(architecture, spec, build)
            builds = [
                quantized_build(checkpoint, architecture, spec, build),
                draft_build(checkpoint, architecture, meta, draft, build),
            ]
        made = make_decoder(architecture, spec, builds[0])
        self.target = load_decoder(
            made, architecture, builds[0], weights, seed=seed or 0, quantized_weights="keep", log=log
        )
        self.draft = load_draft(
            draft, self.target, architecture, builds[1], weights, seed=seed or 0, quantized_weights="keep", log=log
        )
        self.clear()

    @classmethod
    def of(cls, target: Decoder, draft: DraftModel) -> DraftSteps:
        """Of models that are loaded."""
        steps = cls.__new__(cls)
        steps.target, steps.draft = target, draft
        steps.clear()
        return steps

    def clear(self) -> None:
        """Begin another sequence."""
        self._target_caches = [_pools(attention) for attention, _ in self.target.attention]
        self._draft_caches = [_pools(attention) for attention, _ in self.draft.attention]

    @torch.inference_mode()
    def target_pass(self, ids: Sequence[int], context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states after the final norm, and what the draft model reads of `ids` behind `context` tokens."""
        step = _step(ids, context, self.target.attention, self._target_caches)
        hidden = self.target(step)
        return hidden, self.draft.from_target(hidden if step.features is None else step.features)

    @torch.inference_mode()
    def draft_pass(self, hidden: torch.Tensor, following: Sequence[int], context: int) -> torch.Tensor:
        """What the draft model returns for rows whose next tokens are `following`."""
        return self.draft(hidden, _step(following, context, self.draft.attention, self._draft_caches))


def _pools(spec: Spec) -> CacheViews:
    return {name: _views(layout) for name, layout in spec.caches().items()}


def _views(layout: CacheLayout) -> dict[str, torch.Tensor]:
    size = _page_size(layout)
    return views(layout, size, PAGES, torch.zeros(pool_bytes(layout, size, PAGES), dtype=torch.uint8))


def _page_size(layout: CacheLayout) -> int:
    if isinstance(layout, PagedRows):
        return math.lcm(PAGE_SIZE, layout.stride)
    return PAGE_SIZE if isinstance(layout, WindowRows) else 1


def _step(
    ids: Sequence[int], context: int, attention: Sequence[tuple[Spec, AttentionBackend]], caches: Sequence[CacheViews]
) -> Step:
    batch = BatchLayout((len(ids),), (context + len(ids),), torch.device("cpu"))
    layers = []
    for (spec, backend), own in zip(attention, caches, strict=True):
        index: dict[str, CacheIndex] = {}
        for name, layout in spec.caches().items():
            if isinstance(layout, PagedRows | WindowRows):
                index[name] = index_pages(batch, _page_size(layout), [range(1, PAGES)])
            else:
                index[name] = SlotIndex(torch.tensor([1]))
        layers.append(LayerStep(backend.plan(spec, batch, index), own))
    return Step(torch.tensor(list(ids)), batch, layers)
