"""The draft model that the options ask for, as config.json and the options decide it before a weight is read."""

from __future__ import annotations

from dataclasses import replace

import torch

from allotrope.architectures.registry import Architecture, read_draft
from allotrope.checkpoint.checkpoint import Checkpoint, open_checkpoint
from allotrope.config import EngineConfig
from allotrope.errors import ConfigError
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.decoder_draft import DecoderDraftSpec
from allotrope.layers.draft_spec import DraftSpec
from allotrope.layers.eagle3 import Eagle3Spec
from allotrope.layers.model_spec import ModelSpec
from allotrope.loading.decoder import only_kept
from allotrope.loading.decoder_draft import decoder_draft_build, resolve_decoder_draft
from allotrope.loading.draft import draft_build
from allotrope.loading.eagle3 import eagle3_build, resolve_eagle3
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.weight import Format
from allotrope.speculative_config import MAX_SPECULATIVE_TOKENS


def resolve_draft(
    config: EngineConfig, architecture: Architecture, spec: ModelSpec, checkpoint: Checkpoint
) -> tuple[DraftSpec | None, Checkpoint | None, int]:
    """The draft model that the options ask for and its checkpoint, None where drafts are looked up or not made, and the
    most drafts of a sequence in one step. Raises ConfigError where there is no such draft model."""
    wanted = config.speculation
    if wanted is None or wanted.drafts_from_text:
        return None, None, 0 if wanted is None else wanted.num_speculative_tokens
    draft: DraftSpec | None = None
    count = wanted.num_speculative_tokens
    if wanted.method == "mtp":
        if wanted.model not in (None, config.model):
            raise ConfigError(
                f"speculative_config: model={wanted.model!r}; method='mtp' drafts with the layer of the model itself, "
                f"{config.model}. Leave it out."
            )
        draft = read_draft(checkpoint.config, checkpoint.source)
        if draft is None:
            raise ConfigError(
                f"speculative_config: method='mtp', but {checkpoint.source} names no multi-token-prediction layer that "
                f"is supported. Try method='ngram' or 'suffix', which need no weights."
            )
    elif wanted.method == "eagle3":
        assert wanted.model is not None
        checkpoint = open_checkpoint(wanted.model, load_format="dummy" if config.load_format == "dummy" else "auto")
        head = resolve_eagle3(checkpoint, spec, architecture.decoder)
        named = head.num_drafts
        if not count and (named is None or not 1 <= named <= MAX_SPECULATIVE_TOKENS):
            number = "no number of drafts" if named is None else f"{named} drafts"
            raise ConfigError(
                f"speculative_config: num_speculative_tokens is missing, and {checkpoint.source} names {number}. Give "
                f"1 to {MAX_SPECULATIVE_TOKENS}."
            )
        draft, count = head, count or named or 0
    else:
        assert wanted.model is not None
        own = open_checkpoint(wanted.model, load_format="dummy" if config.load_format == "dummy" else "auto")
        draft, checkpoint = _resolve_decoder_draft(config, own, spec, checkpoint), own
    size = wanted.draft_tensor_parallel_size
    if size not in (None, config.tensor_parallel_size):
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size={size}; a draft model is shared by the ranks of its "
            f"target, {config.tensor_parallel_size}. Leave it out."
        )
    return draft, checkpoint, count or 1


def _resolve_decoder_draft(
    config: EngineConfig, own: Checkpoint, target: ModelSpec, target_checkpoint: Checkpoint
) -> DecoderDraftSpec:
    """The draft model in `own`. Raises ModelError for one that does not fit, ConfigError for longer sequences than it
    was made for."""
    draft = resolve_decoder_draft(own, target, target_checkpoint)
    longest = config.max_model_len or target.context
    if longest > draft.model.longest_context:
        raise ConfigError(
            f"speculative_config: {own.source} was made for {draft.model.longest_context} tokens, and sequences may "
            f"have {longest}. Give --max-model-len {draft.model.longest_context} or less."
        )
    return draft


def build_of_draft(
    config: EngineConfig,
    draft: DraftSpec,
    checkpoint: Checkpoint,
    architecture: Architecture,
    target: Decoder,
    build: Build,
) -> Build:
    """How the layers of a draft model are made. `build`: of `target`, whose checkpoint is `architecture`'s. Raises
    ModelError, or ValueError where ranks cannot share its sizes."""
    own = replace(build, formats={}, expert_placements={}, counts_experts=False)
    keeps = config.quantized_weights != "dequantize"
    if isinstance(draft, DecoderDraftSpec):
        own = decoder_draft_build(checkpoint, own, keeps=keeps)
    elif keeps and isinstance(draft, Eagle3Spec):
        own = eagle3_build(checkpoint, draft, target, own)
    elif keeps:
        own = draft_build(checkpoint, architecture, target, draft, own)
    own = only_kept(own, config.quantized_weights, config.quantized_activations)
    return replace(own, draft_head=_draft_head(config, build))


def _draft_head(config: EngineConfig, build: Build) -> Format:
    """The format of the head by which a draft model chooses: "auto" is FP8 where our kernels multiply it."""
    wanted = "auto" if config.speculation is None else config.speculation.draft_head_dtype
    fp8, chip = Fp8(), build.chooser.chip
    halves = chip.is_gpu and build.dtype in (torch.bfloat16, torch.float16) and not fp8.kernel_reasons(chip)
    return fp8 if wanted == "fp8" or (wanted == "auto" and halves) else PLAIN
