"""The tokenizer of all models: a token is a byte, and its id the byte's value. Three special tokens follow."""

from __future__ import annotations

import json
from pathlib import Path

from train.configs import BOS, EOS, PAD

SPECIAL = {BOS: "<bos>", EOS: "<eos>", PAD: "<pad>"}


def _characters() -> list[str]:
    """The character by which byte-level BPE writes each byte: itself where it is printable, else one above 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def write_tokenizer(folder: Path, length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json. `length`: the model's context."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL[i], special=True) for i in sorted(SPECIAL)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS], "pad_token": SPECIAL[PAD]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
