"""Carries out a verification: stored outputs or Transformers say what is right, and every mode is held to it."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.checkpoint.checkpoint import locate, open_checkpoint, override_config
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.engine.planning.planned_backends import planned_backends
from allotrope.engine.ranks.worker_process import keep_worker_processes
from allotrope.errors import AllotropeError, ConfigError, ModelError
from allotrope.loading.kv_scales import FP8
from allotrope.verify import execution_modes as modes
from allotrope.verify.execution_modes import Bench, ExecutionMode, NotExercised
from allotrope.verify.expected_outputs import ExpectedOutputs, ask_transformers
from allotrope.verify.layers import UNSEEN_TIE, LayerRecorder, LayerReport, read_layers
from allotrope.verify.logits_recorder import LogitsRecorder
from allotrope.verify.options import VerifyOptions
from allotrope.verify.report import ModeResult, Report, Verdict
from allotrope.verify.rounded_products import fp8_words, keeps_blocks, keeps_fp8
from allotrope.verify.sample import Sample
from allotrope.verify.stored import MANIFEST, Stored, has_stored, read_stored
from allotrope.verify.tolerance import Limits, Score, as_measured, measured, score_samples, with_fp8_rows

Log = Callable[[str], None]
ALL_BEHIND_TIES = "every position is behind a near-tie of a router, so that none could be compared"


def verify(config: EngineConfig, options: VerifyOptions, log: Log = lambda text: None) -> Report:
    """Verify `config.model`. `tell`: is told what is being done.

    Raises ConfigError or ModelError if nothing can be compared.
    """
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"bad options: data_parallel_size={config.data_parallel_size}; layers are looked into on one rank, which "
            f"has only some of the requests. Leave it out."
        )
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"bad options: pipeline_parallel_size={config.pipeline_parallel_size}; layers are looked into on one rank, "
            f"which has only some of them. Leave it out."
        )
    with ExitStack() as stack:
        # Many engines, one after the other: only the first starts processes for its ranks.
        stack.enter_context(keep_worker_processes())
        remarks: list[str] = []
        named = config.model
        if options.random:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            log("drawing random weights")
            remarks += _write_random(config, options, scratch)
            config = dataclasses.replace(config, model=str(scratch), hf_overrides=None, revision=None)
        elif config.load_format == "dummy":
            raise ConfigError("bad options: load_format='dummy' leaves nothing to compare with; give --random instead.")
        if config.dtype == "auto":
            config = dataclasses.replace(config, dtype="float32")
        load_plan = resolve_load_plan(config)
        stored = _stored(config, options)
        if stored is not None and keeps_fp8(load_plan):
            remarks.append(_set_aside(stored, options))
        elif stored is not None:
            return _against_stored(config, options, load_plan, stored, log)
        blocks = keeps_blocks(load_plan) and config.quantization is None
        if blocks and config.quantized_activations == "auto":
            exact, rounding = (dataclasses.replace(config, quantized_activations=one) for one in ("keep", "int8"))
            run = _against_transformers(exact, options, resolve_load_plan(exact), log, rounding=rounding)
        else:
            run = _against_transformers(config, options, load_plan, log)
        return dataclasses.replace(run, model=named, remarks=(*remarks, *run.remarks))


def _write_random(config: EngineConfig, options: VerifyOptions, scratch: Path) -> list[str]:
    from allotrope.verify.random_checkpoint import write_random

    if config.model in ARCHITECTURES and not Path(config.model).exists():
        wanted = find_architecture({"architectures": [config.model]}, config.model).tiny()
        if config.hf_overrides is not None:
            wanted = override_config(wanted, config.hf_overrides)
    else:
        wanted = open_checkpoint(
            config.model, revision=config.revision, load_format="dummy", hf_overrides=config.hf_overrides
        ).config
    return write_random(wanted, scratch, options.layers, config.seed)


def _stored(config: EngineConfig, options: VerifyOptions) -> Stored | None:
    """The outputs stored beside the model, if they are to be used."""
    if options.random or options.against == "transformers" or options.reference is not None:
        return None
    path = locate(config.model, revision=config.revision)
    if path.is_dir() and has_stored(path):
        return read_stored(path)
    if options.against == "stored":
        raise ModelError(f"nothing is stored in {path}", ["expected.safetensors and manifest.json are needed"])
    return None


def _set_aside(stored: Stored, options: VerifyOptions) -> str:
    """Why stored outputs do not judge products that round to FP8. Raises ModelError if nothing else may."""
    reason = f"{MANIFEST} does not say how far off FP8 products may be"
    if options.against == "stored":
        advice = "Try --quantized-weights dequantize, or --against transformers"
        raise ModelError(f"cannot judge by the outputs stored in {stored.directory}", [f"{reason}. {advice}"])
    return f"the outputs stored in {stored.directory} are not used: {reason}; --quantized-weights dequantize uses them"


def is_exact(load_plan: LoadPlan) -> bool:
    """Whether the engine computes and stores in fp32, and rounds no activations for its products."""
    build = load_plan.build
    return {build.dtype, build.kv_dtype, build.state_dtype} == {torch.float32} and not keeps_fp8(load_plan)


def _modes(options: VerifyOptions, load_plan: LoadPlan) -> list[str]:
    """The modes to run; a CPU has no graphs, which only whoever asks for them by name is told."""
    names = options.named_modes()
    if options.modes is None and load_plan.build.device.type != "cuda":
        names.remove("graphs")
    return names


def _against_stored(
    config: EngineConfig, options: VerifyOptions, load_plan: LoadPlan, stored: Stored, log: Log
) -> Report:
    bench = Bench(config, stored.samples, options.thorough)
    limits = stored.limits(exact=is_exact(load_plan))
    if load_plan.build.kv_dtype == FP8:
        limits = with_fp8_rows(limits)
    results = [
        _run(bench, modes.ALL[name], LogitsRecorder(bench.samples), limits, {}, log)
        for name in _modes(options, load_plan)
    ]
    remarks = []
    if any(result.verdict == "wrong" for result in results):
        changed = stored.changed_files()
        if changed:
            remarks.append(f"{', '.join(changed)} changed since the outputs were stored (another SHA-256)")
        if stored.closest_pick < UNSEEN_TIE:
            remarks.append(f"some expert or row was picked by a gap of {stored.closest_pick:.1e}: it may be a near-tie")
        remarks.append("--against transformers would say which layer is the first that diverges")
    layers = None
    if options.plot is not None:
        layers = _against_transformers(config, dataclasses.replace(options, modes="whole"), load_plan, log).layers
    origin = f"outputs stored in {stored.directory}, made by {stored.manifest.get('reference_class', 'the reference')}"
    return _report(config, load_plan, bench, limits, results, origin, remarks, layers)


def _against_transformers(
    config: EngineConfig, options: VerifyOptions, load_plan: LoadPlan, log: Log, *, rounding: EngineConfig | None = None
) -> Report:
    """`rounding`: of an engine that rounds activations to int8 where it multiplies blocks; its error is measured."""
    expected = ask_transformers(config, options, load_plan, exact=is_exact(load_plan), log=log)
    bench = Bench(config, expected.samples, options.thorough)
    if config.quantization is not None:
        return _with_error(config, config.quantization, options, load_plan, expected, bench, log)
    log("comparing layer by layer")
    layers = _layers(bench, modes.ALL["whole"], expected, load_plan)
    # Medians are of all positions, as those that they are held to.
    tainted = layers.tainted if expected.limits.exact else {}
    results: list[ModeResult] = []
    for name in _modes(options, load_plan):
        mode = modes.ALL[name]
        recorder = LogitsRecorder(bench.samples)
        result = _run(bench, mode, recorder, expected.limits, tainted, log)
        if result.verdict == "wrong" and expected.limits.exact and result.score is not None and name != "whole":
            result = _explained(bench, mode, expected, load_plan, result, recorder)
        results.append(result)
    report = _report(config, load_plan, bench, expected.limits, results, expected.origin, expected.remarks, layers)
    if rounding is not None:
        report = _with_rounding(report, rounding, "activations in int8", expected, options, log)
    return dataclasses.replace(report, boundaries=expected.marks)


def _with_rounding(
    report: Report, config: EngineConfig, what: str, expected: ExpectedOutputs, options: VerifyOptions, log: Log
) -> Report:
    """`report` with the error of another engine in steps of few tokens, where activations are rounded; with a mode of
    that name where it is broken."""
    bench = Bench(config, expected.samples, options.thorough)
    result = _run(bench, modes.ALL["chunked-3"], LogitsRecorder(bench.samples), measured(what), {}, log)
    text = result.remark if result.score is None else _error_text(what, result.score)
    broken = (dataclasses.replace(result, name=what),) if result.verdict == "wrong" else ()
    return dataclasses.replace(report, remarks=(*report.remarks, text), modes=(*report.modes, *broken))


def _error_text(what: str, score: Score) -> str:
    return (
        f"{what} put logits off by a relative RMS of {score.rel_rms:.2%}; {score.top1:.1%} of top-1 tokens and the "
        f"greedy tokens of {score.greedy_same} of {score.greedy_total} prompts agree"
    )


def _with_error(
    config: EngineConfig,
    quantization: str,
    options: VerifyOptions,
    load_plan: LoadPlan,
    expected: ExpectedOutputs,
    bench: Bench[Sample],
    log: Log,
) -> Report:
    """The error of weights that are quantized on load, from whole prompts; other modes may not have a larger one."""
    limits = measured(f"--quantization {quantization}")
    results, remarks = [], list(expected.remarks)
    for name in dict.fromkeys(["whole", *_modes(options, load_plan)]):
        result = _run(bench, modes.ALL[name], LogitsRecorder(bench.samples), limits, {}, log)
        results.append(result)
        score = result.score
        if name == "whole" and score is not None:
            limits = as_measured(score)
            remarks.append(_error_text(f"{quantization} weights", score))
    report = _report(config, load_plan, bench, limits, results, expected.origin, remarks, None)
    return dataclasses.replace(report, boundaries=expected.marks)


def _layers(bench: Bench[Sample], mode: ExecutionMode, expected: ExpectedOutputs, load_plan: LoadPlan) -> LayerReport:
    """Run a mode on the traced samples, looking into every layer."""
    with LayerRecorder(bench.samples, expected.traces) as recorder:
        traced = dataclasses.replace(bench, samples=list(recorder.samples.values()), attach=recorder.attach)
        mode.run(traced, recorder)
        families = [spec.family for spec in load_plan.specs]
        return read_layers(recorder, families, expected.layer_limits, medians=not expected.limits.exact)


def _explained(
    bench: Bench[Sample],
    mode: ExecutionMode,
    expected: ExpectedOutputs,
    load_plan: LoadPlan,
    wrong: ModeResult,
    seen: LogitsRecorder,
) -> ModeResult:
    """A mode that went wrong, looked into by running it again: a near-tie that fell another way in it, or the layer
    that diverges. `seen`: what was wrong in the first run; nothing else is judged."""
    with LayerRecorder(bench.samples, expected.traces) as recorder:
        traced = dataclasses.replace(bench, attach=recorder.attach)
        # Nothing is captured while layers are looked into.
        with suppress(NotExercised):
            mode.run(traced, recorder)
        layers = read_layers(recorder, [spec.family for spec in load_plan.specs], expected.layer_limits)
    if len(recorder.samples) < len(bench.samples):
        return dataclasses.replace(wrong, layer=layers.finding())
    score = score_samples(bench.samples, seen, expected.limits, layers.tainted)
    verdict, remark = _verdict_on(score, wrong.remark)
    layer = layers.finding() if verdict == "wrong" else wrong.layer
    return dataclasses.replace(wrong, verdict=verdict, score=score, remark=remark, layer=layer)


def _run(
    bench: Bench[Sample],
    mode: ExecutionMode,
    recorder: LogitsRecorder,
    limits: Limits,
    tainted: dict[str, int],
    log: Log,
) -> ModeResult:
    log(f"running: {mode.name}")
    started = time.monotonic()
    try:
        remark = mode.run(bench, recorder)
    except NotExercised as reason:
        return ModeResult(mode.name, mode.text, "not exercised", None, str(reason), time.monotonic() - started)
    except AllotropeError:
        raise
    except Exception as error:
        # The border of one mode: that the engine breaks in it is a finding, and the others are still to be run.
        text = f"the engine broke: {type(error).__name__}: {error}"
        return ModeResult(mode.name, mode.text, "wrong", None, text, time.monotonic() - started)
    score = score_samples(bench.samples, recorder, limits, tainted)
    verdict, remark = _verdict_on(score, remark)
    return ModeResult(mode.name, mode.text, verdict, score, remark, time.monotonic() - started)


def _verdict_on(score: Score, remark: str) -> tuple[Verdict, str]:
    """The verdict on a mode that ran, and what to remark."""
    if score.faults:
        return "wrong", remark
    return ("pass", remark) if score.positions else ("not exercised", ALL_BEHIND_TIES)


def _report(
    config: EngineConfig,
    load_plan: LoadPlan,
    bench: Bench[Sample],
    limits: Limits,
    results: Sequence[ModeResult],
    origin: str,
    remarks: Sequence[str],
    layers: LayerReport | None,
) -> Report:
    if all(result.verdict == "not exercised" for result in results):
        raise ConfigError("nothing was compared: " + "; ".join(f"{one.name}: {one.remark}" for one in results) + ".")
    ranks = f", {config.layout.size} ranks" if config.layout.size > 1 else ""
    found, unused = planned_backends(load_plan)
    asked = [option for option in (config.attention_backend, config.op_backend) if option]
    backends = f", {', '.join(asked)}" if asked else ""
    kept = fp8_words(load_plan)
    build = load_plan.build
    dtype, kv_dtype, state_dtype = (
        str(kind).removeprefix("torch.") for kind in (build.dtype, build.kv_dtype, build.state_dtype)
    )
    states = f" and {state_dtype} states" if build.state_dtype != torch.float32 else ""
    return Report(
        model=config.model,
        architecture=next(iter(load_plan.checkpoint.config.get("architectures") or ["?"])),
        engine=f"{dtype} with {kv_dtype} caches{states} on {build.device}{ranks}{backends}{kept}",
        origin=origin,
        limits=limits,
        lengths=tuple(len(sample.prompt) for sample in bench.samples),
        new_tokens=max(len(sample.forced) for sample in bench.samples),
        modes=tuple(results),
        layers=layers,
        remarks=(*remarks, *unused),
        backends=tuple(map(str, found)),
    )
