"""Softmax attention whose decode step is made of tensor operations alone, as a captured step needs it; for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, PageIndex
from allotrope.attention.mha import MhaInputs, MhaSpec, reference
from allotrope.attention.mha.inputs import normed_and_rotated
from allotrope.attention.mha.plan import build_plan
from allotrope.engine.engine import Engine
from allotrope.engine.model_runner import GraphShapes, ModelRunner
from allotrope.kernels.backend import runs_anywhere


@dataclass(frozen=True)
class DecodePlan:
    """`rows`: [B, L] pool rows of every place up to the longest possible; 0 where a request has none."""

    slots: torch.Tensor
    rows: torch.Tensor
    visible: torch.Tensor


def plan(spec: MhaSpec, batch: BatchLayout, index: dict[str, Any]) -> Any:
    if batch.num_decodes < batch.num_requests:
        return build_plan(spec, batch, index)
    pages: PageIndex = index["kv"]
    place = torch.arange(max(batch.seq_lens), device=batch.device)
    seen = batch.tensors.seq_lens[:, None]
    visible = place < seen
    if spec.window is not None:
        visible = visible & (place >= seen - spec.window)
    page = pages.table[:, : -(-len(place) // pages.page_size)].repeat_interleave(pages.page_size, 1)[:, : len(place)]
    rows = torch.where(visible & (page >= 0), page * pages.page_size + place % pages.page_size, 0)
    return DecodePlan(pages.slots, rows, visible)


def run(spec: MhaSpec, plan: Any, caches: Any, inputs: MhaInputs) -> torch.Tensor:
    if not isinstance(plan, DecodePlan):
        return reference.run(spec, plan, caches, inputs)
    q, k, v = normed_and_rotated(inputs)
    assert k is not None and v is not None
    kept = (plan.slots >= 0)[:, None, None]
    for name, new in (("k", k), ("v", v)):
        # What may not be stored becomes zeros in row 0, which holds zeros anyway.
        pool = caches["kv"][name].flatten(0, 1)
        pool.index_copy_(0, plan.slots.clamp(min=0), torch.where(kept, new, 0).to(pool.dtype))
    keys, values = (caches["kv"][name].flatten(0, 1)[plan.rows].float() for name in ("k", "v"))
    share = spec.num_heads // spec.num_kv_heads
    logits = torch.einsum("bhd,blhd->bhl", q.float(), keys.repeat_interleave(share, 2)) * spec.scale
    weights = logits.masked_fill(~plan.visible[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhl,blhd->bhd", weights, values.repeat_interleave(share, 2)).to(q.dtype)


BACKEND = AttentionBackend("device-only", runs_anywhere, run, plan=plan, in_graphs=True)


def static(running: Engine, size: int) -> ModelRunner:
    """Make an engine's decode steps run on static buffers, as on a GPU."""
    return on_buffers(running, size, lambda spec: BACKEND)


def on_buffers(
    running: Engine, size: int, backend: Callable[[Any], AttentionBackend], prefill_tokens: int = 48
) -> ModelRunner:
    """As `static`, each layer attended to by the `backend` of its spec, those of a draft model too. Prefill steps of up
    to `prefill_tokens` tokens run on static buffers as well."""
    worker: Any = running._executor.worker  # type: ignore[attr-defined]
    models = [worker.model] if worker.draft_model is None else [worker.model, worker.draft_model]
    for layer in (layer for model in models for layer in model.layers):
        layer.mixer.backend = backend(layer.mixer.spec)
    old, load_plan = worker.model_runner, worker.load_plan
    shape = GraphShapes(
        size,
        load_plan.max_model_len,
        load_plan.max_num_seqs,
        load_plan.max_drafts,
        capture=False,
        prefill_tokens=prefill_tokens,
    )
    worker.model_runner = ModelRunner(
        worker.model, load_plan, old.groups, old.arena, shape, draft_model=worker.draft_model
    )
    if old.drafts is not None:
        worker.model_runner.drafts.passes.count_accepted = old.drafts.passes.count_accepted
    return worker.model_runner
