"""Compiles grammars in threads of its own, and keeps those that were used last.

Compiling is the only check of a grammar there is: whoever waits for the result learns whether it is supported before
the request is queued. The libraries release the interpreter while they work, so that steps go on meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from allotrope.errors import InvalidRequest
from allotrope.grammars.backend import GrammarBackend, load_backend
from allotrope.grammars.constraint import Constraints
from allotrope.grammars.limits import check_limits, refuse
from allotrope.grammars.opening import Opening, Tails, find_tails
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.request import Grammar

_WORKERS = 2
_KEPT = 64
COMPILE_SECONDS = 10.0


class GrammarCompiler:
    """`backend`: its name. `read_vocabulary`: called once, in a thread, at the first grammar."""

    def __init__(self, backend: str, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._name, self._read_vocabulary = backend, read_vocabulary
        self._locked = threading.Lock()
        self._loaded: tuple[GrammarBackend, Vocabulary] | None = None
        self._tails: dict[str, Tails] = {}
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
        self._kept: OrderedDict[Grammar, Future[Constraints]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[Constraints]:
        """The grammar, compiled at some time; one that is not supported is `InvalidRequest`. Call from one thread.

        A compilation that takes longer than `COMPILE_SECONDS` is refused; its thread is free again once the library
        gives up by its own limits.
        """
        grammar.check()
        found = self._kept.get(grammar)
        # A refusal names the field of its own request, so it is made anew.
        if found is None or (found.done() and found.exception() is not None):
            found = self._kept[grammar] = Future()
            self._pool.submit(self._settle, found, grammar)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return found

    def close(self) -> None:
        """Start no further compilation."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _settle(self, result: Future[Constraints], grammar: Grammar) -> None:
        """Give `result` the compiled grammar, the refusal, or the refusal for the time that it takes."""
        settling = threading.Lock()

        def settle(constraints: Constraints | None, error: BaseException | None = None) -> None:
            with settling:
                if result.done():
                    return
                if constraints is None:
                    result.set_exception(error)
                else:
                    result.set_result(constraints)

        timer = None
        try:
            backend, vocabulary = self._load()
            late = refuse(grammar, f"it takes longer than {COMPILE_SECONDS:g} s to compile")
            timer = threading.Timer(COMPILE_SECONDS, settle, (None, late))
            timer.daemon = True
            timer.start()
            settle(self._compile(grammar, backend, vocabulary))
        except InvalidRequest as error:
            settle(None, error)
        except BaseException as error:
            # The border of a library: whatever it raises of a client's grammar is a refusal, and not a dead engine. A
            # panic of Rust is no Exception, and who waits would wait for ever.
            settle(None, refuse(grammar, " ".join(str(error).split())[:300] or type(error).__name__))
        finally:
            if timer is not None:
                timer.cancel()

    def _compile(self, grammar: Grammar, backend: GrammarBackend, vocabulary: Vocabulary) -> Constraints:
        check_limits(grammar)
        compiled = backend.compile(grammar)
        opening = first = None
        if grammar.after is not None:
            tails = self._tails_of(grammar.after, vocabulary)
            opening = Opening(grammar.after, vocabulary, tails, lambda data: compiled.matcher().takes_bytes(data))
            if grammar.before is not None and (token := grammar.before.encode()) in vocabulary.tokens:
                first = vocabulary.tokens.index(token)
        return Constraints(backend, compiled, vocabulary, opening, first)

    def _tails_of(self, after: str, vocabulary: Vocabulary) -> Tails:
        """The tokens that end `after` and go on, found in the vocabulary once for each text."""
        with self._locked:
            found = self._tails.get(after)
            if found is None:
                if len(self._tails) >= _KEPT:
                    self._tails.clear()
                found = self._tails[after] = find_tails(after.encode(), vocabulary)
            return found

    def _load(self) -> tuple[GrammarBackend, Vocabulary]:
        with self._locked:
            if self._loaded is None:
                vocabulary = self._read_vocabulary()
                self._loaded = load_backend(self._name, vocabulary), vocabulary
            return self._loaded
