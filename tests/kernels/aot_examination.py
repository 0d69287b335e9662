"""Compiling every kernel for chips that are not here: what tests hold each compiled kernel to.

Chips of one call are compiled by one process, the first one whole. Of a later one, a specialization that is launched
as on the first is held to the later chip's shared memory by what the first one's compiler said, and not compiled again.
So it is for sm_89 after sm_80: both have mma.sync and cp.async and no copy engine, and the PTX that Triton 3.6 makes
for them differs in nothing but its target. What has FP8 numbers, and what is launched in another way, is compiled for
sm_89 itself. sm_100 and sm_120 are compiled whole: products become tcgen05 on one, and tiles are copied by TMA on both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import triton

from allotrope.kernels.chip import CHIPS

# In a process of its own: Triton decides once, at import, whether kernels are compiled or interpreted.
PROGRAM = """
import dataclasses, json, sys
from allotrope.kernels.aot import examine
from allotrope.kernels.chip import CHIPS
from allotrope.kernels.registry import every_specialization
first, found = {}, {}
for arch in sys.argv[1:]:
    chip, found[arch] = CHIPS[arch], []
    for one in every_specialization(chip):
        launched = (one.kernel, dict(one.signature), dict(one.constants), one.num_warps, one.num_stages)
        same = one.name in first and first[one.name][0] == launched
        made = first[one.name][1] if same else dataclasses.asdict(examine(one, chip))
        first.setdefault(one.name, (launched, made))
        found[arch].append((made, one.spills))
print(json.dumps(found))
"""

TIMED = [("sm_90",), ("gfx942",), ("gfx950",)]
"""Chips that specializations state their spills for."""
UNTIMED = [("sm_80", "sm_89"), ("sm_100",), ("sm_120",)]

# Spills of chips on which no kernel has been timed, where they are more than specializations state: by chip and name.
# Nothing was traded for them, they are what the compiler needs for launches that fit.
UNTIMED_SPILLS: dict[str, dict[str, int]] = {
    "sm_80": {
        "gdn wy by channel": 2480,
        "gdn verify tokens": 8,
        "mxfp4 experts many rows": 424,
        "fp32 experts few rows gated": 8,
        "int4 many rows": 224,
        "int4 experts many rows": 264,
        "int4 experts many rows gated": 24,
        "all-reduce one-shot 7168 of 8": 8,
        "all-reduce two-shot 7168 of 8": 24,
        "all-reduce one-shot 2880 of 4": 8,
    },
    "sm_89": {
        "mha decode 64/8 x 128 fp8": 8,
        "int4 many rows": 248,
        "int4 experts many rows": 304,
        "int4 experts many rows gated": 40,
    },
    "sm_100": {"gdn verify by channel": 8, "mla decode 128 heads block-scaled sparse": 24},
    "sm_120": {
        "mla decode 128 heads block-scaled sparse": 32,
        "fp8 many rows": 24,
        "fp8 experts many rows gated": 24,
        "mxfp4 experts many rows": 160,
        "rope store 128 interleaved": 8,
        "int4 many rows": 384,
        "int4 experts many rows": 312,
        "int4 experts many rows gated": 88,
        "all-reduce one-shot 7168 of 8": 32,
    },
}

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


def hold_kernels_to_chips(archs: tuple[str, ...]) -> None:
    """Every kernel compiles for these chips within shared memory and stated spills, in PDL order, and keeps NaN."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *archs], env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    by_chip = json.loads(done.stdout.splitlines()[-1])
    assert list(by_chip) == list(archs)
    for arch, found in by_chip.items():
        assert found
        more = UNTIMED_SPILLS.get(arch, {}) | MORE_SPILLS.get((".".join(triton.__version__.split(".")[:2]), arch), {})
        too_large = [one for one, _ in found if one["shared"] > CHIPS[arch].shared_memory]
        assert not too_large, too_large
        spilled = [
            one
            for one, spills in found
            if one["arch"] == arch and one["spills"] > max(spills, more.get(one["name"], 0))
        ]
        assert not spilled, spilled
        unordered = [one["name"] for one, _ in found if not one["waits_first"]]
        assert not unordered, unordered
        dropped = {one["name"]: one["dropped"] for one, _ in found if one["dropped"]}
        assert not dropped, dropped
        without_pdl = {one["name"] for one, _ in found if not one["pdl"]}
        assert without_pdl == {"gdn chunk scan", "gdn chunk scan by channel"}
