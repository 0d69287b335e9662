"""Every kernel compiles for every chip it is meant for, without one being here, within its memory and registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from allotrope.kernels.chip import CHIPS

# In a process of its own: Triton decides once, at import, whether kernels are compiled or interpreted.
PROGRAM = """
import dataclasses, json, sys
from allotrope.kernels.aot import examine
from allotrope.kernels.chip import CHIPS
from allotrope.kernels.registry import every_specialization
chip = CHIPS[sys.argv[1]]
print(json.dumps([(dataclasses.asdict(examine(one, chip)), one.spills) for one in every_specialization(chip)]))
"""

# Spills of newer releases of Triton, where they are more than specializations state: by release, chip and name.
MORE_SPILLS = {
    ("3.8", "gfx950"): {"mla decode 128 heads block-scaled sparse": 75},
    ("3.9", "gfx950"): {"mla decode 128 heads block-scaled sparse": 74},
    ("3.9", "sm_90"): {
        "mha prefill 32/4 x 512": 24,
        "mla decode 128 heads fp8": 456,
        "mla decode 128 heads block-scaled sparse": 256,
        "dsa top-k first": 40,
        "mxfp4 experts many rows": 48,
        "tiles of experts": 8,
        "draw_truncated": 48,
    },
}


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
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
        if one["shared"] > CHIPS[arch].shared_memory or one["spills"] > max(spills, more.get(one["name"], 0))
    ]
    assert not wrong, wrong
    unordered = [one["name"] for one, _ in found if not one["waits_first"]]
    assert not unordered, unordered
    dropped = {one["name"]: one["dropped"] for one, _ in found if one["dropped"]}
    assert not dropped, dropped
    without_pdl = {one["name"] for one, _ in found if not one["pdl"]}
    assert without_pdl == {"gdn chunk scan", "gdn chunk scan by channel"}
