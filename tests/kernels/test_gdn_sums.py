"""Verify steps of GDN have the bits of plain decoding: their kernels add in one order, and round what is stated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# The interpreter compiles nothing.
PROGRAM = """
import json, sys
from allotrope.attention.gdn import triton_decode, triton_verify
from allotrope.kernels.aot import compile_for_chip
from allotrope.kernels.chip import CHIPS

chip = CHIPS[sys.argv[1]]
made = (*triton_decode.released(chip), *triton_verify.released(chip))
print(json.dumps({one.name: compile_for_chip(one, chip).asm["ttgir"] for one in made}))
"""


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_decode_and_verify_have_the_same_sums(arch: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, arch], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    layouts: dict[str, set[str]] = {}
    for name, code in json.loads(done.stdout.splitlines()[-1]).items():
        sums = re.findall(r'"tt\.reduce"\((%[\w#]+)\)', code)
        assert sums, name
        # Of two products that are added the compiler may round either.
        products = {one for one in sums if re.search(rf"{re.escape(one)} = arith\.mulf", code)}
        assert not products, (name, products)
        aliases = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
        found = re.findall(r"\}\) : \(tensor<(\S+), (?:#ttg\.slice<.*?parent = )?(#\w+)", code)
        layouts[name] = {f"{shape} {aliases[layout]}" for shape, layout in found}
    decode, verify = layouts["gdn decode"], layouts["gdn verify"] | layouts["gdn verify tokens"]
    assert decode == verify
    assert (
        layouts["gdn decode by channel"] == layouts["gdn verify by channel"] | layouts["gdn verify tokens by channel"]
    )
