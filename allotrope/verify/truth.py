"""What Transformers answers: prompts that cross every boundary, its logits and hidden states, and how far off is wrong.

The engine continues each prompt first, on its own; Transformers then reads prompt and continuation in one pass. The
engine's greedy tokens are right exactly if each is the likeliest one there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from allotrope.config import EngineConfig
from allotrope.engine.load import Blueprint
from allotrope.errors import ConfigError
from allotrope.models.checkpoint import locate, open_checkpoint
from allotrope.verify import prompts
from allotrope.verify.judge import Limits
from allotrope.verify.options import VerifyOptions
from allotrope.verify.regimes import ALL, Bench
from allotrope.verify.sample import Sample, Wanted, spread, wanted_of
from allotrope.verify.transformers_model import Trace, TransformersModel, load_transformers
from allotrope.verify.watch import FreeRun

# In fp32, of the spread of the logits, and of the size of a hidden state. Rounding stays a factor of ten and more below
# (it grows with depth); a wrong mask, norm or weight is a factor of ten and more above.
PEAK, HIDDEN = 1e-3, 1e-4
# How much farther off than Transformers in the same type the engine may be, in types that round.
_ROUNDING, _TOP1 = 3.0, 0.08
# Bytes of logits and of hidden states that are kept.
_KEPT_LOGITS, _KEPT_HIDDEN = 1 << 30, 1 << 30


@dataclass(frozen=True)
class Truth:
    """`traces`: of samples whose layers are compared. `layer_limits`: relative RMS error allowed of each layer."""

    samples: list[Sample]
    traces: dict[str, Trace]
    limits: Limits
    layer_limits: list[float]
    origin: str
    remarks: tuple[str, ...]


def ask_transformers(
    config: EngineConfig, options: VerifyOptions, blueprint: Blueprint, *, exact: bool, tell: Callable[[str], None]
) -> Truth:
    """Make prompts, let the engine continue them, and let Transformers judge. `exact`: the engine runs in fp32."""
    marks = prompts.all_boundaries(blueprint.specs, config.page_size)
    room = min(options.longest, blueprint.max_model_len - options.new_tokens)
    if room < 1:
        context = blueprint.max_model_len
        raise ConfigError(f"max_model_len={context} leaves no prompt with new_tokens={options.new_tokens} after it.")
    lengths, missed = prompts.prompt_lengths(marks, room, options.new_tokens)
    lengths = options.named_lengths() or lengths
    ids = prompts.usable_ids(blueprint.checkpoint.config, blueprint.spec.vocab_size)
    drawn = prompts.draw_prompts(ids, lengths, config.seed)
    tell("running the engine on its own")
    forced = _continue(config, drawn, options.new_tokens)
    tell("running Transformers")
    model, origin = _load(config, options, blueprint, torch.float32)
    fed = [(*prompt, *tokens[:-1]) for prompt, tokens in zip(drawn, forced, strict=True)]
    most = max(64, _KEPT_LOGITS // (4 * blueprint.spec.vocab_size) // len(fed))
    traced = _traced(fed, len(blueprint.specs) * 5 * blueprint.spec.hidden * 4)
    samples, traces = [], {}
    for i, (prompt, tokens) in enumerate(zip(drawn, forced, strict=True)):
        if i in traced:
            logits, traces[f"p{i}"] = model.trace(fed[i])
        else:
            logits = model.logits(fed[i])
        samples.append(_sample(f"p{i}", prompt, tokens, wanted_of(logits, most)))
    del model
    remarks = [f"boundary at {mark} tokens is not crossed (--longest {options.longest})" for mark in missed]
    limits = Limits(PEAK * spread(samples), f"{PEAK:.1%} of the spread of the logits")
    layer_limits = [HIDDEN] * len(blueprint.specs)
    if not exact:
        tell("running Transformers in the same type")
        limits, layer_limits = _yardstick(config, options, blueprint, samples, traces)
    return Truth(samples, traces, limits, layer_limits, origin, tuple(remarks))


def _continue(config: EngineConfig, drawn: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The engine's own greedy tokens after each prompt."""
    blank = torch.zeros(0)
    nothing = Wanted(blank, blank, blank, blank, blank, blank)
    samples = [Sample(f"p{i}", prompt, (0,) * count, (), nothing) for i, prompt in enumerate(drawn)]
    observer = FreeRun()
    ALL["whole"].run(Bench(config, samples), observer)
    return [tuple(observer.chosen[f"p{i}/whole"]) for i in range(len(drawn))]


def _sample(name: str, prompt: tuple[int, ...], forced: tuple[int, ...], wanted: Wanted) -> Sample:
    return Sample(name, prompt, forced, tuple(wanted.top1[len(prompt) - 1 :].tolist()), wanted)


def _load(
    config: EngineConfig, options: VerifyOptions, blueprint: Blueprint, dtype: torch.dtype
) -> tuple[TransformersModel, str]:
    """Transformers' model, and what it is in words."""
    import transformers

    named = options.reference or config.model
    checkpoint = blueprint.checkpoint if options.reference is None else open_checkpoint(options.reference)
    path = locate(named, revision=config.revision if options.reference is None else None)
    model = load_transformers(path, checkpoint.config, dtype, len(blueprint.specs))
    what = f"Transformers {transformers.__version__} ({model.name}) in {str(dtype).removeprefix('torch.')} on the CPU"
    return model, what if options.reference is None else f"{what}, which ran {named}"


def _traced(fed: Sequence[Sequence[int]], bytes_per_token: int) -> set[int]:
    """Which samples are looked into: the longest that fit into memory together, the shortest one at least."""
    chosen, left = set(), _KEPT_HIDDEN // bytes_per_token
    for i in sorted(range(len(fed)), key=lambda i: -len(fed[i])):
        if len(fed[i]) <= left:
            chosen.add(i)
            left -= len(fed[i])
    return chosen or {min(range(len(fed)), key=lambda i: len(fed[i]))}


def _yardstick(
    config: EngineConfig,
    options: VerifyOptions,
    blueprint: Blueprint,
    samples: Sequence[Sample],
    traces: dict[str, Trace],
) -> tuple[Limits, list[float]]:
    """How far off Transformers itself is in the type that the engine rounds to; the engine may be a little farther."""
    build = blueprint.build
    dtype = build.kv_dtype if build.dtype == torch.float32 else build.dtype
    model, _ = _load(config, options, blueprint, dtype)
    errors, same = [], []
    off = [[0.0] for _ in blueprint.specs]
    for sample in samples:
        if sample.name in traces:
            logits, trace = model.trace(sample.fed)
            for (layer, stage), want in traces[sample.name].hidden.items():
                if stage == "out":
                    error = (trace.hidden[layer, stage].float() - want).norm() / want.norm()
                    off[layer].append(float(error))
        else:
            logits = model.logits(sample.fed)
        errors.append((logits[sample.wanted.positions] - sample.wanted.rows).abs().amax(-1))
        same.append((logits.argmax(-1) == sample.wanted.top1).float())
    name = str(dtype).removeprefix("torch.")
    limits = Limits(
        max_abs=math.inf,
        origin=f"{_ROUNDING:g} times the error of Transformers in {name}, its top-1 agreement less {_TOP1:.0%}",
        median_abs=_ROUNDING * float(torch.cat(errors).median()) + PEAK * spread(list(samples)),
        top1=max(0.5, float(torch.cat(same).mean()) - _TOP1),
    )
    return limits, [HIDDEN + _ROUNDING * max(found) for found in off]
