"""Every rank has one place in the layout, and each kind of group has every rank once."""

from __future__ import annotations

import itertools

import pytest

from allotrope.config import EngineConfig
from allotrope.errors import ConfigError
from allotrope.layers.parallel import Parallel, Section
from allotrope.rank_layout import RankLayout, RankPosition, group_of

LAYOUTS = [RankLayout(), RankLayout(2), RankLayout(1, 2), RankLayout(2, 3, 2), RankLayout(4, 2, 1, True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_a_place_and_its_groups(layout: RankLayout) -> None:
    positions = [layout.position(rank) for rank in range(layout.size)]
    assert len(set(positions)) == layout.size == layout.tensor * layout.data * layout.pipeline
    assert [layout.rank(position) for position in positions] == list(range(layout.size))
    kinds = {
        layout.tensor_groups(): (layout.tensor, "tp_rank"),
        layout.data_groups(): (layout.data, "dp_rank"),
        layout.pipeline_groups(): (layout.pipeline, "stage"),
    }
    for groups, (size, varies) in kinds.items():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        for group in groups:
            assert [getattr(layout.position(rank), varies) for rank in group] == list(range(size))
            fixed = {"stage", "dp_rank", "tp_rank"} - {varies}
            assert all(len({getattr(layout.position(rank), one) for rank in group}) == 1 for one in fixed)
    for stage, group in enumerate(layout.stage_groups()):
        assert {layout.position(rank).stage for rank in group} == {stage}


def test_a_layout_has_a_name_and_a_name_a_layout() -> None:
    names = ["TP1", "TP2", "DP2", "TP2 DP3 PP2", "TP4 DP2 EP"]
    assert [layout.name for layout in LAYOUTS] == names
    assert [RankLayout.named(name) for name in names] == LAYOUTS
    for wrong in ("", "EP", "TP", "TP0", "DP1", "DP2 TP2", "TP2 TP2", "TP2+EP", "TP2 EP EP", "XP2"):
        with pytest.raises(ValueError, match="no layout is named"):
            RankLayout.named(wrong)


def test_ranks_are_counted_stage_by_stage() -> None:
    layout = RankLayout(2, 2, 2)
    assert layout.position(5) == RankPosition(stage=1, dp_rank=0, tp_rank=1)
    assert group_of(5, layout.tensor_groups()) == (4, 5)
    assert group_of(5, layout.data_groups()) == (5, 7)
    assert group_of(5, layout.stage_groups()) == (4, 5, 6, 7)
    assert group_of(5, layout.pipeline_groups()) == (1, 5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_attention_is_cut_by_tensor_and_the_rest_by_all_ranks_of_a_stage(layout: RankLayout) -> None:
    section = Section("heads", 96, 4)
    for groups, own in ((layout.tensor_groups(), False), (layout.stage_groups(), True)):
        for group in groups:
            ranks = [Parallel.of(layout, rank) for rank in group]
            bounds = [section.bounds(one.of_stage if own else one) for one in ranks]
            assert bounds[0][0] == 0 and bounds[-1][1] == 96
            assert all(first[1] == second[0] for first, second in itertools.pairwise(bounds))


def test_a_rank_without_data_parallel_is_one_of_its_stage() -> None:
    assert Parallel.of(RankLayout(4), 3) == Parallel(3, 4)
    assert Parallel(3, 4).of_stage == Parallel(3, 4) and Parallel(3, 4).data is None
    with pytest.raises(ValueError, match=r"heads=6 cannot be shared by data_parallel_size \* tensor_parallel_size=4"):
        Parallel.of(RankLayout(2, 2)).of_stage.split("heads", 6)


def test_options_make_the_layout() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, data_parallel_size=3, enable_expert_parallel=True)
    assert config.layout == RankLayout(2, 3, 1, True)
    assert str(config.layout) == "tensor_parallel_size=2, data_parallel_size=3, enable_expert_parallel"
    with pytest.raises(ConfigError, match=r"data_parallel_size=0; at least 1 is needed; pipeline_parallel_size=-1"):
        EngineConfig(model="m", data_parallel_size=0, pipeline_parallel_size=-1)
