"""Our decoder as a model of vLLM: one wrapper for every architecture.

There are two classes because vLLM asks a class, before there is any config, whether its models keep states.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture, eager_break_during_capture
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec

from allotrope.architectures.registry import Architecture
from allotrope.attention.batch import BatchLayout
from allotrope.attention.cache_layout import Field, StateSlots, row_bytes
from allotrope.attention.family import Spec
from allotrope.cache.groups import Member
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.errors import ModelError
from allotrope.layers.backend_report import uncaptured
from allotrope.layers.build import Build
from allotrope.layers.step import LayerStep, Step
from allotrope.loading.decoder import load_decoder, make_decoder, only_kept, quantized_build
from allotrope.loading.kv_scales import attention_specs
from allotrope.ops.rope import RopeTables
from allotrope.plugins.hosted_build import read_options
from allotrope.plugins.prefill_graphs import PrefillGraphs
from allotrope.plugins.steps import Order, arrange
from allotrope.plugins.vllm import log
from allotrope.plugins.vllm.cache import CacheMember, HostedCache, HostedStep
from allotrope.plugins.vllm.config import (
    log_state_dtype,
    make_build,
    open_config,
    planned_layouts,
    refuse_unsupported,
    warn_unused_backend,
)
from allotrope.plugins.vllm.ops import HostedLayer
from allotrope.plugins.vllm.pools import pools_of
from allotrope.plugins.warmed_steps import Kind, warm_up_first
from allotrope.plugins.weights import StreamedWeights, foreign_weights

# Where a torch module keeps its own parameters and buffers.
_TENSORS = ("_parameters", "_buffers")


class HostedLayers(nn.Module):
    """Layers of ours with their attention in vLLM's cache memory: what a model and its draft head have in common."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        super().__init__()
        self.checkpoint, self.architecture = checkpoint, architecture
        self.finished = False
        self.build: Build
        self.layers: list[HostedLayer]
        self._tables: RopeTables
        self._load_format: str
        # For steps that can be captured, see `arrange`; None where none can.
        self._arange: torch.Tensor | None = None
        self._max_drafts = 0
        # The attributes of each module once its weights are loaded.
        self._loaded: list[tuple[nn.Module, dict[str, Any]]] = []

    def _host(self, layers: Iterable[Any], shares: Sequence[int | None], prefix: str, vllm_config: VllmConfig) -> None:
        """`layers`: decoder layers. `shares`: of each, the layer whose caches it reads, None if it has its own."""
        self.layers = _host(list(layers), shares, prefix, vllm_config)
        for layer in self.layers:
            layer.first_cache.model = self
        self._tables = RopeTables(self.build.device, self.build.chooser)
        self._load_format = vllm_config.load_config.load_format
        speculative = vllm_config.speculative_config
        self._max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        if all(layer.backend.in_graphs for layer in self.layers):
            self._arange = torch.arange(vllm_config.scheduler_config.max_num_seqs, device=self.build.device)

    def _plan(self, tokens: int) -> tuple[BatchLayout, Order, list[LayerStep]]:
        """The batch, and the plan of each layer; layers of equal `plan_key` that read the same cache groups share one.
        Without a step of vLLM's, which measures memory then, there are no plans."""
        steps: dict[str, HostedStep] | None = get_forward_context().attn_metadata
        if not steps:
            batch, order = BatchLayout((tokens,), (tokens,), self.build.device), Order(slice(0, 1), slice(0, tokens))
            return batch, order, [LayerStep(None, {}) for _ in self.layers]
        common = steps[self.layers[0].first_cache.name].common
        batch, order = arrange(common, self.build.device, self._arange, self._max_drafts)
        # vLLM has one step object for all caches of a group.
        indices = {id(step): step.index(batch, order) for step in {id(step): step for step in steps.values()}.values()}
        plans: dict[object, object] = {}
        for layer in self.layers:
            groups = {name: id(steps[member.cache.name]) for name, member in layer.caches.items()}
            key = (layer.spec.plan_key, layer.backend.name, tuple(groups.items()))
            if key not in plans:
                index = {name: indices[group] for name, group in groups.items()}
                plans[key] = layer.backend.plan(layer.spec, batch, index)
            steps[layer.first_cache.name].plans[layer.name] = plans[key]
        return batch, order, [LayerStep(steps[one.first_cache.name].plans[one.name], one.views) for one in self.layers]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill every parameter by the architecture's rules; raises ModelError for anything left over on either side."""
        if self.finished:
            self._put_back()
            raise ModelError(self.checkpoint.source, ["weights cannot be loaded a second time; start vLLM anew"])
        names = {name for name, _ in self.named_parameters()}
        self._load(self._own_files(StreamedWeights(self.checkpoint, weights)))
        return names

    def _own_files(self, weights: StreamedWeights) -> Checkpoint:
        """`weights`, or the checkpoint's own files where vLLM has read Mistral's format, which it prefers."""
        if "tok_embeddings.weight" not in weights.headers():
            return weights
        return self.checkpoint if self.checkpoint.has_weights else open_checkpoint(self.checkpoint.source)

    def check_loaded(self) -> None:
        """Raise ModelError where vLLM has filled parameters past `load_weights`: layers read what is made of them
        there."""
        if not self.finished and self._load_format != "dummy":
            raise ModelError(self.checkpoint.source, [foreign_weights(self._load_format)])

    def _ensure_loaded(self) -> None:
        self.check_loaded()
        if not self.finished:
            # Dummy weights do not come through `load_weights`, and vLLM leaves integer parameters uninitialised.
            self._load(None)

    def _load(self, weights: Checkpoint | None) -> None:
        """Load `weights`; None: random ones."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Remember what was loaded, for `_put_back`. Weights are loaded once."""
        self._loaded = [(one, vars(one) | {name: dict(vars(one)[name]) for name in _TENSORS}) for one in self.modules()]
        self.finished = True

    def _put_back(self) -> None:
        """Restore the attributes of all modules, loaded tensors among them: vLLM replaces these before it loads weights
        again."""
        for module, attributes in self._loaded:
            module.__dict__ = attributes | vars(module) | {name: dict(attributes[name]) for name in _TENSORS}


class HostedModel(HostedLayers):
    """Any of our decoders, with its attention in vLLM's cache memory."""

    supports_mrope: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        options = read_options((vllm_config.additional_config or {}).get("allotrope", {}), "additional_config")
        quantized_weights = options["quantized_weights"]
        keeps = quantized_weights != "dequantize"
        stored = keeps and vllm_config.load_config.load_format != "dummy"
        checkpoint, architecture, spec = open_config(vllm_config, stored)
        super().__init__(checkpoint, architecture)
        self.quantized_weights = quantized_weights
        self._embeds = getattr(vllm_config.model_config, "convert_type", "none") == "embed"
        refuse_unsupported(vllm_config, self.checkpoint, spec)
        warn_unused_backend(vllm_config)
        self.build = make_build(vllm_config, options)
        # What the mixers would refuse, in the words of our engine.
        specs = attention_specs(spec, self.build, self.checkpoint.source)
        log_state_dtype(vllm_config, any(isinstance(one, StateSlots) for of in specs for one in of.caches().values()))
        if keeps:
            kept = quantized_build(self.checkpoint, self.architecture, spec, self.build)
            self.build = only_kept(kept, quantized_weights)
        self.decoder = make_decoder(self.architecture, spec, self.build)
        self.seed = vllm_config.model_config.seed or 0
        self._warmed_up: set[Kind] = set()
        shares = [layer.mixer.shares_cache_of for layer in spec.layers]
        self._host(self.decoder.layers, shares, prefix or "model", vllm_config)
        wanted = vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        self.prefill = PrefillGraphs(self.decoder, self.build, self._tables, log, wanted=wanted)

    @property
    def model(self) -> nn.Module:
        """Where vLLM looks for the embedding that it shares with a draft model."""
        return self.decoder

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`input_ids`: [T]. Returns [T, hidden]."""
        found: torch.Tensor = self.decoder.embedding(input_ids)
        return found

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """Text alone has one position on all axes. Returns [3, n] and the shift that images would bring."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`input_ids`: [T], padding last. Returns [T, hidden], 0 for padding. Positions follow from the batch."""
        if inputs_embeds is not None or intermediate_tensors is not None:
            raise ModelError(self.checkpoint.source, ["Allotrope's models take token ids, not embeddings or stages"])
        self._ensure_loaded()
        if not BreakableCUDAGraphCapture.is_active():
            self._warm_up(input_ids)
            return self._compute(input_ids, self._run)
        out = torch.empty(len(input_ids), self.decoder.spec.hidden, dtype=self.build.dtype, device=self.build.device)
        # Eager between the pieces, so that each replay makes its own plans. Full CUDA graphs capture this as well.
        eager_break_during_capture(self._write)(out, input_ids)
        return out

    def _warm_up(self, input_ids: torch.Tensor) -> None:
        """Compile the kernels of the first step of each kind side by side. One by one, they would take most of the time
        of vLLM's own warm-up."""
        if self._arange is None:
            return
        steps: dict[str, HostedStep] | None = get_forward_context().attn_metadata
        decodes = steps[self.layers[0].first_cache.name].common.max_query_len == 1 if steps else False
        step = functools.partial(self._compute, input_ids, self.decoder)
        warm_up_first(self._warmed_up, (bool(steps), decodes), len(input_ids), step, self.build, log)

    def _write(self, out: torch.Tensor, input_ids: torch.Tensor) -> None:
        # vLLM warms up or captures: its graphs, not ours.
        run = self.decoder if BreakableCUDAGraphCapture.is_active() else self._run
        out.copy_(self._compute(input_ids, run))

    def _run(self, step: Step) -> torch.Tensor:
        """Run the decoder: a step with prompts through our prefill graphs. vLLM captures decodes itself, and while it
        measures memory there is no plan."""
        prompts = max(step.batch.query_lens) > 1 and step.layers[0].plan is not None
        hidden: torch.Tensor = self.prefill.run(step) if prompts else self.decoder(step)
        return hidden

    def _compute(self, input_ids: torch.Tensor, run: Callable[[Step], torch.Tensor]) -> torch.Tensor:
        batch, order, layers = self._plan(len(input_ids))
        return order.restored(run(Step(input_ids[order.tokens], batch, layers, self._tables)), len(input_ids))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states`: [n, hidden]. Returns [n, vocabulary] fp32."""
        return self.decoder.logits(hidden_states)

    def _load(self, weights: Checkpoint | None) -> None:
        """Load `weights`; None: random ones."""
        if self._embeds and isinstance(weights, StreamedWeights):
            weights = weights.of_text_model()
        load_decoder(
            self.decoder,
            self.architecture,
            self.build,
            weights,
            seed=self.seed,
            quantized_weights=self.quantized_weights,
            log=lambda line: log.info("allotrope: %s", line),
        )
        if self.build.device.type == "cuda" and (reasons := uncaptured(self.decoder.attention)):
            log.info("allotrope: decode steps run without CUDA graphs: %s", "; ".join(reasons))
        self._finish()


class HostedHybridModel(HostedModel):
    """As `HostedModel`, of architectures that keep states."""

    is_hybrid: ClassVar[bool] = True
    has_inner_state: ClassVar[bool] = True

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Shapes of the fields of the largest state; none where no layer keeps a state."""
        return tuple(field.shape for field in _largest_state(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Types of the same fields: the convolution's inputs, the recurrent state.

        vLLM's CPU platform compares the second with what is asked for, and sets float32 where they differ.
        """
        return tuple(field.dtype for field in _largest_state(vllm_config))

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Callable[..., Any], ...]:
        """vLLM copies whole states."""
        return (get_temporal_copy_spec,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Callable[..., Any], ...]]:
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())


def _largest_state(vllm_config: VllmConfig) -> tuple[Field, ...]:
    """Fields of the largest state of a model that is not yet built."""
    checkpoint, _, spec = open_config(vllm_config)
    states = [one for one in planned_layouts(vllm_config, checkpoint, spec) if isinstance(one, StateSlots)]
    return max(states, key=row_bytes, default=StateSlots(())).fields


def _host(
    decoder_layers: Sequence[Any], shares: Sequence[int | None], prefix: str, vllm_config: VllmConfig
) -> list[HostedLayer]:
    """Register each layer's caches in vLLM's static forward context, and have its mixer's backend run through a
    `HostedLayer`."""
    mixers = [layer.mixer for layer in decoder_layers]
    in_graphs = all(mixer.backend.in_graphs for mixer in mixers)
    caches = _host_caches([mixer.spec for mixer in mixers], shares, prefix, vllm_config, in_graphs)
    layers: list[HostedLayer] = []
    for number, (mixer, owner) in enumerate(zip(mixers, shares, strict=True)):
        name = f"{prefix}.layers.{number}.allotrope"
        own = caches[number] if owner is None else layers[owner].caches
        hosted = HostedLayer(name, mixer.spec, mixer.backend, own)
        mixer.backend = dataclasses.replace(mixer.backend, run=hosted.run)
        layers.append(hosted)
    return layers


def _host_caches(
    specs: Sequence[Spec], shares: Sequence[int | None], prefix: str, vllm_config: VllmConfig, in_graphs: bool
) -> dict[int, dict[str, CacheMember]]:
    """By layer and name, the caches of layers that have their own."""
    own = [(layer, spec) for layer, (spec, owner) in enumerate(zip(specs, shares, strict=True)) if owner is None]
    members = [Member(layer, name, layout) for layer, spec in own for name, layout in spec.caches().items()]
    config = vllm_config.cache_config
    pools = pools_of(members, config.block_size or 16, bool(config.enable_prefix_caching))
    layouts = tuple(pool.layout for pool in pools)
    found: dict[int, dict[str, CacheMember]] = {layer: {} for layer, _ in own}
    for pool in pools:
        first = pool.members[0]
        cache = HostedCache(f"{prefix}.layers.{first.layer}.allotrope_{first.name}", pool, layouts, in_graphs)
        vllm_config.compilation_config.static_forward_context[cache.name] = cache
        for number, member in enumerate(pool.members):
            found[member.layer][member.name] = CacheMember(cache, number)
    # A family names its caches in an order of its own.
    return {layer: {name: found[layer][name] for name in spec.caches()} for layer, spec in own}
