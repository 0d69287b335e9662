"""What reads compiled kernels sees an instruction that drops NaN, and knows whose line it is."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.kernels.dropped_nan import dropping
from allotrope.kernels.propagate_nan import highest

LINE = inspect.getsourcelines(highest.fn)[1] + 3
OWN = "some_kernel.py:12:34"
ALLOWED = f"standard.py:170:27 @[ propagate_nan.py:{LINE}:11 @[ {OWN} ] ]"


def found(text: str, nvidia: bool = True, mark: str = OWN, ir: str = "") -> list[str]:
    comment = "//" if nvidia else ";"
    return dropping(ir, f"\t.loc\t1 12 34 {comment} {mark}\n{text}\n", nvidia, (highest,))


@pytest.mark.parametrize("name", ["max.f32", "min.ftz.f32", "max.bf16x2", "max.xorsign.abs.f32", "@%p1 min.f32"])
def test_ptx(name: str) -> None:
    assert found(f"\t{name} %r1, %r2, %r3;") == [f"{OWN}: {name} %r1, %r2, %r3;"]
    assert not found(f"\t{name} %r1, %r2, %r3;", mark=ALLOWED)
    assert not found(f"\t{name.replace('.', '.NaN.', 1)} %r1, %r2, %r3;")
    assert not found("\tmax.s32 %r1, %r2, %r3;")


def marks(*callers: str) -> str:
    """A maximum of the library as Triton 3.8 and newer mark it, called from each of these in turn."""
    inside, lines = ", function_name $L__info_string0, inlined_at", []
    for i, caller in enumerate(callers):
        lines += [f"\t.loc\t1 {i} 5 // {OWN}", f"\t.loc\t2 {i} 11{inside} 1 {i} 5 // {caller}"]
        lines += [f"\t.loc\t3 216 16{inside} 2 {i} 11 // standard.py:216:16"]
    return "\n".join([*lines, f"\t.loc\t3 196 12{inside} 3 216 16 // standard.py:196:12"])


def test_ptx_that_names_the_next_caller_only() -> None:
    text = "max.f32 %r1, %r2, %r3;"
    ours, other = f"propagate_nan.py:{LINE}:11", "other_kernel.py:3:11"
    assert not dropping("", f"{marks(ours)}\n\t{text}\n", True, (highest,))
    (one,) = dropping("", f"{marks(other)}\n\t{text}\n", True, (highest,))
    assert one == f"standard.py:196:12 @[ standard.py:216:16, {other}, {OWN} ]: {text}"
    # Either may be meant; the IR knows which.
    both = f"{marks(other, ours)}\n\t{text}\n"
    assert not dropping("", both, True, (highest,))
    operation = '%1 = arith.maxnumf %2, %3 : f32 loc(#loc9)\n#loc9 = loc("/a/other_kernel.py":3:11)'
    assert dropping(operation, both, True, (highest,)) == [f"{other}: {operation.splitlines()[0]}"]


@pytest.mark.parametrize("name", ["v_max_f32_e32 v1, 0, v2", "v_med3_f32 v1, v2, s0, v3", "v_pk_max_f16 v1, v2, v3"])
def test_amdgcn(name: str) -> None:
    assert found(f"\t{name}", nvidia=False) == [f"{OWN}: {name}"]
    assert not found(f"\t{name}", nvidia=False, mark=ALLOWED)
    assert not found(f"\t{name}\n\tv_cmp_u_f32_e32 vcc, v2, v2", nvidia=False)
    assert not found("\tv_max_f32_e32 v1, v2, v2\n\tv_maximum3_f32 v1, v2, v3, v3", nvidia=False)


@pytest.mark.parametrize("lost", ["some_kernel.py:0:37", "some_kernel.py:0"])
def test_a_moved_instruction_is_found_by_the_ir(lost: str) -> None:
    text = "\tmax.f32 %r1, %r2, %r3;"
    assert not found(text, mark=lost)
    operation = "%1 = arith.maxnumf %2, %3 : tensor<4xf32> loc(#loc9)"
    own = '#loc1 = loc("/a/some_kernel.py":12:34)'
    inner = f'#loc2 = loc("/a/propagate_nan.py":{LINE}:11)'
    assert len(found(text, mark=lost, ir=f"{operation}\n{own}\n#loc9 = loc(#loc1)")) == 1
    assert not found(text, mark=lost, ir=f"{operation}\n{own}\n{inner}\n#loc9 = loc(callsite(#loc2 at #loc1))")
