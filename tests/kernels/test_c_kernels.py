"""C that is compiled on the machine: the numbers of the equations, whatever lies beside a row; and doing without it."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from allotrope.attention.check import cases, compare
from allotrope.attention.mha import MHA
from allotrope.attention.mha.compiled import rejects
from allotrope.kernels.backend import choose
from allotrope.kernels.c import compiler
from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.gated_activation import cpu as gated_activation_cpu
from allotrope.ops.gated_activation import reference as gated_activation_reference
from allotrope.ops.gated_activation.cases import ACTIVATIONS
from allotrope.ops.hyper_connection import HyperConnectionSpec
from allotrope.ops.hyper_connection import cpu as hyper_connection_cpu
from allotrope.ops.matmul.cpu import SOURCE, library_reasons, matmul, multiply_experts, pack
from allotrope.ops.matmul.plain import PlainWeight
from allotrope.ops.moe_route import RouteSpec, Score
from allotrope.ops.moe_route import cpu as route_cpu
from allotrope.ops.rms_norm import RMS_NORM, RMSNormSpec
from allotrope.ops.rms_norm import cpu as rms_norm_cpu
from allotrope.ops.rms_norm.reference import GateActivation
from allotrope.ops.rope import RopeSpec, RopeTable
from allotrope.ops.rope import cpu as rope_cpu

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@pytest.fixture(params=DTYPES, ids=KINDS.values())
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def compiled(dtype: torch.dtype) -> None:
    if reasons := c_reasons(gated_activation_cpu.SOURCE, dtype, CPU_CHIP):
        pytest.skip("; ".join(reasons))


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("size", [8, 64, 577])
def test_norm(compiled: None, dtype: torch.dtype, tokens: int, size: int) -> None:
    """Of heads that are part of wider rows, too."""
    x, weight = drawn(tokens, 5, size, dtype=dtype)[:, 1:4], drawn(size, dtype=torch.float32)
    exact = x.double()
    want = exact / (exact.square().sum(-1, keepdim=True) + 0.25).sqrt() * weight
    assert (found := compare(rms_norm_cpu.rms_norm(x, weight, 0.25), want, KINDS[dtype])), found
    flat = rms_norm_cpu.rms_norm(x[:, 0], weight, 0.25)
    assert torch.equal(flat, rms_norm_cpu.rms_norm(x, weight, 0.25)[:, 0])


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_gated_norm(compiled: None, dtype: torch.dtype, tokens: int, activation: GateActivation) -> None:
    """With gates that are part of wider rows, and extreme ones."""
    x, weight = drawn(tokens, 3, 32, dtype=dtype), drawn(32, dtype=torch.float32)
    gate = (6 * drawn(tokens, 3 * 32 + 5, dtype=dtype))[:, 5:]
    gate[0, :2] = torch.tensor([-300.0, 300.0])
    exact, g = x.double(), gate.double()
    want = (exact / (exact.square().sum(-1, keepdim=True) + 0.25).sqrt() * weight).flatten(1)
    want = want * g.sigmoid() * (g if activation == "silu" else 1.0)
    found = rms_norm_cpu.gated_rms_norm(x, weight, 0.25, gate, activation)
    assert (comparison := compare(found, want, KINDS[dtype])), comparison


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_gated_activation(compiled: None, dtype: torch.dtype, tokens: int, activation: GatedActivation) -> None:
    x = 8 * drawn(tokens, 2 * 112 + 5, dtype=dtype)[:, : 2 * 112]
    want = gated_activation_reference.gated_activation(x.double(), activation)
    assert (found := compare(gated_activation_cpu.gated_activation(x, activation), want, KINDS[dtype])), found


def test_gated_activation_of_extremes(compiled: None, dtype: torch.dtype) -> None:
    """What is not a number stays one, and nothing else becomes one."""
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.nan] * 2, dtype=dtype)
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    got = gated_activation_cpu.gated_activation(x, GatedActivation())[0].float()
    assert torch.equal(got.isnan(), gate.isnan())
    assert torch.allclose(got[:7], torch.tensor([0, 0, 0, 0, 88, 200, 1e30]), rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_a_bounded_gate_keeps_what_is_not_a_number(compiled: None, dtype: torch.dtype, half: int) -> None:
    x = drawn(3, 2, 32, dtype=dtype)
    x[1, half, 5] = torch.nan
    activation = GatedActivation(slope=1.702, limit=7.0, offset=1.0)
    got = gated_activation_cpu.gated_activation(x.flatten(1), activation)
    assert got.isnan().nonzero().tolist() == [[1, 5]]


def test_norms_keep_what_is_not_a_number(compiled: None, dtype: torch.dtype) -> None:
    x, weight = drawn(3, 2, 32, dtype=dtype), torch.ones(32)
    x[1, 1, 5] = torch.nan
    lost = torch.zeros(3, 2, 1, dtype=torch.bool).index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(True))
    assert torch.equal(rms_norm_cpu.rms_norm(x, weight, 0.25).isnan(), lost.expand(3, 2, 32))
    gated = rms_norm_cpu.gated_rms_norm(x, weight, 0.25, drawn(3, 64, dtype=dtype), "silu")
    assert torch.equal(gated.view(3, 2, 32).isnan(), lost.expand(3, 2, 32))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_an_expert_whose_score_is_not_a_number_is_chosen(score: Score) -> None:
    """Its weight then says so; an expert that is passed over would break in silence."""
    spec = RouteSpec(experts=8, topk=2, score=score)
    if reasons := route_cpu.rejects(spec, CPU_CHIP):
        pytest.skip("; ".join(reasons))
    logits = drawn(2, 8, dtype=torch.float32)
    logits[1, 6] = torch.nan
    weights, chosen = route_cpu.route(logits, None, spec)
    assert weights.isnan().all(1).tolist() == [False, True]
    assert 6 in chosen[1].tolist() or score == "softmax"


def test_hyper_connections_keep_what_is_not_a_number() -> None:
    if reasons := c_reasons(hyper_connection_cpu.SOURCE, torch.float32, CPU_CHIP):
        pytest.skip("; ".join(reasons))
    spec = HyperConnectionSpec(streams=4, hidden=16, iterations=3, eps=1e-6, norm_eps=1e-6)
    for index in (0, 4, 9):
        mixes = drawn(3, 24, dtype=torch.float32)
        mixes[1, index] = torch.nan
        found = hyper_connection_cpu.mixing_weights(spec, mixes, torch.zeros(24), torch.ones(3))
        lost = torch.stack([part.flatten(1).isnan().any(1) for part in found])
        assert lost.any(0).tolist() == [False, True, False]


@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (64, 16), (24, 8)])
def test_rope(compiled: None, dtype: torch.dtype, dim: int, rotated: int) -> None:
    x = drawn(9, 7, dim, dtype=dtype)[:, 1:5]
    rotation = RopeTable(RopeSpec(dim=rotated, theta=1e4), CPU).at(torch.arange(9) * 100, dtype)
    head = x[..., :rotated].double()
    swapped = torch.cat((head[..., rotated // 2 :], head[..., : rotated // 2]), dim=-1)
    cos, sin = rotation.cos.double(), rotation.sin.double()
    want = torch.cat((head * cos + swapped * sin, x[..., rotated:].double()), dim=-1)
    assert (found := compare(rope_cpu.apply_rope(x, rotation), want, KINDS[dtype])), found


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 130), (31, 1536)])
def test_product(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Every number of tokens gives each token the same bits: sums have one order."""
    weight, bias = drawn(outputs, inputs, dtype=dtype) / inputs**0.5, drawn(outputs, dtype=dtype)
    if library_reasons(dtype):
        pytest.skip("this machine multiplies otherwise")
    packed = functools.partial(matmul, weight=pack(PlainWeight(weight)))
    x = drawn(205, inputs + 3, dtype=dtype)[:, :inputs]
    whole = packed(x, bias=bias)
    assert (found := compare(whole, x.double() @ weight.double().T + bias.double(), KINDS[dtype])), found
    for tokens in (1, 5, 12, 13, 96, 97):
        assert torch.equal(packed(x[3 : 3 + tokens], bias=bias), whole[3 : 3 + tokens]), tokens
    assert torch.equal(packed(x), packed(x, bias=torch.zeros_like(bias)))


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 130)])
def test_grouped_product(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Experts without rows, with one and with many: each row gets the bits that its expert's own product gives it."""
    weights = drawn(5, outputs, inputs, dtype=dtype)
    if library_reasons(dtype):
        pytest.skip("this machine multiplies otherwise")
    x = drawn(140, inputs + 2, dtype=dtype)[:, :inputs]
    ends = [0, 1, 1, 130, 140]
    found = multiply_experts(x, pack(PlainWeight(weights)), torch.tensor(ends, dtype=torch.int32))
    want = [matmul(x[a:b], pack(PlainWeight(w))) for w, a, b in zip(weights, [0, *ends[:-1]], ends, strict=True)]
    assert torch.equal(found, torch.cat(want))


def test_products_are_compiled_only_where_they_are_used(dtype: torch.dtype) -> None:
    """Elsewhere the compiler would spend 20 seconds on code that nothing calls."""
    try:
        library = compiler.load(SOURCE, dtype)
    except compiler.CannotCompile as reason:
        pytest.skip(str(reason))
    assert bool(library.suits()) == hasattr(library, "product") == hasattr(library, "grouped_product")
    assert (not library_reasons(dtype)) == bool(library.suits())


def test_without_a_compiler_everything_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = cases("mha")["grouped_4"].spec
    monkeypatch.setenv("ALLOTROPE_CC", "no-such-compiler")
    monkeypatch.setattr(compiler, "_load", compiler._load.__wrapped__)
    monkeypatch.setattr(
        "allotrope.attention.mha.compiled._decode", lambda spec: compiler.load(Path("none.c"), torch.float32)
    )
    assert any("no-such-compiler" in reason for reason in rejects(spec, CPU_CHIP))
    assert choose(MHA, spec, CPU_CHIP).backend.name == "cpu"
    choice = choose(RMS_NORM, RMSNormSpec(64, torch.float32), CPU_CHIP)
    assert choice.backend.name == "reference"
    assert any("ALLOTROPE_CC" in reason for reason in choice.passed_over["cpu"])
    with pytest.raises(compiler.CannotCompile, match="ALLOTROPE_CC"):
        CFunction(rms_norm_cpu.SOURCE, "rms_norm", torch.float32, "ppplllllf")


def test_what_a_compiler_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "wrong.c"
    source.write_text("this is not C;")
    if compiler._load.__wrapped__(rms_norm_cpu.SOURCE, (("ELEMENT_BFLOAT16", 0),)) is None:
        pytest.skip("there is no C compiler")
    with pytest.raises(compiler.CannotCompile, match=r"could not compile wrong\.c"):
        compiler.load(source, torch.float32)
    assert "error" in caplog.text
    assert not list((tmp_path / "cache").rglob("wrong*"))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A source whose library is kept in a cache of the test's own."""
    if shutil.which(os.environ.get("ALLOTROPE_CC", "cc")) is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_load", compiler._load.__wrapped__)
    source = tmp_path / "answer.c"
    source.write_text("long answer(void) { return 42; }")
    return source


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a bit": lambda data: data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:],
    "no library": lambda data: b"text" + hashlib.sha256(b"text").digest(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_made_anew(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    assert compiler.load(source, torch.float32).answer() == 42
    (kept,) = (tmp_path / "cache" / "allotrope").iterdir()
    # Another file of the name: a library that is in use must not change.
    whole = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(damage(whole))
    caplog.clear()
    assert compiler.load(source, torch.float32).answer() == 42
    assert str(kept) in caplog.text and "compiled again" in caplog.text
    caplog.clear()
    assert compiler.load(source, torch.float32).answer() == 42
    assert not caplog.text


def test_a_cache_that_cannot_be_written_is_done_without(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert compiler.load(source, torch.float32).answer() == 42
    assert str(tmp_path / "cache" / "allotrope") in caplog.text


def test_processes_that_find_one_damaged_library_do_not_harm_each_other(source: Path, tmp_path: Path) -> None:
    """Each mends it by itself, at the same moment; what is left is whole, and nothing lies beside it."""
    compiler.load(source, torch.float32)
    (kept,) = (tmp_path / "cache" / "allotrope").iterdir()
    kept.unlink()
    kept.write_bytes(b"damaged")
    code = (
        "import sys; from pathlib import Path; import torch; from allotrope.kernels.c.compiler import load; "
        "print('ready', flush=True); sys.stdin.read(); print(load(Path(sys.argv[1]), torch.float32).answer())"
    )
    command = [sys.executable, "-c", code, str(source)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for one in started:
        assert one.stdout.readline() == "ready\n"
    for one in started:
        one.stdin.close()
    assert [(one.stdout.read(), one.wait()) for one in started] == [("42\n", 0)] * 3
    assert list(kept.parent.iterdir()) == [kept]
    assert compiler._kept(kept) is not None
