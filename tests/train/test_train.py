"""Each model at a small scale: it learns, and an engine computes from its checkpoint what the trained module does."""

from __future__ import annotations

import copy
import json
import lzma
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.watching import Watch, engine, request, run
from safetensors.torch import load_file

from allotrope import LLM
from allotrope.attention.check import compare
from allotrope.request import SamplingParams
from train import text
from train.checkpoint import write_checkpoint
from train.configs import CONFIGS
from train.data import Rows, draw_rows
from train.decoders import Model
from train.measure import logits_of, measure
from train.mixers import CompressedIndexer, Indexer
from train.models import build
from train.quantize import plain, quantize
from train.released import load_released, parameter_count, released, round_to_released
from train.train import main
from train.trainer import Schedule, Trainer

PROSE = b"It was the best of rows, it was the worst of rows.\n" * 40
# More than two chunks of the delta rule, a window and a block of 128; index_topk is lower.
LENGTH, TOPK = 200, 24


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def config(name: str) -> dict[str, Any]:
    small = copy.deepcopy(CONFIGS[name])
    return small | {"index_topk": TOPK} if "index_topk" in small else small


def train(name: str, steps: int = 8) -> tuple[Model, list[dict[str, float]]]:
    """A model after a few steps over the same rows, and its loss at each."""
    model = build(name, config(name))
    schedule = Schedule(phases=((0.0, {64: 1.0}),), tokens=128, warmup=2, rows=16, decay=0.1)
    rows = {64: draw_rows(PROSE, 2, 64, 0)}
    log = Trainer(model, rows, schedule, 0, graphs=False).run(None, steps, 1, lambda line: None)
    # Biases and sinks that are still near 0 would prove little.
    generator = torch.Generator().manual_seed(0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=generator)
    round_to_released(model)
    return model.eval(), log.entries


def prompt() -> list[int]:
    return list(draw_rows(PROSE * 20, 1, LENGTH - 1, 3).tokens[0].tobytes())


def prompt_with_clear_choices(model: Model) -> tuple[list[int], torch.Tensor]:
    """A prompt at which no indexer's top-k hangs on the last digits, and the module's logits."""
    gaps: list[float] = []

    def watched(scores: Any) -> Any:
        def call(*args: torch.Tensor) -> torch.Tensor:
            found = scores(*args)
            best = found.topk(TOPK + 1, dim=-1).values
            gap = (best[..., -2] - best[..., -1]) / best[..., 0].abs()
            gaps.append(float(gap[best[..., -1] > -torch.inf].min()))
            return found

        return call

    indexers = [module for module in model.modules() if isinstance(module, Indexer | CompressedIndexer)]
    for indexer in indexers:
        indexer.scores = watched(indexer.scores)
    for seed in range(50):
        gaps.clear()
        ids = list(draw_rows(PROSE * 20, 1, LENGTH - 1, seed).tokens[0].tobytes())
        logits = logits_of(model, torch.tensor([ids]))[0]
        if len(gaps) == len(indexers) and all(gap > 1e-5 for gap in gaps):
            return ids, logits
    raise AssertionError(f"no prompt has clear top-k choices: {gaps}")


def engine_logits(folder: Path, ids: list[int], **options: Any) -> torch.Tensor:
    """[len(ids), vocabulary] fp32, of an engine that takes the prompt in several chunks."""
    watch = Watch()
    running = engine(folder, watch, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=96, **options)
    run(running, [request("a", ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))])
    return torch.stack([watch.seen["a"][i] for i in range(len(ids))])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_learns_and_its_checkpoint_is_the_released_layout(name: str, tmp_path: Path) -> None:
    model, losses = train(name)
    assert losses[-1]["total"] < 0.93 * losses[0]["total"]
    assert 500_000 < parameter_count(model) < 2_000_000
    write_checkpoint(model, tmp_path)
    ids, want = prompt_with_clear_choices(model)
    got = engine_logits(tmp_path, ids)
    assert (verdict := compare(got, want, "fp32")), verdict
    assert (verdict := compare(transformers_logits(tmp_path, ids), want, "fp32")), verdict


def transformers_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except ValueError as error:
        pytest.skip(f"this Transformers does not have the model: {error}")
    with torch.inference_mode():
        return model.eval()(torch.tensor([ids]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_is_read_back(name: str) -> None:
    model = build(name, seed=1)
    round_to_released(model)
    other = build(name, seed=2)
    load_released(other, released(model))
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_mtp_layers_have_their_released_names() -> None:
    deepseek, qwen = (released(build(name)) for name in ("deepseek_v3", "qwen3_next"))
    layer = f"model.layers.{CONFIGS['deepseek_v3']['num_hidden_layers']}."
    names = {name.removeprefix(layer) for name in deepseek if name.startswith(layer)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight", "shared_head.norm.weight"} < names
    assert {"shared_head.head.weight", "self_attn.kv_b_proj.weight", "mlp.experts.7.up_proj.weight"} < names
    names = {name.removeprefix("mtp.") for name in qwen if name.startswith("mtp.")}
    assert {"fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"} < names
    assert {"layers.0.self_attn.q_proj.weight", "layers.0.mlp.experts.7.up_proj.weight"} < names


def test_an_mtp_layer_reads_the_token_after_and_no_later_one() -> None:
    for name in ("deepseek_v3", "qwen3_next"):
        model = build(name).eval()
        ids = torch.tensor([prompt()[:40]])
        changed = ids.clone()
        changed[0, 20] += 1
        one, two = (mtp_logits(model, either)[0] for either in (ids, changed))
        differs = (one - two).abs().amax(-1) > 1e-4
        # Row t is after tokens t and t + 1.
        assert differs[19] and not differs[:19].any()


@torch.no_grad()
def mtp_logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
    from train.layers import Pass

    step = Pass(ids, torch.arange(ids.shape[1]))
    return model.mtp_logits(model.hidden(step), step)


def test_triangular_systems_are_inverted() -> None:
    from train.delta_rule import inverse

    # All ones: the series' powers of the whole would have entries of 1e18.
    for a in (torch.ones(64, 64), torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 0.2):
        a = a.tril(-1)
        want = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a.double())
        torch.testing.assert_close(inverse(a).double(), want, atol=1e-4, rtol=1e-4)


def test_a_number_of_steps_repeats_a_run() -> None:
    (one, losses), (two, again) = train("qwen3_next", 2), train("qwen3_next", 2)
    assert [entry["total"] for entry in losses] == [entry["total"] for entry in again]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_both_tokenizers_map_bytes_to_their_values(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = build("qwen3_moe")
    write_checkpoint(model, tmp_path)
    text = '  Hé\n#ab=07\t{"x":[1]}é€'
    llm, theirs = LLM(str(tmp_path), max_model_len=128), AutoTokenizer.from_pretrained(tmp_path)
    assert llm.tokenizer.encode(text) == theirs(text)["input_ids"] == list(text.encode())
    assert theirs.decode(list(text.encode())) == text
    (answer,) = llm.generate(["#ab=07\n?ab="], [SamplingParams(max_tokens=4, temperature=0.0)])[0].outputs
    assert len(answer.token_ids) <= 4
    llm.close()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_an_engine_reads_a_quantized_twin(name: str, tmp_path: Path) -> None:
    model, _ = train(name, 1)
    folder = tmp_path / name
    write_checkpoint(model, folder)
    twin = quantize(folder)
    assert twin is not None
    values = load_file(plain(twin, tmp_path / "plain") / "model.safetensors")
    for tensor_name, tensor in load_file(folder / "model.safetensors").items():
        off = (values[tensor_name].float() - tensor.float()).norm() / tensor.float().norm().clamp_min(1e-6)
        assert off < (0.13 if name == "gpt_oss" else 0.04), tensor_name
    load_released(model, values)
    ids = prompt()
    got = engine_logits(twin, ids, quantized_weights="dequantize")
    assert (verdict := compare(got, logits_of(model, torch.tensor([ids]))[0], "fp32")), verdict


def test_rows_repeat_and_answer_rightly() -> None:
    rows, again = (draw_rows(PROSE * 20, 24, 300, seed=5) for _ in range(2))
    assert np.array_equal(rows.tokens, again.tokens) and np.array_equal(rows.answers, again.answers)
    assert not np.array_equal(rows.tokens, draw_rows(PROSE * 20, 24, 300, seed=6).tokens)
    later = draw_rows(PROSE * 20, 4, 300, seed=5, first=20)
    assert np.array_equal(later.tokens, rows.tokens[20:])
    queries = sum(recalled(rows, i) for i in range(24))
    assert queries > 10
    assert {0, 1, 2} == set(np.unique(rows.answers))


def recalled(rows: Rows, i: int) -> int:
    """Checks each query of a row of recall against the pair before it. Returns the number of queries."""
    text, answers = rows.tokens[i].tobytes().decode(), rows.answers[i]
    pairs, queries, at = {}, 0, 0
    for line in text.splitlines(keepends=True):
        if line.startswith("#") and len(line) == 7:
            pairs[line[1:3]] = line[4:6]
        if line.startswith("?") and len(line) >= 6:
            assert line[4:6] == pairs[line[1:3]]
            assert (answers[at + 4 : at + len(line)] == 2).all() and (answers[at : at + 4] == 1).all()
            queries += 1
        at += len(line)
    return queries


def test_measuring_tells_a_model_that_knows_from_one_that_does_not() -> None:
    model = build("qwen3_moe").eval()
    found = measure(model, PROSE, items=2, longest=320)
    assert 7 < found["text_bits_per_byte"] < 12
    assert all(one["accuracy"] == 0 and one["loss"] > 3 for one in found["tasks"].values())
    assert set(found["recall"]) == {"32", "128"}


def test_one_command_trains_measures_and_writes(tmp_path: Path) -> None:
    """The script itself, over a text of its own."""
    documents = [b"Row %d of many: the river runs past stone %d.\n" % (i, i * i) * 40 for i in range(60)]
    source, out = tmp_path / "text.xz", tmp_path / "out"
    source.write_bytes(lzma.compress(text.BORDER.join(documents)))
    small = ["--steps", "2", "--longest", "256", "--tokens", "512", "--items", "2", "--device", "cpu"]
    main(["qwen3_moe", "--out", str(out), "--text", str(source), "--rows", str(tmp_path / "rows"), *small])
    report = json.loads((out / "report.json").read_text())
    assert (report["steps"], report["tokens"]) == (2, 1024)
    assert report["loss"] == json.loads((out / "loss.json").read_text())[-1]["next"]
    assert "--steps 2`" in (out / "README.md").read_text()
    assert engine_logits(out, prompt()[:20]).isfinite().all()


def test_no_document_is_in_both_parts_of_the_text(tmp_path: Path) -> None:
    documents = [b"document %d.\n" % i for i in range(200)]
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(text.BORDER.join(documents)))
    seen, held_out = (set(text.read(path, part).splitlines()) for part in (False, True))
    assert not seen & held_out and len(seen | held_out) == 200
    assert 2 <= len(held_out) <= 25


def test_the_schedule_follows_the_progress() -> None:
    schedule = Schedule(phases=((0.0, {256: 1.0}), (0.5, {512: 0.5, 4096: 0.5})), peak=1.0, warmup=10, decay=0.25)
    assert schedule.shares(0.49) == {256: 1.0} and schedule.shares(0.5) == {512: 0.5, 4096: 0.5}
    assert [schedule.rate(*at) for at in ((0, 0.0), (9, 0.1), (500, 0.7), (900, 0.875))] == [0.1, 1.0, 1.0, 0.5]
    assert schedule.at_most(512).shares(0.9) == {512: 1.0} and schedule.at_most(512).lengths == (256, 512)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_in_graphs_are_those_outside(name: str) -> None:
    """Two lengths in turn, and an optimizer whose state begins with the first graph."""
    curves = []
    for graphs in (False, True):
        model = build(name, config(name)).cuda()
        schedule = Schedule(phases=((0.0, {128: 0.5, 256: 0.5}),), tokens=1024, warmup=2, rows=16)
        rows = {length: draw_rows(PROSE, 8, length, 0) for length in (128, 256)}
        curves.append(Trainer(model, rows, schedule, 0, graphs).run(None, 8, 1, lambda line: None).entries)
    for eager, graphed in zip(*curves, strict=True):
        assert graphed["total"] == pytest.approx(eager["total"], rel=0.03)
