"""Pages at the far end of a pool of 100 GB give the bits of pages at its near end, and the reference's numbers.

Each family at 131,072 tokens: prompts, chunks behind a long context, decodes, and decodes in graphs. Without a GPU the
pool is addresses alone, of which a few pages are touched: Triton's interpreter computes short sequences at offsets that
numbers of 32 bits cannot hold, as a GPU would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from far_ends import BYTES, ELEMENTS, CapturedDecode, Layer, Member, TooSmall, difference, hold_topk, make_pool

from allotrope.attention.check import Case, compare
from allotrope.attention.csa import cases as csa
from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.csa.spec import IndexerSpec as CsaIndexer
from allotrope.attention.dsa import cases as dsa
from allotrope.attention.dsa.spec import DsaSpec, IndexerSpec
from allotrope.attention.gdn import cases as gdn
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.mha import cases as mha
from allotrope.attention.mha import triton_prefill
from allotrope.attention.mha.inputs import MhaInputs
from allotrope.attention.mha.spec import MhaSpec
from allotrope.attention.mla import cases as mla
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.kernels.chip import chip_of, free_memory
from allotrope.ops.rope import RopeSpec

GPU = DEVICE == "cuda"
POOL_BYTES = 100 * 10**9
# Of a GPU, for inputs and outputs, and what the reference takes.
SPARE_BYTES = 32 * 10**9
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Sizes:
    """`context`: tokens of the long sequence in the end. `chunk`: those of a step that fills its pages. `prompt`: those
    of one of the prompts that fill them where entries do not depend on what came before. `long_chunk`, `short_chunk`:
    new tokens behind a long context, many and few. `shorts`: tokens of the other sequences. `page`: tokens a page.
    """

    context: int
    chunk: int
    prompt: int
    long_chunk: int
    short_chunk: int
    shorts: tuple[int, int]
    page: int


# The interpreter takes seconds for what the GPU does at once.
SIZES = Sizes(131_072, 16_384, 4096, 256, 5, (300, 77), 64) if GPU else Sizes(45, 24, 16, 5, 2, (9, 7), 8)


@dataclass(frozen=True)
class Given:
    """A layer. `spec`, `draw`: of a GPU's sizes or of the interpreter's. `scales`: of FP8 entries. `prompts`: whether
    its entries do not depend on the tokens before, so that short prompts fill the pages of a long one. `small`: fields
    of which a pool of 100 GB has less than 2^31 elements or 2^32 bytes. `by_page`: as in `Layer`. `apart`: keys are
    stored by a kernel of their own, and prefill reads pages, without scratch.
    """

    spec: Any
    draw: Callable[..., Any]
    scales: dict[str, float] = field(default_factory=dict)
    prompts: bool = False
    small: frozenset[str] = frozenset()
    by_page: bool = False
    apart: bool = False


def mha_layer(heads: int, groups: int, dim: int, **options: Any) -> MhaSpec:
    sizes = {"num_heads": heads, "num_kv_heads": groups, "head_dim": dim} if GPU else {
        "num_heads": 4, "num_kv_heads": 1, "head_dim": 32
    }  # fmt: skip
    return MhaSpec(**{"scale": sizes["head_dim"] ** -0.5, "kv_dtype": BF16} | sizes | options)


def mla_layer(heads: int, **options: Any) -> MlaSpec:
    heads, latent, rope, nope, values = (heads, 512, 64, 128, 128) if GPU else (2, 128, 16, 32, 32)
    return MlaSpec(
        **{"num_heads": heads, "latent_dim": latent, "rope_dim": rope, "nope_dim": nope, "v_head_dim": values}
        | {"scale": (nope + rope) ** -0.5, "kv_dtype": BF16} | options
    )  # fmt: skip


def dsa_layer(heads: int, key_format: str, **options: Any) -> DsaSpec:
    indexer = IndexerSpec(num_heads=64 if GPU else 8, head_dim=128 if GPU else 16, key_format=key_format)
    return DsaSpec(mla=mla_layer(heads, **options), topk=2048 if GPU else 8, indexer=indexer)


def gdn_layer(key_heads: int, value_heads: int, dim: int, **options: Any) -> GdnSpec:
    if not GPU:
        key_heads, value_heads = 1, 2
    return GdnSpec(
        num_k_heads=key_heads, num_v_heads=value_heads, k_head_dim=dim, v_head_dim=dim, conv_width=4, conv_dtype=BF16,
        **options,
    )  # fmt: skip


def csa_layer(ratio: int, **options: Any) -> CsaSpec:
    heads, dim, window, rope = (16, 512, 128, 64) if GPU else (2, 80, 9, 16)
    return CsaSpec(
        **{"num_heads": heads, "head_dim": dim, "scale": dim**-0.5, "window": window, "ratio": ratio, "kv_dtype": BF16}
        | {"rope": RopeSpec(dim=rope, theta=10000.0, interleaved=True)} | options
    )  # fmt: skip


CHOOSING = {
    "overlap": True,
    "indexer": CsaIndexer(num_heads=64 if GPU else 8, head_dim=128 if GPU else 16, topk=512 if GPU else 4),
}
SCALED = {"kv_dtype": FP8, "row_format": "scaled"}
KV_SCALES = {"k_scale": 0.02, "v_scale": 0.015625}

LAYERS: dict[str, Callable[[], Given]] = {
    "mha": lambda: Given(mha_layer(16, 2, 128), mha.draw),
    "mha-window-sinks": lambda: Given(
        mha_layer(16, 2, 64, window=128 if GPU else 17, sinks=True), mha.draw, by_page=True
    ),
    "mha-fp8": lambda: Given(mha_layer(16, 2, 128, kv_dtype=FP8), mha.draw, KV_SCALES),
    "mha-pages": lambda: Given(mha_layer(16, 2, 128), mha.draw, prompts=True, apart=True),
    "mla": lambda: Given(mla_layer(16), mla.draw),
    "mla-64-heads": lambda: Given(mla_layer(64), mla.draw, prompts=True),
    "mla-fp8": lambda: Given(mla_layer(16, kv_dtype=FP8), mla.draw, {"kv_scale": 0.02}, prompts=True, by_page=True),
    "mla-scaled": lambda: Given(mla_layer(64, **SCALED), mla.draw, prompts=True),
    "dsa": lambda: Given(dsa_layer(16, "plain"), dsa.draw, prompts=True),
    "dsa-scaled": lambda: Given(
        dsa_layer(64, "scaled", **SCALED), dsa.draw, prompts=True, small=frozenset({"index.factor"} if GPU else ())
    ),
    # A state of the released size takes nearly all of a slot, and the convolution's inputs the rest.
    "gdn": lambda: Given(
        gdn_layer(16, 32, 128 if GPU else 32), gdn.draw, small=frozenset({"state.conv"} if GPU else ())
    ),
    "gdn-by-page": lambda: Given(gdn_layer(16, 32, 128 if GPU else 32), gdn.draw, by_page=True),
    "gdn-small-states": lambda: Given(gdn_layer(16, 16, 16, channel_decay=True), gdn.draw),
    "csa-chosen": lambda: Given(csa_layer(4, **CHOOSING), csa.draw),
    "csa-all": lambda: Given(csa_layer(128 if GPU else 8), csa.draw, by_page=True),
    "csa-scaled": lambda: Given(
        csa_layer(4, **CHOOSING, **SCALED),
        csa.draw,
        small=frozenset({"window.factors", "compressed.factors"}),
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[torch.Tensor]:
    """The bytes that all families share, one after the other; as many as a smaller GPU has room for."""
    device, size = torch.device(DEVICE), POOL_BYTES
    if GPU:
        torch.cuda.empty_cache()
        free = free_memory(device)
        size = min(size, free - SPARE_BYTES)
        if size <= BYTES:
            pytest.skip(f"{free} bytes of the GPU are free; {BYTES + SPARE_BYTES} are needed")
    try:
        made = make_pool(size, device)
    except OSError as error:
        pytest.skip(f"{size} bytes of addresses are refused: {error}")
    yield made
    if GPU:
        # Other tests need the room, and whoever asked for the pool may still hold it.
        made.untyped_storage().resize_(0)
        torch.cuda.empty_cache()


class Run:
    """Both ends through every phase, and all that is wrong with them."""

    def __init__(self, name: str, layer: Layer) -> None:
        self.name, self.layer = name, layer
        self.wrong: list[str] = []

    def step(self, phase: str, members: list[Member], *, compared: bool, at: Any = None) -> None:
        """One step at both ends, by `at` (default: the layer). `compared`: against the reference as well."""
        take = (at or self.layer).step
        before = self.layer.snapshot() if compared else {}
        near, far = (take(end, members) for end in ("near", "far"))
        for what, one, other in zip(("output", "top-k"), near, far, strict=False):
            self.note(phase, f"{what} near and far", difference(one, other))
        for found in self.layer.difference_of_ends():
            self.note(phase, "bytes near and far", found)
        if compared:
            count = sum(m.count for m in members)
            try:
                want = self.layer.reference(before, members, [t[:count] for t in near[1:]])
                found = compare(near[0][:count], want, self.layer.case.kind)
                self.note(phase, "against the reference", "" if found else str(found))
            except AssertionError as error:
                self.note(phase, "against the reference", str(error))

    def note(self, phase: str, what: str, found: str) -> None:
        if found:
            self.wrong.append(f"{self.name}, {phase}, {what}: {found}")


def fill(run: Run, given: Given, until: int) -> None:
    """Store the long sequence up to `until`, and the first tokens of the others beside its beginning."""
    shorts = [Member(1 + i, 0, length - 4) for i, length in enumerate(SIZES.shorts)]
    size = SIZES.prompt if given.prompts else SIZES.chunk
    for first in range(0, until, SIZES.chunk):
        end = min(first + SIZES.chunk, until)
        starts = range(first, end, size)
        members = [Member(0, at, min(size, end - at), at if given.prompts else 0) for at in starts]
        # One new token more would be a decode, which comes first.
        assert all(m.count > 1 for m in members)
        run.step(f"prefill from {first}", [*members, *(shorts if first == 0 else [])], compared=False)


# Of the interpreter, one layer a family; the others take a minute.
QUICK = ("mha", "mla", "dsa", "gdn-small-states", "csa-all")
NAMES = [name if GPU or name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]


@pytest.mark.parametrize("name", NAMES)
def test_far_end(name: str, pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    given = LAYERS[name]()
    if given.apart:
        monkeypatch.setattr(triton_prefill, "_MAX_SCRATCH_BYTES", 0)
        monkeypatch.setattr(MhaInputs, "normed_by_head", False)
    case = Case(name, given.spec, (SIZES.context, *SIZES.shorts), given.draw, BF16, SIZES.page)
    family = FAMILIES[given.spec.family]
    if GPU and (reasons := family.backends[0].rejects(given.spec, chip_of(pool.device))):
        pytest.skip("; ".join(reasons))
    try:
        layer = Layer(case, family.backends[0], pool, by_page=given.by_page)
    except TooSmall as error:
        pytest.skip(str(error))
    layer.inputs.layer.update(given.scales)  # type: ignore[arg-type]
    if len(pool) == POOL_BYTES:
        reached = {at for at, (byte, element) in layer.offsets().items() if byte > BYTES and element > ELEMENTS}
        assert reached == layer.offsets().keys() - given.small, layer.offsets()
    run = Run(name, layer)
    # What follows the fill: a long and a short chunk, and three decodes.
    filled = SIZES.context - SIZES.long_chunk - SIZES.short_chunk - 3
    fill(run, given, filled)
    run.step("prefill behind the context", [Member(0, filled, SIZES.long_chunk)], compared=True)
    done = filled + SIZES.long_chunk
    run.step("short prefill behind the context", [Member(0, done, SIZES.short_chunk)], compared=True)
    starts = [done + SIZES.short_chunk, *(length - 4 for length in SIZES.shorts)]
    decodes = [[Member(i, start + n, 1) for i, start in enumerate(starts)] for n in range(3)]
    run.step("decode", decodes[0], compared=True)
    captured = CapturedDecode(layer, 4)
    for n, members in enumerate(decodes[1:]):
        run.step(f"replay {n} of a captured decode", members, compared=True, at=captured)
    assert decodes[-1][0].begin + 1 == SIZES.context
    assert not run.wrong, "\n".join(run.wrong)


@pytest.mark.parametrize("fault", ["reads elsewhere", "writes elsewhere"])
def test_a_fault_at_one_end_is_seen(fault: str, pool: torch.Tensor) -> None:
    given = LAYERS["mla"]()
    case = Case(fault, given.spec, (70, *SIZES.shorts), given.draw, BF16, SIZES.page)
    layer = Layer(case, FAMILIES["mla"].backends[0], pool)
    run = Run(fault, layer)
    run.step("prefill", [Member(0, 0, 66)], compared=True)
    assert not run.wrong, "\n".join(run.wrong)
    pages = layer.held["far"]["latent"][0]
    if fault == "reads elsewhere":
        pages[0] -= layer.used["latent"]
    else:
        # The pages that the far end writes are none of those that are compared.
        pages[-1] -= layer.used["latent"]
    run.step("decode", [Member(0, 66, 1)], compared=False)
    expected = "output" if fault == "reads elsewhere" else "bytes"
    assert any(expected in found for found in run.wrong), run.wrong


def test_a_choice_of_worse_scores_is_seen() -> None:
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    best = scores.topk(20).indices.sort().values
    hold_topk(scores, best)
    worse = best.clone()
    worse[1] = scores[1].topk(60).indices[40:].sort().values
    with pytest.raises(AssertionError, match="query 1"):
        hold_topk(scores, worse)


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    """What a layer took is the next one's to take."""
    yield
    if GPU:
        torch.cuda.empty_cache()
