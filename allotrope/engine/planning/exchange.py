"""What the ranks of a layout exchange in a step, and how long that takes: bytes over links, and a latency for each.

Owns the formulas of collectives; bandwidths and latencies are the chip's figures. Must not know models.

    all-reduce of m bytes over n ranks of a host   latency + the protocol that is estimated fastest, up to 8 ranks
                                                   latency + 2 (n - 1) m / (n b) by NCCL or RCCL
    all-gather, reduce-scatter of m bytes in all   latency + a protocol of m / n bytes, up to 8 ranks and 16 MiB
                                                   latency + (n - 1) m / (n b) by NCCL or RCCL
    over h hosts                                   the same within each host, then between them over r network adapters
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allotrope.kernels.chip_figures import ChipFigures, Link
from allotrope.kernels.symmetric_memory import MAX_BYTES, MAX_RANKS
from allotrope.ops.all_reduce.protocol import ROWS_PROTOCOLS, Protocol, estimate

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all-reduce", "all-gather", "reduce-scatter", "send"


@dataclass(frozen=True)
class Exchange:
    """`count` collectives of a step. `of`: whose results they join. `ranks`: how many take part, of `hosts` hosts.
    `bytes`: of one: what each rank has after an all-gather and before a reduce-scatter, of an all-reduce both, and of
    what is sent to the next stage."""

    name: str
    of: str
    count: int
    bytes: int
    ranks: int
    hosts: int = 1

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that a rank sends in all of them at the least: over the links of its host, and over the network."""
        if self.name == SEND:
            return (self.count * self.bytes, 0) if self.hosts == 1 else (0, self.count * self.bytes)
        passes = 2 if self.name == ALL_REDUCE else 1
        inside = self.ranks // self.hosts
        links = passes * self.count * self.bytes * (inside - 1) // inside
        network = passes * self.count * self.bytes * (self.hosts - 1) // (self.hosts * inside)
        return links, network

    def seconds(self, figures: ChipFigures) -> float:
        """The time of all of them. Raises ValueError if they cross hosts and nothing is known of a network."""
        return self.count * self._one(figures)

    def _one(self, figures: ChipFigures) -> float:
        link, network = figures.link, figures.network
        if self.hosts > 1 and network is None:
            raise ValueError(f"nothing is known of the network of {figures.name}")
        if self.name == SEND:
            way = link if self.hosts == 1 or network is None else network
            return way.latency.value + self.bytes / way.bandwidth.value
        passes, inside = (2 if self.name == ALL_REDUCE else 1), self.ranks // self.hosts
        if self.name == ALL_REDUCE and self.hosts == 1 and self.ranks <= MAX_RANKS:
            return link.latency.value + _fastest(link, self.ranks, self.bytes, Protocol)
        if self.hosts == 1 and self.ranks <= MAX_RANKS and self.bytes <= 2 * MAX_BYTES:
            return link.latency.value + _fastest(link, self.ranks, self.bytes // self.ranks, ROWS_PROTOCOLS)
        latency = link.library_latency.value if inside > 1 else 0.0
        seconds = latency + passes * (inside - 1) / inside * self.bytes / link.library_bandwidth(inside)
        if self.hosts == 1 or network is None:
            return seconds
        # Each rank of a host has an adapter for its part.
        across = passes * (self.hosts - 1) / self.hosts * self.bytes / (inside * network.bandwidth.value)
        return seconds + across + network.latency.value


def _fastest(link: Link, ranks: int, size: int, among: Iterable[Protocol]) -> float:
    """Seconds beyond the latency, of our own kernels by one of these protocols."""
    bytes_per_us = link.bandwidth.value / 1e6
    return min(estimate(protocol, ranks, size, bytes_per_us) for protocol in among) / 1e6


def total_seconds(exchanges: Iterable[Exchange], figures: ChipFigures) -> float:
    """The time of exchanges one after another."""
    return sum(one.seconds(figures) for one in exchanges)


def total_sent(exchanges: Iterable[Exchange]) -> tuple[int, int]:
    """Bytes that a rank sends, over links and over the network."""
    sent = [one.sent for one in exchanges]
    return sum(links for links, _ in sent), sum(network for _, network in sent)
