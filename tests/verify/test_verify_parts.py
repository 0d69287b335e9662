"""Prompts, judgement, near-ties and hooks by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from allotrope.attention.csa import CsaSpec
from allotrope.attention.csa.spec import IndexerSpec
from allotrope.attention.family import boundaries
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.mha.spec import MhaSpec
from allotrope.errors import ConfigError
from allotrope.ops.rope import RopeSpec
from allotrope.verify.hooks import TopkSelection, hooked
from allotrope.verify.layers import LayerRecorder, read_layers
from allotrope.verify.logits_recorder import LogitsRecorder
from allotrope.verify.options import MODES, VerifyOptions
from allotrope.verify.prompts import all_boundaries, draw_prompts, prompt_lengths, usable_ids
from allotrope.verify.sample import Sample, wanted_of
from allotrope.verify.tolerance import Limits, score_samples
from allotrope.verify.transformers_model import Trace

LIMITS = Limits(1e-3, "a test")


def make(length: int = 10, new: int = 4, vocabulary: int = 32, name: str = "p0") -> tuple[Sample, torch.Tensor]:
    """A sample, and the logits that are wanted of it."""
    logits = torch.randn(length + new - 1, vocabulary, generator=torch.Generator().manual_seed(length))
    greedy = tuple(logits[length - 1 :].argmax(-1).tolist())
    return Sample(name, tuple(range(length)), greedy, greedy, wanted_of(logits)), logits


def shown(sample: Sample, logits: torch.Tensor, chosen: tuple[int, ...] | None = None) -> LogitsRecorder:
    """A recorder that has seen all of `logits` in pieces of 3, and the tokens that were chosen."""
    recorder = LogitsRecorder([sample])
    for start in range(0, len(logits), 3):
        recorder.logits(f"{sample.name}/run", 0, start, logits[start : start + 3])
    for token, forced in zip(chosen or sample.greedy, sample.forced, strict=True):
        assert recorder.token(f"{sample.name}/run", 0, token) == forced
    return recorder


def test_equal_logits_are_right() -> None:
    sample, logits = make()
    score = score_samples([sample], shown(sample, logits), LIMITS, {})
    assert (score.positions, score.max_abs, score.rel_rms, score.top1) == (13, 0.0, 0.0, 1.0)
    assert (score.greedy_same, score.greedy_total, score.faults) == (1, 1, ())


@pytest.mark.parametrize("value", [0.01, math.nan, math.inf])
def test_one_wrong_logit_is_a_fault_at_its_position(value: float) -> None:
    sample, logits = make()
    bad = logits.clone()
    bad[7, 20] += value
    (fault,) = score_samples([sample], shown(sample, bad), LIMITS, {}).faults
    assert (fault.position, fault.prompt_tokens) == (7, 10)
    assert fault.error == pytest.approx(0.01, rel=1e-3) or fault.error == math.inf


def test_the_worst_of_several_looks_counts() -> None:
    sample, logits = make()
    recorder = shown(sample, logits + 0.5)
    recorder.logits("p0/again", 0, 0, logits)
    score = score_samples([sample], recorder, LIMITS, {})
    assert score.max_abs == pytest.approx(0.5, rel=1e-3)
    assert len(score.faults) == 13


def test_positions_that_were_not_seen_are_not_compared() -> None:
    sample, logits = make()
    recorder = LogitsRecorder([sample])
    recorder.logits("p0/run", 0, 8, logits[8:])
    recorder.logits("background/1", 0, 0, logits * 9)
    assert score_samples([sample], recorder, LIMITS, {}).positions == 5
    assert score_samples([sample], LogitsRecorder([sample]), LIMITS, {}).max_abs == math.inf


def test_an_argmax_near_tie_is_not_wrong() -> None:
    sample, logits = make()
    logits[11] = 0.0
    logits[11, 4], logits[11, 9] = 5.0002, 5.0
    sample = Sample("p0", sample.prompt, sample.forced, (*sample.greedy[:2], 4, sample.greedy[3]), wanted_of(logits))
    other = logits.clone()
    other[11, 9] = 5.0004
    score = score_samples([sample], shown(sample, other, (*sample.greedy[:2], 9, sample.greedy[3])), LIMITS, {})
    assert (score.argmax_ties, score.greedy_same, score.greedy_total, score.faults) == (1, 0, 1, ())


def test_a_wrong_choice_from_right_logits_is_a_fault() -> None:
    sample, logits = make()
    chosen = (*sample.greedy[:2], (sample.greedy[2] + 1) % 32, sample.greedy[3])
    (fault,) = score_samples([sample], shown(sample, logits, chosen), LIMITS, {}).faults
    assert "although its own logits favour" in str(fault)


def test_positions_behind_a_near_tie_are_counted_apart() -> None:
    sample, logits = make()
    bad = logits.clone()
    bad[9:] += 1.0 + torch.arange(32)
    score = score_samples([sample], shown(sample, bad), LIMITS, {"p0": 9})
    assert (score.router_ties, score.positions, score.faults) == (4, 9, ())
    assert len(score_samples([sample], shown(sample, bad), LIMITS, {"p0": 10}).faults) == 1


def test_medians_ignore_single_positions_but_not_many() -> None:
    limits = Limits(math.inf, "a test", median_abs=0.1, top1=0.8)
    sample, logits = make()
    bad = logits.clone()
    bad[5] = 0.0
    assert not score_samples([sample], shown(sample, bad), limits, {}).faults
    assert score_samples([sample], shown(sample, logits + 0.2), limits, {}).faults
    assert score_samples([sample], shown(sample, logits.flip(-1)), limits, {}).faults


def test_few_rows_are_enough_to_compare_all_positions() -> None:
    _, logits = make(length=60)
    wanted = wanted_of(logits, most=20)
    assert len(wanted.rows) <= 20
    assert wanted.positions[-16:].tolist() == list(range(47, 63))
    sample = Sample("p0", tuple(range(60)), (0,) * 4, (0,) * 4, wanted)
    unkept = next(i for i in range(60) if i not in wanted.positions.tolist())
    recorder = LogitsRecorder([sample])
    recorder.logits("p0/run", 0, unkept, logits[unkept : unkept + 1] + 0.01)
    assert score_samples([sample], recorder, LIMITS, {}).max_abs == pytest.approx(0.01, rel=1e-2)


def test_boundaries_come_from_caches_and_specs() -> None:
    rope = RopeSpec(dim=8, theta=1e4)
    csa = CsaSpec(
        num_heads=1,
        head_dim=16,
        scale=1.0,
        window=16,
        rope=rope,
        kv_dtype=torch.float32,
        ratio=4,
        overlap=True,
        indexer=IndexerSpec(num_heads=1, head_dim=16, topk=8),
    )
    assert boundaries(csa) == (4, 8, 16, 32)
    mha = MhaSpec(num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0, kv_dtype=torch.float32, window=24)
    gdn = GdnSpec(num_k_heads=1, num_v_heads=1, k_head_dim=8, v_head_dim=8, conv_width=4, conv_dtype=torch.float32)
    assert all_boundaries([mha, gdn], page_size=16) == (4, 16, 24, 32, 64)
    lengths, missed = prompt_lengths((16, 24, 64, 500), longest=200, new_tokens=8)
    assert set(lengths) >= {1, 2, 3, 15, 16, 17, 23, 24, 25, 63, 64, 65}
    assert max(lengths) <= 200
    assert missed == [500]


def test_prompts_hold_no_special_tokens() -> None:
    config = {"eos_token_id": [3, 4], "pad_token_id": None, "text_config": {"image_token_id": 6}}
    ids = usable_ids(config, 10)
    assert ids == [0, 1, 2, 5, 7, 8, 9]
    assert [len(prompt) for prompt in draw_prompts(ids, [1, 7], seed=0)] == [1, 7]
    assert set(draw_prompts(ids, [200], seed=0)[0]) == set(ids)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = hidden_states + self.mixer(hidden_states)
        chosen = torch.topk(x, 3, dim=-1).indices
        return x + self.mlp(input=x) * chosen.float().mean(), None


def test_hooks_see_parts_and_selections_and_leave_no_trace() -> None:
    layers = [Layer(), Layer()]
    x = torch.randn(1, 5, 8)
    with hooked(layers) as hooks, torch.inference_mode():
        y = layers[1](hidden_states=layers[0](x)[0])[0]
    assert set(hooks.hidden) == {(0, "embedding")} | {
        (i, stage) for i in (0, 1) for stage in ("mixer in", "mixer out", "ffn in", "ffn out", "out")
    }
    assert torch.equal(hooks.hidden[1, "out"], y)
    assert torch.equal(hooks.hidden[0, "embedding"], x)
    (selections,) = hooks.selections(5)[0]
    hidden = hooks.hidden[0, "ffn in"][0]
    assert torch.equal(selections.chosen, hidden.topk(3).indices.sort(-1).values)
    ordered = hidden.double().sort(descending=True).values
    torch.testing.assert_close(selections.gap, (ordered[:, 2] - ordered[:, 3]) / hidden.double().std(-1, correction=0))
    assert not any(module._forward_hooks or module._forward_pre_hooks for layer in layers for module in layer.modules())


def near_tie(gap: float, differs: bool, error: float) -> LayerRecorder:
    """Two layers; in the first, token 4 of 8 was picked by `gap` and `differs`; from it on all is off by `error`."""
    sample, _ = make(length=8, new=1)
    chosen = torch.tensor([[0, 1]] * 8)
    ours = chosen.clone()
    ours[4] = torch.tensor([0, 2]) if differs else ours[4]
    gaps = torch.full((8,), 0.5)
    gaps[4] = gap
    recorder = LayerRecorder([sample], {"p0": Trace({}, {0: [TopkSelection(4, 2, gaps, chosen)]})})
    recorder.selections[0, "p0"] = [TopkSelection(4, 2, torch.empty(0), ours)]
    off = torch.zeros(8)
    off[4] = error**2
    behind = off.clone()
    behind[5:] = error**2
    recorder.sums[0, "out"]["p0"] = (off, torch.ones(8))
    recorder.sums[1, "out"]["p0"] = (behind, torch.ones(8))
    return recorder


def test_a_router_near_tie_excuses_its_token_and_those_behind_it() -> None:
    report = read_layers(near_tie(1e-6, True, 0.3), ["mha", "mha"], [1e-4] * 2)
    assert report.first is None
    assert report.tainted == {"p0": 4}
    assert [(layer.selections, layer.ties) for layer in report.layers] == [("same", 1), ("", 0)]


def test_a_wide_gap_with_another_expert_is_wrong() -> None:
    report = read_layers(near_tie(0.2, True, 0.3), ["mha", "mha"], [1e-4] * 2)
    assert report.first is not None
    assert (report.first.index, report.first.selections, report.tainted) == (0, "wrong", {})
    assert "position 4" in report.first.worst


def test_equal_experts_excuse_nothing() -> None:
    report = read_layers(near_tie(1e-6, False, 0.3), ["mha", "mha"], [1e-4] * 2)
    assert report.first is not None and report.first.index == 0


def test_options_are_refused_with_what_is_allowed() -> None:
    for wrong, text in (
        ({"layers": 2}, "needs --random"),
        ({"modes": "whole,warm"}, "names warm; allowed: whole, chunked-1"),
        ({"lengths": "3,x"}, "numbers above 0"),
        ({"new_tokens": 0}, "at least 1"),
        ({"random": True, "against": "stored"}, "no stored outputs"),
    ):
        with pytest.raises(ConfigError, match=text):
            VerifyOptions(**wrong)
    assert VerifyOptions().named_modes() == list(MODES)
    assert VerifyOptions(modes="chunked,cached").named_modes() == ["chunked-1", "chunked-3", "chunked-64", "cached"]
    assert VerifyOptions(lengths="9, 3,9").named_lengths() == [3, 9]
