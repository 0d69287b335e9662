"""Faults put into real runs by hand: each must make `compare` fail, or the other tests prove nothing.

A family adds its own as rows of `FAULTS`: a case, and a function that breaks a `Replay` of it before it plays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.check import KINDS, cases, compare
from allotrope.attention.gdn import reference as gdn_reference
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, Step, in_order
from allotrope.kernels.backend import runs_anywhere
from allotrope.kernels.chip import CPU as CPU_CHIP

Fault = Callable[[Replay], None]


def change_spec(**numbers: Any) -> Fault:
    def fault(replay: Replay) -> None:
        replay.spec = dataclasses.replace(replay.spec, **numbers)  # type: ignore[type-var]

    return fault


def change_plan(change: Callable[[Any], Any]) -> Fault:
    def fault(replay: Replay) -> None:
        intact = replay.plan
        replay.plan = lambda batch, index: change(intact(batch, index))  # type: ignore[method-assign]

    return fault


def change_tokens(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Fault:
    def fault(replay: Replay) -> None:
        intact = replay.tokens
        replay.tokens = lambda step: change(intact(step))  # type: ignore[method-assign]

    return fault


def change_layer(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Fault:
    def fault(replay: Replay) -> None:
        found = replay.layer[name]
        assert found is not None
        replay.layer[name] = change(found)

    return fault


def between_steps(change: Callable[[Replay], None]) -> Fault:
    """Meddle with the memory or the page lists after every step."""

    def fault(replay: Replay) -> None:
        intact = replay.step

        def step(members: Step) -> torch.Tensor:
            out = intact(members)
            change(replay)
            return out

        replay.step = step  # type: ignore[method-assign]

    return fault


def each_part(change: Callable[[Any], Any]) -> Fault:
    return change_plan(
        lambda plan: dataclasses.replace(plan, sub_batches=tuple(change(sub_batch) for sub_batch in plan.sub_batches))
    )


def visibility(sub_batch: Any) -> torch.Tensor:
    """[b, q, L], written out where the plan has the plain causal one."""
    if sub_batch.visible is not None:
        return sub_batch.visible
    return torch.ones(sub_batch.queries, sub_batch.rows.shape[1], dtype=torch.bool).tril()[None]


def see_one_more(sub_batch: Any) -> Any:
    seen = visibility(sub_batch)
    return dataclasses.replace(sub_batch, visible=seen | torch.nn.functional.pad(seen, (1, 0))[..., :-1])


def miss_the_newest(sub_batch: Any) -> Any:
    seen = visibility(sub_batch)
    newest = seen & ~torch.nn.functional.pad(seen, (0, 1))[..., 1:]
    return dataclasses.replace(sub_batch, visible=seen & ~newest)


def see_everything(sub_batch: Any) -> Any:
    return dataclasses.replace(sub_batch, visible=torch.ones_like(visibility(sub_batch)))


def follow_absent_pages(sub_batch: Any) -> Any:
    """-1 taken for a page: it reaches the pool's last rows, and nothing masks them."""
    absent = sub_batch.rows == 0
    rows = torch.where(absent, 16 - torch.arange(sub_batch.rows.shape[1]) % 16, sub_batch.rows)
    return dataclasses.replace(sub_batch, rows=rows, visible=visibility(sub_batch) | absent[:, None])


def lose_the_last_row(plan: Any) -> Any:
    kept = torch.arange(len(plan.slots) - 1)
    return dataclasses.replace(plan, slots=plan.slots[:-1], writes=kept)


def swap_pages_of_one_request(replay: Replay) -> None:
    for held in replay.held["kv"]:
        if len(held) > 1 and min(held[:2]) > 0:
            held[0], held[1] = held[1], held[0]


def swap_pages_of_two_requests(replay: Replay) -> None:
    first, second = replay.held["kv"][-2:]
    if first and min(first[0], second[0]) > 0:
        first[0], second[0] = second[0], first[0]


def resume_on_stale_pages(replay: Replay) -> None:
    """As if a preempted request came back without recomputing, on pages that others have used."""
    if replay.done[2] == 40:
        replay.held["kv"][2][:2] = replay.free["kv"][-2:]


def tile_heads(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Query head h reads key head h % G in place of h // (H / G)."""
    heads, groups = rows["q"].shape[1], rows["k"].shape[1]
    order = torch.arange(heads).view(-1, groups).T.flatten()
    return rows | {"q": rows["q"][:, order]}


def use_core(core: Callable[..., torch.Tensor]) -> Fault:
    def fault(replay: Replay) -> None:
        run = functools.partial(gdn_reference.run, core=core)
        replay.backend = AttentionBackend("faulty", runs_anywhere, run, plan=FAMILIES["gdn"].backends[-1].plan)

    return fault


def tiled_heads(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> torch.Tensor:
    """Value head j reads key head j % nk in place of j // R."""
    repeat = v.shape[2] // k.shape[2]
    return gdn_reference.advance(q.repeat(1, 1, repeat, 1), k.repeat(1, 1, repeat, 1), v, g, beta, state)


def linear_decay(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> torch.Tensor:
    """g taken for e^g by a kernel that wants its logarithm."""
    return gdn_reference.advance(q, k, v, g.exp(), beta, state)


def one_rate(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> torch.Tensor:
    """All channels of a head forget at their mean rate."""
    return gdn_reference.advance(q, k, v, g.mean(-1, keepdim=True), beta, state)


def no_delta(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> torch.Tensor:
    """Plain gated linear attention: what the state already says about k is not taken away."""
    out = torch.empty_like(v)
    repeat = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2)
    for t in range(v.shape[1]):
        state *= g[:, t, ..., None].exp()
        state += torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * v[:, t])
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out


def keep_everything(plan: Any) -> Any:
    """A fresh request goes on from the state of the slot's last owner."""
    return dataclasses.replace(plan, fresh=None)


def forget_everything(plan: Any) -> Any:
    """Every step starts from zero."""
    slots = [torch.arange(one.slots.start, one.slots.stop) if isinstance(one.slots, slice) else one.slots
             for one in plan.sub_batches]  # fmt: skip
    return dataclasses.replace(plan, fresh=torch.cat(slots))


def clear(name: str) -> Callable[[Replay], None]:
    def change(replay: Replay) -> None:
        replay.pools["state"][name].zero_()

    return change


def swap_slots(replay: Replay) -> None:
    held = replay.held["state"]
    held[-1], held[-2] = held[-2], held[-1]


def old_inputs(replay: Replay) -> None:
    """The convolution's state shifted by one: what a chunk shorter than it leaves if its rest is not kept."""
    pool = replay.pools["state"]["conv"]
    pool[:, 1:] = pool[:, :-1].clone()


def round_state(replay: Replay) -> None:
    pool = replay.pools["state"]["ssm"]
    pool.copy_(pool.to(torch.bfloat16))


# family -> case -> fault -> how it is put in. Faults of rounding size are looked for in fp32 only.
FAULTS: dict[str, dict[str, dict[str, Fault]]] = {
    "mha": {
        "grouped_4": {
            "sees one row more": each_part(see_one_more),
            "does not see itself": each_part(miss_the_newest),
            "mask left out": each_part(see_everything),
            "-1 dereferenced": each_part(follow_absent_pages),
            "last row not written": change_plan(lose_the_last_row),
            "two pages swapped": between_steps(swap_pages_of_one_request),
            "page of another request": between_steps(swap_pages_of_two_requests),
            "stale pages after preemption": between_steps(resume_on_stale_pages),
            "heads tiled": change_tokens(tile_heads),
            "scale left out": change_spec(scale=1.0),
            "keys and values swapped": change_tokens(lambda rows: rows | {"k": rows["v"], "v": rows["k"]}),
        },
        "window_above_page": {
            "window one too small": change_spec(window=16),
            "window one too large": change_spec(window=18),
            "window left out": change_spec(window=1000),
            "-1 dereferenced": each_part(follow_absent_pages),
        },
        "softcap": {"soft-cap left out": change_spec(softcap=None)},
        "sinks": {
            "sinks left out": change_layer("sinks", lambda sinks: None),
            "sinks of other heads": change_layer("sinks", lambda sinks: sinks.roll(1)),
            "sinks scaled": change_layer("sinks", lambda sinks: sinks * 0.125),
        },
    },
    "gdn": {
        "one_to_two": {
            "b and a swapped": change_tokens(lambda rows: rows | {"a": rows["b"], "b": rows["a"]}),
            "b and a split even and odd": change_tokens(
                lambda rows: (
                    rows
                    | dict(zip("ba", torch.cat((rows["b"], rows["a"]), 1).unflatten(1, (-1, 2)).unbind(2), strict=True))
                )
            ),
            "heads tiled": use_core(tiled_heads),
            "g taken for its exponential": use_core(linear_decay),
            "nothing taken away": use_core(no_delta),
            "state of the slot's last owner": change_plan(keep_everything),
            "state lost between steps": change_plan(forget_everything),
            "recurrent state lost": between_steps(clear("ssm")),
            "convolution state lost": between_steps(clear("conv")),
            "convolution state shifted": between_steps(old_inputs),
            "state of another request": between_steps(swap_slots),
            "convolution bias left out": change_layer("conv_bias", lambda bias: None),
            "convolution reversed": change_layer("conv_weight", lambda weight: weight.flip(1)),
            "dt_bias of other heads": change_layer("dt_bias", lambda bias: bias.roll(1)),
            "state rounded to bf16": between_steps(round_state),
        },
        "by_channel": {
            "one rate for all channels": use_core(one_rate),
            "rates of other channels": change_layer("dt_bias", lambda bias: bias.roll(1)),
            "rates of other heads": change_layer("A_log", lambda rate: rate.flip(0)),
            "g taken for its exponential": use_core(linear_decay),
            "nothing taken away": use_core(no_delta),
            "recurrent state lost": between_steps(clear("ssm")),
        },
    },
}
FP32_ONLY = {"state rounded to bf16"}


def steps() -> Iterator[Step]:
    """Two sequences, one after the other in the same memory, then two at once: prompts in two chunks, then decodes."""
    yield [(0, 16)]
    yield [(1, 2)]
    yield [(1, 3)]
    yield [(2, 40), (3, 17)]
    yield in_order([(2, 23), (3, 3)])
    for _ in range(3):
        yield [(2, 1), (3, 1)]


def play(family: str, case_name: str, dtype: torch.dtype, fault: Fault | None = None) -> torch.Tensor:
    case = dataclasses.replace(cases(family, dtype)[case_name], lengths=(16, 5, 66, 23))
    replay = Replay(case, FAMILIES[family].backends[-1])
    if fault is not None:
        fault(replay)
    return replay.play(steps())


@functools.cache
def intact(family: str, case_name: str, dtype: torch.dtype) -> torch.Tensor:
    return play(family, case_name, dtype)


ROWS = [
    pytest.param(family, case, name, dtype, id=f"{family}-{case}-{name}-{KINDS[dtype]}")
    for family, of_case in FAULTS.items()
    for case, faults in of_case.items()
    for name in faults
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.float32 or name not in FP32_ONLY
]


@pytest.mark.parametrize(("family", "case", "name", "dtype"), ROWS)
def test_a_fault_is_seen(family: str, case: str, name: str, dtype: torch.dtype) -> None:
    want = intact(family, case, dtype)
    assert compare(want, want, KINDS[dtype])
    found = compare(play(family, case, dtype, FAULTS[family][case][name]), want, KINDS[dtype])
    assert not found, f"{name} went unseen: {found}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=KINDS.get)
@pytest.mark.parametrize(("family", "case"), [(family, case) for family in FAULTS for case in FAULTS[family]])
def test_another_backend_is_no_fault(family: str, case: str, dtype: torch.dtype) -> None:
    want = intact(family, case, dtype)
    small = dataclasses.replace(cases(family, dtype)[case], lengths=(16, 5, 66, 23))
    for backend in FAMILIES[family].backends:
        if not backend.rejects(small.spec, CPU_CHIP):
            assert (found := compare(Replay(small, backend).play(steps()), want, KINDS[dtype])), found


OUTPUT_FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "zeros for the last token": lambda out: torch.cat((out[:-1], torch.zeros_like(out[-1:]))),
    "last token dropped": lambda out: out[:-1],
    "last token repeated from before": lambda out: torch.cat((out[:-1], out[-2:-1])),
    "one value not a number": lambda out: out.index_put((torch.tensor(3), torch.tensor(1), torch.tensor(2)),
                                                        torch.tensor(float("nan"), dtype=out.dtype)),
    "one value infinite": lambda out: out.index_put((torch.tensor(0), torch.tensor(0), torch.tensor(0)),
                                                    torch.tensor(float("inf"), dtype=out.dtype)),
    "wider type": lambda out: out.double(),
    "heads flattened": lambda out: out.flatten(1),
    "heads rolled": lambda out: out.roll(1, dims=1),
    "tokens rolled": lambda out: out.roll(1, dims=0),
    "sign": lambda out: -out,
    "2 % too large": lambda out: out * 1.02,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=KINDS.get)
@pytest.mark.parametrize("name", OUTPUT_FAULTS)
@pytest.mark.parametrize(("family", "case"), [("mha", "grouped_4"), ("gdn", "one_to_two")])
def test_a_broken_output_is_seen(family: str, case: str, name: str, dtype: torch.dtype) -> None:
    want = intact(family, case, dtype)
    found = compare(OUTPUT_FAULTS[name](want), want, KINDS[dtype])
    assert not found, f"{name} went unseen: {found}"
