"""What a client of the engine makes of outputs that came while it was busy."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from allotrope.engine.client import MAX_JOINED, _joined
from allotrope.errors import EngineDead
from allotrope.request import SequenceOutput, TokenLogprobs

SCORES = (TokenLogprobs(7, -1.0, 1),)
OUTPUTS = st.builds(
    SequenceOutput,
    request_id=st.just("r"),
    index=st.integers(0, 1),
    token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    finish_reason=st.sampled_from([None] * 12 + ["stop", "length", "error", "abort"]),
    stop_reason=st.sampled_from([None, 3]),
    logprobs=st.sampled_from([None] * 6 + [SCORES]),
    num_draft_tokens=st.sampled_from([0] * 6 + [2]),
)


def told(outputs: list[SequenceOutput], index: int) -> tuple[list[int], list[object]]:
    """What a reader learns of a sequence: its tokens, and how it ends."""
    own = [one for one in outputs if one.index == index]
    ends = [(one.finish_reason, one.stop_reason, one.error) for one in own if one.finish_reason is not None]
    return [token for one in own for token in one.token_ids], ends


@given(st.lists(OUTPUTS, max_size=60))
def test_joined_outputs_tell_the_same(arrived: list[SequenceOutput]) -> None:
    joined = [one for one in _joined([*arrived]) if isinstance(one, SequenceOutput)]
    assert all(told(joined, index) == told(arrived, index) for index in (0, 1))
    kept = [one for one in arrived if one.logprobs or one.num_draft_tokens or one.finish_reason in ("error", "abort")]
    assert [one for one in joined if one in kept] == kept


def test_plain_outputs_of_a_sequence_become_few() -> None:
    first = SequenceOutput("r", 0, (1,), cached_tokens=5, queued_seconds=2.0)
    arrived = [first, *(SequenceOutput("r", 0, (token,)) for token in range(2, 40))]
    arrived[-1] = replace(arrived[-1], finish_reason="length")
    one, _, three, dead = _joined([*arrived, EngineDead("gone")])
    assert isinstance(one, SequenceOutput) and isinstance(three, SequenceOutput)
    assert one == replace(first, token_ids=tuple(range(1, MAX_JOINED + 1)))
    assert three.finish_reason == "length" and three.token_ids[-1] == 39 and isinstance(dead, EngineDead)
