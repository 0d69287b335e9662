"""What Transformers answers: prompts that cross every boundary, its logits and hidden states, and how far off is wrong.

The engine continues each prompt first, on its own; Transformers then reads prompt and continuation in one pass. The
engine's greedy tokens are right exactly if each is the likeliest one there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.config import EngineConfig
from allotrope.engine.load import Blueprint, available_memory
from allotrope.engine.row_scales import FP8
from allotrope.errors import AllotropeError, ConfigError, ModelError
from allotrope.models.checkpoint import locate, open_checkpoint
from allotrope.verify import prompts
from allotrope.verify.judge import FP8_ROUNDING, Limits, with_fp8_rows
from allotrope.verify.options import VerifyOptions
from allotrope.verify.regimes import ALL, Bench
from allotrope.verify.sample import Sample, Wanted, spread, wanted_of
from allotrope.verify.transformers_model import Trace, TransformersModel, load_transformers
from allotrope.verify.watch import FreeRun

# In fp32, of the spread of the logits and of the size of a hidden state: what is never too much, what always is, and
# what is where Transformers' own rounding cannot be measured. Of what is measured (fp32 against float64), a multiple.
PEAK, HIDDEN = (2e-4, 3e-2, 1e-3), (5e-5, 1e-3, 1e-4)
_NOISE = 40.0
# In types that round: how much farther off than Transformers in the same type the engine may be.
_ROUNDING, _TOP1 = 3.0, 0.08
# Bytes of logits and of hidden states that are kept.
_KEPT_LOGITS, _KEPT_HIDDEN = 1 << 30, 1 << 30


@dataclass(frozen=True)
class Truth:
    """`marks`: context lengths at which a layer or the engine changes how it works. `traces`: of samples whose layers
    are compared. `layer_limits`: relative RMS error allowed of each layer.
    """

    marks: tuple[int, ...]
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
        if not bool(logits.isfinite().all()):
            raise ModelError(
                "Transformers cannot be the reference", [f"its logits of {len(prompt)} tokens are not finite"]
            )
        samples.append(_sample(f"p{i}", prompt, tokens, wanted_of(logits, most)))
    affordable = 8 * model.parameters < available_memory() // 2
    del model
    remarks = [f"the boundary at {mark} tokens is not crossed (--longest {options.longest})" for mark in missed]
    tell("measuring how far off rounding alone is")
    if exact:
        other = _deviation(config, options, blueprint, torch.float64, samples, traces) if affordable else None
        limits, layer_limits = _exact_limits(other, spread(samples), len(blueprint.specs))
    else:
        fp8 = blueprint.build.kv_dtype == FP8
        kind = blueprint.build.kv_dtype if blueprint.build.dtype == torch.float32 else blueprint.build.dtype
        other = _deviation(config, options, blueprint, torch.bfloat16 if fp8 else kind, samples, traces)
        limits, layer_limits = _rounded_limits(other, spread(samples))
        if fp8:
            limits, layer_limits = with_fp8_rows(limits), [FP8_ROUNDING * limit for limit in layer_limits]
    return Truth(marks, samples, traces, limits, layer_limits, origin, tuple(remarks))


def _continue(config: EngineConfig, drawn: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The engine's own greedy tokens after each prompt."""
    blank = torch.zeros(0)
    nothing = Wanted(blank, blank, blank, blank, blank, blank)
    samples = [Sample(f"p{i}", prompt, (0,) * count, (), nothing) for i, prompt in enumerate(drawn)]
    observer = FreeRun()
    try:
        ALL["whole"].run(Bench(config, samples), observer)
    except AllotropeError:
        raise
    except Exception as error:
        # The border of the engine: without its continuations there is nothing to compare.
        raise ModelError("the engine cannot run the model", [f"{type(error).__name__}: {error}"]) from error
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


@dataclass(frozen=True)
class Deviation:
    """How far Transformers in another type is from itself in fp32.

    `errors`: largest error of a logit, of every position. `rel_rms`: of all logits. `top1`: share of equal top-1
    tokens. `layers`: relative RMS error of each layer's output. Positions behind a pick that fell another way are left
    out in float64, where there are few; in types that round they are the rule.
    """

    dtype: str
    errors: torch.Tensor
    rel_rms: float
    top1: float
    layers: list[float]


def _deviation(
    config: EngineConfig,
    options: VerifyOptions,
    blueprint: Blueprint,
    dtype: torch.dtype,
    samples: Sequence[Sample],
    traces: Mapping[str, Trace],
) -> Deviation:
    model, _ = _load(config, options, blueprint, dtype)
    errors, same = [torch.zeros(1)], [torch.zeros(0)]
    layers = [0.0] * len(blueprint.specs)
    off = size = 0.0
    for sample in samples:
        if sample.name not in traces:
            continue
        logits, trace = model.trace(sample.fed)
        end = first_difference(traces[sample.name], trace)
        for (layer, stage), want in traces[sample.name].hidden.items():
            if stage == "out" and end:
                error = (trace.hidden[layer, stage].float() - want)[:end].norm() / want[:end].norm()
                layers[layer] = max(layers[layer], float(error))
        judged = sample.wanted.positions < (end if dtype == torch.float64 else len(logits))
        rows = sample.wanted.rows[judged]
        error = logits[sample.wanted.positions[judged]] - rows
        off, size = off + float(error.double().square().sum()), size + float(rows.double().square().sum())
        errors.append(error.abs().amax(-1))
        same.append((logits.argmax(-1) == sample.wanted.top1).float())
    name, rel_rms = str(dtype).removeprefix("torch."), (off / size) ** 0.5 if size else 0.0
    return Deviation(name, torch.cat(errors), rel_rms, float(torch.cat(same).mean()), layers)


def first_difference(one: Trace, other: Trace) -> int:
    """The first token of a sample for which two runs of the same code picked differently; its length if none."""
    end = min(len(hidden) for hidden in one.hidden.values())
    for layer, calls in one.picks.items():
        for mine, theirs in zip(calls, other.picks.get(layer, ()), strict=False):
            differs = (mine.chosen != theirs.chosen).any(-1).nonzero()
            end = min(end, int(differs[0])) if len(differs) else end
    return end


def _exact_limits(other: Deviation | None, scale: float, layers: int) -> tuple[Limits, list[float]]:
    """`other`: float64, None if that took too much memory. `scale`: spread of the logits."""
    if other is None:
        return Limits(PEAK[2] * scale, f"{PEAK[2]:.1%} of the spread of the logits"), [HIDDEN[2]] * layers
    noise = float(other.errors.max())
    origin = f"{_NOISE:g} times what Transformers in float32 differs from itself in float64"
    peak, rms = scale * _within(_NOISE * noise / scale, PEAK), _within(_NOISE * other.rel_rms, HIDDEN)
    limits = Limits(peak, origin, rms)
    return limits, [_within(_NOISE * error, HIDDEN) for error in other.layers]


def _within(value: float, bounds: tuple[float, ...]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _rounded_limits(other: Deviation, scale: float) -> tuple[Limits, list[float]]:
    limits = Limits(
        max_abs=math.inf,
        origin=f"{_ROUNDING:g} times the error of Transformers in {other.dtype}, its top-1 agreement less {_TOP1:.0%}",
        median_abs=_ROUNDING * float(other.errors[1:].median()) + PEAK[0] * scale,
        top1=max(0.5, other.top1 - _TOP1),
    )
    return limits, [HIDDEN[0] + _ROUNDING * error for error in other.layers]
