"""Random GGUF models in the shape of released ones, for engines that read GGUF files.

    python bench/cpu/random_gguf.py 1.5b /tmp/1.5b.gguf
    python bench/cpu/random_gguf.py 7b /tmp/7b.gguf --types Q4_0

Blocks are made as they are stored, without a quantizer: uniform codes under scales that make a matrix's elements
N(0, 1 / inputs) in size. `Q4_K_M` mixes Q4_K and Q6_K over the layers as llama.cpp's quantizer does. The same seed
gives the same file. The tokenizer has all bytes and filler tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

Type = GGMLQuantizationType
_CHUNK_BLOCKS = 1 << 18


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense model. `tied`: embeddings are the head's matrix too."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    theta: float


SHAPES = {
    # Qwen2.5-1.5B with the norms of Qwen3.
    "1.5b": Shape("qwen3", 28, 1536, 8960, 12, 2, 128, 151936, True, 1e6),
    # Mistral-7B.
    "7b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 32000, False, 1e6),
    "tiny": Shape("llama", 2, 256, 512, 4, 2, 64, 1024, True, 1e4),
}
TYPES = ("Q4_K_M", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q8_0", "BF16")


def write_model(shape: Shape, types: str, path: Path, *, seed: int = 0) -> None:
    """Write the model to `path`, through a file beside it, so that one who looks sees none or a whole one."""
    scratch = path.with_name(path.name + ".part")
    writer = GGUFWriter(str(scratch), shape.architecture)
    _write_metadata(writer, shape)
    _write_tokenizer(writer, shape.vocabulary)
    random = np.random.default_rng(seed)
    tensors = _tensors(shape, types)
    for name, (dims, kind) in tensors.items():
        writer.add_tensor_info(name, _stored_shape(dims, kind), _stored_dtype(kind), _stored_bytes(dims, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for dims, kind in tensors.values():
        writer.write_tensor_data(_values(random, dims, kind))
    writer.close()
    scratch.replace(path)


def _tensors(shape: Shape, types: str) -> dict[str, tuple[tuple[int, ...], Type]]:
    """Tensor name -> shape, slowest dimension first, and type."""
    mixed = types == "Q4_K_M"
    usual = Type.Q4_K if mixed else Type[types]
    better = Type.Q6_K if mixed else usual
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, tuple[tuple[int, ...], Type]] = {
        "token_embd.weight": ((shape.vocabulary, shape.hidden), better if shape.tied else usual),
        "output_norm.weight": ((shape.hidden,), Type.F32),
    }
    if not shape.tied:
        found["output.weight"] = ((shape.vocabulary, shape.hidden), better)
    for layer in range(shape.layers):
        eighth = shape.layers // 8
        more_bits = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        kept = better if more_bits else usual
        norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
        if shape.architecture == "qwen3":
            norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        matrices = {
            "attn_q": ((query, shape.hidden), usual),
            "attn_k": ((key, shape.hidden), usual),
            "attn_v": ((key, shape.hidden), kept),
            "attn_output": ((shape.hidden, query), usual),
            "ffn_gate": ((shape.ffn, shape.hidden), usual),
            "ffn_up": ((shape.ffn, shape.hidden), usual),
            "ffn_down": ((shape.hidden, shape.ffn), kept),
        }
        found |= {f"blk.{layer}.{name}.weight": ((size,), Type.F32) for name, size in norms.items()}
        found |= {f"blk.{layer}.{name}.weight": entry for name, entry in matrices.items()}
    return found


def _stored_shape(dims: tuple[int, ...], kind: Type) -> tuple[int, ...]:
    """The shape of the array that holds the blocks: bytes in the last dimension where they are quantized."""
    block, size = GGML_QUANT_SIZES[kind]
    return dims if block == 1 else (*dims[:-1], dims[-1] // block * size)


def _stored_dtype(kind: Type) -> Any:
    return np.dtype(np.float32 if kind == Type.F32 else np.uint16 if kind == Type.BF16 else np.uint8)


def _stored_bytes(dims: tuple[int, ...], kind: Type) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(dims)) // block * size


def _values(random: np.random.Generator, dims: tuple[int, ...], kind: Type) -> np.ndarray:
    if kind == Type.F32:
        return np.ones(dims, np.float32)
    deviation = dims[-1] ** -0.5
    if kind == Type.BF16:
        values = (random.standard_normal(dims, np.float32) * np.float32(deviation)).view(np.uint32)
        return (values >> 16).astype(np.uint16)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = int(np.prod(dims)) // block
    stored = np.empty((blocks, size), np.uint8)
    for begin in range(0, blocks, _CHUNK_BLOCKS):
        part = stored[begin : begin + _CHUNK_BLOCKS]
        part[:] = np.frombuffer(random.bytes(part.size), np.uint8).reshape(part.shape)
        _SCALES[kind](part, deviation, random)
    return stored.reshape(*dims[:-1], dims[-1] // block * size)


def _half(value: np.ndarray | float, count: int) -> np.ndarray:
    """uint8 [count, 2]: `value` as float16 in each row."""
    return np.broadcast_to(np.float16(value), (count,)).copy().view(np.uint8).reshape(count, 2)


def _uniform(bits: int) -> float:
    """Standard deviation of a uniform code of `bits` bits."""
    return float(np.sqrt((4**bits - 1) / 12))


def _q4_0(blocks: np.ndarray, deviation: float, _: np.random.Generator) -> None:
    blocks[:, :2] = _half(deviation / _uniform(4), len(blocks))


def _q4_1(blocks: np.ndarray, deviation: float, _: np.random.Generator) -> None:
    scale = deviation / _uniform(4)
    blocks[:, :2] = _half(scale, len(blocks))
    blocks[:, 2:4] = _half(-7.5 * scale, len(blocks))


def _q8_0(blocks: np.ndarray, deviation: float, _: np.random.Generator) -> None:
    blocks[:, :2] = _half(deviation / _uniform(8), len(blocks))


def _packed_scales(blocks: np.ndarray, deviation: float, random: np.random.Generator, bits: int) -> None:
    """Scales of Q4_K and Q5_K: eight of six bits, with minima that centre the codes, under one factor of each."""
    scales = random.integers(32, 64, (len(blocks), 8), np.uint8)
    factor = deviation / (_uniform(bits) * 48)
    blocks[:, 0:2] = _half(factor, len(blocks))
    blocks[:, 2:4] = _half(factor * (2**bits - 1) / 2, len(blocks))
    low, high = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4 << 6)
    blocks[:, 12:16] = (high & 15) | (high & 15) << 4


def _q4_k(blocks: np.ndarray, deviation: float, random: np.random.Generator) -> None:
    _packed_scales(blocks, deviation, random, 4)


def _q5_k(blocks: np.ndarray, deviation: float, random: np.random.Generator) -> None:
    _packed_scales(blocks, deviation, random, 5)


def _q6_k(blocks: np.ndarray, deviation: float, random: np.random.Generator) -> None:
    blocks[:, 192:208] = random.integers(64, 128, (len(blocks), 16), np.uint8)
    blocks[:, 208:210] = _half(deviation / (_uniform(6) * 96), len(blocks))


_SCALES: dict[Type, Callable[[np.ndarray, float, np.random.Generator], None]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}


def _write_metadata(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    writer.add_vocab_size(shape.vocabulary)


def _write_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    """Bytes, one merge, fillers, and an end token, as a byte-level BPE."""
    bytes_ = _byte_characters()
    fillers = [f"[{i}]" for i in range(vocabulary - len(bytes_) - 2)]
    tokens = [*bytes_, bytes_[ord("t")] + bytes_[ord("h")], *fillers, "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself, or one beyond Latin-1."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("path", type=Path)
    parser.add_argument("--types", choices=TYPES, default="Q4_K_M")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    write_model(SHAPES[options.shape], options.types, options.path, seed=options.seed)
    size = options.path.stat().st_size
    print(f"wrote {options.path}: {size / 1e6:.0f} MB in {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
