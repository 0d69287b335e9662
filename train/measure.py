"""What a trained module can do, by forward passes of the module itself: loss of text and tasks, recall by distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from allotrope.eval.tasks import Example, make, task_rng
from train.data import SHORT_TASKS
from train.decoders import Model
from train.layers import Pass

DISTANCES = (32, 128, 512, 2048, 8192, 15000)
# Bytes of a row of text, and of the prompt of a short task.
TEXT_LENGTH, SHORT_LENGTH = 2048, 320
# Tokens of a forward pass.
_AT_ONCE = 32768


@torch.no_grad()
def logits_of(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """[B, T, vocabulary] fp32. `ids`: [B, T]."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        positions = torch.arange(ids.shape[1], device=device)
        return model.logits(model.hidden(Pass(ids.to(device), positions)))


def bits_per_byte(model: Model, source: bytes, rows: int) -> float:
    """Of `rows` evenly spaced rows of held-out text, each byte after the first."""
    length = min(TEXT_LENGTH, len(source))
    every = (len(source) - length) // rows
    total = 0.0
    for start in range(0, rows, batch := max(1, _AT_ONCE // length)):
        chosen = [source[i * every : i * every + length] for i in range(start, min(rows, start + batch))]
        ids = torch.tensor([list(row) for row in chosen])
        logits = logits_of(model, ids)
        target = ids[:, 1:].flatten().to(logits.device)
        total += float(F.cross_entropy(logits[:, :-1].flatten(0, 1), target, reduction="sum"))
    return total / math.log(2) / (rows * (length - 1))


def answered(model: Model, examples: Sequence[Example]) -> tuple[float, float]:
    """The part of `examples` whose last answer is greedily right, and the mean loss of its bytes in nats.

    An answer is right greedily if each of its bytes is likeliest after those before it.
    """
    right, loss, count = 0, 0.0, 0
    longest = max(len(example.text) for example in examples)
    batch = max(1, _AT_ONCE // longest)
    for first in range(0, len(examples), batch):
        chosen = examples[first : first + batch]
        ids = torch.tensor([list(one.text.ljust(longest, b"\n")) for one in chosen])
        logits = logits_of(model, ids).cpu()
        for row, example in enumerate(chosen):
            start, end = example.spans[-1]
            wanted, got = ids[row, start:end], logits[row, start - 1 : end - 1]
            right += bool((got.argmax(-1) == wanted).all())
            loss += float(F.cross_entropy(got, wanted, reduction="sum"))
            count += end - start
    return right / len(examples), loss / count


def measure(model: Model, held_out: bytes, items: int, longest: int) -> dict[str, Any]:
    """`items`: per task and per distance. `longest`: prompt in bytes."""
    model.eval()
    found: dict[str, Any] = {"text_bits_per_byte": bits_per_byte(model, held_out, items), "tasks": {}, "recall": {}}
    for task in SHORT_TASKS:
        examples = [make(task, task_rng("eval", task, i), min(SHORT_LENGTH, longest)) for i in range(items)]
        accuracy, loss = answered(model, examples)
        found["tasks"][task] = {"accuracy": accuracy, "loss": loss}
    for distance in DISTANCES:
        length = min(longest, max(256, distance + distance // 8))
        if distance >= length:
            continue
        examples = [make("recall", task_rng("eval", "recall", i), length, distance) for i in range(items)]
        accuracy, loss = answered(model, examples)
        found["recall"][str(distance)] = {"accuracy": accuracy, "loss": loss, "prompt": length}
    if model.mtp is not None:
        found["mtp_agreement"] = _mtp_agreement(model, held_out, items)
    return found


@torch.no_grad()
def _mtp_agreement(model: Model, source: bytes, rows: int) -> float:
    """How often the MTP layer's likeliest byte is the one that the model itself finds likeliest there."""
    device = next(model.parameters()).device
    length = min(512, len(source) // 2)
    starts = [i * ((len(source) - length) // rows) for i in range(rows)]
    ids = torch.tensor([list(source[start : start + length]) for start in starts], device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        step = Pass(ids, torch.arange(length, device=device))
        hidden = model.hidden(step)
        own, drafted = model.logits(hidden).argmax(-1), model.mtp_logits(hidden, step).argmax(-1)
    return float((own[:, 1:] == drafted).float().mean())
