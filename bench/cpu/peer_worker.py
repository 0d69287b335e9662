"""One engine in a process of its own, which tells when its tokens came; told what to do by lines of JSON on stdin.

Runs in the Python of the engine that it stands for: at the top it may import nothing but the standard library.

    {"load": {"model": ..., "dtype": ..., "threads": n, "sequences": n, "length": n, "eager": bool}}  ->  {memory}
    {"run": {"prompts": [[ids], ...], "tokens": n}}  ->  {"ids": [[...], ...], the numbers of `Record.answer`, memory}

Memory is that of this process: `rss_mb` now, `peak_mb` at its highest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
# Tokens of one step at most, prompts of several requests together, as ours takes on a CPU.
BATCH_TOKENS = 2048


class Record:
    """Tokens of each prompt as they come, and when."""

    def __init__(self, prompts: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(prompts)]
        self.begin = time.perf_counter()
        self.first: float | None = None
        self.all_first: float | None = None
        self.by_then = 0

    def take(self, place: int, ids: list[int]) -> None:
        """Prompt `place` has gained `ids`."""
        self.ids[place].extend(ids)

    def step(self) -> None:
        """An engine's step is over."""
        now = time.perf_counter() - self.begin
        if self.first is None and any(self.ids):
            self.first = now
        if self.all_first is None and all(self.ids):
            self.all_first, self.by_then = now, sum(map(len, self.ids))

    def answer(self) -> dict[str, Any]:
        """Seconds to the first token, to the first of every prompt (with the tokens made by then), and to the last."""
        return {
            "ids": self.ids,
            "first_s": self.first,
            "all_first_s": self.all_first,
            "by_then": self.by_then,
            "seconds": time.perf_counter() - self.begin,
        }


Generate = Callable[[Prompts, int, Record], None]
"""Continues each prompt by that many greedy tokens, past any end token."""


def load_allotrope(job: dict[str, Any]) -> Generate:
    from allotrope import LLM, SamplingParams
    from allotrope.request import Request

    engine = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["length"],
        max_num_seqs=job["sequences"],
        enable_prefix_caching=False,
        threads=job["threads"],
        **job["options"],
    ).engine

    def generate(prompts: Prompts, tokens: int, record: Record) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for place, prompt in enumerate(prompts):
            engine.add(Request(request_id=str(place), prompt_ids=tuple(prompt), params=params))
        while engine.has_work():
            for output in engine.step():
                record.take(int(output.request_id), list(output.token_ids))
            record.step()

    return generate


def load_vllm(job: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    engine = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["length"],
        max_num_seqs=job["sequences"],
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=job["eager"],
    ).llm_engine

    def generate(prompts: Prompts, tokens: int, record: Record) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for place, prompt in enumerate(prompts):
            engine.add_request(str(place), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                place, ids = int(output.request_id), list(output.outputs[0].token_ids)
                record.take(place, ids[len(record.ids[place]) :])
            record.step()

    return generate


def load_transformers(job: dict[str, Any]) -> Generate:
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()

    def generate(prompts: Prompts, tokens: int, record: Record) -> None:
        def note(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            """A stopping criterion that never stops: it is called after every step."""
            for place, ids in enumerate(input_ids[:, -1:].tolist()):
                record.take(place, ids)
            record.step()
            return torch.zeros(len(input_ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), stopping_criteria=[note], **options)

    return generate


def load_llama_cpp(job: dict[str, Any]) -> Generate:
    """llama.cpp through its C interface, which takes several sequences at once."""
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]
    import numpy as np

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(job["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {job['model']}")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = job["sequences"] * job["length"]
    settings.n_seq_max = job["sequences"]
    settings.n_batch = BATCH_TOKENS
    settings.n_threads = settings.n_threads_batch = job["threads"]
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def step(entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (sequence, position, id, whether logits are wanted), and return sequence -> greedy token."""
        for i, (sequence, position, token, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = len(entries)
        code = llama_cpp.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        found = {}
        for i, (sequence, _, _, wanted) in enumerate(entries):
            if wanted:
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), shape=(vocabulary,))
                found[sequence] = int(logits.argmax())
        return found

    def generate(prompts: Prompts, tokens: int, record: Record) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        waiting = [
            (place, position, token, position == len(prompt) - 1)
            for place, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        latest: dict[int, int] = {}
        for begin in range(0, len(waiting), BATCH_TOKENS):
            found = step(waiting[begin : begin + BATCH_TOKENS])
            latest |= found
            for place, token in found.items():
                record.take(place, [token])
            record.step()
        for made in range(tokens - 1):
            latest = step([(place, len(prompts[place]) + made, token, True) for place, token in latest.items()])
            for place, token in latest.items():
                record.take(place, [token])
            record.step()

    return generate


LOADERS = {
    "allotrope": load_allotrope,
    "llama_cpp": load_llama_cpp,
    "transformers": load_transformers,
    "vllm": load_vllm,
}


def memory() -> dict[str, float]:
    """Resident megabytes of this process: now, and at its highest."""
    with Path("/proc/self/status").open() as status:
        entries = dict(line.split(":", 1) for line in status)
    return {
        name: int(entries[key].split()[0]) / 1000 * 1.024 for name, key in (("rss_mb", "VmRSS"), ("peak_mb", "VmHWM"))
    }


def main() -> None:
    """Answer line by line until stdin ends. What the engine prints on stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate: Generate | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if "load" in command:
            generate = LOADERS[sys.argv[1]](command["load"])
        else:
            assert generate is not None
            prompts, tokens = command["run"]["prompts"], command["run"]["tokens"]
            record = Record(len(prompts))
            generate(prompts, tokens, record)
            answer = record.answer()
        answers.write(json.dumps(answer | memory()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
