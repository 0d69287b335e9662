"""What Transformers answers: prompts that cross every boundary, its logits and hidden states, and how far off is wrong.

The engine continues each prompt first, on its own; Transformers then reads prompt and continuation in one pass. The
engine's greedy tokens are right exactly if each is the likeliest one there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allotrope.checkpoint.checkpoint import locate, open_checkpoint
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.memory import available_memory
from allotrope.errors import AllotropeError, ConfigError, ModelError
from allotrope.loading.kv_scales import FP8
from allotrope.verify import prompts
from allotrope.verify.execution_modes import ALL, Bench
from allotrope.verify.logits_recorder import FreeRun
from allotrope.verify.options import VerifyOptions
from allotrope.verify.plain_files import plain_files
from allotrope.verify.rounded_products import RoundedProducts, fp8_tensors
from allotrope.verify.sample import ForcedTokens, Sample, Wanted, spread, wanted_of
from allotrope.verify.tolerance import FP8_MEDIAN, FP8_ROUNDING, Limits, with_fp8_rows
from allotrope.verify.transformers_model import Trace, TransformersModel, load_transformers

# In fp32, of the spread of the logits and of the size of a hidden state: what is never too much, what always is, and
# what is where Transformers' own rounding cannot be measured. Of what is measured (fp32 against float64), a multiple.
PEAK, HIDDEN = (2e-4, 3e-2, 1e-3), (5e-5, 1e-3, 1e-4)
_NOISE = 40.0
# In types that round: how much farther off than Transformers in the same type the engine may be.
_ROUNDING, _TOP1 = 3.0, 0.08
# The same where products round to FP8: that is most of the error, and either side rounds the same way.
_PRODUCTS = 2.0
# The least top-1 agreement that is asked for where types round. Where products round to FP8, a model of random weights
# agrees with itself in half of all tokens, and chance alone (as many standard deviations) makes more than 8 % of few.
_LEAST_TOP1, _CHANCE = 0.5, 3.0
# Bytes of logits and of hidden states that are kept.
_KEPT_LOGITS, _KEPT_HIDDEN = 1 << 30, 1 << 30


@dataclass(frozen=True)
class ExpectedOutputs:
    """`marks`: context lengths at which a layer or the engine changes how it works. `traces`: of samples whose layers
    are compared. `layer_limits`: relative error allowed of each layer, RMS or the median token's as `limits` judge.
    """

    marks: tuple[int, ...]
    samples: list[Sample]
    traces: dict[str, Trace]
    limits: Limits
    layer_limits: list[float]
    origin: str
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Reference:
    """The checkpoint that Transformers runs: files that it can read, with their config. `layers`: their number.
    `named`: what is said of it, where it is not the engine's own.
    """

    path: Path
    config: Mapping[str, Any]
    layers: int
    named: str | None

    def load(self, dtype: torch.dtype) -> TransformersModel:
        """Transformers' model of it."""
        return load_transformers(self.path, self.config, dtype, self.layers)

    def described(self, model: TransformersModel, dtype: torch.dtype) -> str:
        """In words."""
        import transformers

        kind = str(dtype).removeprefix("torch.")
        what = f"Transformers {transformers.__version__} ({model.name}) in {kind} on the CPU"
        if model.dequantized:
            what += ", with the weights of the file written out plain"
        return what if self.named is None else f"{what}, which ran {self.named}"


def ask_transformers(
    config: EngineConfig, options: VerifyOptions, load_plan: LoadPlan, *, exact: bool, log: Callable[[str], None]
) -> ExpectedOutputs:
    """Make prompts, let the engine continue them, and let Transformers judge. `exact`: the engine runs in fp32, with
    products that round nothing.
    """
    marks = prompts.all_boundaries(load_plan.specs, config.page_size)
    room = min(options.longest, load_plan.max_model_len - options.new_tokens)
    if room < 1:
        context = load_plan.max_model_len
        raise ConfigError(f"max_model_len={context} leaves no prompt with new_tokens={options.new_tokens} after it.")
    lengths, missed = prompts.prompt_lengths(marks, room, options.new_tokens)
    lengths = options.named_lengths() or lengths
    ids = prompts.usable_ids(load_plan.checkpoint.config, load_plan.spec.vocab_size)
    drawn = prompts.draw_prompts(ids, lengths, config.seed)
    log("running the engine on its own")
    forced = _continue(config, drawn, options.new_tokens)
    checkpoint = load_plan.checkpoint if options.reference is None else open_checkpoint(options.reference)
    path = locate(options.reference or config.model, revision=config.revision if options.reference is None else None)
    remarks = [f"the boundary at {mark} tokens is not crossed (--longest {options.longest})" for mark in missed]
    log("running Transformers")
    with plain_files(path, checkpoint.config) as (files, stated):
        reference = Reference(files, stated, len(load_plan.specs), options.reference)
        samples, traces, origin, affordable = _answers(reference, load_plan, drawn, forced)
        log("measuring how far off rounding alone is")
        if exact:
            other = _deviation(reference, torch.float64, samples, traces) if affordable else None
            limits, layer_limits = _exact_limits(other, spread(samples), len(load_plan.specs))
        else:
            limits, layer_limits, found = _measured_limits(reference, load_plan, samples, traces)
            remarks += found
    return ExpectedOutputs(marks, samples, traces, limits, layer_limits, origin, tuple(remarks))


def _answers(
    reference: Reference, load_plan: LoadPlan, drawn: Sequence[tuple[int, ...]], forced: Sequence[tuple[int, ...]]
) -> tuple[list[Sample], dict[str, Trace], str, bool]:
    """What follows each prompt, traces of some, what answered in words, and whether memory allows float64 as well."""
    model = reference.load(torch.float32)
    fed = [(*prompt, *tokens[:-1]) for prompt, tokens in zip(drawn, forced, strict=True)]
    most = max(64, _KEPT_LOGITS // (4 * load_plan.spec.vocab_size) // len(fed))
    traced = _traced(fed, len(load_plan.specs) * 5 * load_plan.spec.hidden * 4)
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
    return samples, traces, reference.described(model, torch.float32), affordable


def _continue(config: EngineConfig, drawn: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The engine's own greedy tokens after each prompt."""
    samples = [ForcedTokens(f"p{i}", prompt, (0,) * count) for i, prompt in enumerate(drawn)]
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
    """How far Transformers, computing in another way, is from itself in fp32.

    `way`: in words. `errors`: largest error of a logit, of every position. `rel_rms`: of all logits. `top1`: share of
    equal top-1 tokens. `layers`: relative error of each layer's output: RMS of the worst sample in float64, where the
    few positions behind a pick that fell another way are left out; where rounding is the rule, that of the median
    token. `share`: of the weights whose products round, those that were found.
    """

    way: str
    errors: torch.Tensor
    rel_rms: float
    top1: float
    layers: list[float]
    share: float = 1.0


def _deviation(
    reference: Reference,
    dtype: torch.dtype,
    samples: Sequence[Sample],
    traces: Mapping[str, Trace],
    rounded: Sequence[str] = (),
) -> Deviation:
    """`rounded`: tensors whose products round their activations to FP8."""
    model = reference.load(dtype)
    way, share, exact = str(dtype).removeprefix("torch."), 1.0, dtype == torch.float64
    if rounded:
        products = RoundedProducts(model.model, open_checkpoint(str(reference.path)), rounded)
        way, share, model.around = (
            f"{way} with activations rounded as FP8 products round them",
            products.share,
            products,
        )
    errors, same = [torch.zeros(1)], [torch.zeros(0)]
    layers: list[list[torch.Tensor]] = [[] for _ in range(reference.layers)]
    off = size = 0.0
    for sample in samples:
        if sample.name not in traces:
            continue
        logits, trace = model.trace(sample.fed)
        end = first_difference(traces[sample.name], trace) if exact else len(logits)
        for (layer, stage), want in traces[sample.name].hidden.items():
            if stage == "out" and end:
                layers[layer].append(_errors(trace.hidden[layer, stage][:end].float(), want[:end], exact))
        compared = sample.wanted.positions < end
        rows = sample.wanted.rows[compared]
        error = logits[sample.wanted.positions[compared]] - rows
        off, size = off + float(error.double().square().sum()), size + float(rows.double().square().sum())
        errors.append(error.abs().amax(-1))
        same.append((logits.argmax(-1) == sample.wanted.top1).float())
    rel_rms = (off / size) ** 0.5 if size else 0.0
    found = [torch.cat(one) if one else torch.zeros(1) for one in layers]
    middle = [float(one.max() if exact else one.median()) for one in found]
    return Deviation(way, torch.cat(errors), rel_rms, float(torch.cat(same).mean()), middle, share)


def _errors(got: torch.Tensor, want: torch.Tensor, together: bool) -> torch.Tensor:
    """Relative errors of hidden states: of all tokens together, or of each."""
    if together:
        return ((got - want).norm() / want.norm())[None]
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)


def first_difference(one: Trace, other: Trace) -> int:
    """The first token of a sample for which two runs of the same code picked differently; its length if none."""
    end = min(len(hidden) for hidden in one.hidden.values())
    for layer, calls in one.selections.items():
        for mine, theirs in zip(calls, other.selections.get(layer, ()), strict=False):
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


def _measured_limits(
    reference: Reference, load_plan: LoadPlan, samples: list[Sample], traces: Mapping[str, Trace]
) -> tuple[Limits, list[float], list[str]]:
    """Limits of an engine that rounds: Transformers rounds as it does, and is measured. Also remarks."""
    build, rounded = load_plan.build, fp8_tensors(load_plan)
    fp8_rows = build.kv_dtype == FP8
    # The first that rounds: of activations, of rows, of states.
    kinds = (build.dtype, torch.float32 if fp8_rows else build.kv_dtype, build.state_dtype)
    kind = next((kind for kind in kinds if kind != torch.float32), torch.float32)
    other = _deviation(reference, torch.bfloat16 if fp8_rows else kind, samples, traces, rounded)
    limits, layer_limits = _rounded_limits(other, spread(samples), bool(rounded))
    if fp8_rows:
        # Where products round to FP8 as well, rows that do so are not that much coarser.
        coarser = FP8_MEDIAN if rounded else FP8_ROUNDING
        limits, layer_limits = with_fp8_rows(limits), [coarser * limit for limit in layer_limits]
    if other.share > 0.99:
        return limits, layer_limits, []
    text = f"{1 - other.share:.0%} of the weights that are kept in FP8 were not found in Transformers' model"
    return limits, layer_limits, [f"{text}: what rounding in their products costs is not allowed for"]


def _rounded_limits(other: Deviation, scale: float, fp8_products: bool) -> tuple[Limits, list[float]]:
    count, agree = max(1, len(other.errors) - 1), other.top1
    chance = _CHANCE * math.sqrt(2 * agree * (1 - agree) / count) if fp8_products else 0.0
    less, least = max(_TOP1, chance), 0.0 if fp8_products else _LEAST_TOP1
    times = _PRODUCTS if fp8_products else _ROUNDING
    limits = Limits(
        max_abs=math.inf,
        origin=f"{times:g} times the error of Transformers in {other.way}, its top-1 agreement less {less:.0%}",
        median_abs=times * float(other.errors[1:].median()) + PEAK[0] * scale,
        top1=max(least, agree - less),
    )
    return limits, [HIDDEN[0] + times * error for error in other.layers]
