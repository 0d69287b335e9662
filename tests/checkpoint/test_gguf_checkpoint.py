"""GGUF files against Transformers' reading of the same file, and every way in which they can be broken."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allotrope.checkpoint.checkpoint import open_checkpoint
from allotrope.checkpoint.gguf_keys import llama3_rope_factors
from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 32, 40, 2
# Transformers does not read this key for Qwen3 and takes 128 for granted.
HEAD_DIMS = {"llama": HEAD_DIM, "qwen3": 128}
WriteGguf = Callable[..., str]


def metadata_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a small model; `changes` by key, with `__` for `.`; None takes a key out."""
    head_dim = HEAD_DIMS.get(architecture, HEAD_DIM)
    entries: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": GROUPS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 5000.0,
        "vocab_size": VOCAB,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    if architecture == "llama":
        entries["rope.dimension_count"] = HEAD_DIM
    metadata = {f"{architecture}.{key}": value for key, value in entries.items() if value is not None}
    tokens = {"tokens": [f"t{i}" for i in range(VOCAB)], "eos_token_id": 2, "eot_token_id": 3, "bos_token_id": 1}
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}


def tensors_of(architecture: str, *, tied: bool = False) -> dict[str, np.ndarray]:
    rng, head_dim = np.random.default_rng(0), HEAD_DIMS[architecture]
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for n in range(LAYERS):
        layer = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * head_dim, HIDDEN),
            "attn_k": (GROUPS * head_dim, HIDDEN),
            "attn_v": (GROUPS * head_dim, HIDDEN),
            "attn_output": (HIDDEN, HEADS * head_dim),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        if architecture == "qwen3":
            layer |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
        shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen3", True)])
def test_equals_transformers(architecture: str, tied: bool, tmp_path: Path, write_gguf: WriteGguf) -> None:
    from transformers import AutoModelForCausalLM

    tensors = tensors_of(architecture, tied=tied)
    quantised = {"blk.0.attn_q.weight": "Q8_0", "blk.0.attn_k.weight": "Q4_0", "token_embd.weight": "Q4_1"}
    file = write_gguf(tmp_path / "m.gguf", architecture, metadata_of(architecture), tensors, quantised)
    checkpoint = open_checkpoint(file)
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="m.gguf", dtype=torch.float32)
    weights = theirs.state_dict()
    if tied:
        weights.pop("lm_head.weight")
    headers = checkpoint.headers()
    assert headers.keys() == weights.keys()
    for name, header in headers.items():
        tensor = checkpoint.read(name)
        assert torch.equal(tensor, weights[name]), name
        assert (header.shape, header.dtype) == (tuple(tensor.shape), tensor.dtype), name
    # Eight bits and a half-precision scale for every 32 values.
    assert (
        headers["model.layers.0.self_attn.q_proj.weight"].stored_bytes
        == HEADS * HEAD_DIMS[architecture] * HIDDEN // 32 * 34
    )
    known = theirs.config.to_dict()
    rope = theirs.config.rope_parameters
    config = checkpoint.config
    assert config["rope_theta"] == rope["rope_theta"] and config["rope_scaling"] is None
    assert config["architectures"] == [type(theirs).__name__]
    skipped = ("rope_theta", "rope_scaling", "architectures", "torch_dtype", "eos_token_id")
    assert {k: v for k, v in config.items() if k not in skipped} == {k: known[k] for k in config if k not in skipped}
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 3]}
    assert (checkpoint.source, checkpoint.tokenizer_path, checkpoint.has_weights) == (file, file, True)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_unquantised_weights_keep_their_type(kind: str, tmp_path: Path, write_gguf: WriteGguf) -> None:
    tensors = tensors_of("llama")
    matrices = {name: kind for name, array in tensors.items() if array.ndim > 1}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors, matrices))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert checkpoint.config["torch_dtype"] == str(dtype).removeprefix("torch.")
    value = checkpoint.read("model.layers.1.mlp.up_proj.weight")
    assert value.dtype == checkpoint.headers()["model.layers.1.mlp.up_proj.weight"].dtype == dtype
    assert torch.equal(value, torch.from_numpy(tensors["blk.1.ffn_up.weight"]).to(dtype))
    # Each head's rows: pairs (0, 1), (2, 3), ... in the file, row i beside row i + D/2 here.
    query = checkpoint.read("model.layers.1.self_attn.q_proj.weight").reshape(HEADS, HEAD_DIM, HIDDEN)
    stored = torch.from_numpy(tensors["blk.1.attn_q.weight"]).to(dtype).reshape(HEADS, HEAD_DIM, HIDDEN)
    assert torch.equal(query[:, : HEAD_DIM // 2], stored[:, 0::2])
    assert torch.equal(query[:, HEAD_DIM // 2 :], stored[:, 1::2])
    assert checkpoint.read("model.norm.weight").dtype == torch.float32
    # The tensor is its own memory: the file is not written through it.
    value.zero_()
    assert checkpoint.read("model.layers.1.mlp.up_proj.weight").any()


def test_dummy_format_reads_the_config_alone(tmp_path: Path, write_gguf: WriteGguf) -> None:
    file = Path(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors_of("llama")))
    file.write_bytes(file.read_bytes()[:-5000])
    checkpoint = open_checkpoint(str(file), load_format="dummy")
    assert (checkpoint.headers(), checkpoint.has_weights) == ({}, False)
    assert checkpoint.config["vocab_size"] == VOCAB
    assert open_checkpoint(str(file), load_format="dummy", hf_overrides='{"vocab_size": 7}').config["vocab_size"] == 7


def test_rope_factors_become_the_rule_that_makes_them(tmp_path: Path, write_gguf: WriteGguf) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_rope_factors(5000.0, HEAD_DIM, scaling)
    assert (factors.min(), factors.max()) == (1.0, 32.0) and ((factors > 1) & (factors < 32)).any()
    tensors = {**tensors_of("llama"), "rope_freqs.weight": factors}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors))
    assert checkpoint.config["rope_scaling"] == scaling
    assert not [name for name in checkpoint.headers() if "rope" in name]
    tensors["rope_freqs.weight"] = factors + 0.1
    with pytest.raises(ModelError, match="does not follow the llama3 rule"):
        open_checkpoint(write_gguf(tmp_path / "n.gguf", "llama", metadata_of("llama"), tensors))


def test_llama3_rope_factors_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **rule}
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    ours = plain / llama3_rope_factors(500000.0, 128, rule)
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope__scaling__type": "none"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling(
    changes: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path, write_gguf: WriteGguf
) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama", **changes), tensors_of("llama"))
    assert open_checkpoint(file).config["rope_scaling"] == scaling


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path, write_gguf: WriteGguf) -> None:
    metadata = metadata_of("llama", attention__sliding_window=32)
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors_of("llama"))).config
    assert (config["model_type"], config["architectures"], config["sliding_window"]) == (
        "mistral",
        ["MistralForCausalLM"],
        32,
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("mamba", {}, ["general.architecture='mamba'; known from GGUF files: deepseek2, "]),
        ("deepseek4", {}, ["its compressed attention is read from Hugging Face checkpoints alone"]),
        (
            "llama",
            {"context_length": None, "block_count": None},
            ["context_length is missing", "block_count is missing"],
        ),
        ("llama", {"shiny": 3, "expert_count": 8}, ["llama.shiny=3 is not understood", "llama.expert_count is not 0"]),
        ("llama", {"attention__head_count": [4, 2]}, ["attention.head_count=[4, 2] differs between layers"]),
        ("llama", {"attention__value_length": 16}, ["attention.value_length=16; key_length 32 is needed"]),
        ("llama", {"rope__scaling__type": "longrope"}, ["rope.scaling.type='longrope'; allowed: none, linear, yarn"]),
        ("llama", {"rope__scaling__type": "yarn"}, ["needs llama.rope.scaling.factor"]),
        ("qwen3", {"attention__sliding_window": 8}, ["qwen3.attention.sliding_window=8; only llama files"]),
        ("llama", {"attention__head_count": 0}, ["metadata has a value of another type, or out of range"]),
        ("llama", {"embedding_length": "x"}, ["metadata has a value of another type, or out of range"]),
    ],
)
def test_unknown_metadata_is_refused(
    architecture: str, changes: dict[str, Any], words: list[str], tmp_path: Path, write_gguf: WriteGguf
) -> None:
    file = write_gguf(tmp_path / "m.gguf", architecture, metadata_of(architecture, **changes), tensors_of("llama"))
    with pytest.raises(ModelError) as caught:
        open_checkpoint(file)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unknown_tensors_are_refused(tmp_path: Path, write_gguf: WriteGguf) -> None:
    tensors = {**tensors_of("llama"), "blk.0.attn_sinks.weight": np.zeros(4), "extra": np.zeros((2, 3))}
    with pytest.raises(ModelError) as caught:
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors))
    assert "the tensor blk.0.attn_sinks.weight [4] is not" in str(caught.value)
    assert "the tensor extra [2, 3] is not" in str(caught.value)


def test_the_files_of_a_split_model_are_read_together(tmp_path: Path, write_gguf: WriteGguf) -> None:
    tensors = tensors_of("llama")
    whole = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors))
    names = sorted(tensors)
    parts = []
    for number, some in enumerate((names[::2], names[1::2])):
        # As llama.cpp splits: the first has all metadata.
        own = metadata_of("llama") if number == 0 else {}
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        parts.append(Path(write_gguf(path, "llama", {**own, **split}, {name: tensors[name] for name in some})))
    for given in parts:
        checkpoint = open_checkpoint(str(given))
        assert checkpoint.config == whole.config and checkpoint.headers() == whole.headers()
        for name in whole.headers():
            assert torch.equal(checkpoint.read(name), whole.read(name)), name
    renamed = parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"split\.count=2: it is one of several files"):
        open_checkpoint(str(renamed))
    with pytest.raises(ModelError, match=r"m-00001-of-00002\.gguf"):
        open_checkpoint(str(parts[1]))
    renamed.rename(parts[0])
    write_gguf(parts[1], "llama", {"split.no": 1, "split.count": 2}, {})
    with pytest.raises(ModelError, match=r"split\.tensors\.count=21, but its parts have 11 tensors"):
        open_checkpoint(str(parts[0]))


def test_stored_blocks_are_those_of_the_values(tmp_path: Path, write_gguf: WriteGguf) -> None:
    """Blocks have the rows in the order of the tensor that is read."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensors = tensors_of("llama")
    kinds = {"blk.0.attn_q.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_0"}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors, kinds))
    headers = checkpoint.headers()
    for part, kind in (("self_attn.q_proj", "Q8_0"), ("mlp.up_proj", "Q4_0")):
        name = f"model.layers.0.{part}.weight"
        format = headers[name].format
        assert format is not None and format.name == kind.lower()
        values = dequantize(checkpoint.blocks(name).numpy(), GGMLQuantizationType[kind])
        assert torch.equal(torch.from_numpy(values), checkpoint.read(name))
    assert headers["model.layers.1.self_attn.q_proj.weight"].format is None


def test_columns_are_reordered_by_whole_blocks_or_not_kept(tmp_path: Path, write_gguf: WriteGguf) -> None:
    """Value heads of Qwen3.5's delta rule, which are columns of its output projection."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    random = np.random.default_rng(0)
    shapes = {"blk.0.ssm_out.weight": (8, 128), "blk.0.ssm_a": (4,), "token_embd.weight": (16, 64)}
    tensors = {name: -np.exp(random.standard_normal(shape)) for name, shape in shapes.items()}
    metadata = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
    }
    name, kinds = "model.layers.0.linear_attn.out_proj.weight", {"blk.0.ssm_out.weight": "Q8_0"}
    for heads, kept in ((4, True), (8, False)):
        entries = {f"qwen35.{key}": value for key, value in (metadata | {"ssm.time_step_rank": heads}).items()}
        tensors["blk.0.ssm_a"] = np.full(heads, -1.0)
        checkpoint = open_checkpoint(write_gguf(tmp_path / f"{heads}.gguf", "qwen35", entries, tensors, kinds))
        assert (checkpoint.headers()[name].format is not None) == kept
        if kept:
            values = dequantize(checkpoint.blocks(name).numpy(), GGMLQuantizationType.Q8_0)
            assert torch.equal(torch.from_numpy(values), checkpoint.read(name))
            # Stored as (0, 0), (1, 0), (0, 1), (1, 1) of (group, number).
            stored = GgufFile(checkpoint.source)
            rows = stored.raw(stored.tensors["blk.0.ssm_out.weight"], 8 * 4 * 34).reshape(8, 4, 34)
            assert (checkpoint.blocks(name).numpy().reshape(8, 4, 34) == rows[:, [0, 2, 1, 3]]).all()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((VOCAB, 0), "no whole number of blocks"),
        ((VOCAB, HIDDEN - 1), "no whole number of blocks"),
        ((2**56, HIDDEN), "truncated"),
    ],
)
def test_impossible_sizes_of_tensors_are_refused(
    shape: tuple[int, int], words: str, tmp_path: Path, write_gguf: WriteGguf
) -> None:
    tensors = tensors_of("llama", tied=True)
    path = Path(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors, {"token_embd.weight": "Q8_0"}))
    data, name = path.read_bytes(), b"token_embd.weight" + struct.pack("<I", 2)
    assert data.count(name) == 1
    at = data.index(name) + len(name)
    path.write_bytes(data[:at] + struct.pack("<QQ", *shape[::-1]) + data[at + 16 :])
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(path))


def test_more_layers_than_tensors_are_refused(tmp_path: Path, write_gguf: WriteGguf) -> None:
    metadata = metadata_of("llama", block_count=2**31)
    file = write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors_of("llama"), {})
    with pytest.raises(ModelError, match="the metadata says 2147483648 layers, the file has"):
        open_checkpoint(file)


def test_truncated_files_say_so_wherever_they_end(tmp_path: Path, write_gguf: WriteGguf) -> None:
    file = Path(write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors_of("llama")))
    whole = file.read_bytes()
    for length in [*range(5, 4000, 97), len(whole) - 100]:
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated"):
            open_checkpoint(str(file))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"PK\3\4" + b"\0" * 40, "a GGUF file begins with"),
        (b"GGUF\1\0\0\0" + b"\0" * 40, "GGUF version 1; allowed: 2, 3"),
        (b"GGUF\0\0\0\3" + b"\0" * 40, "big-endian"),
        (b"GGUF\3\0\0\0" + b"\xff" * 40, "truncated or damaged"),
        (b"GGUF\3\0\0\0" + b"\0" * 8 + b"\1" + b"\0" * 7 + b"\1" + b"\0" * 7 + b"k\x63\0\0\0", "value of type 99"),
    ],
)
def test_files_that_are_not_gguf(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_real_model(smollm2_path: str) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    headers = checkpoint.headers()
    assert len(headers) == 272 and {header.dtype for header in headers.values()} == {torch.float32}
    assert checkpoint.config["tie_word_embeddings"] is True and checkpoint.config["vocab_size"] == 49152
    assert (checkpoint.config["num_hidden_layers"], checkpoint.config["head_dim"]) == (30, 64)
    assert sum(header.stored_bytes for header in headers.values()) < Path(smollm2_path).stat().st_size
    embeddings = checkpoint.read("model.embed_tokens.weight")
    assert embeddings.shape == (49152, 576) and embeddings.isfinite().all()
    assert 0.05 < embeddings.std() < 0.5


@pytest.mark.slow
def test_real_model_equals_transformers(smollm2_path: str) -> None:
    from transformers import AutoModelForCausalLM

    file = Path(smollm2_path)
    checkpoint = open_checkpoint(smollm2_path)
    theirs = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    weights = theirs.state_dict()
    assert checkpoint.headers().keys() == weights.keys() - {"lm_head.weight"}
    for name in checkpoint.headers():
        assert torch.equal(checkpoint.read(name), weights[name]), name
