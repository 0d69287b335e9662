"""GGUF models on this CPU: Allotrope and llama.cpp on the same files and prompts.

    python bench/cpu/gguf_peers.py 1.5b 7b smollm2 --llama-python /path/to/venv/bin/python
    python bench/cpu/gguf_peers.py 1.5b --types Q4_0 --repetitions 3 --starts 1 --output 32
    python bench/cpu/gguf_peers.py /path/to/model.gguf --our-options '{"dtype": "bfloat16"}'

The Python of --llama-python has `llama-cpp-python`, which pip compiles for the machine. GCC 12 drops stores before
AMX instructions; there, CMAKE_ARGS='-DCMAKE_CXX_FLAGS="-fno-tree-dse -fno-dse"' keeps them. 1.5b
and 7b are random models (`random_gguf.py`), written into --folder once; smollm2 is fetched. Each engine has a process
of its own; they take turns, and those that wait are stopped. The first greedy tokens after some prompts must be equal
in most, else no speed is shown: both round, so that later tokens of random weights may part.

decode: tokens per second from when every prompt has its first one. prompt: prompt tokens per second until then.
start: seconds from starting the process to the first token. rss, peak: resident MB after all runs, and at the highest.
Ratios are ours over theirs for speeds, theirs over ours for seconds and memory: above 1 we are better.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import peers  # noqa: E402
import random_gguf  # noqa: E402

MEASURES = ("decode", "prompt")
PARITY_PROMPTS, PARITY_LENGTH = 12, 24
# Share of prompts whose first greedy tokens must agree.
PARITY_SHARE = 0.5


def model_file(name: str, options: argparse.Namespace) -> Path:
    """The file of a random shape or of SmolLM2, made if it is not there, or `name` itself."""
    if name in random_gguf.SHAPES:
        path: Path = options.folder / f"{name}-{options.types}.gguf"
        if not path.exists():
            options.folder.mkdir(parents=True, exist_ok=True)
            print(f"writing {path} ...", flush=True)
            random_gguf.write_model(random_gguf.SHAPES[name], options.types, path)
        return path
    if name == "smollm2":
        command = [sys.executable, str(HERE.parents[1] / "scripts" / "fetch_smollm2.py")]
        return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    return Path(name)


def vocabulary_of(path: Path) -> int:
    """The rows of the embeddings of `path`."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return next(int(tensor.shape[1]) for tensor in tensors if tensor.name == "token_embd.weight")


def check_parity(engines: list[peers.Peer], options: argparse.Namespace) -> None:
    """Ends the program if the engines' first greedy tokens differ after most prompts."""
    generator = random.Random(1)
    prompts = [
        [generator.randrange(8, options.vocabulary) for _ in range(PARITY_LENGTH)] for _ in range(PARITY_PROMPTS)
    ]
    found = {}
    for peer in engines:
        found[peer.name] = [peer.run([prompt], 1)["ids"][0][0] for prompt in prompts]
        peer.rest()
    for name, tokens in found.items():
        same = sum(mine == theirs for mine, theirs in zip(found[peers.OURS], tokens, strict=True))
        if name != peers.OURS:
            print(f"first greedy tokens as {name}'s: {same} of {PARITY_PROMPTS}", flush=True)
        if same < PARITY_SHARE * PARITY_PROMPTS:
            sys.exit(
                f"first tokens differ from those of {name} after {PARITY_PROMPTS - same} of {PARITY_PROMPTS} prompts"
            )


def measure(path: Path, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Label -> engine -> one number a repetition; engines take turns."""
    rows: dict[str, dict[str, list[float]]] = {
        f"{measure} B={count}": {name: [] for name in options.engines}
        for count in options.concurrency
        for measure in MEASURES
    }
    memory = {label: dict[str, list[float]]() for label in ("rss MB", "peak MB")}
    with ExitStack() as stack:
        engines = peers.open_peers(stack, options.engines, options.dtype, path, options)
        check_parity(engines, options)
        for turn in range(options.repetitions + 1):
            for count in options.concurrency:
                prompts = peers.random_prompts(1000 * turn + count, count, options)
                for peer in engines:
                    record = peer.run(prompts, options.output)
                    peer.rest()
                    memory["rss MB"][peer.name], memory["peak MB"][peer.name] = [record["rss_mb"]], [record["peak_mb"]]
                    # The first turn warms up.
                    if turn:
                        made = count * options.output - record["by_then"]
                        seconds = record["seconds"] - record["all_first_s"]
                        rows[f"decode B={count}"][peer.name].append(made / seconds)
                        rows[f"prompt B={count}"][peer.name].append(count * options.input / record["all_first_s"])
            print(f"turn {turn} of {options.repetitions}", flush=True)
    if options.starts:
        rows["start s"] = peers.starts(path, options)
    return rows | memory


def parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help=f"{', '.join(random_gguf.SHAPES)}, smollm2, or GGUF files")
    parser.add_argument("--llama-python", help="Python of an environment with llama-cpp-python; none: ours alone")
    parser.add_argument("--types", choices=random_gguf.TYPES, default="Q4_K_M", help="of the random models")
    parser.add_argument("--folder", type=Path, default=HERE.parents[1] / ".cache" / "bench", help="of random models")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="ours")
    parser.add_argument("--our-options", type=json.loads, default={}, help="JSON object of more options of the engine")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8], help="requests at once")
    parser.add_argument("--input", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens made of each")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="starts of each engine; 0: leave out")
    parser.add_argument("--threads", type=int, default=cores, help="CPU threads of each engine")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    parser.add_argument("--merge", action="store_true", help="keep what the results say of other models")
    parser.add_argument("--verbose", action="store_true", help="show what the engines say")
    options = parser.parse_args()
    options.vllm_python = None
    options.engines = [peers.OURS] + ["llama_cpp"] * (options.llama_python is not None)
    return options


def main() -> None:
    options = parse()
    left_out = ("llama_python", "folder", "results", "merge", "models")
    asked = {key: str(value) for key, value in vars(options).items() if key not in left_out}
    found: dict[str, Any] = {}
    for name in options.models:
        path = model_file(name, options)
        options.vocabulary = vocabulary_of(path)
        print(f"\n{path.name}: {path.stat().st_size / 1e6:.0f} MB", flush=True)
        rows = measure(path, options)
        print(f"\n{path.name}, {options.input} in / {options.output} out, {options.threads} threads")
        found[path.name] = {"options": asked, "rows": rows, "ratios": peers.table(rows, options.engines)}
    machine = {"processor": platform.processor(), "system": platform.platform(), "cores": os.cpu_count()}
    path = options.results / "cpu_gguf.json"
    before = json.loads(path.read_text())["models"] if options.merge and path.exists() else {}
    report = {"machine": machine, "models": before | found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
