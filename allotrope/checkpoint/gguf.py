"""Checkpoint in a GGUF file, with Hugging Face names and config. `read` dequantises weights.

Owns the conversion of stored blocks to tensors. `gguf_architectures` knows the meaning of the metadata. Only this
module imports the `gguf` package, so that other checkpoints do not need it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from allotrope.checkpoint.checkpoint import TensorHeader
from allotrope.checkpoint.gguf_architectures import ROPE_FACTORS, hf_config, hf_tensor_name, read_architecture
from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile, GgufTensor
from allotrope.ops.matmul.gguf import GGUF_BLOCKS

# ggml types without quantisation. Every other type is quantised, and `read` returns it as float32.
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# ggml types whose blocks can be multiplied as they are.
_BLOCKS = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    20: "iq4_nl", 23: "iq4_xs", 39: "mxfp4_gguf",
}  # fmt: skip


class GgufCheckpoint:
    """See `Checkpoint` for the members. Raises `ModelError` for a damaged file and for unknown metadata or tensors."""

    def __init__(self, path: str, *, with_weights: bool = True) -> None:
        self._file = GgufFile(path)
        parts = self._file.metadata.get("split.count", 1)
        if parts > 1:
            raise ModelError(
                f"cannot load {path}",
                [f"split.count={parts}: it is one of several files; join them with llama-gguf-split --merge"],
            )
        self.source = path
        self.has_weights = with_weights
        self.tokenizer_path: str | None = path if "tokenizer.ggml.tokens" in self._file.metadata else None
        self._interleaved = read_architecture(self._file).interleaved_rope
        self._tensors = self._named_tensors()
        self._check_storage()
        factors = self._file.tensors.get(ROPE_FACTORS)
        self.config = hf_config(self._file, None if factors is None else self._dequantised(factors).astype(np.float64))
        self.config["torch_dtype"] = self._weight_dtype()
        self.generation_config: dict[str, Any] = {
            key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in self.config
        }

    def headers(self) -> dict[str, TensorHeader]:
        if not self.has_weights:
            return {}
        return {
            name: TensorHeader(
                *(name, tensor.shape, _PLAIN.get(tensor.kind, torch.float32), _stored_bytes(tensor)),
                GGUF_BLOCKS.get(_BLOCKS.get(tensor.kind, "")) if len(tensor.shape) > 1 else None,
            )
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        if not self.has_weights or name not in self._tensors:
            raise ModelError(f"cannot read from {self.source}", [f"there is no tensor {name}"])
        tensor = self._tensors[name]
        heads = self._heads_to_split(name, tensor.shape[0])
        if tensor.kind == 30:
            bits = self._rows(tensor).view(np.int16).reshape(tensor.shape)
            return _as_tensor(bits if heads is None else _split_halves(bits, heads)).view(torch.bfloat16)
        values = self._dequantised(tensor)
        return _as_tensor(values if heads is None else _split_halves(values, heads))

    def blocks(self, name: str) -> torch.Tensor:
        """As `Checkpoint.blocks`."""
        tensor = self._tensors[name]
        rows = self._rows(tensor)
        heads = self._heads_to_split(name, tensor.shape[0])
        return _as_tensor(rows if heads is None else _split_halves(rows, heads))

    def _heads_to_split(self, name: str, rows: int) -> int | None:
        """The number of heads whose rows the file stores as rotation pairs, or None if it stores them as halves."""
        counts = {".self_attn.q_proj.": "num_attention_heads", ".self_attn.k_proj.": "num_key_value_heads"}
        key = next((count for projection, count in counts.items() if projection in name), None)
        if key is None or not self._interleaved:
            return None
        heads: int = self.config[key]
        if rows % (2 * heads):
            raise ModelError(f"cannot read from {self.source}", [f"{name} has {rows} rows for {heads} heads"])
        return heads

    def _rows(self, tensor: GgufTensor) -> np.ndarray:
        size = _stored_bytes(tensor)
        rows = self._file.raw(tensor, size)
        return rows.reshape(*tensor.shape[:-1], size // max(1, int(np.prod(tensor.shape[:-1]))))

    def _dequantised(self, tensor: GgufTensor) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = self._rows(tensor)
        if tensor.kind == 0:
            return rows.view(np.float32).reshape(tensor.shape)
        if tensor.kind == 1:
            return rows.view(np.float16).reshape(tensor.shape)
        values: np.ndarray = dequantize(rows, GGMLQuantizationType(tensor.kind))
        return values.reshape(tensor.shape)

    def _named_tensors(self) -> dict[str, GgufTensor]:
        """Hugging Face name → `GgufTensor`. Raises `ModelError` with every tensor that no rule covers."""
        named, unknown = {}, []
        for tensor in self._file.tensors.values():
            name = hf_tensor_name(tensor.name)
            if name is not None:
                named[name] = tensor
            elif tensor.name != ROPE_FACTORS:
                unknown.append(f"the tensor {tensor.name} {list(tensor.shape)} is not understood")
        if unknown:
            raise ModelError(f"cannot load {self.source}", unknown)
        return named

    def _check_storage(self) -> None:
        """Raise `ModelError` with every ggml type that cannot be read, or with tensors beyond the file's end."""
        reasons = [reason for kind in sorted({t.kind for t in self._tensors.values()}) if (reason := _refusal(kind))]
        if not reasons:
            reasons = [
                f"tensor {t.name} ends at byte {t.offset + _stored_bytes(t)}, the file has {self._file.size}: it is "
                f"truncated; copy or download it again"
                for t in self._tensors.values()
                if self.has_weights and t.offset + _stored_bytes(t) > self._file.size
            ][:3]
        if reasons:
            raise ModelError(f"cannot load {self.source}", reasons)

    def _weight_dtype(self) -> str:
        """The dtype in which all matrices are stored, or float32 if they are quantised or have several types."""
        kinds = {tensor.kind for tensor in self._tensors.values() if len(tensor.shape) > 1}
        plain = _PLAIN.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
        return str(plain).removeprefix("torch.")


def _refusal(kind: int) -> str | None:
    """The reason why tensors of this ggml type cannot be read, or None."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    if kind in _PLAIN:
        return None
    if kind not in set(GGMLQuantizationType):
        return f"tensors are stored as ggml type {kind}, which the installed gguf package does not know"
    ggml_type = GGMLQuantizationType(kind)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return f"tensors are stored as {ggml_type.name}, which the installed gguf package cannot dequantise"
    return None


def _stored_bytes(tensor: GgufTensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return int(np.prod(tensor.shape, dtype=np.int64)) // block * block_bytes


def _split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows from rotation pairs (0, 1), (2, 3), ... to halves.

    out[h, i, j] = rows[h, j, i] for i < 2, j < D/2. `rows`: [H*D, ...] of a projection's weight or bias.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _as_tensor(values: np.ndarray) -> torch.Tensor:
    """`values` as a tensor. Read-only mapped pages are copied, because torch has no read-only tensors."""
    if values.flags.writeable and values.flags.c_contiguous:
        return torch.from_numpy(values)
    return torch.from_numpy(np.array(values, order="C"))
