"""Verify steps of the gated delta rule on a CPU: bit for bit what decoding token by token gives."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from attention.on_cpu import skip_unless_it_runs
from attention.verify_steps import Member, VerifyReplay, plain_decodes

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, SlotIndex, VerifyRows
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.cost import Lengths
from allotrope.attention.family import CacheFormat
from allotrope.attention.gdn import GDN
from allotrope.attention.gdn.cost import cost
from allotrope.attention.replay import Replay, at_random
from allotrope.kernels.chip import CPU as CPU_CHIP

MAX_DRAFTS = 3
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ON_CPU = [one for one in GDN.backends if not one.rejects(cases("gdn")["one_to_one"].spec, CPU_CHIP)]
BACKENDS = pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.name)
# Three with a prompt before, one that begins with a decode, and one whose prompts run beside the others' drafts.
PROMPTS = (7, 2, 40, 0)
LENGTHS = (30, 17, 60, 12)
LATE_PROMPTS = (20, 13)


def verify_case(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> Case:
    case = cases("gdn", dtype)[name]
    spec = GDN.with_cache(case.spec, CacheFormat(state_dtype=state_dtype, max_drafts=MAX_DRAFTS))
    return dataclasses.replace(case, spec=spec, lengths=(*LENGTHS, sum(LATE_PROMPTS)))


def play(replay: VerifyReplay, seed: int) -> None:
    """Every sequence to its end, with drafts of which none, some or all are right, in random company and order."""
    choose = random.Random(seed)
    replay.held["state"] = [[slot] for slot in range(1, 1 + len(replay.case.lengths))]
    for i, prompt in enumerate(PROMPTS):
        if prompt:
            replay.step([(i, prompt)])
    late = list(LATE_PROMPTS)
    while any(replay.done[i] < n for i, n in enumerate(replay.case.lengths)):
        going = [i for i, n in enumerate(LENGTHS) if replay.done[i] < n]
        members = []
        for i in choose.sample(going, choose.randint(min(1, len(going)), len(going))):
            # The last token is the first of a step, so that the slot ends with the state after it.
            right = min(choose.randint(0, MAX_DRAFTS), max(0, LENGTHS[i] - replay.done[i] - 2))
            members.append(Member(i, choose.choice((right, choose.randint(right, MAX_DRAFTS))), right))
        members.insert(choose.randint(0, len(members)), Member(-1))
        if late and (not going or choose.random() < 0.3):
            members.append(Member(len(LENGTHS), prompt=late.pop(0)))
        out = replay.verify(members, null_slot=choose.choice((0, -1)))
        padding = sum(1 + one.drafts for one in members[: members.index(Member(-1))])
        assert not out[padding].any()


@BACKENDS
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["one_to_one", "one_to_two", "one_to_four", "by_channel", "by_channel_one_to_two"])
def test_drafts_give_the_bits_of_plain_decoding(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype, backend: AttentionBackend
) -> None:
    case = verify_case(name, dtype, state_dtype)
    skip_unless_it_runs(backend, case)
    plain = plain_decodes(case, backend, (*PROMPTS, LATE_PROMPTS[0]))
    kind = case.kind if state_dtype == torch.float32 else "bf16"
    for seed in range(3):
        replay = VerifyReplay(case, backend)
        play(replay, seed)
        for i in range(len(LENGTHS)):
            assert torch.equal(torch.cat(replay.outputs[i]), torch.cat(plain.outputs[i])), i
            for field in ("conv", "ssm"):
                assert torch.equal(replay.pools["state"][field][i + 1], plain.pools["state"][field][i + 1]), (i, field)
        late = len(LENGTHS)
        found = compare(torch.cat(replay.outputs[late]).to(KINDS[kind]), torch.cat(plain.outputs[late]), kind)
        assert found, found


@BACKENDS
def test_a_slot_holds_the_first_token_and_the_inputs_of_the_drafts(backend: AttentionBackend) -> None:
    case = dataclasses.replace(verify_case("one_to_one", torch.float32, torch.float32), lengths=(9, 9))
    plain, replay = plain_decodes(case, backend, (4, 4)), VerifyReplay(case, backend)
    replay.held["state"] = [[1], [2]]
    for i in range(2):
        replay.step([(i, 4)])
    replay.verify([Member(0, drafts=3, right=2), Member(1)])
    first = Replay(case, backend)
    first.held["state"] = [[1], [2]]
    for step in ([(0, 4)], [(0, 1)], [(1, 4)], [(1, 1)]):
        first.step(step)
    pools = replay.pools["state"]
    for field in ("conv", "ssm"):
        assert torch.equal(pools[field][1:], first.pools["state"][field][1:])
    for name, tokens in replay.inputs.tokens.items():
        kept = pools[f"draft_{name}"]
        assert torch.equal(kept[1], torch.cat((tokens[5:7], replay.wrong.tokens[name][:1])))
        assert not kept[2].any(), name
    replay.verify([Member(0), Member(1)])
    assert torch.equal(torch.cat(replay.outputs[0]), torch.cat(plain.outputs[0])[:8])


@BACKENDS
def test_a_sequence_at_position_0_ignores_what_its_slot_held(backend: AttentionBackend) -> None:
    case = dataclasses.replace(verify_case("one_to_one", torch.float32, torch.float32), lengths=(5, 5))
    replay = VerifyReplay(case, backend)
    for name, t in replay.inputs.tokens.items():
        assert t.shape[0] == 10, name
    outputs = []
    for i in range(2):
        # Both through one slot; the second one finds the state and the drafts of the first.
        replay.held["state"][i] = [2]
        outputs.append(replay.verify([Member(i, drafts=3, right=3)]))
        replay.verify([Member(i)])
    plain = plain_decodes(case, backend, (0, 0))
    for i in range(2):
        assert torch.equal(torch.cat(replay.outputs[i]), torch.cat(plain.outputs[i]))


@BACKENDS
def test_steps_without_drafts_are_plain_steps(backend: AttentionBackend) -> None:
    """The kept inputs beside a state change nothing as long as no step has drafts."""
    case = dataclasses.replace(verify_case("one_to_two", torch.float32, torch.float32), lengths=(3, 66, 20))
    without = dataclasses.replace(case, spec=dataclasses.replace(case.spec, max_drafts=0))
    steps = at_random(case.lengths, 2)
    assert torch.equal(Replay(case, backend).play(steps), Replay(without, backend).play(steps))


@BACKENDS
def test_only_padding(backend: AttentionBackend) -> None:
    case = verify_case("one_to_one", torch.float32, torch.float32)
    assert not VerifyReplay(case, backend).verify([Member(-1), Member(-1)]).any()


def test_layout_without_drafts_is_the_one_before() -> None:
    case = verify_case("by_channel", torch.bfloat16, torch.float32)
    spec = dataclasses.replace(case.spec, max_drafts=0)
    plain, kept = spec.caches()["state"].fields, case.spec.caches()["state"].fields
    assert [field.name for field in plain] == ["conv", "ssm"]
    assert kept[:2] == plain
    assert {field.name: field.shape for field in kept[2:]} == {
        "draft_qkv": (3, spec.conv_dim),
        "draft_b": (3, spec.num_v_heads),
        "draft_a": (3, spec.decay_dim),
    }
    assert {field.dtype for field in kept[2:]} == {torch.bfloat16}
    lengths = Lengths(torch.tensor([1, 1]), torch.tensor([5, 6]), 2)
    assert cost(spec, lengths) == cost(case.spec, lengths)


@BACKENDS
@pytest.mark.parametrize(("num_rows", "replay"), [((5, 0, 0, 0, 0), (0,) * 5), ((1,), (4,))])
def test_more_drafts_than_the_state_keeps_are_refused(
    backend: AttentionBackend, num_rows: tuple[int, ...], replay: tuple[int, ...]
) -> None:
    case = verify_case("one_to_one", torch.float32, torch.float32)
    rows = len(num_rows)
    verify = VerifyRows((0,) * rows, num_rows, replay)
    batch = BatchLayout((1,) * rows, tuple(range(9, 9 + rows)), torch.device("cpu"), verify=verify)
    with pytest.raises(ValueError, match="max_drafts=3"):
        backend.plan(case.spec, batch, {"state": SlotIndex(torch.ones(rows, dtype=torch.int64))})
