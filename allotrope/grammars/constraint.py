"""One output and the grammar that holds it: whether it has begun, where it stands, and which tokens may follow."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from allotrope.grammars.backend import Bits, CompiledGrammar, GrammarBackend, Matcher, pack
from allotrope.grammars.opening import Opening
from allotrope.grammars.vocabulary import Vocabulary


class Constraints:
    """A compiled grammar with what opens it: makes the `Constraint` of each output.

    `backend`: the one that compiled it. `opening`: None where the grammar holds from the start. `first`: the token that
    an output which has the opening begins with, where not every one does.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        grammar: CompiledGrammar,
        vocabulary: Vocabulary,
        opening: Opening | None,
        first: int | None = None,
    ) -> None:
        self.backend, self.opening, self.first = backend, opening, first
        self.first_mask = None if first is None else pack([first], len(vocabulary.tokens))
        self._grammar = grammar
        self.ends = pack(vocabulary.eos_ids, len(vocabulary.tokens))

    def constraint(self) -> Constraint:
        """The constraint of a new output."""
        return Constraint(self, self._grammar.matcher())


class Constraint:
    """The state of one output; it lives as long as the output, and goes on by `take` alone."""

    def __init__(self, of: Constraints, matcher: Matcher) -> None:
        self.of, self.matcher = of, matcher
        self._seen = 0 if of.opening is not None and of.first is None else None
        # Whether the first token is still to say if there is an opening.
        self._undecided = of.first is not None
        self._failure: str | None = None

    @property
    def begun(self) -> bool:
        """Whether the grammar holds already."""
        return self._seen is None

    @property
    def ended(self) -> bool:
        """Whether the output has its end token."""
        return self.matcher.ended

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow."""
        return self.begun and self.matcher.complete and not self._undecided

    @property
    def failure(self) -> str | None:
        """Why no token can follow, or None."""
        if self._failure is None and self.matcher.error is not None:
            self._failure = f"its grammar cannot be followed further: {self.matcher.error}"
        return self._failure

    def after(self, token: int) -> Constraint:
        """What holds behind a draft token; one that the grammar does not allow is its `failure`."""
        other = Constraint(self.of, self.matcher.fork())
        other._seen, other._undecided, other._failure = self._seen, self._undecided, self._failure
        if not (other.ended or other.failure):
            other.take(token)
        return other

    def take(self, token: int) -> None:
        """Go on by the chosen token; one that the grammar does not allow is a `failure`."""
        try:
            self._take(token)
        except Exception as error:
            # The border of a library: what it raises of one output ends that output, and not the engine.
            self.fail(error)

    def stop(self, reason: str) -> None:
        """Record a `failure` of what else holds for the output."""
        self._failure = reason

    def fail(self, error: Exception) -> None:
        """Record what the library raised as the `failure`."""
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        self._failure = f"its grammar cannot be followed further: {reason}"

    def _take(self, token: int) -> None:
        if self._undecided:
            self._undecided = False
            if token == self.of.first:
                self._seen = 0
                return
        if self._seen is None:
            if not self.matcher.take(token):
                self._failure = self.failure or f"token {token} does not follow its grammar"
            return
        assert self.of.opening is not None
        seen, rest = self.of.opening.advance(self._seen, token)
        self._seen = seen if rest is None else None
        if rest and not self.matcher.takes_bytes(rest):
            self._failure = f"token {token} ends with what its grammar cannot begin with"

    def let_open(self, bits: Bits, row: int) -> None:
        """Add the token that begins an opening to the mask, as long as it may come."""
        if self._undecided:
            bits[row] |= self.of.first_mask

    def fill_opening(self, bits: Bits, row: int) -> None:
        """Write the mask before the grammar holds."""
        assert self.of.opening is not None and self._seen is not None
        bits[row] = self.of.opening.mask(self._seen)


def fill_masks(constraints: Iterable[tuple[Constraint, int]], bits: Bits) -> None:
    """Write the mask of each (constraint, row) into `bits`: nothing for one that has a `failure`."""
    open_ones = []
    for constraint, row in constraints:
        if constraint.failure is not None:
            bits[row] = np.int32(0)
        elif constraint.begun:
            open_ones.append((constraint, row))
        else:
            constraint.fill_opening(bits, row)
    if not open_ones:
        return
    backend = open_ones[0][0].of.backend
    try:
        backend.fill([(constraint.matcher, row) for constraint, row in open_ones], bits)
    except Exception:
        # Which of them it was shows one by one.
        for constraint, row in open_ones:
            try:
                backend.fill([(constraint.matcher, row)], bits)
            except Exception as error:
                constraint.fail(error)
    for constraint, row in open_ones:
        if constraint.failure is not None:
            bits[row] = np.int32(0)
        else:
            constraint.let_open(bits, row)
