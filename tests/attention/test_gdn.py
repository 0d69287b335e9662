"""The gated delta rule against its equation in float64, on scattered, recycled and poisoned slots."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.on_cpu import skip_unless_it_runs

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, SlotIndex
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.gdn import GDN, GdnSpec
from allotrope.attention.gdn.plan import PART_TOKENS
from allotrope.attention.replay import Replay, alone, at_random, in_chunks, in_order, whole
from allotrope.kernels.chip import CPU as CPU_CHIP

CASES = {name: case for name, case in cases("gdn").items() if not case.spec.channel_decay}
SMALL = [name for name in CASES if name != "released_size"]
ON_CPU = [one for one in GDN.backends if not one.rejects(next(iter(CASES.values())).spec, CPU_CHIP)]
BACKENDS = pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.name)


def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, nv, dv] outputs, [sequences, nv, dk, dv] final states and [sequences, W - 1, conv_dim] final convolution
    inputs, in float64, one value head and one token at a time."""
    spec = case.spec
    inputs = case.inputs()
    qkv, b, a = (inputs.tokens[name].double() for name in ("qkv", "b", "a"))
    weight, bias, a_log, dt_bias = (
        inputs.layer[name].double() for name in ("conv_weight", "conv_bias", "A_log", "dt_bias")
    )
    out = torch.zeros(len(qkv), spec.num_v_heads, spec.v_head_dim, dtype=torch.float64)
    states, kept, begin = [], [], 0
    for n in case.lengths:
        before = torch.zeros(spec.conv_width - 1, spec.conv_dim, dtype=torch.float64)
        u = torch.cat((before, qkv[begin : begin + n]))
        kept.append(u[n:])
        y = torch.stack([(u[t : t + spec.conv_width].T * weight).sum(1) + bias for t in range(n)])
        y = y / (1 + torch.exp(-y))
        q, k, v = y.split((spec.key_dim, spec.key_dim, spec.value_dim), dim=1)
        heads = []
        for j in range(spec.num_v_heads):
            source = j // (spec.num_v_heads // spec.num_k_heads)
            state = torch.zeros(spec.k_head_dim, spec.v_head_dim, dtype=torch.float64)
            for t in range(n):
                q_t = q[t, source * spec.k_head_dim : (source + 1) * spec.k_head_dim]
                k_t = k[t, source * spec.k_head_dim : (source + 1) * spec.k_head_dim]
                v_t = v[t, j * spec.v_head_dim : (j + 1) * spec.v_head_dim]
                q_t = q_t / (q_t @ q_t + 1e-6).sqrt() / spec.k_head_dim**0.5
                k_t = k_t / (k_t @ k_t + 1e-6).sqrt()
                step = torch.log1p(torch.exp(a[begin + t, j] + dt_bias[j]))
                state = torch.exp(-torch.exp(a_log[j]) * step) * state
                delta = (v_t - state.T @ k_t) / (1 + torch.exp(-b[begin + t, j]))
                state = state + torch.outer(k_t, delta)
                out[begin + t, j] = state.T @ q_t
            heads.append(state)
        states.append(torch.stack(heads))
        begin += n
    return out, torch.stack(states), torch.stack(kept)


ORACLES = {name: oracle(CASES[name]) for name in SMALL}


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_any_schedule_gives_the_equation(name: str, backend: AttentionBackend) -> None:
    case = CASES[name]
    skip_unless_it_runs(backend, case)
    lengths = case.lengths
    schedules = [whole(lengths), alone(lengths), *(in_chunks(lengths, size) for size in (1, 3, 64))]
    for steps in [*schedules, at_random(lengths, 1), at_random(lengths, 2)]:
        found = compare(Replay(case, backend).play(steps), ORACLES[name][0], "fp32")
        assert found, f"{found}, steps {steps}"


def test_released_size() -> None:
    case = CASES["released_size"]
    want = oracle(case)[0]
    for steps in (whole(case.lengths), at_random(case.lengths, 3)):
        assert (found := compare(Replay(case, ON_CPU[0]).play(steps), want, "fp32")), found


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_half_precision(name: str, dtype: torch.dtype, backend: AttentionBackend) -> None:
    case = cases("gdn", dtype)[name]
    skip_unless_it_runs(backend, case)
    skip_unless_it_runs(backend, case)
    want = oracle(case)[0]
    for steps in (at_random(case.lengths, 1), at_random(case.lengths, 3)):
        assert (found := compare(Replay(case, backend).play(steps), want, case.kind)), found


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_a_slot_holds_the_state_after_the_last_token(name: str, backend: AttentionBackend) -> None:
    case = CASES[name]
    skip_unless_it_runs(backend, case)
    _, states, kept = ORACLES[name]
    for steps in (whole(case.lengths), at_random(case.lengths, 6)):
        replay = Replay(case, backend)
        slots = list(range(1, 1 + len(case.lengths)))
        replay.held["state"] = [[slot] for slot in slots]
        replay.play(steps)
        assert (found := compare(replay.pools["state"]["ssm"][slots], states, "fp32")), found
        assert torch.equal(replay.pools["state"]["conv"][slots], kept.float())


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_neighbours_and_their_order_change_at_most_the_last_bits(name: str, backend: AttentionBackend) -> None:
    """Whether exp takes its vector or its scalar form depends on where an element lies in the step's tensors."""
    case = CASES[name]
    skip_unless_it_runs(backend, case)
    chunks = in_chunks(case.lengths, 24)
    together = Replay(case, backend).play(chunks)
    reversed_order = Replay(case, backend).play([in_order(reversed(step)) for step in chunks])
    apart = Replay(case, backend).play([[taken] for step in chunks for taken in step])
    last_bits = 2 * torch.finfo(torch.float32).eps * together.abs().max()
    assert (together - reversed_order).abs().max() <= last_bits
    assert (together - apart).abs().max() <= last_bits


@BACKENDS
def test_prefill_longer_than_a_part(backend: AttentionBackend) -> None:
    short = CASES["one_to_two"]
    case = dataclasses.replace(short, lengths=(3, PART_TOKENS + 61, PART_TOKENS + 61, 1, 2 * PART_TOKENS))
    want = oracle(case)[0]
    for steps in (whole(case.lengths), in_chunks(case.lengths, 300)):
        assert (found := compare(Replay(case, backend).play(steps), want, "fp32")), found


@BACKENDS
@pytest.mark.parametrize("null", [0, -1])
def test_padding_requests_give_zeros_and_write_nothing(backend: AttentionBackend, null: int) -> None:
    case = CASES["one_to_two"]
    replay = Replay(case, backend)
    pools = replay.pools["state"]
    before = {name: pool.clone() for name, pool in pools.items()}
    batch = BatchLayout((1, 1, 5, 3), (1, 9, 5, 3), torch.device("cpu"))
    plan = backend.plan(case.spec, batch, {"state": SlotIndex(torch.tensor([2, null, 4, null]))})
    out = backend.run(
        case.spec,
        plan,
        replay.pools,
        GDN.ready_inputs(case.spec, **{name: t[:10] for name, t in replay.inputs.tokens.items()}, **replay.layer),
    )
    assert not out[[1, 7, 8, 9]].any()
    assert out[[0, 2, 3, 4, 5, 6]].isfinite().all()
    assert out[[0, 2, 3, 4, 5, 6]].any()
    for name, pool in pools.items():
        untouched = [slot for slot in range(len(pool)) if slot not in (2, 4)]
        same = (pool == before[name]) | (pool.isnan() & before[name].isnan())
        assert same[untouched].all(), name
        assert pool[[2, 4]].isfinite().all(), name


@BACKENDS
def test_a_copied_slot_resumes_as_the_original(backend: AttentionBackend) -> None:
    """What a host does for a state checkpoint: copy every field of a slot."""
    case = dataclasses.replace(CASES["one_to_two"], lengths=(90, 90))
    replay = Replay(case, backend)
    for t in replay.inputs.tokens.values():
        t[90:] = t[:90]
    replay.step([(0, 40)])
    (slot,), copy = replay.held["state"][0], replay.free["state"].pop()
    for pool in replay.pools["state"].values():
        pool[copy] = pool[slot]
    replay.held["state"][1], replay.done[1] = [copy], 40
    out = replay.step([(0, 50), (1, 50)])
    assert (out[:50] - out[50:]).abs().max() <= 1e-7


def test_large_states_advance_where_they_lie() -> None:
    """The plan gathers small states and takes large ones one by one, as slices."""
    batch = BatchLayout((1, 1, 1), (5, 6, 7), torch.device("cpu"))
    index = {"state": SlotIndex(torch.tensor([3, 1, 2]))}
    (small,) = GDN.backends[-1].plan(CASES["one_to_two"].spec, batch, index).parts
    assert [slots.tolist() for _, slots in small.states] == [[3, 1, 2]]
    (large,) = GDN.backends[-1].plan(CASES["released_size"].spec, batch, index).parts
    assert [slots for _, slots in large.states] == [slice(3, 4), slice(1, 2), slice(2, 3)]


def test_half_precision_state_is_rounded_once_a_step() -> None:
    case = CASES["one_to_one"]
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, state_dtype=torch.float16))
    replay = Replay(case, next(one for one in ON_CPU if not one.rejects(case.spec, CPU_CHIP)))
    slots = [5, 1, 9, 2, 8, 3, 7, 4, 6]
    replay.held["state"] = [[slot] for slot in slots]
    replay.play(whole(case.lengths))
    states = ORACLES["one_to_one"][1]
    assert (found := compare(replay.pools["state"]["ssm"][slots], states, "fp16")), found


def test_spec_names_every_wrong_number_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_v_heads=6 .* num_k_heads=4.*v_head_dim=0.*conv_width=1"):
        GdnSpec(
            num_k_heads=4, num_v_heads=6, k_head_dim=8, v_head_dim=0, conv_width=1, conv_dtype=torch.float32
        )  # fmt: skip


def test_state_bytes_of_the_released_size() -> None:
    """2 MiB of recurrent state and 96 KiB of fp32 convolution inputs a layer."""
    spec = CASES["released_size"].spec
    assert spec.conv_dim == 8192
    fields = {field.name: field.bytes for field in spec.caches()["state"].fields}
    assert fields == {"ssm": 2 << 20, "conv": 96 << 10}
