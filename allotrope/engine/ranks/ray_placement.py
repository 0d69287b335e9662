"""The places of the ranks in a Ray cluster: one bundle of a placement group for each, that of rank 0 on this host.

Owns the connection to the cluster and what is reserved there. Must not know steps or faults.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.config import EngineConfig
from allotrope.errors import ConfigError

log = logging.getLogger("allotrope.engine")

# GPUs of an engine that has just ended are free within seconds.
_RESERVE_SECONDS = 60.0
# Ray would show each actor its own GPU alone; ranks of one host that map each other's memory must name theirs apart.
ACTOR_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class _Seat:
    """An actor that does nothing but hold rank 0's GPU, so that no other actor gets it."""

    def gpu_ids(self) -> list[str]:
        return gpu_ids_here()


@dataclass(frozen=True)
class RayPlacement:
    """`bundles`: per rank, its bundle of `group`; ranks of one host follow each other. `address`: of this host in the
    cluster. `device`: the option `device` for rank 0. `seat`: holds rank 0's GPU. `connected`: by this object.
    """

    size: int
    group: Any
    bundles: tuple[int, ...]
    address: str
    device: str
    seat: Any
    connected: bool

    @staticmethod
    def reserve(config: EngineConfig, size: int) -> RayPlacement:
        """Connect to the cluster and reserve a place for each of `size` ranks. Raises ConfigError where there is no
        cluster, or not enough in it."""
        ray, connected = _connect()
        try:
            return _reserve(ray, config, size, connected)
        except BaseException:
            if connected:
                ray.shutdown()
            raise

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Options of the actor of a rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.group, self.bundles[rank], False)
        resource = "num_gpus" if self.device.startswith("cuda") else "num_cpus"
        return {"num_cpus": 0, resource: 1, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Give everything back. May be called again."""
        import ray

        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):
            # The cluster may be what has failed.
            ray.util.remove_placement_group(self.group)
        if self.connected:
            ray.shutdown()


def gpu_ids_here() -> list[str]:
    """The GPUs that Ray gave the actor that asks."""
    import ray

    return [str(one) for one in ray.get_gpu_ids()]


def device_of(gpu_id: str) -> str:
    """The option `device` for a GPU as Ray names it. Raises ConfigError where this process does not see it."""
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if not visible:
        return f"cuda:{gpu_id}"
    if gpu_id not in visible:
        raise ConfigError(
            f"Ray gave GPU {gpu_id}, and CUDA_VISIBLE_DEVICES={','.join(visible)} hides it from this process. Set it "
            f"where `ray start` runs, not here."
        )
    return f"cuda:{visible.index(gpu_id)}"


def _connect() -> tuple[Any, bool]:
    """Ray, and whether it was connected here. Raises ConfigError where that cannot be done."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend=ray needs the package ray. Try pip install 'allotrope[ray]'."
        ) from error
    if ray.is_initialized():
        return ray, False
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://") or address == "local":
        raise ConfigError(
            f"RAY_ADDRESS={address}: rank 0 must run on a host of the cluster. Give HOST:PORT of its head, or nothing."
        )
    try:
        with _signals_kept():
            ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"no Ray cluster at address={address!r}: {said} Start one with `ray start --head` here, or with `ray start "
            f"--address=HEAD:6379` where another host is the head."
        ) from error
    return ray, True


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's own answers to signals: a driver of Ray would end at SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


def _reserve(ray: Any, config: EngineConfig, size: int, connected: bool) -> RayPlacement:
    from ray.util.placement_group import placement_group, placement_group_table

    if config.device.startswith("cuda:"):
        raise ConfigError(f"device={config.device!r} names one GPU, but Ray chooses among them. Give --device cuda.")
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    resource, own = "GPU" if on_gpu else "CPU", ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    held = {one: int(node["Resources"].get(resource, 0)) for one, node in nodes.items()}
    listed = ", ".join(f"{nodes[one]['NodeManagerAddress']}: {count}" for one, count in held.items())
    if sum(held.values()) < size or not held.get(own):
        here = "" if held.get(own) else ", one of them on this host for rank 0"
        raise ConfigError(
            f"{size} ranks need {size} of Ray's resource {resource}{here}; the cluster has {sum(held.values())} "
            f"({listed}). Add hosts with `ray start`, or ask for fewer ranks."
        )
    address = nodes[own]["NodeManagerAddress"]
    bundles = [{resource: 1.0} for _ in range(size)]
    bundles[0][f"node:{address}"] = 0.001
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(_RESERVE_SECONDS):
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(group)
        free = ray.available_resources().get(resource, 0)
        raise ConfigError(
            f"{size} ranks need {size} of Ray's resource {resource}, and {free:g} of {sum(held.values())} are free "
            f"({listed}) after {_RESERVE_SECONDS:g} s. End what holds the others: `ray status` shows it."
        )
    node_of = placement_group_table(group)["bundles_to_node_id"]
    # Ranks that share the most must be near each other, and rank 0 is here.
    order = sorted(range(size), key=lambda bundle: (bundle != 0, node_of[bundle] != own, node_of[bundle], bundle))
    hosts = [nodes[node_of[bundle]]["NodeManagerAddress"] for bundle in order]
    log.info("Ray places rank 0 to %d on hosts %s", size - 1, ", ".join(hosts))
    for ranks in config.layout.stage_groups():
        if len(apart := {hosts[rank] for rank in ranks}) > 1:
            log.warning(
                "ranks %d to %d share each layer, and are on hosts %s: every layer waits for the network between them. "
                "Try --pipeline-parallel-size, with a host for each stage.",
                *(ranks[0], ranks[-1], ", ".join(sorted(apart))),
            )
    placement = RayPlacement(size, group, tuple(order), address, "cpu", None, connected)
    if not on_gpu:
        return placement
    seat = ray.remote(num_cpus=0, num_gpus=1)(_Seat).options(
        **RayPlacement(size, group, tuple(order), address, "cuda", None, connected).actor_options(0)
    )
    seat = seat.remote()
    (gpu,) = ray.get(seat.gpu_ids.remote(), timeout=_RESERVE_SECONDS)
    return RayPlacement(size, group, tuple(order), address, device_of(gpu), seat, connected)
