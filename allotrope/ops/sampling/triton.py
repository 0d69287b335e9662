"""`reference.choose` for a GPU: the same tokens, without sorting the vocabulary and without waiting for the device.

A row is read in segments by many programs, then decided by one. Everything that a token depends on is a sum of integer
weights, so that the order of addition cannot matter. A cut in the order of tokens (the k-th, the end of a nucleus, the
token drawn) is found by halving the range of logits: weights fall with the logit, and equal logits have equal weights,
so that among those only their number is needed. The halving looks at candidates alone: tokens above the first of a few
logits, the same for every row relative to its best, that has enough above it. Where even those are too many to be
written out, it looks at the whole row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2
from allotrope.ops.logprobs.triton import NOTHING, SEGMENT, key_of, logit_of
from allotrope.ops.sampling.spec import RandomRows, SamplingStep

# Candidates of a row that are written out.
ROOM = 32768
# Tokens that one program holds.
CHUNK = 4096
EDGES = 8
_UNIT = tl.constexpr(2.0**40)
_LEAST_TEMPERATURE = tl.constexpr(1e-30)
# Below the best by this many temperatures a token weighs nothing: exp(-28) < 2^-40.
_REACH = tl.constexpr(28.0)
_ABSENT = tl.constexpr(-0x80000000)


@triton.jit
def _weight(z, peak, temperature):
    """floor(2^40 exp((z - peak) / temperature)), int64."""
    scaled = tl.div_rn(z - peak, at_least(temperature, _LEAST_TEMPERATURE))
    return (tl.exp(scaled) * _UNIT).to(tl.int64)


@triton.jit
def _peak(peaks, row, segments, SEGMENTS: tl.constexpr):
    """A row's best token as `key * 2^32 + (vocab - 1 - id)`, from what `peaks_kernel` left of each segment."""
    segment = tl.arange(0, SEGMENTS)
    found = tl.load(peaks + row * segments + segment, mask=segment < segments, other=NOTHING)
    return tl.max(found, axis=0)


@pdl_jit
def peaks_kernel(logits, peaks, vocab, row_stride, segments, SEGMENT: tl.constexpr):
    """Best token of each segment of each row: the larger key, then the lower id."""
    gdc_wait()
    gdc_launch_dependents()
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    mask = column < vocab
    z = tl.load(logits + row * row_stride + column, mask=mask, other=-float("inf"))
    packed = tl.where(mask, key_of(z).to(tl.int64) * 4294967296 + (vocab - 1 - column), NOTHING)
    tl.store(peaks + row * segments + segment, tl.max(packed, axis=0))


@pdl_jit
def greedy_kernel(peaks, out, vocab, segments, SEGMENTS: tl.constexpr):
    """The best token of every row; -1 where its logit is not finite."""
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    packed = _peak(peaks, row, segments, SEGMENTS)
    best = logit_of((packed >> 32).to(tl.int32))
    good = tl.abs(best) < float("inf")
    tl.store(out + row, tl.where(good, vocab - 1 - (packed & 0xFFFFFFFF), -1))


@pdl_jit
def untruncated_masses_kernel(
    logits, peaks, rows, temperature, min_p, masses, vocab, row_stride, segments,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Weight of each segment after min-p, [N, segments]."""
    gdc_wait()
    gdc_launch_dependents()
    n, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + n)
    peak = logit_of((_peak(peaks, row, segments, SEGMENTS) >> 32).to(tl.int32))
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    z = tl.load(logits + row * row_stride + column, mask=column < vocab, other=-float("inf"))
    weight = _weight(z, peak, tl.load(temperature + n))
    if MIN_P:
        weight = tl.where(weight.to(tl.float64) >= tl.load(min_p + n) * _UNIT, weight, 0)
    tl.store(masses + n * segments + segment, tl.sum(weight, axis=0))


@pdl_jit
def draw_untruncated_kernel(
    logits, peaks, rows, temperature, min_p, uniform, masses, out, vocab, row_stride, segments,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """The first token, by id, at which the sum of weights passes `uniform` of the whole."""
    gdc_wait()
    gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    peak = logit_of((_peak(peaks, row, segments, SEGMENTS) >> 32).to(tl.int32))
    if tl.abs(peak) < float("inf"):
        index = tl.arange(0, SEGMENTS)
        mass = tl.load(masses + n * segments + index, mask=index < segments, other=0)
        target = (tl.load(uniform + n) * tl.sum(mass, axis=0).to(tl.float64)).to(tl.int64)
        behind = tl.cumsum(mass, axis=0)
        segment = tl.minimum(tl.sum((behind <= target).to(tl.int32), axis=0), segments - 1)
        before = tl.sum(tl.where(index < segment, mass, 0), axis=0)
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        z = tl.load(logits + row * row_stride + column, mask=column < vocab, other=-float("inf"))
        weight = _weight(z, peak, tl.load(temperature + n))
        if MIN_P:
            weight = tl.where(weight.to(tl.float64) >= tl.load(min_p + n) * _UNIT, weight, 0)
        passed = before + tl.cumsum(weight, axis=0) <= target
        chosen = segment * SEGMENT + tl.sum(passed.to(tl.int32), axis=0)
        tl.store(out + row, tl.minimum(chosen, vocab - 1).to(tl.int64))


@triton.jit
def _edge(peak, temperature, j, EDGES: tl.constexpr):
    """Key of the j-th logit that candidates may begin at: near the best closer together, the last at `_REACH`."""
    part = (tl.full([], 1, tl.float32) + j) / EDGES
    return key_of(peak - _REACH * part * tl.sqrt(part) * at_least(temperature, _LEAST_TEMPERATURE))


@pdl_jit
def edges_kernel(
    logits, peaks, rows, temperature, edges, counts, masses, vocab, row_stride, segments,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Keys of the edges, [N, EDGES]; number and weight of each segment's tokens at or above, [N, segments, EDGES]."""
    gdc_wait()
    gdc_launch_dependents()
    n, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + n)
    peak = logit_of((_peak(peaks, row, segments, SEGMENTS) >> 32).to(tl.int32))
    row_temperature = tl.load(temperature + n)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    mask = column < vocab
    z = tl.load(logits + row * row_stride + column, mask=mask, other=-float("inf"))
    key, weight = tl.where(mask, key_of(z), _ABSENT), _weight(z, peak, row_temperature)
    index = (n * segments + segment) * EDGES
    for j in range(EDGES):
        edge = _edge(peak, row_temperature, j, EDGES)
        above = key >= edge
        tl.store(edges + n * EDGES + j, edge, mask=segment == 0)
        tl.store(counts + index + j, tl.sum(above.to(tl.int32), axis=0))
        tl.store(masses + index + j, tl.sum(tl.where(above, weight, 0), axis=0))


@triton.jit
def _table(counts, masses, n, segments, SEGMENTS: tl.constexpr, EDGES: tl.constexpr):
    """Number and weight of a row's tokens at or above each edge, two vectors."""
    index = (n * segments + tl.arange(0, SEGMENTS)[:, None]) * EDGES + tl.arange(0, EDGES)[None, :]
    mask = (tl.arange(0, SEGMENTS) < segments)[:, None]
    count = tl.sum(tl.load(counts + index, mask=mask, other=0), axis=0)
    return count, tl.sum(tl.load(masses + index, mask=mask, other=0), axis=0)


@triton.jit
def _enough(count, mass, k, p, EDGES: tl.constexpr):
    """The first edge with enough above it, and how many tokens those are."""
    short = tl.where(k > 0, count < k, mass < _needed(tl.max(mass, axis=0), p))
    edge = tl.minimum(tl.sum(short.to(tl.int32), axis=0), EDGES - 1)
    return edge, tl.sum(tl.where(tl.arange(0, EDGES) == edge, count, 0), axis=0)


@triton.jit
def _needed(total, p):
    """Weight that a nucleus must have; the product may round up beyond the whole."""
    return tl.minimum(tl.ceil(total.to(tl.float64) * p).to(tl.int64), total)


@pdl_jit
def candidates_kernel(
    logits, top_k, top_p, rows, edges, counts, masses, found, vocab, row_stride, segments,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, EDGES: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write out the tokens at or above the edge that has enough, by id, as `key * 2^32 + id`: `found` [N, ROOM]."""
    gdc_wait()
    gdc_launch_dependents()
    n, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, mass = _table(counts, masses, n, segments, SEGMENTS, EDGES)
    edge, size = _enough(count, mass, tl.load(top_k + n), tl.load(top_p + n), EDGES)
    index = tl.arange(0, SEGMENTS)
    each = tl.load(counts + (n * segments + index) * EDGES + edge, mask=index <= segment, other=0)
    start = tl.sum(tl.where(index < segment, each, 0), axis=0)
    if (size <= ROOM) & (tl.sum(each, axis=0) > start):
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        mask = column < vocab
        z = tl.load(logits + tl.load(rows + n) * row_stride + column, mask=mask, other=-float("inf"))
        key = tl.where(mask, key_of(z), _ABSENT)
        above = key >= tl.load(edges + n * EDGES + edge)
        to = start + tl.cumsum(above.to(tl.int32), axis=0) - 1
        tl.store(found + n * ROOM + to, key.to(tl.int64) * 4294967296 + column, mask=above)


@triton.jit
def _load_chunk(start, found, chunk, size, written, vocab, CHUNK: tl.constexpr):
    """Keys and ids of some tokens, by id: of the candidates, or of the row where they are not written out."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    if written:
        packed = tl.load(found + index, mask=index < size, other=NOTHING)
        key, ids = packed >> 32, (packed & 0xFFFFFFFF).to(tl.int32)
    else:
        z = tl.load(start + index, mask=index < vocab, other=-float("inf"))
        key, ids = tl.where(index < vocab, key_of(z), _ABSENT).to(tl.int64), index
    return key, ids


@triton.jit
def _key_weight(key, peak, temperature):
    return _weight(logit_of(tl.maximum(key, _ABSENT + 0x7FFFFF).to(tl.int32)), peak, temperature)


@triton.jit
def _step(key, weight, middle, low, high):
    """Number and weight of the keys at or above `middle`, the least of them, and the largest below."""
    above = key >= middle
    count = tl.sum(above.to(tl.int32), axis=0).to(tl.int64)
    mass = tl.sum(tl.where(above, weight, 0), axis=0)
    least = tl.min(tl.where(above, key, high), axis=0)
    return count, mass, least, tl.max(tl.where(above, low, key), axis=0)


@triton.jit
def _cut(
    start, found, spare, chunks, size, written, vocab, peak, temperature, best, edge, count_of, mass_of, goal,
    CHUNK: tl.constexpr, EDGES: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The largest key that has at least `goal` tokens, or weight, at or above it; the last edge must have enough.

    Begins between two edges and halves the range, whose ends then move on to keys that there are: over all tokens until
    those in the range are few, then over these alone. Returns the key, and number and weight of the tokens above it.
    """
    each = tl.arange(0, EDGES)
    short = (mass_of < goal) if BY_MASS else (count_of < goal)
    first = tl.minimum(tl.sum(short.to(tl.int32), axis=0), EDGES - 1)
    low = tl.sum(tl.where(each == first, edge, 0), axis=0)
    high = tl.where(first > 0, tl.sum(tl.where(each == first - 1, edge, 0), axis=0), best + 1)
    over = tl.sum(tl.where(each == first - 1, count_of, 0), axis=0).to(tl.int64)
    over_mass = tl.sum(tl.where(each == first - 1, mass_of, 0), axis=0)
    under = tl.sum(tl.where(each == first, count_of, 0), axis=0).to(tl.int64)
    while (under - over > CHUNK) & (high - low > 1):
        middle = low + (high - low) // 2
        count, mass = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        least, below = high, low
        for chunk in range(chunks):
            key, _ = _load_chunk(start, found, chunk, size, written, vocab, CHUNK)
            more, heavier, nearest, next_below = _step(key, _key_weight(key, peak, temperature), middle, low, high)
            count, mass = count + more, mass + heavier
            least, below = tl.minimum(least, nearest), tl.maximum(below, next_below)
        enough = (mass >= goal) if BY_MASS else (count >= goal)
        low, high = tl.where(enough, least, low), tl.where(enough, high, below + 1)
        under = tl.where(enough, count, under)
        over, over_mass = tl.where(enough, over, count), tl.where(enough, over_mass, mass)
    if high - low > 1:
        filled = tl.full([], 0, tl.int32)
        tl.debug_barrier()
        for chunk in range(chunks):
            key, _ = _load_chunk(start, found, chunk, size, written, vocab, CHUNK)
            ours = (key >= low) & (key < high)
            tl.store(spare + filled + tl.cumsum(ours.to(tl.int32), axis=0) - 1, key.to(tl.int32), mask=ours)
            filled += tl.sum(ours.to(tl.int32), axis=0)
        tl.debug_barrier()
        index = tl.arange(0, CHUNK)
        key = tl.load(spare + index, mask=index < filled, other=_ABSENT).to(tl.int64)
        weight = tl.where(index < filled, _key_weight(key, peak, temperature), 0)
        base, base_mass = over, over_mass
        while high - low > 1:
            count, mass, least, below = _step(key, weight, low + (high - low) // 2, low, high)
            count, mass = count + base, mass + base_mass
            enough = (mass >= goal) if BY_MASS else (count >= goal)
            low, high = tl.where(enough, least, low), tl.where(enough, high, below + 1)
            over, over_mass = tl.where(enough, over, count), tl.where(enough, over_mass, mass)
    return low, over, over_mass


@pdl_jit
def draw_truncated_kernel(
    logits, peaks, rows, temperature, top_k, top_p, min_p, uniform, edges, counts, masses, found, spare, out,
    vocab, row_stride, segments,
    SEGMENTS: tl.constexpr, EDGES: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens that top-k, top-p and min-p leave, laid out by falling logit and then by id."""
    gdc_wait()
    gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    best = _peak(peaks, row, segments, SEGMENTS) >> 32
    peak, row_temperature = logit_of(best.to(tl.int32)), tl.load(temperature + n)
    if tl.abs(peak) < float("inf"):
        k, p = tl.load(top_k + n), tl.load(top_p + n)
        count_of, mass_of = _table(counts, masses, n, segments, SEGMENTS, EDGES)
        edge = tl.load(edges + n * EDGES + tl.arange(0, EDGES)).to(tl.int64)
        size = _enough(count_of, mass_of, k, p, EDGES)[1]
        written = size <= ROOM
        chunks = tl.cdiv(tl.where(written, size, vocab), CHUNK)
        start, found, spare = logits + row * row_stride, found + n * ROOM, spare + n * CHUNK
        total = tl.max(mass_of, axis=0)
        if (k > 0) & (tl.max(count_of, axis=0) > k):
            key, above, mass = _cut(
                start, found, spare, chunks, size, written, vocab, peak, row_temperature, best, edge,
                count_of, mass_of, k,
                CHUNK, EDGES, False,
            )  # fmt: skip
            total = mass + (k - above) * _key_weight(key, peak, row_temperature)
        if p < 1.0:
            needed = _needed(total, p)
            key, above, mass = _cut(
                start, found, spare, chunks, size, written, vocab, peak, row_temperature, best, edge,
                count_of, mass_of, needed,
                CHUNK, EDGES, True,
            )  # fmt: skip
            # The nucleus ends with the token that brings the weight to `needed`.
            own = _key_weight(key, peak, row_temperature)
            total = mass + tl.cdiv(needed - mass, tl.maximum(own, 1)) * own
        if MIN_P:
            least, kept = tl.load(min_p + n) * _UNIT, tl.full([], 0, tl.int64)
            for chunk in range(chunks):
                keys = _load_chunk(start, found, chunk, size, written, vocab, CHUNK)[0]
                weight = _key_weight(keys, peak, row_temperature)
                kept += tl.sum(tl.where(weight.to(tl.float64) >= least, weight, 0), axis=0)
            total = tl.minimum(total, kept)
        target = (tl.load(uniform + n) * total.to(tl.float64)).to(tl.int64)
        key, above, mass = _cut(
            start, found, spare, chunks, size, written, vocab, peak, row_temperature, best, edge,
            count_of, mass_of, target + 1,
            CHUNK, EDGES, True,
        )  # fmt: skip
        # Among tokens of one logit, the one by id at which the weight passes the target.
        wanted = (target - mass) // tl.maximum(_key_weight(key, peak, row_temperature), 1)
        passed, chosen = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        for chunk in range(chunks):
            keys, ids = _load_chunk(start, found, chunk, size, written, vocab, CHUNK)
            equal = keys == key
            order = passed + tl.cumsum(equal.to(tl.int32), axis=0) - 1
            chosen += tl.sum(tl.where(equal & (order == wanted), ids, 0), axis=0)
            passed += tl.sum(equal.to(tl.int32), axis=0)
        tl.store(out + row, chosen)


def choose(logits: torch.Tensor, step: SamplingStep) -> torch.Tensor:
    """As `reference.choose`; rows have any stride."""
    logits = logits.float()
    size, vocab = logits.shape
    assert logits.stride(1) == 1
    segments = cdiv(vocab, SEGMENT)
    shape = {"SEGMENTS": next_power_of_2(segments)}
    peaks = logits.new_empty((size, segments), dtype=torch.int64)
    out = logits.new_empty(size, dtype=torch.int64)
    row = (vocab, logits.stride(0), segments)
    peaks_kernel[(size, segments)](logits, peaks, *row, SEGMENT=SEGMENT, num_warps=8)
    greedy_kernel[(size,)](peaks, out, vocab, segments, **shape, num_warps=1)
    if step.untruncated is not None:
        _draw_untruncated(logits, peaks, step.untruncated, out, row, shape)
    if step.truncated is not None:
        _draw_truncated(logits, peaks, step.truncated, out, row, shape)
    return out


def _draw_untruncated(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    random: RandomRows,
    out: torch.Tensor,
    row: tuple[int, int, int],
    shape: dict[str, int],
) -> None:
    count, segments = len(random.rows), row[2]
    masses = peaks.new_empty((count, segments))
    min_p = random.uniform if random.min_p is None else random.min_p
    shape = shape | {"SEGMENT": SEGMENT, "MIN_P": random.min_p is not None}
    untruncated_masses_kernel[(count, segments)](
        logits, peaks, random.rows, random.temperature, min_p, masses, *row, **shape, num_warps=8
    )
    draw_untruncated_kernel[(count,)](
        logits, peaks, random.rows, random.temperature, min_p, random.uniform, masses, out, *row, **shape, num_warps=8
    )


def _draw_truncated(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    random: RandomRows,
    out: torch.Tensor,
    row: tuple[int, int, int],
    shape: dict[str, int],
) -> None:
    count, segments = len(random.rows), row[2]
    edges = torch.empty((count, EDGES), dtype=torch.int32, device=logits.device)
    counts = torch.empty((count, segments, EDGES), dtype=torch.int32, device=logits.device)
    masses = peaks.new_empty((count, segments, EDGES))
    found = peaks.new_empty((count, ROOM))
    spare = counts.new_empty((count, CHUNK))
    shape = shape | {"EDGES": EDGES}
    edges_kernel[(count, segments)](
        logits, peaks, random.rows, random.temperature, edges, counts, masses, *row,
        SEGMENT=SEGMENT, **shape, num_warps=8,
    )  # fmt: skip
    candidates_kernel[(count, segments)](
        logits, random.top_k, random.top_p, random.rows, edges, counts, masses, found, *row,
        SEGMENT=SEGMENT, ROOM=ROOM, **shape, num_warps=8,
    )  # fmt: skip
    min_p = random.uniform if random.min_p is None else random.min_p
    draw_truncated_kernel[(count,)](
        logits, peaks, random.rows, random.temperature, random.top_k, random.top_p, min_p, random.uniform,
        edges, counts, masses, found, spare, out, *row,
        ROOM=ROOM, CHUNK=CHUNK, MIN_P=random.min_p is not None, **shape, num_warps=16,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """The choice from a vocabulary of 128k."""
    kinds = dict.fromkeys(("logits", "temperature", "sums"), "*fp32")
    kinds |= dict.fromkeys(("top_p", "min_p", "uniform"), "*fp64")
    kinds |= dict.fromkeys(("edges", "counts", "spare"), "*i32")
    kinds |= dict.fromkeys(("vocab", "row_stride", "segments"), "i32")
    sizes = {
        "SEGMENT": SEGMENT,
        "SEGMENTS": 32,
        "EDGES": EDGES,
        "ROOM": ROOM,
        "CHUNK": CHUNK,
        "MIN_P": True,
    }
    made = []
    for kernel, warps in (
        (peaks_kernel, 8),
        (greedy_kernel, 1),
        (untruncated_masses_kernel, 8),
        (draw_untruncated_kernel, 8),
        (edges_kernel, 8),
        (candidates_kernel, 8),
        (draw_truncated_kernel, 16),
    ):
        constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
        signature = {name: kinds.get(name, "*i64") for name in kernel.arg_names if name not in sizes}
        # Triton 3.7 puts some of the longest kernel's numbers on the stack.
        stack = 32 if kernel is draw_truncated_kernel else 0
        made.append(
            Specialization(kernel.__name__.removesuffix("_kernel"), kernel, signature, constants, warps, 1, stack)
        )
    return made
