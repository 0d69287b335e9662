"""What a library that compiles grammars offers: the protocol of the backends, and their choice by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar

if TYPE_CHECKING:
    from allotrope.grammars.vocabulary import Vocabulary

Bits = NDArray[np.int32]
"""[N, W] packed masks: bit i % 32 of word i // 32 says whether id i may be chosen. W words hold the vocabulary."""


class Matcher(Protocol):
    """Where one output stands in its grammar."""

    @property
    def ended(self) -> bool:
        """Whether an end token was taken."""

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on: the grammar took too much to follow, or a token did not match."""

    def take(self, token: int) -> bool:
        """Go on by one token. Returns whether the grammar allows it."""

    def takes_bytes(self, data: bytes) -> bool:
        """Go on by bytes that are a part of a token. Returns whether the grammar allows them."""

    def fork(self) -> Matcher:
        """A matcher at the same place, which goes on by itself."""


class CompiledGrammar(Protocol):
    """A grammar that any number of outputs may follow at once."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""


class GrammarBackend(Protocol):
    """`name`: as options spell it."""

    name: str

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar that is within `limits`. Called from several threads.

        Raises `InvalidRequest` with what is not supported, in the library's words, or if no output can follow it.
        """

    def fill(self, matchers: Sequence[tuple[Any, int]], bits: Bits) -> None:
        """Write the mask of each (matcher, row) into `bits`; one that cannot go on has `error` set."""


PACKAGES = {"llguidance": "structured", "xgrammar": "xgrammar"}
"""Package of a backend -> the extra that installs it."""


def words(vocab_size: int) -> int:
    """Words of a packed mask."""
    return (vocab_size + 31) // 32


def pack(ids: Sequence[int] | NDArray[np.int64], vocab_size: int) -> NDArray[np.int32]:
    """[W] mask of exactly `ids`."""
    flags = np.zeros(words(vocab_size) * 32, dtype=np.uint8)
    flags[np.asarray(ids, dtype=np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def load_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """The backend `name`. Raises `InvalidRequest` if its package is not installed."""
    if find_spec(name) is None:
        raise InvalidRequest(
            f"structured output needs the package {name}. Run: pip install 'allotrope[{PACKAGES[name]}]'", "grammar"
        )
    if not vocabulary.eos_ids:
        raise InvalidRequest("structured output needs a model with an end token, and this one names none.", "grammar")
    if name == "xgrammar":
        from allotrope.grammars.xgrammar_backend import XGrammarBackend

        return XGrammarBackend(vocabulary)
    from allotrope.grammars.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary)
