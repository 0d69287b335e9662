"""MLA prefill in MHA form by cuDNN: prompts without context, those of one padded length together.

Owns: which prompts it runs, the kernels that bring them into its layout and back, and its launch. Must not know: what
becomes of other prompts.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from allotrope.attention.batch import PageIndex, on_device
from allotrope.attention.mla.plan import Span
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.mla.triton_gather import blocks_of, gather_latent, padded
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations

# Fewest tokens of a prompt that cuDNN runs, and the multiple that they are padded to.
MIN_TOKENS = 1024
TOKEN_MULTIPLE = 256
# Rows of a program that brings prompts into cuDNN's layout; it divides what they are padded to.
PACK_BLOCK = 32


@dataclass(frozen=True)
class CudnnBatch:
    """Prompts without context, of one padded length, that cuDNN runs together.

    `length`: scratch rows of each, padded so that cuDNN builds few plans. `blocks`: as in `Chunk`. `prompts`: [n, 2]
    int32, first token of each in the step, number of tokens. `padded`: whether a prompt is shorter than `length`.
    """

    length: int
    blocks: torch.Tensor
    prompts: torch.Tensor
    padded: bool

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.length


def suits(span: Span, max_rows: int) -> bool:
    """Whether a prompt is long enough for cuDNN: short ones run faster in one batch, and a step has few long ones."""
    return span.position == 0 and MIN_TOKENS <= span.queries <= max_rows - max_rows % TOKEN_MULTIPLE


def supports(spec: MlaSpec, device: torch.device) -> bool:
    """Whether cuDNN supports these head dims in half precision, and was measured to be faster (on Hopper)."""
    chip = chip_of(device)
    if not chip.has_wgmma or not torch.backends.cudnn.is_available():
        return False
    sizes = (spec.nope_dim + spec.rope_dim, spec.v_head_dim)
    fits = all(size % 8 == 0 and 64 <= size <= 256 for size in sizes)
    return fits and spec.kv_dtype != torch.float32


def batches_of(spans: Sequence[Span], max_rows: int, device: torch.device) -> Iterator[CudnnBatch]:
    """Batches of prompts of one padded length, of at most `max_rows` rows. cuDNN has a plan for each size of a batch:
    they are powers of two."""
    by_length: dict[int, list[Span]] = {}
    for span in spans:
        length = -(-span.queries // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        by_length.setdefault(length, []).append(span)
    for length, group in by_length.items():
        first = 0
        while first < len(group):
            count = min(len(group) - first, max_rows // length)
            count = 1 << count.bit_length() - 1
            prompts = group[first : first + count]
            blocks = [
                block
                for i, span in enumerate(prompts)
                for block in blocks_of(span.request, 0, span.queries, i * length)
            ]
            yield CudnnBatch(
                length,
                on_device(blocks, torch.int32, device),
                on_device([(span.token, span.queries) for span in prompts], torch.int32, device),
                any(span.queries < length for span in prompts),
            )
            first += count


@pdl_jit
def pack_kernel(
    q_nope, q_pe, rope, prompts, length, q, k, q_t, q_h, pe_t, pe_h,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """q = (q_nope, q_pe) of BLOCK_T rows of a head, zeros behind a prompt, and k_pe of the head from `rope` [rows, R].

    `q`, `k`: [rows, H, D + R], `length` rows a prompt. `prompts`: [n, 2], first token, number of tokens.
    """
    gdc_wait()
    gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_T
    head = tl.program_id(1)
    prompt = prompts + first_row // length * 2
    offs_t = tl.arange(0, BLOCK_T)
    position = first_row % length + offs_t
    mask = (position < tl.load(prompt + 1))[:, None]
    token = (tl.load(prompt) + position).to(tl.int64)[:, None]
    row = (first_row + offs_t).to(tl.int64)[:, None]
    offs_d, offs_r = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    packed = (row * H + head) * (D + R)
    nope = tl.load(q_nope + token * q_t + head * q_h + offs_d, mask=mask & (offs_d < D), other=0.0)
    pe = tl.load(q_pe + token * pe_t + head * pe_h + offs_r, mask=mask & (offs_r < R), other=0.0)
    k_pe = tl.load(rope + row * R + offs_r, mask=offs_r < R, other=0.0)
    tl.store(q + packed + offs_d, nope, mask=offs_d < D)
    tl.store(q + packed + D + offs_r, pe, mask=offs_r < R)
    tl.store(k + packed + D + offs_r, k_pe, mask=offs_r < R)


@pdl_jit
def unpack_kernel(
    attended, prompts, length, out, a_n, a_h, a_t, out_t, out_h,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_T rows of a head of `attended` [n, H, length, V] to their tokens of `out` [T, H, V]."""
    gdc_wait()
    gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_T
    head = tl.program_id(1)
    index = first_row // length
    position = first_row % length + tl.arange(0, BLOCK_T)
    offs_v = tl.arange(0, BLOCK_V)[None, :]
    mask = (position < tl.load(prompts + index * 2 + 1))[:, None] & (offs_v < V)
    token = (tl.load(prompts + index * 2) + position).to(tl.int64)[:, None]
    source = attended + index.to(tl.int64) * a_n + head.to(tl.int64) * a_h + position.to(tl.int64)[:, None] * a_t
    tl.store(out + token * out_t + head * out_h + offs_v, tl.load(source + offs_v, mask=mask), mask=mask)


def attend(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    batch: CudnnBatch,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
    out: torch.Tensor,
) -> None:
    """Attend for a batch, and write its tokens of `out` [T, H, V]. cuDNN needs k_nope and k_pe in one tensor, for every
    head.

    Rows behind a prompt are zeros; the causal mask hides them from its queries.
    """
    new = q_nope.new_zeros if batch.padded else q_nope.new_empty
    latent, rope = new(batch.rows, spec.latent_dim), new(batch.rows, spec.rope_dim)
    gather_latent(spec, pools, paged, batch.blocks, (latent, rope), kv_scale)
    shape = (batch.rows, spec.num_heads, spec.nope_dim + spec.rope_dim)
    k, q = latent.new_empty(shape), latent.new_empty(shape)
    torch.bmm(latent.expand(spec.num_heads, -1, -1), w_uk.transpose(1, 2), out=k[..., : spec.nope_dim].transpose(0, 1))
    v = torch.mm(latent, w_uv.flatten(0, 1).t()).unflatten(1, (spec.num_heads, -1))
    grid, sizes = (batch.rows // PACK_BLOCK, spec.num_heads), {"BLOCK_T": PACK_BLOCK, "num_warps": 4}
    pack_kernel[grid](
        q_nope, q_pe, rope, batch.prompts, batch.length, q, k, *q_nope.stride()[:2], *q_pe.stride()[:2],
        H=spec.num_heads, D=spec.nope_dim, R=spec.rope_dim,
        BLOCK_D=padded(spec.nope_dim), BLOCK_R=padded(spec.rope_dim), **sizes,
    )  # fmt: skip
    queries, keys, values = (x.unflatten(0, (-1, batch.length)).transpose(1, 2) for x in (q, k, v))
    attended = _causal_attention(queries, keys, values, spec.scale)
    unpack_kernel[grid](
        attended, batch.prompts, batch.length, out, *attended.stride()[:3], *out.stride()[:2],
        V=spec.v_head_dim, BLOCK_V=padded(spec.v_head_dim), **sizes,
    )  # fmt: skip


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """cuDNN's, of q and k [n, H, length, D] and v [n, H, length, V]."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes in bf16: nope dim 128 with v_head_dim 128, and 192 with 256; rope dim 64."""
    found: list[Specialization] = []
    for name, nope, values in (("192/128", 128, 128), ("256/256", 192, 256)) if chip.has_wgmma else ():
        of_inputs = dict.fromkeys(("q_nope", "q_pe", "rope", "q", "k"), "*bf16:16") | {"prompts": "*i32:16"}
        of_inputs |= dict.fromkeys(("length", "q_t", "q_h", "pe_t", "pe_h"), "i32:16")
        sizes = {"H": 128, "D": nope, "R": 64, "BLOCK_D": padded(nope), "BLOCK_R": 64, "BLOCK_T": PACK_BLOCK}
        found.append(Specialization(f"mla cudnn pack {name}", pack_kernel, of_inputs, sizes, 4, 3))
        of_outputs = dict.fromkeys(("attended", "out"), "*bf16:16") | {"prompts": "*i32:16"}
        of_outputs |= dict.fromkeys(("length", "a_n", "a_h", "a_t", "out_t", "out_h"), "i32:16")
        sizes = {"V": values, "BLOCK_V": padded(values), "BLOCK_T": PACK_BLOCK}
        found.append(Specialization(f"mla cudnn unpack {name}", unpack_kernel, of_outputs, sizes, 4, 3))
    return found
