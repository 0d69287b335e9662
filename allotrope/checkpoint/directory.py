"""Checkpoint in a Hugging Face directory: config.json, and safetensors in one file or in shards.

Owns the directory layout and the safetensors header. A tensor that `read` returns is mapped from the file, so memory
holds only the pages that are read.

Header format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from allotrope.checkpoint.checkpoint import TensorHeader
from allotrope.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
_MAX_HEADER = 100_000_000
# Messages list at most this many names.
_SHOWN = 5


class DirectoryCheckpoint:
    """See `Checkpoint` for the members. `no_weights`: the reason why there are no weights, if there are none.

    Raises `ModelError` if `config.json` is missing or broken, or shards of the index are missing.
    """

    def __init__(self, path: Path, *, with_weights: bool = True) -> None:
        self.source = str(path)
        self._path = path
        self.config: dict[str, Any] = self._config()
        generation = path / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json_object(generation) if generation.is_file() else {}
        self.tokenizer_path = str(path) if any((path / name).is_file() for name in _TOKENIZER_FILES) else None
        self._indexed: dict[str, str] = {}
        self._shards = self._find_shards() if with_weights else []
        self.has_weights = bool(self._shards)
        self.no_weights = "weights are not wanted (load_format='dummy')" if not with_weights else self._why_none()
        self._headers: dict[str, TensorHeader] | None = None
        self._shard_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}

    def headers(self) -> dict[str, TensorHeader]:
        if self._headers is None:
            self._headers = self._read_headers()
        return dict(self._headers)

    def read(self, name: str) -> torch.Tensor:
        if self._headers is None:
            self._headers = self._read_headers()
        if name not in self._shard_of:
            reason = f"there is no tensor {name}" if self.has_weights else f"{name}: {self.no_weights}"
            raise ModelError(f"cannot read from {self.source}", [reason])
        shard = self._shard_of[name]
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(str(shard), framework="pt", device="cpu")
            tensor: torch.Tensor = self._open[shard].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {shard}", [f"{name}: {error}"]) from error
        return tensor

    def blocks(self, name: str) -> torch.Tensor:
        """As `Checkpoint.blocks`."""
        raise ModelError(f"cannot read from {self.source}", [f"{name} is not stored in blocks"])

    def _config(self) -> dict[str, Any]:
        file = self._path / "config.json"
        if file.is_file():
            config, modelopt = read_json_object(file), self._path / "hf_quant_config.json"
            if "quantization_config" not in config and modelopt.is_file():
                # ModelOpt writes its quantization config to a file of its own.
                config["quantization_config"] = {"quant_method": "modelopt", **read_json_object(modelopt)}
            return config
        reasons = ["config.json is missing"]
        others = sorted(p.name for p in self._path.glob("*.gguf"))
        if others:
            reasons.append(f"it holds {', '.join(others[:_SHOWN])}: give such a file itself as the model")
        elif not any(self._path.iterdir()):
            reasons.append("the directory is empty")
        else:
            reasons.append("a Hugging Face model directory is needed: config.json, *.safetensors, tokenizer files")
        raise ModelError(f"cannot load {self.source}", reasons)

    def _find_shards(self) -> list[Path]:
        """Weight files in a fixed order. Raises `ModelError` with the files of the index that are missing."""
        index = self._path / _INDEX
        if not index.is_file():
            single = self._path / "model.safetensors"
            return [single] if single.is_file() else sorted(self._path.glob("model-*.safetensors"))
        self._indexed = read_json_object(index).get("weight_map", {})
        if not isinstance(self._indexed, dict) or not self._indexed:
            raise ModelError(f"cannot load {self.source}", [f"{_INDEX} has no weight_map"])
        if wrong := [name for name, shard in self._indexed.items() if not isinstance(shard, str) or not shard]:
            raise ModelError(f"cannot load {self.source}", [f"{_INDEX} names no file for {_some(sorted(wrong))}"])
        shards = [self._path / name for name in sorted(set(self._indexed.values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelError(
                f"cannot load {self.source}",
                [f"{len(missing)} of {len(shards)} shards named by {_INDEX} are missing: {_some(missing)}"],
            )
        return shards

    def _why_none(self) -> str:
        """The expected weight files, the files that are there instead, and the remedy."""
        missing = f"there is no model.safetensors, no model-*.safetensors and no {_INDEX} in {self.source}"
        pickles, tensors, gguf = (
            sorted(file.name for pattern in patterns for file in self._path.glob(pattern))
            for patterns in (("*.bin", "*.pt", "*.pth"), ("*.safetensors",), ("*.gguf",))
        )
        if gguf:
            return f"{missing}, but {_some(gguf)}: give such a file itself as the model"
        if tensors:
            return f"{missing}, but {_some(tensors)}: weights have to have one of these names"
        if pickles:
            return (
                f"{missing}, but {_some(pickles)}: pickles can run code and are not read. Convert them to safetensors: "
                f"load them with Transformers' AutoModelForCausalLM.from_pretrained({self.source!r}) and save them "
                f"with save_pretrained"
            )
        return f"{missing}. Download the weights, or give --load-format dummy for random ones (to verify: --random)"

    def _read_headers(self) -> dict[str, TensorHeader]:
        all_headers: dict[str, TensorHeader] = {}
        reasons: list[str] = []
        for shard in self._shards:
            try:
                headers = read_safetensors_headers(shard)
            except ModelError as error:
                reasons += [f"{shard.name}: {reason}" for reason in error.reasons]
                continue
            twice = sorted(headers.keys() & all_headers.keys())
            reasons += [f"{name} is in {self._shard_of[name].name} and in {shard.name}" for name in twice[:_SHOWN]]
            all_headers.update(headers)
            self._shard_of.update(dict.fromkeys(headers, shard))
        if not reasons:
            absent = sorted(name for name in self._indexed if name not in all_headers)
            if absent:
                reasons.append(f"{len(absent)} tensors of {_INDEX} are in no shard: {_some(absent)}")
        if reasons:
            raise ModelError(f"cannot load {self.source}", reasons)
        return all_headers


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises `ModelError` for other contents."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}", [str(error)]) from error
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {file}", [f"it holds a {type(value).__name__}; a JSON object is needed"])
    return value


def read_safetensors_headers(file: Path) -> dict[str, TensorHeader]:
    """Headers of the tensors in `file`, from its first bytes alone.

    Raises `ModelError` if the header is damaged, the file is truncated, or a dtype is unknown.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ModelError(f"cannot read {file}", [f"a header of {length} bytes in a file of {size}: damaged"])
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}", [str(error)]) from error
    if not isinstance(entries, dict):
        raise ModelError(f"cannot read {file}", ["its header is not a JSON object: damaged"])
    reasons: list[str] = []
    headers = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            shape, stored = tuple(entry["shape"]), entry["dtype"]
        except (KeyError, TypeError, ValueError) as error:
            reasons.append(f"the entry of {name} is damaged ({error!r})")
            continue
        if not isinstance(stored, str) or any(type(one) is not int or one < 0 for one in (begin, end, *shape)):
            reasons.append(f"the entry of {name} is damaged ({json.dumps(entry)[:200]})")
            continue
        if stored not in _DTYPES:
            reasons.append(f"{name} has dtype {stored}; allowed: {', '.join(_DTYPES)}")
            continue
        if 8 + length + end > size:
            reasons.append(f"{name} ends at byte {8 + length + end}, the file has {size}: truncated, copy it again")
            continue
        headers[name] = TensorHeader(name, _shape_in_memory(stored, shape), _DTYPES[stored], end - begin)
    if reasons:
        raise ModelError(f"cannot read {file}", reasons[:_SHOWN])
    return headers


def _shape_in_memory(stored: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    # In torch, one element of float4_e2m1fn_x2 holds two four-bit values.
    return (*shape[:-1], math.ceil(shape[-1] / 2)) if stored == "F4" and shape else shape


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
