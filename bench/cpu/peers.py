"""One model on this CPU: Allotrope, vLLM's CPU build and Transformers `generate`, on the same weights and prompts.

    python bench/cpu/peers.py MODEL --vllm-python /path/to/venv/bin/python --dtype bfloat16

MODEL is a Hugging Face directory, or a GGUF file, which is first written out as one (`--directory` keeps it). Greedy
tokens of all engines must be equal in fp32 first, else no speed is shown. Each engine has a process of its own; they
take turns, and those that wait are stopped. Prompts differ between requests and repetitions, prefix caches are off.

total: tokens in and out per second, over all. decode: tokens per second from when every prompt has its first one.
ttft: seconds to the first token of the last prompt. start: seconds from starting the process to the first token.
Ratios are ours over theirs for speeds, theirs over ours for seconds: above 1 we are better.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS = "allotrope"
MEASURES = ("total", "decode", "ttft")
PARITY_PROMPTS, PARITY_TOKENS = (5, 16, 33), 24
# vLLM in the caller's process is faster on few cores, and not what its users get; without compilation it starts sooner.
VARIANTS: dict[str, dict[str, Any]] = {
    "allotrope": {},
    "llama_cpp": {},
    "transformers": {},
    "vllm": {},
    "vllm-in-process": {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}},
    "vllm-eager": {"eager": True},
}


class Peer:
    """An engine's process, in a process group of its own, stopped while it is not asked."""

    def __init__(self, name: str, dtype: str, directory: Path, options: argparse.Namespace) -> None:
        self.name, self.dtype = name, dtype
        engine = name.partition("-")[0]
        threads = options.threads
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            # Its own models, even where our plugin is installed.
            "ALLOTROPE_VLLM": "0",
        }
        environment |= VARIANTS[name].get("environment", {})
        self.job = {
            "model": str(directory),
            "dtype": dtype,
            "threads": threads,
            "sequences": max(8, *options.concurrency),
            "length": options.input + options.output + 64,
            "eager": VARIANTS[name].get("eager", False),
            "options": options.our_options if engine == OURS else {},
        }
        others = {"vllm": options.vllm_python, "llama_cpp": options.llama_python}
        python = others.get(engine, sys.executable)
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [python, str(HERE / "peer_worker.py"), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def start(self, prompt: list[int]) -> float:
        """Load, and return the seconds from the start of the process to the first token after `prompt`."""
        self._ask({"load": self.job})
        self._ask({"run": {"prompts": [prompt], "tokens": 1}})
        return time.perf_counter() - self.began

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """The worker's record of one run."""
        self.resume()
        answer = self._ask({"run": {"prompts": prompts, "tokens": tokens}})
        wrong = [len(ids) for ids in answer["ids"] if len(ids) != tokens]
        if wrong:
            raise RuntimeError(f"{self.name} made {wrong[0]} tokens of {tokens} asked for")
        return answer

    def rest(self) -> None:
        """Stop the process group: an idle engine may spin or tidy up."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process group, if it has not ended by itself."""
        if self.process.poll() is not None:
            return
        self.resume()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}; --verbose shows what it says")
        answer: dict[str, Any] = json.loads(line)
        return answer


def open_peers(stack: ExitStack, names: Sequence[str], dtype: str, directory: Path, options: Any) -> list[Peer]:
    """Start the engines one after another; each rests once it has made a token. They end with `stack`."""
    peers = []
    for name in names:
        peer = Peer(name, dtype, directory, options)
        stack.callback(peer.close)
        seconds = peer.start(random_prompts(0, 1, options)[0])
        print(f"{name} ({dtype}): first token {seconds:.1f} s after its start", flush=True)
        peer.rest()
        peers.append(peer)
    return peers


def random_prompts(seed: int, count: int, options: argparse.Namespace) -> list[list[int]]:
    """Token ids, the same for every engine and different for every seed."""
    generator = random.Random(seed)
    return [[generator.randrange(8, options.vocabulary) for _ in range(options.input)] for _ in range(count)]


def parity(directory: Path, options: argparse.Namespace) -> list[str]:
    """Where greedy fp32 tokens differ between engines; empty if nowhere."""
    # Compilation is not in question here, and takes a minute.
    names = ["vllm-eager" if name.startswith("vllm") else name for name in options.engines]
    generator = random.Random(1)
    prompts = [[generator.randrange(8, options.vocabulary) for _ in range(n)] for n in PARITY_PROMPTS]
    with ExitStack() as stack:
        peers = open_peers(stack, list(dict.fromkeys(names)), "float32", directory, options)
        found = {}
        for peer in peers:
            found[peer.name] = [peer.run([prompt], PARITY_TOKENS)["ids"][0] for prompt in prompts]
            peer.rest()
    differences = []
    for name, lists in found.items():
        for i, (mine, theirs) in enumerate(zip(found[OURS], lists, strict=True)):
            at = next((t for t, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
            if at is not None:
                differences.append(f"prompt {i}, token {at}: {OURS} {mine[at]}, {name} {theirs[at]}")
    return differences


def starts(directory: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds from process start to first token, each engine alone, in turns."""
    found: dict[str, list[float]] = {name: [] for name in options.engines}
    for turn in range(options.starts):
        for name in options.engines:
            peer = Peer(name, options.dtype, directory, options)
            try:
                found[name].append(peer.start(random_prompts(turn, 1, options)[0]))
            finally:
                peer.close()
    return found


def speeds(directory: Path, options: argparse.Namespace) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Engine -> concurrent requests -> measure -> one number a repetition; engines take turns."""
    found: dict[str, dict[int, dict[str, list[float]]]] = {
        name: {count: {measure: [] for measure in MEASURES} for count in options.concurrency}
        for name in options.engines
    }
    with ExitStack() as stack:
        peers = open_peers(stack, options.engines, options.dtype, directory, options)
        for turn in range(options.repetitions + 1):
            for count in options.concurrency:
                prompts = random_prompts(1000 * turn + count, count, options)
                for peer in peers:
                    record = peer.run(prompts, options.output)
                    peer.rest()
                    # The first turn warms up.
                    if turn:
                        for measure, value in figures(record, count, options).items():
                            found[peer.name][count][measure].append(value)
            print(f"turn {turn} of {options.repetitions}", flush=True)
    return found


def figures(record: dict[str, Any], count: int, options: argparse.Namespace) -> dict[str, float]:
    """The measures of one run of `count` requests."""
    made = count * options.output
    return {
        "total": (count * options.input + made) / record["seconds"],
        "decode": (made - record["by_then"]) / (record["seconds"] - record["all_first_s"]),
        "ttft": record["all_first_s"],
    }


def table(rows: dict[str, dict[str, list[float]]], engines: Sequence[str]) -> dict[str, dict[str, float]]:
    """Print median and range of each row, and return the ratios. `rows`: label -> engine -> numbers."""
    print(f"{'':14}" + "".join(f"{name:>28}" for name in engines))
    found: dict[str, dict[str, float]] = {}
    for label, by_engine in rows.items():
        middle = {name: statistics.median(numbers) for name, numbers in by_engine.items()}
        less_is_better = label.startswith(("ttft", "start", "rss", "peak"))
        found[label] = {
            name: middle[name] / middle[OURS] if less_is_better else middle[OURS] / middle[name]
            for name in engines
            if name != OURS
        }
        cells = ""
        for name in engines:
            numbers = by_engine[name]
            ratio = f" x{found[label][name]:.2f}" if name != OURS else ""
            digits = 0 if middle[name] >= 100 else 2 if less_is_better else 1
            span = f"{min(numbers):.{digits}f}-{max(numbers):.{digits}f}"
            cells += f"{f'{middle[name]:.{digits}f} ({span}){ratio}':>28}"
        print(f"{label:14}{cells}")
    return found


def hugging_face_directory(model: Path, into: Path) -> Path:
    """`model` itself if it is a directory, else the GGUF file written out as one, in fp32, by Transformers."""
    if model.is_dir():
        return model
    if not (into / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        loaded = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
        # What was quantized in the file no longer is, but the loaded object may not be saved. The other two are the
        # file's remarks, of no meaning to a model.
        for key in ("quantization_config", "_model_name_or_path", "unk_token_id"):
            if hasattr(loaded.config, key):
                delattr(loaded.config, key)
        plain = type(loaded)(loaded.config)
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(into)
        AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(into)
    return into


def parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="Hugging Face directory or GGUF file")
    parser.add_argument("--directory", type=Path, help="where a GGUF file is written out; kept, and used if there")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM's CPU build; none: vLLM is left out")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[name for name in VARIANTS if name != "llama_cpp"],
        default=["allotrope", "vllm", "transformers"],
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8], help="requests at once")
    parser.add_argument("--input", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens made of each")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="starts of each engine; 0: leave out")
    parser.add_argument("--threads", type=int, default=cores, help="CPU threads of each engine")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    parser.add_argument("--verbose", action="store_true", help="show what the engines say")
    options = parser.parse_args()
    if OURS not in options.engines:
        parser.error(f"--engines must name {OURS}: the others are compared with it")
    options.llama_python, options.our_options = None, {}
    if options.vllm_python is None:
        options.engines = [name for name in options.engines if not name.startswith("vllm")]
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        directory = hugging_face_directory(options.model, options.directory or Path(scratch))
        config = json.loads((directory / "config.json").read_text())
        options.vocabulary = config["vocab_size"]
        differences = parity(directory, options)
        if differences:
            sys.exit("greedy fp32 tokens differ, so speeds mean nothing:\n  " + "\n  ".join(differences))
        print(f"greedy fp32 tokens are equal over {len(PARITY_PROMPTS)} prompts of {PARITY_TOKENS} tokens", flush=True)
        begun = starts(directory, options)
        measured = speeds(directory, options)
    rows = {
        f"{measure} B={count}": {name: measured[name][count][measure] for name in options.engines}
        for count in options.concurrency
        for measure in MEASURES
    }
    if options.starts:
        rows["start s"] = begun
    print(
        f"\n{options.model.name}, {options.dtype}, {options.input} in / {options.output} out, {options.threads} threads"
    )
    ratios = table(rows, options.engines)
    path = options.results / f"cpu_peers_{options.dtype}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Where things lie on this machine is nobody's concern.
    asked = {name: Path(str(value)).name for name, value in vars(options).items()}
    machine = {"processor": platform.processor(), "system": platform.platform(), "cores": os.cpu_count()}
    path.write_text(json.dumps({"options": asked, "machine": machine, "rows": rows, "ratios": ratios}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
