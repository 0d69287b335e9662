"""The kernel of verify steps: against plain decoding by the kernels bit for bit, and against the reference."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from attention.verify_steps import Member, VerifyReplay, plain_decodes
from device_under_test import DEVICE

from allotrope.attention.batch import BatchLayout, SlotIndex, VerifyRows
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.family import CacheFormat
from allotrope.attention.gdn import GDN

TRITON, REFERENCE = GDN.backends[0], GDN.backends[-1]
MAX_DRAFTS = 3
PROMPTS, LENGTHS, LATE = (4, 2, 0), (8, 7, 5), 6
# (case, dtype, state dtype): both decays, value heads per key head 1 to 8, head sizes that no block size divides.
SELECTED = [
    ("one_to_two", torch.float32, torch.float32),
    ("one_to_four", torch.bfloat16, torch.float32),
    ("one_to_eight", torch.float32, torch.float32),
    ("one_to_one", torch.bfloat16, torch.bfloat16),
    ("by_channel_one_to_two", torch.float32, torch.bfloat16),
    ("by_channel", torch.bfloat16, torch.float32),
]
CAPTURED = SELECTED[3:5]
if DEVICE == "cuda":
    SELECTED += [
        ("released_size", torch.bfloat16, torch.float32),
        ("released_size", torch.bfloat16, torch.bfloat16),
        ("by_channel_released_size", torch.bfloat16, torch.float32),
    ]
    CAPTURED = SELECTED


def verify_case(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> Case:
    case = cases("gdn", dtype)[name]
    spec = GDN.with_cache(case.spec, CacheFormat(state_dtype=state_dtype, max_drafts=MAX_DRAFTS))
    return dataclasses.replace(case, spec=spec, lengths=(*LENGTHS, LATE))


def play(replay: VerifyReplay, seed: int, static: bool) -> None:
    """Every sequence to its end, with drafts of which none, some or all are right; eager steps have prompts as well."""
    choose = random.Random(seed)
    replay.held["state"] = [[slot] for slot in range(1, 1 + len(replay.case.lengths))]
    for i, prompt in enumerate(PROMPTS):
        if prompt:
            replay.step([(i, prompt)])
    while going := [i for i, n in enumerate(LENGTHS) if replay.done[i] < n]:
        members = []
        for i in choose.sample(going, choose.randint(1, len(going))):
            # The last token is the first of a step, so that the slot ends with the state after it.
            right = min(choose.randint(0, MAX_DRAFTS), max(0, LENGTHS[i] - replay.done[i] - 2))
            members.append(Member(i, choose.choice((right, choose.randint(right, MAX_DRAFTS))), right))
        members.insert(choose.randint(0, len(members)), Member(-1))
        if not static and replay.done[-1] < LATE:
            members.append(Member(len(LENGTHS), prompt=LATE // 2))
        out = replay.verify(members, static, null_slot=choose.choice((0, -1)))
        padding = sum(1 + one.drafts for one in members[: members.index(Member(-1))])
        assert not out[padding].any()


@pytest.mark.parametrize(
    ("name", "dtype", "state_dtype", "static"),
    [(*one, False) for one in SELECTED] + [(*one, True) for one in CAPTURED],
)
def test_drafts_give_the_bits_of_plain_decoding(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype, static: bool
) -> None:
    case = verify_case(name, dtype, state_dtype)
    plain = plain_decodes(case, TRITON, (*PROMPTS, LATE), DEVICE)
    replay = VerifyReplay(case, TRITON, DEVICE)
    play(replay, 3 if static else 4, static)
    # Heads of other than 128 channels: the compiler lays q and k out by how they are loaded, and sums follow.
    exact = DEVICE == "cpu" or "released_size" in name

    def same(got: torch.Tensor, want: torch.Tensor) -> bool:
        if exact or not want.any():
            return torch.equal(got, want)
        return bool(compare(got, want.float(), "bf16" if got.dtype == torch.bfloat16 else "fp32"))

    for i in range(len(LENGTHS)):
        assert same(torch.cat(replay.outputs[i]), torch.cat(plain.outputs[i])), i
        conv, ssm = ([one.pools["state"][field][i + 1] for one in (replay, plain)] for field in ("conv", "ssm"))
        assert torch.equal(*conv), i
        assert same(*ssm), i


@pytest.mark.parametrize(("name", "dtype", "state_dtype"), SELECTED[:1] + SELECTED[4:5])
def test_equals_the_reference(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Outputs of every row, those of wrong drafts too, and each field of the slots."""
    case = verify_case(name, dtype, state_dtype)
    members = [[Member(0, 3, 1), Member(1, 1, 1), Member(2)], [Member(2, 2, 2), Member(0, 2), Member(1, 3, 3)]]
    played, pools = [], []
    for backend, device in ((REFERENCE, "cpu"), (TRITON, DEVICE)):
        replay = VerifyReplay(case, backend, device)
        replay.held["state"] = [[2], [4], [1], [3]]
        replay.step([(0, 5), (1, 2)])
        played.append(torch.cat([replay.verify(step).cpu() for step in members]))
        pools.append({field: pool.cpu() for field, pool in replay.pools["state"].items()})
    kind = case.kind if state_dtype == torch.float32 else "bf16"
    got = played[1].to(torch.bfloat16) if kind == "bf16" else played[1]
    assert (found := compare(got, played[0], kind)), found
    for field in pools[0]:
        for slot, kept in ((2, 2), (4, 3), (1, 2)):
            want, made = (one[field][slot] for one in pools)
            if field == "ssm":
                made = made.to(torch.bfloat16) if kind == "bf16" else made
                assert (found := compare(made, want.float(), kind)), found
            elif field == "conv":
                assert torch.equal(made, want)
            else:
                assert torch.equal(made[:kept], want[:kept]), field


def test_padding_rows_write_nothing() -> None:
    """Two padding rows around a sequence with drafts: only its slot changes, and counters are zero again."""
    case = verify_case("one_to_two", torch.float32, torch.float32)
    replay = VerifyReplay(case, TRITON, DEVICE)
    replay.held["state"] = [[3], [1], [2], [4]]
    replay.step([(0, 5)])
    before = {name: pool.clone() for name, pool in replay.pools["state"].items()}
    replay.verify([Member(-1), Member(0, 3, 2), Member(-1)], static=True)
    for name, pool in replay.pools["state"].items():
        same = (pool == before[name]) | (pool.isnan() & before[name].isnan())
        assert same[[0, 1, 2, 4]].all(), name
        assert not same[3].all(), name
        assert pool[3].isfinite().all(), name


def test_counters_are_zero_after_a_step() -> None:
    case = verify_case("one_to_two", torch.float32, torch.float32)
    replay = VerifyReplay(case, TRITON, DEVICE)
    batch = BatchLayout((1, 1), (4, 5), torch.device(DEVICE), verify=VerifyRows((0, 0), (2, 0), (0, 0)))
    plan = TRITON.plan(case.spec, batch, {"state": SlotIndex(torch.tensor([1, 1], device=DEVICE))})
    tokens = {name: t[:2].to(DEVICE) for name, t in replay.inputs.tokens.items()}
    for _ in range(2):
        TRITON.run(case.spec, plan, replay.pools, GDN.ready_inputs(case.spec, **tokens, **replay.layer))
        assert not plan.arrivals.any()


def test_steps_without_drafts_run_the_decode_kernel() -> None:
    case = verify_case("one_to_two", torch.float32, torch.float32)
    batch = BatchLayout((1,), (4,), torch.device(DEVICE))
    index = {"state": SlotIndex(torch.tensor([1], device=DEVICE))}
    assert TRITON.plan(case.spec, batch, index).verify is None
    batch = dataclasses.replace(batch, verify=VerifyRows((0,), (1,), (0,)))
    assert TRITON.plan(case.spec, batch, index).verify is not None
    assert TRITON.plan(dataclasses.replace(case.spec, max_drafts=0), batch, index).verify is None
