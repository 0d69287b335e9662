"""Process settings for speed; no result depends on them.

Owns the cache folder, the allocator's thresholds, the spin count of OpenMP threads, and the CPU quota of the process.
It must not import torch, which reads the spin count when it loads the OpenMP runtime.
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
# A waiting thread of GCC's OpenMP runtime spins this many times before it sleeps: about 0.1 to 0.3 ms, longer than the
# gap between the matrix products of a decode step. The runtime's default of 300,000 outlasts a time slice of the
# scheduler, and the spinning thread then takes CPU time from the thread that it waits for.
SPIN_COUNT = 10_000
# A user who sets one of these chooses the spin count.
_WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def cache_folder() -> Path:
    """The folder for cached files: `allotrope` in the user's cache folder. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "allotrope"


def keep_freed_memory() -> None:
    """Let the C library reuse the memory of freed tensors instead of returning it to the system.

    glibc returns every large block at once, and the next large block faults in page by page. On a CPU the faults cost
    more than the arithmetic. Other C libraries are left alone.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def spin_setting() -> dict[str, str]:
    """Environment variables that set `SPIN_COUNT`; {} if the user has set one of their own.

    GCC's OpenMP runtime, which PyPI's torch uses, reads them once, when torch is imported.
    """
    return {} if any(name in os.environ for name in _WAITING_VARIABLES) else {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


@contextmanager
def spinning_briefly() -> Iterator[None]:
    """Set `spin_setting` for imports inside the block, and restore the environment after it.

    The process belongs to the caller: the processes that it starts later keep their own setting.
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

    It is the smallest limit of the group and its parents, in version 2 (cpu.max) and version 1 (cpu.cfs_quota_us).
    `system`: the folder that holds /proc and /sys.
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
            # In a container, the mounted folder may be the group itself, while its name is the host's path.
            folder = top / group.lstrip("/")
            limits += [_limit(one) for one in (folder, *folder.parents) if one == top or top in one.parents]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """CPU limit of one control group; None if it has no limit or does not exist."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        # int("max") fails: the group has no limit.
        return None


def thread_count(available: int, system: Path = Path("/")) -> int:
    """The number of compute threads: `available` CPUs, at most the quota of the control group.

    The scheduler would stop more threads, all at once, for the rest of each of its periods. OMP_NUM_THREADS lifts the
    quota. `system`: the folder that holds /proc and /sys.
    """
    quota = cpu_quota(system)
    if quota is None or "OMP_NUM_THREADS" in os.environ:
        return available
    return max(1, min(available, math.ceil(quota)))
