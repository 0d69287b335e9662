"""Figures of each data-parallel rank in /metrics, and on their way there."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from allotrope.engine.messages import LENGTH, Stepped, pack, unpack_from_engine
from allotrope.engine.report import EngineStats, RankStats
from allotrope.server.metrics import Metrics

RANKS = (
    RankStats(
        running=2, waiting=1, pages_used={"paged": 3}, pages_total={"paged": 12}, requests=7, requests_by_prefix=4
    ),
    RankStats(running=1, pages_used={"paged": 6}, pages_total={"paged": 12}, preemptions=5, requests=6),
)
STATS = EngineStats(
    running=3, waiting=1, pages_used={"paged": 9}, pages_total={"paged": 24}, preemptions=5, ranks=RANKS
)


def samples(stats: EngineStats, compat: str = "none") -> dict[str, float]:
    families = text_string_to_metric_families(Metrics("tiny", lambda: stats, compat).exposition().decode())
    return {f"{one.name}[{one.labels.get('dp_rank', '')}]": one.value for family in families for one in family.samples}


def test_each_rank_has_its_figures() -> None:
    found = samples(STATS)
    assert found["allotrope_num_requests_running[]"] == 3 and found["allotrope_kv_cache_pages_used[]"] == 9
    names = {
        "requests_running": (2, 1),
        "requests_waiting": (1, 0),
        "requests_total": (7, 6),
        "requests_by_prefix_total": (4, 0),
        "preemptions_total": (0, 5),
        "kv_cache_usage_ratio": (0.25, 0.5),
    }
    for name, values in names.items():
        assert tuple(found[f"allotrope_dp_{name}[{dp_rank}]"] for dp_rank in range(2)) == values, name


def test_one_rank_has_no_figures_of_ranks_and_no_other_engine_has_such_names() -> None:
    assert not [name for name in samples(EngineStats()) if "_dp_" in name]
    assert not [name for name in samples(STATS, "vllm") if name.startswith("vllm:") and "dp_" in name]


def test_figures_cross_the_process_border() -> None:
    received = unpack_from_engine(pack(Stepped(outputs=[], stats=STATS))[LENGTH.size :])
    assert isinstance(received, Stepped) and received.stats == STATS
