"""Verify steps on a CPU: recurrent states by replay.

A state cannot be taken back. So the slot of a sequence holds its state after the first token of its last step, and
beside it the inputs of that step's drafts. For a sequence with the requests x0, d1 .. dk, of whose kept drafts `replay`
turned out to be right, a step does

    S <- the `replay` first kept drafts, then x0        in the slot
    kept drafts <- the inputs of d1 .. dk
    S' <- S, then d1 .. dk                              in a copy that ends with the step

Each token is one plain decode, so that outputs and states have the bits of plain decoding. Source: "recurrent states by
replay" is ours; SGLang and vLLM store a state after every draft instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.batch import BatchLayout
from allotrope.attention.gdn.inputs import GdnInputs
from allotrope.attention.gdn.spec import GdnSpec

Pools = Mapping[str, torch.Tensor]
Decode = Callable[[Pools, torch.Tensor, GdnInputs], torch.Tensor]
"""Advances the states in `slots` [n] of some pools by one token each; returns [n, Hv, Dv]."""

STATE_FIELDS = ("conv", "ssm")


@dataclass(frozen=True)
class VerifyPlan:
    """The decodes of a verify step, n sequences with a slot. All tensors are int64.

    `new_slots`: slots that are cleared first, or None. `replays`: for each kept draft, the slots of the sequences that
    replay it. `tokens`, `slots`: [n] the first token of each sequence, and its slot. `drafts`: for each draft, tokens
    and slots of the sequences that have it, which are among those of the draft before.
    """

    new_slots: torch.Tensor | None
    replays: tuple[torch.Tensor, ...]
    tokens: torch.Tensor
    slots: torch.Tensor
    drafts: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def holds_drafts(spec: GdnSpec, batch: BatchLayout) -> bool:
    """Whether a step has to keep and replay drafts. Raises ValueError if it has more of them than the state keeps."""
    if batch.verify is not None:
        drafts, replay = max(batch.verify.num_rows, default=1) - 1, max(batch.verify.replay, default=0)
        if max(drafts, replay) > spec.max_drafts:
            raise ValueError(f"gdn: a step has {drafts} drafts and replays {replay}; max_drafts={spec.max_drafts}")
    return spec.max_drafts > 0 and (batch.verify is not None or batch.static_verify is not None)


def plan_verify(batch: BatchLayout, slots: Sequence[int]) -> VerifyPlan:
    """Plan the decodes of a step. `slots`: of all its requests; those of 0 or less are padding."""
    assert batch.verify is not None
    num_rows, replay = batch.verify.num_rows, batch.verify.replay
    firsts = [b for b in range(batch.num_decodes) if num_rows[b] and slots[b] > 0]

    def index(rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=batch.device)

    new = [b for b in firsts if batch.context_lens[b] == 0]
    drafts = []
    for i in range(1, max((num_rows[b] for b in firsts), default=1)):
        members = [b for b in firsts if num_rows[b] > i]
        drafts.append((index([b + i for b in members]), index([slots[b] for b in members])))
    return VerifyPlan(
        index([slots[b] for b in new]) if new else None,
        tuple(
            index([slots[b] for b in firsts if replay[b] > i])
            for i in range(max((replay[b] for b in firsts), default=0))
        ),
        index(firsts),
        index([slots[b] for b in firsts]),
        tuple(drafts),
    )


def run_verify(plan: VerifyPlan, pools: Pools, inputs: GdnInputs, decode: Decode, out: torch.Tensor) -> None:
    """Run the decodes of a step. `pools`: every field of the state slots. `out`: [T, Hv, Dv], overwritten at the tokens
    of the plan."""
    if plan.new_slots is not None:
        for pool in pools.values():
            pool.index_fill_(0, plan.new_slots, 0)
    for i, slots in enumerate(plan.replays):
        kept = (pools[name][slots, i] for name in ("draft_qkv", "draft_b", "draft_a"))
        decode(pools, slots, _with_tokens(inputs, *kept))
    if len(plan.slots):
        _decode_tokens(decode, pools, plan.slots, inputs, plan.tokens, out)
    if not plan.drafts:
        return
    _, with_drafts = plan.drafts[0]
    # Slot 0 stays the null slot.
    copied = torch.cat((with_drafts.new_zeros(1), with_drafts))
    copies = {name: pools[name].index_select(0, copied) for name in STATE_FIELDS}
    copy_of = {slot: copy for copy, slot in enumerate(copied.tolist())}
    for i, (tokens, slots) in enumerate(plan.drafts):
        for name, new in (("draft_qkv", inputs.qkv), ("draft_b", inputs.b), ("draft_a", inputs.a)):
            pools[name][slots, i] = new[tokens].to(pools[name].dtype)
        chosen = slots.new_tensor([copy_of[slot] for slot in slots.tolist()])
        _decode_tokens(decode, copies, chosen, inputs, tokens, out)


def _decode_tokens(
    decode: Decode, pools: Pools, slots: torch.Tensor, inputs: GdnInputs, tokens: torch.Tensor, out: torch.Tensor
) -> None:
    chosen = _with_tokens(inputs, inputs.qkv[tokens], inputs.b[tokens], inputs.a[tokens])
    out[tokens] = decode(pools, slots, chosen).to(out.dtype)


def _with_tokens(inputs: GdnInputs, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> GdnInputs:
    """The layer's inputs with the projections of other tokens."""
    return dataclasses.replace(inputs, qkv=qkv, b=b, a=a)
