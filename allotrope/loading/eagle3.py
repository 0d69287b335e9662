"""An EAGLE3 head in a checkpoint of its own: how it is found, made and filled.

Must not know how drafts are made or verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from allotrope.architectures.eagle3 import HEADS, eagle3_rules, is_eagle3, read_eagle3
from allotrope.checkpoint.checkpoint import Checkpoint
from allotrope.errors import ModelError
from allotrope.layers.build import Build
from allotrope.layers.decoder import Decoder
from allotrope.layers.draft import DraftModel
from allotrope.layers.eagle3 import Eagle3Spec
from allotrope.layers.model_spec import ModelSpec
from allotrope.loading.decoder import fill_draft, quantized_draft_build
from allotrope.loading.draft import make_meta_draft


def resolve_eagle3(checkpoint: Checkpoint, target: ModelSpec, decoder: type[Decoder]) -> Eagle3Spec:
    """The head in `checkpoint` for the model `target`, before a weight is read.

    `decoder`: the target's class. What is shared with the target follows from the tensors that the checkpoint has; one
    whose weights are not read has no embedding of its own where the target's can be shared. Raises ModelError for a
    checkpoint of another kind, and for a head that does not fit this target.
    """
    source = checkpoint.source
    if not is_eagle3(checkpoint.config):
        names = checkpoint.config.get("architectures") or []
        raise ModelError(source, [f"config architectures={names!r} is no EAGLE3 head (allowed: {', '.join(HEADS)})"])
    spec = read_eagle3(checkpoint.config, source, target)
    spec, reasons = _shared(checkpoint, spec, target)
    if not decoder.one_stream:
        reasons.append("the target's residual stream is several tensors, and an EAGLE3 head reads one")
    if reasons:
        raise ModelError(source, reasons)
    return spec


def _shared(checkpoint: Checkpoint, spec: Eagle3Spec, target: ModelSpec) -> tuple[Eagle3Spec, list[str]]:
    """The spec with what the head shares with its target, and reasons why it cannot."""
    same_size, reduced = spec.model.hidden == target.hidden, spec.draft_vocab_size != target.vocab_size
    why = [] if same_size else [f"hidden_size={spec.model.hidden} differs from the target's {target.hidden}"]
    embedding_reasons = [*why, *([] if target.embedding_scale == 1.0 else ["the target's embedding is scaled"])]
    head_reasons = [*why, *(["its vocabulary is a part of the target's"] if reduced else [])]
    if not checkpoint.has_weights:
        return dataclasses.replace(spec, own_embedding=bool(embedding_reasons), maps_ids=reduced), []
    names = checkpoint.headers()
    own_embedding, own_head, maps_ids = (name in names for name in ("embed_tokens.weight", "lm_head.weight", "d2t"))
    reasons = []
    for name, own, why in (
        ("embed_tokens.weight", own_embedding, embedding_reasons),
        ("lm_head.weight", own_head, head_reasons),
    ):
        if not own and why:
            reasons.append(f"there is no {name}, and the target's does not serve: {'; '.join(why)}")
    if reduced and not maps_ids:
        reasons.append(f"there is no d2t, which maps the {spec.draft_vocab_size} ids of the draft vocabulary")
    return dataclasses.replace(spec, own_embedding=own_embedding, own_head=own_head, maps_ids=maps_ids), reasons


def _what_it_reads(spec: Eagle3Spec) -> str:
    """One line on the hidden states that the head reads. It names the doubt that a config can leave."""
    if not spec.aux_layers:
        return "reads hidden states after the final norm"
    line = f"reads the residual stream before layers {', '.join(map(str, spec.aux_layers))}"
    if spec.aux_layers[0] != 1:
        return line
    # SGLang adds 1 to such lists, and vLLM does not (sgl-project/sglang#25454): the heads were trained either way.
    after = [layer + 1 for layer in spec.aux_layers]
    return (
        f"{line}. Some heads mean after these layers: if few drafts are accepted, set "
        f"eagle_aux_hidden_state_layer_ids to {after} in the head's config.json"
    )


def eagle3_build(checkpoint: Checkpoint, spec: Eagle3Spec, target: Decoder, build: Build) -> Build:
    """`build` of the model `target` for its head: with the formats of the head's weights that stay quantized."""

    def make(build: Build) -> DraftModel:
        return make_meta_draft(spec, target, build)

    return quantized_draft_build(checkpoint, eagle3_rules(spec), build, make)


def load_eagle3(
    spec: Eagle3Spec,
    target: Decoder,
    build: Build,
    weights: Checkpoint | None,
    *,
    seed: int,
    quantized_weights: str,
    log: Callable[[str], None],
) -> DraftModel:
    """Make the head of `target` and fill it. The target keeps its auxiliary hidden states for it from then on.

    `target`: loaded. `build`: of `eagle3_build`, or that of the target without its `formats`. `weights`: the head's
    own checkpoint; None draws random weights. The rest as in `load_decoder`. Raises ModelError for weights that do not
    fit the head, and for ids outside the target's vocabulary.
    """
    model = spec.build(target, target.spec, build)
    log(f"draft model: {_what_it_reads(spec)}")
    try:
        return fill_draft(
            model, eagle3_rules(spec), build, weights, seed=seed, quantized_weights=quantized_weights, log=log
        )
    except ValueError as error:
        # ModelError is another kind: these are ids of `d2t`.
        raise ModelError("EAGLE3 head" if weights is None else weights.source, [str(error)]) from error
