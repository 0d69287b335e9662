"""One checkpoint inside SGLang, in processes of its own: what it answers, and that it was our model that ran.

As a script (`python hosting_sglang.py GIVEN OUT`) it starts SGLang's engine, asks it, and writes what it found. A child
of SGLang's that fails ends its parent, which therefore is no test's process.

Without arguments it imports SGLang once and forks for each engine that its input names: SGLang's imports take most of a
start, and an engine has three processes or more.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ATOL = 5e-4
PLAIN = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "context_length": 256,
    "max_total_tokens": 1664,
    "max_running_requests": 12,
    "max_mamba_cache_size": 64,
    "chunked_prefill_size": 64,
    "page_size": 16,
    # Requests are admitted although their answers may not fit, so that some are sent back.
    "schedule_conservativeness": 0.05,
    "random_seed": 0,
    "log_level": "info",
}


@dataclass(frozen=True)
class Round:
    """Prompts that are asked together, each with `count` tokens. SGLang reserves memory for whole answers where it is
    told to ignore end tokens. `embedded`: it gets the embeddings of the prompts' ids."""

    prompts: Sequence[Sequence[int]]
    count: int = 8
    ignore_eos: bool = True
    embedded: bool = False


@dataclass(frozen=True)
class Answers:
    """To one round. `ids`: chosen tokens. `logprobs`: of them. `cached`: prompt tokens that were reused. `retracted`:
    how often each request was sent back."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    retracted: list[int]


@dataclass(frozen=True)
class Asked:
    """What came of it. `log`: of all processes. `code`: exit status. `updated`: what SGLang said of each update of its
    weights."""

    log: str
    code: int
    answers: list[Answers] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)


def ask(
    path: Path,
    rounds: Sequence[Round],
    environment: dict[str, str] | None = None,
    before: str = "",
    limit: float = 400,
    updates: bool = False,
    fork: bool = False,
    **options: Any,
) -> Asked:
    """Start SGLang with a checkpoint and ask it round after round.

    `before`: code that every process of it runs first. `limit`: seconds until it is ended. `updates`: whether
    weights are updated before each round but the first, from the same checkpoint. `fork`: from a process that has
    imported SGLang, without `environment` and `before`. `options`: of SGLang's engine; None leaves one of `PLAIN` out.
    """
    assert not (fork and (environment or before))
    options = {key: value for key, value in (PLAIN | options).items() if value is not None}
    given = {"model_path": str(path), "options": options, "rounds": [vars(one) for one in rounds], "updates": updates}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if before:
            (folder / "sitecustomize.py").write_text(before)
        paths = os.pathsep.join([name, os.environ.get("PYTHONPATH", "")])
        # All ranks on one processor.
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * options.get("tp_size", 1))}
        env = ENVIRONMENT | binding | {"PYTHONPATH": paths} | (environment or {})
        code = _run_forked(given, folder, env, limit) if fork else _run(given, folder, env, limit)
        text = (folder / "log").read_text()
        out = folder / "found.json"
        found = json.loads(out.read_text()) if out.exists() else {"answers": [], "updated": []}
    return Asked(text, code, [Answers(**one) for one in found["answers"]], found["updated"])


def _run(given: dict[str, Any], folder: Path, env: dict[str, str], limit: float) -> int:
    command = [sys.executable, __file__, json.dumps(given), str(folder / "found.json")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | env, start_new_session=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit)
    # SGLang's children may outlive a start that fails.
    _kill_group(process.pid)
    return process.wait()


def _run_forked(given: dict[str, Any], folder: Path, env: dict[str, str], limit: float) -> int:
    server = _fork_server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([given, str(folder), env]) + "\n")
    server.stdin.flush()
    pid = int(server.stdout.readline())
    late = threading.Timer(limit, _kill_group, [pid])
    late.start()
    code = int(server.stdout.readline())
    late.cancel()
    _kill_group(pid)
    return code


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command, env = [sys.executable, __file__], os.environ | ENVIRONMENT
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True)
    atexit.register(server.kill)
    return server


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def assert_ours(asked: Asked) -> None:
    """Our model took SGLang's pools."""
    assert asked.code == 0 and asked.answers, asked.log[-4000:]
    assert "allotrope: caches in SGLang's pools" in asked.log, asked.log[-4000:]


def assert_equal(found: Answers, want: Answers) -> None:
    assert found.ids == want.ids
    for got, expected in zip(found.logprobs, want.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=ATOL, rtol=0.0)


def ours(path: Path, asked: Round, **options: Any) -> Answers:
    """What our own engine answers."""
    from allotrope import LLM, SamplingParams

    plain = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 26}
    llm = LLM(str(path), **(plain | options))
    try:
        wanted = SamplingParams(max_tokens=asked.count, temperature=0.0, ignore_eos=asked.ignore_eos, logprobs=0)
        found = [output.outputs[0] for output in llm.generate([list(one) for one in asked.prompts], wanted)]
    finally:
        llm.close()
    logprobs = [[step.logprob for step in one.logprobs or ()] for one in found]
    return Answers([list(one.token_ids) for one in found], logprobs, [], [])


def write(architecture: str, directory: Path) -> Path:
    """A tiny random checkpoint without an end token: answers are as long as they are asked for."""
    from allotrope.architectures.registry import find_architecture
    from allotrope.verify.random_checkpoint import write_random

    names = {"architectures": [architecture]}
    write_random(find_architecture(names, architecture).tiny() | names, directory, None, 0)
    (directory / "generation_config.json").unlink(missing_ok=True)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("eos_token_id", None)
    file.write_text(json.dumps(config))
    return directory


def _main(given: dict[str, Any], out: Path) -> None:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(model_path=given["model_path"], **given["options"])
    found, updated = [], []
    for one in given["rounds"]:
        if found and given["updates"]:
            updated.append(str(engine.update_weights_from_disk(given["model_path"])))
        wanted = {"temperature": 0, "max_new_tokens": one["count"], "ignore_eos": one["ignore_eos"]}
        outputs = _generate(engine, given["model_path"], one, {"sampling_params": wanted, "return_logprob": True})
        meta = [output["meta_info"] for output in outputs]
        found.append(
            {
                "ids": [output["output_ids"] for output in outputs],
                "logprobs": [[step[0] for step in one["output_token_logprobs"]] for one in meta],
                "cached": [one["cached_tokens"] for one in meta],
                "retracted": [one["num_retractions"] for one in meta],
            }
        )
    out.write_text(json.dumps({"answers": found, "updated": updated}))
    engine.shutdown()


def _generate(engine: Any, path: str, one: dict[str, Any], wanted: dict[str, Any]) -> list[dict[str, Any]]:
    if not one["embedded"]:
        outputs: list[dict[str, Any]] = engine.generate(input_ids=one["prompts"], **wanted)
        return outputs
    from safetensors import safe_open
    from sglang.srt.managers.io_struct import GenerateReqInput

    with safe_open(Path(path) / "model.safetensors", "pt") as tensors:
        table = tensors.get_tensor("model.embed_tokens.weight").float()
    embedded = [table[torch.tensor(prompt)].tolist() for prompt in one["prompts"]]

    async def ask_all() -> list[dict[str, Any]]:
        asked = GenerateReqInput(input_embeds=embedded, **wanted)
        found: list[dict[str, Any]] = await anext(engine.tokenizer_manager.generate_request(asked, None))
        return found

    return list(engine.loop.run_until_complete(ask_all()))


def _serve_forks() -> None:
    """For each line of the input, [given, folder, environment], a process; its number and then its exit status go to
    the output. Processes that SGLang starts there are forked too."""
    import multiprocessing

    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    # What else is printed goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # SGLang sets another method at each start.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    for line in sys.stdin:
        given, folder, environment = json.loads(line)
        pid = os.fork()
        if not pid:
            _run_in_fork(given, Path(folder), environment)
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


def _run_in_fork(given: dict[str, Any], folder: Path, environment: dict[str, str]) -> NoReturn:
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    code = 1
    try:
        _main(given, folder / "found.json")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:]:
        _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        _serve_forks()
