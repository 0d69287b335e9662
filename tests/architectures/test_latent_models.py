"""Models of latent attention against Transformers, and what their configs and checkpoints may hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.execution_modes import ATOL, assert_matches
from engine.watching import Watch, engine, request, run
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TinyCheckpoint, prompts, write_tiny

from allotrope.architectures.deepseek_v2 import tiny_deepseek_v2
from allotrope.architectures.deepseek_v3 import tiny_deepseek_v3
from allotrope.architectures.deepseek_v32 import tiny_deepseek_v32
from allotrope.architectures.glm_moe_dsa import tiny_glm_moe_dsa
from allotrope.architectures.kimi_k25 import tiny_kimi_k25
from allotrope.architectures.registry import read_spec
from allotrope.errors import ModelError
from allotrope.layers.mixers.dsa import DsaMixerSpec
from allotrope.layers.mixers.mla import MlaMixerSpec

# Around a page, around where picking starts, and past the length that rotations were made for.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 100)

Config = dict[str, Any]


def lite() -> Config:
    """V2-Lite: queries from x, greedy routing."""
    return tiny_deepseek_v2() | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}


def released_sizes() -> Config:
    """The head sizes of the release, with which prompts are up-projected and decodes absorbed."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return tiny_deepseek_v3() | sizes | {"num_hidden_layers": 2}


def all_picking() -> Config:
    """GLM-5 before it shared picks."""
    tiny = tiny_glm_moe_dsa()
    for key in ("indexer_types", "index_topk_freq", "index_skip_topk_offset"):
        del tiny[key]
    return tiny | {"num_hidden_layers": 3}


MODELS = {
    "deepseek_v2": tiny_deepseek_v2,
    "deepseek_v2_lite": lite,
    "deepseek_v3": tiny_deepseek_v3,
    "deepseek_v3 released sizes": released_sizes,
    "deepseek_v32": tiny_deepseek_v32,
    "glm_moe_dsa": all_picking,
    "glm_moe_dsa shared": tiny_glm_moe_dsa,
}


@pytest.mark.parametrize("name", MODELS)
def test_against_transformers(name: str, tmp_path: Path) -> None:
    assert_matches(write_tiny(MODELS[name](), tmp_path), LENGTHS, page_size=8)


def test_kimi_k25_is_its_text_part(tmp_path: Path) -> None:
    config = tiny_kimi_k25()
    text = config["text_config"] | {"model_type": "deepseek_v3"}
    inner, outer = write_tiny(text, tmp_path / "text"), tmp_path / "wrapper"
    outer.mkdir()
    state = load_file(inner.directory / "model.safetensors")
    wrapped = {"language_model." + name: tensor for name, tensor in state.items()}
    save_file(wrapped | {"vision_tower.a": torch.ones(2), "mm_projector.b": torch.ones(2)}, outer / "model.safetensors")
    (outer / "config.json").write_text(json.dumps(config))
    tiny = TinyCheckpoint(outer)
    tiny.model = inner.model
    assert_matches(tiny, (1, 17, 60))


def test_multi_token_prediction_layers_are_dropped(tmp_path: Path) -> None:
    tiny = write_tiny(tiny_deepseek_v32(), tmp_path)
    (prompt,) = prompts((40,))
    want = run(engine(tiny.directory), [request("a", prompt)])
    state = load_file(tmp_path / "model.safetensors")
    count = tiny_deepseek_v32()["num_hidden_layers"]
    last, drafting = f"model.layers.{count - 1}.", f"model.layers.{count}."
    extra = {drafting + name.removeprefix(last): t.clone() for name, t in state.items() if name.startswith(last)}
    extra |= {drafting + "eh_proj.weight": torch.ones(2), drafting + "shared_head.head.weight": torch.ones(3)}
    save_file(state | extra, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{drafting}.* does not have"):
        engine(tiny.directory)
    (tmp_path / "config.json").write_text(json.dumps(tiny_deepseek_v32() | {"num_nextn_predict_layers": 1}))
    assert run(engine(tiny.directory), [request("a", prompt)]) == want


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v2", {"routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"topk_group": 4}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"rope_scaling": tiny_deepseek_v3()["rope_scaling"] | {"mscale_all_dim": 0.0}}),
        ("deepseek_v32", {"index_topk": 31}),
        ("deepseek_v32", {"indexer_rope_interleave": True}),
        ("glm_moe_dsa shared", {"indexer_rope_interleave": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_value_changes_the_logits(name: str, change: Config, tmp_path: Path) -> None:
    """The comparison with Transformers would not pass if the number were ignored."""
    tiny, (prompt,) = write_tiny(MODELS[name](), tmp_path), prompts((60,))
    with pytest.raises(AssertionError, match="not close"):
        assert_logits(tiny, prompt, hf_overrides=json.dumps(change))
    assert_logits(tiny, prompt)


def assert_logits(tiny: TinyCheckpoint, prompt: list[int], **options: Any) -> None:
    watch = Watch()
    run(engine(tiny.directory, watch, **options), [request("a", prompt)])
    got = torch.stack([watch.seen["a"][i] for i in range(len(prompt))])
    torch.testing.assert_close(got, tiny.logits(prompt), atol=ATOL, rtol=0.0)


def mixers(config: Config) -> list[Any]:
    return [layer.mixer for layer in read_spec(config, "tiny")[1].layers]


def test_the_softmax_scale_has_the_mscale_of_yarn() -> None:
    plain = mixers(tiny_deepseek_v3() | {"rope_scaling": None})[0]
    assert isinstance(plain, MlaMixerSpec)
    assert plain.scale == pytest.approx(48**-0.5)
    assert mixers(tiny_deepseek_v3())[0].scale == pytest.approx(48**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    # With m of 0.707 for all dims, and cos and sin by the ratio of the two.
    uneven, all_dims = mixers(tiny_deepseek_v2())[0], 0.1 * 0.707 * math.log(16) + 1
    assert uneven.scale == pytest.approx(48**-0.5 * all_dims**2)
    assert uneven.rope.scaling.attention_factor == pytest.approx((0.1 * math.log(16) + 1) / all_dims)
    released = mixers(tiny_deepseek_v3())[0].rope.scaling
    assert released.attention_factor == 1.0
    without = tiny_deepseek_v3()
    del without["rope_scaling"]["mscale_all_dim"]
    assert mixers(without)[0].scale == pytest.approx(48**-0.5)


def test_both_spellings_of_a_config_are_one_model() -> None:
    old = tiny_deepseek_v3()
    new = tiny_deepseek_v3() | {"head_dim": 16, "qk_head_dim": 48, "rope_interleave": True}
    scaling, theta = new.pop("rope_scaling"), new.pop("rope_theta")
    new["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": theta}
    assert read_spec(old, "old")[1] == read_spec(new, "new")[1]


def test_rope_pairs_of_each_model() -> None:
    assert mixers(tiny_deepseek_v3())[0].rope.interleaved
    assert not mixers(tiny_deepseek_v3() | {"rope_interleave": False})[0].rope.interleaved
    (half, *_), (whole, *_) = mixers(tiny_deepseek_v32()), mixers(tiny_glm_moe_dsa())
    assert (half.mla.rope.interleaved, half.index_rope.interleaved) == (True, False)
    assert (whole.mla.rope.interleaved, whole.index_rope.interleaved) == (True, True)


def kinds(**changes: Any) -> list[bool]:
    config = {key: value for key, value in tiny_glm_moe_dsa().items() if key != "indexer_types"}
    found = mixers(config | {"index_topk_freq": 1} | changes)
    assert all(isinstance(mixer, DsaMixerSpec) for mixer in found)
    return [mixer.indexer is not None for mixer in found]


def test_which_layers_have_an_indexer() -> None:
    assert kinds() == [True] * 5
    assert kinds(index_topk_freq=2) == [True, True, False, True, False]
    assert kinds(index_topk_freq=4, num_hidden_layers=10) == [i in (0, 1, 5, 9) for i in range(10)]
    assert kinds(index_topk_pattern="FSSFS") == [True, False, False, True, False]
    assert kinds(index_topk_freq=2, indexer_types=["full", "shared"] * 2 + ["full"]) == [True, False, True, False, True]
    for wrong in (["shared", "full", "full", "full", "full"], ["full"] * 4, ["full", "none", "full", "full", "full"]):
        with pytest.raises(ModelError, match="indexer_types="):
            kinds(indexer_types=wrong)


def test_unknown_values_are_refused_together() -> None:
    wrong = tiny_deepseek_v3() | {
        "scoring_func": "softmax",
        "moe_layer_freq": 2,
        "attention_bias": True,
        "qk_head_dim": 64,
        "something_new": 1,
    }
    with pytest.raises(ModelError) as caught:
        read_spec(wrong, "tiny")
    for key in ("scoring_func", "moe_layer_freq", "attention_bias", "qk_head_dim", "something_new"):
        assert key in str(caught.value)


def test_an_indexer_needs_a_query_latent() -> None:
    with pytest.raises(ModelError, match="q_lora_rank"):
        read_spec(tiny_deepseek_v32() | {"q_lora_rank": None}, "tiny")
