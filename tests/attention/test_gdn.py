"""The gated delta rule against its definition in float64, on scattered, recycled and poisoned slots.

That every schedule of every case gives the definition is held by `test_naive.py`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.naive_output import naive_output, naive_results
from attention.on_cpu import skip_unless_it_runs
from torch.nn.functional import pad

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, SlotIndex
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.gdn import GDN, GdnSpec
from allotrope.attention.gdn.plan import PART_TOKENS
from allotrope.attention.replay import Replay, at_random, in_chunks, in_order, whole
from allotrope.kernels.chip import CPU as CPU_CHIP

CASES = {name: case for name, case in cases("gdn").items() if not case.spec.channel_decay}
SMALL = [name for name in CASES if name != "released_size"]
ON_CPU = [one for one in GDN.backends if not one.rejects(next(iter(CASES.values())).spec, CPU_CHIP)]
BACKENDS = pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.name)


def final_states(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """[sequences, Hv, Dk, Dv] recurrent states in float64, and [sequences, conv_width - 1, conv_dim] the last inputs of
    the convolution, zeros before the first token."""
    inputs = [pad(u, (0, 0, case.spec.conv_width - 1, 0)) for u in case.inputs().tokens["qkv"].split(case.lengths)]
    last = torch.stack([u[len(u) - case.spec.conv_width + 1 :] for u in inputs])
    return torch.stack([state for _, state in naive_results(case)]), last


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_half_precision(name: str, dtype: torch.dtype, backend: AttentionBackend) -> None:
    case = cases("gdn", dtype)[name]
    skip_unless_it_runs(backend, case)
    want = naive_output(case)
    for steps in (at_random(case.lengths, 1), at_random(case.lengths, 3)):
        assert (found := compare(Replay(case, backend).play(steps), want, case.kind)), found


@BACKENDS
@pytest.mark.parametrize("name", SMALL)
def test_a_slot_holds_the_state_after_the_last_token(name: str, backend: AttentionBackend) -> None:
    case = CASES[name]
    skip_unless_it_runs(backend, case)
    states, last_inputs = final_states(case)
    for steps in (whole(case.lengths), at_random(case.lengths, 6)):
        replay = Replay(case, backend)
        slots = list(range(1, 1 + len(case.lengths)))
        replay.held["state"] = [[slot] for slot in slots]
        replay.play(steps)
        assert (found := compare(replay.pools["state"]["ssm"][slots], states, "fp32")), found
        assert torch.equal(replay.pools["state"]["conv"][slots], last_inputs)


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
    want = naive_output(case)
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
    (small,) = GDN.backends[-1].plan(CASES["one_to_two"].spec, batch, index).sub_batches
    assert [slots.tolist() for _, slots in small.states] == [[3, 1, 2]]
    (large,) = GDN.backends[-1].plan(CASES["released_size"].spec, batch, index).sub_batches
    assert [slots for _, slots in large.states] == [slice(3, 4), slice(1, 2), slice(2, 3)]


def test_half_precision_state_is_rounded_once_a_step() -> None:
    case = CASES["one_to_one"]
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, state_dtype=torch.float16))
    replay = Replay(case, next(one for one in ON_CPU if not one.rejects(case.spec, CPU_CHIP)))
    slots = [5, 1, 9, 2, 8, 3, 7, 4, 6]
    replay.held["state"] = [[slot] for slot in slots]
    replay.play(whole(case.lengths))
    states, _ = final_states(case)
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
