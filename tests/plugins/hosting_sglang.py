"""One checkpoint inside SGLang, in processes of its own: what it answers, and that it was our model that ran.

As a script (`python hosting_sglang.py GIVEN OUT`) it starts SGLang's engine, asks it, and writes what it found. A child
of SGLang's that fails ends its parent, which therefore is no test's process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from forks import Forks, environment_with, kill_group

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
    # All ranks on one processor.
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * options.get("tp_size", 1))} | (environment or {})
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "found.json"
        if fork:
            ended = _forks().run(_CODE.format(given=given, out=str(out)), environment, limit)
            code, log = ended.returncode, ended.stdout + ended.stderr
        else:
            if before:
                (Path(name) / "sitecustomize.py").write_text(before)
            code, log = _run(given, out, environment_with(ENVIRONMENT | environment, name), limit)
        found = json.loads(out.read_text()) if out.exists() else {"answers": [], "updated": []}
    return Asked(log, code, [Answers(**one) for one in found["answers"]], found["updated"])


def _run(given: dict[str, Any], out: Path, environment: dict[str, str], limit: float) -> tuple[int, str]:
    command = [sys.executable, __file__, json.dumps(given), str(out)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        # SGLang's children may outlive a start that fails.
        kill_group(process.pid)
        code = process.wait()
        log.seek(0)
        return code, log.read()


_CODE = "import pathlib; from plugins import hosting_sglang; hosting_sglang._main({given!r}, pathlib.Path({out!r}))"


@functools.cache
def _forks() -> Forks:
    """SGLang's imports take most of a start, and an engine has three processes or more."""
    managers = "sglang.srt.managers.detokenizer_manager", "sglang.srt.managers.scheduler"
    modules = ["sglang.srt.entrypoints.engine", *managers, "plugins.hosting_sglang"]
    return Forks(modules, environment_with(ENVIRONMENT))


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


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
