"""Limits repeated errors in the log to one line a second for each kind of error, with a count.

It must not know the meaning of the errors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

_SECONDS = 1.0
_MAX_KINDS = 256
# Packages that the server uses; their loggers have no handler of their own.
_FOREIGN = ("uvicorn", "asyncio")
_LIMITED = "allotrope_log_limited"

_KindKey = tuple[str, int, str, str]


def limit_repeated_errors() -> None:
    """Log each kind of error once a second in this process. Errors of uvicorn and asyncio go to the same log."""
    for handler in logging.getLogger("allotrope").handlers:
        handler.addFilter(RepeatFilter(handler))
        for name in _FOREIGN:
            logger = logging.getLogger(name)
            logger.handlers = [handler]
            logger.propagate = False
            logger.setLevel(logging.WARNING)


@dataclass
class _Kind:
    last: float
    held: list[logging.LogRecord] = field(default_factory=list)
    count: int = 0


class RepeatFilter(logging.Filter):
    """Passes the first error of each kind in a second, and summarizes the others in one line.

    Errors are of one kind if they have the same logger, level, exception class, and first line of the message before
    formatting. Records below ERROR pass freely (of uvicorn and asyncio, below WARNING).
    """

    def __init__(self, handler: logging.Handler, seconds: float = _SECONDS) -> None:
        super().__init__()
        self._handler = handler
        self._seconds = seconds
        self._kinds: OrderedDict[_KindKey, _Kind] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is written now."""
        foreign = record.name.partition(".")[0] in _FOREIGN
        if hasattr(record, _LIMITED) or record.levelno < (logging.WARNING if foreign else logging.ERROR):
            return True
        key = _key(record)
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None or (not kind.count and now - kind.last >= self._seconds):
                self._kinds[key] = _Kind(now)
                self._forget_oldest()
                return True
            kind.held = [record]
            kind.count += 1
            if kind.count == 1:
                timer = threading.Timer(max(0.0, kind.last + self._seconds - now), self._summarize, (kind,))
                timer.daemon = True
                timer.start()
        return False

    def _summarize(self, kind: _Kind) -> None:
        with self._lock:
            (record,), count = kind.held, kind.count
            kind.last, kind.held, kind.count = time.monotonic(), [], 0
        # The first record of this kind has written its traceback.
        text = f"{record.getMessage().partition(chr(10))[0]} ({count} more of this kind)"
        summary = logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, text, None, None)
        setattr(summary, _LIMITED, True)
        self._handler.handle(summary)

    def _forget_oldest(self) -> None:
        while len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)


def _key(record: logging.LogRecord) -> _KindKey:
    raised = record.exc_info[0] if record.exc_info else None
    return (record.name, record.levelno, str(record.msg).partition("\n")[0], raised.__name__ if raised else "")
