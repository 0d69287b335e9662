"""What is known of chips that are not here: memory, bandwidth, rates of matrix products, links between GPUs.

Owns one table, with the source of each number, and the constants that measured steps were fitted to. Plans read it; no
device is asked. Must not know models, layouts and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allotrope.kernels.chip import CHIPS, Chip

GIB = 1 << 30
_GB = 10**9


@dataclass(frozen=True)
class Figure:
    """A number, and who says so. `measured`: on such a chip by the command or page in `source`; else a vendor's figure,
    or one that is assumed, and `source` says what from."""

    value: float
    source: str
    measured: bool = False


@dataclass(frozen=True)
class Link:
    """The links of one GPU to others. `bandwidth`: bytes per second one way that collectives of large messages reach.
    `pair_bandwidth`: the same by NCCL or RCCL where only two ranks take part. `latency`: seconds of a collective of a
    few rows. `library_latency`: the same by NCCL or RCCL."""

    bandwidth: Figure
    pair_bandwidth: Figure
    latency: Figure
    library_latency: Figure

    def library_bandwidth(self, ranks: int) -> float:
        """Bytes per second one way that NCCL or RCCL reaches among `ranks`."""
        return (self.pair_bandwidth if ranks == 2 else self.bandwidth).value


@dataclass(frozen=True)
class ChipFigures:
    """`memory`: bytes that programs can have. `bandwidth`: bytes per second of a copy. `rates`: floating-point
    operations per second of dense products, by type; a type that is missing has no products of its own. `host`: GPUs of
    one host. `link`: between these. `network`: between hosts; None where nothing is known.
    """

    name: str
    about: str
    chip: Chip
    memory: Figure
    bandwidth: Figure
    rates: Mapping[str, Figure]
    host: int
    link: Link
    network: Link | None

    def assumed(self, *, hosts: int = 1) -> list[str]:
        """What no vendor states and nobody measured on this chip, a sentence each. `hosts`: how many are used."""
        stated = {"memory": self.memory, "bandwidth of memory": self.bandwidth}
        stated |= {f"rate of {kind} products": rate for kind, rate in self.rates.items()}
        stated["bandwidth of links between two ranks"] = self.link.pair_bandwidth
        links = [("links", self.link)] + ([] if hosts == 1 or self.network is None else [("the network", self.network)])
        for name, link in links:
            parts = (link.bandwidth, link.latency, link.library_latency)
            whats = (f"bandwidth of {name}", f"latency over {name}", f"latency over {name} of the vendor's library")
            stated |= dict(zip(whats, parts, strict=True))
        return [f"{what}: {one.source}" for what, one in stated.items() if not one.measured]


@dataclass(frozen=True)
class Fitted:
    """Constants of the time of a step, in seconds or as factors of the time at a chip's ceilings.

    `step`: of a decode step beside its kernels. `launch`: of each kernel of a step. `bytes`, `flops`: factors of the
    time of weights and caches, and of products. `passed`: factor of the time of what passes between kernels. `prompts`:
    of a batch of prompts beside its steps. `host_launch`: of the host for each kernel of an eager step with
    prompts.
    """

    step: float
    launch: float
    bytes: float
    flops: float
    passed: float
    prompts: float
    host_launch: float


FITTED = Fitted(step=2.13e-4, launch=2.42e-6, bytes=1.03, flops=1.11, passed=3.79, prompts=4.00e-3, host_launch=1.18e-4)
"""Of an H200. `python bench/engine/cost_model.py` fits them to the measured steps in bench/results and shows the error
on those that it was not fitted to."""

_KINDS = "driver's figure on such a machine"
_KERNELS = "bench/kernels.py, ceilings of the run in bench/results/kernels_mha.json"
_SHARES = {
    "memory": 0.985,
    "copy": 4.247 / 4.8,
    "bf16": 796.2 / 989.4,
    "fp8": 1455.3 / 1978.9,
    "links": 361 / 450,
    "pairs": 195 / 450,
}
"""What an H200 reaches of its vendor's figures."""


def _share(kind: str, value: float, vendor: str) -> Figure:
    share = _SHARES[kind]
    return Figure(value * share, f"{vendor}; {share:.3g} of it, the share that an H200 reaches")


def _memory(gigabytes: int, vendor: str) -> Figure:
    return Figure(int(gigabytes * GIB * _SHARES["memory"]), f"{vendor}; 1.5 % less for the driver, as on an H200")


def _rates(vendor: str, bf16: float, fp8: float | None = None, fp4: float | None = None) -> dict[str, Figure]:
    """Of dense products; `vendor`: who states these TFLOP/s."""
    stated = {"bf16": bf16, "fp8": fp8, "fp4": fp4}
    return {
        kind: _share("fp8" if kind == "fp4" else kind, rate * 1e12, f"{vendor}: {rate:g} TFLOP/s dense")
        for kind, rate in stated.items()
        if rate is not None
    }


_NOT_MEASURED = "not measured on this chip: the H200's is taken"
_LL = Figure(4.2e-6, "our all-reduce of 8 KiB in a CUDA graph on two H200s, the norm behind it with it", measured=True)
_NCCL = Figure(12.2e-6, "NCCL all-reduce of 8 KiB in a CUDA graph on two H200s, PyTorch 2.11", measured=True)


def _links(vendor: str, gigabytes: float) -> Link:
    """Of a chip on which no collective was measured."""
    stated = f"{vendor}: {gigabytes:g} GB/s one way"
    bandwidth, pairs = (_share(kind, gigabytes * _GB, stated) for kind in ("links", "pairs"))
    return Link(bandwidth, pairs, Figure(_LL.value, _NOT_MEASURED), Figure(_NCCL.value, _NOT_MEASURED))


def _network(vendor: str, gigabits: int) -> Link:
    bandwidth = Figure(gigabits / 8 * _GB * 0.9, f"{vendor}: {gigabits} Gb/s a GPU; 0.9 of it is assumed")
    latency = Figure(30e-6, "not measured: 30 us of a small collective between hosts are assumed")
    return Link(bandwidth, bandwidth, latency, latency)


_DGX = "NVIDIA DGX user guide, one ConnectX-7 a GPU"
_OAM = "one 400 Gb/s adapter a GPU, as in AMD's reference clusters"
_H200_LINK = Link(
    Figure(361 * _GB, "NCCL all-reduce of 1 GiB on eight H200s, bus bandwidth, multicast off", measured=True),
    Figure(
        195 * _GB, "NCCL all-gather and reduce-scatter of 64 MiB to each of two H200s, multicast off", measured=True
    ),
    _LL,
    _NCCL,
)

FIGURES: dict[str, ChipFigures] = {
    one.name: one
    for one in (
        ChipFigures(
            "a100", "NVIDIA A100 SXM, 80 GB", CHIPS["sm_80"],
            memory=_memory(80, "NVIDIA A100 datasheet: 80 GB"),
            bandwidth=_share("copy", 2.039e12, "NVIDIA A100 datasheet: 2039 GB/s"),
            rates=_rates("NVIDIA A100 datasheet", 312),
            host=8,
            link=_links("NVIDIA A100 datasheet, NVLink 3", 300),
            network=_network("NVIDIA DGX A100 user guide, one ConnectX-6 a GPU", 200),
        ),
        ChipFigures(
            "l40s", "NVIDIA L40S, 48 GB", CHIPS["sm_89"],
            memory=_memory(48, "NVIDIA L40S datasheet: 48 GB"),
            bandwidth=_share("copy", 0.864e12, "NVIDIA L40S datasheet: 864 GB/s"),
            rates=_rates("NVIDIA L40S datasheet", 362, 733),
            host=8,
            link=_links("NVIDIA L40S datasheet, PCIe 4 x16, no NVLink", 32),
            network=None,
        ),
        ChipFigures(
            "h100", "NVIDIA H100 SXM, 80 GB", CHIPS["sm_90"],
            memory=Figure(78 * GIB, _KINDS, measured=True),
            bandwidth=Figure(3.0e12, "a copy from device to device, bytes read and written", measured=True),
            rates={
                "bf16": Figure(798e12, "a product of 8192 x 8192 x 8192, PyTorch 2.11", measured=True),
                "fp8": _rates("NVIDIA H100 datasheet", 989.4, 1978.9)["fp8"],
            },
            host=8,
            link=_links("NVIDIA H100 datasheet, NVLink 4", 450),
            network=_network(_DGX, 400),
        ),
        ChipFigures(
            "h200", "NVIDIA H200 SXM, 141 GB", CHIPS["sm_90"],
            memory=Figure(139 * GIB, _KINDS, measured=True),
            bandwidth=Figure(4.247e12, _KERNELS, measured=True),
            rates={
                "bf16": Figure(796.2e12, _KERNELS, measured=True),
                "fp8": Figure(1455.3e12, _KERNELS, measured=True),
            },
            host=8,
            link=_H200_LINK,
            network=_network(_DGX, 400),
        ),
        ChipFigures(
            "b200", "NVIDIA B200 SXM, 180 GB", CHIPS["sm_100"],
            memory=_memory(180, "NVIDIA DGX B200 datasheet: 1440 GB of eight"),
            bandwidth=_share("copy", 8.0e12, "NVIDIA DGX B200 datasheet: 64 TB/s of eight"),
            rates=_rates("NVIDIA DGX B200 datasheet", 2250, 4500, 9000),
            host=8,
            link=_links("NVIDIA DGX B200 datasheet, NVLink 5", 900),
            network=_network(_DGX, 400),
        ),
        ChipFigures(
            "rtx_pro_6000", "NVIDIA RTX PRO 6000 Blackwell, 96 GB", CHIPS["sm_120"],
            memory=_memory(96, "NVIDIA RTX PRO 6000 Blackwell datasheet: 96 GB"),
            bandwidth=_share("copy", 1.792e12, "NVIDIA RTX PRO 6000 Blackwell datasheet: 1792 GB/s"),
            rates=_rates("a quarter, half and all of the dense FP4 rate in NVIDIA's datasheet", 500, 1000, 2000),
            host=8,
            link=_links("NVIDIA RTX PRO 6000 Blackwell datasheet, PCIe 5 x16, no NVLink", 64),
            network=None,
        ),
        ChipFigures(
            "mi300x", "AMD Instinct MI300X, 192 GB", CHIPS["gfx942"],
            memory=_memory(192, "AMD MI300X datasheet: 192 GB"),
            bandwidth=_share("copy", 5.3e12, "AMD MI300X datasheet: 5.3 TB/s"),
            rates=_rates("AMD MI300X datasheet", 1307.4, 2614.9),
            host=8,
            link=_links("AMD MI300X platform datasheet, seven Infinity Fabric links of 64 GB/s", 448),
            network=_network(_OAM, 400),
        ),
        ChipFigures(
            "mi355x", "AMD Instinct MI355X, 288 GB", CHIPS["gfx950"],
            memory=_memory(288, "AMD MI355X datasheet: 288 GB"),
            bandwidth=_share("copy", 8.0e12, "AMD MI355X datasheet: 8 TB/s"),
            rates=_rates("AMD MI355X datasheet", 2516.6, 5033.2, 10066.3),
            host=8,
            link=_links("AMD MI355X platform datasheet, seven Infinity Fabric links of 76.8 GB/s", 537.6),
            network=_network(_OAM, 400),
        ),
    )
}  # fmt: skip
"""A chip's name -> what is known of it."""

_OF_ARCH = {
    "sm_80": "a100", "sm_89": "l40s", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx_pro_6000",
    "gfx942": "mi300x", "gfx950": "mi355x",
}  # fmt: skip


def figures_of(name: str) -> ChipFigures | None:
    """What is known of a chip, by its name or by the name of its architecture; None for another name."""
    return FIGURES.get(_OF_ARCH.get(name, name.lower()))


def known_chips() -> tuple[str, ...]:
    """The names that `figures_of` knows."""
    return (*FIGURES, *_OF_ARCH)
