"""Drafts that a test writes down before, for vLLM's `custom_class`: right ones, and wrong ones at known places."""

from __future__ import annotations

from typing import Any

# Whole texts: prompt and answer. Set before vLLM starts.
TEXTS: list[list[int]] = []


class ScriptedDrafts:
    """Drafts of each text's own next tokens; the token at every fifth position is another one."""

    def __init__(self, vllm_config: Any) -> None:
        self.count = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, target: Any) -> None:
        """Nothing; vLLM calls it."""

    def propose(self, sampled: list[list[int]], known: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]:
        """`known`: per request, how many of its `tokens` there are."""
        asked = [list(map(int, row[:n])) if new else [] for new, n, row in zip(sampled, known, tokens, strict=False)]
        return [self._drafts(text) if text else [] for text in asked]

    def _drafts(self, begun: list[int]) -> list[int]:
        start = len(begun)
        (text, *_) = [text for text in TEXTS if text[:start] == begun] or [[]]
        drafts = enumerate(text[start : start + self.count], start)
        return [(token + 1) % 300 if position % 5 == 0 else token for position, token in drafts]
