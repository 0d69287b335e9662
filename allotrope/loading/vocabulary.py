"""A model's vocabulary as grammars see it: the one place where tokenizer and checkpoint meet for the engine."""

from __future__ import annotations

from collections.abc import Sequence

from allotrope.checkpoint.checkpoint import Checkpoint, tokenizer_path
from allotrope.config import EngineConfig
from allotrope.grammars.vocabulary import Vocabulary, read_vocabulary
from allotrope.text.tokenizer import load_tokenizer


def load_vocabulary(
    config: EngineConfig, checkpoint: Checkpoint, vocab_size: int, eos_ids: Sequence[int]
) -> Vocabulary:
    """The vocabulary of a model that scores `vocab_size` ids. `eos_ids`: those of the checkpoint. Raises ModelError."""
    return read_vocabulary(load_tokenizer(tokenizer_path(config, checkpoint)), vocab_size, eos_ids)
