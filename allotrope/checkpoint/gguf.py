"""Checkpoint in a GGUF file, with Hugging Face names and config. `read` dequantizes weights.

Owns the conversion of stored blocks to tensors. `gguf_architectures` knows the meaning of the metadata, `gguf_tensors`
where the values of a tensor are. Only this module imports the `gguf` package, so that other checkpoints do not need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from allotrope.checkpoint.checkpoint import TensorHeader
from allotrope.checkpoint.gguf_architectures import hf_config, read_architecture
from allotrope.checkpoint.gguf_keys import ROPE_FACTORS
from allotrope.checkpoint.gguf_released import RELEASED, merged
from allotrope.checkpoint.gguf_tensors import GgufNames, GgufView, views
from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile, GgufTensor
from allotrope.ops.matmul.gguf import GGUF_BLOCKS
from allotrope.ops.matmul.weight import Format

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
        # A vocabulary is larger than everything else here, and who reads texts opens the file anew.
        self._file = GgufFile(path, without="tokenizer.")
        self.source = path
        self.has_weights = with_weights
        self.tokenizer_path: str | None = path if "tokenizer.ggml.tokens" in self._file.metadata else None
        architecture = read_architecture(self._file)
        self._check_storage()
        factors = self._file.tensors.get(ROPE_FACTORS)
        self.config = hf_config(self._file, None if factors is None else self._dequantized(factors).astype(np.float64))
        self._check_layers()
        self._views = self._named_views(architecture.names)
        dtype = self._weight_dtype()
        if dtype is not None:
            self.config["torch_dtype"] = dtype
        self.generation_config: dict[str, Any] = {
            key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in self.config
        }

    def headers(self) -> dict[str, TensorHeader]:
        if not self.has_weights:
            return {}
        return {name: self._header(name, view) for name, view in self._views.items()}

    def _header(self, name: str, view: GgufView) -> TensorHeader:
        dtype = _PLAIN.get(view.sources[0].kind, torch.float32) if view.make is None else torch.float32
        parts = 1 if view.expert is None else view.sources[0].shape[0]
        if view.rows is not None:
            # A half of the rows has half of the bytes.
            parts *= view.sources[0].shape[view.expert is not None] // len(view.rows)
        size = sum(_stored_bytes(one) for one in view.sources) // parts
        return TensorHeader(name, view.shape, dtype, size, _block_format(view))

    def read(self, name: str) -> torch.Tensor:
        view = self._view(name)
        if view.make is not None:
            stored = [self._dequantized(one).astype(np.float32, copy=False) for one in view.sources]
            values = view.make(*(one if view.expert is None else one[view.expert] for one in stored))
            return _as_tensor(_selected(values, view).reshape(view.shape))
        (tensor,) = view.sources
        if tensor.kind == 30:
            bits = self._stored(view).view(np.int16)
            return _as_tensor(_selected(bits, view).reshape(view.shape)).view(torch.bfloat16)
        values = self._values(self._stored(view), tensor.kind)
        return _as_tensor(_selected(values, view).reshape(view.shape))

    def blocks(self, name: str) -> torch.Tensor:
        """As `Checkpoint.blocks`."""
        view = self._view(name)
        rows = self._stored(view)
        if view.rows is not None:
            rows = rows[view.rows]
        if view.columns is not None:
            values, size = block_sizes(view.sources[0].kind)
            whole = rows.reshape(len(rows), -1, size)[:, view.columns[::values] // values]
            rows = whole.reshape(len(rows), -1)
        return _as_tensor(rows)

    def released(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and plain value of each tensor as the released checkpoint has it."""
        merges = RELEASED.get(self._file.metadata["general.architecture"], ())
        return merged(list(self._views), self.read, merges, self.config)

    def _view(self, name: str) -> GgufView:
        if not self.has_weights or name not in self._views:
            raise ModelError(f"cannot read from {self.source}", [f"there is no tensor {name}"])
        return self._views[name]

    def _stored(self, view: GgufView) -> np.ndarray:
        """uint8 [..., bytes of a row]: the stored rows of a view of one tensor, of all experts or of its own."""
        rows = self._rows(view.sources[0])
        return rows if view.expert is None else rows[view.expert]

    def _rows(self, tensor: GgufTensor) -> np.ndarray:
        size = _stored_bytes(tensor)
        rows = self._file.raw(tensor, size)
        return rows.reshape(*tensor.shape[:-1], size // max(1, int(np.prod(tensor.shape[:-1]))))

    def _dequantized(self, tensor: GgufTensor) -> np.ndarray:
        return self._values(self._rows(tensor), tensor.kind).reshape(tensor.shape)

    def _values(self, rows: np.ndarray, kind: int) -> np.ndarray:
        """The values of stored rows, of which the last dimension is bytes."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        if kind == 0:
            return rows.view(np.float32)
        if kind == 1:
            return rows.view(np.float16)
        values: np.ndarray = dequantize(rows, GGMLQuantizationType(kind))
        return values

    def _named_views(self, names: GgufNames) -> dict[str, GgufView]:
        """Hugging Face name → view. Raises `ModelError` with every tensor that no rule covers."""
        try:
            found, unknown = views(self._file, names, self.config)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ModelError(f"cannot load {self.source}", [str(error)]) from error
        reasons = [
            f"the tensor {tensor.name} {list(tensor.shape)} is not understood"
            for tensor in unknown
            if tensor.name != ROPE_FACTORS
        ]
        if reasons:
            raise ModelError(f"cannot load {self.source}", reasons)
        return found

    def _check_storage(self) -> None:
        """Raise `ModelError` with every ggml type that cannot be read, or with tensors that have no whole blocks or lie
        beyond the file's end."""
        tensors = self._file.tensors.values()
        reasons = [reason for kind in sorted({t.kind for t in tensors}) if (reason := _refusal(kind))]
        if not reasons:
            reasons = [
                f"tensor {t.name} {list(t.shape)} has no whole number of blocks of {block_sizes(t.kind)[0]} in a row"
                for t in tensors
                if 0 in t.shape or t.shape[-1] % block_sizes(t.kind)[0]
            ][:3]
        if not reasons:
            reasons = [
                f"tensor {t.name} ends at byte {t.offset + _stored_bytes(t)}, the file has {self._file.sizes[t.path]}: "
                f"it is truncated; copy or download it again"
                for t in tensors
                if self.has_weights and t.offset + _stored_bytes(t) > self._file.sizes[t.path]
            ][:3]
        if reasons:
            raise ModelError(f"cannot load {self.source}", reasons)

    def _check_layers(self) -> None:
        """Raise `ModelError` if the metadata says more layers than there can be tensors of."""
        layers, tensors = self.config["num_hidden_layers"], len(self._file.tensors)
        if self.has_weights and layers > tensors:
            raise ModelError(
                f"cannot load {self.source}", [f"the metadata says {layers} layers, the file has {tensors} tensors"]
            )

    def _weight_dtype(self) -> str | None:
        """The dtype in which all matrices are stored, float32 if they have several, None if some are quantized."""
        kinds = {tensor.kind for tensor in self._file.tensors.values() if len(tensor.shape) > 1}
        if kinds - _PLAIN.keys():
            return None
        plain = _PLAIN[kinds.pop()] if len(kinds) == 1 else torch.float32
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


def _block_format(view: GgufView) -> Format | None:
    """The format of a matrix whose values lie in whole blocks; None for others."""
    kind = view.sources[0].kind
    if view.make is not None or len(view.shape) != 2 or kind not in _BLOCKS:
        return None
    if view.columns is not None:
        values, _ = block_sizes(kind)
        runs = view.columns.reshape(-1, values)
        if (runs[:, :1] + np.arange(values) != runs).any() or (runs[:, 0] % values).any():
            return None
    return GGUF_BLOCKS.get(_BLOCKS[kind])


def block_sizes(kind: int) -> tuple[int, int]:
    """Values and bytes of one block of a ggml type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return values, size


def _stored_bytes(tensor: GgufTensor) -> int:
    values, size = block_sizes(tensor.kind)
    return math.prod(tensor.shape) // values * size


def _selected(values: np.ndarray, view: GgufView) -> np.ndarray:
    """The rows and columns of a view."""
    if view.rows is not None:
        values = values[view.rows]
    return values if view.columns is None else values[:, view.columns]


def _as_tensor(values: np.ndarray) -> torch.Tensor:
    """`values` as a tensor. Read-only mapped pages are copied, because torch has no read-only tensors."""
    if values.flags.writeable and values.flags.c_contiguous:
        return torch.from_numpy(values)
    return torch.from_numpy(np.array(values, order="C"))
