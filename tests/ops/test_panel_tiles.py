"""Products with panels by matrix units (AMX), which are emulated where the processor lacks them."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from compiled_blocks import EMULATED_TILES, MATRIX_UNITS, USUAL_FLAGS, WITH_TILES, need

from allotrope.attention.check import compare
from allotrope.kernels.c.compiler import HEADERS
from allotrope.ops.matmul.cpu import SOURCE, pack
from allotrope.ops.matmul.plain import PlainWeight

# More than what stays in a cache, and parts of a tile.
SIZES = ((33, 64), (300, 800), (160, 1536))
TOKENS = (1, 2, 16, 17, 33, 545)


@pytest.fixture(scope="module", params=["emulated", "processor's own"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`cpu.c` of bf16."""
    emulated = request.param == "emulated"
    if not emulated and not MATRIX_UNITS:
        pytest.skip("the processor lacks amx_bf16")
    compiler = need("avx512_bf16", "avx512_vnni")
    made = tmp_path_factory.mktemp("tiles") / "library.so"
    flags = [*USUAL_FLAGS, *WITH_TILES, *(EMULATED_TILES if emulated else ()), "-DELEMENT_BFLOAT16=1", f"-I{HEADERS}"]
    command = [compiler, "-shared", "-fPIC", *flags, str(SOURCE), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(made))


def at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def product(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight.shape
    packed = pack(PlainWeight(weight))
    padded = None if bias is None else packed.padded(bias)
    y = torch.full((len(x), outputs), torch.nan, dtype=torch.bfloat16)
    sizes = (ctypes.c_long(size) for size in (len(x), inputs, outputs))
    library.product(at(y), at(x), ctypes.c_long(x.stride(0)), at(packed.panels), at(padded), *sizes)
    return y


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rows_do_not_depend_on_others(library: ctypes.CDLL, outputs: int, inputs: int) -> None:
    weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).bfloat16(), torch.randn(outputs)
    x = torch.randn(max(TOKENS), inputs + 8).bfloat16()[:, :inputs]
    whole = product(library, x, weight, bias)
    wanted = x.double() @ weight.double().T + bias.double()
    assert (found := compare(whole, wanted, "bf16")), found
    for tokens in TOKENS:
        assert torch.equal(product(library, x[:tokens], weight, bias), whole[:tokens]), tokens
    zero = torch.zeros(outputs)
    assert torch.equal(product(library, x[:33], weight, None), product(library, x[:33], weight, zero))


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_experts(library: ctypes.CDLL, outputs: int, inputs: int) -> None:
    """Without rows, with one and with many: each row gets the bits that its expert's own product gives it."""
    weights = torch.randn(4, outputs, inputs).bfloat16()
    ends = [0, 1, 540, 560]
    x = torch.randn(ends[-1], inputs).bfloat16()
    y = torch.full((len(x), outputs), torch.nan, dtype=torch.bfloat16)
    sizes = (ctypes.c_long(size) for size in (len(ends), inputs, outputs))
    packed, where = pack(PlainWeight(weights)), torch.tensor(ends, dtype=torch.int32)
    library.grouped_product(at(y), at(x), ctypes.c_long(inputs), at(packed.panels), at(where), *sizes)
    starts = [0, *ends[:-1]]
    own = [product(library, x[a:b], w, None) for w, a, b in zip(weights, starts, ends, strict=True) if b > a]
    assert torch.equal(y, torch.cat(own))
