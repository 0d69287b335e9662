"""A whole model as the draft model of another: how it is found and checked. It is filled as any decoder is.

Must not know how drafts are made or verified.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allotrope.architectures.registry import read_spec
from allotrope.attention.cache_layout import StateSlots
from allotrope.attention.family import Spec
from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.errors import ModelError
from allotrope.kernels.backend import Chooser
from allotrope.layers.build import Build
from allotrope.layers.decoder_draft import DecoderDraftSpec
from allotrope.layers.model_spec import ModelSpec
from allotrope.loading.decoder import make_meta_decoder, quantized_build
from allotrope.loading.kv_scales import attention_specs


def resolve_decoder_draft(checkpoint: Checkpoint, target: ModelSpec, target_checkpoint: Checkpoint) -> DecoderDraftSpec:
    """The draft model in `checkpoint` for the model `target`, before a weight is read.

    Raises ModelError for a config that is not read, and for another vocabulary than the target's.
    """
    architecture, spec = read_spec(checkpoint.config, checkpoint.source)
    reasons = []
    if spec.vocab_size != target.vocab_size:
        reasons.append(
            f"vocab_size={spec.vocab_size} differs from the {target.vocab_size} of {target_checkpoint.source}, for "
            f"which it is to draft"
        )
    elif reason := _other_ids(checkpoint, target_checkpoint):
        reasons.append(reason)
    if any(layer.mixer.shares_cache_of is not None for layer in spec.layers):
        reasons.append("layers that read the cache of others are not supported in a draft model")
    if reasons:
        raise ModelError(checkpoint.source, reasons)
    return DecoderDraftSpec(model=spec, decoder=architecture.decoder)


def decoder_draft_build(checkpoint: Checkpoint, build: Build, *, keeps: bool) -> Build:
    """`build` of the target for its draft model. `keeps`: with the formats of the weights that stay quantized.

    Raises ModelError for layers that cannot draft, and where ranks cannot share its sizes.
    """
    source = checkpoint.source
    architecture, spec = read_spec(checkpoint.config, source)
    refused = {one.family for one in attention_specs(spec, build, source) if not _drafts(one)}
    if refused:
        names = ", ".join(sorted(refused))
        raise ModelError(source, [f"{names}: recurrent states and compressed rows are not supported in a draft model"])
    # Its choices of backends are logged on their own.
    own = dataclasses.replace(build, formats={}, chooser=Chooser(build.chooser.chip, build.chooser.wanted))
    try:
        make_meta_decoder(architecture, spec, own)
        return quantized_build(checkpoint, architecture, spec, own) if keeps else own
    except ValueError as error:
        raise ModelError(source, [str(error)]) from error


def _drafts(spec: Spec) -> bool:
    """Whether later passes of a chain can run a layer: they rewind nothing, and have no pooled rows to fill."""
    return spec.family != "csa" and not any(isinstance(layout, StateSlots) for layout in spec.caches().values())


def _other_ids(own: Checkpoint, target: Checkpoint) -> str:
    """Why ids do not mean the same text in both; empty where they do, or where either has no tokenizer.json."""
    paths = [_tokenizer_file(one) for one in (own, target)]
    if paths[0] is None or paths[1] is None:
        return ""
    texts = [path.read_bytes() for path in paths if path is not None]
    if texts[0] == texts[1]:
        return ""
    vocabularies = [_vocabulary(text) for text in texts]
    differ = _different(*vocabularies)
    if not differ:
        return ""
    example = f"{differ[0]!r} is {vocabularies[0].get(differ[0])} and {vocabularies[1].get(differ[0])}"
    return f"its tokenizer is not that of {target.source}: {len(differ)} texts have other ids, such as {example}"


def _tokenizer_file(checkpoint: Checkpoint) -> Path | None:
    path = None if checkpoint.tokenizer_path is None else Path(checkpoint.tokenizer_path) / "tokenizer.json"
    return path if path is not None and path.is_file() else None


def _vocabulary(text: bytes) -> dict[str, Any]:
    """Text -> id, without tokens that were added: drafts of these are few, and verified as all are."""
    found = json.loads(text).get("model", {}).get("vocab", {})
    if isinstance(found, list):
        return {entry[0]: i for i, entry in enumerate(found)}
    return dict(found)


def _different(own: dict[str, Any], target: dict[str, Any]) -> Sequence[str]:
    return sorted(name for name in {*own, *target} if own.get(name) != target.get(name))
