"""A byte-level tokenizer for tiny checkpoints, and text that such a checkpoint finds likely."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from tiny_checkpoints import TinyCheckpoint
from tokenizers import decoders, models, pre_tokenizers


def add_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer of one token a byte, with BOS before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@torch.inference_mode()
def likely_text(checkpoint: TinyCheckpoint, size: int, seed: int = 0) -> str:
    """`size` printable characters, each drawn from what the model says after those before it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint.directory / "tokenizer.json"))
    printable = [tokenizer.token_to_id(chr(code)) for code in range(33, 127)]
    torch.manual_seed(seed)
    ids = [printable[0]]
    cache = None
    while len(ids) < size:
        out = checkpoint.model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        chances = out.logits[0, -1, printable].double().softmax(-1)
        ids.append(printable[int(torch.multinomial(chances, 1))])
    return "".join(str(tokenizer.id_to_token(token)) for token in ids)
