"""From a config to a model in memory, with its caches: every step of start-up that depends on the checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from allotrope.architectures.kv_scales import WithoutRowScales, attention_specs, set_row_scales
from allotrope.architectures.quantized_formats import kept_formats
from allotrope.architectures.registry import Architecture, read_spec
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.cache.groups import CacheGroup, group_caches
from allotrope.cache.memory import Demand, MemoryPlan, plan_memory
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.checkpoint.dequantize import dequantized
from allotrope.checkpoint.weight_formats import weight_formats
from allotrope.checkpoint.weights import Loader, fill_random, finish
from allotrope.config import EngineConfig
from allotrope.engine.step_limits import GPU_TOKENS, StepLimits, StepRoom, cpu_limits, gpu_limits
from allotrope.errors import ConfigError, ModelError
from allotrope.kernels.backend import Chooser, parse_wanted
from allotrope.kernels.chip import Chip, chip_of
from allotrope.layers.backend_report import log_backends
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.moe import Experts
from allotrope.layers.parallel import Parallel
from allotrope.ops.matmul.product import lasting_bytes
from allotrope.ops.registry import registered_ops
from allotrope.ops.sampling.sampler import Sampler

log = logging.getLogger("allotrope.engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {**_DTYPES, "fp8": torch.float8_e4m3fn, "fp8_scaled": torch.float8_e4m3fn}


@dataclass(frozen=True)
class LoadPlan:
    """Everything that config.json and the options decide, before a weight is read.

    `build`: how layers are made on this rank. `specs`: per layer, its attention on this rank. `shares`: layer ->
    earlier layer whose cache it reads. `max_model_len`: longest sequence. `limits`: of a step. `weight_bytes`: of the
    weights that one rank holds. `unloadable`: why the weights can be planned but not loaded, empty if they can.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    spec: ModelSpec
    build: Build
    specs: tuple[Spec, ...]
    shares: dict[int, int]
    groups: tuple[CacheGroup, ...]
    max_model_len: int
    limits: StepLimits
    weight_bytes: int
    unloadable: str = ""

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.limits.step_tokens

    @property
    def max_num_seqs(self) -> int:
        """Most sequences of a step."""
        return self.limits.max_num_seqs

    def meta_model(self) -> Decoder:
        """One rank's model, made without memory."""
        return _hollow(self.architecture, self.spec, self.build)

    def sampler(self) -> Sampler:
        """Chooses tokens, by the backends of this plan."""
        return Sampler(self.build.chooser, self.spec.vocab_size)


def resolve_load_plan(
    config: EngineConfig,
    parallel: Parallel | None = None,
    *,
    preferred_tokens: int = GPU_TOKENS,
    available: int | None = None,
    chip: Chip | None = None,
) -> LoadPlan:
    """Read the config; choose types, device and limits of a step; group the caches. Raises ModelError or ConfigError.

    `preferred_tokens`: of a step on a GPU, where the options name none and memory serves them. `available`: bytes for
    weights, steps and caches; default: what is free on the device now. `chip`: to choose backends for, where it is
    not the device's.
    """
    parallel = parallel or Parallel()
    checkpoint = open_checkpoint(
        config.model, revision=config.revision, load_format=config.load_format, hf_overrides=config.hf_overrides
    )
    architecture, spec = read_spec(checkpoint.config, checkpoint.source)
    dtype = _dtype(config.dtype, checkpoint)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _KV_DTYPES[config.kv_cache_dtype]
    device = device_named(config.device, parallel.rank)
    build = Build(
        dtype,
        kv_dtype,
        device,
        parallel,
        Chooser(
            chip_of(device) if chip is None else chip,
            parse_wanted("attention_backend", config.attention_backend, FAMILIES)
            | parse_wanted("op_backend", config.op_backend, registered_ops()),
        ),
        "scaled" if config.kv_cache_dtype == "fp8_scaled" else "plain",
        _DTYPES.get(config.state_dtype, torch.float32),
    )
    if config.max_model_len is not None and config.max_model_len > spec.context:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {spec.context} tokens that {checkpoint.source} "
            f"was made for. Give at most that."
        )
    specs = attention_specs(spec, build, checkpoint.source)
    stated = weight_formats(checkpoint.config, checkpoint.source)
    unloadable = stated.unloadable if stated is not None else ""
    # What is planned alone is planned as it is released.
    wanted = build.chooser.chip.is_gpu or bool(unloadable)
    if config.quantized_weights == "keep" or (config.quantized_weights == "auto" and wanted):
        formats = kept_formats(WithoutRowScales(checkpoint), architecture, spec, build)
        build = dataclasses.replace(build, formats=formats)
    shares = {i: layer.mixer.shares_cache_of for i, layer in enumerate(spec.layers)}
    owners = {i: owner for i, owner in shares.items() if owner is not None}
    caches = [{} if i in owners else one.caches() for i, one in enumerate(specs)]
    groups = group_caches(caches, config.page_size)
    longest = config.max_model_len or spec.context
    weight_bytes = _weight_bytes(_hollow(architecture, spec, build), build.device)
    if build.device.type == "cuda":
        free = free_memory(build.device) if available is None else available
        room = StepRoom(
            bytes=int(free * utilization(config, build.device)) - weight_bytes,
            hidden=spec.hidden * dtype.itemsize,
            vocabulary=spec.vocab_size,
            context=longest,
            groups=groups,
        )
        limits = gpu_limits(config, room, preferred_tokens)
    else:
        limits = cpu_limits(config)
    return LoadPlan(
        checkpoint, architecture, spec, build, specs, owners, groups, longest, limits, weight_bytes, unloadable
    )


def _hollow(architecture: Architecture, spec: ModelSpec, build: Build) -> Decoder:
    return architecture.decoder(spec, dataclasses.replace(build, device=torch.device("meta")))


def _weight_bytes(model: Decoder, device: torch.device) -> int:
    """Bytes of a rank's weights on `device`. `model`: made without memory."""
    copies = sum(module.copied_bytes(device) for module in model.modules() if isinstance(module, Experts))
    return copies + sum(lasting_bytes(name, one, device) for name, one in model.named_parameters())


def plan_caches(load_plan: LoadPlan, config: EngineConfig, available: int | None = None) -> MemoryPlan:
    """The memory plan under the options. `available`: bytes for weights and caches; default: what is free now.

    Raises ConfigError if weights, or caches for one sequence of full length, do not fit.
    """
    if config.kv_cache_memory_bytes is not None:
        return plan_memory(load_plan.groups, _demand(load_plan, config), config.kv_cache_memory_bytes)
    available = free_memory(load_plan.build.device) if available is None else available
    share = utilization(config, load_plan.build.device)
    if load_plan.build.device.type == "cuda":
        return plan_within(load_plan, config, int(available * share) - load_plan.weight_bytes, available)
    room = min(int(available * share), available - load_plan.weight_bytes)
    return plan_within(load_plan, config, room, available)


def utilization(config: EngineConfig, device: torch.device) -> float:
    """The share of free memory that may be used: of a GPU for everything, of a CPU for caches."""
    if config.memory_utilization is not None:
        return config.memory_utilization
    return 0.9 if device.type == "cuda" else 0.5


def plan_within(load_plan: LoadPlan, config: EngineConfig, room: int, available: int) -> MemoryPlan:
    """The memory plan in `room` bytes of `available` ones. Raises ConfigError if one long sequence does not fit."""
    if room <= 0:
        weights, advice = load_plan.weight_bytes, ""
        if load_plan.build.dtype == torch.float32:
            advice = " Try --dtype bfloat16."
        if weights >= available:
            raise ConfigError(f"the weights do not fit: they take {weights} bytes, and {available} are free.{advice}")
        share = utilization(config, load_plan.build.device)
        raise ConfigError(
            f"nothing is left for caches: memory_utilization={share:g} of {available} free bytes is "
            f"{int(available * share)}, which the weights ({weights} bytes), libraries and the largest step fill. Try "
            f"a larger --memory-utilization, or a --max-num-batched-tokens below {load_plan.step_tokens}."
        )
    return plan_memory(load_plan.groups, _demand(load_plan, config), room)


def _demand(load_plan: LoadPlan, config: EngineConfig) -> Demand:
    return Demand(
        context=load_plan.max_model_len,
        sequences=load_plan.max_num_seqs,
        step_tokens=load_plan.step_tokens,
        reuse=config.enable_prefix_caching,
    )


def load_model(load_plan: LoadPlan, seed: int, asked: str = "auto") -> Decoder:
    """Make the model and fill it: from the checkpoint, or with random weights where it brings none.

    `asked`: the option `quantized_weights`, which the log names where weights are dequantized. Raises ModelError for
    weights that can only be planned, and for those that do not fit the architecture.
    """
    if load_plan.unloadable:
        raise ModelError(f"cannot load {load_plan.checkpoint.source}", [load_plan.unloadable])
    build = load_plan.build
    started = time.monotonic()
    model = load_plan.architecture.decoder(load_plan.spec, build)
    checkpoint = None
    if load_plan.checkpoint.has_weights:
        loader = Loader(model, load_plan.architecture.rules(load_plan.spec), build.parallel)
        checkpoint = WithoutRowScales(load_plan.checkpoint)
        report = loader.load(dequantized(checkpoint))
        log.info(
            "read %d tensors, %.1f MB in %.1f s; dropped %d",
            report.tensors,
            report.bytes / 1e6,
            time.monotonic() - started,
            len(report.dropped),
        )
        if report.unpacked:
            names = ", ".join(sorted(report.unpacked))
            log.info("dequantized on load, kept as %s: %s: %s", build.dtype, names, _why_unpacked(load_plan, asked))
    else:
        fill_random(model, seed, build.parallel)
    finish(model)
    # Chosen here, so that it is logged with the layers' backends.
    load_plan.sampler()
    log_backends(model, build, log)
    line = set_row_scales(model, checkpoint)
    if line:
        log.info("%s", line)
    return model.eval()


def _why_unpacked(load_plan: LoadPlan, asked: str) -> str:
    """Why weights that are stored quantized are not kept so."""
    device = load_plan.build.device.type
    if asked == "unpack":
        return "quantized_weights=unpack"
    if asked == "auto" and device != "cuda":
        return f"quantized_weights=auto keeps them on a GPU alone, and device={device}"
    return "their layers or their formats cannot be kept quantized"


def _dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    text = checkpoint.config.get("text_config") or {}
    stated = [source.get(key) for source in (checkpoint.config, text) for key in ("dtype", "torch_dtype")]
    return next((_DTYPES[str(value)] for value in stated if str(value) in _DTYPES), torch.bfloat16)


def device_named(name: str, rank: int = 0) -> torch.device:
    """The device that an option names for a rank. Raises ConfigError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{rank}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a device; allowed: auto, cpu, cuda, cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; allowed: auto, cpu, cuda, cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but PyTorch sees no GPU here. Try --device cpu.")
    return device


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def available_memory() -> int:
    """Bytes of main memory that can be had without swapping, within the limits of the container."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def eos_ids(*sources: dict[str, object]) -> tuple[int, ...]:
    """`eos_token_id` of the first source that has one; it may be a number or a list."""
    for source in sources:
        found = source.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(int(token) for token in found)
    return ()
