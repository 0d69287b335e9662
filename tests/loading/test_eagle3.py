"""EAGLE3 heads against speculators: both formats, every norm, several passes, and what they read of their target."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loading.eagle3_steps import CPU, ExpectedHeads, Pools, decode, load_head, load_target, prefill, write
from quantized_twins import write_twin
from tiny_checkpoints import write_tiny

from allotrope.architectures.deepseek_v4 import DEEPSEEK_V4, tiny_deepseek_v4
from allotrope.architectures.eagle3 import tiny_eagle3
from allotrope.architectures.gemma3 import tiny_gemma3
from allotrope.architectures.gemma4 import tiny_gemma4
from allotrope.architectures.gpt_oss import tiny_gpt_oss
from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3 import tiny_qwen3
from allotrope.architectures.qwen3_moe import tiny_qwen3_moe
from allotrope.architectures.registry import read_spec
from allotrope.attention.batch import BatchLayout
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.errors import ModelError
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.eagle3 import Eagle3Model
from allotrope.layers.parallel import Parallel
from allotrope.loading.eagle3 import load_eagle3, resolve_eagle3
from allotrope.ops.matmul.plain import PlainWeight

EXPECTED = ExpectedHeads()
# Of the file's heads: a model of 4 layers that they can draft for.
TARGET = tiny_llama() | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}


def target(build: Build | None = None) -> Decoder:
    """The model that the heads draft for, with random weights."""
    return load_target(None, copy.deepcopy(TARGET), build or Build())


def flat(config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A head of the speculators' format in that of the EAGLE repository."""
    layer = dict(config["transformer_layer_config"])
    kind = layer.pop("model_type")
    rope = layer.pop("rope_parameters")
    kept = ("draft_vocab_size", "fc_norm", "norm_before_residual", "norm_output")
    written = layer | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLMEagle3"],
        "model_type": kind,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
            "norm_before_fc": config["norm_before_fc"],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
    return written | {key: config[key] for key in kept}, renamed


def head(directory: Path, name: str, *, as_flat: bool = False, on: Decoder | None = None) -> DraftModel:
    """A head of the file, written to `directory` and loaded."""
    config, state = EXPECTED.heads[name]["config"], EXPECTED.state(name)
    if as_flat:
        config, state = flat(config, state)
    return load_head(write(directory, config, state), on or target(), Build())


def unrolled(model: DraftModel, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [steps, tokens, draft vocabulary] after each prefix of the file's pass, and greedy ids [steps, tokens].

    Every prefix is a sequence of its own: its rows are prefilled together, and the later passes read what the one
    before returned for its last row.
    """
    count = len(EXPECTED.ids)
    lengths = range(1, count + 1)
    ids = torch.cat([EXPECTED.ids, torch.zeros(steps, dtype=torch.int64)])
    pools = Pools(model, count)
    step, _alive = pools.step(torch.cat([ids[:n] for n in lengths]), prefill(lengths))
    features = torch.cat([EXPECTED.features[:n] for n in lengths])
    hidden = model(model.from_target(features), step)[torch.tensor(lengths).cumsum(0) - 1]
    logits, greedy = [model.logits(hidden)], [model.greedy(hidden)]
    for i in range(1, steps):
        step, _alive = pools.step(ids[i : i + count], decode([n + i for n in lengths]))
        hidden = model(hidden, step)
        logits.append(model.logits(hidden))
        greedy.append(model.greedy(hidden))
    return torch.stack(logits), torch.stack(greedy)


@pytest.mark.parametrize("as_flat", [False, True], ids=["speculators", "flat"])
@pytest.mark.parametrize("name", EXPECTED.heads)
def test_heads_compute_what_speculators_does(tmp_path: Path, name: str, as_flat: bool) -> None:
    want = EXPECTED.logits(name)
    # Training keeps the window of the first step for all of them.
    steps = 1 if name == "window" else len(want)
    logits, greedy = unrolled(head(tmp_path, name, as_flat=as_flat), steps)
    torch.testing.assert_close(logits, want[:steps], atol=1e-5, rtol=1e-5)
    state = EXPECTED.state(name)
    offsets = state.get("d2t", torch.zeros(want.shape[-1], dtype=torch.int64))
    best = want[:steps].argmax(-1)
    assert torch.equal(greedy, best + offsets[best])
    if "t2d" in state:
        assert state["t2d"][greedy].all()


def test_heads_differ() -> None:
    """No norm of the file is without effect."""
    names = [name for name in EXPECTED.heads if EXPECTED.logits(name).shape == EXPECTED.logits("plain").shape]
    logits = [EXPECTED.logits(name) for name in names]
    assert all(
        (first[-1] - second[-1]).abs().max() > 0.1 for i, first in enumerate(logits) for second in logits[i + 1 :]
    )


def test_what_is_not_stored_is_the_targets(tmp_path: Path) -> None:
    """Embedding, and the head over a whole vocabulary."""
    config, state = EXPECTED.heads["whole_vocabulary"]["config"], EXPECTED.state("whole_vocabulary")
    model = target()
    model.embedding.weight.data.copy_(state.pop("embed_tokens.weight"))
    model.head.weight = model.head.matmul.pack(PlainWeight(state.pop("lm_head.weight")))
    loaded = load_head(write(tmp_path, config, state), model, Build())
    names = {name for name, _ in loaded.named_parameters()}
    assert not names & {"embedding.weight", "head.weight", "d2t"}
    logits, _ = unrolled(loaded, 2)
    torch.testing.assert_close(logits, EXPECTED.logits("whole_vocabulary")[:2], atol=1e-5, rtol=1e-5)


def test_a_head_without_auxiliary_hidden_states_reads_the_last(tmp_path: Path) -> None:
    config, state = flat(EXPECTED.heads["plain"]["config"], EXPECTED.state("plain"))
    config["eagle_config"] = {"use_aux_hidden_state": False}
    weight = state.pop("fc.weight")
    model = target()
    loaded = load_head(write(tmp_path, config, state), model, Build())
    assert model.aux_layers == () and loaded.from_target(EXPECTED.features) is EXPECTED.features
    loaded.from_target = lambda features: features @ weight.T  # type: ignore[method-assign]
    torch.testing.assert_close(unrolled(loaded, 3)[0], EXPECTED.logits("plain"), atol=1e-5, rtol=1e-5)


TARGETS = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "gpt_oss": tiny_gpt_oss,
    "gemma3": tiny_gemma3,
    "gemma4": tiny_gemma4,
}


@pytest.mark.parametrize("name", TARGETS)
def test_auxiliary_hidden_states_are_the_residual_stream(tmp_path: Path, name: str) -> None:
    """Against Transformers, whose last one is after the final norm. A model without a draft model sets none."""
    tiny = write_tiny(TARGETS[name](), tmp_path)
    model = load_target(open_checkpoint(str(tmp_path)), TARGETS[name](), Build())
    ids = torch.arange(9, 18)
    step, _alive = Pools(model, 1).step(ids, prefill([9]))
    plain = model(step)
    assert step.features is None
    count = len(model.layers)
    layers = (0, count - 1, count)
    model.keep_aux_hidden_states(layers)
    step, _alive = Pools(model, 1).step(ids, prefill([9]))
    assert torch.equal(model(step), plain)
    assert step.features is not None and step.features.shape == (9, 3 * model.spec.hidden)
    first, middle, last = step.features.chunk(3, dim=-1)
    with torch.inference_mode():
        want = tiny.model(ids[None], use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(first, want[0][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(middle, want[count - 1][0], atol=1e-4, rtol=1e-4)
    assert torch.equal(model.norm(last), plain)


def test_the_log_says_what_a_head_reads(tmp_path: Path) -> None:
    """And that the first list of layers can be meant otherwise."""
    lines: list[str] = []
    for layers, want in (([1, 2, 4], "before layers 1, 2, 4. Some heads mean after"), ([2, 3, 4], "layers 2, 3, 4")):
        config = EXPECTED.heads["plain"]["config"] | {"eagle_aux_hidden_state_layer_ids": layers}
        checkpoint, model = write(tmp_path, config, EXPECTED.state("plain")), target()
        spec = resolve_eagle3(checkpoint, model.spec, Decoder)
        load_eagle3(spec, model, Build(), checkpoint, seed=0, quantized_weights="auto", log=lines.append)
        assert any(want in line for line in lines) and ("[2, 3, 5]" in "".join(lines)) == (layers[0] == 1)
        lines.clear()


def test_layers_that_a_target_cannot_hand_out() -> None:
    model = target()
    for layers in ((2, 1, 3), (1, 1, 2), (-1, 1, 2), (1, 2, 5)):
        with pytest.raises(ValueError, match="ascending numbers from 0 to 4"):
            model.keep_aux_hidden_states(layers)
    assert not DEEPSEEK_V4.decoder.one_stream


HEADS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], bool]] = {
    "half a vocabulary": (tiny_gpt_oss, {}, False),
    "another width": (tiny_qwen3_moe, {"hidden_size": 48, "target_hidden_size": 64, "norm_before_fc": True}, True),
    "several layers": (tiny_llama, {"num_hidden_layers": 2, "fc_norm": True, "norm_output": True}, False),
    "scaled embedding": (tiny_gemma3, {"draft_vocab_size": 320}, True),
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_behind_a_target(tmp_path: Path, name: str) -> None:
    """A head with random weights: drafts are tokens of the target, and a prefill cut in two leads to the same ones."""
    tiny, changes, own_embedding = HEADS[name]
    model = load_target(None, tiny(), Build())
    (tmp_path / "config.json").write_text(json.dumps(tiny_eagle3(model.spec) | changes))
    loaded = load_head(open_checkpoint(str(tmp_path), load_format="dummy"), model, Build())
    assert isinstance(loaded, Eagle3Model) and (loaded.embedding is not None) == own_embedding
    ids = torch.arange(40, 52)
    drafts = []
    for cut in (11, 4):
        pools, own = Pools(model, 1), Pools(loaded, 1)
        hidden = torch.empty(0)
        for begin, end in ((0, cut), (cut, 11)):
            if begin == end:
                continue
            batch = BatchLayout((end - begin,), (end,), CPU)
            step, _alive = pools.step(ids[begin:end], batch)
            model(step)
            assert step.features is not None
            step_of_draft, _alive_too = own.step(ids[begin + 1 : end + 1], batch)
            hidden = loaded(loaded.from_target(step.features), step_of_draft)[-1:]
        tokens = [loaded.greedy(hidden)]
        for i in range(3):
            step, _alive = own.step(tokens[-1], decode([12 + i]))
            hidden = loaded(hidden, step)
            tokens.append(loaded.greedy(hidden))
        drafts.append(torch.cat(tokens))
    assert torch.equal(drafts[0], drafts[1])
    assert (drafts[0] >= 0).all() and (drafts[0] < model.spec.vocab_size).all()


def _rank(rank: int, folder: Path) -> None:
    """One of two ranks: writes its logits and greedy ids to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    build = Build(parallel=Parallel(rank, 2))
    loaded = load_head(open_checkpoint(str(folder / "head")), target(build), build)
    torch.save(unrolled(loaded, 3), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_draft_what_one_does(tmp_path: Path) -> None:
    write(tmp_path / "head", EXPECTED.heads["eagle_3_1"]["config"], EXPECTED.state("eagle_3_1"))
    torch.multiprocessing.start_processes(_rank, (tmp_path,), 2, start_method="spawn")
    (logits, greedy), (_, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.testing.assert_close(logits, EXPECTED.logits("eagle_3_1"), atol=1e-5, rtol=1e-5)
    best = logits.argmax(-1)
    assert torch.equal(greedy, best + EXPECTED.state("eagle_3_1")["d2t"][best]) and torch.equal(greedy, other)


@pytest.mark.parametrize("as_flat", [False, True], ids=["speculators", "flat"])
def test_fp8_weights_stay_quantized(tmp_path: Path, as_flat: bool) -> None:
    head(tmp_path / "plain", "plain", as_flat=as_flat)
    write_twin(tmp_path / "plain", tmp_path / "fp8")
    checkpoint, model = open_checkpoint(str(tmp_path / "fp8")), target()
    kept: Any = load_head(checkpoint, model, Build())
    assert all(one.format.name.startswith("fp8") for one in (*kept.fc.matmuls, *kept.layers[0].mixer.qkv.matmuls))
    spec = resolve_eagle3(checkpoint, model.spec, Decoder)
    plain = load_eagle3(spec, model, Build(), checkpoint, seed=0, quantized_weights="dequantize", log=lambda line: None)
    assert isinstance(plain, Eagle3Model)
    for name in ("fc", "layers.0.mixer.qkv", "layers.0.ffn.gate_up"):
        ours, theirs = kept.get_submodule(name), plain.get_submodule(name)
        # Rows of the identity are exact in FP8, in which the inputs are too.
        rows = torch.eye(96 if name == "fc" else 64 if "mixer" in name else 32)
        torch.testing.assert_close(ours(rows), theirs(rows), atol=1e-6, rtol=1e-6)
    assert torch.isfinite(unrolled(kept, 3)[0]).all()
    assert (unrolled(plain, 3)[0] - EXPECTED.logits("plain")).abs().max() > 1e-3


def test_fp8_rows_have_scales(tmp_path: Path) -> None:
    model = load_target(None, copy.deepcopy(TARGET), Build(kv_dtype=torch.float8_e4m3fn))
    config, state = EXPECTED.heads["plain"]["config"], EXPECTED.state("plain")
    state["layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    loaded: Any = load_head(write(tmp_path, config, state), model, Build(kv_dtype=torch.float8_e4m3fn))
    assert loaded.layers[0].mixer.kv_scales == {"k_scale": 0.5, "v_scale": 1.0}


def _checkpoint(directory: Path, drop: str = "", **more: torch.Tensor) -> Checkpoint:
    state = EXPECTED.state("plain") | more
    return write(directory, EXPECTED.heads["plain"]["config"], {k: v for k, v in state.items() if k != drop})


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    model = target()
    for drop, more, reason in (
        ("d2t", {}, "there is no d2t"),
        ("lm_head.weight", {}, "there is no lm_head.weight, and the target's does not serve: its vocabulary"),
        ("fc.weight", {}, "parameter fc.weight is in no checkpoint tensor"),
        ("", {"mask_hidden": torch.ones(1)}, "mask_hidden is used by no rule"),
        ("", {"input_norm.weight": torch.ones(96)}, "input_norm.weight is used by no rule"),
        ("d2t", {"d2t": torch.full((24,), 50)}, "d2t leads to the ids 50 to 73 (needs 0 to 63)"),
    ):
        state = _checkpoint(tmp_path, "" if drop in more else drop, **more)
        with pytest.raises(ModelError) as error:
            load_head(state, model, Build())
        assert reason in str(error.value)


def test_targets_that_are_refused(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path / "one")
    _, spec = read_spec(copy.deepcopy(TARGET), "target")
    with pytest.raises(ModelError, match="residual stream is several tensors"):
        resolve_eagle3(checkpoint, spec, DEEPSEEK_V4.decoder)
    _, other = read_spec(tiny_deepseek_v4(), "target")
    with pytest.raises(ModelError, match="needs the target's"):
        resolve_eagle3(checkpoint, other, DEEPSEEK_V4.decoder)
    with pytest.raises(ModelError, match="is no EAGLE3 head"):
        resolve_eagle3(write(tmp_path / "two", tiny_llama(), {"x": torch.ones(1)}), spec, Decoder)
    scaled = tiny_gemma3() | {"vocab_size": 64, "hidden_size": 32}
    _, gemma = read_spec(scaled, "target")
    with pytest.raises(ModelError, match=r"embed_tokens\.weight.*embedding is scaled"):
        resolve_eagle3(_checkpoint(tmp_path / "three", "embed_tokens.weight"), gemma, Decoder)
