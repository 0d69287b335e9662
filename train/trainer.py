"""Training one model: the loss, the schedule, and steps that are CUDA graphs where there is a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from train.data import ANSWER_WEIGHT, PROMPT_WEIGHT, TEXT_WEIGHT, Rows
from train.decoders import Model
from train.layers import Pass

# Parts of the loss beside that of the next byte.
LOSS_WEIGHTS = {"mtp": 0.3, "balance": 0.01, "indexer": 1.0}


@dataclass(frozen=True)
class Schedule:
    """What a run does. `phases`: (part of the run at which it begins, {length: share of the steps}).

    `tokens`: per step. `peak`: learning rate after `warmup` steps, until the last part `decay` of the run, in which it
    falls to 0. `sparse_from`: part of the run after which indexers decide what is attended to. `rows`: query positions
    of a sequence at which they learn.
    """

    phases: tuple[tuple[float, dict[int, float]], ...] = (
        (0.0, {256: 0.5, 512: 0.5}),
        (0.3, {512: 0.3, 2048: 0.7}),
        (0.6, {2048: 0.5, 4096: 0.3, 16384: 0.2}),
    )
    tokens: int = 16384
    peak: float = 2e-3
    warmup: int = 100
    decay: float = 0.3
    sparse_from: float = 0.5
    rows: int = 128
    weight_decay: float = 0.1
    clip: float = 1.0

    def at_most(self, longest: int) -> Schedule:
        """The same with no rows longer than `longest`."""
        phases = []
        for start, shares in self.phases:
            cut: dict[int, float] = {}
            for length, share in shares.items():
                cut[min(length, longest)] = cut.get(min(length, longest), 0.0) + share
            phases.append((start, cut))
        return dataclasses.replace(self, phases=tuple(phases))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({length for _, shares in self.phases for length in shares}))

    def shares(self, progress: float) -> dict[int, float]:
        return [shares for start, shares in self.phases if start <= progress][-1]

    def rate(self, step: int, progress: float) -> float:
        return self.peak * min(1.0, (step + 1) / self.warmup) * min(1.0, max(0.0, 1 - progress) / self.decay)


@dataclass
class Batch:
    """The inputs of a step, at the same addresses in each. `tokens`, `answers`: [B, L + 1]. `rows`: of indexers."""

    tokens: torch.Tensor
    answers: torch.Tensor
    rows: torch.Tensor


@dataclass
class Log:
    """The loss curve: one entry at a time, averaged over the steps since the one before it."""

    entries: list[dict[str, float]] = field(default_factory=list)


def loss_of(model: Model, batch: Batch, sparse: bool) -> dict[str, torch.Tensor]:
    """All parts of the loss, each fp32. "next" is per byte, weighed as `data` says; "total" is what is minimized."""
    ids, targets = batch.tokens[:, :-1].long(), batch.tokens[:, 1:].long()
    positions = torch.arange(ids.shape[1], device=ids.device)
    step = Pass(ids, positions, sparse, batch.rows)
    kinds = batch.answers[:, 1:]
    weights = (kinds == 0) * TEXT_WEIGHT + (kinds == 1) * PROMPT_WEIGHT + (kinds == 2) * ANSWER_WEIGHT
    hidden = model.hidden(step)
    losses = _next_byte(model.logits(hidden), targets, kinds, weights)
    if model.mtp is not None:
        after = _next_byte(model.mtp_logits(hidden, step), targets[:, 1:], kinds[:, 1:], weights[:, 1:])
        losses["mtp"] = after["next"]
    losses |= step.losses
    total = losses["next"]
    for name, weight in LOSS_WEIGHTS.items():
        if name in losses:
            total = total + weight * losses[name]
    return losses | {"total": total}


def _next_byte(
    logits: torch.Tensor, targets: torch.Tensor, kinds: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    found = {"next": (each * weights).sum() / weights.sum()}
    for name, kind in (("text", 0), ("answers", 2)):
        chosen = kinds == kind
        found[name] = (each.detach() * chosen).sum() / chosen.sum().clamp_min(1)
    return found


class Trainer:
    """`rows`: of each length of the schedule. `graphs`: whether steps are CUDA graphs."""

    def __init__(self, model: Model, rows: dict[int, Rows], schedule: Schedule, seed: int, graphs: bool) -> None:
        self.model, self.schedule, self.graphs = model, schedule, graphs
        self.device = next(model.parameters()).device
        self.rows = {
            length: (torch.from_numpy(one.tokens).to(self.device), torch.from_numpy(one.answers).to(self.device))
            for length, one in rows.items()
        }
        self.rng = np.random.default_rng(seed)
        self.order = {length: self._endless(len(one.tokens)) for length, one in rows.items()}
        self.rate = torch.zeros((), device=self.device)
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self._groups(), lr=self.rate, betas=(0.9, 0.95), capturable=on_gpu, fused=on_gpu
        )
        self.batches: dict[int, Batch] = {}
        self.steps: dict[tuple[int, bool], Callable[[], dict[str, torch.Tensor]]] = {}
        self.pool = torch.cuda.graph_pool_handle() if graphs else None
        # A graph is captured on the stream of its warm-up, which must not be the default one: autograd accumulates a
        # gradient on the stream of the forward pass.
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.tokens_seen = self.step_count = 0
        self.has_indexer = any("indexer" in name for name, _ in model.named_parameters())

    def _groups(self) -> list[dict[str, object]]:
        matrices, others = [], []
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                plain = parameter.dim() < 2 or isinstance(module, nn.Embedding) or name == "ape"
                (others if plain else matrices).append(parameter)
        return [
            {"params": matrices, "weight_decay": self.schedule.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]

    def _endless(self, count: int) -> Iterator[int]:
        while True:
            yield from self.rng.permutation(count).tolist()

    def run(self, minutes: float | None, steps: int | None, log_every: int, say: Callable[[str], None]) -> Log:
        """Trains for a time, or for a number of steps, which repeats."""
        assert (minutes is None) != (steps is None)
        self.model.train()
        log, begun = Log(), time.perf_counter()
        sums: dict[str, torch.Tensor] = {}
        count = 0
        while True:
            elapsed = time.perf_counter() - begun
            progress = self.step_count / steps if steps else elapsed / (60 * (minutes or 1))
            if progress >= 1:
                break
            losses = self._step(progress)
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0) + loss
            count += 1
            if count == log_every:
                self._record(log, sums, count, begun, say)
                sums, count = {}, 0
        if count:
            self._record(log, sums, count, begun, say)
        return log

    def _record(
        self, log: Log, sums: dict[str, torch.Tensor], count: int, begun: float, say: Callable[[str], None]
    ) -> None:
        """Appends the mean losses of `count` steps. Raises SystemExit if they are not finite."""
        entry = {name: float(total) / count for name, total in sums.items()}
        if not entry["total"] < float("inf"):
            raise SystemExit(f"the loss is {entry['total']} after {self.step_count} steps")
        entry |= {"step": self.step_count, "tokens": self.tokens_seen, "seconds": time.perf_counter() - begun}
        log.entries.append(entry)
        say(" ".join(f"{name} {value:.4g}" for name, value in entry.items()))

    def _step(self, progress: float) -> dict[str, torch.Tensor]:
        schedule = self.schedule
        shares = schedule.shares(progress)
        length = int(self.rng.choice(list(shares), p=np.array(list(shares.values())) / sum(shares.values())))
        batch = self._fill(length)
        self.rate.fill_(schedule.rate(self.step_count, progress))
        self.step_count += 1
        self.tokens_seen += batch.tokens.shape[0] * length
        sparse = self.has_indexer and progress >= schedule.sparse_from
        if self.stream is None:
            return self._update(batch, sparse)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            if not self.graphs:
                losses = self._update(batch, sparse)
            else:
                key = (length, sparse)
                if key not in self.steps:
                    self.steps[key] = self._capture(batch, sparse)
                losses = self.steps[key]()
        current.wait_stream(self.stream)
        return losses

    def _fill(self, length: int) -> Batch:
        """The next rows of this length, written to the batch of this length."""
        tokens, answers = self.rows[length]
        count = max(1, self.schedule.tokens // length)
        if length not in self.batches:
            self.batches[length] = Batch(
                tokens.new_zeros(count, length + 1),
                answers.new_zeros(count, length + 1),
                torch.zeros(min(self.schedule.rows, length), dtype=torch.int64, device=self.device),
            )
        batch = self.batches[length]
        index = torch.tensor([next(self.order[length]) for _ in range(count)]).to(self.device, non_blocking=True)
        torch.index_select(tokens, 0, index, out=batch.tokens)
        torch.index_select(answers, 0, index, out=batch.answers)
        drawn = np.sort(self.rng.choice(length, len(batch.rows), replace=False))
        batch.rows.copy_(torch.from_numpy(drawn), non_blocking=True)
        return batch

    def _update(self, batch: Batch, sparse: bool) -> dict[str, torch.Tensor]:
        """One step. Returns the losses before it."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            losses = loss_of(self.model, batch, sparse)
        losses["total"].backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip, foreach=True)
        self.optimizer.step()
        return {name: loss.detach() for name, loss in losses.items()}

    def _capture(self, batch: Batch, sparse: bool) -> Callable[[], dict[str, torch.Tensor]]:
        """The step as a CUDA graph. It warms up with real updates, and gives their effect back."""
        # A copy with a gradient would keep the parameter's accumulator, and with it the stream that copied.
        kept = {tensor: tensor.detach().clone() for tensor in self._state()}
        for _ in range(2):
            self._update(batch, sparse)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            losses = self._update(batch, sparse)
        with torch.no_grad():
            for tensor in self._state():
                if tensor in kept:
                    tensor.copy_(kept[tensor])
                else:
                    # The optimizer had no state of this parameter before.
                    tensor.zero_()

        def replay() -> dict[str, torch.Tensor]:
            graph.replay()
            return {name: loss.clone() for name, loss in losses.items()}

        return replay

    def _state(self) -> Iterator[torch.Tensor]:
        """Every tensor that a step changes."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                for tensor in self.optimizer.state.get(parameter, {}).values():
                    if isinstance(tensor, torch.Tensor):
                        yield tensor
