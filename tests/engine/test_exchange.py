"""The time and bytes of exchanges between ranks, against numbers computed by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from allotrope.engine.planning.exchange import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SEND,
    Exchange,
    total_seconds,
    total_sent,
)
from allotrope.kernels.chip_figures import FIGURES
from allotrope.ops.all_reduce.protocol import SYNC_US

H200 = FIGURES["h200"]
LINK, NCCL = H200.link.bandwidth.value, H200.link.library_latency.value


def test_a_small_sum_takes_the_latency_of_peer_memory() -> None:
    found = Exchange(ALL_REDUCE, "mixers", 1, 8192, 2).seconds(H200)
    assert found == pytest.approx(4.2e-6 + 2 * 8192 / LINK)
    # Rows and a flag, for more of them.
    size = 1 << 20
    assert Exchange(ALL_REDUCE, "mixers", 1, size, 2).seconds(H200) == pytest.approx(
        4.2e-6 + size / LINK + SYNC_US * 1e-6
    )


def test_a_large_sum_is_shared_and_all_others_are_the_librarys() -> None:
    size = 1 << 25
    found = Exchange(ALL_REDUCE, "mixers", 1, size, 8).seconds(H200)
    assert found == pytest.approx(4.2e-6 + 2 * 7 / 8 * size / LINK + 2 * SYNC_US * 1e-6)
    for name in (ALL_GATHER, REDUCE_SCATTER):
        assert Exchange(name, "rows", 3, size, 4).seconds(H200) == pytest.approx(3 * (NCCL + 3 / 4 * size / LINK))


def test_two_ranks_have_fewer_channels_of_the_library() -> None:
    size, pair = 1 << 25, H200.link.pair_bandwidth.value
    assert pair < LINK
    for name in (ALL_GATHER, REDUCE_SCATTER):
        assert Exchange(name, "rows", 1, size, 2).seconds(H200) == pytest.approx(NCCL + size / 2 / pair)


def test_few_rows_go_through_peer_memory() -> None:
    for name in (ALL_GATHER, REDUCE_SCATTER):
        found = Exchange(name, "rows", 3, 4096, 4).seconds(H200)
        assert found == pytest.approx(3 * (4.2e-6 + 2 * 3 * 1024 / LINK))
        found = Exchange(name, "rows", 1, 1 << 23, 4).seconds(H200)
        assert found == pytest.approx(4.2e-6 + 3 * (1 << 21) / LINK + SYNC_US * 1e-6)


def test_hosts_are_crossed_by_every_rank_with_its_part() -> None:
    network, size = H200.network, 1 << 24
    assert network is not None
    expected = NCCL + 2 * 7 / 8 * size / LINK + 2 / 2 * size / (8 * network.bandwidth.value) + network.latency.value
    assert Exchange(ALL_REDUCE, "mixers", 1, size, 16, 2).seconds(H200) == pytest.approx(expected)
    # Two ranks that lie on two hosts use no links of a host.
    one_each = Exchange(ALL_GATHER, "rows", 1, size, 2, 2)
    assert one_each.seconds(H200) == pytest.approx(size / 2 / network.bandwidth.value + network.latency.value)
    assert one_each.sent == (0, size // 2)
    sent = Exchange(SEND, "rows to the next stage", 1, size, 2, 2)
    assert sent.seconds(H200) == pytest.approx(network.latency.value + size / network.bandwidth.value)
    assert sent.sent == (0, size) and dataclasses.replace(sent, hosts=1).sent == (size, 0)


def test_bytes_of_a_rank_by_hand() -> None:
    exchanges = [
        Exchange(ALL_REDUCE, "mixers", 10, 800, 4),
        Exchange(ALL_GATHER, "rows", 2, 800, 8),
        Exchange(ALL_REDUCE, "mixers", 1, 1600, 16, 2),
    ]
    assert total_sent(exchanges) == (10 * 2 * 600 + 2 * 700 + 2 * 1400, 2 * 1600 // 16)
    assert total_seconds(exchanges, H200) == sum(one.seconds(H200) for one in exchanges)


@pytest.mark.parametrize("name", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND])
def test_more_bytes_and_more_hosts_never_take_less_time(name: str) -> None:
    ranks = 2 if name == SEND else 8
    times = [Exchange(name, "rows", 1, 1 << power, ranks).seconds(H200) for power in range(8, 30)]
    # The library's own sums begin where those through peer memory end.
    assert all(after >= 0.9 * before for before, after in itertools.pairwise(times))
    assert all(
        Exchange(name, "rows", 1, 1 << power, ranks, 2).seconds(H200) > times[power - 8] for power in range(8, 30)
    )


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is known of the network of l40s"):
        Exchange(ALL_REDUCE, "mixers", 1, 8192, 16, 2).seconds(FIGURES["l40s"])
