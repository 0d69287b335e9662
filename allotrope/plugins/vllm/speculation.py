"""Which of vLLM's methods of speculative decoding our models take part in. Imports nothing of vLLM.

vLLM says which drafts there are, and asks a model for several new tokens of a request at once. Caches with entries of
each token need nothing more, since those of rejected drafts are written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allotrope.architectures.registry import ARCHITECTURES
from allotrope.attention.cache_layout import CacheLayout, StateSlots
from allotrope.plugins.vllm.contract import DRAFT_HEADS, serves_draft_heads
from allotrope.plugins.vllm.translate import one_table

# Drafts of the text's own tokens, or of a class of the user's: made on the host, without the model's help.
_FROM_TEXT = ("ngram", "suffix", "custom_class")
_ON_GPU = "its drafts stay on the GPU, where they are not tested with Allotrope's models; ngram drafts the same"
_HIDDEN = "its draft model reads hidden states between layers, which Allotrope's models do not hand to vLLM"


def speculation_reasons(speculative: Any, source: str, layouts: Sequence[CacheLayout]) -> list[str]:
    """Why vLLM may not verify drafts with a model.

    `speculative`: vLLM's config of it. `source`: the model's path. `layouts`: of the model's caches.
    """
    method, reasons = speculative.method, []
    if method == "draft_model":
        reasons += _draft_model_reasons(speculative, layouts)
    elif method == "mtp":
        reasons += _draft_head_reasons(speculative, source)
    elif method not in _FROM_TEXT:
        reasons.append(f"speculative decoding by {method}: {_ON_GPU if method == 'ngram_gpu' else _HIDDEN}")
    if any(isinstance(layout, StateSlots) for layout in layouts):
        reasons.append(
            "speculative decoding with recurrent states: vLLM takes a rejected draft back by the state before it, and"
            " Allotrope's models keep one state a request"
        )
    return reasons


def _draft_model_reasons(speculative: Any, layouts: Sequence[CacheLayout]) -> list[str]:
    reasons = []
    unknown = [name for name in speculative.draft_model_config.architectures if name not in ARCHITECTURES]
    if unknown:
        reasons.append(f"speculative decoding by draft_model: {unknown[0]} is not among Allotrope's architectures")
    # Asked of the target, and of the draft model when that is made.
    if not one_table(layouts):
        reasons.append(
            "speculative decoding by draft_model: vLLM gives a draft model one block table, and caches with windows,"
            " states or several tokens an entry need more"
        )
    return reasons


def _draft_head_reasons(speculative: Any, source: str) -> list[str]:
    draft = speculative.draft_model_config
    if not serves_draft_heads():
        return ["speculative decoding by mtp: draft heads are served in vLLM 0.32 alone"]
    unknown = [name for name in draft.architectures if name not in DRAFT_HEADS]
    if unknown:
        return [f"speculative decoding by mtp: {unknown[0]} is not served (served: {', '.join(DRAFT_HEADS)})"]
    if draft.model != source:
        return [
            f"speculative decoding by mtp: the draft head is that of the model's own checkpoint, not of {draft.model}"
        ]
    return []
