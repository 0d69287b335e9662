"""Checkpoints in a form that another library reads: FP8 weights written out in fp32 for as long as they are needed.

Transformers unpacks some FP8 layouts only, leaves them in one type whatever is asked for, and refuses (or shifts)
blocks that do not divide a weight. Here they are unpacked as the engine unpacks them.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.checkpoint.dequantize import dequantized
from allotrope.checkpoint.gguf import GgufCheckpoint
from allotrope.checkpoint.weight_formats import FP8_METHODS, quantization_of
from allotrope.errors import ModelError

# Bytes of a file, and of what is held in memory at a time.
_SHARD = 1 << 30


@contextmanager
def plain_files(path: Path, config: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A directory and its config: `path` and `config` themselves, or a copy without FP8 weights that goes at the end.

    `config`: in place of the directory's config.json. Raises ModelError if there is no room for the copy.
    """
    if path.is_file() or quantization_of(config).get("quant_method") not in FP8_METHODS:
        yield path, dict(config)
        return
    checkpoint = open_checkpoint(str(path))
    checkpoint.config = dict(config)
    with tempfile.TemporaryDirectory() as scratch:
        _write(dequantized(checkpoint), Path(scratch))
        plain = _unquantized(config)
        (Path(scratch) / "config.json").write_text(json.dumps(plain))
        for file in path.iterdir():
            # What else a model may need: its generation_config.json, its own code.
            if file.suffix in (".json", ".py") and not (Path(scratch) / file.name).exists():
                (Path(scratch) / file.name).symlink_to(file.resolve())
        yield Path(scratch), plain


@contextmanager
def dequantized_file(path: Path, config: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A directory with the plain weights of a GGUF file as its released checkpoint has them, and its config. It goes at
    the end.

    Raises ModelError if there is no room for it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = GgufCheckpoint(str(path))
        _write(checkpoint, Path(scratch), checkpoint.released())
        # A token that the file does not name would be that of another vocabulary.
        plain = {"pad_token_id": None, **config}
        (Path(scratch) / "config.json").write_text(json.dumps(plain))
        yield Path(scratch), plain


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    text = kept.get("text_config")
    return kept | {"text_config": _unquantized(text)} if isinstance(text, Mapping) else kept


def _write(checkpoint: Checkpoint, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
    """Write every tensor, in files of about `_SHARD` bytes. `tensors`: in place of those of the checkpoint's names."""
    headers = checkpoint.headers()
    need = sum(math.prod(header.shape) * header.dtype.itemsize for header in headers.values())
    free = shutil.disk_usage(directory).free
    if need > free:
        raise ModelError(
            f"cannot unpack {checkpoint.source} for Transformers",
            [f"its weights take {need / 1e9:.1f} GB in fp32, and {directory.parent} has {free / 1e9:.1f} GB free"],
        )
    places: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors or ((name, checkpoint.read(name)) for name in headers):
        held[name] = tensor.contiguous()
        if sum(tensor.nbytes for tensor in held.values()) >= _SHARD:
            _flush(held, directory, places)
    _flush(held, directory, places)
    index = {"metadata": {"total_size": need}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _flush(held: dict[str, torch.Tensor], directory: Path, places: dict[str, str]) -> None:
    if held:
        file = f"model-{len(set(places.values())):05d}.safetensors"
        save_file(held, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(held, file)
        held.clear()
