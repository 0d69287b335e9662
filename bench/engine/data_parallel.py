"""vLLM's data-parallel ranks offline: each is a process of its own, and together they answer as one worker.

Owns which rank gets which prompts, and how the answers of the ranks become one. Must not know what is measured.
Source: vLLM's examples/features/data_parallel/data_parallel_offline.py. A rank takes its GPUs from those that are
visible to all, by its number, so that nothing is hidden from it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from bench.engine.worker_process import EngineFailed, Worker

Answer = dict[str, Any]
# Of an answer, what has one entry for each prompt.
BY_PROMPT = ("ids", "logprobs")


class DataParallelWorker:
    """Does what a `Worker` does. `start`: the process of a rank, which has these environment variables beside others.

    Prompts are dealt in turn. All ranks take part in every command: the others would wait for a rank without prompts.
    """

    def __init__(self, start: Callable[[Mapping[str, str]], Worker], size: int) -> None:
        self._ranks = [start(environment) for environment in rank_environments(size)]
        self.began = self._ranks[0].began

    @property
    def late(self) -> str:
        return next((rank.late for rank in self._ranks if rank.late), "")

    def started(self) -> None:
        for rank in self._ranks:
            rank.started()

    def ask(self, **command: Any) -> Answer:
        """The answer to a command. Raises EngineFailed as soon as a rank fails: no rank is left then."""
        if "memory" in command:
            # Of the first device.
            return self._ranks[0].ask(**command)
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            pending = [pool.submit(self._ask, number, command) for number in range(len(self._ranks))]
            try:
                for one in as_completed(pending):
                    one.result()
            except BaseException:
                # The other ranks wait for one that failed, and the pool for them.
                for rank in self._ranks:
                    rank.kill()
                raise
        return joined([one.result() for one in pending], command)

    def run(self, prompts: list[list[int]], tokens: int) -> Answer:
        return self.ask(run={"prompts": prompts, "tokens": tokens})

    def close(self) -> None:
        """End all processes. They may wait for each other at their end as well."""
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            list(pool.map(Worker.close, self._ranks))

    def _ask(self, number: int, command: Mapping[str, Any]) -> Answer:
        try:
            return self._ranks[number].ask(**dealt(command, number, len(self._ranks)))
        except EngineFailed as error:
            # A rank that was killed late makes others fail.
            raise EngineFailed(self.late or f"data-parallel rank {number}: {error}") from None


def rank_environments(size: int) -> list[dict[str, str]]:
    """What tells vLLM which rank a process is, and where the ranks meet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"SIZE": size, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
    ranks = [shared | {"RANK": number, "RANK_LOCAL": number} for number in range(size)]
    return [{f"VLLM_DP_{name}": str(value) for name, value in rank.items()} for rank in ranks]


def dealt(command: Mapping[str, Any], number: int, size: int) -> dict[str, Any]:
    """What rank `number` of `size` is told. A rank without prompts gets a placeholder of one token."""
    ((kind, given),) = command.items()
    if kind == "load":
        # Its class refuses ranks in one process.
        own = {name: value for name, value in given["options"].items() if name != "data_parallel_size"}
        return {kind: given | {"options": own}}
    if "prompts" in given:
        prompts = given["prompts"]
        return {kind: given | {"prompts": prompts[number::size] or [prompts[0][-1:]]}}
    return dict(command)


def joined(answers: Sequence[Answer], command: Mapping[str, Any]) -> Answer:
    """One answer: what belongs to prompts in their order, tokens of context that fit and drafts summed, and the seconds
    from when the last rank began to when the last one ended."""
    ((_, given),) = command.items()
    found, size = dict(answers[0]), len(answers)
    for key in found.keys() & BY_PROMPT:
        found[key] = [answers[index % size][key][index // size] for index in range(len(given["prompts"]))]
    if found.get("kv_tokens") is not None:
        found["kv_tokens"] = sum(answer["kv_tokens"] for answer in answers)
    if found.get("drafts") is not None:
        found["drafts"] = {key: sum(answer["drafts"][key] for answer in answers) for key in found["drafts"]}
    if "seconds" in found:
        found["began"] = max(answer["began"] for answer in answers)
        found["seconds"] = max(answer["began"] + answer["seconds"] for answer in answers) - found["began"]
    return found
