"""Opening checkpoints: directories, hub ids, and every way in which they can be broken."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from allotrope.checkpoint.checkpoint import TensorHeader, open_checkpoint
from allotrope.config import LoadFormat
from allotrope.errors import ConfigError, ModelError

CONFIG = {"model_type": "llama", "hidden_size": 8, "text_config": {"a": 1, "b": 2}, "rope_scaling": {"old": 1}}
INDEX = "model.safetensors.index.json"


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (6, 8), generator=generator, dtype=torch.uint8)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(7, generator=generator).to(torch.bfloat16),
        "c.weight": bits.clone().view(torch.float8_e4m3fn),
        "c.scale": bits.clone().view(torch.float8_e8m0fnu),
        "d.blocks": bits,
        "d.packed": bits.clone().view(torch.float4_e2m1fn_x2),
        "e.table": torch.arange(4),
        "f.scalar": torch.tensor(2.5),
    }


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    weight_map = {name: f"model-{n % 3 + 1:05}-of-00003.safetensors" for n, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, tmp_path / shard)
    write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": weight_map})
    return tmp_path


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_is_read_unchanged(
    layout: str, tensors: dict[str, torch.Tensor], request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(str(request.getfixturevalue(layout)))
    assert checkpoint.has_weights and checkpoint.config == CONFIG and checkpoint.generation_config == {}
    headers = checkpoint.headers()
    assert headers == {
        name: TensorHeader(name, tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        assert same_bits(checkpoint.read(name), tensor), name
    with pytest.raises(ModelError, match=r"there is no tensor g\.weight"):
        checkpoint.read("g.weight")


def test_reading_one_tensor_leaves_the_others_on_disk(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    large, small = 1 << 30, torch.arange(4, dtype=torch.float32)
    entries = {
        "large": {"dtype": "U8", "shape": [large], "data_offsets": [0, large]},
        "small": {"dtype": "F32", "shape": [4], "data_offsets": [large, large + 16]},
    }
    header = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # A hole in the file, which takes no room on the disk.
        file.seek(large, os.SEEK_CUR)
        file.write(small.numpy().tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = open_checkpoint(str(tmp_path))
    assert torch.equal(checkpoint.read("small"), small) and checkpoint.read("large").shape == (large,)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < large // 4


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 3 shards named by .* are missing: model-00002-of-00003\.safetensors"):
        open_checkpoint(str(sharded))


def test_damaged_shards_are_named(sharded: Path) -> None:
    first, second = (sharded / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    first.write_bytes(first.read_bytes()[:-4])
    second.write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(sharded)).headers()
    text = str(caught.value)
    assert first.name in text and "truncated" in text
    assert second.name in text and "damaged" in text


NESTED = b"[" * 200_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{x",
        len(NESTED).to_bytes(8, "little") + NESTED,
    ],
    ids=["empty", "a list", "cut off", "nested"],
)
def test_damaged_headers(single: Path, content: bytes) -> None:
    (single / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_checkpoint(str(single)).headers()


@pytest.mark.parametrize(
    "wrong", [{"dtype": ["F32"]}, {"data_offsets": "ab"}, {"data_offsets": [-4, 0]}, {"shape": [1.5]}, {"shape": [-1]}]
)
def test_damaged_entries_are_named(single: Path, wrong: dict[str, object]) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | wrong
    header = json.dumps({"x": entry}).encode()
    (single / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ModelError, match="the entry of x is damaged"):
        open_checkpoint(str(single)).headers()


@pytest.mark.parametrize("shard", [3, None, "", ["a"]])
def test_an_index_without_names_of_files_is_refused(sharded: Path, shard: object) -> None:
    index = json.loads((sharded / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["g.weight"] = shard
    write_json(sharded / INDEX, index)
    with pytest.raises(ModelError, match=r"names no file for g\.weight"):
        open_checkpoint(str(sharded)).headers()


def test_index_and_shards_must_agree(sharded: Path, tensors: dict[str, torch.Tensor]) -> None:
    index = json.loads((sharded / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["g.weight"] = "model-00001-of-00003.safetensors"
    write_json(sharded / INDEX, index)
    with pytest.raises(ModelError, match=r"1 tensors of .* are in no shard: g\.weight"):
        open_checkpoint(str(sharded)).headers()
    del index["weight_map"]["g.weight"]
    write_json(sharded / INDEX, index)
    save_file(tensors, sharded / "model-00003-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"a\.weight is in model-00001-of-00003.safetensors and in model-00003"):
        open_checkpoint(str(sharded)).headers()


def test_unknown_dtypes_are_refused(single: Path) -> None:
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (single / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 3)
    with pytest.raises(ModelError, match="x has dtype F6_E2M3; allowed: F64"):
        open_checkpoint(str(single)).headers()


def test_a_config_alone_serves_planning_and_dummy_weights(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 2]})
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    assert (checkpoint.has_weights, checkpoint.headers(), checkpoint.tokenizer_path) == (False, {}, None)
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    with pytest.raises(ModelError, match=r"a\.weight"):
        checkpoint.read("a.weight")


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
@pytest.mark.parametrize(
    ("file", "advice"),
    [
        (None, r"there is no model\.safetensors.*give --load-format dummy for random ones \(to verify: --random\)"),
        ("pytorch_model.bin", r"pytorch_model\.bin: pickles can run code and are not read\. Convert .*save_pretrained"),
        ("consolidated.safetensors", r"but consolidated\.safetensors: weights have to have one of these names"),
        ("tiny.gguf", r"but tiny\.gguf: give such a file itself as the model"),
    ],
)
def test_missing_weights_are_never_random(
    tmp_path: Path, load_format: LoadFormat, file: str | None, advice: str
) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    if file is not None:
        (tmp_path / file).touch()
    with pytest.raises(ModelError, match=advice):
        open_checkpoint(str(tmp_path), load_format=load_format)


def test_dummy_weights_do_not_look_at_files(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert open_checkpoint(str(sharded), load_format="dummy").headers() == {}


def test_tokenizer_files_are_found(single: Path) -> None:
    assert open_checkpoint(str(single)).tokenizer_path is None
    (single / "tokenizer.json").touch()
    assert open_checkpoint(str(single)).tokenizer_path == str(single)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "the directory is empty"),
        ({"readme": ""}, "config.json is missing"),
        ({"model.gguf": ""}, "model.gguf: give such a file itself"),
        ({"config.json": "{"}, "config.json"),
        ({"config.json": "[]"}, "it holds a list; a JSON object is needed"),
        ({"config.json": "{}", INDEX: "{}"}, "no weight_map"),
    ],
)
def test_other_directories_are_refused(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(tmp_path))


def test_overrides_go_over_the_config(single: Path) -> None:
    overrides = {"hidden_size": 16, "text_config": {"b": 3}, "rope_scaling": {"new": 2}}
    config = open_checkpoint(str(single), hf_overrides=json.dumps(overrides)).config
    assert config == {
        "model_type": "llama",
        "hidden_size": 16,
        "text_config": {"a": 1, "b": 3},
        "rope_scaling": {"new": 2},
    }
    for wrong in ("{", "[1]"):
        with pytest.raises(ConfigError, match="hf_overrides="):
            open_checkpoint(str(single), hf_overrides=wrong)


def test_contradictory_options_are_refused(single: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision='main' is for hub ids"):
        open_checkpoint(str(single), revision="main")
    with pytest.raises(ModelError, match=r"needs the \.gguf file itself"):
        open_checkpoint(str(single), load_format="gguf")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"must be a \.gguf file, this one is \.bin"):
        open_checkpoint(str(tmp_path / "model.bin"))
    with pytest.raises(ModelError, match="no such file or directory"):
        open_checkpoint(str(tmp_path / "missing.gguf"))


def test_hub_ids_are_found_in_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--maker--tiny"
    for commit in ("a" * 40, "b" * 40):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        write_json(snapshot / "config.json", {"model_type": commit[0]})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40, encoding="utf-8")
    program = """
import sys
from allotrope.errors import ModelError
from allotrope.checkpoint.checkpoint import open_checkpoint
print(open_checkpoint("maker/tiny", load_format="dummy").config["model_type"])
print(open_checkpoint("maker/tiny", revision="b" * 40, load_format="dummy").config["model_type"])
for model in ("maker/other", "maker/tiny/deep", "mäker/tiny"):
    try:
        open_checkpoint(model)
    except ModelError as error:
        print(error)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["a", "b"]
    missing = "\n".join(lines[2:])
    for words in ("'maker/other'", str(tmp_path / "hub"), "HF_HUB_OFFLINE is set", "hf download maker/other"):
        assert words in missing
    assert "'maker/tiny/deep':\n  - there is no such file or directory" in missing
    assert "'mäker/tiny':\n  - there is no such file or directory" in missing
