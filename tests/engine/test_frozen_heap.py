"""Collections between steps pass over what was there before; outside of them nothing is changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_models import tiny

from allotrope import LLM, SamplingParams
from allotrope.engine.frozen_heap import frozen_heap
from allotrope.verify.random_checkpoint import write_random


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_full_collection_within_is_short() -> None:
    before = len(gc.get_objects())
    with frozen_heap():
        assert gc.get_freeze_count() > before // 2
        assert len(gc.get_objects()) < before // 10
    assert gc.get_freeze_count() == 0 and len(gc.get_objects()) > before // 2


def test_what_is_young_and_unreachable_is_not_kept() -> None:
    class Node:
        own: Any = None

    node = Node()
    node.own, found = node, weakref.ref(node)
    gc.disable()
    try:
        del node
        assert found() is not None
        with frozen_heap():
            assert found() is None
    finally:
        gc.enable()


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with frozen_heap():
        pass
    # Some of it may have gone by itself.
    assert gc.get_freeze_count() > count // 2 > 0


def test_steps_of_a_call_run_so(tmp_path: Path) -> None:
    """Also one that ends in an error."""
    write_random(tiny("LlamaForCausalLM"), tmp_path, None, 0)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=64)
    counts: list[int] = []
    step = llm.engine.step

    def counted() -> Any:
        counts.append(gc.get_freeze_count())
        if len(counts) == 4:
            raise MemoryError("as if")
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    llm.generate([[5, 6, 7]], params)
    assert gc.get_freeze_count() == 0
    with pytest.raises(MemoryError):
        llm.generate([[5, 6, 7]] * 2, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert gc.get_freeze_count() == 0 and all(count > 1000 for count in counts)
    llm.close()
