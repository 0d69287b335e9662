"""A draft head is filled from its own tensors: quantized or not, on one rank or several, and no others than it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures.draft_steps import DraftSteps
from safetensors.torch import load_file, save_file
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES, Architecture, find_architecture, read_draft, read_spec
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.errors import ModelError
from allotrope.layers.build import Build
from allotrope.layers.draft import DraftModel
from allotrope.layers.parallel import Parallel
from allotrope.loading.decoder import make_meta_decoder
from allotrope.loading.draft import draft_build, draft_tensors, make_meta_draft
from allotrope.loading.kv_scales import WithoutKvScales
from allotrope.ops.matmul.fp8 import Fp8

MODELS = Path(__file__).parents[2] / "train" / "models"
TRAINED = ("qwen3_next", "deepseek_v3")
DRAFTING = [
    name
    for name in ARCHITECTURES
    if find_architecture({"architectures": [name]}, name).tiny_draft and "Kimi_" not in name
]
LENGTH = 40


def tiny(name: str) -> dict[str, Any]:
    made = find_architecture({"architectures": [name]}, name).tiny_draft
    assert made is not None
    return made()


def copy_of(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """Writes the config of a trained model. Returns its tensors."""
    (directory / "config.json").write_text((MODELS / name / "config.json").read_text())
    return load_file(MODELS / name / "model.safetensors")


def passes(running: DraftSteps) -> list[torch.Tensor]:
    """What three passes return, and the drafts."""
    prompt = prompts((LENGTH + 1,))[0]
    _, features = running.target_pass(prompt[:LENGTH], 0)
    found = [running.draft_pass(features, prompt[1:], 0)]
    for position in range(LENGTH, LENGTH + 2):
        last = found[-1][-1:]
        found.append(running.draft_pass(last, running.draft.greedy(last).tolist(), position))
    return [*found, running.draft.greedy(torch.cat(found))]


def rank_passes(rank: int, ranks: int, folder: Path) -> None:
    """One rank: writes what its passes return for every architecture."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    build = Build(parallel=Parallel(rank, ranks), max_drafts=1)
    found = {path.name: passes(DraftSteps(path, build=build, seed=1)) for path in folder.iterdir() if path.is_dir()}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_draft_as_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for name in DRAFTING:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny(name)))
    torch.multiprocessing.start_processes(rank_passes, (2, tmp_path), 2, start_method="spawn")
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name in DRAFTING:
        want = passes(DraftSteps(tmp_path / name, seed=1))
        for share in shares:
            for got, one in zip(share[name], want, strict=True):
                torch.testing.assert_close(got, one, atol=2e-3, rtol=0.0)


@pytest.mark.parametrize("name", TRAINED)
def test_quantized_weights_stay_so(name: str) -> None:
    """They are multiplied as they are stored, and draft as well as plain ones."""
    torch.set_num_threads(1)
    _, build = _meta(open_checkpoint(str(MODELS / name)))
    assert isinstance(build.formats["layers.0.mixer.out.weight", ""], Fp8)
    assert isinstance(build.formats["layers.0.ffn.experts.down", ""], Fp8)
    assert ("projection.weight", "") not in build.formats
    ids = list((MODELS / "held_out.txt").read_bytes()[:301])
    running = DraftSteps(MODELS / name, keep=True)
    hidden, features = running.target_pass(ids[:300], 0)
    guessed = running.draft.greedy(running.draft_pass(features, ids[1:], 0))[:-1]
    assert (guessed == running.target.greedy(hidden)[1:]).float().mean() > 0.7


def _meta(checkpoint: Checkpoint) -> tuple[DraftModel, Build]:
    architecture, spec = read_spec(checkpoint.config, checkpoint.source)
    draft = read_draft(checkpoint.config, checkpoint.source)
    assert draft is not None
    build = Build()
    meta = make_meta_decoder(architecture, spec, build)
    own = draft_build(checkpoint, architecture, meta, draft, build)
    return make_meta_draft(draft, meta, own), own


@pytest.mark.parametrize("name", TRAINED)
def test_without_weights_the_config_says_the_same(name: str) -> None:
    sizes = []
    for load_format in ("auto", "dummy"):
        model, _ = _meta(open_checkpoint(str(MODELS / name), load_format=load_format))  # type: ignore[arg-type]
        sizes.append({name: (one.shape, one.dtype) for name, one in model.named_parameters()})
        assert all(one.is_meta for one in model.parameters())
    assert sizes[0] == sizes[1]


def test_what_a_model_shares_is_not_its_draft_models() -> None:
    model, _ = _meta(open_checkpoint(str(MODELS / "deepseek_v3")))
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert not any("embedding.weight" in name or "head.weight" in name for name in names)


@pytest.mark.parametrize("name", DRAFTING)
def test_a_config_with_a_head_has_one(name: str) -> None:
    config = tiny(name)
    draft = read_draft(config, name)
    assert draft is not None and len(draft.layers) == 1
    architecture, spec = read_spec(config, name)
    meta = make_meta_decoder(architecture, spec, Build())
    model = make_meta_draft(draft, meta, Build())
    assert [backend.name for _, backend in model.attention]
    targets = {rule.target for rule in architecture.draft_rules(spec, draft)}
    assert {"norm.weight", "layers.0.mixer_norm.weight", "embedding_norm.weight", "hidden_norm.weight"} <= targets


def test_a_config_without_a_head_has_none() -> None:
    for name in DRAFTING:
        none = {"mtp_num_hidden_layers" if "Qwen3_5" in name else "num_nextn_predict_layers": 0}
        config = tiny(name)
        text = {"text_config": config["text_config"] | none} if "text_config" in config else none
        assert read_draft(config | text, name) is None or name.startswith("MiMo")
    assert read_draft(find_architecture({"architectures": ["LlamaForCausalLM"]}, "").tiny(), "llama") is None


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Qwen3_5ForCausalLM", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True is not"),
        ("Qwen3_5ForCausalLM", {"mtp_num_hidden_layers": 2}, "names 2 multi-token-prediction layers"),
        ("DeepseekV4ForCausalLM", {"compress_ratios": [0, 4, 128, 4, 4]}, "compress_ratios has 4 for the layer"),
    ],
)
def test_heads_that_cannot_draft_are_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_draft(tiny(name) | changes, name)


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    tensors = copy_of("qwen3_next", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(tensors | {"mtp.layers.0.self_attn.other.weight": torch.ones(2)}, path)
    with pytest.raises(ModelError, match=r"mtp\.layers\.0\.self_attn\.other\.weight is used by no rule"):
        DraftSteps(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "mtp.norm.weight"}, path)
    with pytest.raises(ModelError, match=r"parameter norm\.weight is in no checkpoint tensor"):
        DraftSteps(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}, path)
    with pytest.raises(ModelError, match=r"names a draft head, and no tensor is named mtp\.\*"):
        DraftSteps(tmp_path)


@pytest.mark.parametrize("name", TRAINED)
def test_scales_of_cached_rows_are_those_of_the_head(name: str, tmp_path: Path) -> None:
    """Its layers have numbers of their own: they are not taken for the model's."""
    tensors = copy_of(name, tmp_path)
    layer = {"qwen3_next": "mtp.layers.0.", "deepseek_v3": "model.layers.3."}[name]
    scales = {"k": 2.0, "v": 3.0} if name == "qwen3_next" else {"kv": 2.0}
    stated = {f"{layer}self_attn.attn.{kind}_scale": torch.tensor(scale) for kind, scale in scales.items()}
    save_file(tensors | stated, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    model_layers = 4 if name == "qwen3_next" else 3
    assert not any(layer < model_layers for layer in WithoutKvScales(checkpoint).scales)
    draft = read_draft(checkpoint.config, "")
    assert draft is not None
    assert list(WithoutKvScales(draft_tensors(checkpoint, draft), of_draft=True).scales.values()) == [
        {kind: f"{layer}self_attn.attn.{kind}_scale" for kind in scales}
    ]
    build = Build(kv_dtype=torch.float8_e4m3fn, max_drafts=1)
    running = DraftSteps(tmp_path, build=build)
    mixers: list[Any] = [one.mixer for one in running.draft.layers]
    assert list(mixers[0].kv_scales.values()) == list(scales.values())
    last: Any = running.target.layers[-1].mixer
    assert set(last.kv_scales.values()) == {1.0}


def test_an_architecture_can_draft_or_not() -> None:
    """What makes a draft model and its rules come together."""
    for name in ARCHITECTURES:
        one: Architecture = find_architecture({"architectures": [name]}, name)
        default = Architecture(one.read, one.rules, one.tiny)
        drafts = {one.draft is not default.draft, one.draft_rules is not default.draft_rules}
        assert drafts == {one.tiny_draft is not None}
