"""What drafters that look up former tokens have in common: their interface, and the hash of an n-gram.

Must not know how drafts are verified.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from allotrope.speculative_config import SpeculativeConfig

MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15


class LookupDrafter(Protocol):
    """Drafts tokens of running sequences. `key` names a sequence from `start` to `end`."""

    def start(self, key: Hashable, prompt_ids: Sequence[int]) -> None:
        """A sequence begins with `prompt_ids`. A key that runs already begins anew."""

    def propose(self, key: Hashable, new_ids: Sequence[int], k: int) -> list[int]:
        """At most `k` drafts of the tokens behind `new_ids`, the tokens since the last call. `k` may be 0."""

    def end(self, key: Hashable) -> None:
        """The sequence ends. A key that does not run is passed over."""


def make_lookup_drafter(config: SpeculativeConfig) -> LookupDrafter:
    """The drafter of `config.method`, which is one that looks up former tokens."""
    from allotrope.engine.drafts.ngram import NgramDrafter
    from allotrope.engine.drafts.suffix import SuffixDrafter

    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    assert config.method == "suffix", config.method
    return SuffixDrafter(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )


def multipliers(count: int) -> list[int]:
    """Odd factors of the hash `sum_j (token[end - j] + 1) * factor[j] mod 2^64` of up to `count` tokens."""
    factors = [_BASE]
    while len(factors) < count:
        factors.append(factors[-1] * _BASE & MASK)
    return factors


def ngram_hashes(ids: npt.NDArray[np.uint64], n: int, factors: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Hashes of all n-grams of `ids`, by their ends n-1, n, ..."""
    count = len(ids) - n + 1
    hashes = np.zeros(max(count, 0), np.uint64)
    for j in range(n):
        hashes += (ids[n - 1 - j : n - 1 - j + len(hashes)] + np.uint64(1)) * np.uint64(factors[j])
    return hashes
