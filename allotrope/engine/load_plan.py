"""The load plan of one rank: everything that config.json and the options decide before a weight is read.

Owns types, device, attention specs, cache groups and limits of a step. Must not read a weight or allocate memory.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from allotrope.architectures.registry import Architecture, read_spec
from allotrope.attention.family import Spec
from allotrope.attention.registry import FAMILIES
from allotrope.cache.groups import CacheGroup, group_caches
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.checkpoint.weight_formats import online_statement, quantization_of
from allotrope.config import EngineConfig
from allotrope.engine.draft_plan import build_of_draft, resolve_draft
from allotrope.engine.expert_load import read_expert_placements, refuse_misplaced
from allotrope.engine.memory import free_memory, utilization, weight_bytes_of
from allotrope.engine.step_limits import GPU_TOKENS, StepLimits, StepRoom, cpu_limits, gpu_limits
from allotrope.errors import ConfigError, LayoutRefused, ModelError, refuse_options
from allotrope.kernels.backend import Chooser, parse_wanted
from allotrope.kernels.chip import Chip, chip_of, cpu_has_bf16
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.decoder_draft import DecoderDraftSpec
from allotrope.layers.draft import DraftModel
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.expert_placement import ExpertPlacement
from allotrope.layers.mixers.mixer import attention_of
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.moe import Experts
from allotrope.layers.parallel import Parallel, ProcessGroups, map_peers
from allotrope.layers.stage import Stage, cut
from allotrope.loading.decoder import make_meta_decoder, only_kept, quantized_build
from allotrope.loading.draft import make_meta_draft
from allotrope.loading.kv_scales import attention_specs
from allotrope.ops.matmul.gguf import GgufBlocks
from allotrope.ops.registry import registered_ops
from allotrope.ops.sampling.sampler import Sampler
from allotrope.rank_layout import RankLayout

log = logging.getLogger("allotrope.engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Rows of a decode step that drafts may fill where sequences alone are fewer: so many read weights as few do.
_DRAFTED_ROWS = 256
_KV_DTYPES = {**_DTYPES, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.float8_e4m3fn}


@dataclass(frozen=True)
class LoadPlan:
    """Everything that config.json and the options decide, before a weight is read.

    `build`: how layers are made on this rank. `specs`: per layer, its attention on this rank. `shares`: layer ->
    earlier layer whose cache it reads. `max_model_len`: longest sequence. `limits`: of a step. `weight_bytes`: of the
    weights that one rank holds, those of the draft model among them. `draft`: the draft model that is asked for,
    `draft_checkpoint` where its weights are, `draft_build` how its layers are made, `draft_specs` their attention,
    behind the model's own. `meta_model`: this rank's model, with parameters that take no memory.
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
    meta_model: Decoder = field(repr=False, compare=False)
    draft: DraftSpec | None = None
    draft_checkpoint: Checkpoint | None = None
    draft_build: Build | None = None
    draft_specs: tuple[Spec, ...] = ()

    @property
    def max_drafts(self) -> int:
        """Most draft tokens of a sequence in one step; 0 without speculative decoding."""
        return self.build.max_drafts

    @property
    def reads_tokens_alone(self) -> bool:
        """As `DraftModel.reads_tokens_alone`; False without a draft model."""
        return isinstance(self.draft, DecoderDraftSpec)

    @property
    def lookahead(self) -> int:
        """Tokens behind the sampled one that the draft model stores before the next step; 0 without one."""
        if self.draft is None:
            return 0
        return self.max_drafts if self.reads_tokens_alone else self.max_drafts - 1

    @property
    def max_decodes(self) -> int:
        """Most rows of a decode step: a few sequences have as many drafts as they like."""
        return max(self.max_num_seqs, min(self.max_num_seqs * (1 + self.max_drafts), _DRAFTED_ROWS))

    @property
    def stage(self) -> Stage:
        """The layers that this rank holds."""
        return self.build.stage or Stage.whole(len(self.specs))

    @property
    def own_specs(self) -> tuple[Spec, ...]:
        """The attention of these."""
        return self.specs[self.stage.first : self.stage.last]

    @property
    def num_layers(self) -> int:
        """Layers with caches, those of the draft model behind the model's own."""
        return len(self.specs) + len(self.draft_specs)

    def sampler(self) -> Sampler:
        """Chooses tokens, by the backends of this plan."""
        return Sampler(self.build.chooser, self.spec.vocab_size)

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.limits.step_tokens

    @property
    def max_num_seqs(self) -> int:
        """Most sequences of a step."""
        return self.limits.max_num_seqs

    def with_peers(self, groups: ProcessGroups) -> LoadPlan:
        """The same once the ranks have joined: with their process groups, and with memory that they write into, where
        they can map it. A draft model works with the same ranks."""
        build = self.build
        if build.parallel.layout.size == 1:
            return self
        build = replace(build, parallel=build.parallel.joined(groups))
        # Of the choices that are logged, none was made before.
        chooser = Chooser(build.chooser.chip, build.chooser.wanted)
        parallel = map_peers(build.parallel, chooser, build.dtype, self.spec.hidden, build.device)
        if any(group.unreachable for group in parallel.groups):
            chooser = Chooser(build.chooser.chip, build.chooser.wanted)
        draft_build = self.draft_build
        if draft_build is not None:
            # A draft model may have choices of its own.
            shared = draft_build.chooser is self.build.chooser
            own = chooser if shared else Chooser(draft_build.chooser.chip, draft_build.chooser.wanted)
            draft_build = replace(draft_build, parallel=parallel, chooser=own)
        return replace(self, build=replace(build, parallel=parallel, chooser=chooser), draft_build=draft_build)

    def meta_draft(self) -> DraftModel | None:
        """The draft model beside `meta_model`, without the parameters that they share; None where the plan has none."""
        if self.draft is None:
            return None
        assert self.draft_build is not None
        return make_meta_draft(self.draft, self.meta_model, self.draft_build)


def resolve_load_plan(
    config: EngineConfig,
    parallel: Parallel | None = None,
    *,
    preferred_tokens: int = GPU_TOKENS,
    available: int | None = None,
    chip: Chip | None = None,
    checkpoint: Checkpoint | None = None,
) -> LoadPlan:
    """Read the config; choose types, device and limits of a step; group the caches. Raises ModelError or ConfigError.

    `preferred_tokens`: tokens of a step on a GPU, where the options name none and memory serves them. `available`:
    bytes for weights, steps and caches; default: the bytes that are free on the device now. `chip`: plan for this one,
    and not for the device that `config` names; of a GPU that is not here, `available` has to be given. `checkpoint`:
    that of `config`, where it is open already.
    """
    parallel = parallel or Parallel()
    checkpoint = checkpoint or _open(config)
    architecture, spec = read_spec(checkpoint.config, checkpoint.source)
    if config.quantization is not None:
        _state_quantization(config, checkpoint, chip)
    build = _build(config, parallel, checkpoint, chip)
    build = replace(build, expert_placements=_expert_placements(config, parallel))
    draft, draft_checkpoint, max_drafts = resolve_draft(config, architecture, spec, checkpoint)
    build = replace(build, max_drafts=max_drafts)
    if config.max_model_len is not None and config.max_model_len > spec.longest_context:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {spec.longest_context} tokens that "
            f"{checkpoint.source} was made for. Give at most that, or a YaRN rope_scaling that reaches it, or, where "
            f"positions need none, --hf-overrides '{{\"max_position_embeddings\": {config.max_model_len}}}'."
        )
    specs = attention_specs(spec, build, checkpoint.source)
    keeps = config.quantized_weights != "dequantize"
    try:
        if keeps:
            quantized = quantized_build(checkpoint, architecture, spec, build)
            build = only_kept(quantized, config.quantized_weights, config.quantized_activations)
            if config.quantization is not None:
                _refuse_unkept(config, quantized, build)
        blocks = any(isinstance(format, GgufBlocks) for format in build.formats.values())
        if config.quantized_activations != "auto" and not blocks:
            raise ConfigError(
                f"quantized_activations={config.quantized_activations}: no weight of {checkpoint.source} is multiplied "
                f"in blocks of GGUF on {build.chooser.chip.arch}, so it would do nothing. Leave it out."
            )
        if parallel.layout.pipeline > 1:
            build = replace(build, stage=cut_stages(architecture, spec, build)[parallel.position.stage])
        meta = make_meta_decoder(architecture, spec, build)
        _refuse_experts(config, meta if build.stage is None else _whole(architecture, spec, build), build)
        weight_bytes = weight_bytes_of(meta)
        if config.quantization is not None and parallel.world_rank == 0:
            _warn_of_plain_experts(config, meta)
        draft_build: Build | None = None
        if draft is not None:
            assert draft_checkpoint is not None
            draft_build = build_of_draft(config, draft, draft_checkpoint, architecture, meta, build)
            weight_bytes += weight_bytes_of(make_meta_draft(draft, meta, draft_build))
    except ValueError as error:
        # So many ranks cannot share one of its sizes.
        raise ModelError(checkpoint.source, [str(error)]) from error
    draft_specs = () if draft is None else tuple(attention_of(layer.mixer, build) for layer in draft.layers)
    _refuse_other_families(config, (*specs, *draft_specs), checkpoint.source)
    shares = {i: layer.mixer.shares_cache_of for i, layer in enumerate(spec.layers)}
    owners = {i: owner for i, owner in shares.items() if owner is not None}
    caches = [{} if i in owners else one.caches() for i, one in enumerate((*specs, *draft_specs))]
    groups = group_caches(caches, config.page_size)
    if build.stage is not None:
        groups = tuple(group.of_layers(build.stage) for group in groups)
    max_model_len = config.max_model_len or spec.context
    limits = cpu_limits(config)
    if build.device.type == "cuda":
        free = free_memory(build.device) if available is None else available
        room = StepRoom(
            bytes=int(free * utilization(config, build.device)) - weight_bytes,
            # Feed-forward blocks have the rows of all data-parallel ranks.
            hidden=spec.hidden * build.dtype.itemsize * parallel.layout.data,
            # Rank 0 samples for all of them.
            vocabulary=spec.vocab_size * parallel.layout.data,
            context=max_model_len,
            groups=groups,
        )
        limits = gpu_limits(config, room, preferred_tokens)
    return LoadPlan(
        checkpoint=checkpoint,
        architecture=architecture,
        spec=spec,
        build=build,
        specs=specs,
        shares=owners,
        groups=groups,
        max_model_len=max_model_len,
        limits=limits,
        weight_bytes=weight_bytes,
        meta_model=meta,
        draft=draft,
        draft_checkpoint=draft_checkpoint,
        draft_build=draft_build,
        draft_specs=draft_specs,
    )


class LoadPlans:
    """The load plans of the first rank of a model's layouts, each made once. Arguments as of `resolve_load_plan`."""

    def __init__(self, config: EngineConfig, available: int | None = None, chip: Chip | None = None) -> None:
        self._config, self._available, self._chip = config, available, chip
        self._found: dict[RankLayout, LoadPlan] = {}

    @functools.cached_property
    def _checkpoint(self) -> Checkpoint:
        return _open(self._config)

    def of(self, layout: RankLayout) -> LoadPlan:
        """Raises as `resolve_load_plan` does."""
        if layout not in self._found:
            self._found[layout] = resolve_load_plan(
                self._config,
                Parallel.of(layout),
                available=self._available,
                chip=self._chip,
                checkpoint=self._checkpoint,
            )
        return self._found[layout]


def _open(config: EngineConfig) -> Checkpoint:
    return open_checkpoint(
        config.model, revision=config.revision, load_format=config.load_format, hf_overrides=config.hf_overrides
    )


def _refuse_other_families(config: EngineConfig, specs: tuple[Spec, ...], source: str) -> None:
    """Raise ConfigError for an attention backend of a family that no layer has. `specs`: of all layers, a draft model's
    among them."""
    own = sorted({spec.family for spec in specs})
    asked = parse_wanted("attention_backend", config.attention_backend, FAMILIES)
    other = [family for family in asked if family not in own]
    if other:
        raise ConfigError(
            f"attention_backend={config.attention_backend!r}: {source} has no layer of {', '.join(other)}; its "
            f"families are {', '.join(own)}. Name one of these, or leave it out."
        )


def _whole(architecture: Architecture, spec: ModelSpec, build: Build) -> Decoder:
    """All layers, with parameters that take no memory. Its backends are nobody's choice."""
    chooser = Chooser(build.chooser.chip, build.chooser.wanted)
    return make_meta_decoder(architecture, spec, replace(build, stage=None, chooser=chooser))


def _refuse_experts(config: EngineConfig, meta: Decoder, build: Build) -> None:
    """Raise ValueError, or ConfigError, where options of experts do not fit a model. `meta`: all of its layers."""
    asked = {"enable_expert_parallel": config.enable_expert_parallel, "expert_load_file": config.expert_load_file}
    named = [name for name, value in asked.items() if value]
    if named and not any(isinstance(one, Experts) for one in meta.modules()):
        raise ValueError(f"{' and '.join(named)} {'needs' if len(named) == 1 else 'need'} experts, and it has none")
    if config.expert_placement is not None:
        refuse_misplaced(meta, dict(build.expert_placements), config.expert_placement)


def cut_stages(architecture: Architecture, spec: ModelSpec, build: Build) -> tuple[Stage, ...]:
    """The pipeline stages of a model, by the bytes of its weights. The same on every rank. Raises ValueError where it
    cannot be cut so."""
    meta = _whole(architecture, spec, replace(build, parallel=Parallel(), expert_placements={}))
    layers = [weight_bytes_of(layer) for layer in meta.layers]
    return cut(spec.layers, layers, weight_bytes_of(meta) - sum(layers), build.parallel.layout.pipeline)


def _expert_placements(config: EngineConfig, parallel: Parallel) -> dict[str, ExpertPlacement]:
    """Who holds which experts by the file that the options name, if they do. Raises ConfigError."""
    wrong = []
    if config.expert_placement is not None and not config.enable_expert_parallel:
        wrong.append("expert_placement needs enable_expert_parallel: without it every rank has a part of each expert")
    if config.num_redundant_experts and config.expert_placement is None:
        wrong.append("num_redundant_experts needs expert_placement, which says which experts to copy")
    refuse_options(wrong)
    if config.expert_placement is None:
        return {}
    try:
        ranks = parallel.of_stage.size
        return read_expert_placements(config.expert_placement, ranks, config.num_redundant_experts)
    except ValueError as error:
        raise LayoutRefused(f"expert_placement={config.expert_placement!r}: {error}.") from error


def _state_quantization(config: EngineConfig, checkpoint: Checkpoint, chip: Chip | None) -> None:
    """Make a plain checkpoint's config say that its weights are quantized on load. Raises ConfigError if they are
    already."""
    assert config.quantization is not None
    stated = quantization_of(checkpoint.config)
    on_gpu = (chip or chip_of(device_named(config.device))).is_gpu
    wanted = online_statement(config.quantization, blocks=not on_gpu)
    if stated == wanted:
        # The plan of this checkpoint was made before.
        return
    kinds = {header.format.name for header in checkpoint.headers().values() if header.format is not None}
    if stated or kinds:
        how = stated.get("quant_method") or f"blocks of {', '.join(sorted(kinds))}"
        raise ConfigError(
            f"quantization={config.quantization} needs a plain checkpoint; {checkpoint.source} is quantized ({how}). "
            "Leave it out."
        )
    checkpoint.config["quantization_config"] = wanted


def _warn_of_plain_experts(config: EngineConfig, meta: nn.Module) -> None:
    """If most of the weights are experts that stay plain. `meta`: the model, made without memory."""
    experts = [module for module in meta.modules() if isinstance(module, Experts)]
    plain = [one for module in experts for name, one in module.named_parameters() if name in ("gate_up", "down")]
    share = sum(one.nbytes for one in plain) / sum(one.nbytes for one in meta.parameters())
    if share > 0.5:
        log.warning(
            "quantization=%s: experts stay plain, %.0f %% of the weights' bytes: their inputs are no whole number of "
            "groups, or are stored before their outputs",
            config.quantization,
            100 * share,
        )


def _refuse_unkept(config: EngineConfig, quantized: Build, build: Build) -> None:
    """Raise ConfigError if weights would be quantized and then multiplied plain."""
    if len(build.formats) == len(quantized.formats) and build.formats:
        return
    if not quantized.formats:
        raise ConfigError(
            f"quantization={config.quantization}: no weight of this model can be quantized so, for its inputs are no "
            f"whole number of groups or blocks. Leave --quantization out."
        )
    chip = build.chooser.chip
    allowed = "fp8, int4" if chip.is_gpu else "fp8, int8, int4"
    raise ConfigError(
        f"quantization={config.quantization} on {chip.arch} with dtype={build.dtype}: no product reads such weights as "
        f"they are stored. Try --quantization with one of {allowed}, another --dtype, or --quantized-weights keep, "
        f"which dequantizes them for each product."
    )


def _build(config: EngineConfig, parallel: Parallel, checkpoint: Checkpoint, chip: Chip | None) -> Build:
    if chip is not None and chip.is_gpu:
        # It need not be here.
        device = torch.device("cuda", parallel.world_rank)
    else:
        device = device_named(config.device, parallel.world_rank)
    chip = chip_of(device) if chip is None else chip
    dtype, _ = resolve_dtype(config.dtype, checkpoint, on_gpu=chip.is_gpu)
    wanted = parse_wanted("attention_backend", config.attention_backend, FAMILIES)
    wanted |= parse_wanted("op_backend", config.op_backend, registered_ops())
    return Build(
        dtype,
        dtype if config.kv_cache_dtype == "auto" else _KV_DTYPES[config.kv_cache_dtype],
        device,
        parallel,
        Chooser(chip, wanted),
        "scaled" if config.kv_cache_dtype == "fp8_ds_mla" else "plain",
        _DTYPES.get(config.state_dtype, torch.float32),
        counts_experts=config.expert_load_file is not None,
    )


def resolve_dtype(name: str, checkpoint: Checkpoint, *, on_gpu: bool) -> tuple[torch.dtype, str]:
    """The type of weights and activations, and the reason for another one than the checkpoint's. `name`: the option.

    A CPU computes in bf16 where it has instructions for that, else in fp32. An fp32 checkpoint stays in fp32.
    """
    if name != "auto":
        return _DTYPES[name], ""
    own = _own_dtype(checkpoint)
    if on_gpu or own == torch.float32:
        return own or torch.bfloat16, ""
    if cpu_has_bf16():
        return torch.bfloat16, "" if own == torch.bfloat16 else "this CPU has instructions for bfloat16"
    return torch.float32, "this CPU has no instructions for bfloat16, and float32 is faster"


def _own_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The type that the checkpoint states; None without one, as where a GGUF file has quantized weights."""
    text = checkpoint.config.get("text_config") or {}
    stated = [source.get(key) for source in (checkpoint.config, text) for key in ("dtype", "torch_dtype")]
    return next((_DTYPES[str(value)] for value in stated if str(value) in _DTYPES), None)


def device_named(name: str, rank: int = 0) -> torch.device:
    """The device that an option names for a rank. Raises ConfigError for a GPU where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{rank}"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but PyTorch sees no GPU here. Try --device cpu.")
    return device
