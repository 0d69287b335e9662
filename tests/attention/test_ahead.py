"""Every kernel compiles for every chip it is meant for, without one being here, within its memory and registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from allotrope.attention.ahead import SHARED_BYTES

# In a process of its own: Triton decides once, at import, whether kernels are compiled or interpreted.
PROGRAM = """
import dataclasses, json, sys
from allotrope.attention.ahead import compile_variant, variants
from allotrope.layers.ahead import MODULES
arch = sys.argv[1]
print(json.dumps([(dataclasses.asdict(compile_variant(v, arch)), v.spills) for v in variants(arch, MODULES)]))
"""

# What newer releases of Triton send to memory, where that is more than variants state, by release, chip and variant.
MORE_SPILLS = {
    ("3.8", "gfx950"): {"mla decode 128 heads scaled picked": 75},
    ("3.9", "gfx950"): {"mla decode 128 heads scaled picked": 74},
    ("3.9", "sm_90"): {
        "mha prefill 32/4 x 512": 24,
        "mla decode 128 heads fp8": 456,
        "mla decode 128 heads scaled picked": 256,
        "dsa top-k first": 40,
        "mxfp4 experts many rows": 48,
        "tiles of experts": 8,
        "draw_truncated": 48,
    },
}


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_every_kernel_compiles_within_the_chip(arch: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, arch], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    more = MORE_SPILLS.get((".".join(triton.__version__.split(".")[:2]), arch), {})
    wrong = [
        one
        for one, spills in found
        if one["shared"] > SHARED_BYTES[arch] or one["spills"] > max(spills, more.get(one["name"], 0))
    ]
    assert not wrong, wrong
    disorderly = [one["name"] for one, _ in found if not one["orderly"]]
    assert not disorderly, disorderly
    dropped = {one["name"]: one["dropped"] for one, _ in found if one["dropped"]}
    assert not dropped, dropped
    late = {one["name"] for one, _ in found if not one["early"]}
    assert late == {"gdn scan", "gdn scan by channel"}
