"""Opens checkpoints: one interface to Hugging Face directories, GGUF files and hub ids.

Owns finding, opening and checking checkpoints. It must not know any architecture: it returns the config unchanged, and
tensors by their names in the checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from allotrope.config import EngineConfig, LoadFormat
from allotrope.errors import ConfigError, ModelError
from allotrope.ops.matmul.weight import Format


@dataclass(frozen=True)
class TensorHeader:
    """Header of a tensor: `shape` and `dtype` of the tensor that `read` returns, and its bytes on disk.

    `format`: of the blocks that `Checkpoint.blocks` returns, None for a tensor that is not stored so.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_bytes: int
    format: Format | None = None


class Checkpoint(Protocol):
    """A stored model.

    `source`: path, for messages. `config`: contents of `config.json` with overrides applied (other formats are
    converted to the same keys). `generation_config`: contents of `generation_config.json`, or {}. `tokenizer_path`:
    argument of `allotrope.text.tokenizer.load_tokenizer`, or None if the checkpoint has no tokenizer. `has_weights`:
    False with `load_format='dummy'`; `headers` is then empty.
    """

    source: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_path: str | None
    has_weights: bool

    def headers(self) -> dict[str, TensorHeader]:
        """Header of every tensor by its Hugging Face name, without reading weights. Raises `ModelError` on damage."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU. Raises `ModelError` if no tensor has that name."""
        ...

    def blocks(self, name: str) -> torch.Tensor:
        """uint8 [.., rows, bytes of a row]: a tensor whose header has a format, as it is stored."""
        ...


class CheckpointView:
    """A `Checkpoint` that stands for `inner`. Subclasses change which tensors it has, or how they are read."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.source, self.config = inner.source, inner.config
        self.generation_config, self.tokenizer_path = inner.generation_config, inner.tokenizer_path
        self.has_weights = inner.has_weights

    def headers(self) -> dict[str, TensorHeader]:
        """As `Checkpoint.headers`."""
        return self.inner.headers()

    def read(self, name: str) -> torch.Tensor:
        """As `Checkpoint.read`."""
        return self.inner.read(name)

    def blocks(self, name: str) -> torch.Tensor:
        """As `Checkpoint.blocks`."""
        return self.inner.blocks(name)


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    hf_overrides: str | None = None,
    cache: str | None = None,
) -> Checkpoint:
    """Open `model`: a directory with `config.json`, a `.gguf` file, or a hub id.

    `revision`: branch, tag or commit of a hub id. `load_format`: `auto` reads either format; `safetensors` and `gguf`
    require theirs; `dummy` reads no weights (`has_weights` is False). `hf_overrides`: JSON object merged over the
    config (see `override_config`). `cache`: where hub ids are kept, None for Hugging Face's own place.
    Raises `ModelError` with every reason if the model cannot be opened, and `ConfigError` for contradictory options.
    """
    path = locate(model, revision=revision, with_weights=load_format != "dummy", cache=cache)
    checkpoint = _open_file(path, load_format) if path.is_file() else _open_directory(path, load_format)
    if hf_overrides is not None:
        checkpoint.config = override_config(checkpoint.config, hf_overrides)
    return checkpoint


def locate(model: str, *, revision: str | None = None, with_weights: bool = True, cache: str | None = None) -> Path:
    """The directory or file of `model`. A hub id is searched in the local cache, and downloaded unless offline.

    `with_weights`: False leaves weight files out of a download. `cache`: as for `open_checkpoint`. Raises
    `ModelError` if the model is not found.
    """
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError(f"bad options: revision={revision!r} is for hub ids, but {model} is on this machine.")
        return path
    from allotrope.checkpoint.hub import find_snapshot

    return find_snapshot(model, revision, with_weights=with_weights, cache=cache)


def tokenizer_path(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """The path of the model's tokenizer. Raises ModelError if neither the checkpoint nor --tokenizer gives one."""
    if config.tokenizer is not None:
        return str(locate(config.tokenizer, with_weights=False))
    if checkpoint.tokenizer_path is None:
        raise ModelError(checkpoint.source, ["it brings no tokenizer; give one with --tokenizer"])
    return checkpoint.tokenizer_path


def override_config(config: dict[str, Any], overrides: str) -> dict[str, Any]:
    """`config` with the values of the JSON object `overrides`. Objects under `*_config` keys are merged.

    Other objects are replaced whole, because a mixture of an old and a new `rope_scaling` would be neither.
    Raises `ConfigError` if `overrides` is not a JSON object.
    """
    try:
        parsed = json.loads(overrides)
    except json.JSONDecodeError as error:
        raise ConfigError(f"bad options: hf_overrides={overrides!r} is not JSON ({error}).") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"bad options: hf_overrides={overrides!r} is not a JSON object, such as '{{\"key\": 1}}'.")
    return _merged(config, parsed)


def _merged(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        nested = key.endswith("_config") and isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merged(old, value) if nested and isinstance(old, dict) else value
    if "rope_parameters" in overrides and "rope_scaling" not in overrides:
        # `rope_scaling` is the older spelling of the same, and would take precedence.
        merged.pop("rope_scaling", None)
    return merged


def _open_file(path: Path, load_format: LoadFormat) -> Checkpoint:
    reasons = []
    if path.suffix != ".gguf":
        reasons.append(f"a single file must be a .gguf file, this one is {path.suffix or 'without suffix'}")
    if load_format == "safetensors":
        reasons.append("load_format='safetensors' needs a directory; allowed for a file: auto, gguf, dummy")
    if reasons:
        raise ModelError(f"cannot load {path}", reasons)
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"cannot load {path}", ["GGUF files need the gguf package: pip install 'allotrope[gguf]'"]
        ) from error
    from allotrope.checkpoint.gguf import GgufCheckpoint

    return GgufCheckpoint(str(path), with_weights=load_format != "dummy")


def _open_directory(path: Path, load_format: LoadFormat) -> Checkpoint:
    from allotrope.checkpoint.directory import DirectoryCheckpoint

    if load_format == "gguf":
        files = ", ".join(sorted(p.name for p in path.glob("*.gguf"))) or "none"
        raise ModelError(
            f"cannot load {path}", [f"load_format='gguf' needs the .gguf file itself; in this directory: {files}"]
        )
    checkpoint = DirectoryCheckpoint(path, with_weights=load_format != "dummy")
    if load_format != "dummy" and not checkpoint.has_weights:
        raise ModelError(f"cannot load {path}", [checkpoint.no_weights])
    return checkpoint
