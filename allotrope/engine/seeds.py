"""Random numbers by counter: one uniform number per (seed, step), the same wherever and whenever it is asked for.

Owns the hash that turns a sequence's seed and the index of an output token into a number. Keeps no state, so that a
sequence draws the same numbers whatever its neighbours, its place in the batch, or how often it was preempted.
Must not know about logits or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SEQUENCE_SALT = np.uint64(0xD1B54A32D192ED03)
_MASK = 2**64 - 1


def stream_keys(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """`key = mix(seed mod 2^64)`: starting points far apart, even for seeds 0, 1, 2.

    `seeds`: any integers. Returns [len(seeds)] keys for `uniforms`.
    """
    return _mix(np.array([int(seed) & _MASK for seed in seeds], dtype=np.uint64))


def uniforms(keys: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """`u = floor(mix(key + (step + 1) * golden) / 2^11) / 2^53`: the number that SplitMix64 gives at place `step`.

    `keys`: [N] from `stream_keys`. `steps`: [N] index of the token drawn, from 0.
    Returns [N] numbers in [0, 1), multiples of 2^-53. Source: Steele, Lea, Flood, OOPSLA 2014.
    """
    bits = _mix(keys + (steps + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request with `seed`: `seed` itself for index 0, so that asking for more
    sequences leaves the first as it was. All indices above 0 give different seeds. Returns 0 to 2^64 - 1 for those.
    """
    if index == 0:
        return seed
    key = stream_keys([seed])
    return int(_mix(key ^ _mix(np.array([index], dtype=np.uint64) + _SEQUENCE_SALT))[0])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, a bijection of 64-bit integers (array arithmetic wraps)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
