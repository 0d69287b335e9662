"""Every family's definition, `naive.py`: its form, and that it and all backends of the family say the same.

New families are covered by the registry and their `cases.py`; nothing here names one but where two are related.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from attention.naive_output import naive_output, naive_results
from device_under_test import DEVICE

import allotrope
from allotrope.attention.backend import AttentionBackend
from allotrope.attention.check import cases, compare
from allotrope.attention.csa.naive import rope
from allotrope.attention.family import boundaries
from allotrope.attention.mha import MhaSpec
from allotrope.attention.mha.naive import naive as mha_naive
from allotrope.attention.mla.naive import naive as mla_naive
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, Step, alone, at_random, in_chunks, in_order, whole
from allotrope.kernels.chip import CPU as CPU_CHIP

FOLDER = Path(allotrope.__file__).parent / "attention"
CASES = [(family, name) for family in FAMILIES for name in cases(family)]
ON_CPU = [
    pytest.param(family, name, backend, id=f"{family}-{name}-{backend.name}")
    for family, name in CASES
    for backend in FAMILIES[family].backends
    if not backend.rejects(cases(family)[name].spec, CPU_CHIP)
]
# The interpreter takes most of a minute for a layer of 32 heads of 128.
WITH_KERNELS = [
    (family, name)
    for family, name in CASES
    if any(backend.name == "triton" for backend in FAMILIES[family].backends)
    and (DEVICE == "cuda" or not name.endswith("released_size"))
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_definition_fits_on_a_screen_and_knows_nothing_but_its_spec(family: str) -> None:
    text = (FOLDER / family / "naive.py").read_text()
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert ast.get_docstring(tree) and all(ast.get_docstring(function) for function in functions)
    bodies = [text.splitlines()[f.body[1].lineno - 1 : f.end_lineno] for f in functions]
    code = [line for body in bodies for line in body if line.strip() and not line.strip().startswith("#")]
    assert 15 <= len(code) <= 40, f"{len(code)} lines of code in the functions of {family}/naive.py"
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    own = {name for name in imported if name.startswith("allotrope.") and not name.startswith("allotrope.ops.rope")}
    others = {name for name in own if name.rsplit(".", 1)[-1] not in ("spec", "naive")}
    assert not others, f"{family}/naive.py imports {sorted(others)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_page_opens_with_its_definition(family: str) -> None:
    _, opening, *_ = (FOLDER / family / "README.md").read_text().split("\n\n")
    assert "`naive.py`" in opening


@pytest.mark.parametrize("family", FAMILIES)
def test_a_definition_takes_the_tensors_that_inputs_are_made_of(family: str) -> None:
    """`naive` gets them as they are, a backend as one typed object beside plan and caches."""
    definition = importlib.import_module(f"allotrope.attention.{family}.naive").naive
    assert FAMILIES[family].naive is definition
    naive = list(inspect.signature(definition).parameters)
    ready = inspect.signature(FAMILIES[family].ready_inputs).parameters
    assert naive[0] == next(iter(ready)) == "spec"
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in ready.values())
    assert any_name or set(naive) <= set(ready)
    for backend in FAMILIES[family].backends:
        if backend.name == "reference":
            assert list(inspect.signature(backend.run).parameters)[:4] == ["spec", "plan", "caches", "inputs"]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_fp32_and_float64_agree(family: str, name: str) -> None:
    case = cases(family)[name]
    assert (found := compare(naive_output(case, torch.float32), naive_output(case), "fp32")), found


@pytest.mark.parametrize(("family", "name", "backend"), ON_CPU)
def test_any_schedule_gives_the_definition(family: str, name: str, backend: AttentionBackend) -> None:
    """Whole prompts, chunked prefill, decode and all of it mixed, through a plan and caches."""
    case = cases(family)[name]
    want, lengths = naive_output(case), case.lengths
    schedules = [whole(lengths), alone(lengths), *(in_chunks(lengths, size) for size in (1, 3, 64))]
    for steps in [*schedules, at_random(lengths, 1), at_random(lengths, 2)]:
        found = compare(Replay(case, backend).play(steps), want, "fp32")
        assert found, f"{found}, steps {steps}"


@pytest.mark.parametrize(("family", "name"), WITH_KERNELS)
def test_kernels_give_the_definition(family: str, name: str) -> None:
    """A prefill of the longest sequence beside the shortest one, then decodes: on the GPU, or in Triton's interpreter.

    The interpreter takes the longest sequence only a little beyond where the layer starts to compute in another way.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    backend = next(backend for backend in FAMILIES[family].backends if backend.name == "triton")
    case = cases(family)[name]
    length = dict(enumerate(case.lengths))
    short, long = min(length, key=length.__getitem__), max(length, key=length.__getitem__)
    if DEVICE == "cpu":
        length[long] = min(length[long], max((32, *boundaries(case.spec))) + 3)
    prefill = in_order((i, max(1, length[i] - 2)) for i in (short, long))
    decodes: list[Step] = [[(i, 1) for i in (short, long) if length[i] > 1 + left] for left in (1, 0)]
    steps = [prefill, *(step for step in decodes if step)]
    results = naive_results(case)
    want = torch.cat(
        [
            (result[0] if isinstance(result, tuple) else result)[: length[i]]
            for i, result in enumerate(results)
            if i in (short, long)
        ]
    )
    assert (found := compare(Replay(case, backend, DEVICE).play(steps), want, "fp32")), f"{found}, steps {steps}"


@pytest.mark.parametrize("family", ["mha", "mla", "dsa", "csa"])
def test_the_last_queries_of_a_context_are_those_of_the_whole(family: str) -> None:
    """Query t sits at position L - T + t."""
    queries = {"q", "q_nope", "q_pe", "index_q", "index_weights"}
    for name, case in cases(family).items():
        spec, inputs = case.spec, case.inputs()
        if "topk_indices" in inputs.tokens:
            continue
        naive = importlib.import_module(f"allotrope.attention.{family}.naive").naive
        length, last = case.lengths[-1], 3
        tokens = {key: t[-length:] for key, t in inputs.tokens.items()}
        latest = {key: t[-last:] if key in queries else t for key, t in tokens.items()}
        got, want = (naive(spec, **given, **inputs.layer) for given in (latest, tokens))
        if isinstance(want, tuple):
            got, want = got[0], want[0]
        assert (found := compare(got, want[-last:], "fp32")), f"{name}: {found}"


@pytest.mark.parametrize("name", cases("mla"))
def test_mla_is_mha_over_decompressed_rows_and_mqa_in_the_latent(name: str) -> None:
    case = dataclasses.replace(cases("mla")[name], lengths=(40,))
    spec, inputs = case.spec, case.inputs()
    q_nope, q_pe, c, k_pe = (inputs.tokens[key].double() for key in ("q_nope", "q_pe", "c", "k_pe"))
    w_uk, w_uv = (inputs.layer[key].double() for key in ("w_uk", "w_uv"))
    heads = spec.num_heads
    numbers = {"num_heads": heads, "scale": spec.scale, "kv_dtype": torch.float64}
    k = torch.cat((torch.einsum("hnc,lc->lhn", w_uk, c), k_pe[:, None].expand(-1, heads, -1)), -1)
    v = torch.einsum("hvc,lc->lhv", w_uv, c)
    decompressed = MhaSpec(num_kv_heads=heads, head_dim=k.shape[-1], v_head_dim=v.shape[-1], **numbers)
    want = mha_naive(decompressed, torch.cat((q_nope, q_pe), -1), k, v)
    # A latent row of the released sizes, 512 + 64, is wider than `MhaSpec` allows: MQA is written out.
    q = torch.cat((torch.einsum("thn,hnc->thc", q_nope, w_uk), q_pe), -1)
    row = torch.cat((c, k_pe), -1)
    hidden = torch.ones(len(c), len(c), dtype=torch.bool).triu(1)
    logits = torch.einsum("thc,lc->htl", q, row) * spec.scale
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    absorbed = torch.einsum("hvc,htc->thv", w_uv, weights @ c)
    found = naive_output(case)
    assert torch.allclose(found, want, rtol=0, atol=1e-12)
    assert torch.allclose(found, absorbed, rtol=0, atol=1e-12)


def test_dsa_of_all_tokens_is_mla() -> None:
    case = dataclasses.replace(cases("dsa")["picking_all"], lengths=(70,))
    inputs = case.inputs()
    tokens = {key: t for key, t in inputs.tokens.items() if not key.startswith("index_")}
    want = mla_naive(case.spec.mla, **tokens, **inputs.layer)
    assert (found := compare(naive_output(case, torch.float32), want, "fp32")), found


def test_csa_without_compressed_kv_is_mqa_whose_output_is_rotated_back() -> None:
    case = dataclasses.replace(cases("csa")["window_only"], lengths=(70,))
    spec, inputs = case.spec, case.inputs()
    position = torch.arange(70)
    q, kv = (rope(spec, inputs.tokens[key].double(), position) for key in ("q", "kv"))
    shared = MhaSpec(
        num_heads=spec.num_heads, num_kv_heads=1, head_dim=spec.head_dim, scale=spec.scale, window=spec.window,
        sinks=True, values_are_keys=True, kv_dtype=torch.float64,
    )  # fmt: skip
    want = rope(spec, mha_naive(shared, q, kv[:, None], kv[:, None], inputs.layer["sinks"]), -position)
    assert torch.allclose(naive_output(case), want, rtol=0, atol=1e-12)
