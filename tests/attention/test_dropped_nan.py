"""What reads compiled kernels sees an instruction that drops NaN, and knows whose line it is."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.dropped_nan import dropping
from allotrope.attention.extremes import highest

LINE = inspect.getsourcelines(highest.fn)[1] + 3
OWN = "some_kernel.py:12:34"
ALLOWED = f"standard.py:170:27 @[ extremes.py:{LINE}:11 @[ {OWN} ] ]"


def found(text: str, nvidia: bool = True, mark: str = OWN, ir: str = "") -> list[str]:
    comment = "//" if nvidia else ";"
    return dropping(ir, f"\t.loc\t1 12 34 {comment} {mark}\n{text}\n", nvidia, (highest,))


@pytest.mark.parametrize("name", ["max.f32", "min.ftz.f32", "max.bf16x2", "max.xorsign.abs.f32", "@%p1 min.f32"])
def test_ptx(name: str) -> None:
    assert found(f"\t{name} %r1, %r2, %r3;") == [f"{OWN}: {name} %r1, %r2, %r3;"]
    assert not found(f"\t{name} %r1, %r2, %r3;", mark=ALLOWED)
    assert not found(f"\t{name.replace('.', '.NaN.', 1)} %r1, %r2, %r3;")
    assert not found("\tmax.s32 %r1, %r2, %r3;")


@pytest.mark.parametrize("name", ["v_max_f32_e32 v1, 0, v2", "v_med3_f32 v1, v2, s0, v3", "v_pk_max_f16 v1, v2, v3"])
def test_amdgcn(name: str) -> None:
    assert found(f"\t{name}", nvidia=False) == [f"{OWN}: {name}"]
    assert not found(f"\t{name}", nvidia=False, mark=ALLOWED)
    assert not found(f"\t{name}\n\tv_cmp_u_f32_e32 vcc, v2, v2", nvidia=False)
    assert not found("\tv_max_f32_e32 v1, v2, v2\n\tv_maximum3_f32 v1, v2, v3, v3", nvidia=False)


@pytest.mark.parametrize("lost", ["some_kernel.py:0:37", "some_kernel.py:0"])
def test_a_moved_instruction_is_judged_by_the_ir(lost: str) -> None:
    text = "\tmax.f32 %r1, %r2, %r3;"
    assert not found(text, mark=lost)
    operation = "%1 = arith.maxnumf %2, %3 : tensor<4xf32> loc(#loc9)"
    own = '#loc1 = loc("/a/some_kernel.py":12:34)'
    inner = f'#loc2 = loc("/a/extremes.py":{LINE}:11)'
    assert len(found(text, mark=lost, ir=f"{operation}\n{own}\n#loc9 = loc(#loc1)")) == 1
    assert not found(text, mark=lost, ir=f"{operation}\n{own}\n{inner}\n#loc9 = loc(callsite(#loc2 at #loc1))")
