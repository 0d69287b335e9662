"""The tokens of a model as a grammar sees them: bytes, special tokens, and the ids that end an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allotrope.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """`tokens`: bytes of each id that the model scores, b"" for one without text. `special_ids`: ids that no text
    becomes. `eos_ids`: ids that end an output, at least one.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]

    @property
    def special_texts(self) -> dict[str, int]:
        """Text of each special token -> its id."""
        return {self.tokens[i].decode("utf-8", "replace"): i for i in sorted(self.special_ids) if self.tokens[i]}


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model whose output layer scores `vocab_size` ids.

    `eos_ids`: those of the checkpoint; the tokenizer's own come behind them.
    """
    tokens = tuple(tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(vocab_size))
    ends = dict.fromkeys((*eos_ids, *tokenizer.eos_ids))
    return Vocabulary(
        tokens=tokens,
        special_ids=frozenset(i for i in (*tokenizer.special_ids, *ends) if i < vocab_size),
        eos_ids=tuple(i for i in ends if i < vocab_size),
    )
