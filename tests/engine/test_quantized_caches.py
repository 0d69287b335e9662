"""Random load on quantized KV caches against each request alone.

Every query reads its keys and values from the cache, those of its own chunk too, so neither chunk borders nor prefix
hits change what is read. But products in fp32 add in another order in a batch of another size, and a number near a tie
is then rounded to the other side: one step of e4m3 away. Here such numbers are rounded to the same side, and what is
left must be noise of fp32.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.speculating import speculating
from engine.watching import GREEDY, Watch, assert_idle, assert_same, engine, request, run
from tiny_checkpoints import prompts
from torch.utils._python_dispatch import TorchDispatchMode

from allotrope.architectures.deepseek_v3 import tiny_deepseek_v3
from allotrope.architectures.deepseek_v4 import tiny_deepseek_v4
from allotrope.architectures.deepseek_v32 import tiny_deepseek_v32
from allotrope.architectures.gpt_oss import tiny_gpt_oss
from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.request import Request

# Block-scaled entries have blocks of 128 values in a latent, and of 64 in a compressed entry beside the rotated ones.
LATENT, COMPRESSED = {"kv_lora_rank": 128}, {"head_dim": 80}
CASES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = {
    "mha": (tiny_llama, {}, "fp8"),
    "mha-windows": (tiny_gpt_oss, {}, "fp8"),
    "mla": (tiny_deepseek_v3, LATENT, "fp8"),
    "mla-scaled": (tiny_deepseek_v3, LATENT, "fp8_ds_mla"),
    "dsa": (tiny_deepseek_v32, LATENT, "fp8"),
    "dsa-scaled": (tiny_deepseek_v32, LATENT, "fp8_ds_mla"),
    "gdn": (tiny_qwen3_next, {}, "fp8"),
    "csa": (tiny_deepseek_v4, COMPRESSED, "fp8"),
    "csa-scaled": (tiny_deepseek_v4, COMPRESSED, "fp8_ds_mla"),
}
# Rows whose numbers differ by less, relative to the largest, are equal but for noise of fp32.
NOISE = 1e-3
CASTS = {torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype}
ROUNDED = (torch.float8_e4m3fn, torch.bfloat16)
# Columns by which the nearest row is found.
COLUMNS = 32
# Logits differ by up to 2e-5, with gdn by up to 7e-4, which it has without quantized entries too.
ATOL = 5e-3


class RoundedOnce(TorchDispatchMode):
    """Rows of fp32 become the same bits in FP8 or bf16 as the first row that was equal but for `NOISE`.

    `values`: how many were rounded. `ties`: those of them that would have become other bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = self.ties = 0
        self._seen: dict[tuple[torch.Size, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in CASTS or args[0].dtype != torch.float32 or out.dtype not in ROUNDED:
            return out
        exact, rounded = args[0].flatten(1), out.view(torch.uint8 if out.itemsize == 1 else torch.int16).flatten(1)
        key = out.shape[1:], out.dtype
        seen, stored = self._seen.get(key, (exact[:0], rounded[:0]))
        known = torch.zeros(len(exact), dtype=torch.bool)
        if len(seen):
            nearest = torch.cdist(exact[:, :COLUMNS], seen[:, :COLUMNS]).argmin(1)
            known = (exact - seen[nearest]).abs().amax(1) <= NOISE * seen[nearest].abs().amax(1)
            canonical = torch.where(known[:, None], stored[nearest], rounded)
            self.ties += int((canonical != rounded).sum())
            rounded = canonical
        self.values += rounded.numel()
        self._seen[key] = torch.cat((seen, exact[~known])), torch.cat((stored, rounded[~known]))
        return rounded.view(out.dtype).view(out.shape)


def random_requests() -> list[Request]:
    """Prompts with common beginnings, some of several times the tokens of a step; every other has two sequences."""
    chance = random.Random(2)
    base = prompts((17, 70, 150), seed=11)
    found = []
    for number in range(6):
        long = number % 3 == 0
        ids = base[2][: chance.randint(135, 150)] if long else chance.choice(base)[: chance.randint(1, 90)]
        ids = ids + prompts((chance.randint(0, 5),), seed=number)[0]
        params = replace(GREEDY, max_tokens=chance.randint(16, 40), n=1 + number % 2)
        found.append(request(f"r{number}", ids, params))
    return found


@pytest.mark.parametrize("case", CASES)
def test_entries_are_read_as_they_are_stored(case: str, tmp_path: Path) -> None:
    """In chunks, after prefix hits and preemption, beside other requests and with drafts, a request has the logits and
    tokens that it has alone."""
    torch.set_num_threads(1)
    config, changes, kv_cache_dtype = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(config() | changes))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "kv_cache_dtype": kv_cache_dtype}
    options |= {"max_model_len": 192}
    requests = random_requests()
    want, got, rounding = Watch(), Watch(), RoundedOnce()
    alone = engine(tmp_path, want, enable_prefix_caching=False, **options)
    options["max_num_batched_tokens"] = 40
    room = engine(tmp_path, max_num_seqs=4 if case.startswith(("gdn", "csa")) else 2, **options).memory.bytes
    expected: dict[str, list[int]] = {}
    with rounding:
        for one in requests:
            expected |= run(alone, [replace(one, params=replace(one.params, n=1))])
        expected |= {f"{one.request_id}#1": expected[one.request_id] for one in requests if one.params.n == 2}
        few = {"kv_cache_memory_bytes": room, "scheduler_reserve_full_isl": False}
        tight = speculating(tmp_path, "some", 2, expected, got, max_num_seqs=6, **few, **options)
        tokens = run(tight, requests)
    assert_same(tokens, expected)
    assert_idle(tight)
    compared = 0
    for name, positions in want.seen.items():
        for position in positions.keys() & got.seen[name].keys():
            torch.testing.assert_close(got.seen[name][position], positions[position], atol=ATOL, rtol=0.0)
            compared += 1
    stats = tight.stats()
    assert compared > 300 and stats.prefix_hits > 0 and stats.speculation and stats.speculation.accepted_tokens > 0
    assert stats.preemptions > 0 or case.startswith("csa")
    assert rounding.ties < 1e-3 * rounding.values
