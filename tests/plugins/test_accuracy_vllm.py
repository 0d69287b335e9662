"""The accuracy of vLLM with the plugin: items, answers and figures are those of `allotrope eval` in fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_scripts import load_script
from eval.eval_fixtures import add_byte_tokenizer
from plugins.hosting import CACHE_BYTES
from tiny_checkpoints import TinyCheckpoint, write_tiny

from allotrope.architectures.llama import tiny_mistral
from allotrope.config import EngineConfig
from allotrope.eval.answers import Answers, ask_engine
from allotrope.eval.items import Items, make_items
from allotrope.eval.options import EvalOptions, ModeName
from allotrope.eval.report import write_json
from allotrope.eval.run import evaluate
from allotrope.text.tokenizer import Tokenizer, load_tokenizer
from allotrope.verify.execution_modes import NotExercised

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(600)]

SMALL: dict[str, Any] = {"items": 6, "lengths": "160", "text_length": 96, "tasks": "text,recall,tool_call"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Layers with a window of 16 tokens, which are bytes."""
    config = tiny_mistral() | {"sliding_window": 16, "max_position_embeddings": 2048}
    made = write_tiny(config, tmp_path_factory.mktemp("windowed"))
    add_byte_tokenizer(made.directory)
    return made


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyCheckpoint) -> Tokenizer:
    return load_tokenizer(str(tiny.directory))


@pytest.fixture(scope="module")
def items(tokenizer: Tokenizer) -> Items:
    return make_items(EvalOptions(**SMALL), tokenizer, 0, 2048)


@pytest.fixture(scope="module")
def ours(tiny: TinyCheckpoint, items: Items) -> Answers:
    return ask_engine(EngineConfig(model=str(tiny.directory), dtype="float32", device="cpu"), items, "cold")


@pytest.fixture
def asked(in_vllm: None, tokenizer: Tokenizer, items: Items) -> Iterator[Any]:
    """Asks vLLM in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from bench.accuracy.ask import ask_running
    from bench.accuracy.in_vllm import FORCED_TOKENS, SETTINGS, RunningVllm

    def ask(directory: Path, mode: ModeName, **options: Any) -> Any:
        plain: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "logits_processors": [FORCED_TOKENS],
        }
        given = str(directory), plain | SETTINGS[mode][-1] | options, tokenizer, items.longest
        return ask_running(lambda: RunningVllm(*given), items, mode)

    yield ask
    # What a start that was refused has left.
    cleanup_dist_env_and_memory()


def test_report_is_that_of_our_engine(tiny: TinyCheckpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole command: a process for each mode, held to the report of `allotrope eval`."""
    config = EngineConfig(model=str(tiny.directory), dtype="float32", device="cpu")
    report = evaluate(config, EvalOptions(**SMALL))
    reference, found = tmp_path / "ours.json", tmp_path / "vllm.json"
    write_json(reference, report)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = load_script("accuracy_host")
    arguments = ["vllm", str(tiny.directory), "--dtype=float32", *flags, f"--baseline={reference}", f"--json={found}"]
    assert command.main(arguments) == 0, capfd.readouterr().err[-3000:]
    document = json.loads(found.read_text())
    assert document["items_sha256"] == report.items_sha256
    assert document["engine"].startswith("vLLM ")
    assert document["engine"].endswith(
        "(model runner V1) with allotrope: float32 with float32 caches and float32 states on cpu"
    )
    assert any("mha/" in line for line in document["backends"])
    assert document["unequal_answers"] == {"cold": {"recall": [0, 6], "tool_call": [0, 6]}}
    assert {one["figure"] for one in document["differences"]} >= {"text", "recall", "tool_call, valid"}
    assert all(abs(one["difference"]) < 1e-4 for one in document["differences"])


@pytest.mark.parametrize("mode", ["warm", "chunked", "preempted"])
def test_modes_answer_as_our_engine(
    mode: ModeName, tiny: TinyCheckpoint, items: Items, ours: Answers, asked: Any
) -> None:
    found, host = asked(tiny.directory, mode)
    assert host.model.startswith("float32")
    assert {task: [one.text for one in answers] for task, answers in found.tasks.items()} == {
        task: [one.text for one in answers] for task, answers in ours.tasks.items()
    }
    assert items.text is not None
    first = items.text.first
    computed, wanted = (torch.tensor(one.losses)[:, first:] for one in (found, ours))
    torch.testing.assert_close(computed, wanted, atol=5e-4, rtol=0.0)
    happened = {"warm": "prompt tokens reused", "chunked": "", "preempted": " preemptions"}[mode]
    assert found.remark.count(happened) >= (2 if happened else 0), found.remark


def test_a_mode_without_its_event_is_not_exercised(tiny: TinyCheckpoint, asked: Any) -> None:
    with pytest.raises(NotExercised, match="no prompt was found in the prefix cache"):
        asked(tiny.directory, "warm", block_size=512)


def test_refusals_are_told_from_faults(tiny: TinyCheckpoint, asked: Any) -> None:
    from bench.accuracy.apart import is_refusal

    for options in ({"kv_cache_dtype": "fp8_ds_mla"}, {"kv_cache_dtype": "nothing"}, {"max_num_batched_tokens": 1}):
        with pytest.raises(Exception) as refused:
            asked(tiny.directory, "cold", **options)
        assert is_refusal(refused.value), (options, refused.value)
    assert not is_refusal(RuntimeError("a kernel failed"))
    assert not is_refusal(ValueError("raised by no one"))


@pytest.mark.slow
def test_a_model_of_vllm_is_refused(tmp_path: Path, asked: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from bench.accuracy.ask import NotOurs

    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 320, "n_positions": 512}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(NotOurs, match=r"vLLM runs a model of vllm\.model_executor\.models\.gpt2"):
        asked(tmp_path, "cold", skip_tokenizer_init=True)


def test_tokens_are_forced_by_slot(in_vllm: None) -> None:
    """As vLLM's second model runner calls it, which needs a GPU: rows of the batch, slots of requests."""
    from vllm import SamplingParams

    from bench.accuracy.forced_tokens import ForcedTokensProcessor

    processor = ForcedTokensProcessor(None, None)
    forced = {"forced": [5, 6, 7], "after": 10}
    assert processor.add_request(3, SamplingParams(extra_args=forced))
    assert not processor.add_request(1, SamplingParams())

    def chosen(slots: list[int], lengths: list[int]) -> list[int]:
        logits = torch.arange(len(slots) * 9.0).view(len(slots), 9)
        batch = SimpleNamespace(idx_mapping_np=torch.tensor(slots), seq_lens_upper_bound_np=torch.tensor(lengths))
        return processor.apply(logits, batch).argmax(-1).tolist()

    assert chosen([1, 3], [10, 10]) == [8, 5]
    assert chosen([3, 1], [12, 40]) == [7, 8]
    # A chunk of the prompt, and a slot that another request has taken.
    assert chosen([3], [9]) == [8]
    processor.add_request(3, SamplingParams())
    assert chosen([3], [10]) == [8]
