"""Each rank's share of a tensor-parallel layer: its query heads, and the KV heads that these read."""

from __future__ import annotations

import pytest
import torch

from allotrope.checkpoint.weights import fill_random
from allotrope.layers.build import Build
from allotrope.layers.mixers.mha import MhaMixer, MhaMixerSpec
from allotrope.layers.parallel import Parallel

DIM, HIDDEN = 8, 8


def mixer(heads: int, kv_heads: int, parallel: Parallel) -> MhaMixer:
    """Rank `parallel.rank`'s share of one layer, with the weights that are the same at every parallel size."""
    spec = MhaMixerSpec(
        hidden=HIDDEN,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        scale=0.5,
        rope=None,
        bias=True,
        qk_norm="all",
        v_head_dim=DIM + 2,
    )
    made = MhaMixer(spec, Build(parallel=parallel))
    fill_random(made, 0)
    return made


def by_head(share: MhaMixer) -> dict[str, torch.Tensor]:
    """Name -> [heads, numbers of a head], of weights and biases of q, k and v, and of the norms of q and k."""
    heads, groups = share.spec.num_heads, share.spec.num_kv_heads
    sizes = (heads * DIM, groups * DIM, groups * (DIM + 2))
    found = {}
    for name, parameter in share.qkv.named_parameters():
        for part, count, piece in zip("qkv", (heads, groups, groups), parameter.data.split(sizes), strict=True):
            found[f"{part}.{name}"] = piece.reshape(count, -1)
    for part, count, norm in (("q", heads, share.q_norm), ("k", groups, share.k_norm)):
        assert norm is not None and norm.weight is not None
        found[f"{part}.norm"] = norm.weight.data.view(count, -1)
    return found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 4), (8, 4, 4), (8, 4, 2), (8, 2, 4), (8, 2, 8), (4, 1, 4), (12, 3, 6)]
)
def test_a_rank_holds_the_kv_heads_of_its_query_heads(heads: int, kv_heads: int, size: int) -> None:
    """Where there are fewer KV heads than ranks, neighbours hold copies of one, and of the right one."""
    whole = by_head(mixer(heads, kv_heads, Parallel()))
    assert {name.split(".")[1] for name in whole} == {"weight", "bias", "norm"}
    share = heads // size
    for rank in range(size):
        mine = range(rank * share, (rank + 1) * share)
        read = sorted({head * kv_heads // heads for head in mine})
        for name, held in by_head(mixer(heads, kv_heads, Parallel(rank, size))).items():
            want = whole[name][list(mine) if name.startswith("q") else read]
            assert torch.equal(held, want), (rank, name)
