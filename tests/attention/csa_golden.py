"""Compressed sparse attention of one sequence, token by token in float64: the equations, and nothing clever.

Shares no code with the package but the frequencies of the rotation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from allotrope.attention.csa import CsaSpec
from allotrope.ops.rope import inverse_frequencies


@dataclass(frozen=True)
class Wrong:
    """Faults that may be put in, each a known one: all off is the right answer."""

    rope_at_last_token: bool = False
    rope_at_entry_number: bool = False
    halves_swapped: bool = False
    first_previous_scores_zero: bool = False
    bias_by_offset: int = 0
    no_sink: bool = False
    window_plus: int = 0
    visible_plus: int = 0
    not_turned_back: bool = False
    topk_plus: int = 0


RIGHT = Wrong()


def turn(spec: CsaSpec, row: torch.Tensor, position: int) -> torch.Tensor:
    out, first = row.clone(), row.shape[-1] - spec.rope.dim
    angle = position * inverse_frequencies(spec.rope).double()
    a, b = row[..., first::2], row[..., first + 1 :: 2]
    out[..., first::2] = a * angle.cos() - b * angle.sin()
    out[..., first + 1 :: 2] = b * angle.cos() + a * angle.sin()
    return out


def entries_of(
    spec: CsaSpec, kv_score: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor, wrong: Wrong
) -> list[torch.Tensor]:
    """The entries of one compressor, in order. `kv_score`: [n, 2 * streams * d]."""
    r, d = spec.ratio, norm.shape[0]
    entries = []
    for t in range(r - 1, len(kv_score), r):
        kvs, scores = [], []
        for j in range(t - spec.streams * r + 1, t + 1):
            own = j > t - r
            stream = int(own) if spec.overlap else 0
            if wrong.halves_swapped and spec.overlap:
                stream = 1 - stream
            kv, score = torch.zeros(d, dtype=torch.float64), torch.full((d,), -math.inf, dtype=torch.float64)
            if j < 0 and wrong.first_previous_scores_zero:
                score = torch.zeros_like(kv)
            if j >= 0:
                row, half = kv_score[j], slice(stream * d, (stream + 1) * d)
                kv = row[: spec.streams * d][half]
                score = row[spec.streams * d :][half] + bias[(j + wrong.bias_by_offset) % r][half]
            kvs.append(kv)
            scores.append(score)
        entry = (torch.softmax(torch.stack(scores), 0) * torch.stack(kvs)).sum(0)
        entry = entry / torch.sqrt((entry * entry).mean() + spec.norm_eps) * norm
        position = t if wrong.rope_at_last_token else t // r if wrong.rope_at_entry_number else t // r * r
        entries.append(turn(spec, entry, position))
    return entries


def attend_all(
    spec: CsaSpec, tokens: dict[str, torch.Tensor], layer: dict[str, torch.Tensor | None], wrong: Wrong = RIGHT
) -> torch.Tensor:
    """[n, H, D] of one sequence. `tokens`: its inputs, [n, ...] each. `layer`: the layer's tensors."""
    tokens = {name: tensor.double() for name, tensor in tokens.items()}
    weights = {name: tensor.double() for name, tensor in layer.items() if tensor is not None}
    entries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    if spec.ratio:
        entries = entries_of(spec, tokens["kv_score"], weights["position_bias"], weights["entry_norm"], wrong)
    if spec.indexer:
        bias, norm = weights["index_position_bias"], weights["index_entry_norm"]
        keys = entries_of(spec, tokens["index_kv_score"], bias, norm, wrong)
    rows = [turn(spec, row, p) for p, row in enumerate(tokens["kv"])]
    outputs = []
    for p in range(len(rows)):
        visible = min(len(entries), (p + 1 + wrong.visible_plus) // spec.ratio) if spec.ratio else 0
        chosen = list(range(visible))
        if spec.indexer and visible > spec.indexer.topk:
            iq = turn(spec, tokens["index_q"][p], p)
            scale = spec.indexer.head_dim**-0.5 * spec.indexer.num_heads**-0.5
            scores = [float((tokens["index_weights"][p] * torch.relu(iq @ keys[e])).sum()) * scale for e in chosen]
            chosen = sorted(chosen, key=lambda e: (-scores[e], e))[: spec.indexer.topk + wrong.topk_plus]
        seen = rows[max(0, p - spec.window - wrong.window_plus + 1) : p + 1] + [entries[e] for e in chosen]
        stack = torch.stack(seen)
        logits = turn(spec, tokens["q"][p], p) @ stack.T * spec.scale
        powers = torch.exp(logits)
        total = powers.sum(-1) + (0.0 if wrong.no_sink else torch.exp(weights["sinks"]))
        out = powers @ stack / total[:, None]
        outputs.append(out if wrong.not_turned_back else turn(spec, out, -p))
    return torch.stack(outputs)
