"""The delta rule whose key channels forget at rates of their own, against a float64 oracle that keeps no state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from attention.on_cpu import skip_unless_it_runs

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, SlotIndex
from allotrope.attention.check import Case, Inputs, cases, compare
from allotrope.attention.gdn import GDN, GdnSpec
from allotrope.attention.gdn.plan import PART_TOKENS
from allotrope.attention.replay import Replay, Step, alone, at_random, in_chunks, in_order, whole
from allotrope.kernels.chip import CPU as CPU_CHIP

CASES = {name: case for name, case in cases("gdn").items() if case.spec.channel_decay}
RELEASED = "by_channel_released_size"
SMALL = [name for name in CASES if name != RELEASED]
ON_CPU = [one for one in GDN.backends if not one.rejects(next(iter(CASES.values())).spec, CPU_CHIP)]
BACKENDS = pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.name)


def convolved(case: Case, inputs: Inputs, begin: int, length: int) -> torch.Tensor:
    """[length, conv_dim] after the convolution and silu, from the definition."""
    weight, bias = inputs.layer["conv_weight"], inputs.layer["conv_bias"]
    assert weight is not None
    assert bias is not None
    u = inputs.tokens["qkv"][begin : begin + length].double()
    y = bias.double().expand(length, -1).clone()
    for back in range(min(case.spec.conv_width, length)):
        y[back:] += u[: length - back] * weight.double()[:, -1 - back]
    return y * torch.sigmoid(y)


def one_head(case: Case, inputs: Inputs, y: torch.Tensor, begin: int, j: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, dv] outputs and the final [dk, dv] state of value head j, all tokens at once.

    d_i = beta_i (v_i - sum_{j < i} (sum_c k_ic k_jc e^(G_ic - G_jc)) d_j) is one triangular system over the sequence.
    """
    spec: GdnSpec = case.spec
    n, dk, dv = len(y), spec.k_head_dim, spec.v_head_dim
    rows, key = slice(begin, begin + n), j // (spec.num_v_heads // spec.num_k_heads)
    q, k = y[:, key * dk :][:, :dk], y[:, spec.key_dim + key * dk :][:, :dk]
    q, k = (t / (t.square().sum(1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v = y[:, 2 * spec.key_dim + j * dv :][:, :dv]
    channels = slice(j * dk, (j + 1) * dk)
    a, a_log, dt_bias = inputs.tokens["a"], inputs.layer["A_log"], inputs.layer["dt_bias"]
    assert a_log is not None
    assert dt_bias is not None
    pre = a[rows, channels].double() + dt_bias[channels].double()
    total = (-a_log[j].double().exp() * torch.log1p(pre.exp())).cumsum(0)
    fade = (total[:, None] - total).exp().nan_to_num(posinf=0.0)
    beta = 1 / (1 + (-inputs.tokens["b"][rows, j].double()).exp())
    earlier = torch.einsum("ic,jc,ijc->ij", k, k, fade).tril(-1)
    d = torch.linalg.solve(torch.eye(n, dtype=torch.float64) + beta[:, None] * earlier, beta[:, None] * v)
    out = torch.einsum("ic,jc,ijc->ij", q * dk**-0.5, k, fade).tril() @ d
    return out, ((total[-1] - total).exp() * k).T @ d


def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, nv, dv] outputs and [sequences, nv, dk, dv] final states in float64."""
    inputs = case.inputs()
    outs, states, begin = [], [], 0
    for n in case.lengths:
        y = convolved(case, inputs, begin, n)
        heads = [one_head(case, inputs, y, begin, j) for j in range(case.spec.num_v_heads)]
        outs.append(torch.stack([out for out, _ in heads], dim=1))
        states.append(torch.stack([state for _, state in heads]))
        begin += n
    return torch.cat(outs), torch.stack(states)


ORACLES = {name: oracle(CASES[name]) for name in SMALL}


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_any_schedule_gives_the_equation(name: str, backend: AttentionBackend) -> None:
    skip_unless_it_runs(backend, CASES[name])
    lengths = CASES[name].lengths
    schedules = [whole(lengths), alone(lengths), *(in_chunks(lengths, size) for size in (1, 3, 64))]
    for steps in [*schedules, at_random(lengths, 1), at_random(lengths, 2)]:
        found = compare(Replay(CASES[name], backend).play(steps), ORACLES[name][0], "fp32")
        assert found, f"{found}, steps {steps}"


def test_released_size() -> None:
    case = CASES[RELEASED]
    want = oracle(case)[0]
    for steps in (whole(case.lengths), at_random(case.lengths, 3)):
        assert (found := compare(Replay(case, ON_CPU[0]).play(steps), want, "fp32")), found


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_half_precision(name: str, dtype: torch.dtype, backend: AttentionBackend) -> None:
    case = cases("gdn", dtype)[name]
    skip_unless_it_runs(backend, case)
    want = oracle(case)[0]
    for steps in (at_random(case.lengths, 1), at_random(case.lengths, 3)):
        assert (found := compare(Replay(case, backend).play(steps), want, case.kind)), found


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_a_slot_holds_the_state_after_the_last_token(name: str, backend: AttentionBackend) -> None:
    case = CASES[name]
    skip_unless_it_runs(backend, case)
    slots = list(range(1, 1 + len(case.lengths)))
    for steps in (whole(case.lengths), in_chunks(case.lengths, 3), at_random(case.lengths, 6)):
        replay = Replay(case, backend)
        replay.held["state"] = [[slot] for slot in slots]
        replay.play(steps)
        assert (found := compare(replay.pools["state"]["ssm"][slots], ORACLES[name][1], "fp32")), found


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_a_recycled_slot_says_nothing_of_its_last_owner(name: str, backend: AttentionBackend) -> None:
    """All sequences through one slot, one after the other, backwards."""
    case = CASES[name]
    skip_unless_it_runs(backend, case)
    replay = Replay(case, backend)
    replay.free["state"] = [1]
    order: list[Step] = [[(i, n)] for i, n in reversed(list(enumerate(case.lengths)))]
    assert (found := compare(replay.play(order), ORACLES[name][0], "fp32")), found
    assert replay.pools["state"]["ssm"][2:].isnan().all()


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_other_requests_and_their_order_change_at_most_the_last_bits(name: str, backend: AttentionBackend) -> None:
    case = CASES[name]
    skip_unless_it_runs(backend, case)
    chunks = in_chunks(case.lengths, 24)
    together = Replay(case, backend).play(chunks)
    reversed_order = Replay(case, backend).play([in_order(reversed(step)) for step in chunks])
    apart = Replay(case, backend).play([[taken] for step in chunks for taken in step])
    assert (together - reversed_order).abs().max() <= 1e-7
    assert (together - apart).abs().max() <= 1e-7


@BACKENDS
def test_prefill_longer_than_a_part(backend: AttentionBackend) -> None:
    lengths = (3, PART_TOKENS + 61, 1, 2 * PART_TOKENS)
    case = dataclasses.replace(CASES["by_channel_one_to_two"], lengths=lengths)
    skip_unless_it_runs(backend, case)
    want = oracle(case)[0]
    for steps in (whole(case.lengths), in_chunks(case.lengths, 300)):
        assert (found := compare(Replay(case, backend).play(steps), want, "fp32")), found


@BACKENDS
@pytest.mark.parametrize("null", [0, -1])
def test_padding_requests_give_zeros_and_write_nothing(backend: AttentionBackend, null: int) -> None:
    case = CASES["by_channel"]
    skip_unless_it_runs(backend, case)
    replay = Replay(case, backend)
    before = replay.pools["state"]["ssm"].clone()
    batch = BatchLayout((1, 1, 5, 3), (1, 9, 5, 3), torch.device("cpu"))
    plan = backend.plan(case.spec, batch, {"state": SlotIndex(torch.tensor([2, null, 4, null]))})
    tokens = {name: t[:10] for name, t in replay.inputs.tokens.items()}
    out = backend.run(case.spec, plan, replay.pools, GDN.ready_inputs(case.spec, **tokens, **replay.layer))
    assert not out[[1, 7, 8, 9]].any()
    assert out[[0, 2, 3, 4, 5, 6]].isfinite().all()
    after = replay.pools["state"]["ssm"]
    same = (after == before) | (after.isnan() & before.isnan())
    assert same[[slot for slot in range(len(after)) if slot not in (2, 4)]].all()


def with_layer(case: Case, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """The case with one tensor of its layer changed."""

    def draw(*given: object) -> Inputs:
        inputs = case.draw(*given)
        old = inputs.layer[name]
        assert old is not None
        return Inputs(inputs.tokens, inputs.layer | {name: change(old)})

    return dataclasses.replace(case, draw=draw)


def every_third(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(bias: torch.Tensor) -> torch.Tensor:
        return bias.masked_fill(torch.arange(len(bias)) % 3 == 0, value)

    return change


@BACKENDS
@pytest.mark.parametrize("value", [-100.0, 300.0], ids=["never forget", "forget at once"])
def test_rates_at_both_ends(value: float, backend: AttentionBackend) -> None:
    """Neighbouring channels of one head keep everything, or lose it in a single token: no power is ever too large."""
    case = with_layer(CASES["by_channel"], "dt_bias", every_third(value))
    skip_unless_it_runs(backend, case)
    case = with_layer(case, "A_log", lambda rate: rate.clamp(max=1.0))
    got = Replay(case, backend).play(at_random(case.lengths, 4))
    assert (found := compare(got, oracle(case)[0], "fp32")), found


@BACKENDS
def test_equal_rates_are_one_rate_per_head(backend: AttentionBackend) -> None:
    by_head = cases("gdn")["one_to_two"]
    spec = dataclasses.replace(by_head.spec, channel_decay=True)
    dk = by_head.spec.k_head_dim

    def draw(_: object, *given: object) -> Inputs:
        inputs = by_head.draw(by_head.spec, *given)
        bias = inputs.layer["dt_bias"]
        assert bias is not None
        repeated = {"a": inputs.tokens["a"].repeat_interleave(dk, dim=1)}
        return Inputs(inputs.tokens | repeated, inputs.layer | {"dt_bias": bias.repeat_interleave(dk)})

    by_channel = dataclasses.replace(by_head, spec=spec, draw=draw)
    steps = at_random(by_head.lengths, 5)
    want = Replay(by_head, backend).play(steps)
    assert (found := compare(Replay(by_channel, backend).play(steps), want, "fp32")), found


def test_the_state_is_as_large_as_with_one_rate() -> None:
    spec = CASES[RELEASED].spec
    assert spec.decay_dim == 32 * 128
    assert {field.name: field.bytes for field in spec.caches()["state"].fields} == {"ssm": 2 << 20, "conv": 144 << 10}
    assert spec.plan_key == dataclasses.replace(spec, channel_decay=False).plan_key
