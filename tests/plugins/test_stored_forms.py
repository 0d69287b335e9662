"""Checkpoints that vLLM takes in forms of its own: hub ids that it has resolved, Mistral's format, embeddings alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.hosting import hosted
from plugins.test_fp8_rows import ASKED, COUNT, assert_same, write
from safetensors.torch import load_file, save_file

from allotrope.errors import ModelError

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

# Mistral's names of a layer's tensors.
NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def config_of(path: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(path), skip_tokenizer_init=True, max_model_len=256, **options).create_engine_config()


def test_a_revision_goes_with_a_hub_id_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, vLLM puts the directory in the id's place, and keeps the revision; a download goes where it was told."""
    import huggingface_hub

    from allotrope.plugins.vllm.config import open_config

    path = write("LlamaForCausalLM", tmp_path)
    config = config_of(path, revision="a" * 40, download_dir="elsewhere")
    checkpoint, _, _ = open_config(config)
    assert checkpoint.source == str(path)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **given: asked.append(given) or str(path))
    config.model_config.model = "org/model"
    open_config(config)
    assert [(one["revision"], one["cache_dir"]) for one in asked] == [("a" * 40, "elsewhere")]


def test_a_repository_with_mistrals_format_too(tmp_path: Path) -> None:
    path = write("MistralForCausalLM", tmp_path, head_dim=32)
    with hosted(path, block_size=32) as running:
        wanted = running.answers(ASKED, COUNT)
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    heads = {"wq": config["num_attention_heads"], "wk": config["num_key_value_heads"]}
    stored = {
        "tok_embeddings.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        for name, its in NAMES.items():
            weight = tensors[f"model.layers.{layer}.{name}.weight"]
            if count := heads.get(its[-2:]):
                # Mistral rotates neighbours.
                weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
            stored[f"layers.{layer}.{its}.weight"] = weight
    save_file(stored, path / "consolidated.safetensors")
    shard = "model-00001-of-00001.safetensors"
    (path / "model.safetensors").rename(path / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    parameters = {
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "head_dim": "head_dim",
        "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
        "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size", "max_position_embeddings": "max_position_embeddings",
    }  # fmt: skip
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    given = {its: config[name] for its, name in parameters.items()} | {"rope_theta": theta}
    (path / "params.json").write_text(json.dumps(given))
    with hosted(path, block_size=32) as running:
        assert_same(running.answers(ASKED, COUNT), wanted)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_model_of_embeddings_alone(architecture: str, tmp_path: Path) -> None:
    """Without a head, and without `model.` before its tensors' names: the embeddings of the whole model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm import LLM

    path = write("Qwen3ForCausalLM", tmp_path, head_dim=32)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(300)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(path)

    def embedding() -> torch.Tensor:
        options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 26}
        llm = LLM(str(path), runner="pooling", enforce_eager=True, **options)
        try:
            (found,) = llm.embed([{"prompt_token_ids": list(ASKED[1])}], use_tqdm=False)
            return torch.tensor(found.outputs.embedding)
        finally:
            llm.llm_engine.engine_core.shutdown()

    wanted = embedding()
    tensors = load_file(path / "model.safetensors")
    alone = {name.removeprefix("model."): one for name, one in tensors.items() if name != "lm_head.weight"}
    save_file(alone, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    torch.testing.assert_close(embedding(), wanted, atol=1e-5, rtol=0.0)


def test_classes_of_texts_are_refused(tmp_path: Path) -> None:
    """By the architecture that vLLM makes of the one that answers, which it has us for."""
    from allotrope.plugins.vllm.config import open_config, refuse_unsupported

    path = write("Qwen3ForCausalLM", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    asked = config_of(path)
    checkpoint, _, spec = open_config(asked)
    with pytest.raises(ModelError, match=r"(?s)convert=classify.* is not supported.*ALLOTROPE_VLLM=0"):
        refuse_unsupported(asked, checkpoint, spec)
