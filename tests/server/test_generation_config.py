"""Sampling values of a checkpoint's generation_config.json are what requests get that do not set their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess
from tiny_model import MAX_MODEL_LEN, write_tiny_model

from allotrope.commands.sampling import SamplingOptions
from allotrope.engine.sampling_defaults import eos_ids, read_sampling_defaults, values_not_taken
from allotrope.errors import ModelError
from allotrope.llm import LLM
from allotrope.request import SamplingParams

Json = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "the cat"}]},
    COMPLETIONS: {"prompt": "the cat"},
}
# Wild enough that a draw is never the greedy answer by chance, and short.
FILE: Json = {
    "temperature": 30.0,
    "top_k": 200,
    "top_p": 0.99,
    "max_new_tokens": 6,
    "do_sample": True,
    "eos_token_id": 1,
}


def write(directory: Path, values: Json) -> Path:
    """A tiny model whose generation_config.json has `values`."""
    path = write_tiny_model(directory)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), FILE)


def load(model: Path, **options: Any) -> LLM:
    return LLM(str(model), load_format="dummy", kv_cache_memory_bytes=8_000_000, threads=1, **options)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(model)
    try:
        yield process.wait_until_ready()
    finally:
        process.close()


@pytest.fixture(scope="module")
def http(running: ServerProcess) -> Iterator[httpx.Client]:
    with running.http() as client:
        yield client


def ids(http: httpx.Client, path: str, **more: Any) -> list[int]:
    response = http.post(path, json=BODIES[path] | {"return_token_ids": True, "seed": 3} | more)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_requests_get_the_defaults_of_the_file(http: httpx.Client, path: str) -> None:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    same = {"temperature": 30.0, "top_k": 200, "top_p": 0.99}
    assert ids(http, path, max_tokens=8) == ids(http, path, max_tokens=8, **same)
    assert ids(http, path, max_tokens=8) != ids(http, path, max_tokens=8, **plain)
    greedy = ids(http, path, max_tokens=8, temperature=0)
    assert greedy == ids(http, path, max_tokens=8, top_k=1)
    assert greedy != ids(http, path, max_tokens=8)


def test_default_max_tokens(http: httpx.Client) -> None:
    assert len(ids(http, CHAT, ignore_eos=True)) == 6
    assert len(ids(http, CHAT, ignore_eos=True, max_completion_tokens=9)) == 9
    assert len(ids(http, CHAT, ignore_eos=True, min_tokens=8)) == 8
    assert len(ids(http, COMPLETIONS, ignore_eos=True)) == 16


def test_a_default_length_is_lowered_to_the_context(http: httpx.Client) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 2000}], "truncate_prompt_tokens": MAX_MODEL_LEN - 3}
    assert len(ids(http, CHAT, ignore_eos=True, **long)) == 3


def test_defaults_are_logged_once(running: ServerProcess) -> None:
    listed = "temperature=30.0, top_p=0.99, top_k=200, max_tokens=6"
    running.wait_for_line(f"{listed} from the checkpoint's generation_config.json; --generation-config none")
    assert len([line for line in running.log if "generation_config.json" in line]) == 1


def test_the_llm_uses_defaults_without_parameters(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = load(model)
    same = SamplingParams(temperature=30.0, top_k=200, top_p=0.99, max_tokens=6)
    assert llm.get_default_sampling_params() == same
    greedy = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    assert "generation_config" in caplog.text
    long = llm.generate([[5] * (MAX_MODEL_LEN - 2)])[0].outputs[0]
    assert (len(long.token_ids), long.finish_reason) == (2, "length")
    llm.close()
    # Requests without a seed draw by their number, so that a fresh engine repeats.
    drawn = [run(load(model), params) for params in (None, same)]
    assert drawn[0] == drawn[1] != [greedy]
    chats = [run_chat(load(model), params) for params in (None, same)]
    assert chats[0] == chats[1]
    assert len([record for record in caplog.records if "requests that set no value" in record.getMessage()]) == 3


def run(llm: LLM, params: SamplingParams | None) -> list[list[int]]:
    found = [output.outputs[0].token_ids for output in llm.generate([[5, 6]], params)]
    llm.close()
    return found


def run_chat(llm: LLM, params: SamplingParams | None) -> list[int]:
    found = llm.chat([{"role": "user", "content": "hi"}], params).outputs[0].token_ids
    llm.close()
    return found


def test_generation_config_none_turns_defaults_off(model: Path) -> None:
    llm = load(model, generation_config="none")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.engine.limits.eos_ids == (1,)
    llm.close()


def test_commands_use_defaults_for_missing_flags() -> None:
    defaults = read_sampling_defaults(FILE, "here")
    untold = SamplingOptions().as_params(defaults, 10, 14)
    assert (untold.temperature, untold.top_k, untold.top_p, untold.max_tokens) == (30.0, 200, 0.99, 4)
    told = SamplingOptions(temperature=0.0, top_k=0, max_tokens=8).as_params(defaults, 10, 14)
    assert (told.temperature, told.top_k, told.top_p, told.max_tokens) == (0.0, 0, 0.99, 8)
    plain = SamplingOptions().as_params({}, 10, 1000)
    assert plain == SamplingParams(temperature=0.0, max_tokens=512)
    assert SamplingOptions(top_k=0).as_request_fields() == {"temperature": 0.0, "max_tokens": 512, "top_k": 0}
    assert SamplingOptions(max_tokens=3).as_request_fields(defaults) == {"max_tokens": 3}


def test_the_model_card_lists_defaults(http: httpx.Client) -> None:
    card = http.get("/v1/models").json()["data"][0]
    assert card["sampling_defaults"] == read_sampling_defaults(FILE, "here")


def test_fields_that_are_read() -> None:
    given = {"temperature": 0.6, "top_k": -1, "min_p": 0, "repetition_penalty": None, "max_new_tokens": 32.0, "pad": 1}
    taken = read_sampling_defaults(given, "here")
    assert taken == {"temperature": 0.6, "top_k": 0, "min_p": 0, "max_tokens": 32}
    assert [type(taken[name]) for name in ("top_k", "max_tokens")] == [int, int]
    assert values_not_taken({"do_sample": True, "num_beams": 1, "typical_p": 1.0, "temperature": 3}) == []
    assert values_not_taken({"do_sample": False, "num_beams": 4}) == ["do_sample=False", "num_beams=4"]


def test_the_first_file_that_names_ids_ends_sequences() -> None:
    config = {"eos_token_id": 3, "text_config": {"eos_token_id": 4}}
    assert eos_ids("here", {"eos_token_id": [1, 2]}, config) == (1, 2)
    assert eos_ids("here", {}, config) == (3,)
    # As of a multimodal model, whose text part alone names one.
    assert eos_ids("here", {}, config | {"eos_token_id": None}) == (4,)
    assert eos_ids("here", {}, {"text_config": None}) == ()


@pytest.mark.parametrize("value", ["2", [1, "2"], 2.0, True, {"id": 2}])
def test_ids_that_end_sequences_are_integers(value: object) -> None:
    with pytest.raises(ModelError, match=r"eos_token_id=.* is neither a token id nor a list of them"):
        eos_ids("here", {"eos_token_id": value})


def test_values_out_of_range_are_refused_with_every_reason() -> None:
    broken = {
        "temperature": -1,
        "top_p": "0.9",
        "top_k": 2.5,
        "min_p": True,
        "max_new_tokens": 0,
        "repetition_penalty": float("nan"),
    }
    with pytest.raises(ModelError) as refused:
        read_sampling_defaults(broken, "here")
    for name in broken:
        assert any(reason.startswith(f"{name}=") for reason in refused.value.reasons), name
    assert "--generation-config none" in str(refused.value)
