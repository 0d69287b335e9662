"""Run vLLM's own tests of tool and reasoning parsers, from its unpacked sdist, with our parsers in place of vLLM's.

    PYTHONPATH=. .venv-vllm/bin/python scripts/run_vllm_parser_tests.py path/to/vllm-0.33.0

Needs an environment with vLLM (its types of requests and answers) and pytest. Tokenizers of checkpoints are replaced by
one of bytes that has every tag as a special token. Prints, for each file of tests, how many pass, how many differ for a
reason in `vllm_parser_differences.json`, how many parse nothing or look inside vLLM's classes, and every other failure;
the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FILES = {
    "tool_parsers/test_hermes_tool_parser.py": "hermes",
    "tool_parsers/test_qwen3coder_tool_parser.py": "qwen3_coder",
    "tool_parsers/test_glm4_moe_tool_parser.py": "glm45",
    "tool_parsers/test_glm47_moe_tool_parser.py": "glm45",
    "tool_parsers/test_deepseekv3_tool_parser.py": "deepseek_v3",
    "tool_parsers/test_deepseekv31_tool_parser.py": "deepseek_v31",
    "tool_parsers/test_deepseekv32_tool_parser.py": "dsml",
    "tool_parsers/test_deepseekv4_tool_parser.py": "dsml",
    "tool_parsers/test_kimi_k2_tool_parser.py": "kimi_k2",
    "tool_parsers/test_minimax_m2_tool_parser.py": "minimax_m2",
    "tool_parsers/test_gemma4_tool_parser.py": "gemma4",
    "tool_parsers/test_llama3_json_tool_parser.py": "llama3_json",
    "tool_parsers/test_pythonic_tool_parser.py": "pythonic",
    "tool_parsers/test_llama4_pythonic_tool_parser.py": "pythonic",
    "reasoning/test_deepseekr1_reasoning_parser.py": "think",
    "reasoning/test_deepseekv3_reasoning_parser.py": "think",
    "reasoning/test_gemma4_reasoning_parser.py": "gemma4",
    "reasoning/test_glm4_moe_reasoning_parser.py": "think",
    "reasoning/test_kimi_k2_reasoning_parser.py": "think",
    "reasoning/test_minimax_m2_reasoning_parser.py": "think",
    "reasoning/test_qwen3_reasoning_parser.py": "think",
    "parser/mistral/test_tool_calls.py": "mistral",
    "parser/mistral/test_reasoning.py": "mistral",
    "parser/engine/test_qwen3.py": "qwen3_coder",
    "parser/engine/test_qwen3_reasoning.py": "qwen3_coder",
    "parser/engine/test_glm47_moe.py": "glm45",
    "parser/engine/test_deepseek_v32.py": "dsml",
    "parser/engine/test_deepseek_v4.py": "dsml",
    "parser/engine/test_minimax_m2.py": "minimax_m2",
    "parser/engine/test_gemma4_streaming_reasoning.py": "gemma4",
}
# vLLM's class of a whole parser -> format.
WHOLE_PARSERS = {
    "qwen3.Qwen3Parser": "qwen3_coder",
    "glm47_moe.Glm47MoeParser": "glm45",
    "deepseek_v32.DeepSeekV32Parser": "dsml",
    "deepseek_v4.DeepSeekV4Parser": "dsml",
    "kimi_k2.KimiK2Parser": "kimi_k2",
    "minimax_m2.MinimaxM2Parser": "minimax_m2",
    "gemma4.Gemma4Parser": "gemma4",
    "mimo.MiMoParser": "mimo",
    "mistral.MistralParser": "mistral",
}
# Name of vLLM's data of a format -> format.
ENGINE_CONFIGS = {
    "qwen3": "qwen3_coder",
    "glm47_moe": "glm45",
    "deepseek_v32": "dsml",
    "deepseek_v4": "dsml",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "gemma4": "gemma4",
    "mimo": "mimo",
}
# What fails where a test looks inside vLLM's own classes, or wants a checkpoint.
OF_VLLM = ("has no attribute", "does not have the attribute", "is inside vLLM", "is not a dataclass", "ConnectError")
DIFFERENCES = Path(__file__).with_name("vllm_parser_differences.json")


def tokenizer_of_tags() -> Any:
    """A tokenizer of bytes with every tag of every format as a special token."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from allotrope.text.formats import FORMATS
    from allotrope.text.formats.parser import syntax_texts

    words = {word: i for i, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tags = {'<|"|>', "<|turn>", "<|tool_response>", "<|im_start|>", "<|im_end|>", "<｜tool▁sep｜>"}
    tags |= {"<|tool_call_argument_begin|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"}
    for one in FORMATS.values():
        if one.reasoning:
            tags |= {one.reasoning.start, one.reasoning.end}
        if one.tools:
            tags |= {text for text in syntax_texts(one.tools) if re.fullmatch(r"<\W?[\w|｜▁:]+>|<\|.*\|>", text)}
    backend.add_special_tokens(sorted(tags))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def as_dict(tool: Any) -> dict[str, Any]:
    return tool if isinstance(tool, dict) else tool.model_dump()


class Adapter:
    """A format of ours with the methods of vLLM's parsers. Subclasses set `format_name` and what vLLM assumes.

    `thinks`: a reply begins with reasoning, where the request does not say.
    """

    format_name = ""
    thinks = False
    kind = "tool"
    parsers_made = 0

    def __init__(self, tokenizer: Any, tools: Any = None, *args: Any, **options: Any) -> None:
        self.model_tokenizer = tokenizer
        self.tools = tools
        template = options.get("chat_template_kwargs") or {}
        if config := options.get("parser_engine_config"):
            # vLLM's own engine, with the data of a format.
            self.format_name = ENGINE_CONFIGS[config.name]
            self.thinks = config.initial_state.name == "REASONING"
        switch = [template[key] for key in ("enable_thinking", "thinking") if template.get(key) is not None]
        # Channels of reasoning are opened by the reply, never by the prompt.
        self.opens = self.format_name not in ("gemma4", "mistral") and (any(switch) if switch else self.thinks)
        self._state: Any = None

    @property
    def vocab(self) -> dict[str, int]:
        return self.model_tokenizer.get_vocab()

    def adjust_request(self, request: Any) -> Any:
        request.skip_special_tokens = False
        return request

    def _parser(self, request: Any, *, tools: bool, reasoning: bool) -> Any:
        from allotrope.text.formats import by_name

        Adapter.parsers_made += 1
        given = self.tools or getattr(request, "tools", None) or []
        return by_name(self.format_name).parser(
            tools=([as_dict(tool) for tool in given] or True) if tools else False,
            reasoning=reasoning,
            prompt_opens_reasoning=self.opens and reasoning,
            special_tokens=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]") if self.format_name == "mistral" else (),
        )

    def _whole(self, text: str, request: Any, **what: bool) -> list[Any]:
        parser = self._parser(request, **what)
        return [*parser.push(text), *parser.finish()]

    def parse(self, model_output: str, request: Any, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
        delta = self._delta(self._whole(model_output, request, tools=True, reasoning=True), joined=True)
        calls = [call.function for call in delta.tool_calls] if delta else []
        return (delta and delta.reasoning, delta and delta.content, calls or None)

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall

        delta = self._delta(self._whole(model_output, request, tools=True, reasoning=self.kind == "whole"), joined=True)
        calls = [
            ToolCall(id=one.id, function=FunctionCall(name=one.function.name, arguments=one.function.arguments))
            for one in (delta.tool_calls if delta else [])
        ]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=delta.content if delta else None
        )

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        if self.kind != "whole" and not self.opens and self.thinks:
            return None, model_output
        delta = self._delta(self._whole(model_output, request, tools=False, reasoning=True), joined=True)
        return (delta.reasoning, delta.content) if delta else (None, None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *rest: Any, **o: Any
    ):
        request = o.get("request") or (rest[-1] if rest else None)
        return self._push(current_text == delta_text, delta_text, request, tools=True, reasoning=self.kind == "whole")

    def extract_reasoning_streaming(self, previous_text: str, current_text: str, delta_text: str, *rest: Any, **o: Any):
        return self._push(current_text == delta_text, delta_text, None, tools=False, reasoning=True)

    def parse_delta(self, delta_text: str, delta_token_ids: Any, request: Any, *args: Any, finished: bool, **o: Any):
        delta = self._push(False, delta_text, request, tools=True, reasoning=True)
        last = self.finish_streaming() if finished else None
        return self._merged(delta, last)

    def is_reasoning_end(self, ids: list[Any]) -> bool:
        parser = self._parser(None, tools=False, reasoning=True)
        parser.push(self.model_tokenizer.decode(ids))
        return not parser._in_reasoning

    def extract_content_ids(self, ids: list[Any]) -> list[int]:
        if ids and isinstance(ids[0], str):
            ids = self.model_tokenizer.convert_tokens_to_ids(ids)
        _, content = self.extract_reasoning(self.model_tokenizer.decode(ids), None)
        return self.model_tokenizer.encode(content or "", add_special_tokens=False)

    def _push(self, is_first: bool, delta_text: str, request: Any, **what: bool) -> Any:
        if is_first or self._state is None:
            self._state = self._parser(request, **what)
        return self._delta(self._state.push(delta_text))

    def finish_streaming(self) -> Any:
        if self._state is None:
            return None
        delta = self._delta(self._state.finish())
        self._state = None
        return delta

    def _merged(self, one: Any, other: Any) -> Any:
        if one is None or other is None:
            return one or other
        from vllm.entrypoints.generate.base.protocol import DeltaMessage

        return DeltaMessage(
            content=(one.content or "") + (other.content or "") or None,
            reasoning=(one.reasoning or "") + (other.reasoning or "") or None,
            tool_calls=[*one.tool_calls, *other.tool_calls],
        )

    def _delta(self, events: list[Any], joined: bool = False) -> Any:
        """vLLM's delta of events, or None. `joined`: one entry for each call."""
        from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

        from allotrope.text.formats import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin

        calls: dict[int, Any] = {}
        for event in events:
            if isinstance(event, ToolCallBegin):
                function = DeltaFunctionCall(name=event.name, arguments="")
                calls[event.index] = DeltaToolCall(
                    index=event.index, id=event.id or f"call{event.index:05}", type="function", function=function
                )
            elif isinstance(event, ToolArgumentsDelta):
                if event.index not in calls:
                    calls[event.index] = DeltaToolCall(index=event.index, function=DeltaFunctionCall(arguments=""))
                calls[event.index].function.arguments += event.text
        content = "".join(one.text for one in events if isinstance(one, ContentDelta))
        reasoning = "".join(one.text for one in events if isinstance(one, ReasoningDelta))
        if not (content or reasoning or calls):
            return None
        options: dict[str, Any] = {"tool_calls": list(calls.values())} if calls or joined else {}
        return DeltaMessage(content=content or None, reasoning=reasoning or None, **options)


def put_in_place() -> None:
    """Replaces vLLM's parsers and tokenizers by ours."""
    import transformers
    from vllm import reasoning, tokenizers, tool_parsers

    from allotrope.text.formats.registry import REASONING_PARSERS, TOOL_PARSERS

    tokenizer = tokenizer_of_tags()
    transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *args, **options: tokenizer)
    tokenizers.get_tokenizer = lambda *args, **options: tokenizer
    importlib.import_module("vllm.tokenizers.registry").get_tokenizer = tokenizers.get_tokenizer
    found: dict[str, dict[str, type]] = {"tool": {}, "reasoning": {}}
    for kind, ours, package, registered in (
        ("tool", TOOL_PARSERS, "vllm.tool_parsers", tool_parsers._TOOL_PARSERS_TO_REGISTER),
        ("reasoning", REASONING_PARSERS, "vllm.reasoning", reasoning._REASONING_PARSERS_TO_REGISTER),
    ):
        for name, format_name in ours.items():
            if name not in registered:
                continue
            file, class_name = registered[name]
            thinks = kind == "reasoning" and format_name == "think" and name != "deepseek_v3"
            adapter = type(class_name, (Adapter,), {"format_name": format_name, "thinks": thinks, "kind": kind})
            found[kind][name] = adapter
            setattr(importlib.import_module(f"{package}.{file}"), class_name, adapter)
    for path, format_name in WHOLE_PARSERS.items():
        file, class_name = path.split(".")
        thinks = format_name not in ("gemma4", "dsml", "mistral") or class_name == "DeepSeekV4Parser"
        adapter = type(class_name, (Adapter,), {"format_name": format_name, "thinks": thinks, "kind": "whole"})
        module = importlib.import_module(f"vllm.parser.{file}")
        setattr(module, class_name, adapter)
        # Tests import private functions that an older vLLM has not; the tests that call them fail, alone.
        module.__getattr__ = no_such_function  # type: ignore[method-assign]
    engine = importlib.import_module("vllm.parser.engine.parser_engine")
    engine.ParserEngine = type("ParserEngine", (Adapter,), {"kind": "whole"})
    # The options of vLLM's parsers that an older vLLM has not.
    config = importlib.import_module("vllm.parser.engine.parser_engine_config").ParserEngineConfig
    known = {field.name for field in dataclasses.fields(config)}
    begin = config.__init__
    config.__init__ = lambda self, **options: begin(self, **{k: v for k, v in options.items() if k in known})
    tool_parsers.ToolParserManager.get_tool_parser = classmethod(lambda cls, name: found["tool"][name])
    reasoning.ReasoningParserManager.get_reasoning_parser = classmethod(lambda cls, name: found["reasoning"][name])


def no_such_function(name: str) -> Any:
    if not name.startswith("_") or name.startswith("__"):
        raise AttributeError(name)

    def function(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} is inside vLLM")

    return function


def finish_streams() -> None:
    """Makes the helpers of vLLM's tests say that a stream has ended: theirs only stop."""
    tools = importlib.import_module("tests.tool_parsers.utils")
    thoughts = importlib.import_module("tests.reasoning.utils")
    helpers = importlib.import_module("tests.parser.engine.streaming_helpers")
    run_tools, run_thoughts = tools.run_tool_extraction_streaming, thoughts.run_reasoning_extraction_streaming
    simulate_tools = helpers.simulate_tool_streaming

    def append(reconstructor: Any, parser: Any) -> Any:
        delta = parser.finish_streaming()
        if delta is not None:
            reconstructor.append_delta(delta)
        return reconstructor

    def tool_streaming(parser: Any, *args: Any, **options: Any) -> Any:
        return append(run_tools(parser, *args, **options), parser)

    def reasoning_streaming(parser: Any, *args: Any, **options: Any) -> Any:
        return append(run_thoughts(parser, *args, **options), parser)

    def simulated(parser: Any, request: Any, chunks: list[str]) -> Any:
        return [*simulate_tools(parser, request, chunks), (parser.finish_streaming(), "".join(chunks))]

    tools.run_tool_extraction_streaming = tool_streaming
    thoughts.run_reasoning_extraction_streaming = reasoning_streaming
    helpers.simulate_tool_streaming = simulated


class Results:
    """A plugin of pytest that keeps how each test ended, and has the fixtures of vLLM's own `conftest` files."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_setup(self, item: Any) -> None:
        Adapter.parsers_made = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix("tests/")
        why = what_failed(str(report.longrepr)) if report.failed else ""
        parsed_nothing = report.when == "call" and not Adapter.parsers_made
        if parsed_nothing or any(text in why for text in OF_VLLM):
            self.outcomes[name] = ("inside", why)
        elif report.failed:
            self.outcomes[name] = ("failed", why)
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(name, (report.outcome, ""))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            name = report.nodeid.removeprefix("tests/")
            self.outcomes[name] = ("failed", what_failed(str(report.longrepr)))

    def fixtures(self) -> Any:
        import pytest

        class Fixtures:
            @pytest.fixture(scope="session")
            def default_tokenizer(self) -> Any:
                return tokenizer_of_tags()

            @pytest.fixture
            def mock_request(self) -> Any:
                from unittest.mock import MagicMock

                from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

                request = MagicMock(spec=ChatCompletionRequest)
                request.tools, request.tool_choice, request.include_reasoning = [], "auto", True
                return request

        return Fixtures()


def what_failed(text: str) -> str:
    """The lines of a failure that say what differs, in one."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return " | ".join(lines)[:300] or text.strip().splitlines()[-1]


def explanation(name: str, known: dict[str, list[str]]) -> str:
    """Why a test differs, or ""."""
    return next((why for why, names in known.items() if any(fnmatch.fnmatch(name, one) for one in names)), "")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("sdist", type=Path, help="the unpacked sdist of vLLM")
    options.add_argument("--only", default="", help="part of the names of files to run")
    options.add_argument("--json", type=Path, help="write every outcome here")
    chosen = options.parse_args()
    import pytest

    tests = chosen.sdist.resolve() / "tests"
    with tempfile.TemporaryDirectory() as folder:
        # Its tests alone: beside its sources, they would import these, which are not built.
        (Path(folder) / "tests").symlink_to(tests)
        os.chdir(folder)
        sys.path.insert(0, folder)
        put_in_place()
        finish_streams()
        results = Results()
        files = [f"tests/{file}" for file in FILES if chosen.only in file and (tests / file).exists()]
        pytest.main(
            [
                "-q",
                "--noconftest",
                "--continue-on-collection-errors",
                "-p",
                "no:cacheprovider",
                "--tb=short",
                "-W",
                "ignore",
                "--no-header",
                "-rN",
                *files,
            ],
            plugins=[results, results.fixtures()],
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(results.outcomes, indent=1, ensure_ascii=False))
    return report(results.outcomes)


def report(outcomes: dict[str, tuple[str, str]]) -> int:
    """Prints the table. Returns the exit status."""
    known = json.loads(DIFFERENCES.read_text()) if DIFFERENCES.exists() else {}
    reasons: Counter[str] = Counter()
    lines, unexplained = [], []
    print("\n| Tests of vLLM | Format | Passed | Explained | Unexplained | Inside vLLM |\n|---|---|---|---|---|---|")
    for file, format_name in FILES.items():
        own = {name: outcome for name, outcome in outcomes.items() if name.startswith(file)}
        if not own:
            continue
        failed = {name: why for name, (outcome, why) in own.items() if outcome == "failed"}
        explained = {name: explanation(name, known) for name in failed}
        reasons.update(why for why in explained.values() if why)
        rest = [name for name, why in explained.items() if not why]
        unexplained += [(name, failed[name]) for name in rest]
        passed = sum(outcome == "passed" for outcome, _ in own.values())
        inside = sum(outcome == "inside" for outcome, _ in own.values())
        lines.append((passed, len(failed) - len(rest), len(rest), inside))
        print(f"| `{file}` | {format_name} | {' | '.join(map(str, lines[-1]))} |")
    print(f"| all | | {' | '.join(str(sum(column)) for column in zip(*lines, strict=True))} |\n")
    for why, count in reasons.most_common():
        print(f"{count:4}  {why}")
    for name, why in unexplained:
        print(f"UNEXPLAINED {name}: {why}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
