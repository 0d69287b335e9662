"""Commands do their work on a tiny model: in this process, and against a server that the command line started."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from command_run import Run
from scripted_chat import write_scripted_chat
from scripted_model import write_scripted_model
from tiny_model import write_tiny_model

from allotrope.commands.chat import Conversation
from allotrope.commands.remote import Thought
from allotrope.commands.sampling import SamplingOptions
from allotrope.errors import AllotropeError, ConfigError, InvalidRequest, ModelError


def test_generate_streams_what_a_batch_prints(run: Run, dummy: list[str]) -> None:
    prompts = ["the cat", "one two three"]
    alone = [run("generate", *dummy, "-p", text, "--max-tokens", "6").stdout for text in prompts]
    batch = run("generate", *dummy, "-p", prompts[0], "-p", prompts[1], "--max-tokens", "6").stdout
    expected = "".join(f"{text!r}: {out.removesuffix(chr(10))!r}\n" for text, out in zip(prompts, alone, strict=True))
    assert batch == expected
    assert all(len(out) > 1 for out in alone)


def test_generate_with_the_chat_template_differs(run: Run, dummy: list[str]) -> None:
    plain, chat = (run("generate", *dummy, "-p", "the cat", "--max-tokens", "6", *more) for more in ([], ["--chat"]))
    assert plain.stdout != chat.stdout


def test_generate_refuses_invalid_requests(run: Run, dummy: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        run("generate", *dummy, "-p", "the cat", "--max-tokens", "100000")
    with pytest.raises(InvalidRequest, match="temperature=-1"):
        run("generate", *dummy, "-p", "the cat", "--temperature", "-1")


def test_a_directory_without_weights_is_refused(run: Run, tiny: Path) -> None:
    """Random weights are for those who ask for them."""
    with pytest.raises(ModelError, match=r"there is no model\.safetensors.*--load-format dummy"):
        run("generate", tiny, "-p", "the cat", "--max-tokens", "6")


def test_chat_keeps_history_until_it_is_cleared(run: Run, dummy: list[str]) -> None:
    typed = "the cat\nthe cat\n/clear\nthe cat\n/zork\n/quit\nnever read\n"
    result = run("chat", *dummy, "--max-tokens", "6", typed=typed)
    first, second, third = result.stdout.removesuffix("\n").split("\n")
    assert first == third != second
    assert len(re.findall(r"\[\d+ tokens, [\d.]+ tokens/s, first after \d+ ms\]", result.stderr)) == 3
    assert result.stderr.count("/clear forgets") == 2


def test_a_model_without_chat_template_holds_no_conversation(run: Run, tmp_path: Path) -> None:
    """It is said before anything is typed, and with what these commands can do."""
    described = json.loads((write_tiny_model(tmp_path) / "tokenizer_config.json").read_text())
    del described["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    dummy = [tmp_path, "--load-format", "dummy", "--kv-cache-memory-bytes", "32MB"]
    with pytest.raises(ConfigError, match=f"no chat template.* allotrope generate {re.escape(str(tmp_path))} -p TEXT"):
        run("chat", *dummy, typed="the cat\n")
    for prompts in (["-p", "the cat"], ["-p", "the cat", "-p", "the dog"]):
        with pytest.raises(ConfigError, match=r"no chat template.* Leave --chat out\."):
            run("generate", *dummy, "--chat", *prompts)


def test_chat_continues_after_a_message_that_is_too_long(run: Run, dummy: list[str]) -> None:
    result = run("chat", *dummy, "--max-tokens", "6", typed="x" * 5000 + "\nthe cat\n")
    alone = run("chat", *dummy, "--max-tokens", "6", typed="the cat\n")
    assert result.stdout == alone.stdout
    assert "allotrope: error: the prompt has" in result.stderr


def test_chat_with_a_server_equals_chat_in_process(run: Run, dummy: list[str], server_url: str) -> None:
    typed = "the cat\nand the dog\n"
    local = run("chat", *dummy, "--max-tokens", "6", "--system", "one two", typed=typed)
    remote = run("chat", "--url", server_url, "--max-tokens", "6", "--system", "one two", typed=typed)
    assert remote.stdout == local.stdout
    assert re.findall(r"\[\d+ tokens", remote.stderr) == re.findall(r"\[\d+ tokens", local.stderr)


def test_chat_shows_reasoning_and_does_not_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Thinker:
        last_tokens = 3
        asked: ClassVar[list[list[dict[str, str]]]] = []

        def stream(self, messages: list[dict[str, str]], sampling: SamplingOptions) -> Iterator[str]:
            self.asked.append([dict(one) for one in messages])
            yield Thought("hm")
            if messages[-1]["content"] == "long":
                yield "yes"

    conversation = Conversation(Thinker(), SamplingOptions(), None)
    for text in ("short", "long", "again"):
        conversation.turn(text)
    shown = capsys.readouterr()
    assert shown.out == "\nyes\n\n" and shown.err.count("hm") == 3
    assert shown.err.count("it ended within its reasoning") == 2
    # Nothing is left of what had no answer.
    contents = [[one["content"] for one in messages] for messages in Thinker.asked]
    assert contents == [["short"], ["long"], ["long", "yes", "again"]]


def test_chat_in_process_tells_reasoning_apart(run: Run, tmp_path: Path) -> None:
    """Of a model whose tags are text, and of one whose tags are special tokens."""
    model = write_scripted_chat(tmp_path / "think")
    result = run("chat", str(model), "--dtype", "float32", typed="ponder\n")
    assert result.stdout.strip() == "Good evening!" and "They greet me. I greet them." in result.stderr
    # What `generate` prints is what the model writes.
    text = run("generate", str(model), "--dtype", "float32", "--chat", "-p", "ponder").stdout
    assert text.startswith("<think>\nThey greet me.") and text.endswith("Good evening!\n")
    # A token has one successor, so those that come twice are one piece the second time.
    final = "<|start|>assistant<|channel|>final<|message|>"
    script = ("<|channel|>", "analysis", "<|message|>", "Hmm.", "<|end|>", final, "Good day!", "<|return|>", "more")
    harmony = write_scripted_model(
        tmp_path / "harmony", {"<|go|>": script}, "{# <|channel|>analysis<|message|> <|return|> #}<|go|>"
    )
    file = harmony / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"].startswith("<|") and token["content"] != final
    file.write_text(json.dumps(tokenizer))
    result = run("chat", str(harmony), "--dtype", "float32", typed="hi\n")
    assert result.stdout.strip() == "Good day!" and "Hmm." in result.stderr


def test_chat_reports_refusals_of_the_server(run: Run, server_url: str) -> None:
    with pytest.raises(AllotropeError, match="max_tokens"):
        run("chat", "--url", server_url, "--max-tokens", "100000", typed="the cat\n")


def test_bench_serve_measures_every_request(run: Run, server_url: str, tmp_path: Path) -> None:
    files = ["--output-json", tmp_path / "run.json", "--plot", tmp_path / "run.png"]
    sizes = ["--num-prompts", "6", "--input-len", "8", "--output-len", "5", "--token-id-limit", "256"]
    result = run("bench", "serve", "--url", f"{server_url}/v1", *sizes, "--max-concurrency", "2", *files)
    assert "requests completed" in result.stdout
    document = json.loads((tmp_path / "run.json").read_text())
    summary = document["summary"]
    assert (summary["completed"], summary["failed"]) == (6, 0)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (48, 30)
    assert set(summary["latency"]) == {"TTFT", "TPOT", "ITL", "E2E"}
    assert all(0 < spread["p50_ms"] <= spread["p99_ms"] for spread in summary["latency"].values())
    assert document["settings"]["model_name"] == "tiny"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_bench_serve_reports_refusals(run: Run, server_url: str) -> None:
    with pytest.raises(AllotropeError, match=r"all 2 requests failed.*HTTP 400"):
        run("bench", "serve", "--url", server_url, "--num-prompts", "2", "--input-len", "4", "--output-len", "9999")


def test_bench_latency_and_throughput(run: Run, dummy: list[str], tmp_path: Path) -> None:
    report = ["--output-json", tmp_path / "run.json"]
    sizes = ["--input-len", "8", "--output-len", "4"]
    run("bench", "latency", *dummy, *sizes, "--batch-size", "2", "--iterations", "3", *report)
    latency = json.loads((tmp_path / "run.json").read_text())
    assert latency["summary"]["completed"] == 6
    assert latency["settings"]["batch_size"] == 2
    run("bench", "throughput", *dummy, *sizes, "--num-prompts", "7", "--max-num-waiting", "3", *report)
    throughput = json.loads((tmp_path / "run.json").read_text())["summary"]
    assert (throughput["completed"], throughput["output_tokens"]) == (7, 28)
    assert throughput["output_tokens_per_s"] > 0


def test_bench_options_are_checked(run: Run, dummy: list[str]) -> None:
    with pytest.raises(ConfigError, match="iterations=0"):
        run("bench", "latency", *dummy, "--iterations", "0")
    with pytest.raises(ConfigError, match="request_rate=0"):
        run("bench", "serve", "--request-rate", "0")


@pytest.mark.parametrize("command", [("bench", "latency"), ("bench", "throughput"), ("verify",), ("eval",)])
def test_files_that_cannot_be_written_are_refused_before_a_run(
    run: Run, command: tuple[str, ...], tmp_path: Path
) -> None:
    json_flag = "--output-json" if command[0] == "bench" else "--json"
    for options, reason in (
        ([json_flag, tmp_path / "none" / "run.json"], "there is no directory .*none; make it"),
        ([json_flag, tmp_path], "is a directory; a file is needed"),
        (["--plot", tmp_path / "none" / "run.png"], "there is no directory .*none; make it"),
        (["--plot", tmp_path / "run.qqq"], r"a name that ends in \.png is needed"),
    ):
        # A model that is not there would be refused next.
        arguments = [*command, tmp_path / "no_model", *options]
        if command[0] == "bench":
            with pytest.raises(ConfigError, match=reason):
                run(*arguments)
        else:
            result = run(*arguments)
            assert result.exit_code == 2 and re.search(reason, result.stderr)
