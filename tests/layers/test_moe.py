"""Routing and experts against a loop over tokens in float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allotrope.checkpoint.weights import fill_random, finish
from allotrope.kernels.backend import Chooser
from allotrope.kernels.chip import CHIPS, CPU
from allotrope.layers.build import Build
from allotrope.layers.expert_placement import ExpertPlacement
from allotrope.layers.mlp import Mlp, MlpSpec
from allotrope.layers.moe import Moe, MoeSpec
from allotrope.layers.parallel import Parallel
from allotrope.layers.router import RouterSpec
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.matmul import onednn
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import GGUF_BLOCKS
from allotrope.ops.matmul.launch import Launch, Shape, launch_for
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.weight import Format
from allotrope.ops.moe_route import reference
from allotrope.rank_layout import RankLayout

HIDDEN, WIDTH, EXPERTS, VOCABULARY = 16, 8, 12, 50


OPS = ("moe_route", "hash_route", "moe_group", "moe_combine", "moe_experts")
WANTED: dict[str, str] = {}


@pytest.fixture(params=["as it comes", "reference"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with what is compiled on this machine, and without."""
    wanted = dict.fromkeys(OPS, "reference") if request.param == "reference" else {}
    monkeypatch.setitem(globals(), "WANTED", wanted)


def build(parallel: Parallel | None = None) -> Build:
    return Build(parallel=parallel or Parallel(), chooser=Chooser(CPU, WANTED))


ROUTERS: dict[str, RouterSpec] = {
    "softmax": RouterSpec(experts=EXPERTS, topk=3),
    "softmax with bias": RouterSpec(experts=EXPERTS, topk=4, bias=True, scale=2.0),
    "not normalised": RouterSpec(experts=EXPERTS, topk=3, normalize=False, scale=4.0),
    "best of groups": RouterSpec(
        experts=EXPERTS, topk=3, groups=4, top_groups=2, group_best=1, normalize=False, scale=1.5
    ),
    "sigmoid": RouterSpec(experts=EXPERTS, topk=3, score="sigmoid", correction=True, scale=2.5),
    "sigmoid in groups": RouterSpec(
        experts=EXPERTS, topk=4, score="sigmoid", correction=True, groups=3, top_groups=2, scale=2.5
    ),
    "square root of softplus": RouterSpec(experts=EXPERTS, topk=2, score="sqrt_softplus", correction=True),
    "looked up": RouterSpec(experts=EXPERTS, topk=2, score="sqrt_softplus", table=VOCABULARY, scale=1.5),
    "one": RouterSpec(experts=EXPERTS, topk=1),
    "all": RouterSpec(experts=EXPERTS, topk=EXPERTS),
}


def make(router: RouterSpec, **numbers: Any) -> tuple[Moe, dict[str, torch.Tensor]]:
    """The module with random weights, and those weights in float64."""
    module = Moe(MoeSpec(hidden=HIDDEN, width=WIDTH, router=router, **numbers), build())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.dtype == torch.int64:
            parameter.data = torch.rand(VOCABULARY, EXPERTS, generator=generator).argsort(1)[:, : router.topk]
        else:
            parameter.data = torch.randn(parameter.shape, generator=generator) * (0.3 if "weight" not in name else 1.0)
    weights = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
    finish(module)
    return module, {name: t.double() if t.is_floating_point() else t for name, t in weights.items()}


def choose(spec: RouterSpec, weights: dict[str, torch.Tensor], x: torch.Tensor, token: int) -> dict[int, float]:
    """Expert -> weight of one token."""
    logits = weights["router.gate.weight"] @ x
    if spec.bias:
        logits = logits + weights["router.gate.bias"]
    score = {
        "softmax": lambda: logits.softmax(0),
        "sigmoid": logits.sigmoid,
        "sqrt_softplus": lambda: logits.exp().log1p().sqrt(),
    }[spec.score]()
    if spec.table:
        chosen = weights["router.table"][token].tolist()
    else:
        ranking = score + weights["router.correction"] if spec.correction else score
        size = EXPERTS // spec.groups
        groups = [ranking[g * size : (g + 1) * size].sort(descending=True).values for g in range(spec.groups)]
        best = sorted(range(spec.groups), key=lambda g: -groups[g][: spec.group_best].sum().item())[: spec.top_groups]
        allowed = [e for e in range(EXPERTS) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -ranking[e].item())[: spec.topk]
    total = sum(score[e].item() for e in chosen) if spec.normalize else 1.0
    return {e: score[e].item() / total * spec.scale for e in chosen}


def gated(gating: GatedActivation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    if gating.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return gate / (1 + (-gating.slope * gate).exp()) * (up + gating.offset)


def oracle(spec: MoeSpec, weights: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, token in zip(x.double(), ids.tolist(), strict=True):
        y = torch.zeros(HIDDEN, dtype=torch.float64)
        for e, share in choose(spec.router, weights, row, token).items():
            inner = weights["experts.gate_up"][e] @ row
            if spec.bias:
                inner = inner + weights["experts.gate_up_bias"][e]
            out = weights["experts.down"][e] @ gated(spec.gating, inner[:WIDTH], inner[WIDTH:])
            y += share * (out + weights["experts.down_bias"][e] if spec.bias else out)
        if spec.shared is not None:
            inner = weights["shared.gate_up.weight"] @ row
            width = spec.shared.width
            gating = GatedActivation(limit=spec.shared.limit)
            out = weights["shared.down.weight"] @ gated(gating, inner[:width], inner[width:])
            y += out * (weights["shared_gate.weight"] @ row).sigmoid() if spec.shared_gate else out
        rows.append(y)
    return torch.stack(rows)


def run(module: Moe, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    here: Any = SimpleNamespace(step=SimpleNamespace(ids=ids, all_ids=ids))
    return module(x, here)


def check(router: RouterSpec, tokens: int = 40, **numbers: Any) -> None:
    module, weights = make(router, **numbers)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    spec = MoeSpec(hidden=HIDDEN, width=WIDTH, router=router, **numbers)
    want = oracle(spec, weights, x, ids)
    torch.testing.assert_close(run(module, x, ids).double(), want, atol=2e-5 * float(want.abs().max()), rtol=0.0)
    for i in (0, tokens - 1):
        torch.testing.assert_close(
            run(module, x[i : i + 1], ids[i : i + 1]).double(), want[i : i + 1], atol=1e-4, rtol=1e-5
        )


@pytest.mark.parametrize("packed", [False, True], ids=["in one call", "one by one"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "MIN_NUMBERS", 1 if packed else 1 << 18)
    check(ROUTERS[name])


@pytest.mark.parametrize("packed", [False, True], ids=["in one call", "one by one"])
@pytest.mark.parametrize(
    "numbers",
    [
        {"bias": True, "gating": GatedActivation(slope=1.702, limit=2.0, offset=1.0)},
        {"gating": GatedActivation(activation="gelu_tanh")},
        {"gating": GatedActivation(limit=1.5), "shared": MlpSpec(hidden=HIDDEN, width=12, limit=1.5)},
        {"shared": MlpSpec(hidden=HIDDEN, width=24)},
        {"shared": MlpSpec(hidden=HIDDEN, width=8), "shared_gate": True},
    ],
    ids=["bias and clamps", "gelu", "clamped shared", "shared", "gated shared"],
)
def test_experts(numbers: dict[str, Any], packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "MIN_NUMBERS", 1 if packed else 1 << 18)
    check(ROUTERS["sigmoid"], **numbers)


def test_widths_that_one_call_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an odd number of bytes go expert by expert."""
    monkeypatch.setitem(globals(), "WIDTH", 5)
    check(ROUTERS["softmax"])


def test_a_group_that_is_not_among_the_best_has_no_expert() -> None:
    """The best expert of all sits in the worst group of a router that ranks groups by their two best."""
    spec = RouterSpec(experts=4, topk=1, score="sigmoid", groups=2, top_groups=1)
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    assert reference.topk_experts(scores, None, spec).tolist() == [[2]]


def test_ranks_add_up_to_the_whole() -> None:
    """What each of two ranks computes sums to what one computes: neither enters a collective, for there is no group."""
    router = ROUTERS["softmax"]
    shared = MlpSpec(hidden=HIDDEN, width=8)
    spec = MoeSpec(hidden=HIDDEN, width=WIDTH, router=router, bias=True, shared=shared, shared_gate=True)
    whole, weights = make(router, bias=True, shared=shared, shared_gate=True)
    x, ids = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2)), torch.zeros(9, dtype=torch.int64)
    parts = []
    for rank in range(2):
        parallel = Parallel(rank, 2)
        module = Moe(spec, build(parallel))
        for name, parameter in module.named_parameters():
            placement = parameter.placement  # type: ignore[attr-defined]
            for section in placement.sections:
                before = sum(one.size for one in placement.sections[: placement.sections.index(section)])
                dim = placement.dim + bool(placement.experts)
                full = weights[name].float().narrow(dim, before, section.size)
                for target, source in (
                    zip(parameter.data, full, strict=True) if placement.experts else [(parameter.data, full)]
                ):
                    placement.fill(target, source, section.name, parallel)
        finish(module)
        parts.append(run(module, x, ids))
    torch.testing.assert_close(parts[0] + parts[1], run(whole, x, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("copies", [None, 0, 5])
@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_with_whole_experts_add_up_to_the_whole(ranks: int, copies: int | None, tokens: int) -> None:
    """In runs, and placed by some load: with copies, a token's position decides which of them serves it."""
    spec = MoeSpec(hidden=HIDDEN, width=WIDTH, router=ROUTERS["softmax"], bias=True)
    whole = Moe(spec, build())
    fill_random(whole, 3)
    finish(whole)
    x, ids = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2)), torch.zeros(tokens).long()
    loads = [expert**2 for expert in range(EXPERTS)]
    placements = {} if copies is None else {"experts": ExpertPlacement.balanced(loads, ranks, copies)}
    total, held = torch.zeros(tokens, HIDDEN), 0
    for rank in range(ranks):
        layout = RankLayout(ranks, expert_parallel=True)
        module = Moe(spec, replace(build(Parallel.of(layout, rank)), expert_placements=placements))
        fill_random(module, 3)
        finish(module)
        held += module.experts.count
        total += run(module, x, ids)
    assert held == EXPERTS + (copies or 0)
    torch.testing.assert_close(total, run(whole, x, ids), atol=1e-5, rtol=1e-5)


def test_a_rank_launches_its_experts_for_the_rows_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows that a kernel is given are those of the other rank's experts."""
    pytest.importorskip("triton", reason="triton is not installed")
    from allotrope.ops.matmul import providers

    asked = []

    def record(shape: Shape, rows: int, chip: str, library: bool) -> Launch:
        asked.append((shape.experts, rows))
        return launch_for(shape, rows, chip, library)

    monkeypatch.setattr(providers, "launch_for", record)
    on_gpu = Chooser(CHIPS["sm_90"], dict.fromkeys(("moe_group", "moe_combine"), "reference"))
    spec = MoeSpec(hidden=HIDDEN, width=WIDTH, router=ROUTERS["softmax"])
    for ranks, held in ((1, EXPERTS), (2, EXPERTS // 2)):
        parallel = Parallel.of(RankLayout(ranks, expert_parallel=ranks > 1), 0)
        experts = Moe(spec, replace(build(parallel), chooser=on_gpu)).experts
        fill_random(experts, 3)
        experts.finish_loading()
        assert experts.count == held
        experts(torch.randn(9, HIDDEN), torch.rand(9, 3), torch.arange(27).remainder(EXPERTS).view(9, 3))
    assert [number for number, _ in asked] == [EXPERTS] * 4


@pytest.mark.parametrize("format", [MXFP4, Fp8(128), GGUF_BLOCKS["q8_0"]], ids=lambda one: one.name)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_quantized_experts_by_whole_groups(ranks: int, format: Format) -> None:
    """Five groups are no multiple of the ranks: one rank has more of them, all have room for as many, and the rest of
    it changes nothing."""
    group = format.group_size or format.pack_factor
    shared = MlpSpec(hidden=128, width=5 * group)
    spec = MoeSpec(
        hidden=128,
        width=5 * group,
        router=ROUTERS["softmax"],
        bias=True,
        gating=GatedActivation(offset=1),
        shared=shared,
    )
    sections = (("gate_up", "gate"), ("gate_up", "up"), ("down", ""))
    formats = {(f"experts.{weight}", section): format for weight, section in sections}
    formats |= {(f"shared.{weight}.weight", section): format for weight, section in sections}
    whole, x, ids = None, torch.randn(9, 128, generator=torch.Generator().manual_seed(2)), torch.zeros(9).long()
    total = torch.zeros(9, 128)
    for parallel in (Parallel(), *(Parallel(rank, ranks) for rank in range(ranks))):
        module = Moe(spec, replace(build(parallel), formats=formats))
        fill_random(module, 3)
        finish(module)
        assert module.experts.formats == (format, format)
        assert isinstance(module.shared, Mlp) and module.shared.down.format == format
        if whole is None:
            whole = run(module, x, ids)
        else:
            total += run(module, x, ids)
    assert whole is not None and bool(whole.isfinite().all()) and float(whole.std()) > 0
    torch.testing.assert_close(total / whole.std(), whole / whole.std(), atol=1e-2, rtol=1e-2)


def test_routers_that_cannot_be_are_refused_with_every_reason() -> None:
    with pytest.raises(ValueError, match=r"topk=9; .*experts=8 is not a multiple of groups=3"):
        RouterSpec(experts=8, topk=9, groups=3)
    with pytest.raises(ValueError, match="hold no 5"):
        RouterSpec(experts=8, topk=5, groups=4, top_groups=2)
