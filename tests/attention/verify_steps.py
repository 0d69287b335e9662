"""Verify steps of speculative decoding, replayed as an engine would take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, BatchTensors, SlotIndex, VerifyRows, VerifyTensors
from allotrope.attention.check import Case
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay


@dataclass(frozen=True)
class Member:
    """One sequence of a step: its next token and `drafts`, of which the first `right` are its next tokens; or the next
    `prompt` tokens. `sequence` -1 is a padding row."""

    sequence: int
    drafts: int = 0
    right: int = 0
    prompt: int = 0


class VerifyReplay(Replay):
    """A `Replay` of a case whose only cache is a state.

    `replay`: of each sequence, the right drafts of its last step. `wrong`: inputs of wrong drafts.
    """

    def __init__(self, case: Case, backend: AttentionBackend, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(case, backend, device, seed)
        self.replay = [0] * len(case.lengths)
        self.wrong = case.inputs(seed + 1)

    def verify(self, members: Sequence[Member], static: bool = False, null_slot: int = 0) -> torch.Tensor:
        """Run one step, members with prompts last; returns its [T, ...] output. The outputs of right tokens are kept.
        `static`: as in a captured step, whose host knows no more than upper bounds."""
        query: list[int] = []
        seq: list[int] = []
        slots: list[int] = []
        first: list[int] = []
        rows: list[int] = []
        replay: list[int] = []
        pieces: list[dict[str, torch.Tensor]] = []
        kept: list[tuple[int, int, int]] = []
        for one in members:
            i, begin = one.sequence, len(query)
            if i < 0:
                for column, value in zip(
                    (query, seq, slots, first, rows, replay), (1, 1, null_slot, begin, 1, 0), strict=True
                ):
                    column.append(value)
                pieces.append({name: t[:1] for name, t in self.wrong.tokens.items()})
                continue
            self._take_pages(i, self.done[i] + 1)
            (slot,) = self.held["state"][i]
            new = one.prompt or one.right + 1
            kept.append((i, sum(query), new))
            at = self.begin[i] + self.done[i]
            pieces.append({name: t[at : at + new] for name, t in self.inputs.tokens.items()})
            count = 1 if one.prompt else 1 + one.drafts
            if not one.prompt:
                pieces.append({name: t[: one.drafts - one.right] for name, t in self.wrong.tokens.items()})
            query += [one.prompt or 1] * count
            seq += [self.done[i] + (one.prompt or 1 + k) for k in range(count)]
            first += [begin] * count
            rows += [count] + [0] * (count - 1)
            replay += [self.replay[i]] + [0] * (count - 1)
            slots += [slot] * count
            self.done[i] += new
            self.replay[i] = 0 if one.prompt else one.right
        batch = self._batch(query, seq, (first, rows, replay), static, [s > 0 for s in slots])
        plan = self.plan(batch, {"state": SlotIndex(torch.tensor(slots, device=self.device))})
        tokens = {name: torch.cat([p[name] for p in pieces]).to(self.device) for name in self.inputs.tokens}
        inputs = FAMILIES[self.spec.family].ready_inputs(self.spec, **tokens, **self.layer)
        out: torch.Tensor = self.backend.run(self.spec, plan, self.pools, inputs)
        for i, start, new in kept:
            self.outputs[i].append(out[start : start + new])
        return out

    def _batch(
        self,
        query: Sequence[int],
        seq: Sequence[int],
        columns: tuple[Sequence[int], Sequence[int], Sequence[int]],
        static: bool,
        real: Sequence[bool],
    ) -> BatchLayout:
        made = BatchLayout(tuple(query), tuple(seq), self.device, verify=VerifyRows(*map(tuple, columns)))
        if not static:
            return made
        lens = torch.tensor([n * on for n, on in zip(seq, real, strict=True)], dtype=torch.int32, device=self.device)
        tensors = BatchTensors(lens, made.tensors.query_start, made.positions, made.request_of_token)
        bounds = tuple(1 << 12 for _ in seq)
        alone = VerifyRows(tuple(range(len(seq))), (1,) * len(seq), (0,) * len(seq))
        verify = VerifyTensors(*(torch.tensor(one, dtype=torch.int32, device=self.device) for one in columns))
        return BatchLayout(tuple(query), bounds, self.device, tensors, alone, verify)


def plain_decodes(case: Case, backend: AttentionBackend, prompts: Sequence[int], device: str = "cpu") -> Replay:
    """The sequences one after the other: a prompt of so many tokens (0 for none), then token by token."""
    plain = Replay(case, backend, device)
    plain.held["state"] = [[slot] for slot in range(1, 1 + len(case.lengths))]
    for i, (prompt, length) in enumerate(zip(prompts, case.lengths, strict=True)):
        for new in [prompt] * (prompt > 0) + [1] * (length - prompt):
            plain.step([(i, new)])
    return plain
