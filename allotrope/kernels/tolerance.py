"""Is an output right? One tolerance table and one comparison, for attention and every other operation.

Owns: the numbers that tests, `verify`, benches and plugin users judge by. Must not know: which engine, kernel or host
produced an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# A row's error is measured against the row's own RMS, but never against less than this part of the whole tensor's:
# a row that cancels to almost nothing has no digits left to compare.
ROW_FLOOR = 5e-2
# Of tens of millions of values a few lie far out by rounding alone: the gated delta rule over 8192 tokens and 32 heads,
# computed exactly but for bf16 operands, has two in a million beyond the peak of bf16, and none beyond twice that.
SPARE = 200_000


@dataclass(frozen=True)
class Tolerance:
    """How far an output of one format may lie from an exact one.

    `dtype`: type that the output must have. `rms`: RMS of the error over RMS of the wanted tensor. `peak`: largest
    error of any value over the RMS of its row (the last dimension); one value in `SPARE` may have twice as much.
    """

    dtype: torch.dtype
    rms: float
    peak: float


TOLERANCES = {
    # Everything in fp32: what remains is the order of summation.
    "fp32": Tolerance(torch.float32, rms=3e-6, peak=1e-4),
    # Inputs, cached rows and output rounded to the type; mathematics in fp32, weights of a fused softmax perhaps not.
    "fp16": Tolerance(torch.float16, rms=6e-4, peak=7e-3),
    "bf16": Tolerance(torch.bfloat16, rms=4e-3, peak=5e-2),
}
KINDS = {tolerance.dtype: kind for kind, tolerance in TOLERANCES.items()}
"""The kind of an output whose cached rows have the output's own type."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; true if nothing is wrong.

    `rms`, `peak`: the largest errors of both kinds. `worst`: index of the peak. `wrong`: every reason to refuse.
    """

    kind: str
    rms: float
    peak: float
    worst: tuple[int, ...]
    wrong: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        found = f"{self.kind}: rms={self.rms:.2e} peak={self.peak:.2e} at {list(self.worst)}"
        return found if not self.wrong else f"{found}: " + "; ".join(self.wrong)


def compare(got: torch.Tensor, want: torch.Tensor, kind: str) -> Comparison:
    """Judge an output: rms = |got - want| / |want|, peak = max |got - want| / RMS of its row of `want`.

    `got`: any shape, the output in question. `want`: same shape, any float type, taken as exact. `kind`: a row of
    `TOLERANCES`. Returns a Comparison; one that could prove nothing (empty, or `want` all zero) is a failed one.
    Raises ValueError if `want` is not finite, KeyError for an unknown kind.
    """
    limit = TOLERANCES[kind]
    wrong = []
    if got.dtype != limit.dtype:
        wrong.append(f"dtype={got.dtype}; wanted {limit.dtype}")
    if got.shape != want.shape:
        wrong.append(f"shape={tuple(got.shape)}; wanted {tuple(want.shape)}")
        return Comparison(kind, float("inf"), float("inf"), (), tuple(wrong))
    exact = want.to(got.device, torch.float64)
    if not exact.isfinite().all():
        raise ValueError("compare: the wanted tensor has values that are not finite")
    scale = exact.square().mean().sqrt()
    if want.numel() == 0 or not scale > 0:
        wrong.append(f"{want.numel()} wanted values, RMS 0: agreement with them proves nothing")
        return Comparison(kind, float("inf"), float("inf"), (), tuple(wrong))
    error = (got.double() - exact).abs()
    lost = int((~error.isfinite()).sum())
    if lost:
        wrong.append(f"{lost} of {error.numel()} values are not finite")
        error = error.nan_to_num(nan=torch.inf)
    row = torch.atleast_1d(exact).square().mean(-1, keepdim=True).sqrt().clamp(min=ROW_FLOOR * scale)
    relative = error.view_as(torch.atleast_1d(exact)) / row
    worst = tuple(int(i) for i in torch.unravel_index(relative.argmax(), relative.shape))
    rms, peak = float(error.square().mean().sqrt() / scale), float(relative[worst])
    spared = int((relative > limit.peak).sum()) <= relative.numel() // SPARE
    for name, found, allowed in (("rms", rms, limit.rms), ("peak", peak, limit.peak * (2 if spared else 1))):
        if not found <= allowed:
            wrong.append(f"{name}={found:.2e}; allowed: {allowed:.0e}")
    return Comparison(kind, rms, peak, worst, tuple(wrong))
