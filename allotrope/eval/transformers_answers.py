"""What Transformers answers to the same items: plain implementations in float32, without a cache.

A greedy continuation needs one pass, not one for each token, where another one is its draft and agrees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from allotrope.checkpoint.checkpoint import locate, open_checkpoint
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.sampling_defaults import eos_ids
from allotrope.errors import ModelError
from allotrope.eval.answers import Answer, Answers
from allotrope.eval.items import Items, TextChunks
from allotrope.text.tokenizer import Tokenizer
from allotrope.verify.transformers_model import load_transformers


class LogitsModel(Protocol):
    """What is needed of Transformers' model."""

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[F, vocabulary] fp32 logits after each token of `ids`."""
        ...


def ask_transformers(
    config: EngineConfig,
    reference: str | None,
    load_plan: LoadPlan,
    tokenizer: Tokenizer,
    items: Items,
    drafts: Answers,
    log: Callable[[str], None],
) -> Answers:
    """Run all items. `reference`: model in place of the config's. `drafts`: answers that may be the same.

    Raises ModelError if Transformers cannot run the model.
    """
    started = time.monotonic()
    checkpoint = load_plan.checkpoint if reference is None else open_checkpoint(reference)
    path = locate(reference or config.model, revision=config.revision if reference is None else None)
    model = load_transformers(path, checkpoint.config, torch.float32, len(load_plan.specs))
    ends = {*tokenizer.eos_ids, *eos_ids(checkpoint.source, checkpoint.generation_config, checkpoint.config)}
    tasks: dict[str, tuple[Answer, ...]] = {}
    for name, asked in items.tasks.items():
        log(f"Transformers: {name}")
        tasks[name] = tuple(
            continue_greedily(model, tokenizer, item.ids, draft, item.max_tokens, ends)
            for item, draft in zip(asked, _drafts(drafts, name, len(asked)), strict=True)
        )
    log("Transformers: text")
    losses = () if items.text is None else tuple(text_losses(model, items.text))
    return Answers("transformers", tasks, losses, seconds=time.monotonic() - started)


def _drafts(answers: Answers, name: str, count: int) -> list[tuple[int, ...]]:
    return [answer.ids for answer in answers.tasks[name]] if name in answers.tasks else [()] * count


def continue_greedily(
    model: LogitsModel, tokenizer: Tokenizer, prompt: Sequence[int], draft: Sequence[int], count: int, ends: set[int]
) -> Answer:
    """At most `count` greedy tokens after `prompt`, to a newline or a token of `ends`. `draft`: tokens that are tried
    in one pass; the answer is the same without.
    """
    out: list[int] = []
    tried = list(draft)[: count - 1]
    while True:
        logits = model.logits([*prompt, *out, *tried])[len(prompt) + len(out) - 1 :]
        if not bool(logits.isfinite().all()):
            raise ModelError(
                "Transformers cannot be the baseline", [f"its logits of {len(prompt)} tokens are no numbers"]
            )
        for i, token in enumerate(logits.argmax(-1).tolist()):
            if token in ends:
                return Answer(tokenizer.decode(out), tuple(out))
            out.append(token)
            text = tokenizer.decode(out)
            if "\n" in text or len(out) == count:
                return Answer(text.partition("\n")[0], tuple(out))
            if i == len(tried) or token != tried[i]:
                break
        tried = []


def text_losses(model: LogitsModel, text: TextChunks) -> list[tuple[float, ...]]:
    """-log p of every token of each chunk but the first; NaN for that one."""
    losses = []
    for chunk in text.chunks:
        wanted = torch.tensor([*chunk.prompt, *chunk.forced])
        found = torch.nn.functional.cross_entropy(model.logits(chunk.fed), wanted[1:], reduction="none")
        losses.append((float("nan"), *found.tolist()))
    return losses
