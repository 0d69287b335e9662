"""Where a model's config and weights come from: one view of Hugging Face directories, GGUF files and hub ids.

Owns finding, opening and checking checkpoints. It must not know any architecture: it hands out the config as it stands
and tensors under their checkpoint names, and never decides what they are for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from allotrope.config import LoadFormat
from allotrope.errors import ConfigError, ModelError


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor before it is read: `shape` and `dtype` of what `read` returns, and bytes on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_bytes: int


class Checkpoint(Protocol):
    """A model at rest.

    `source`: path, for messages. `config`: contents of `config.json` (for other formats: the same facts under the same
    names), with overrides applied. `generation_config`: contents of `generation_config.json`, {} where there is none.
    `tokenizer_path`: what `allotrope.text.load_tokenizer` takes, None where the checkpoint brings no tokenizer.
    `has_weights`: False where none are wanted (`load_format='dummy'`); `headers` is then empty.
    """

    source: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_path: str | None
    has_weights: bool

    def headers(self) -> dict[str, TensorHeader]:
        """Header of every tensor by its Hugging Face name; no weight is read. Raises `ModelError` on damaged files."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU. Raises `ModelError` if there is none of that name."""
        ...


def open_checkpoint(
    model: str, *, revision: str | None = None, load_format: LoadFormat = "auto", hf_overrides: str | None = None
) -> Checkpoint:
    """Open `model`: a directory with `config.json`, a `.gguf` file, or a hub id.

    `revision`: branch, tag or commit of a hub id. `load_format`: `auto` takes the weights that are there; `safetensors`
    and `gguf` insist on theirs; `dummy` reads no weights (`has_weights` is False), and nothing else does without them.
    `hf_overrides`: JSON object merged over the config (see `override_config`).
    Raises `ModelError` with every reason why the model cannot be opened, `ConfigError` for options that make no sense.
    """
    path = locate(model, revision=revision, with_weights=load_format != "dummy")
    checkpoint = _open_file(path, load_format) if path.is_file() else _open_directory(path, load_format)
    if hf_overrides is not None:
        checkpoint.config = override_config(checkpoint.config, hf_overrides)
    return checkpoint


def locate(model: str, *, revision: str | None = None, with_weights: bool = True) -> Path:
    """The directory or file that `model` names; a hub id is looked up in the cache, and downloaded unless offline.

    `with_weights`: False leaves weight files out of a download. Raises `ModelError` if nothing is found.
    """
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError(f"bad options: revision={revision!r} is for hub ids, but {model} is on this machine.")
        return path
    from allotrope.checkpoint.hub import find_snapshot

    return find_snapshot(model, revision, with_weights=with_weights)


def override_config(config: dict[str, Any], overrides: str) -> dict[str, Any]:
    """`config` with the JSON object `overrides` put over it: values replace, objects under `*_config` keys are merged.

    Other objects are replaced whole: half of an old `rope_scaling` under a new one would be neither.
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
        # The released spelling of the same, which would win.
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
        found = ", ".join(sorted(p.name for p in path.glob("*.gguf"))) or "none"
        raise ModelError(
            f"cannot load {path}", [f"load_format='gguf' needs the .gguf file itself; in this directory: {found}"]
        )
    checkpoint = DirectoryCheckpoint(path, with_weights=load_format != "dummy")
    if load_format != "dummy" and not checkpoint.has_weights:
        raise ModelError(f"cannot load {path}", [checkpoint.no_weights])
    return checkpoint
