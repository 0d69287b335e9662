"""The vocabulary of a model that is loaded, for the grammars of its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from allotrope.checkpoint.checkpoint import Checkpoint, tokenizer_path
from allotrope.config import EngineConfig
from allotrope.grammars.vocabulary import Vocabulary, read_vocabulary
from allotrope.text.tokenizer import load_tokenizer


def load_vocabulary(
    config: EngineConfig, checkpoint: Checkpoint, vocab_size: int, eos_ids: Sequence[int]
) -> Vocabulary:
    """The tokens of a model that scores `vocab_size` ids: see `read_vocabulary`. Raises ModelError if there is none."""
    return read_vocabulary(load_tokenizer(tokenizer_path(config, checkpoint)), vocab_size, eos_ids)
