"""Mixtures of experts against a loop over tokens, and routers against their rules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from allotrope.layers.build import Build
from allotrope.layers.mlp import Gating
from allotrope.layers.moe import Experts, Router, RouterSpec

HIDDEN, WIDTH, COUNT = 16, 24, 8


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return module


def gated(gating: Gating, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gating.limit is not None:
        gate, up = torch.minimum(gate, torch.tensor(gating.limit)), up.clamp(-gating.limit, gating.limit)
    act = (
        F.gelu(gate, approximate="tanh")
        if gating.activation == "gelu_tanh"
        else gate / (1 + torch.exp(-gating.slope * gate))
    )
    return act * (up + gating.offset)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "gating", [Gating(), Gating(activation="gelu_tanh"), Gating(limit=0.5), Gating(slope=1.7, limit=0.5, offset=1.0)]
)
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_experts_equal_a_loop_over_tokens(tokens: int, gating: Gating, bias: bool) -> None:
    module = filled(Experts(COUNT, HIDDEN, WIDTH, gating, Build(), bias=bias))
    assert isinstance(module, Experts)
    assert module.gate_up is not None and module.down is not None
    gate_up, down = module.gate_up.data.clone(), module.down.data.clone()
    module.finish_loading()
    x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, 3)
    # Experts 5 to 7 get nothing.
    experts = torch.stack([torch.randperm(5)[:3] for _ in range(tokens)])
    want = torch.zeros(tokens, HIDDEN)
    for t in range(tokens):
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            inner = gate_up[e] @ x[t] + (module.gate_up_bias[e] if module.gate_up_bias is not None else 0)
            outer = down[e] @ gated(gating, inner[:WIDTH], inner[WIDTH:])
            want[t] += weight * (outer + (module.down_bias[e] if module.down_bias is not None else 0))
    got = module(x, weights, experts)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module(x[:1], weights[:1], experts[:1]), got[:1], atol=1e-6, rtol=1e-6)


def route(spec: RouterSpec, tokens: int = 50) -> tuple[Router, torch.Tensor, torch.Tensor, torch.Tensor]:
    router = filled(Router(spec, HIDDEN, Build()))
    assert isinstance(router, Router)
    assert router.gate.weight is not None
    weight = router.gate.weight.data.clone()
    for part in router.modules():
        if part is not router and hasattr(part, "finish_loading"):
            part.finish_loading()
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = x @ weight.T
    if router.gate.bias is not None:
        logits = logits + router.gate.bias
    weights, experts = router(x, torch.arange(tokens) % 7)
    return router, logits, weights, experts


def test_a_softmax_over_the_chosen_is_a_normalized_softmax() -> None:
    _, logits, weights, experts = route(RouterSpec(experts=COUNT, topk=3, bias=True))
    best = logits.topk(3).indices
    assert torch.equal(experts, best)
    torch.testing.assert_close(weights, torch.softmax(logits.gather(1, best), -1))


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_a_correction_chooses_and_does_not_weigh(score: str) -> None:
    spec = RouterSpec(experts=COUNT, topk=3, score=score, correction=True, scale=2.5)  # type: ignore[arg-type]
    router, logits, weights, experts = route(spec)
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.log(1 + torch.exp(logits)).sqrt()
    assert router.correction is not None
    best = (scores + router.correction).topk(3).indices
    assert torch.equal(experts.sort().values, best.sort().values)
    assert not torch.equal(experts.sort().values, scores.topk(3).indices.sort().values)
    chosen = scores.gather(1, experts)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))


@pytest.mark.parametrize("best", [1, 2])
def test_only_the_best_groups_are_chosen_from(best: int) -> None:
    spec = RouterSpec(experts=COUNT, topk=3, score="sigmoid", groups=4, top_groups=2, group_best=best, normalize=False)
    _, logits, weights, experts = route(spec)
    scores = torch.sigmoid(logits)
    free = 0
    for t, row in enumerate(scores):
        groups = [sorted(row[g * 2 : g * 2 + 2].tolist())[-best:] for g in range(4)]
        kept = sorted(range(4), key=lambda g: -sum(groups[g]))[:2]
        allowed = [e for g in kept for e in (2 * g, 2 * g + 1)]
        want = sorted(allowed, key=lambda e: -row[e])[:3]
        assert sorted(experts[t].tolist()) == sorted(want)
        free += sorted(row.topk(3).indices.tolist()) != sorted(want)
        torch.testing.assert_close(weights[t], row[experts[t]])
    assert free > 0


def test_a_table_names_the_experts_of_a_token() -> None:
    spec = RouterSpec(experts=COUNT, topk=2, score="sqrt_softplus", table=7)
    router = filled(Router(spec, HIDDEN, Build()))
    assert isinstance(router, Router)
    assert router.table is not None
    router.table.data = torch.stack([torch.randperm(COUNT)[:2] for _ in range(7)])
    router.gate.finish_loading()
    ids = torch.tensor([6, 0, 6, 3])
    _, experts = router(torch.randn(4, HIDDEN), ids)
    assert torch.equal(experts, router.table[ids])


def test_a_router_names_everything_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"topk=9; allowed: 1 to experts=8; experts=8 is not a multiple of groups=3"):
        RouterSpec(experts=8, topk=9, groups=3)
    with pytest.raises(ValueError, match=r"top_groups=1 of 2 experts hold no 3"):
        RouterSpec(experts=8, topk=3, groups=4, top_groups=1)
