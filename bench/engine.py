"""Offline speed of engines side by side: the same safetensors, prompts and GPUs, one model after another.

    python bench/random_weights.py bench/configs/gpt_oss_120b /tmp/gpt_oss --layers 12
    python bench/engine.py /tmp/gpt_oss --peers vllm vllm+allotrope --peer-python python3 --peer-path SITE
    python bench/engine.py /tmp/gpt_oss --peers vllm sglang --peer-path vllm=SITE sglang=OTHER_SITE
    python bench/engine.py /tmp/gpt_oss --engines sglang sglang+allotrope --peer-path sglang=OTHER_SITE
    python bench/engine.py /tmp/gpt_oss --tensor-parallel-size 1 2
    python bench/engine.py /tmp/gpt_oss --layouts TP2 TP2+EP DP2 DP2+EP
    python bench/engine.py /tmp/gpt_oss --roofline
    python bench/engine.py /tmp/qwen3_next --peers vllm --speculate 1 3 --accept 1.8 2.8

Each engine has a process of its own, ours first; the GPUs are free again before the next one, unless `--interleave`
loads all at once. Columns that differ in the acceptance that is forced share one, one after the other: no engine is
compiled for it. `vllm+allotrope` and `sglang+allotrope` are the peer's vLLM and SGLang with this checkout's plugin.
With several numbers of ranks, or several --layouts, each engine is measured in each of them: "vllm TP2" is vLLM with
two tensor-parallel ranks, "vllm DP2 EP" with two data-parallel ones that have whole experts. start: seconds from
starting the process to the first token after a prompt of 8. prefill: seconds until all prompts of a batch have one
token. TPOT: (seconds for all tokens - prefill) / (tokens - 1). Prompts are random and never come twice.

How many of the requests' tokens differ in a step is told beside TPOT: equal tokens choose the same experts, and then
fewer weights are read.

Greedy tokens and logprobs are compared first, and only reported: random weights in bf16 or FP8 part at near-ties.
Logprobs are those of the best ids at each step of decoding a text that is forced, so that all engines see the same one;
SGLang's are those of the prefill of that text.

--speculate measures each engine once more for each number of draft tokens, beside itself without them. --accept forces
how many tokens a step yields in the mean: random weights accept hardly a draft, and so all engines accept as many. The
drafts come from the checkpoint's own multi-token-prediction layer (bench/random_weights.py --mtp), or from the EAGLE3
head in --draft-model. Tokens of forced acceptance mean nothing: they are not compared.

--roofline times nothing side by side: it profiles a decode step and a prefill step of ours, and holds each class of
kernels against what it must at least move and compute at the chip's ceilings.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The script's own folder would hide packages named as its folders are, such as `kernels`.
    sys.path[0] = str(ROOT)

from bench.engine.measuring import (  # noqa: E402
    PARITY_TOKENS,
    measure_engines,
    processes,
    random_prompts,
    vocabulary_of,
)
from bench.engine.options import command_line, engine_options, parse, speculations  # noqa: E402
from bench.engine.report import Column, Report, merged, write_json, write_report  # noqa: E402
from bench.engine.roofline_report import write_roofline  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given, (__doc__ or "").partition("\n")[0])
    if options.roofline:
        return run_roofline(options.models[0].resolve(), options, command_line(given))
    report: Report = {
        "commands": [command_line(given)],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "settings": {
            "runs": options.runs,
            "seed": options.seed,
            "prefix_caching": options.prefix_caching,
            "parity_tokens": PARITY_TOKENS,
        },
        "models": {directory.name: describe(directory) | {"engines": {}} for directory in options.models},
    }
    for directory in options.models:
        head = options.draft_model
        method = "mtp" if head is None else "eagle3"
        measured = speculations(method, options.speculate, options.accept, only=options.drafts_only)
        for layout, speculation, engine in itertools.product(options.layouts, measured, options.engines):
            column = Column(engine, layout, speculation)
            shown = engine_options(column, options, None if head is None else head.name)
            found: Report = {"engine": engine, "ranks": layout.size, "options": shown}
            found |= {"environment": {}, "kv_tokens": None, "start_s": [], "parity_ids": [], "forced": []}
            found |= {"cases": {}, "memory": {}, "error": "not run yet"}
            report["models"][directory.name]["engines"][str(column)] = found
    reports = [json.loads(file.read_text()) for file in options.merge] + [report] * bool(options.models)

    def joined() -> Report:
        return functools.reduce(merged, reports)

    try:
        joined()
    except ValueError as error:
        sys.exit(f"--merge: {error}")
    for directory in options.models:
        engines = report["models"][directory.name]["engines"]
        whole = processes(engines)
        for together in [whole] if options.interleave else [[names] for names in whole]:
            measure_engines(together, directory.resolve(), options, engines, lambda: write_json(options.out, joined()))
    for path in write_report(options.out, joined()):
        print(f"wrote {path}")
    columns = [found for model in report["models"].values() for found in model["engines"].values()]
    return int(any(found["error"] for found in columns))


def run_roofline(directory: Path, options: argparse.Namespace, command: str) -> int:
    """Measure, print and write. Returns the command's exit status."""
    import torch

    if not torch.cuda.is_available():
        print("there is no GPU to measure a roofline on", file=sys.stderr)
        return 2
    from bench.engine import roofline

    def prompts(what: str, count: int, length: int) -> list[list[int]]:
        return random_prompts(f"{options.seed} {what}", count, length, vocabulary_of(directory))

    sizes = {key: getattr(options, key) for key in ("requests", "context", "prefill", "runs")}
    report: Report = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "model": directory.name,
        "described": describe(directory)["described"],
        "settings": sizes | {"seed": options.seed, "options": options.our_options},
        **roofline.measure(str(directory), roofline.Sizes(**sizes), prompts, options.our_options),
    }
    paths = write_roofline(options.out, report)
    print(paths[-1].read_text())
    for path in paths:
        print(f"wrote {path}")
    return 0


def describe(directory: Path) -> Report:
    """What the checkpoint is: a line for people, and a digest of its config and of its files' names and sizes."""
    text = (directory / "config.json").read_text()
    files = sorted((file.name, file.stat().st_size) for file in directory.glob("*.safetensors"))
    config = json.loads(text)
    inner, size = config.get("text_config", config), sum(size for _, size in files)
    method = (config.get("quantization_config") or {}).get("quant_method", "not quantized")
    architecture = (config.get("architectures") or ["?"])[0]
    return {
        "digest": hashlib.sha256((text + json.dumps(files)).encode()).hexdigest()[:16],
        "described": f"{architecture}, {inner.get('num_hidden_layers')} layers, {method}, {size / 1e9:.1f} GB.",
    }


if __name__ == "__main__":
    sys.exit(main())
