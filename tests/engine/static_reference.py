"""Any family on the static buffers of a decode step, on a CPU: its reference, which reads the lengths back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.device_only_mha import on_buffers

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex, VerifyRows
from allotrope.attention.registry import FAMILIES
from allotrope.engine.engine import Engine
from allotrope.engine.model_runner import ModelRunner
from allotrope.kernels.backend import runs_anywhere


def reads_lengths(spec: Any) -> AttentionBackend:
    """The reference of the family of `spec`. Of a padding row it makes a request of one token in the null page."""
    reference = FAMILIES[spec.family].backends[-1]

    def plan(spec: Any, batch: BatchLayout, index: dict[str, CacheIndex]) -> Any:
        if batch.num_decodes < batch.num_requests:
            return reference.plan(spec, batch, index)
        lens, rows = batch.tensors.seq_lens.tolist(), batch.static_verify
        verify = None if rows is None else VerifyRows(*(tuple(x.tolist()) for x in vars(rows).values()))
        exact = BatchLayout((1,) * len(lens), tuple(max(1, n) for n in lens), batch.device, verify=verify)
        padding = batch.tensors.seq_lens == 0
        tables: dict[str, CacheIndex] = {}
        for name, one in index.items():
            tables[name] = one
            if isinstance(one, PageIndex):
                tables[name] = replace(one, table=one.table.masked_fill(padding[:, None], 0))
        return reference.plan(spec, exact, tables)

    return AttentionBackend(
        "reads-lengths", runs_anywhere, reference.run, plan=plan, in_graphs=True, store=reference.store
    )


def static_steps(running: Engine) -> ModelRunner:
    """Make an engine's decode steps and draft passes run on static buffers, as on a GPU."""
    size = running._executor.worker.load_plan.max_decodes  # type: ignore[attr-defined]
    return on_buffers(running, size, reads_lengths)
