"""What a device is. The only place that asks one: everything else reads a `Chip`.

A `Chip` made by hand stands for a device that is not present: tests choose backends for it, and compile their kernels.
Must not know: kernels, and how they are launched.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Vendor = Literal["nvidia", "amd", "cpu", "none"]


@dataclass(frozen=True)
class Chip:
    """`arch`: "sm_90", "gfx942", "cpu". `num_sms`: streaming multiprocessors or compute units. `shared_memory`: bytes
    that one block may take. `product`: the name under which launches measured on it are kept, empty if none are.
    """

    vendor: Vendor
    arch: str
    num_sms: int
    shared_memory: int
    product: str = ""

    @functools.cached_property
    def is_gpu(self) -> bool:
        return self.vendor in ("nvidia", "amd")

    @functools.cached_property
    def capability(self) -> tuple[int, int]:
        """CUDA's compute capability; (0, 0) for a chip that has none."""
        if self.vendor != "nvidia":
            return (0, 0)
        number = int(self.arch.removeprefix("sm_"))
        return number // 10, number % 10

    @functools.cached_property
    def warp_size(self) -> int:
        """Threads of a warp (a wave of AMD's CDNA)."""
        return 64 if self.arch.startswith("gfx9") else 32

    @functools.cached_property
    def has_wgmma(self) -> bool:
        """Products of a warpgroup, with operands in shared memory: Hopper alone has them."""
        return self.capability[0] == 9

    @functools.cached_property
    def has_tf32(self) -> bool:
        """Products of fp32 numbers of 10 mantissa bits; three of them make one of nearly all bits (tf32x3)."""
        return self.capability >= (8, 0)

    @functools.cached_property
    def has_tma(self) -> bool:
        """Copies of whole tiles by the tensor memory accelerator."""
        return self.capability[0] >= 9

    @functools.cached_property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch."""
        return self.capability[0] >= 9

    @functools.cached_property
    def has_e4m3fn(self) -> bool:
        """Conversions and products of the FP8 numbers of OCP, which checkpoints hold."""
        return self.capability >= (8, 9) or self.arch == "gfx950"

    @functools.cached_property
    def triton_has_e4m3fn(self) -> bool:
        """Whether Triton's kernels may hold these numbers: on AMD, and in the interpreter, it converts them itself."""
        return self.has_e4m3fn or self.vendor != "nvidia"

    @functools.cached_property
    def has_e4m3fnuz(self) -> bool:
        """FP8 numbers with a bias of one more and no negative zero."""
        return self.arch == "gfx942"


_KIB = 1024
CHIPS: dict[str, Chip] = {
    chip.arch: chip
    for chip in (
        Chip("nvidia", "sm_80", 108, 163 * _KIB),
        Chip("nvidia", "sm_89", 142, 99 * _KIB),
        Chip("nvidia", "sm_90", 132, 227 * _KIB, "nvidia_h200"),
        Chip("nvidia", "sm_100", 148, 227 * _KIB),
        Chip("nvidia", "sm_120", 188, 99 * _KIB),
        Chip("amd", "gfx942", 304, 64 * _KIB),
        Chip("amd", "gfx950", 256, 160 * _KIB),
    )
}
"""A chip of each architecture that kernels are compiled for ahead of time: A100, L40S, H200, B200, RTX PRO 6000,
MI300X, MI355X."""

CPU = Chip("cpu", "cpu", 8, 0)
"""Also where Triton's interpreter runs kernels; few multiprocessors, so that the keys of short tests are split."""

NONE = Chip("none", "none", 1, 0)
"""Tensors without memory (`meta`): nothing runs."""


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip behind a device. A GPU is asked once."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        return NONE
    properties = torch.cuda.get_device_properties(device)
    product = str(properties.name).lower().replace(" ", "_")
    if torch.version.hip:
        arch = str(properties.gcnArchName).split(":")[0]
        known = CHIPS.get(arch)
        shared = 64 * _KIB if known is None else known.shared_memory
        return Chip("amd", arch, properties.multi_processor_count, shared, product)
    major, minor = torch.cuda.get_device_capability(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin"))  # noqa: B009
    return Chip("nvidia", f"sm_{major}{minor}", properties.multi_processor_count, shared, product)


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether this machine's CPU multiplies bf16 numbers by instructions of its own. False where nothing says so."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    # One line of names for each core: `flags` on x86, `Features` on Arm.
    names = {name for line in text.splitlines() if line.startswith(("flags", "Features")) for name in line.split()}
    return bool(names & {"avx512_bf16", "amx_bf16", "bf16"})


def current_chip() -> Chip:
    """The chip that launches go to; the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        return CPU
    return chip_of(torch.device("cuda", torch.cuda.current_device()))


def gpu_count() -> int:
    """GPUs that PyTorch sees."""
    return torch.cuda.device_count()


def free_memory(device: torch.device) -> int:
    """Bytes that a GPU has free."""
    return int(torch.cuda.mem_get_info(device)[0])


def peer_access(device: torch.device, other: int | None) -> bool:
    """Whether a GPU can read and write the memory of the GPU of index `other`."""
    return other is not None and bool(torch.cuda.can_device_access_peer(device, other))


def cuda_version() -> tuple[int, int]:
    """The release of CUDA that PyTorch is built with; (0, 0) if it is built without."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)
