"""Our decoder as a model of SGLang: one wrapper for every architecture.

There are two classes because SGLang goes by a model's name in whether it keeps states.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_server_args
from torch import nn

from allotrope.architectures.registry import Architecture, read_spec
from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex
from allotrope.attention.cache_layout import StateSlots
from allotrope.attention.family import CacheViews
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.errors import ConfigError, ModelError
from allotrope.layers.backend_report import uncaptured
from allotrope.layers.build import Build
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.step import LayerStep, Step
from allotrope.loading.decoder import load_decoder, make_decoder, only_kept, quantized_build
from allotrope.loading.kv_scales import attention_specs
from allotrope.ops.rope import RopeTables
from allotrope.plugins.hosted_build import DTYPES, hosted_build
from allotrope.plugins.prefill_graphs import PrefillGraphs
from allotrope.plugins.sglang import PLAIN, STATEFUL
from allotrope.plugins.sglang.config import KV_DTYPES, HostedConfig, read_overrides
from allotrope.plugins.sglang.memory import CacheMemory
from allotrope.plugins.sglang.request_tables import RequestTables
from allotrope.plugins.steps import Order, arrange, rows_index
from allotrope.plugins.warmed_steps import Kind, warm_up_first
from allotrope.plugins.weights import StreamedWeights, foreign_weights, hub_revision

log = logging.getLogger("sglang.allotrope")
_LOADED_ONCE = "weights cannot be loaded a second time; start SGLang anew"


def _build(args: Any, options: dict[str, Any]) -> Build:
    # SGLang builds models under their type and on their device.
    dtype, device = torch.get_default_dtype(), torch.empty(0).device
    types = (dtype, KV_DTYPES.get(args.kv_cache_dtype, dtype), DTYPES[args.mamba_ssm_dtype or "float32"])
    return hosted_build("SGLang", get_tp_group(), options, device, types)


@dataclass
class _Batch:
    """SGLang's batch as a `HostBatch` of `allotrope.plugins.steps`."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None


class Head:
    """Our output head in the form of an `lm_head` of SGLang, whose logits processor calls `quant_method.apply`."""

    def __init__(self, decoder: Any, dtype: torch.dtype) -> None:
        self._decoder, self._dtype = decoder, dtype

    @property
    def quant_method(self) -> Head:
        return self

    def apply(self, layer: Any, hidden_states: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden_states`: [n, hidden]. Returns [n, vocabulary] fp32, on every rank."""
        logits: torch.Tensor = self._decoder.logits(hidden_states.to(self._dtype))
        return logits


class HostedModel(nn.Module):
    """Any of our decoders, with its attention in SGLang's cache memory."""

    # If a module has one, SGLang refuses with it to change weights of a running model.
    _derived_weight_cache_error: str | None = None

    def __init__(self, config: HostedConfig, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        args = get_server_args()
        overrides, options = read_overrides(args)
        self.quantized_weights = options["quantized_weights"]
        self.build = _build(args, options)
        keeps = self.quantized_weights != "dequantize"
        self.checkpoint, self.architecture, spec = _open(args, overrides, keeps and args.load_format != "dummy")
        # What the mixers would refuse, in the words of our engine.
        attention_specs(spec, self.build, self.checkpoint.source)
        if keeps:
            kept = quantized_build(self.checkpoint, self.architecture, spec, self.build)
            self.build = only_kept(kept, self.quantized_weights)
        self.decoder = make_decoder(self.architecture, spec, self.build)
        self.seed, self._load_format = args.random_seed or 0, args.load_format
        self.finished = False
        layers: Any = self.decoder.layers
        # A plain list, so that mixers are not registered as submodules twice.
        self._mixers: list[Any] = [layer.mixer for layer in layers]
        owners = [layer.mixer.shares_cache_of for layer in spec.layers]
        # Of each layer, the layer whose caches it reads.
        self._owners = [number if owner is None else owner for number, owner in enumerate(owners)]
        self._caches = [
            {} if owner is not None else mixer.spec.caches() for mixer, owner in zip(self._mixers, owners, strict=True)
        ]
        self.memory = CacheMemory(tuple(layout for caches in self._caches for layout in caches.values()))
        if bool(self.memory.state_bytes) != (type(self).__name__ == STATEFUL):
            raise ModelError(self.checkpoint.source, ["json_model_override_args changes whether layers keep states"])
        config.declare(self.memory, self.build.kv_dtype, self.build.parallel.size)
        self.config, self.lm_head = config, Head(self.decoder, self.build.dtype)
        self.logits_processor = LogitsProcessor(config, skip_all_gather=True)
        self._tables = RopeTables(self.build.device, self.build.chooser)
        wanted = not (args.disable_cuda_graph or args.disable_prefill_cuda_graph)
        self.prefill = PrefillGraphs(self.decoder, self.build, self._tables, log, wanted=wanted)
        self._views: list[CacheViews] = []
        self._requests: RequestTables
        # For steps that can be captured, see `arrange`: indices of requests, and the same as `query_start_loc` of
        # decodes. None where no step can.
        self._arange: torch.Tensor | None = None
        self._starts: torch.Tensor | None = None
        self._warmed_up: set[Kind] = set()
        # Whether SGLang is capturing; the attention backend sets it.
        self.captures = False
        self._in_graphs = all(mixer.backend.in_graphs for mixer in self._mixers)

    def prepare_graphs(self, max_requests: int) -> None:
        """Before steps of up to `max_requests` are captured. Raises ConfigError where they cannot be."""
        if reasons := uncaptured(self.decoder.attention):
            raise ConfigError(
                f"decode steps run without CUDA graphs: {'; '.join(reasons)}. Add --disable-decode-cuda-graph."
            )
        self._requests.prepare_graphs(max_requests)

    def copy_tables(self, forward_batch: Any) -> None:
        """Copy what SGLang's tables say of a captured step's requests, padding included, to where the graph reads."""
        self._requests.copy(forward_batch.req_pool_indices, self._longest(forward_batch))

    def bind(self, kv_pool: Any, request_pool: Any, context: int) -> None:
        """Take SGLang's pools, which are made after the model. `context`: most tokens of a request."""
        if not self.finished:
            if self._load_format != "dummy":
                raise ModelError(self.checkpoint.source, [foreign_weights(self._load_format)])
            # Dummy weights never come through `load_weights`.
            self._load(None)
        states = request_pool.mamba_pool.mamba_cache.temporal[0] if self.memory.state_bytes else None
        planes = self.memory.cut(kv_pool.page_size, (kv_pool.get_key_buffer(0), kv_pool.get_value_buffer(0)), states)
        found = iter(planes)
        own = [{name: next(found) for name in caches} for caches in self._caches]
        self._views = [own[owner] for owner in self._owners]
        self._requests = RequestTables(kv_pool, request_pool, context, keeps_states=states is not None)
        log.info(
            "allotrope: caches in SGLang's pools: %d bytes a token in pages of %d, %d bytes of states a sequence",
            kv_pool.get_key_buffer(0)[0].nbytes + kv_pool.get_value_buffer(0)[0].nbytes,
            kv_pool.page_size,
            self.memory.state_bytes,
        )
        if self._in_graphs:
            self._arange = torch.arange(len(request_pool.req_to_token) + 1, device=self.build.device)
            self._starts = self._arange.int()

    # SGLang captures steps outside of its own `no_grad`.
    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> LogitsProcessorOutput:
        """`input_ids`: [T], padding last. `input_embeds`: [T, hidden] what stands for their embeddings; SGLang lets no
        request of a batch have ids where another one has these. Positions follow from the batch."""
        if input_embeds is not None and self.decoder.reads_ids():
            raise ModelError(self.checkpoint.source, ["its layers read token ids beside their embeddings"])
        self._warm_up(input_ids, forward_batch)
        mode = forward_batch.forward_mode
        plain = mode.is_decode() or self._is_captured() or input_embeds is not None
        hidden = self._compute(input_ids, forward_batch, self.decoder if plain else self.prefill.run, input_embeds)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def _warm_up(self, input_ids: torch.Tensor, forward_batch: ForwardBatch) -> None:
        mode, by_kernels = forward_batch.forward_mode, self._arange is not None and self.build.device.type == "cuda"
        if not by_kernels or mode.is_idle():
            return
        step = functools.partial(self._compute, input_ids, forward_batch, self.decoder)
        warm_up_first(self._warmed_up, (self.captures, mode.is_decode()), len(input_ids), step, self.build, log)

    def _compute(
        self,
        input_ids: torch.Tensor,
        forward_batch: ForwardBatch,
        run: Callable[[Step], torch.Tensor],
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden], 0 for padding. `run`: the decoder. `embeddings`: in the place of those of the ids."""
        width = self.decoder.spec.hidden
        if forward_batch.forward_mode.is_idle():
            return torch.zeros(len(input_ids), width, dtype=self.build.dtype, device=self.build.device)
        batch, order, layers = self._plan(forward_batch)
        step = Step(input_ids[order.tokens], batch, layers, self._tables)
        if embeddings is not None:
            step.embeddings = embeddings[order.tokens].to(self.build.dtype)
        return order.restored(run(step), len(input_ids))

    def _plan(self, forward_batch: ForwardBatch) -> tuple[BatchLayout, Order, list[LayerStep]]:
        """The batch, and the plan of each layer; layers of equal `plan_key` share one."""
        batch, order = arrange(self._host_batch(forward_batch), self.build.device, self._arange)
        of_kind = self._indices(forward_batch, batch, order)
        plans: dict[object, object] = {}
        steps = []
        for mixer, owner, views in zip(self._mixers, self._owners, self._views, strict=True):
            spec, backend = mixer.spec, mixer.backend
            index = {name: of_kind[isinstance(one, StateSlots)] for name, one in self._caches[owner].items()}
            key = (spec.plan_key, backend.name, tuple(index))
            if key not in plans:
                plans[key] = backend.plan(spec, batch, index)
            steps.append(LayerStep(plans[key], views))
        return batch, order, steps

    def _host_batch(self, forward_batch: ForwardBatch) -> _Batch:
        """SGLang's batch. Raises ConfigError while SGLang captures a step with prompts."""
        count = forward_batch.batch_size
        decodes = forward_batch.forward_mode.is_decode()
        query_lens = [1] * count if decodes else forward_batch.extend_seq_lens_cpu
        captured = self._is_captured()
        if captured and not decodes:
            raise ConfigError(
                "Allotrope's models plan steps with prompts on the host. Add --disable-prefill-cuda-graph."
            )
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        return _Batch(
            num_reqs=count,
            num_actual_tokens=sum(query_lens),
            max_query_len=max(query_lens),
            # A captured step is replayed for longer sequences.
            max_seq_len=self._requests.context if captured else self._longest(forward_batch),
            # Only steps of decodes alone read it on the device.
            query_start_loc=starts if self._starts is None else self._starts[: count + 1],
            query_start_loc_cpu=starts,
            seq_lens=forward_batch.seq_lens.int(),
            seq_lens_cpu_upper_bound=forward_batch.seq_lens_cpu,
        )

    def _indices(self, forward_batch: ForwardBatch, batch: BatchLayout, order: Order) -> dict[bool, CacheIndex]:
        """Where entries of tokens (False) and states (True) of the step's requests lie."""
        requests, slots, captured = forward_batch.req_pool_indices, forward_batch.out_cache_loc, self._is_captured()
        size = self._requests.page_size
        if batch.static_tensors is not None:
            # In a captured step, padding rows of SGLang write slot 0, which is in our null page.
            slots = torch.where(slots >= size, slots, -1)
        pages = self._requests.pages(requests, max(batch.seq_lens), captured=captured)
        found: dict[bool, CacheIndex] = {False: rows_index(batch, order, pages, slots, size)}
        if self.memory.state_bytes:
            states = self._requests.states(requests, captured=captured)[order.requests]
            found[True] = SlotIndex(states if batch.static_tensors is not None else states.long())
        return found

    def _longest(self, forward_batch: Any) -> int:
        """The most tokens of a request of the step, this step's among them."""
        seq_lens = forward_batch.seq_lens_cpu
        return self._requests.context if seq_lens is None else max(int(seq_lens.max()), 1)

    def _is_captured(self) -> bool:
        """Whether the step is captured, or warms up kernels of a captured one."""
        return self.captures or (self.build.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter by the architecture's rules; raises ModelError for anything left over on either side."""
        if self.finished:
            raise ModelError(self.checkpoint.source, [_LOADED_ONCE])
        self._load(StreamedWeights(self.checkpoint, weights))

    def _load(self, weights: StreamedWeights | None) -> None:
        """Load `weights`; None: random ones."""
        load_decoder(
            self.decoder,
            self.architecture,
            self.build,
            weights,
            seed=self.seed,
            quantized_weights=self.quantized_weights,
            log=lambda line: log.info("allotrope: %s", line),
        )
        self.finished = True
        self._derived_weight_cache_error = f"{self.checkpoint.source}: {_LOADED_ONCE}"


def _open(args: Any, overrides: dict[str, Any], weights: bool) -> tuple[Checkpoint, Architecture, ModelSpec]:
    """The checkpoint's config.json as it stands, read by our rules; `weights`: with the headers of its tensors."""
    checkpoint = open_checkpoint(
        args.model_path,
        revision=hub_revision(args.model_path, args.revision),
        load_format="auto" if weights else "dummy",
        cache=args.download_dir,
        hf_overrides=json.dumps(overrides) if overrides else None,
    )
    return checkpoint, *read_spec(checkpoint.config, checkpoint.source)


# SGLang knows models by the names of their classes.
EntryClass = [type(PLAIN, (HostedModel,), {}), type(STATEFUL, (HostedModel,), {})]
