"""What Allotrope asks of the process it runs in. Nothing here is needed for right answers, only for quick ones.

Owns the folder of its cache, how freed memory is kept, how threads wait for each other and how many CPUs the process
may use. It must not import torch: how threads wait is decided when torch loads the OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Turns of the loop in which a thread of GCC's OpenMP runtime waits before it sleeps: about 0.1 to 0.3 ms, longer than
# what lies between the products of a decoding step. The runtime's own 300,000 outlast a time slice of the scheduler: a
# thread then burns the share of the CPU that the thread it waits for needs.
SPIN_COUNT = 10_000
# Who sets one of these has decided how threads wait.
_WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def cache_folder() -> Path:
    """Where what is made once and kept lies: `allotrope` in the user's cache. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allotrope"


def keep_freed_memory() -> None:
    """Let the C library reuse freed tensors instead of giving their pages back.

    glibc returns every block above some size to the system at once, and the next one of that size faults in page by
    page: on a CPU that costs more than the arithmetic on it. Does nothing with another C library.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def spin_setting() -> dict[str, str]:
    """The environment of a process whose waiting threads sleep after a moment; {} where the user set how they wait.

    GCC's OpenMP runtime, which PyPI's torch brings, reads it once, when torch is imported.
    """
    return {} if any(name in os.environ for name in _WAITING_VARIABLES) else {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


@contextmanager
def spinning_briefly() -> Iterator[None]:
    """`spin_setting` for what is imported inside the block, in a process that is the caller's.

    The environment is then as it was: what the caller starts later decides for itself.
    """
    setting = spin_setting()
    os.environ.update(setting)
    try:
        yield
    finally:
        for name in setting:
            os.environ.pop(name, None)


def cpu_quota(system: Path = Path("/")) -> float | None:
    """CPUs that the process's control group may use on average, such as 1.5 in a container; None without a limit.

    The smallest limit of the group and of those it lies in, of version 2 (cpu.max) and 1 (cpu.cfs_quota_us).
    `system`: where /proc and /sys are.
    """
    try:
        memberships = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in memberships:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ("", "unified") if not controllers else (controllers, "cpu")
        for mount in mounts:
            top = system / "sys/fs/cgroup" / mount
            # A container may see its own group as the top, while its name is that of the host.
            folder = top / group.lstrip("/")
            limits += [_limit(one) for one in (folder, *folder.parents) if one == top or top in one.parents]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """CPUs of one control group; None where it has no limit or does not exist."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        # "max" is no number: there is no limit.
        return None


def thread_count(available: int, system: Path = Path("/")) -> int:
    """Threads to compute with, of `available` CPUs: no more than the quota of the control group can keep busy.

    More would be stopped, all at once, for the rest of every period of the scheduler. OMP_NUM_THREADS says otherwise.
    `system`: where /proc and /sys are.
    """
    quota = cpu_quota(system)
    if quota is None or "OMP_NUM_THREADS" in os.environ:
        return available
    return max(1, min(available, math.ceil(quota)))
