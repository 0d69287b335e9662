"""What stands around the products of experts, against the plain way of `Router` and `Experts`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.check import KINDS, compare
from allotrope.checkpoint.weights import finish
from allotrope.layers.build import Build
from allotrope.layers.router import Router, RouterSpec, Score
from allotrope.ops.moe_route.triton import combine, looked_up, route

pytestmark = pytest.mark.usefixtures("poisoned")

VOCABULARY = 50
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROUTERS: dict[str, RouterSpec] = {
    "softmax": RouterSpec(experts=12, topk=3),
    "softmax, corrected": RouterSpec(experts=37, topk=5, correction=True, scale=2.0),
    "not normalised": RouterSpec(experts=12, topk=3, normalize=False, scale=4.0),
    "best of groups": RouterSpec(experts=160, topk=6, groups=8, top_groups=3, group_best=1, normalize=False),
    "sigmoid": RouterSpec(experts=384, topk=8, score="sigmoid", correction=True, scale=2.5),
    "sigmoid in groups": RouterSpec(
        experts=12, topk=4, score="sigmoid", correction=True, groups=3, top_groups=2, scale=2.5
    ),
    "groups of fewer than count": RouterSpec(experts=10, topk=3, groups=5, top_groups=3, group_best=4),
    "all groups": RouterSpec(experts=12, topk=4, groups=3, top_groups=3),
    "square root of softplus": RouterSpec(experts=12, topk=2, score="sqrt_softplus", correction=True),
    "one": RouterSpec(experts=12, topk=1),
    "one of one": RouterSpec(experts=1, topk=1, score="sigmoid"),
    "all": RouterSpec(experts=12, topk=12),
    "all in groups": RouterSpec(experts=12, topk=8, groups=3, top_groups=2),
    "many": RouterSpec(experts=1000, topk=32, score="sigmoid"),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def score_of(kind: Score) -> Callable[[torch.Tensor], torch.Tensor]:
    return {
        "softmax": lambda logits: logits.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrt_softplus": lambda logits: logits.exp().log1p().sqrt(),
    }[kind]


def plain(spec: RouterSpec, logits: torch.Tensor, correction: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in float64, and experts by sorts that keep the order of equals."""
    scores = score_of(spec.score)(logits.double())
    ranking = scores if correction is None else scores + correction.double()
    grouped = ranking.unflatten(1, (spec.groups, -1))
    worth = grouped.sort(descending=True).values[..., : spec.group_best].sum(-1)
    kept = worth.argsort(descending=True, stable=True)[:, : spec.top_groups]
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
    ranking = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
    experts = ranking.argsort(descending=True, stable=True)[:, : spec.topk]
    return weighed(spec, scores, experts), experts


def weighed(spec: RouterSpec, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    weights = scores.gather(1, experts)
    return (weights / weights.sum(-1, keepdim=True) if spec.normalize else weights) * spec.scale


def routed(
    spec: RouterSpec, logits: torch.Tensor, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = (spec.groups, spec.top_groups, spec.group_best)
    return route(logits, correction, spec.topk, groups, spec.score, spec.normalize, spec.scale)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router(name: str) -> None:
    """Rows cut out of wider ones, and beside them only NaN; each token as if it were alone."""
    spec = ROUTERS[name]
    wide = torch.full((7, spec.experts + 5), torch.nan, device=DEVICE)
    logits = wide[:, 3 : 3 + spec.experts]
    logits.copy_(torch.randn(logits.shape) * 3)
    correction = torch.randn(spec.experts, device=DEVICE) if spec.correction else None
    weights, experts = routed(spec, logits, correction)
    want_weights, want = plain(spec, logits, correction)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert torch.equal(experts, want)
    torch.testing.assert_close(weights.double(), want_weights, atol=1e-7, rtol=4e-6)
    alone = routed(spec, logits[4:5], correction)
    assert torch.equal(alone[0], weights[4:5]) and torch.equal(alone[1], experts[4:5])
    none = routed(spec, logits[:0], correction)
    assert none[0].shape == none[1].shape == (0, spec.topk)


@pytest.mark.parametrize("correction", [False, True])
def test_of_equals_the_first(correction: bool) -> None:
    """Few different scores, both zeros among them; groups that are equal; all equal."""
    spec = RouterSpec(experts=24, topk=6, score="sigmoid", groups=4, top_groups=2, correction=correction)
    logits = torch.randint(0, 2, (9, 24), device=DEVICE).float()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    shift = -0.5 * torch.ones(24, device=DEVICE) if correction else None
    for case in (spec, RouterSpec(experts=24, topk=24, score="sigmoid")):
        weights, experts = routed(case, logits, shift)
        want_weights, want = plain(case, logits, shift)
        assert torch.equal(experts, want)
        torch.testing.assert_close(weights.double(), want_weights, atol=1e-7, rtol=4e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_logits_of_every_size(score: Score) -> None:
    """Scores keep their digits where the exponential is lost beside one, and where it would overflow."""
    spec = RouterSpec(experts=9, topk=9, score=score, normalize=False)
    logits = torch.tensor([[-60.0, -30.0, -17.5, -12.0, -3.0, 0.0, 3.0, 19.9, 20.1]], device=DEVICE)
    weights, experts = routed(spec, logits, None)
    assert experts.sort().values.tolist() == [list(range(9))]
    torch.testing.assert_close(weights.double(), plain(spec, logits, None)[0], atol=0.0, rtol=3e-5)
    high = routed(spec, logits * 40 + 3000, None)[0]
    assert bool(high.isfinite().all())


def test_without_numbers_there_still_are_experts() -> None:
    """A token of a padded batch may be anything: its experts exist, and differ."""
    spec = RouterSpec(experts=12, topk=4, groups=3, top_groups=2)
    logits = torch.full((2, 12), torch.nan, device=DEVICE)
    logits[1] = -torch.inf
    _, experts = routed(spec, logits, None)
    assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in experts.tolist())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("topk", [1, 6])
def test_looked_up(topk: int, score: Score, normalize: bool) -> None:
    spec = RouterSpec(experts=13, topk=topk, score=score, normalize=normalize, scale=1.5, table=VOCABULARY)
    table = torch.rand(VOCABULARY, 13, device=DEVICE).argsort(1)[:, :topk].contiguous()
    logits, ids = torch.randn(5, 13, device=DEVICE), torch.randint(0, VOCABULARY, (5,), device=DEVICE)
    weights, experts = looked_up(logits, table, ids, score, normalize, 1.5)
    assert torch.equal(experts, table[ids])
    want = weighed(spec, score_of(score)(logits.double()), experts)
    torch.testing.assert_close(weights.double(), want, atol=1e-7, rtol=4e-6)
    assert looked_up(logits[:0], table, ids[:0], score, normalize, 1.5)[0].shape == (0, topk)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "joined",
    [(), ("shared",), ("shared", "gate"), ("bias",), ("shared", "gate", "bias")],
    ids=lambda joined: " ".join(joined) or "alone",
)
@pytest.mark.parametrize(("tokens", "topk", "hidden"), [(0, 3, 40), (1, 1, 300), (5, 3, 40), (3, 13, 20)])
def test_sums(tokens: int, topk: int, hidden: int, joined: tuple[str, ...], dtype: torch.dtype) -> None:
    """Rows cut out of wider ones, and beside them only NaN; more choices than are read at once."""

    def rows(count: int, width: int) -> torch.Tensor:
        wide = torch.full((count, width + 3), torch.nan, device=DEVICE).to(dtype)
        wide[:, 1 : 1 + width].copy_(torch.randn(count, width))
        return wide[:, 1 : 1 + width]

    pairs = tokens * topk
    # One more than are chosen, that is NaN.
    results = torch.cat([rows(pairs, hidden), rows(1, hidden) * torch.nan])
    place = torch.randperm(pairs, device=DEVICE).int()
    weights = torch.rand(tokens, topk, device=DEVICE)
    experts = torch.randint(0, 6, (tokens, topk), device=DEVICE)
    shared = rows(tokens, hidden) if "shared" in joined else None
    gate = rows(tokens, 1) if "gate" in joined else None
    bias = rows(6, hidden) if "bias" in joined else None
    got = combine(results, weights, place, dtype, shared, gate, bias, experts if bias is not None else None)
    each = results[place.long()].double().unflatten(0, (tokens, topk))
    if bias is not None:
        each = each + bias.double()[experts]
    want = (weights.double()[..., None] * each).sum(1)
    if shared is not None:
        want = want + shared.double() * (1.0 if gate is None else gate.double().sigmoid())
    assert got.shape == (tokens, hidden) and got.is_contiguous()
    if tokens:
        assert (found := compare(got, want.float(), KINDS[dtype])), str(found)
        if not joined:
            alone = combine(results, weights[-1:], place[-topk:], dtype)
            assert torch.equal(alone[0], got[-1])


def test_sums_of_one_type_in_another() -> None:
    """So many tokens that programs are of another size."""
    results = torch.randn(140, 40, device=DEVICE)
    weights, place = torch.rand(70, 2, device=DEVICE), torch.arange(140, device=DEVICE)
    got = combine(results, weights, place, torch.bfloat16)
    want = (weights[..., None] * results.view(70, 2, 40)).sum(1)
    assert (found := compare(got, want, "bf16")), str(found)


@pytest.mark.parametrize("exact", [True, False], ids=["weights of bf16", "weights of fp32"])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_bf16_model_are_those_of_fp32(bias: bool, exact: bool) -> None:
    """Whichever product is taken: on a GPU that of bf16, where the weights allow it."""
    spec = RouterSpec(experts=24, topk=24, normalize=False, bias=bias)
    module = Router(spec, 512, Build(dtype=torch.bfloat16, device=torch.device(DEVICE)))
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape) / 16
        parameter.data.copy_(drawn.bfloat16() if exact else drawn)
    weight = module.gate.weight
    assert weight is not None
    kept, added = weight.data.double(), 0.0 if module.gate.bias is None else module.gate.bias.double()
    finish(module)
    assert (module.bf16_weight is not None) == (exact and DEVICE == "cuda" and torch.version.cuda is not None)
    for x in (torch.randn(9, 512, device=DEVICE).bfloat16(), torch.randn(9, 512, device=DEVICE)):
        weights, experts = module(x, torch.zeros(9, dtype=torch.int64, device=DEVICE))
        want = (x.double() @ kept.T + added).softmax(-1).gather(1, experts)
        torch.testing.assert_close(weights.double(), want, atol=1e-7, rtol=1e-5)
